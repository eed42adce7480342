"""Large JPEGs are decoded no larger than is needed: the same boxes, and pixels close to those of full decoding."""

import functools
import random

import numpy as np
import pytest
from PIL import Image

from beit_mm.datasets import UnlabeledImages
from beit_mm.datasets.image_folder import scale_decoding
from beit_mm.datasets.reading import LoadImage
from beit_mm.datasets.transforms import TwoViewCenterCrop, TwoViewRandomResizedCrop
from beit_mm.registry import TRANSFORMS

MEAN, MOST = 1.5, 24  # levels between the views of scaled and of full decoding: on average, and of 999 in 1000 values
SIZE, EVEN = (1003, 1206), (1000, 1200)  # height and width, upright; the first is no multiple of a scale


@functools.cache
def photo(height, width):
    """Noise of all frequencies, as photos have it: each octave as strong as the next."""
    rng = np.random.default_rng(0)
    pixels = np.full((height, width, 3), 128.0, np.float32)
    for octave in range(1, 9):
        noise = Image.fromarray(rng.integers(0, 256, (2**octave + 1, 2**octave + 1, 3), dtype=np.uint8))
        pixels += (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)) - np.float32(127.5)) / 8
    return Image.fromarray(pixels.clip(0, 255).astype(np.uint8))


def save_photo(path, size=SIZE, tag=1, **options):
    exif = Image.Exif()
    exif[0x0112] = tag
    photo(*(size[::-1] if tag in (5, 6, 7, 8) else size)).save(path, quality=92, exif=exif, **options)
    return str(path)


def sample(path, step, seed=0, **options):
    """What LoadImage and a step make of a file, the size that was decoded, and what is drawn next."""
    load = LoadImage(**options)
    scale_decoding([load, step])
    random.seed(seed)
    results = load(dict(img_path=path))
    decoded = results['img'].shape[:2]
    return step(results), decoded, random.random()


def assert_close(found, full):
    """In every view; in `img` where there is none."""
    for view in {'images', 'tokenizer_images'} & full.keys() or ['img']:
        difference = np.abs(np.asarray(found[view], int) - np.asarray(full[view]))
        assert difference.mean() < MEAN and np.percentile(difference, 99.9) < MOST


@pytest.mark.parametrize(('tag', 'size'), [(1, SIZE), (5, SIZE), (2, EVEN), (6, EVEN)])
def test_views_are_those_of_full_decoding(tag, size, tmp_path):
    """In any orientation, and where no side is a multiple of the scale."""
    path = save_photo(tmp_path / 'photo.jpg', size, tag)
    for seed, crop in enumerate([TwoViewRandomResizedCrop(96, 48), TwoViewRandomResizedCrop(64, 80)]):
        (full, decoded, drawn), (found, smaller, after) = (sample(path, crop, seed, scaled=x) for x in (False, True))
        assert decoded == size and (smaller == size if size == SIZE and tag > 1 else smaller[0] < size[0] / 1.9)
        assert after == drawn  # whatever is drawn next is the same
        assert_close(found, full)


def test_the_smallest_scale_that_is_twice_the_view(tmp_path):
    path = save_photo(tmp_path / 'photo.jpg', EVEN)
    for side, height in ((251, 1000), (250, 500), (125, 250), (62, 125)):
        assert sample(path, TwoViewCenterCrop(side, None))[1][0] == height
        assert sample(path, TwoViewCenterCrop(8, side))[1][0] == height
    settings = dict(type='mmpretrain.ResizeEdge', edge='short', backend='pillow')
    for side, size in ((60, (125, 150)), (80, (250, 300))):  # which divides both sides, to keep their ratio
        resize = TRANSFORMS.build(dict(settings, scale=side))
        found, decoded, _ = sample(path, resize)
        assert decoded == size
        assert_close(found, sample(path, resize, scaled=False)[0])


@pytest.mark.parametrize('case', ['small', 'png', 'full', 'other transform', 'crops of its own', 'scaled'])
def test_datasets_decode_what_they_need_and_all_else_in_full(case, tmp_path):
    size = (800, 1200) if case == 'small' else EVEN
    photo(*size).save(tmp_path / ('photo.png' if case == 'png' else 'photo.jpg'), compress_level=1)
    crop = dict(type='beit_mm.RandomResizedCrop', size=32, scale=(0.9, 1))
    if case == 'other transform':
        crop = dict(type='mmpretrain.RandomResizedCrop', scale=32)
    pipeline = [dict(type='beit_mm.LoadImage', scaled=case != 'full'), crop]
    pipeline += [dict(type='beit_mm.MultiCrop')] * (case == 'crops of its own')
    (sample,) = UnlabeledImages(str(tmp_path), pipeline=pipeline)
    assert sample['ori_shape'] == ((125, 150) if case == 'scaled' else size)
