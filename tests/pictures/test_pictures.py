"""Sheets of pictures, and reconstructions in the visualizer and in the work directory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import narrow_model
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.pictures import (
    MARGIN,
    SIDE,
    TITLE_HEIGHT,
    ReconstructionHook,
    pixels_of,
    sheet,
    sheet_of_columns,
    shortened,
)
from beit_mm.registry import MODELS

CELL, TOP = SIDE + MARGIN, TITLE_HEIGHT + MARGIN


def colour(picture: np.ndarray, x: int, y: int) -> list[int]:
    return picture[y, x].tolist()


def test_tiles_stand_in_their_rows_in_their_own_shape(tmp_path):
    red, wide = torch.zeros(3, 4, 4), torch.ones(3, 10, 20) * torch.tensor([0, 0, 1.0])[:, None, None]
    red[0] = 1
    figure = sheet([[('a', red), ('b', wide)], [('c', None), ('d', red)], [('', red)]])
    picture = pixels_of(figure)
    assert picture.shape == (MARGIN + 3 * CELL + 2 * TITLE_HEIGHT, MARGIN + 2 * CELL, 3)
    figure.savefig(tmp_path / 'sheet.png')
    assert np.array_equal(np.asarray(Image.open(tmp_path / 'sheet.png').convert('RGB')), picture)
    assert colour(picture, MARGIN, TOP) == colour(picture, MARGIN + 159, TOP + 159) == [255, 0, 0]
    assert colour(picture, MARGIN + CELL + 155, TOP + 75) == [0, 0, 255]
    assert colour(picture, MARGIN + CELL + 155, TOP + 85) == [255, 255, 255]  # half as high as wide
    second = TOP + CELL + TITLE_HEIGHT
    assert colour(picture, MARGIN + 80, second + 80) == [255, 255, 255]
    assert colour(picture, MARGIN + CELL + 80, second + 80) == [255, 0, 0]
    assert colour(picture, MARGIN + 80, second + CELL + 80) == [255, 0, 0]  # without a title
    titles = picture[:TOP].min(axis=2)
    assert max(titles[:, :CELL].min(), titles[:, CELL:].min()) < 64


def test_wide_images_waste_no_height():
    wide = torch.zeros(3, 40, 80)
    assert pixels_of(sheet([[('', wide)], [('', wide)]])).shape == (MARGIN + 2 * (80 + MARGIN), MARGIN + CELL, 3)


def test_a_long_title_loses_its_beginning_and_any_name_can_be_drawn():
    assert shortened('folder/image.jpg', 12) == '../image.jpg' and shortened('image.jpg', 9) == 'image.jpg'
    names = ['$x^$', 'a\udcffb\nc', '\u4e2d.jpg', 'W' * 100]
    picture = pixels_of(sheet([[(name, torch.zeros(3, 8, 8)) for name in names]]))
    gap = MARGIN + SIDE  # nothing of a title reaches into the next tile
    assert all((picture[:TITLE_HEIGHT, gap + i * CELL : gap + i * CELL + 2] == 255).all() for i in range(4))


def test_a_quarter_of_an_image_stays_a_quarter():
    image = torch.zeros(1, 3, 4, 4)
    image[..., :2, :2] = 1
    cell = pixels_of(sheet_of_columns({'one': image, 'two': image}))[TOP : TOP + SIDE, MARGIN : MARGIN + SIDE]
    assert (cell == 255).all(axis=2).sum() == SIDE * SIDE // 4 and (cell == 0).all(axis=2).sum() == 3 * SIDE * SIDE // 4


def test_three_of_many_channels_are_drawn_and_one_in_gray():
    bands = torch.arange(6).view(1, 6, 1, 1).expand(1, 6, 8, 8) / 5
    middle = MARGIN + SIDE // 2, TOP + SIDE // 2
    assert colour(pixels_of(sheet_of_columns({'bands': bands})), *middle) == [0, 51, 102]
    assert colour(pixels_of(sheet_of_columns({'bands': bands}, [5, 3, 1])), *middle) == [255, 153, 51]
    for number in (1, 2):
        picture = pixels_of(sheet_of_columns({'bands': bands[:, 2 : 2 + number]}, [5, 3, 1]))
        assert colour(picture, *middle) == [102, 102, 102]
    with pytest.raises(ValueError, match='expected three'):
        ReconstructionHook(channels=[0])


def run(model, inputs: dict, tmp_path) -> list[tuple]:
    """What the visualizer is given by a validation after seven steps and by a test."""
    shown = []
    number = len(inputs['images'])
    loader = SimpleNamespace(
        dataset=[dict(inputs={name: values[i] for name, values in inputs.items()}) for i in range(number)],
        collate_fn=default_collate,
    )
    runner = SimpleNamespace(
        val_dataloader=loader,
        test_dataloader=loader,
        model=model.eval(),
        iter=7,
        work_dir=str(tmp_path),
        visualizer=SimpleNamespace(add_image=lambda name, image, step: shown.append((name, image, step))),
    )
    hook = ReconstructionHook()
    for batch in range(2):
        hook.after_val_iter(runner, batch, dict(inputs=inputs), [])
        hook.after_test_iter(runner, batch, dict(inputs=inputs), [])
    return shown


@pytest.mark.parametrize('kind, columns', [('pretraining', 4), ('tokenizer', 2)])
def test_eight_images_spread_over_the_data_set_are_shown_and_saved(kind, columns, tmp_path):
    if kind == 'pretraining':
        model = MODELS.build(narrow_model())
        mask = torch.zeros(24, 4, 4, dtype=torch.bool)
        mask[:, 1:3, 1:3] = True
        images = torch.randint(256, (24, 32, 32, 3), dtype=torch.uint8)
        inputs = dict(images=images, tokenizer_images=images, mask=mask)
        expected = images
    else:
        model = DiscreteVAE(hidden=8, vocab_size=16, embed_dims=8)
        inputs = dict(images=torch.rand(24, 3, 32, 32))
        expected = 255 * inputs['images'].permute(0, 2, 3, 1)
    validation, test = run(model, inputs, tmp_path)
    assert (validation[0], validation[2], test[0]) == ('val_reconstruction', 7, 'test_reconstruction')
    for name, image in (('iter_7', validation[1]), ('test', test[1])):
        assert image.shape == (TOP + 8 * CELL, MARGIN + columns * CELL, 3)  # eight of 24 images
        with Image.open(tmp_path / f'pictures/{name}.png') as picture:
            assert np.array_equal(picture.convert('RGB'), image)
    block = SIDE // 32  # each pixel is drawn as one
    for row in range(8):
        top = TOP + row * CELL
        original = validation[1][top : top + SIDE : block, MARGIN : MARGIN + SIDE : block]
        assert np.abs(original - expected[3 * row].float().numpy()).max() <= 1
    if kind == 'pretraining':
        masked = validation[1][TOP:, MARGIN + CELL :][SIDE // 2, SIDE // 2]
        assert np.abs(masked.astype(int) - 128).max() <= 1


def test_other_models_have_none(tmp_path):
    assert run(torch.nn.Linear(1, 1), dict(images=torch.zeros(1, 3, 8, 8)), tmp_path) == []
    assert not list(tmp_path.iterdir())
