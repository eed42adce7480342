"""Images are read right whatever their form, large JPEGs no larger than is needed, or refused with their path."""

import functools
import os
import random
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image
from tifffile import imwrite

from beit_mm.datasets import reading
from beit_mm.datasets.image_folder import UnlabeledImages, scale_decoding
from beit_mm.datasets.reading import LoadImage, UnreadableImageError, open_image, orientation, read_image
from beit_mm.datasets.samplers import SampleKey
from beit_mm.datasets.transforms import PackViews, TwoViewCenterCrop, TwoViewRandomResizedCrop
from beit_mm.registry import TRANSFORMS


def save(path, image, **kwargs):
    image.save(path, **kwargs)
    return str(path)


def exif_of(tag: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = tag
    return exif


@pytest.fixture
def scene():
    """Smooth, without symmetry, 40 x 30 pixels."""
    y, x = np.mgrid[:30, :40]
    return Image.fromarray(np.stack([x * 6, y * 8, 128 + x - y], -1).astype(np.uint8))


@pytest.mark.parametrize('name', ['a.jpg', 'a.png', 'a.tiff'])
@pytest.mark.parametrize('tag', range(1, 9))
def test_exif_orientation(tmp_path, scene, tag, name):
    # the camera stores the pixels turned; a viewer must see the scene
    turns = 'FLIP_LEFT_RIGHT', 'ROTATE_180', 'FLIP_TOP_BOTTOM', 'TRANSPOSE', 'ROTATE_90', 'TRANSVERSE', 'ROTATE_270'
    stored = scene if tag == 1 else scene.transpose(Image.Transpose[turns[tag - 2]])
    pixels = read_image(save(tmp_path / name, stored, exif=exif_of(tag), quality=95))
    assert pixels.shape == (30, 40, 3) and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert np.abs(pixels.astype(int) - np.asarray(scene)).mean() < 3


def test_broken_exif_does_not_matter(tmp_path, scene):
    exif = exif_of(6)
    exif[0x011A] = (72, 1)
    odd = exif.tobytes().replace(b'\x01\x1a\x00\x05', b'\x01\x1a\x00\x01')  # the resolution is said to be of bytes
    assert read_image(save(tmp_path / 'a.jpg', scene, exif=odd)).shape == (40, 30, 3)
    assert orientation(SimpleNamespace(getexif=lambda: 1 / 0)) == 1  # whatever Pillow raises


@pytest.mark.parametrize('mode', ['CMYK', 'L', '1', 'P', 'YCbCr', 'RGBA', 'LA'])
def test_modes_become_rgb(tmp_path, scene, mode):
    kind, loss = ('jpg', 6) if mode in ('CMYK', 'YCbCr') else ('png', 0)
    pixels = read_image(save(tmp_path / f'a.{kind}', scene.convert(mode)))
    expected = scene.convert(mode.removesuffix('A') if mode == 'LA' else mode).convert('RGB')
    assert pixels.shape == (30, 40, 3) and np.abs(pixels.astype(int) - np.asarray(expected)).mean() <= loss


def test_sixteen_bits_are_scaled_neither_clipped_nor_stretched_and_more_by_their_own_range(tmp_path):
    steps = np.arange(256).reshape(16, 16)
    for name in ('a.png', 'a.pgm', 'a.tiff'):
        values = (steps * 100).astype(np.uint16)
        pixels = read_image(save(tmp_path / name, Image.fromarray(values)))
        assert np.abs(pixels[..., 0].astype(float) - values / 257).max() < 0.51
    for values in ((steps - 9).astype(np.int32) * 9000, (steps - 127.5).astype(np.float32) * 1e4):
        assert (read_image(save(tmp_path / 'a.tiff', Image.fromarray(values)))[..., 1] == steps).all()


def test_transparency_lies_on_white(tmp_path, scene):
    alpha = Image.new('L', scene.size, 0)
    alpha.paste(255, (0, 0, 20, 30))
    rgba = scene.copy()
    rgba.putalpha(alpha)
    pixels = read_image(save(tmp_path / 'rgba.png', rgba))
    assert (pixels[:, 20:] == 255).all() and (pixels[:, :20] == np.asarray(scene)[:, :20]).all()
    for mode in ('P', 'I;16'):
        pixels = read_image(save(tmp_path / 'a.png', Image.new(mode, (4, 4), 0), transparency=0))
        assert (pixels == 255).all()


def test_whatever_a_decoder_raises_makes_a_file_unreadable(tmp_path, monkeypatch, scene):
    path = save(tmp_path / 'a.png', scene)
    monkeypatch.setattr(Image.Image, 'load', Mock(side_effect=TypeError('odd tag')))
    with pytest.raises(UnreadableImageError, match='odd tag'):
        read_image(path)


def test_what_needs_another_reader_or_is_too_large_or_cut_is_said(tmp_path, monkeypatch, scene):
    monkeypatch.setattr('beit_mm.datasets.reading.HeifImageFile', None)
    (tmp_path / 'a.heic').write_bytes(b'\0\0\0\x18ftypheic\0\0\0\0mif1heic')
    imwrite(tmp_path / 'b.tif', np.zeros((4, 4, 6), np.uint8), photometric='minisblack', planarconfig='contig')
    for name, kind in dict(e=np.uint8, f=np.float32).items():  # a plane for each band
        imwrite(tmp_path / f'{name}.tif', np.zeros((6, 4, 4), kind), photometric='minisblack', planarconfig='separate')
    scene.save(tmp_path / 'c.png')
    assert read_image(str(tmp_path / 'c.png'), max_pixels=1200).shape == (30, 40, 3)
    scene.save(tmp_path / 'd.jpg')
    os.truncate(tmp_path / 'd.jpg', 500)
    messages = dict(a='HEIC; pip install pillow-heif', b='LoadBands.*docs/data.md', c='more than max_pixels=1,199')
    messages |= dict(d='cannot be read as an image', e=messages['b'], f=messages['b'])
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(UnreadableImageError, match=f'{path.name}: .*{messages[path.stem]}'):
            LoadImage(max_pixels=1199)(dict(img_path=str(path)))
    monkeypatch.setattr('beit_mm.datasets.reading.HeifImageFile', lambda file, name: scene)  # pillow-heif's
    assert np.array_equal(read_image(str(tmp_path / 'a.heic')), np.asarray(scene))


def test_a_cache_keeps_the_first_images_that_fit_with_the_same_pixels(tmp_path, monkeypatch):
    """Also where the crop chose a scale of decoding, which may be another the next time."""
    sizes = dict(first=(40, 30), second=(50, 30), large=(1200, 900))
    for name, (width, height) in sizes.items():
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f'{name}.jpg')
    crop = TwoViewRandomResizedCrop(24, second_size=None, scale=(0.05, 1.0))
    samples, read = {}, Counter()
    monkeypatch.setattr(
        reading, 'open_image', lambda path, *rest: read.update([Path(path).stem]) or open_image(path, *rest)
    )
    for cache_bytes, expected in ((0, (6, 6, 6)), (5000, (1, 6, 6)), (10**6, (1, 1, 2))):
        dataset = UnlabeledImages(str(tmp_path), pipeline=[LoadImage(cache_bytes=cache_bytes), crop, PackViews()])
        keys = [SampleKey(0, epoch, index) for epoch in range(6) for index in range(3)]
        read.clear()
        samples[cache_bytes] = [dataset[key]['inputs']['images'] for key in keys]
        assert read == dict(zip(sizes, expected, strict=True))
    for found in zip(*samples.values(), strict=True):
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
    load = LoadImage(cache_bytes=10**6)
    for _ in range(3):  # what is changed in place was a copy
        pixels = load(dict(img_path=str(tmp_path / 'first.jpg')))['img']
        assert pixels.any()
        pixels[:] = 0


# --- large JPEGs ----------------------------------------------------------------------------------

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
    return save(path, photo(*(size[::-1] if tag in (5, 6, 7, 8) else size)), quality=92, exif=exif_of(tag), **options)


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
