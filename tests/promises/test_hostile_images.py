"""Image files and folders made to do harm: no program runs, nothing is waited for, time and memory stay bounded."""

import ctypes
import io
import multiprocessing
import os
import socket
import struct
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT
from mmengine.config import Config
from mmengine.dataset import Compose
from mmengine.registry import DefaultScope
from PIL import Image

from beit_mm.datasets.bands import LoadBands
from beit_mm.datasets.listing import list_images
from beit_mm.datasets.reading import LoadImage, UnreadableImageError, read_image
from beit_mm.datasets.segmentation_folder import read_labels
from beit_mm.features.reader import iterate_images

POSTSCRIPT = b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n%%EOF\n'


@pytest.fixture
def ghostscript(tmp_path, monkeypatch) -> Path:
    """A program named gs, first in PATH, and the mark that it leaves."""
    (tmp_path / 'bin').mkdir()
    mark = tmp_path / 'mark'
    program = tmp_path / 'bin/gs'
    program.write_text(f'#!/bin/sh\ntouch {mark}\n')
    program.chmod(0o755)
    monkeypatch.setenv('PATH', f'{program.parent}:{os.environ["PATH"]}')
    monkeypatch.setattr('PIL.EpsImagePlugin.gs_binary', None)  # Pillow looks it up once
    return mark


@pytest.mark.parametrize('read', [read_image, read_labels, lambda path: LoadImage()(dict(img_path=path))])
def test_postscript_named_jpg_starts_no_program(tmp_path, ghostscript, read):
    path = tmp_path / 'scraped.jpg'
    path.write_bytes(POSTSCRIPT)
    with pytest.raises(UnreadableImageError, match='scraped.jpg: .*unknown format'):
        read(str(path))
    assert not ghostscript.exists()
    with pytest.raises(OSError), Image.open(path) as image:  # the program would have been run
        image.load()
    assert ghostscript.exists()


@pytest.mark.parametrize('read', [read_image, read_labels])
def test_only_regular_files_are_opened(tmp_path, read):
    os.mkfifo(tmp_path / 'fifo.jpg')
    (tmp_path / 'folder.jpg').mkdir()
    (tmp_path / 'zero.jpg').symlink_to('/dev/zero')
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / 'socket.jpg'))
        start = time.monotonic()
        for name in ('fifo', 'folder', 'zero', 'socket'):
            with pytest.raises(UnreadableImageError, match=f'{name}.jpg: .*expected a regular file'):
                read(str(tmp_path / f'{name}.jpg'))
    assert time.monotonic() - start < 5


def png_header(width: int, height: int) -> bytes:
    """A PNG of a few bytes that promises many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))

    header = struct.pack('>IIBBBBB', width, height, 8, 2, 0, 0, 0)
    return (
        b'\x89PNG\r\n\x1a\n'
        + chunk(b'IHDR', header)
        + chunk(b'IDAT', zlib.compress(bytes(10**6)))
        + chunk(b'IEND', b'')
    )


def memory(key: str) -> float:
    """MiB of this process."""
    return next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith(key)) / 1024


def measure(*paths: Path, read: Callable[[str], object] = read_image) -> tuple[list[str], float, float]:
    """Messages of files read in a process of their own, the seconds, and the MiB added at most."""
    ours, theirs = multiprocessing.Pipe()

    def read_all() -> None:
        torch.set_num_threads(1)  # a fork has none of the threads that its libraries count on
        ctypes.CDLL(None).malloc_trim(0)  # else what the tests before have freed is taken first
        messages, before, start = [], memory('VmRSS'), time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            for path in paths:
                try:
                    read(str(path))
                except UnreadableImageError as error:
                    messages.append(str(error))
        theirs.send((messages, time.monotonic() - start, memory('VmHWM') - before))

    process = multiprocessing.get_context('fork').Process(target=read_all)  # VmHWM begins anew at a fork
    process.start()
    theirs.close()
    answer = ours.recv()
    process.join()
    return answer


@pytest.mark.parametrize('size', [(5000, 1), (1, 20_000)])
def test_an_image_that_is_hardly_more_than_a_line_is_refused(size, tmp_path):
    """97 bytes would become gigabytes, where a pipeline enlarges the short side first."""
    Image.new('RGB', size).save(tmp_path / 'line.png')
    np.save(tmp_path / 'line.npy', np.zeros((*size, 6), np.uint8))
    for load, name in ((LoadImage(), 'line.png'), (LoadBands(), 'line.npy')):  # six bands
        with pytest.raises(UnreadableImageError, match=f'{name}: .* pixels; expected a long side of at most 50 short'):
            load(dict(img_path=str(tmp_path / name)))


PIPELINES = [
    ('_base_/datasets/mim_in1k.py', 'mmpretrain', 'train_pipeline', 'val_pipeline'),
    ('_base_/datasets/finetune_in1k.py', 'mmpretrain', 'train_pipeline', 'test_pipeline'),
    ('beit_plus/finetune_large_512_in1k.py', 'mmpretrain', 'test_pipeline'),
    ('_base_/datasets/ade20k_512.py', 'mmseg', 'train_pipeline', 'test_pipeline'),
    ('demo/caltech101_pretrain.py', 'mmpretrain', 'train_pipeline', 'val_pipeline'),
    ('demo/caltech101_finetune.py', 'mmpretrain', 'train_pipeline', 'test_pipeline'),
    ('demo/bands_finetune.py', 'mmpretrain', 'test_pipeline'),
]


@pytest.mark.parametrize(('config', 'scope', 'names'), [(file, scope, names) for file, scope, *names in PIPELINES])
def test_the_longest_images_take_little_memory_in_the_configs(config, scope, names, tmp_path):
    cfg = Config.fromfile(ROOT / 'configs' / config)
    with DefaultScope.overwrite_default_scope(scope):
        pipelines = [Compose(cfg[name]) for name in names]
    bands = 'bands' in config
    for width, height in ((50, 1), (1, 50), (40, 2000)):
        if bands:
            np.save(path := tmp_path / f'{width}.npy', np.zeros((height, width, 6), np.uint16))
        else:
            Image.new('RGB', (width, height)).save(path := tmp_path / f'{width}.png')
            Image.new('L', (width, height)).save(tmp_path / 'labels.png')
        sample = dict(img_path=str(path), seg_map_path=str(tmp_path / 'labels.png'), gt_label=0, num_classes=150)

        def prepare(path: str, sample: dict = sample) -> None:
            for pipeline in pipelines:
                pipeline(dict(sample))

        messages, _, added = measure(path, read=prepare)
        assert not messages and added < 400


def test_images_above_the_pixel_limit_cost_nothing(tmp_path):
    (tmp_path / 'bomb.png').write_bytes(png_header(60_000, 60_000))
    (tmp_path / 'bomb.ppm').write_bytes(b'P6 50000 50000 255\n')
    with (tmp_path / 'sparse.jpg').open('wb') as file:  # 100 GB, none of them on the disk
        Image.new('RGB', (8, 8)).save(file, 'JPEG')
        file.truncate(10**11)
    messages, seconds, added = measure(*sorted(tmp_path.iterdir()))
    assert [message.split(':')[0] for message in messages] == sorted(map(str, tmp_path.iterdir()))
    assert 'bomb.png: cannot be read as an image (60000 x 60000 pixels, more than max_pixels=178,956,970' in messages[0]
    assert seconds < 5 and added < 500, (seconds, added)


def test_a_large_image_is_read_once_into_memory(tmp_path):
    side = 4000  # 4 bytes a pixel in Pillow, 3 in the array
    Image.new('RGBA', (side, side), (10, 20, 30, 40)).save(tmp_path / 'a.png', compress_level=1)
    messages, _, added = measure(tmp_path / 'a.png')
    assert not messages and added * 2**20 < 9.5 * side**2, added


def jpeg_of_scans(side: int, scans: int, **options) -> bytes:
    """A JPEG whose last scan comes again and again."""
    file = io.BytesIO()
    Image.new('L' if options else 'RGB', (side, side), 100).save(file, 'JPEG', **options)
    data = file.getvalue()
    last = data.rindex(b'\xff\xda\0')
    return data[:last] + data[last:-2] * scans + data[-2:]


@pytest.mark.parametrize('read', [read_image, read_labels])
def test_a_jpeg_of_many_scans_is_refused_before_it_is_decoded(tmp_path, read):
    path = tmp_path / 'scans.jpg'
    path.write_bytes(jpeg_of_scans(8192, 10_000, progressive=True))  # one megabyte, ten minutes
    start = time.monotonic()
    with pytest.raises(UnreadableImageError, match='scans.jpg: .*a JPEG of more than 100 scans'):
        read(str(path))
    assert time.monotonic() - start < 5


def test_scans_are_counted_only_where_they_can_be_many(tmp_path, monkeypatch):
    (tmp_path / 'progressive.jpg').write_bytes(jpeg_of_scans(64, 50, progressive=True))
    assert read_image(str(tmp_path / 'progressive.jpg')).shape == (64, 64, 3)
    # not progressive, but said to have components in other scans: decoders go through all of the file
    plain = jpeg_of_scans(64, 200)
    start = plain.index(b'\xff\xda\0\x0c\x03')
    (tmp_path / 'parts.jpg').write_bytes(plain[:start] + b'\xff\xda\0\x08\x01\x01\0\0\x3f\0' + plain[start:])
    with pytest.raises(UnreadableImageError, match='100 scans'):
        read_image(str(tmp_path / 'parts.jpg'))
    monkeypatch.setattr('beit_mm.datasets.reading.count_scans', None)
    (tmp_path / 'plain.jpg').write_bytes(jpeg_of_scans(64, 1))
    assert read_image(str(tmp_path / 'plain.jpg')).shape == (64, 64, 3)


def test_no_warning_between_pillows_two_limits(tmp_path, monkeypatch):
    Image.new('L', (40, 30)).save(tmp_path / 'a.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert read_image(str(tmp_path / 'a.png')).shape == (30, 40, 3)
    with pytest.raises(ValueError, match='max_pixels is 0'):
        LoadImage(max_pixels=0)


@pytest.mark.parametrize('mode', ['L', '1', 'P', 'RGB', 'RGBA', 'LA', 'I;16', 'F', 'CMYK'])
@pytest.mark.parametrize('tag', [1, 3, 5, 6, 7, 8])
def test_strips_and_other_decoders_change_no_pixel(tmp_path, monkeypatch, mode, tag):
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 256, (31, 40, 3), dtype=np.uint8))
    image = (
        Image.fromarray(rng.integers(0, 65536, (31, 40)).astype(np.uint16)) if mode == 'I;16' else image.convert(mode)
    )
    path = str(tmp_path / ('a.tiff' if mode in ('F', 'CMYK') else 'a.png'))
    exif = Image.Exif()
    exif[0x0112] = tag
    image.save(path, **dict(exif=exif) if tag > 1 else {})
    whole = read_image(path)
    for changes in (dict(STRIP=120), dict(STRIP=1), dict(LARGE_PNG=0)):
        with monkeypatch.context() as patch:
            for name, value in changes.items():
                patch.setattr(f'beit_mm.datasets.reading.{name}', value)
            assert np.array_equal(read_image(path), whole)


# --- folders --------------------------------------------------------------------------------------


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new('RGB', (8, 8)).save(folder / name)


def test_folders_that_link_to_each_other_are_searched_once(tmp_path):
    root = tmp_path / 'root'
    for index in range(12):  # each to each: paths without end
        put(root, f'{index:02}/a.png')
        for other in range(12):
            (root / f'{index:02}' / f'to{other}').symlink_to(f'../{other:02}')
    (root / 'self').symlink_to('self')
    (root / 'above').symlink_to(tmp_path)
    start = time.monotonic()
    assert list(list_images(str(root))) == [f'{index:02}/a.png' for index in range(12)]
    assert time.monotonic() - start < 5


def test_of_several_paths_the_one_without_links_is_taken(tmp_path):
    put(tmp_path, 'elsewhere/x.png', 'root/z/real.png', 'root/b.jpg/inner.png')
    (tmp_path / 'root/a').symlink_to('z')  # a real path to it comes later
    for name in ('n', 'm'):
        (tmp_path / 'root' / name).symlink_to(tmp_path / 'elsewhere')
    (tmp_path / 'root/gone.jpg').symlink_to('nowhere')
    found = list(list_images(str(tmp_path / 'root')))
    # a folder named .jpg hides nothing, and a link to nothing is left to the policy
    assert found == ['b.jpg/inner.png', 'gone.jpg', 'm/x.png', 'z/real.png']
    assert [str(path) for path in iterate_images(str(tmp_path / 'root'))] == [
        f'{tmp_path}/root/{name}' for name in found
    ]


@pytest.mark.skipif(os.geteuid() != 0, reason='needs to become another user')
def test_a_folder_without_permission_is_named_in_one_line(tmp_path):
    put(tmp_path, 'closed/a.png', 'open/b.png')
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_uid == 0 and str(folder).startswith('/tmp/'):
            folder.chmod(0o755)
    (tmp_path / 'closed').chmod(0o700)
    (tmp_path / 'open/b.png').chmod(0o600)
    os.seteuid(65534)
    try:
        with pytest.raises(PermissionError, match=f'no permission to list the folder {tmp_path}/closed; ') as error:
            list_images(str(tmp_path))
        with pytest.raises(UnreadableImageError, match='b.png: .*Permission denied'):
            read_image(str(tmp_path / 'open/b.png'))
    finally:
        os.seteuid(0)
    assert '\n' not in str(error.value)
