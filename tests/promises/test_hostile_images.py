"""Image files and folders made to do harm: no program runs, nothing is waited for, headers that lie take no memory."""

import io
import os
import pickle
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from beit_mm.datasets.image_folder import list_images
from beit_mm.datasets.reading import LoadBands, LoadImage, UnreadableImageError, read_bands, read_image
from beit_mm.datasets.segmentation_folder import read_labels

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning:PIL')  # Pillow says what is wrong with tags

POSTSCRIPT = b'%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 40 30\n%%EndComments\nshowpage\n%%EOF\n'
BANDS = dict(photometric='minisblack', planarconfig='contig')


def load_image(path: str) -> dict:
    return LoadImage()(dict(img_path=path))


def load_bands(path: str, **settings: object) -> dict:
    return LoadBands(**settings)(dict(img_path=path))


def refused(path: Path, message: str, read: Callable = load_bands, **settings: object) -> None:
    """One line that begins with the path."""
    with pytest.raises(UnreadableImageError, match=message) as error:
        read(str(path), **settings)
    assert '\n' not in str(error.value) and str(error.value).startswith(str(path))


@pytest.mark.parametrize('read', [read_image, read_labels, load_image])
def test_postscript_named_jpg_starts_no_program(tmp_path, monkeypatch, read):
    mark, program, path = tmp_path / 'mark', tmp_path / 'gs', tmp_path / 'scraped.jpg'
    program.write_text(f'#!/bin/sh\ntouch {mark}\n')
    program.chmod(0o755)
    path.write_bytes(POSTSCRIPT)
    monkeypatch.setenv('PATH', f'{tmp_path}:{os.environ["PATH"]}')
    monkeypatch.setattr('PIL.EpsImagePlugin.gs_binary', None)  # Pillow looks it up once
    refused(path, 'unknown format', read)
    assert not mark.exists()
    with pytest.raises(OSError), Image.open(path) as image:  # the program would have been run
        image.load()
    assert mark.exists()


class Program:
    def __reduce__(self):
        return pytest.fail, ('a program ran',)


def written(save: Callable, array: np.ndarray, **options: object) -> bytes:
    save(file := io.BytesIO(), array, **options)
    return file.getvalue()


def npy(shape: tuple[int, ...]) -> bytes:
    """A header that promises a shape, and 24 bytes behind it."""
    header = dict(shape=shape, fortran_order=False, descr='<u2')
    return written(np.lib.format.write_array_header_1_0, header) + bytes(24)


def tif_without_pixels() -> bytes:
    """Of 10,000 x 10,000: none of them is stored, all would take memory."""
    side, nothing = (4, 1, 10_000), (4, 1, 0)  # type, count, value
    tags = {256: side, 257: side, 258: (3, 1, 8), 273: nothing, 277: (3, 1, 1), 278: side, 279: nothing}
    entries = b''.join(struct.pack('<HHII', tag, *value) for tag, value in tags.items())
    return b'II*\0' + struct.pack('<IH', 8, len(tags)) + entries + bytes(4)


JPEG = dict(photometric='rgb', compression='jpeg')  # which has a size of its own


@pytest.mark.parametrize(
    ('content', 'message'),
    [
        (written(np.save, np.array([Program()], dtype=object)), 'Object arrays cannot be loaded'),
        (written(np.save, np.zeros((4, 4), [('a', 'u1')])), '; expected integers'),
        (pickle.dumps(Program()), 'not a TIFF file'),
        (npy((10, 10, 10**12)), 'cannot be read'),
        (npy((2, 2, 3, 1)), r'array \(2, 2, 3, 1\) of .*\(height, width, bands\)'),
        (tif_without_pixels(), 'stores no pixels'),
        (written(tifffile.imwrite, np.zeros((64, 64, 3), np.uint8), **JPEG), 'compression 7, .*expected none, LZW'),
    ],
)
def test_files_of_bands_hold_an_array_of_numbers(tmp_path, content, message):
    (tmp_path / 'a.npy').write_bytes(content)
    refused(tmp_path / 'a.npy', message, low=0, high=1)


def test_other_files_that_a_tif_names_stay_closed(tmp_path):
    tifffile.imwrite(tmp_path / 'secret.ome.tif', np.full((16, 16), 7, np.uint8))
    xml = '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0" '
    xml += 'DimensionOrder="XYCZT" Type="uint8" SizeX="16" SizeY="16" SizeC="2" SizeZ="1" SizeT="1">'
    for c, name in enumerate(('a.ome.tif', 'secret.ome.tif')):
        xml += f'<TiffData FirstC="{c}" IFD="0" PlaneCount="1"><UUID FileName="{name}">urn:uuid:{c}</UUID></TiffData>'
    path, xml = tmp_path / 'a.ome.tif', f'{xml}</Pixels></Image></OME>'
    tifffile.imwrite(path, np.zeros((16, 16), np.uint8), description=xml, metadata=None)
    assert read_bands(str(path)).tolist() == np.zeros((16, 16, 1)).tolist()
    assert tifffile.imread(path).any()  # by itself it opens both


@pytest.mark.parametrize('name', ['a.tif', 'a.npy'])
@pytest.mark.parametrize(('dtype', 'bands'), [('uint8', 4), ('float64', 2)])
def test_the_limits_count_pixels_and_the_float32_that_is_made(tmp_path, name, dtype, bands):
    path, settings = tmp_path / name, dict(low=0, high=1, max_pixels=300)  # the file's header is counted too
    for number in (bands + 1, bands):
        values = np.ones((16, 16, number), dtype)
        np.save(path, values) if name == 'a.npy' else tifffile.imwrite(path, values, **BANDS)
        if number > bands:
            refused(path, 'at most 16 .*max_pixels=300', **settings)
    assert load_bands(str(path), **settings)['img'].nbytes <= 16 * 300
    if dtype == 'uint8':
        refused(path, '16 x 16 pixels', max_pixels=16 * 16 - 1)


def test_an_image_that_is_hardly_more_than_a_line_is_refused(tmp_path):
    """97 bytes would become gigabytes, where a pipeline enlarges the short side first."""
    for width, height in ((50, 1), (1, 51)):
        Image.new('RGB', (width, height)).save(tmp_path / 'line.png')
        np.save(tmp_path / 'line.npy', np.zeros((height, width, 6), np.uint8))
        for name, read in (('line.png', load_image), ('line.npy', load_bands)):
            if height == 51:
                refused(tmp_path / name, 'pixels; expected .* 50 ', read)
            else:
                assert read(str(tmp_path / name))['img_shape'] == (height, width)


@pytest.mark.filterwarnings('error::PIL.Image.DecompressionBombWarning')  # of a limit for the process
def test_images_above_the_limits_are_refused_before_they_are_decoded(tmp_path):
    png = bytearray(written(lambda file, image: image.save(file, 'PNG'), Image.new('RGB', (8, 8))))
    png[16:24] = struct.pack('>II', 60_000, 60_000)
    png[29:33] = struct.pack('>I', zlib.crc32(png[12:29]))  # of the header
    (tmp_path / 'bomb.png').write_bytes(png)
    (tmp_path / 'bomb.ppm').write_bytes(b'P6 50000 50000 255\n')
    with (tmp_path / 'sparse.jpg').open('wb') as file:  # 3 GB, none of them on the disk
        Image.new('RGB', (8, 8)).save(file, 'JPEG')
        file.truncate(3 * 10**9)
    refused(tmp_path / 'bomb.png', '60000 x 60000 pixels', read_image)
    refused(tmp_path / 'bomb.ppm', '50000 x 50000 pixels', read_image)
    refused(tmp_path / 'sparse.jpg', '3,000,000,000 bytes', read_image)


def test_folders_that_link_to_each_other_are_searched_once(tmp_path):
    root = tmp_path / 'root'
    for name in ('0/a.png', '1/b.png', 'c.jpg/d.png', '../elsewhere/x.png'):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    links = {'0/to1': '../1', '1/to0': '../0', 'again': '.', 'm': '../elsewhere', 'gone.jpg': 'nowhere'}
    for name, target in links.items():  # paths without end
        (root / name).symlink_to(target)
    # a folder named .jpg hides nothing, and a link to nothing is left to the policy
    assert list(list_images(str(root))) == ['0/a.png', '0/to1/b.png', 'c.jpg/d.png', 'gone.jpg', 'm/x.png']
