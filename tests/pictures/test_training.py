"""What a config trains on and how: samples, against the pixels."""

import runpy
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import ROOT, run_tool
from label_maps import make_label_maps
from mmengine.registry import init_default_scope
from PIL import Image

from beit_mm.datasets.samplers import SampleKey
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.pictures import MARGIN, SIDE, TITLE_HEIGHT
from beit_mm.registry import DATASETS

browse = SimpleNamespace(**runpy.run_path(str(ROOT / 'tools/visualization/browse_dataset.py')))


@pytest.fixture
def cfg(pretrain_config):
    init_default_scope(pretrain_config.default_scope)
    return pretrain_config


def tile(picture: np.ndarray, row: int, column: int) -> np.ndarray:
    left, top = MARGIN + column * (SIDE + MARGIN), TITLE_HEIGHT + MARGIN + row * (SIDE + MARGIN)
    return picture[top : top + SIDE, left : left + SIDE]


def centers(drawn: np.ndarray) -> np.ndarray:
    """The pixels of an image of side 32 in a tile."""
    scale = SIDE // 32
    return drawn[scale // 2 :: scale, scale // 2 :: scale].astype(int)


def test_samples_are_those_of_the_run_with_their_masks_gray(cfg):
    picture = np.asarray(browse.draw_samples(cfg, 3, 5))
    dataset = DATASETS.build(cfg.train_dataloader.dataset)
    for row, index in enumerate((0, 4, 8)):
        inputs = dataset[SampleKey(5, 0, index)]['inputs']
        image = inputs['images'].numpy()
        mask = inputs['mask'].numpy().repeat(8, 0).repeat(8, 1)
        drawn, masked = (centers(tile(picture, row, column)) for column in (0, 1))
        assert np.abs(drawn - image).max() <= 1
        assert (np.abs(masked[mask] - 127) <= 1).all() and mask.any()
        assert np.abs(masked[~mask] - image[~mask]).max() <= 1
    without = np.asarray(browse.draw_samples(cfg, 3, 5, tokens=False))
    assert without.shape == picture[:, : -SIDE - MARGIN].shape  # the tokens' column


def test_the_seed_is_the_configs_unless_it_is_given(tmp_path):
    root, pictures = make_label_maps(tmp_path), []
    for seed in ([], ['randomness.seed=4'], ['randomness.seed=4', '--seed', 0], ['--seed', 4]):
        words = '--out', tmp_path / 'out.png', '--number', 1, '--cfg-options', f'data_root={root}', *seed
        run_tool('visualization/browse_dataset.py', ROOT / 'configs/demo/camvid_setr_pup.py', *words)
        pictures.append((tmp_path / 'out.png').read_bytes())
    assert pictures[0] == pictures[2] != pictures[1] == pictures[3]


def test_label_maps_are_drawn_beside_their_images(tmp_path):
    root = make_label_maps(tmp_path)
    words = '--number', 2, '--out', tmp_path / 'out.png', '--cfg-options', f'data_root={root}'
    run_tool('visualization/browse_dataset.py', ROOT / 'configs/demo/camvid_setr_pup.py', *words)
    picture = np.asarray(Image.open(tmp_path / 'out.png').convert('RGB'))
    assert picture.shape == (TITLE_HEIGHT + MARGIN + 2 * (SIDE + MARGIN), MARGIN + 2 * (SIDE + MARGIN), 3)
    image, labels = tile(picture, 0, 0), tile(picture, 0, 1)
    parts = [image[(labels == colour).all(axis=2)] for colour in distinct_colours(3)]  # red, green and blue ones
    seen = {channel: part.mean(axis=0).argmax() for channel, part in enumerate(parts) if len(part) > 50}
    assert len(seen) > 1 and all(channel == brightest for channel, brightest in seen.items())  # if augmented too


def test_crops_of_images_narrower_than_a_crop_are_padded(tmp_path):
    root = make_label_maps(tmp_path)
    for part in ('images', 'annotations'):
        with Image.open(file := root / f'{part}/training/1.png') as image:
            image.resize((600, 20), Image.Resampling.NEAREST).save(file)
    words = '--number', 4, '--out', tmp_path / 'out.png', '--cfg-options', f'data_root={root}'
    run_tool('visualization/browse_dataset.py', ROOT / 'configs/demo/camvid_setr_pup.py', *words)
    picture = np.asarray(Image.open(tmp_path / 'out.png').convert('RGB'))
    image, labels = (tile(picture, 1, column) for column in (0, 1))
    assert (image[-20:] == 0).all() and (labels[-20:] == 255).all()


def test_a_picture_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    with pytest.raises(SystemExit, match='samples.svg'):
        run_tool('visualization/browse_dataset.py', tmp_path / 'gone.py', '--out', tmp_path / 'samples.svg')
