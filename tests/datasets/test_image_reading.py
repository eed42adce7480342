"""Odd images, made here, are read right or refused with their path."""

from collections import Counter
from pathlib import Path
from unittest.mock import Mock

import mmcv
import numpy as np
import pytest
import torch
from PIL import Image
from tifffile import imwrite

from beit_mm.datasets import reading
from beit_mm.datasets.image_folder import UnlabeledImages
from beit_mm.datasets.reading import LoadImage, UnreadableImageError, read_image
from beit_mm.datasets.samplers import SampleKey
from beit_mm.datasets.transforms import PackViews, TwoViewRandomResizedCrop


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
    pixels = read_image(path := save(tmp_path / name, stored, exif=exif_of(tag), quality=95))
    assert pixels.shape == (30, 40, 3) and pixels.dtype == np.uint8 and pixels.flags.c_contiguous
    assert np.abs(pixels.astype(int) - np.asarray(scene)).mean() < 3
    if tag == 1:
        assert np.abs(pixels.astype(int) - np.asarray(Image.open(path))).max() <= 1


def test_broken_exif_does_not_matter(tmp_path, scene):
    exif = exif_of(6)
    exif[0x011A] = (72, 1)
    odd = exif.tobytes().replace(b'\x01\x1a\x00\x05', b'\x01\x1a\x00\x01')  # the resolution is said to be of bytes
    assert read_image(save(tmp_path / 'a.jpg', scene, exif=odd)).shape == (40, 30, 3)


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
    palette = Image.new('P', (4, 4), 1)
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.putpixel((0, 0), 0)
    pixels = read_image(save(tmp_path / 'p.png', palette, transparency=0))
    assert pixels[0, :2].tolist() == [[255, 255, 255], [40, 50, 60]]


@pytest.mark.parametrize('kind', ['cut.jpg', 'cut.png', 'empty.jpg', 'head.jpg', 'gone.jpg'])
def test_broken_files_are_named(tmp_path, scene, kind):
    path = tmp_path / kind
    if kind != 'gone.jpg':
        scene.resize((200, 200)).save(path)
        path.write_bytes(path.read_bytes()[: dict(head=3, empty=0).get(path.stem, path.stat().st_size // 2)])
    with pytest.raises(UnreadableImageError, match=f'^[^\n]*{kind}[^\n]*$') as error:
        read_image(str(path))
    assert 'object at' not in str(error.value)


@pytest.mark.parametrize(
    ('place', 'raised', 'expected'),
    [
        ('PIL.PngImagePlugin.PngImageFile.load', AssertionError, UnreadableImageError),  # decoders raise nearly all
        ('beit_mm.datasets.reading.to_rgb', TypeError, TypeError),  # a mistake of ours
    ],
)
def test_only_what_a_file_causes_makes_it_unreadable(tmp_path, monkeypatch, scene, place, raised, expected):
    monkeypatch.setattr(place, Mock(side_effect=raised('odd tag')))
    with pytest.raises(expected, match='odd tag'):
        read_image(save(tmp_path / 'a.png', scene))


def test_what_needs_another_reader_or_is_too_large_is_said(tmp_path, monkeypatch, scene):
    monkeypatch.setattr('beit_mm.datasets.reading.HeifImageFile', None)
    (tmp_path / 'a.heic').write_bytes(b'\0\0\0\x18ftypheic\0\0\0\0mif1heic')
    imwrite(tmp_path / 'b.tif', np.zeros((4, 4, 6), np.uint8), photometric='minisblack', planarconfig='contig')
    scene.save(tmp_path / 'c.png')
    assert read_image(str(tmp_path / 'c.png'), max_pixels=1200).shape == (30, 40, 3)
    messages = dict(a='HEIC; pip install pillow-heif', b='docs/data.md and LoadBands', c='more than max_pixels=1,199')
    for path in sorted(tmp_path.iterdir()):
        with pytest.raises(UnreadableImageError, match=f'{path.name}: .*{messages[path.stem]}'):
            LoadImage(max_pixels=1199)(dict(img_path=str(path)))
    monkeypatch.setattr('beit_mm.datasets.reading.HeifImageFile', lambda file, name: scene)  # pillow-heif's
    assert np.array_equal(read_image(str(tmp_path / 'a.heic')), np.asarray(scene))


def test_an_array_of_openmmlabs_inferencers_is_bgr(tmp_path):
    rgb = np.random.default_rng(0).integers(0, 256, (7, 9, 3), dtype=np.uint8)
    path = save(tmp_path / 'a.png', Image.fromarray(rgb))
    for source in (dict(img_path=path), dict(img=mmcv.imread(path)), path, mmcv.imread(path)):
        found = LoadImage().transform(source)
        assert np.array_equal(found['img'], rgb) and found['ori_shape'] == found['img_shape'] == (7, 9)


def test_a_cache_keeps_the_first_images_that_fit_with_the_same_pixels(tmp_path, monkeypatch):
    """Also where the crop chose a scale of decoding, which may be another the next time."""
    sizes = dict(first=(40, 30), second=(50, 30), large=(1200, 900))
    for name, (width, height) in sizes.items():
        pixels = np.random.default_rng(width).integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f'{name}.jpg')
    crop = TwoViewRandomResizedCrop(24, second_size=None, scale=(0.05, 1.0))
    samples, read = {}, Counter()
    monkeypatch.setattr(
        reading, 'read_image', lambda path, *rest: read.update([Path(path).stem]) or read_image(path, *rest)
    )
    for cache_bytes, expected in ((0, (6, 6, 6)), (5000, (1, 6, 6)), (10**6, (1, 1, 2))):
        dataset = UnlabeledImages(str(tmp_path), pipeline=[LoadImage(cache_bytes=cache_bytes), crop, PackViews()])
        keys = [SampleKey(0, epoch, index) for epoch in range(6) for index in range(3)]
        read.clear()
        samples[cache_bytes] = [dataset[key]['inputs']['images'] for key in keys]
        assert read == dict(zip(sizes, expected, strict=True))
    load = LoadImage(cache_bytes=10**6)
    for _ in range(3):
        pixels = load(dict(img_path=str(tmp_path / 'first.jpg')))['img']
        assert pixels.any()
        pixels[:] = 0
    for found in zip(*samples.values(), strict=True):
        assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])
