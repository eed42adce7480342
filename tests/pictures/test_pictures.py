"""Reconstructions: the right colours at the right place, in the visualizer and in the work directory."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import narrow_model
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.pictures.pictures import MARGIN, SIDE, TITLE_HEIGHT, ReconstructionHook, titled_grid
from beit_mm.registry import MODELS

CELL, TOP = SIDE + MARGIN, TITLE_HEIGHT + MARGIN


def test_columns_and_rows_stand_where_they_belong():
    red, blue = torch.zeros(2, 3, 8, 8), torch.zeros(2, 3, 16, 16)
    red[:, 0] = 1
    blue[1, 2] = 1
    picture = titled_grid({'left': red, 'right': blue})
    assert picture.size == (MARGIN + 2 * CELL, TOP + 2 * CELL)
    x, y = MARGIN + SIDE // 2, TOP + SIDE // 2
    assert picture.getpixel((x, y)) == (255, 0, 0)
    assert picture.getpixel((x + CELL, y)) == (0, 0, 0)
    assert picture.getpixel((x + CELL, y + CELL)) == (0, 0, 255)
    assert picture.getpixel((1, y)) == (255, 255, 255)
    titles = np.asarray(picture.convert('L'))[:TITLE_HEIGHT]
    assert max(titles[:, :CELL].min(), titles[:, CELL:].min()) < 64


def test_a_quarter_of_an_image_stays_a_quarter():
    image = torch.zeros(1, 3, 4, 4)
    image[..., :2, :2] = 1
    cell = titled_grid({'one': image, 'two': image}).crop((MARGIN, TOP, MARGIN + SIDE, TOP + SIDE))
    assert {colour: count for count, colour in cell.getcolors()} == {
        (255, 255, 255): SIDE * SIDE // 4,
        (0, 0, 0): 3 * SIDE * SIDE // 4,
    }


def test_three_of_many_channels_are_drawn_and_one_in_gray():
    bands = torch.arange(6).view(1, 6, 1, 1).expand(1, 6, 8, 8) / 5
    middle = MARGIN + SIDE // 2, TOP + SIDE // 2
    assert titled_grid({'bands': bands}).getpixel(middle) == (0, 51, 102)
    assert titled_grid({'bands': bands}, [5, 3, 1]).getpixel(middle) == (255, 153, 51)
    for number in (1, 2):
        assert titled_grid({'bands': bands[:, 2 : 2 + number]}, [5, 3, 1]).getpixel(middle) == (102, 102, 102)
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
            assert np.array_equal(picture, image)
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
