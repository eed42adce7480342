"""Overlays: the palette's colours where the labels are, the image elsewhere, names of what is there."""
import numpy as np
from PIL import Image

from beit_mm.visualization.overlays import CELL, OPACITY, draw_overlay, draw_sheet, overlay

CLASSES = ('sky', 'road', 'car')
PALETTE = [[0, 100, 200], [250, 10, 90], [30, 220, 40]]


def image_and_labels() -> tuple[np.ndarray, np.ndarray]:
    image = np.random.default_rng(0).integers(0, 256, (60, 80, 3), dtype=np.uint8)
    labels = np.zeros((60, 80), np.uint8)
    labels[30:] = 1
    labels[:, 70:] = 255
    return image, labels


def swatches(picture: Image.Image, below: int) -> set[tuple]:
    """Colours of the palette in the part under a row of pixels."""
    pixels = np.asarray(picture)[below:].reshape(-1, 3)
    return {tuple(colour) for colour in PALETTE if (pixels == colour).all(axis=1).sum() > 100}


def test_colours_are_mixed_outlined_and_left_out():
    image, labels = image_and_labels()
    mixed = overlay(image, labels, PALETTE).astype(int)
    for rows, colour in ((slice(0, 30), PALETTE[0]), (slice(31, 60), PALETTE[1])):
        expected = image[rows, :70] * (1 - OPACITY) + np.array(colour) * OPACITY
        assert np.abs(mixed[rows, :70] - expected).max() <= 0.5
    assert (mixed[30, :70] == PALETTE[1]).all()
    assert (mixed[:, 70:] == image[:, 70:]).all()


def test_the_legend_names_what_is_there_and_nothing_else():
    image, labels = image_and_labels()
    picture = draw_overlay(image, labels, CLASSES, PALETTE)
    assert (np.asarray(picture)[:60] == overlay(image, labels, PALETTE)).all()
    assert swatches(picture, 60) == {tuple(PALETTE[0]), tuple(PALETTE[1])}
    nothing = draw_overlay(image, np.full_like(labels, 255), CLASSES, PALETTE)
    assert not swatches(nothing, 60)


def test_a_sheet_has_a_row_for_each_image_of_any_size():
    image, labels = image_and_labels()
    turned = np.ascontiguousarray(image.transpose(1, 0, 2)), np.full((80, 60), 2)
    sheet = draw_sheet([image, turned[0]], dict(annotation=[labels, turned[1]], prediction=[labels, turned[1]]),
                       CLASSES, PALETTE)
    assert sheet.width > 3 * CELL[0] and sheet.height > 2 * CELL[1]
    assert swatches(sheet, 2 * CELL[1] + 40) == set(map(tuple, PALETTE))
