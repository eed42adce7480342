"""Pictures of images beside what a model makes of them, and the hook that shows them."""

from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from PIL import Image, ImageDraw
from torch import Tensor
from torchvision.transforms.functional import to_pil_image
from torchvision.utils import make_grid

from beit_mm.engine.checks import unwrap
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.registry import HOOKS

NUM_IMAGES = 8
MARGIN = 4  # pixels between images
TITLE_HEIGHT = 16  # pixels above each column
SIDE = 160  # pixels: small images are enlarged to it, so that patches can be told apart


def titled_grid(columns: dict[str, Tensor]) -> Image.Image:
    """Draws one row for each image of a batch; `columns`: title -> float (B, 3, H, W) in [0, 1], any H and W."""
    columns = {title: F.interpolate(images.float().cpu(), (SIDE, SIDE)) for title, images in columns.items()}
    cells = torch.stack(list(columns.values()), dim=1).flatten(0, 1)  # B * columns, 3, SIDE, SIDE
    grid = make_grid(cells.clamp(0, 1), nrow=len(columns), padding=MARGIN, pad_value=1)
    picture = Image.new('RGB', (grid.shape[2], TITLE_HEIGHT + grid.shape[1]), 'white')
    picture.paste(to_pil_image(grid), (0, TITLE_HEIGHT))
    draw = ImageDraw.Draw(picture)
    for column, title in enumerate(columns):
        draw.text((MARGIN + (SIDE + MARGIN) * column, MARGIN), title, fill='black')
    return picture


@HOOKS.register_module()
class ReconstructionHook(Hook):
    """Shows what a pretraining or a tokenizer makes of the first held-out images, at each validation and test.

    Of a pretraining: image, masked image, and its decoded visual tokens, the right ones and the predicted ones; of a
    DiscreteVAE: image and decoded tokens. They go to the run's visualizer, hence to TensorBoard and others, and as
    `iter_<step>.png` and `test.png` to `pictures/` in the work directory. Other models have none.
    """

    @master_only
    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs: list | None = None, mode: str = 'train'
    ) -> None:
        """Draws the first batch of a validation or test; mmengine calls it after each batch of any loop."""
        model = unwrap(runner)
        if mode == 'train' or batch_idx > 0 or not isinstance(model, (BEiTPretrainer, DiscreteVAE)):
            return
        inputs = {name: values[:NUM_IMAGES] for name, values in data_batch['inputs'].items()}
        with torch.no_grad():
            picture = titled_grid(model.pictures(model.data_preprocessor(dict(inputs=inputs))['inputs']))
        runner.visualizer.add_image(f'{mode}_reconstruction', np.asarray(picture), step=runner.iter)
        path = Path(runner.work_dir, 'pictures', 'test.png' if mode == 'test' else f'iter_{runner.iter}.png')
        path.parent.mkdir(parents=True, exist_ok=True)
        picture.save(path)
        print_log(f'Pictures: {path}', logger='current')
