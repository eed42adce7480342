"""Large JPEGs are decoded no larger than is needed: the same boxes, and pixels close to those of full decoding."""

import random

import numpy as np
import pytest
from PIL import Image

from beit_mm.datasets import UnlabeledImages
from beit_mm.datasets.image_folder import scale_decoding
from beit_mm.datasets.reading import LoadImage, UnreadableImageError, read_image
from beit_mm.datasets.samplers import SampleKey
from beit_mm.datasets.transforms import RandomResizedCrop, TwoViewCenterCrop, TwoViewRandomResizedCrop
from beit_mm.registry import TRANSFORMS

MEAN, MOST = 1.5, 24  # levels between the views of scaled and of full decoding: on average, and of 999 in 1000 values
SIZE, EVEN = (1203, 1606), (1200, 1600)  # height and width, upright; the first is no multiple of a scale


def save_photo(path, size=SIZE, tag=1, **options):
    """Noise of all frequencies, as photos have it: each octave as strong as the next."""
    rng = np.random.default_rng(0)
    height, width = size[::-1] if tag in (5, 6, 7, 8) else size
    pixels = np.full((height, width, 3), 128.0)
    for octave in range(1, 9):
        noise = Image.fromarray(rng.integers(0, 256, (2**octave + 1, 2**octave + 1, 3), dtype=np.uint8))
        pixels += (np.asarray(noise.resize((width, height), Image.Resampling.BICUBIC)) - 127.5) / 8
    exif = Image.Exif()
    exif[0x0112] = tag
    Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(path, quality=92, exif=exif, **options)
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


@pytest.mark.parametrize(('tag', 'size'), [(1, SIZE), (3, SIZE), (5, SIZE), (8, SIZE), (2, EVEN), (6, EVEN)])
def test_views_are_those_of_full_decoding(tag, size, tmp_path):
    """In any orientation, and where no side is a multiple of the scale."""
    path = save_photo(tmp_path / 'photo.jpg', size, tag)
    for seed, crop in enumerate([TwoViewRandomResizedCrop(96, 48), TwoViewRandomResizedCrop(64, 80)]):
        (full, decoded, drawn), (found, smaller, after) = (sample(path, crop, seed, scaled=x) for x in (False, True))
        assert decoded == size and (smaller[0] < size[0] / 1.9 or size == SIZE and tag > 1)
        assert after == drawn  # whatever is drawn next is the same
        assert_close(found, full)


def test_the_smallest_scale_that_is_twice_the_view(tmp_path):
    path = save_photo(tmp_path / 'photo.jpg', EVEN)
    for side, height in ((400, 1200), (300, 600), (151, 600), (150, 300), (76, 300), (75, 150), (8, 150)):
        assert sample(path, TwoViewCenterCrop(side, None))[1][0] == height
        assert sample(path, TwoViewCenterCrop(8, side))[1][0] == height
    settings = dict(type='mmpretrain.ResizeEdge', edge='short', backend='pillow')
    for side, size in ((60, (150, 200)), (80, (300, 400))):  # which divides both sides, to keep their ratio
        resize = TRANSFORMS.build(dict(settings, scale=side))
        found, decoded, _ = sample(path, resize)
        assert decoded == size
        assert_close(found, sample(path, resize, scaled=False)[0])


@pytest.mark.parametrize('case', ['small', 'png', 'full', 'other transform', 'crops of its own'])
def test_all_else_is_decoded_in_full(case, tmp_path):
    path = tmp_path / ('photo.png' if case == 'png' else 'photo.jpg')
    size = (800, 1200) if case == 'small' else EVEN
    if case == 'png':
        Image.new('RGB', size[::-1], 'red').save(path)
    else:
        save_photo(path, size)
    steps = [LoadImage(scaled=case != 'full'), RandomResizedCrop(32, scale=(0.9, 1))]
    if case == 'other transform':
        steps[1:] = [TRANSFORMS.build(dict(type='mmpretrain.RandomResizedCrop', scale=32))]
    if case == 'crops of its own':
        steps.append(TRANSFORMS.build(dict(type='beit_mm.MultiCrop')))
    scale_decoding(steps)
    assert np.array_equal(steps[0](dict(img_path=str(path)))['img'], read_image(str(path)))


def test_datasets_decode_what_they_need(tmp_path, monkeypatch):
    save_photo(tmp_path / 'photo.jpg', EVEN)
    shapes, transform = [], LoadImage.transform

    def spy(self, results):
        shapes.append(transform(self, results)['img'].shape)
        return results

    monkeypatch.setattr(LoadImage, 'transform', spy)
    views = []
    for scaled in (True, False):
        pipeline = [
            dict(type='beit_mm.LoadImage', scaled=scaled),
            dict(type='beit_mm.TwoViewRandomResizedCrop', size=48, second_size=24, scale=(0.8, 1)),
            dict(type='beit_mm.TwoViewColorJitter'),
            dict(type='beit_mm.PackViews'),
        ]
        views.append(UnlabeledImages(str(tmp_path), pipeline=pipeline)[SampleKey(0, 0, 0)]['inputs'])
    assert shapes == [(150, 200, 3), (*EVEN, 3)]
    assert_close(*views)


def test_a_large_jpeg_that_ends_early_is_named(tmp_path):
    path = save_photo(tmp_path / 'photo.jpg')
    data = (tmp_path / 'photo.jpg').read_bytes()
    (tmp_path / 'photo.jpg').write_bytes(data[: len(data) // 2])
    with pytest.raises(UnreadableImageError, match='photo.jpg: cannot be read'):
        sample(path, TwoViewCenterCrop(32))


@pytest.mark.parametrize('mode', ['L', 'CMYK'])
def test_large_jpegs_of_other_modes(mode, tmp_path):
    path = save_photo(tmp_path / 'photo.jpg')
    Image.open(path).convert(mode).save(path)
    found, full = (sample(path, TwoViewCenterCrop(64), scaled=scaled)[0] for scaled in (True, False))
    assert_close(found, full)
