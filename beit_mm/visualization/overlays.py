"""Labels laid over their original in the colours of their classes, and the hook that saves predictions."""
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from PIL import Image, ImageDraw, ImageFont, ImageOps

from beit_mm.registry import HOOKS, TRANSFORMS

OPACITY = 0.5  # of the colours, outlines apart
MARGIN = 6  # pixels between parts of a picture
TEXT = 13  # pixels, height of letters
CELL = (256, 208)  # pixels (width, height) of a picture in a sheet


def overlay(original: np.ndarray, labels: np.ndarray, palette: Sequence[Sequence[int]]) -> np.ndarray:
    """Mixes a original with the colours of its labels; outlines have the full colour.

    Args:
        original: uint8 (H, W, 3), RGB.
        labels: integers (H, W), indices into `palette`; all others, such as 255, leave the original as it is.
        palette: colours [red, green, blue] of 0-255.

    Returns:
        uint8 (H, W, 3).
    """
    colours = np.zeros((256, 3))
    colours[:len(palette)] = palette
    opacity = np.where(labels < len(palette), OPACITY, 0)
    edge = np.zeros(labels.shape, dtype=bool)
    edge[:, 1:] |= labels[:, 1:] != labels[:, :-1]
    edge[1:] |= labels[1:] != labels[:-1]
    opacity[edge & (opacity > 0)] = 1
    opacity = opacity[..., None]
    return np.rint(original * (1 - opacity) + colours[labels] * opacity).astype(np.uint8)


def draw_overlay(original: np.ndarray, labels: np.ndarray, classes: Sequence[str],
                 palette: Sequence[Sequence[int]]) -> Image.Image:
    """The overlay in the original's size, and below it the classes that are there, largest first.

    Args:
        original, labels, palette: As `overlay`.
        classes: Their names.
    """
    return _with_legend(Image.fromarray(overlay(original, labels, palette)), [labels], classes, palette)


def draw_sheet(images: Sequence[np.ndarray], columns: dict[str, Sequence[np.ndarray]], classes: Sequence[str],
               palette: Sequence[Sequence[int]]) -> Image.Image:
    """A row for each original: the original, and its overlay with the labels of each column; one legend for all.

    Args:
        images: uint8 (H, W, 3), RGB, of any sizes.
        columns: title -> labels of each original.
        classes, palette: As `draw_overlay`.
    """
    width, height = CELL[0] + MARGIN, CELL[1] + MARGIN
    top = TEXT + 2 * MARGIN
    sheet = Image.new('RGB', (MARGIN + width * (1 + len(columns)), top + height * len(images)), 'white')
    draw = ImageDraw.Draw(sheet)
    for column, title in enumerate(('original', *columns)):
        draw.text((MARGIN + width * column, MARGIN), title, fill='black', font=ImageFont.load_default(TEXT))
    for row, original in enumerate(images):
        large = ImageOps.contain(Image.fromarray(original), CELL)
        cells = [large]
        for labels in columns.values():
            enlarged = Image.fromarray(labels[row].astype(np.uint8)).resize(large.size, Image.Resampling.NEAREST)
            cells.append(Image.fromarray(overlay(np.asarray(large), np.asarray(enlarged), palette)))
        for column, cell in enumerate(cells):
            left = MARGIN + width * column + (CELL[0] - cell.width) // 2
            sheet.paste(cell, (left, top + height * row + (CELL[1] - cell.height) // 2))
    return _with_legend(sheet, [labels for column in columns.values() for labels in column], classes, palette)


def _with_legend(picture: Image.Image, labels: Sequence[np.ndarray], classes: Sequence[str],
                 palette: Sequence[Sequence[int]]) -> Image.Image:
    """The picture above the colours and names of the classes in `labels`, those of most pixels first."""
    counts = sum(np.bincount(part.ravel(), minlength=256)[:len(classes)] for part in labels)
    present = [label for label in np.argsort(-counts, kind='stable') if counts[label]]
    font = ImageFont.load_default(TEXT)
    line, places, left, row = TEXT + MARGIN, [], MARGIN, 0
    widest = picture.width  # a narrow original's classes have names, too
    for label in present:
        width = TEXT + MARGIN + round(font.getlength(classes[label]))
        if left > MARGIN and left + width > picture.width:
            left, row = MARGIN, row + 1
        places.append((left, picture.height + MARGIN + row * line))
        widest = max(widest, MARGIN + width)
        left += width + 2 * MARGIN
    canvas = Image.new('RGB', (widest, picture.height + MARGIN + (row + 1) * line), 'white')
    canvas.paste(picture, (0, 0))
    draw = ImageDraw.Draw(canvas)
    for label, (x, y) in zip(present, places, strict=True):
        draw.rectangle((x, y, x + TEXT - 1, y + TEXT - 1), fill=tuple(int(part) for part in palette[label]))
        draw.text((x + TEXT + MARGIN, y - 1), classes[label], fill='black', font=font)
    return canvas


@HOOKS.register_module()
class SavePredictionsHook(Hook):
    """Saves what a test predicts: `FOLDER/labels/NAME.png` and `FOLDER/overlays/NAME.jpg`, NAME as the original's below
    the test dataset's folder.

    Labels are numbered as in the annotations: one higher where the dataset reduces the zero label, as ADE20K's server
    wants them.

    Args:
        folder: where to. None: nothing is saved.
    """

    def __init__(self, folder: str | None = None):
        self.folder = folder and Path(folder)
        self.load = TRANSFORMS.build(dict(type='beit_mm.LoadImage'))

    def before_test(self, runner: Runner) -> None:
        """A folder that cannot be made shows before the test."""
        if self.folder:
            for kind in ('labels', 'overlays'):
                (self.folder / kind).mkdir(parents=True, exist_ok=True)

    def after_test_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: Sequence) -> None:
        """Saves the predictions of a batch."""
        if not self.folder:
            return
        dataset = runner.test_dataloader.dataset
        root = Path(dataset.data_prefix['img_path'])
        for sample in outputs:
            original = Path(sample.img_path)
            name = original.relative_to(root) if original.is_relative_to(root) else original.name
            labels = sample.pred_sem_seg.data[0].cpu().numpy().astype(np.uint8)
            numbered = Image.fromarray(labels + int(sample.get('reduce_zero_label', False)))
            picture = draw_overlay(self.load(dict(img_path=str(original)))['img'], labels,
                                   dataset.metainfo['classes'], dataset.metainfo['palette'])
            for kind, suffix, image in (('labels', '.png', numbered), ('overlays', '.jpg', picture)):
                file = (self.folder / kind / name).with_suffix(suffix)
                file.parent.mkdir(parents=True, exist_ok=True)
                image.save(file)

    def after_test_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Says where they are."""
        if self.folder:
            print_log(f'Predictions: {self.folder / "labels"}, drawn in {self.folder / "overlays"}', logger='current')
