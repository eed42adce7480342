"""Smaller copies of a folder of images: same names, right pixels, going on after an interruption, broken ones named."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest
from helpers import refused, run_tool, tree
from PIL import Image, ImageOps

from beit_mm.datasets.image_folder import list_images
from beit_mm.datasets.reading import read_image

TOOL = 'resize_images'


def smooth(height: int, width: int) -> Image.Image:
    """Colours that JPEG keeps well."""
    pixels = np.random.default_rng(height * width).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize((width, height), Image.Resampling.BICUBIC)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of images: a.png and a.jpg beside each other, sideways, gray with transparency, small, in no folder."""
    folder = tmp_path / 'source'
    (folder / 'cat/deep').mkdir(parents=True)
    smooth(90, 120).save(folder / 'cat/a.png')
    smooth(120, 90).save(folder / 'cat/a.jpg', quality=95)
    exif = Image.Exif()
    exif[0x0112] = 6
    smooth(80, 200).save(folder / 'cat/deep/sideways.JPG', exif=exif, quality=95)
    smooth(90, 100).convert('LA').save(folder / 'cat/gray.webp', lossless=True)
    smooth(40, 300).save(folder / 'small.png')
    smooth(60, 60).save(folder / os.fsdecode(b'odd \xff.bmp'))
    (folder / 'cat/notes.txt').write_text('no image')
    return folder


def resize(source: Path, workers: int = 0) -> Path:
    target = source.parent / 'deep/target'
    run_tool(f'datasets/{TOOL}.py', source, target, '--short-side', 48, '--workers', workers)
    return target


@pytest.mark.parametrize('workers', [0, 2])
def test_copies_have_the_names_and_the_pixels_of_smaller_images(source, workers):
    target = resize(source, workers)
    names = list(list_images(str(source)))
    assert names == list(list_images(str(target))) and len(names) == 6 == len(tree(target))
    for name in names:
        if name == 'small.png':
            assert (target / name).read_bytes() == (source / name).read_bytes()
            continue
        (height, width), copy = read_image(str(source / name)).shape[:2], Image.open(target / name)
        size = (48 * width // min(height, width), 48 * height // min(height, width))
        upright = ImageOps.exif_transpose(Image.open(source / name)).convert('RGB')
        expected = np.asarray(upright.resize(size, Image.Resampling.BICUBIC), int)
        assert copy.format == 'JPEG' and copy.mode == 'RGB' and copy.size == size and not copy.getexif()
        assert np.abs(np.asarray(copy) - expected).mean() < 2 and np.ptp(expected) > 100, name


def test_an_interrupted_copy_goes_on(source):
    target = resize(source)
    whole = tree(target)
    (target / 'cat/a.png').unlink()
    (target / f'cat/.{hashlib.md5(b"a.png").hexdigest()}.part').write_bytes(b'half')
    (target / 'cat/a.jpg').write_bytes(b'')  # a power cut
    (target / 'cat/gray.webp').write_bytes(b'kept')
    resize(source)
    assert tree(target) == dict(whole, **{'cat/gray.webp': b'kept'})


def test_copies_of_another_size_are_not_taken_for_this_one(source):
    target = resize(source)
    before = tree(target)
    words = (source, target, '--workers', 0, '--short-side')
    refused('cat/a.jpg has a short side of 48 pixels; expected 64', TOOL, *words, 64)
    run_tool(f'datasets/{TOOL}.py', *words, 48)
    assert tree(target) == before


def test_what_cannot_be_read_is_listed_and_the_rest_is_done(source, capsys):
    (source / 'cat/broken.png').write_bytes((source / 'cat/a.png').read_bytes()[:300])
    target = source.parent / 'target'
    refused('1 of 7 images cannot be read', TOOL, source, target, '--short-side', 48, '--workers', 0)
    assert capsys.readouterr().out.splitlines()[-1].startswith(f'{source}/cat/broken.png:') and len(tree(target)) == 6
    refused('inside it; choose a folder elsewhere', TOOL, source, source / 'cat/smaller', '--short-side', 48)
