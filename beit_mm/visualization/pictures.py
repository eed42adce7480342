"""Rows of small pictures with a title above each column, and the hook that writes them."""
from pathlib import Path

import torch
import torch.nn.functional as F
from mmengine.dist import master_only
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from PIL import Image, ImageDraw
from torch import Tensor

from beit_mm.registry import HOOKS

MARGIN = 4  # pixels between pictures
TITLE_HEIGHT = 16  # pixels above each column
SIDE = 160  # pixels: small pictures are enlarged to it, so that patches can be told apart


def draw_columns(columns: dict[str, Tensor]) -> Image.Image:
    """Draws one row an image and one titled column an entry.

    Args:
        columns: title -> float (B, 3, H, W) in [0, 1]; all with the same B.

    Returns:
        One RGB picture.
    """
    count = len(next(iter(columns.values())))
    cell = SIDE + MARGIN
    canvas = Image.new(
        'RGB', (MARGIN + cell * len(columns), TITLE_HEIGHT + MARGIN + cell * count), 'white')
    draw = ImageDraw.Draw(canvas)
    for column, (title, images) in enumerate(columns.items()):
        left = MARGIN + cell * column
        draw.text((left, MARGIN), title, fill='black')
        images = F.interpolate(images.float().cpu(), (SIDE, SIDE), mode='nearest')
        pixels = (images.clamp(0, 1) * 255).round().byte().permute(0, 2, 3, 1).numpy()
        for row in range(count):
            canvas.paste(Image.fromarray(pixels[row]), (left, TITLE_HEIGHT + MARGIN + cell * row))
    return canvas


@HOOKS.register_module()
class PictureHook(Hook):
    """Writes what a model makes of the first held-out images, at each validation and test.

    The model gives the pictures: `pictures(inputs)` returns columns for `draw_columns`; one without it, such as a
    classifier, draws none. They lie in
    `pictures/` of the work directory, `iter_<step>.png`, newest last.

    Args:
        num_images: rows.
    """

    def __init__(self, num_images: int = 8):
        self.num_images = num_images

    def after_val_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: list) -> None:
        """Draws the first batch."""
        if batch_idx == 0:
            self._draw(runner, data_batch, f'iter_{runner.iter}.png')

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: list) -> None:
        """Draws the first batch."""
        if batch_idx == 0:
            self._draw(runner, data_batch, 'test.png')

    @master_only
    def _draw(self, runner: Runner, data_batch: dict, name: str) -> None:
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        if not hasattr(model, 'pictures'):
            return
        batch = {key: values[:self.num_images] for key, values in data_batch['inputs'].items()}
        with torch.no_grad():
            columns = model.pictures(model.data_preprocessor(dict(inputs=batch))['inputs'])
        path = Path(runner.work_dir) / 'pictures' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draw_columns(columns).save(path)
        print_log(f'Pictures: {path}', logger='current')
