"""Crops, colours, erased boxes: their laws, what views share, and the pixels of Pillow, torchvision and timm."""

import random
from collections import Counter
from functools import partial

import numpy as np
import pytest
import torch
from mmengine.registry import DefaultScope
from mmpretrain.datasets import RandAugment as RandAugmentBGR
from PIL import Image, ImageEnhance
from scenes import paint_scene
from timm.data.random_erasing import RandomErasing as TimmRandomErasing
from torchvision.transforms import RandomResizedCrop
from torchvision.transforms.functional import adjust_hue

from beit_mm.datasets import MultiCrop, PackViews, RandAugment, RandomErasing, multi_crop
from beit_mm.datasets.masking import BlockwiseMask, RandomMask
from beit_mm.datasets.multi_crop import shift_hue
from beit_mm.datasets.reading import LoadBands
from beit_mm.datasets.transforms import (
    TwoViewCenterCrop,
    TwoViewColorJitter,
    TwoViewRandomResizedCrop,
    draw_box,
    jitter_images,
    resize_bicubic,
    resize_lanczos,
)


@pytest.fixture(scope='module')
def image():
    return paint_scene(0, 240, np.random.default_rng(3))[0]


MASK = partial(BlockwiseMask, grid=(14, 14), num_masked=75)


@pytest.mark.parametrize(
    ('transform', 'settings', 'message'),
    [
        (TwoViewColorJitter, dict(device='cuda'), 'cuda'),
        (MASK, dict(num_masked=197), 'num_masked is 197'),
        (MASK, dict(num_masked=74.5), '74.5; expected a whole number from 1 to 196'),
        (RandomMask, dict(grid=(14, 14), num_masked=78.4), '78.4; expected a whole number'),
        (MASK, dict(num_masked=0.4, variant='paper'), '0.4; expected a number from 1 to 196'),  # a ratio
        (MASK, dict(num_masked=196, min_block=190), '190'),  # round(sqrt(190)) = 14
        (MASK, dict(grid=(1, 14), num_masked=5), r'\(1, 14\)'),  # no block is lower than one row
        (LoadBands, dict(bands=[0, 1], low=[0], high=[1]), r'bands=\[0, 1\], low=\[0\].* 1 to 16'),
        (LoadBands, dict(low=[0, 5], high=[1, 5]), 'low < high'),
    ],
)
def test_impossible_settings_are_refused(transform, settings, message):
    with pytest.raises(ValueError, match=message):
        transform(**settings)


Y, X = np.mgrid[:200, :250]
RAMP = np.stack([X, Y, 0 * X], -1).astype(np.uint8)  # red tells the column, green the row


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
    assert levels.min() == 0 and levels.max() == 255
    for found, dtype in ((levels, np.uint8), (smooth, np.float32)):
        assert found.dtype == dtype and found.shape == (*size, channels) and found.flags.c_contiguous
    for channel in range(channels):
        alone = resize(np.ascontiguousarray(np.repeat(crop[..., channel : channel + 1], 3, axis=2)), size)[..., 0]
        assert np.abs(levels[..., channel].astype(int) - alone).max() <= (resize is resize_bicubic)
        # Pillow's images of floating-point numbers have one channel, and no limits
        assert np.abs(smooth[..., channel] - pillow(values[..., channel], size, resample).clip(0, 255)).max() < 0.02


def test_views_share_box_and_flip():
    random.seed(0)
    crop = TwoViewRandomResizedCrop(size=64, second_size=32)
    flips = 0
    for _ in range(40):
        views = crop.transform(dict(img=RAMP))
        large, small = views['images'].astype(float), views['tokenizer_images'].astype(float)
        half = large.reshape(32, 2, 32, 2, 3).mean((1, 3))
        assert np.abs(half - small)[2:-2, 2:-2].max() < 3
        flips += large[0, 0, 0] > large[0, -1, 0]
    assert 10 < flips < 30


@pytest.mark.parametrize('scale', [1, 2], ids=['decoded in full', 'decoded at a half'])
def test_the_models_view_is_bicubic_and_the_tokenizers_lanczos(image, scale):
    crop = TwoViewRandomResizedCrop(size=48, second_size=48, flip_prob=0)
    top, left, height, width = box = (20, 36, 180, 200)
    drawn = tuple(scale * side for side in box), False, scale * len(image)
    results = crop(dict(img=image, drawn_crop=drawn))
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


def test_boxes_that_are_clipped_have_maes_law():
    """Of an image of 500 x 375 they have 0.518 of its area on average, torchvision's 0.46."""
    (height, width), rng = (375, 500), np.random.default_rng(0)
    random.seed(0)
    area, aspect = height * width * rng.uniform(0.08, 1, 20000), np.exp(rng.uniform(*np.log([3 / 4, 4 / 3]), 20000))
    sides = np.minimum(np.sqrt([area / aspect, area * aspect]).round(), [[height], [width]])
    boxes = np.array([draw_box(height, width, (0.08, 1.0), (3 / 4, 4 / 3), clips=True) for _ in range(20000)])
    assert (boxes >= 0).all() and (boxes[:, :2] + boxes[:, 2:] <= (height, width)).all()
    for found, expected in zip(boxes[:, 2:].T, sides, strict=True):
        assert abs(found.mean() - expected.mean()) < 2 and abs(found.std() - expected.std()) < 2
    assert np.prod(boxes[:, 2:], axis=1).mean() / (height * width) == pytest.approx(0.518, abs=0.006)


def test_center_crop():
    views = TwoViewCenterCrop(size=(50, 100), second_size=25).transform(dict(img=RAMP))
    assert views['images'].shape == (50, 100, 3) and views['tokenizer_images'].shape == (25, 25, 3)
    # 250 x 125 pixels in the middle
    assert np.abs(views['images'][[0, -1], [0, -1], :2].astype(int) - [[1, 38], [248, 161]]).max() <= 1


# --- colours of two views ------------------------------------------------------------------------


@pytest.fixture(scope='module')
def originals():
    return [paint_scene(i, 200, np.random.default_rng(i))[0] for i in range(10)]


def pillow_jitter(pixels, factors, order, level=None):
    """Pillow's three enhancers in the drawn order; contrast with its own or a given gray level."""
    image = Image.fromarray(pixels)
    for operation in map(int, order):
        if operation == 1 and level is not None:
            image = Image.blend(Image.new('RGB', image.size, (level, level, level)), image, factors[1])
        else:
            enhancer = (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color)[operation]
            image = enhancer(image).enhance(factors[operation])
    return np.asarray(image).astype(int)


def draw(seed, image, **settings):
    random.seed(seed)
    return TwoViewColorJitter(**settings)(dict(img=image, images=image, tokenizer_images=image[:32, :32]))


def test_both_views_get_pillows_jitter_here_and_in_a_batch_on_the_models_device(originals):
    params, expected, means = [], [], []
    for seed, original in enumerate(originals * 3):
        found, deferred = draw(seed, original), draw(seed, original, device='model')
        assert np.array_equal(deferred['images'], original)
        params.append(deferred['jitter'])
        factors, level, order = np.split(deferred['jitter'].astype(float), (3, 4))
        expected.append(pillow_jitter(original, factors, order, int(level[0])))
        difference = np.abs(found['images'] - expected[-1])
        means.append(difference.mean())
        assert difference.max() <= 3
        assert np.array_equal(found['images'][:32, :32], found['tokenizer_images'])
        # contrast uses the gray mean of the whole image after what comes before
        before = pillow_jitter(original, factors, order[: order.tolist().index(1)]).astype(np.uint8)
        assert abs(level[0] - np.asarray(Image.fromarray(before).convert('L')).mean()) < 1.5
    assert np.mean(means) < 0.01 and len({tuple(param[4:]) for param in params}) == 6
    # Pillow cuts off up to a level in each of three steps, later factors stretch it
    views, params = (torch.from_numpy(np.stack(x)).float() for x in ([i[:64, :64] for i in originals * 3], params))
    difference = jitter_images(views.permute(0, 3, 1, 2), params).permute(0, 2, 3, 1).numpy()
    difference -= np.stack([image[:64, :64] for image in expected])
    assert np.abs(difference).max() < 5 and np.abs(difference).mean() < 1.8


def test_factors_are_uniform_and_all_orders_equally_likely():
    random.seed(0)
    jitter, image = TwoViewColorJitter(0.4, 0.2, 0.1, device='model'), np.zeros((2, 2, 3), np.uint8)
    params = np.array([jitter(dict(img=image))['jitter'] for _ in range(3000)])
    for factors, strength in zip(params[:, :3].T, (0.4, 0.2, 0.1), strict=True):
        quartiles = np.quantile((factors - 1) / strength, (0, 0.25, 0.5, 0.75, 1))
        assert np.abs(quartiles - (-1, -0.5, 0, 0.5, 1)).max() < 0.07
    orders = Counter(map(tuple, params[:, 4:]))
    assert len(orders) == 6 and all(abs(count - 500) < 100 for count in orders.values())


# --- DINO's crops ---------------------------------------------------------------------------------

CROPS = ('images', 'second_images', 'local_images')
FLAT = np.full((40, 40, 3), 200, np.uint8)


@pytest.fixture
def plain(monkeypatch):
    """Crops without flip and augmentation, but for those of a given name."""

    def switch_off(kept=None):
        for name in {'FLIP_PROB', 'JITTER_PROB', 'GRAY_PROB', 'SOLARIZE_PROB', 'BLUR_PROBS'} - {kept}:
            monkeypatch.setattr(multi_crop, name, Counter() if 'BLUR' in name else 0.0)

    return switch_off


def crops_of(image, seed=0, **settings):
    random.seed(seed)
    return MultiCrop(**settings).transform(dict(img=image))


def test_sizes_and_a_first_crop_that_is_there_stays(image):
    crops = crops_of(image)
    assert all(crops[name].dtype == np.uint8 for name in CROPS)
    shapes = {name: tuple(view.shape) for name, view in PackViews()(crops)['inputs'].items() if name != 'unreadable'}
    assert shapes == dict(images=(224, 224, 3), second_images=(224, 224, 3), local_images=(8, 96, 96, 3))
    first = TwoViewRandomResizedCrop(64, 32).transform(dict(img=image))
    crops = MultiCrop((32, 48), num_local=0).transform(dict(first))
    assert crops['images'] is first['images'] and crops['second_images'].shape == (32, 48, 3)
    assert 'local_images' not in crops


def test_areas_of_the_boxes(plain):
    """The range of a crop's colours is its size."""
    plain()
    settings = dict(size=64, scale=(0.3, 0.9), local_size=32, local_scale=(0.05, 0.2), num_local=1)
    crops = [crops_of(RAMP, seed, **settings) for seed in range(200)]
    for name, (smallest, largest) in zip(CROPS, ((0.3, 0.9), (0.3, 0.9), (0.05, 0.2)), strict=True):
        pixels = np.stack([views[name].reshape(-1, 3) for views in crops]).astype(float)
        width, height, _ = np.ptp(pixels, axis=1).T + 1
        areas, spread = width * height / X.size, largest - smallest
        assert smallest - 0.02 < areas.min() < smallest + 0.15 * spread, name
        assert largest - 0.3 * spread < areas.max() < largest + 0.03, name


@pytest.mark.parametrize(
    ('name', 'picture', 'changed', 'expected'),
    [
        ('FLIP_PROB', RAMP, lambda crop: crop[0, 0, 0] > crop[0, -1, 0], (0.5, 0.5, 0.5)),
        ('JITTER_PROB', FLAT, lambda crop: (crop != 200).any(), (0.8, 0.8, 0.8)),
        ('GRAY_PROB', RAMP, lambda crop: np.ptp(crop, axis=-1).max() == 0, (0.2, 0.2, 0.2)),
        ('BLUR_PROBS', FLAT, lambda crop: not crop.any(), (1.0, 0.1, 0.5)),
        ('SOLARIZE_PROB', FLAT, lambda crop: (crop == 55).all(), (0, 0.2, 0)),
    ],
)
def test_how_often_crops_are_changed(plain, monkeypatch, name, picture, changed, expected):
    plain(kept=name)
    sigmas, draws = [], 400
    monkeypatch.setattr(multi_crop.cv2, 'GaussianBlur', lambda crop, size, sigma: (sigmas.append(sigma), crop * 0)[1])
    transform = MultiCrop(size=16, local_size=16, num_local=1)
    random.seed(0)
    crops = [transform.transform(dict(img=picture)) for _ in range(draws)]
    for crop, share in zip(CROPS, expected, strict=True):
        found = np.mean([changed(views[crop].reshape(16, 16, 3)) for views in crops])
        assert abs(found - share) <= 4 * (share * (1 - share) / draws) ** 0.5, (crop, found)
    assert not sigmas or 0.1 <= min(sigmas) < 0.15 and 1.95 < max(sigmas) <= 2.0


def test_hue_is_torchvisions(image):
    for shift in (-0.1, -0.03, 0.0, 0.05, 0.1):
        expected = np.asarray(adjust_hue(Image.fromarray(image), shift)).astype(int)
        difference = np.abs(shift_hue(image, shift) - expected)
        assert difference.mean() < 1.5 and difference.max() <= 16


# --- erased boxes ---------------------------------------------------------------------------------

SIZE = (60, 100)


def timm_box(erase: TimmRandomErasing) -> tuple | None:
    rows, columns = torch.where(erase(torch.full((1, *SIZE), 100.0))[0] != 100)
    if not len(rows):
        return None
    return rows[0].item(), columns[0].item(), np.ptp(rows.numpy()) + 1, np.ptp(columns.numpy()) + 1


@pytest.mark.parametrize(('prob', 'area'), [(0.25, (0.02, 1 / 3)), (1.0, (0.1, 0.9))])
def test_boxes_are_timms_and_old_ones_do_not_survive(prob, area):
    ours = RandomErasing() if prob == 0.25 else RandomErasing(prob, area)
    theirs = TimmRandomErasing(prob, *area, mode='pixel', device='cpu')
    for seed in range(300):
        random.seed(seed)
        expected = timm_box(theirs)
        random.seed(seed)
        assert ours(dict(img=np.zeros((*SIZE, 3), np.uint8), erase_box=(0, 0, 2, 2))).get('erase_box') == expected


# --- RandAugment ----------------------------------------------------------------------------------


@pytest.mark.parametrize('kind', ['ColorTransform', 'Rotate'])
def test_rand_augment_is_mmpretrains_with_red_and_blue_exchanged(kind, image):
    """Gray is a weighted sum of the channels; what rotates into the picture has a colour."""
    policies = [dict(type=kind, prob=1.0, magnitude_range=(0, 30))]
    settings = dict(policies=policies, num_policies=1, magnitude_level=9)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        ours = RandAugment(**settings, hparams=dict(pad_val=[124, 116, 104]))
        theirs = RandAugmentBGR(**settings, hparams=dict(pad_val=[104, 116, 124]))
    np.random.seed(0)
    found = ours(dict(img=image))['img']
    np.random.seed(0)
    expected = theirs(dict(img=np.ascontiguousarray(image[..., ::-1])))['img']
    assert np.array_equal(found, expected[..., ::-1]) and found.flags.c_contiguous and (found != image).any()
