"""Pictures of images beside what a model makes of them, and the hook that shows them."""

from collections.abc import Sequence
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

from beit_mm.engine.steps import unwrap, written_if_possible
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError

NUM_IMAGES = 8
MARGIN = 4  # pixels between images
TITLE_HEIGHT = 16  # pixels above each column
SIDE = 160  # pixels: small images are enlarged to it, so that patches can be told apart


def titled_grid(columns: dict[str, Tensor], channels: Sequence[int] = (0, 1, 2)) -> Image.Image:
    """Draws one row for each image of a batch; `columns`: title -> float (B, C, H, W) in [0, 1], any H and W.

    Args:
        channels: the three of C that are drawn as red, green and blue; of fewer the first is drawn in gray.
    """
    columns = {title: F.interpolate(images.float().cpu(), (SIDE, SIDE)) for title, images in columns.items()}
    columns = {title: x[:, channels if x.shape[1] > 2 else [0, 0, 0]] for title, x in columns.items()}
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
    """Shows what a pretraining or a tokenizer makes of eight held-out images, at each validation and test.

    They are spread evenly over the data set: where class follows class, each is of another one.

    Of a pretraining: image, masked image, and its decoded visual tokens, the right ones and the predicted ones; of a
    DiscreteVAE: image and decoded tokens. They go to the run's visualizer, hence to TensorBoard and others, and as
    `iter_<step>.png` and `test.png` to `pictures/` in the work directory. Other models have none.

    Args:
        channels: of images with many bands, the three that are drawn as red, green and blue, counted from 0; of images
            with one or two the first is drawn in gray.
    """

    def __init__(self, channels: Sequence[int] = (0, 1, 2)):
        if len(channels) != 3:
            raise UserError(f'channels is {channels}; expected three, for red, green and blue')
        self.channels = list(channels)

    @master_only
    def _after_iter(
        self, runner: Runner, batch_idx: int, data_batch: dict, outputs: list | None = None, mode: str = 'train'
    ) -> None:
        """Draws them once in a validation or test; mmengine calls it after each batch of any loop."""
        model = unwrap(runner)
        if mode == 'train' or batch_idx > 0 or not isinstance(model, (BEiTPretrainer, DiscreteVAE)):
            return
        loader = runner.test_dataloader if mode == 'test' else runner.val_dataloader
        number = min(NUM_IMAGES, len(loader.dataset))
        samples = [loader.dataset[i * len(loader.dataset) // number] for i in range(number)]
        with torch.no_grad():
            columns = model.pictures(model.data_preprocessor(loader.collate_fn(samples))['inputs'])
        picture = titled_grid(columns, self.channels)
        path = Path(runner.work_dir, 'pictures', 'test.png' if mode == 'test' else f'iter_{runner.iter}.png')
        with written_if_possible(runner):
            runner.visualizer.add_image(f'{mode}_reconstruction', np.asarray(picture), step=runner.iter)
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)
            print_log(f'Pictures: {path}', logger='current')
