"""Sheets of pictures, and reconstructions in the visualizer and in the work directory."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import narrow_model
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.pictures import MARGIN, SIDE, TITLE_HEIGHT, ReconstructionHook, sheet, sheet_of_columns, with_legend
from beit_mm.registry import MODELS

CELL, TOP = SIDE + MARGIN, TITLE_HEIGHT + MARGIN


def test_tiles_stand_in_their_rows_in_their_own_shape():
    red, wide = torch.zeros(3, 4, 4), torch.ones(3, 10, 20) * torch.tensor([0, 0, 1.0])[:, None, None]
    red[0] = 1
    rows = [[('a', red), ('b', wide)], [('c', torch.ones(3, 4, 4)), ('d', red)], [('', red), ('', wide.mT)]]
    picture = np.asarray(sheet(rows))
    assert picture.shape == (MARGIN + 3 * CELL + 2 * TITLE_HEIGHT, MARGIN + 2 * CELL, 3)
    second = TOP + CELL + TITLE_HEIGHT
    places = [(0, TOP), (159, TOP + 159), (CELL + 80, second + 80), (80, second + CELL + 80)]  # the last has no title
    assert all(picture[y, MARGIN + x].tolist() == [255, 0, 0] for x, y in places)
    (blue, below), left = picture[[TOP + 75, TOP + 85], MARGIN + CELL + 155], picture[second + 80, MARGIN + 80]
    assert blue.tolist() == [0, 0, 255] and below.min() == left.min() == 255  # half as high as wide, and white
    tall = picture[second + CELL : second + CELL + SIDE, MARGIN + CELL :][:, [75, 85]]
    assert (tall[:, 0] == [0, 0, 255]).all() and tall[:, 1].min() == 255  # half as wide as high
    titles = picture[:TOP].min(axis=2)
    assert max(titles[:, :CELL].min(), titles[:, CELL:].min()) < 64


def test_three_of_many_channels_are_drawn_and_one_in_gray():
    bands = torch.arange(6).view(1, 6, 1, 1).expand(1, 6, 8, 8) / 5
    for drawn, channels, expected in (
        (bands, [], [0, 51, 102]),
        (bands, [[5, 3, 1]], [255, 153, 51]),
        (bands[:, 2:3], [[5, 3, 1]], [102, 102, 102]),
        (bands[:, 2:4], [[5, 3, 1]], [102, 102, 102]),
    ):
        picture = np.asarray(sheet_of_columns({'bands': drawn}, *channels))
        assert picture[TOP + SIDE // 2, MARGIN + SIDE // 2].tolist() == expected


def test_patches_keep_their_edges_and_photos_are_smooth():
    for pixels, smooth in ((SIDE // 10, False), (SIDE // 2, False), (96, True), (2 * SIDE, True)):
        halves = torch.zeros(3, pixels, pixels)
        halves[:, :, pixels // 2 - 1 :] = 1  # no edge of a pixel of the tile, if it is drawn at half the size
        tile = np.asarray(sheet([[('', halves)]]))[MARGIN : MARGIN + SIDE, MARGIN : MARGIN + SIDE]
        assert (len(np.unique(tile)) > 2) == smooth, pixels


def test_a_legend_has_a_square_of_each_colour_and_its_name_below_the_image():
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    image = Image.new('RGB', (300, 100), (90, 90, 90))
    picture = np.asarray(with_legend(image, [*zip(('red', 'the green one', 'blue'), colours, strict=True)]))
    assert np.array_equal(picture[:100, :300], np.asarray(image))
    corners = []
    for colour in colours:
        rows, columns = np.nonzero((picture == colour).all(axis=-1))
        side = rows.max() - rows.min() + 1
        assert len(rows) == side**2 >= 100
        beside = picture[rows.min() : rows.max(), columns.max() + 2 : columns.max() + side + 20].min(axis=-1)
        assert beside[:, :2].min() == 255 and beside.min() < 90  # a gap, then the name
        corners.append((rows.min(), columns.min()))
    (top, left), (other_top, other_left), (below, below_left) = corners  # two columns
    assert 100 < top == other_top < below < len(picture) - side and left == below_left < other_left - 20


def run(model, inputs: dict, folder: Path) -> list[tuple]:
    """What the visualizer is given by a validation after seven steps and by a test."""
    shown = []
    dataset = [dict(inputs={name: values[i] for name, values in inputs.items()}) for i in range(24)]
    loader = SimpleNamespace(dataset=dataset, collate_fn=default_collate)
    of_test = SimpleNamespace(dataset=dataset[::-1], collate_fn=default_collate)
    runner = SimpleNamespace(
        val_dataloader=loader, test_dataloader=of_test, model=model.eval(), iter=7, work_dir=folder
    )
    runner.visualizer = SimpleNamespace(add_image=lambda name, image, step: shown.append((name, image, step)))
    for batch in range(2):
        ReconstructionHook().after_val_iter(runner, batch, dict(inputs=inputs), [])
        ReconstructionHook().after_test_iter(runner, batch, dict(inputs=inputs), [])
    return shown


@pytest.mark.parametrize('kind, columns', [('pretraining', 4), ('tokenizer', 2), ('another', 0)])
def test_eight_images_spread_over_the_data_set_are_shown_and_saved(kind, columns, tmp_path):
    images = torch.randint(256, (24, 32, 32, 3), dtype=torch.uint8)
    inputs, model = dict(images=images.permute(0, 3, 1, 2) / 255), torch.nn.Linear(1, 1)
    if kind == 'pretraining':
        mask = torch.zeros(24, 4, 4, dtype=torch.bool)
        mask[:, 1:3, 1:3] = True
        inputs, model = dict(images=images, tokenizer_images=images, mask=mask), MODELS.build(narrow_model())
    elif kind == 'tokenizer':
        model = DiscreteVAE(hidden=8, vocab_size=16, embed_dims=8)
    shown = run(model, inputs, tmp_path)
    if not columns:
        assert not shown and not list(tmp_path.iterdir())
        return
    validation, test = shown
    assert (validation[0], validation[2], test[0]) == ('val_reconstruction.png', 7, 'test_reconstruction.png')
    Image.fromarray(test[1]).save(tmp_path / test[0])  # as MLflow's backend does
    for name, image in (('iter_7', validation[1]), ('test', test[1])):
        assert image.shape == (TOP + 8 * CELL, MARGIN + columns * CELL, 3)  # eight of 24 images
        with Image.open(tmp_path / f'pictures/{name}.png') as picture:
            assert np.array_equal(picture.convert('RGB'), image)
    for row in range(8):  # each pixel is drawn as a block
        tile = validation[1][TOP + row * CELL :, MARGIN:][:SIDE, :SIDE][:: SIDE // 32, :: SIDE // 32]
        assert np.abs(tile - images[3 * row].float().numpy()).max() <= 1
        tile = test[1][TOP + row * CELL :, MARGIN:][:SIDE, :SIDE][:: SIDE // 32, :: SIDE // 32]
        assert np.abs(tile - images[23 - 3 * row].float().numpy()).max() <= 1
    if kind == 'pretraining':
        masked = validation[1][TOP:, MARGIN + CELL :][SIDE // 2, SIDE // 2]
        assert np.abs(masked.astype(int) - 128).max() <= 1
