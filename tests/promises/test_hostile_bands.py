"""Files of many bands made to do harm: nothing is executed, nothing is waited for, other files stay closed."""

import io
import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
import tifffile

from beit_mm.datasets.reading import LoadBands, UnreadableImageError, read_bands

pytestmark = pytest.mark.filterwarnings('ignore::UserWarning:PIL')  # Pillow says what is wrong with tags


def refused(path: Path, message: str, **settings) -> None:
    with pytest.raises(UnreadableImageError, match=message) as error:
        LoadBands(**settings)(dict(img_path=str(path)))
    assert '\n' not in str(error.value) and str(error.value).startswith(str(path))


class Program:
    def __init__(self, mark: Path):
        self.mark = str(mark)

    def __reduce__(self):
        return open, (self.mark, 'w')


def test_pickles_in_npy_files_are_not_opened(tmp_path):
    mark = tmp_path / 'mark'
    np.save(tmp_path / 'objects.npy', np.array([Program(mark)], dtype=object), allow_pickle=True)
    (tmp_path / 'pickle.npy').write_bytes(pickle.dumps(Program(mark)))
    np.savez(tmp_path / 'a.npz', a=np.zeros((4, 4), np.uint8))
    (tmp_path / 'a.npz').rename(tmp_path / 'zip.npy')
    np.save(tmp_path / 'records.npy', np.zeros((4, 4), [('a', 'u1')]))
    refused(tmp_path / 'objects.npy', 'Object arrays cannot be loaded')
    refused(tmp_path / 'records.npy', 'type .*; expected integers')
    refused(tmp_path / 'pickle.npy', 'neither .tif nor .npy')
    refused(tmp_path / 'zip.npy', 'neither .tif nor .npy')
    assert not mark.exists()


def npy_header(shape: tuple[int, ...], dtype: str = '<u2') -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array_header_1_0(file, dict(shape=shape, fortran_order=False, descr=dtype))
    return file.getvalue()


@pytest.mark.parametrize(
    'shape', [(50_000, 50_000, 6), (10, 10, 10**12), (100, 100, 6), (0, 10, 6), (-1, -100, 6), (2, 2, 3, 1)]
)
def test_npy_headers_that_lie(tmp_path, shape):
    (tmp_path / 'a.npy').write_bytes(npy_header(shape) + bytes(24))
    refused(tmp_path / 'a.npy', 'cannot be read as an image', low=0, high=1)


def test_npy_headers_are_no_programs(tmp_path):
    header = npy_header((2, 2, 3)).replace(b'False', b'bool()')
    (tmp_path / 'a.npy').write_bytes(header + bytes(24))
    refused(tmp_path / 'a.npy', 'cannot be read')


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / 'fifo.tif')
    (tmp_path / 'folder.npy').mkdir()
    (tmp_path / 'zero.tif').symlink_to('/dev/zero')
    for path in tmp_path.iterdir():
        refused(path, 'expected a regular file')


@pytest.mark.parametrize('name, message', [('a.tif', '64 x 64 pixels'), ('a.npy', '64 x 64 pixels')])
def test_the_limit_of_pixels_holds(tmp_path, name, message):
    values = np.zeros((64, 64, 2), np.uint8)
    np.save(tmp_path / 'a.npy', values)
    tifffile.imwrite(tmp_path / 'a.tif', values, photometric='minisblack', planarconfig='contig')
    refused(tmp_path / name, message, max_pixels=64 * 64 - 1)
    assert LoadBands(max_pixels=64 * 64)(dict(img_path=str(tmp_path / name)))['img'].shape == (64, 64, 2)


def tif(tags: dict[int, tuple[int, int, int]], pages: int, data: bytes) -> bytes:
    """A .tif file of equal pages: tags as (type, count, value or place), and `data` from byte 8 on."""
    content = b'II*\0' + struct.pack('<I', 8 + len(data)) + data
    for page in range(pages):
        content += struct.pack('<H', len(tags))
        content += b''.join(struct.pack('<HHII', tag, *value) for tag, value in sorted(tags.items()))
        content += struct.pack('<I', 0 if page == pages - 1 else len(content) + 4)
    return content


STRIP_TAGS = {258: (3, 1, 8), 277: (3, 1, 1)}


def test_files_without_pixels_take_no_memory(tmp_path):
    sides = {256: (4, 1, 10_000), 257: (4, 1, 10_000), 278: (4, 1, 10_000), 273: (4, 1, 0), 279: (4, 1, 0)}
    path = tmp_path / 'a.tif'
    path.write_bytes(tif({**STRIP_TAGS, **sides}, 1, b''))
    assert path.stat().st_size < 134
    refused(path, 'none of its blocks of pixels is stored')


@pytest.mark.parametrize('name', ['a.tif', 'a.npy'])
@pytest.mark.parametrize('dtype, bands', [('uint8', 4), ('float32', 4), ('float64', 2)])
def test_the_limit_counts_the_float32_that_is_made(tmp_path, name, dtype, bands):
    path = tmp_path / name

    def write(bands: int) -> None:
        values = np.ones((16, 16, bands), dtype)
        if name == 'a.npy':
            np.save(path, values)
        else:
            tifffile.imwrite(path, values, photometric='minisblack', planarconfig='contig')

    settings = dict(low=0, high=1, max_pixels=300)  # the file's header is counted too
    write(bands)
    assert LoadBands(**settings)(dict(img_path=str(path)))['img'].nbytes <= 16 * 300
    write(bands + 1)
    refused(path, 'more than 16 .*for each of 300 pixels', **settings)


def test_images_inside_of_a_tif_are_refused(tmp_path):
    path = tmp_path / 'a.tif'  # a JPEG has a size of its own
    tifffile.imwrite(path, np.zeros((64, 64, 3), np.uint8), photometric='rgb', compression='jpeg')
    refused(path, 'compression 7, .*expected none, LZW')


@pytest.mark.parametrize('options', [{}, dict(compression='zlib'), dict(compression='lzw'), dict(tile=(16, 16))])
def test_truncated_files_are_unreadable(tmp_path, options):
    path = tmp_path / 'a.tif'
    values = np.random.default_rng(0).integers(0, 255, (64, 64, 6), dtype=np.uint8)
    tifffile.imwrite(path, values, photometric='minisblack', planarconfig='contig', **options)
    data = path.read_bytes()
    for size in (0, 3, 8, 100, len(data) // 2, len(data) - 40):
        path.write_bytes(data[:size])
        refused(path, 'cannot be read as an image')


def test_pages_in_a_circle_end(tmp_path):
    path = tmp_path / 'a.tif'
    tifffile.imwrite(path, np.zeros((3, 16, 16), np.uint8), photometric='minisblack')
    with tifffile.TiffFile(path) as tif:
        first, last = tif.pages[0].offset, tif.pages[-1]
        place = last.offset + 2 + 12 * len(last.tags)
    data = bytearray(path.read_bytes())
    data[place : place + 4] = first.to_bytes(4, 'little')
    path.write_bytes(data)
    refused(path, 'bands')


def test_other_files_that_a_tif_names_stay_closed(tmp_path, monkeypatch):
    secret = tmp_path / 'secret.ome.tif'
    tifffile.imwrite(secret, np.full((16, 16), 7, np.uint8))
    xml = (
        '<OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06"><Image ID="Image:0"><Pixels ID="Pixels:0" '
        'DimensionOrder="XYCZT" Type="uint8" SizeX="16" SizeY="16" SizeC="2" SizeZ="1" SizeT="1">'
        + ''.join(
            f'<TiffData FirstC="{c}" IFD="0" PlaneCount="1"><UUID FileName="{name}">urn:uuid:{c}</UUID></TiffData>'
            for c, name in enumerate(('a.ome.tif', 'secret.ome.tif'))
        )
        + '</Pixels></Image></OME>'
    )
    path = tmp_path / 'a.ome.tif'
    tifffile.imwrite(path, np.zeros((16, 16), np.uint8), description=xml, metadata=None)
    assert read_bands(str(path)).tolist() == np.zeros((16, 16, 1)).tolist()


def test_random_bytes_in_a_tif_are_unreadable_or_read(tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / 'a.tif'
    tifffile.imwrite(
        path, np.zeros((16, 16, 6), np.uint8), photometric='minisblack', planarconfig='contig', compression='lzw'
    )
    data = np.frombuffer(path.read_bytes(), np.uint8)
    for _ in range(200):
        broken = data.copy()
        places = rng.integers(4, len(data), 3)
        broken[places] = rng.integers(0, 256, 3)
        path.write_bytes(broken.tobytes())
        try:
            read_bands(str(path), max_pixels=10**6)
        except UnreadableImageError:
            pass
