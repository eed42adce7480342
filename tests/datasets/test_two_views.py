"""Two views: the crop's law, what both share, and Pillow's pixels."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from scenes import paint_scene
from torchvision.transforms import RandomResizedCrop

from beit_mm.datasets.transforms import (
    TwoViewCenterCrop,
    TwoViewRandomResizedCrop,
    center_box,
    draw_box,
    resize_bicubic,
    resize_lanczos,
)


@pytest.fixture(scope='module')
def image():
    return paint_scene(0, 240, np.random.default_rng(3))[0]


def pillow(image, size, resample):
    return np.asarray(Image.fromarray(image).resize(size[::-1], resample)).astype(float)


RESIZES = [(resize_bicubic, Image.Resampling.BICUBIC), (resize_lanczos, Image.Resampling.LANCZOS)]


@pytest.mark.parametrize('box', [(240, 300), (60, 50), (200, 90), (1, 1), (3, 200)])
@pytest.mark.parametrize('size', [(224, 224), (40, 72)])
@pytest.mark.parametrize(('resize', 'resample'), RESIZES)
def test_resizing_is_pillows_of_every_row_and_then_of_every_column(image, box, size, resize, resample):
    crop = np.ascontiguousarray(image[: box[0], : box[1]])
    rows = resize(crop, (box[0], size[1]))
    both = resize(rows, size)
    for found, source in ((rows, crop), (both, rows)):
        assert np.abs(found - pillow(source, found.shape[:2], resample)).max() <= 1
    assert np.abs(resize(crop, size).astype(int) - both).max() <= 1
    # Pillow may filter columns first, and clips there: single pixels beside edges
    difference = np.abs(resize(crop, size) - pillow(crop, size, resample))
    assert difference.mean() < 0.3 and (difference > 2).mean() < 0.002


@pytest.mark.parametrize(('resize', 'resample'), RESIZES)
@pytest.mark.parametrize('size', [(112, 96), (300, 320)])
@pytest.mark.parametrize('channels', [1, 3, 16])
def test_any_number_of_channels_and_floating_point(image, resize, resample, size, channels):
    crop = np.concatenate([image[i : i + 200, i : i + 180] for i in range(0, 48, 8)], axis=2)[..., :channels]
    crop = (255 * (crop > crop.mean((0, 1)))).astype(np.uint8)  # edges, beside which the filters overshoot
    values = 0.999 * crop.astype(np.float32) + 0.25
    levels, smooth = resize(np.ascontiguousarray(crop), size), resize(np.ascontiguousarray(values), size)
    assert levels.dtype == np.uint8 and smooth.dtype == np.float32
    assert levels.shape == smooth.shape == (*size, channels)
    assert levels.flags.c_contiguous and smooth.flags.c_contiguous
    for channel in range(channels):
        alone = resize(np.ascontiguousarray(np.repeat(crop[..., channel : channel + 1], 3, axis=2)), size)[..., 0]
        assert np.abs(levels[..., channel].astype(int) - alone).max() <= (resize is resize_bicubic)
        # Pillow's images of floating-point numbers have one channel, and no limits
        assert np.abs(smooth[..., channel] - pillow(values[..., channel], size, resample).clip(0, 255)).max() < 0.02


def ramp(height=100, width=120):
    """Red tells the column, green the row."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 2, y * 2, 0 * x], -1).astype(np.uint8)


def test_views_share_box_and_flip():
    random.seed(0)
    crop = TwoViewRandomResizedCrop(size=64, second_size=32)
    flips = 0
    for _ in range(40):
        views = crop.transform(dict(img=ramp()))
        large, small = views['images'].astype(float), views['tokenizer_images'].astype(float)
        half = large.reshape(32, 2, 32, 2, 3).mean((1, 3))
        assert np.abs(half - small)[2:-2, 2:-2].max() < 3
        flips += large[0, 0, 0] > large[0, -1, 0]
    assert 10 < flips < 30


@pytest.mark.parametrize('scale', [1, 2], ids=['decoded in full', 'decoded at a half'])
def test_the_models_view_is_bicubic_and_the_tokenizers_lanczos(image, scale):
    crop = TwoViewRandomResizedCrop(size=48, second_size=48, flip_prob=0)
    top, left, height, width = box = (20, 36, 180, 200)
    results = crop(dict(img=image, drawn=([scale * side for side in box], False, scale * len(image))))
    part = image[top : top + height, left : left + width]
    for view, name in (('images', 'BICUBIC'), ('tokenizer_images', 'LANCZOS')):
        distances = {
            other: np.abs(results[view].astype(int) - pillow(part, (48, 48), Image.Resampling[other])).mean()
            for other in ('BILINEAR', 'HAMMING', 'BICUBIC', 'LANCZOS')
        }
        assert min(distances, key=distances.get) == name and distances[name] < 0.3, distances


@pytest.mark.parametrize('shape', [(100, 150), (100, 420), (300, 60), (1, 1)])
def test_box_law_is_torchvisions(shape):
    scale, ratio = (0.08, 1.0), (1 / 3, 2)  # so far apart that their logarithms show
    random.seed(0)
    torch.manual_seed(0)
    image = torch.empty(3, *shape)
    mine = np.array([draw_box(*shape, scale, ratio) for _ in range(4000)])
    theirs = np.array([RandomResizedCrop.get_params(image, scale, ratio) for _ in range(4000)])
    assert (mine >= 0).all() and (mine[:, :2] + mine[:, 2:] <= shape).all()
    # means and deviations agree within four standard errors
    error = 4 * theirs.std(0) * np.sqrt(2 / 4000) + 1e-9
    assert (np.abs(mine.mean(0) - theirs.mean(0)) <= error).all()
    assert (np.abs(mine.std(0) - theirs.std(0)) <= 1.5 * error).all()


def test_center_crop():
    assert center_box(100, 160, 1, 1) == (0, 30, 100, 100)
    assert center_box(161, 100, 1, 1) == (30, 0, 100, 100)
    views = TwoViewCenterCrop(size=50, second_size=25).transform(dict(img=ramp(100, 120)))
    assert views['images'].shape == (50, 50, 3) and views['tokenizer_images'].shape == (25, 25, 3)
    assert abs(int(views['images'][25, 25, 0]) - 120) <= 3  # the middle stays the middle
    wide = TwoViewCenterCrop(size=(30, 60), second_size=None).transform(dict(img=ramp(100, 100)))
    assert wide['images'].shape == (30, 60, 3) and 'tokenizer_images' not in wide
    assert wide['images'][..., 1].min() > 45  # top quarter left out
