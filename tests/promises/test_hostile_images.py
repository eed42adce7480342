"""Image files and folders made to do harm: no program runs, nothing is waited for, headers that lie take no memory."""

import ctypes
import multiprocessing
import os
import socket
import struct
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

from beit_mm.datasets.image_folder import list_images
from beit_mm.datasets.reading import LoadBands, LoadImage, UnreadableImageError, read_image
from beit_mm.datasets.segmentation_folder import read_labels
from beit_mm.features.extractor import iterate_images

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
        for name in ('fifo', 'folder', 'zero', 'socket'):
            with pytest.raises(UnreadableImageError, match=f'{name}.jpg: .*expected a regular file'):
                read(str(tmp_path / f'{name}.jpg'))


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


def measure(*paths: Path, read: Callable[[str], object] = read_image) -> tuple[list[str], float]:
    """Messages of files read in a process of their own, and the MiB added at most."""
    ours, theirs = multiprocessing.Pipe()

    def read_all() -> None:
        torch.set_num_threads(1)  # a fork has none of the threads that its libraries count on
        ctypes.CDLL(None).malloc_trim(0)  # else what the tests before have freed is taken first
        messages, before = [], memory('VmRSS')
        with warnings.catch_warnings():
            warnings.simplefilter('error')
            for path in paths:
                try:
                    read(str(path))
                except UnreadableImageError as error:
                    messages.append(str(error))
        theirs.send((messages, memory('VmHWM') - before))

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
    ('demo/pretrain.py', 'mmpretrain', 'train_pipeline', 'val_pipeline'),
    ('demo/finetune_folder.py', 'mmpretrain', 'train_pipeline', 'test_pipeline'),
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

        messages, added = measure(path, read=prepare)
        assert not messages and added < 400


def test_images_above_the_pixel_limit_cost_nothing(tmp_path):
    (tmp_path / 'bomb.png').write_bytes(png_header(60_000, 60_000))
    (tmp_path / 'bomb.ppm').write_bytes(b'P6 50000 50000 255\n')
    with (tmp_path / 'sparse.jpg').open('wb') as file:  # 100 GB, none of them on the disk
        Image.new('RGB', (8, 8)).save(file, 'JPEG')
        file.truncate(10**11)
    messages, added = measure(*sorted(tmp_path.iterdir()))
    assert [message.split(':')[0] for message in messages] == sorted(map(str, tmp_path.iterdir()))
    assert 'bomb.png: cannot be read as an image (60000 x 60000 pixels, more than max_pixels=178,956,970' in messages[0]
    assert added < 500


def test_no_warning_between_pillows_two_limits(tmp_path, monkeypatch):
    Image.new('L', (40, 30)).save(tmp_path / 'a.png')
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 1000)
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert read_image(str(tmp_path / 'a.png')).shape == (30, 40, 3)


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
    assert list(list_images(str(root))) == [f'{index:02}/a.png' for index in range(12)]


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
