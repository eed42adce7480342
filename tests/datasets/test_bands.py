"""Images of many bands: every layout of .tif and .npy files, their values on one scale, statistics, listing."""

import numpy as np
import pytest
from helpers import run_tool
from tifffile import TiffWriter, imwrite

from beit_mm.datasets.image_folder import ImageFolder, UnlabeledImages
from beit_mm.datasets.reading import LoadBands, MemberPath, UnreadableImageError, band_statistics, read_bands


def values_of(dtype: str, count: int = 6) -> np.ndarray:
    """An image of 40 x 30 pixels without symmetry."""
    return (np.random.default_rng(0).random((40, 30, count)) * 200).astype(dtype)


def assert_read(path, values: np.ndarray) -> None:
    """From a file and as a member of an archive."""
    content, archive = path.read_bytes(), path.with_name('a.tar')
    archive.write_bytes(b'x' * 700 + content + b'x' * 100)
    member = MemberPath(f'{archive}/{path.name}', str(archive), 700, len(content))
    for found in map(read_bands, (str(path), member)):
        assert found.dtype == values.dtype and found.dtype.isnative and np.array_equal(found, values)


@pytest.mark.parametrize(('dtype', 'count', 'byteorder'), [('uint16', 6, '>'), ('float64', 6, '<'), ('uint8', 2, '<')])
@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(bigtiff=True, rowsperstrip=7),
        dict(tile=(16, 32)),
        dict(compression='lzw', predictor=True),
        *(dict(compression=name) for name in ('zlib', 'zstd', 'lzma', 'packbits')),
    ],
)
def test_every_layout_of_a_tif_gives_the_same_values(tmp_path, dtype, count, byteorder, options):
    values = values_of(dtype, count)
    planes = values.transpose(2, 0, 1)
    for array, layout in (
        (values, dict(planarconfig='contig')),
        (planes, dict(planarconfig='separate')),
        (planes, {}),  # a page for each band
        (planes, dict(metadata=dict(axes='CYX'), ome=True)),
    ):
        imwrite(tmp_path / 'a.tif', array, photometric='minisblack', byteorder=byteorder, **options, **layout)
        assert_read(tmp_path / 'a.tif', values)


def test_overviews_are_no_bands(tmp_path):
    values = values_of('uint16', 1)
    with TiffWriter(tmp_path / 'a.tif') as file:
        for page, kind in ((values, 0), (values[::2, ::2], 1), (values + 1, 1)):
            file.write(page[..., 0], photometric='minisblack', subfiletype=kind)
    assert_read(tmp_path / 'a.tif', values)


@pytest.mark.parametrize('count', [1, 6])
def test_npy_files(tmp_path, count):
    values = values_of('int16', count)
    plane = [values[..., 0]] * (count == 1)
    for array in (values, np.asfortranarray(values), values.astype('>i2'), *plane):
        np.save(tmp_path / 'a.npy', array)
        assert_read(tmp_path / 'a.npy', values)


def test_files_that_are_not_as_the_config_says_are_named(tmp_path):
    for settings, shape, dtype, message in (
        ({}, (4, 3, 6), 'uint16', 'type uint16; expected uint8'),
        (dict(bands=[6]), (4, 3, 6), 'uint8', r'6 bands; .*bands=\[6\]'),
        ({}, (6, 3, 40), 'uint8', '40 bands; .* 1 to 16'),  # rows taken for bands
    ):
        np.save(tmp_path / 'a.npy', np.zeros(shape, dtype))
        with pytest.raises(UnreadableImageError, match=f'^.*a.npy: .*{message}.*$'):
            LoadBands(**settings)(dict(img_path=str(tmp_path / 'a.npy')))


def test_bands_are_taken_in_order_and_scaled_each_by_its_own_range():
    values, octets = values_of('uint16'), values_of('uint8')
    found = LoadBands(bands=[4, 0], low=[50, 20], high=[150, 120])(dict(img=values))
    expected = (values[..., [4, 0]] - np.array([50.0, 20])) / 100
    assert found['img'].dtype == np.float32 and found['img_shape'] == found['ori_shape'] == (40, 30)
    assert np.allclose(found['img'], 255 * expected.clip(0, 1), atol=1e-4)
    for bands in (None, [4, 0]):  # uint8 stays as it is
        image = LoadBands(bands=bands)(dict(img=octets))['img']
        assert image.dtype == np.uint8 and np.array_equal(image, octets[..., bands or slice(None)])


def test_what_is_no_number_becomes_0_and_large_ones_are_clipped():
    odd = np.array([[np.nan, np.inf, -np.inf, -3.4e38, 1e300, 5]]).T[:, None]
    with np.errstate(all='raise'):
        image = LoadBands(low=0, high=10)(dict(img=odd))['img']
    assert image.ravel().tolist() == [0, 0, 0, 0, 255, 127.5]


@pytest.mark.parametrize(('bands', 'shown'), [(1, [0, 0, 0]), (2, [0, 0, 0]), (3, [0, 1, 2]), (6, [0, 1, 2])])
def test_a_picture_shows_the_first_three_bands_or_one_in_gray(bands, shown):
    octets = values_of('uint8', bands)
    assert np.array_equal(LoadBands.as_rgb(octets.astype(np.float32)), octets[..., shown])


def test_datasets_take_the_files_that_their_loader_reads(tmp_path):
    for name in ('a/1.npy', 'a/2.tif', 'b/3.TIFF', 'b/4.jpg', 'b/5.txt'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    bands, rgb = [dict(type='beit_mm.LoadBands')], [dict(type='beit_mm.LoadImage')]
    for kind in (UnlabeledImages, ImageFolder):
        for pipeline, names in ((bands, ['1.npy', '2.tif', '3.TIFF']), (rgb, ['2.tif', '3.TIFF', '4.jpg'])):
            dataset = kind(str(tmp_path), pipeline=pipeline)
            infos = [dataset.get_data_info(index) for index in range(len(dataset))]
            assert [info['img_path'].split('/')[-1] for info in infos] == names


def test_statistics_are_percentiles_and_what_the_loader_makes_of_them(tmp_path, capsys):
    rng = np.random.default_rng(0)
    values = (rng.gamma(2, (300, 40, 5), (8, 64, 64, 3)) + (1000, 0, 0)).astype(np.float32)
    values[0, 0, 0] = np.nan
    paths = [str(tmp_path / f'{index}.npy') for index in range(8)]
    for path, image in zip(paths, values, strict=True):
        np.save(path, image)
    found, pixels = band_statistics(paths), values.reshape(-1, 3)
    low, high = np.nanpercentile(pixels, (1, 99), axis=0)
    assert np.allclose(found['low'], low, rtol=1e-4) and np.allclose(found['high'], high, rtol=1e-4)
    scaled = 255 * ((np.nan_to_num(pixels) - low) / (high - low)).clip(0, 1)
    assert np.allclose(found['mean'], scaled.mean(0), atol=0.1) and np.allclose(found['std'], scaled.std(0), atol=0.1)
    run_tool('datasets/band_statistics.py', tmp_path, '--bands', 2, 0)
    assert f'bands=[2, 0], low=[{found["low"][2]}, {found["low"][0]}]' in capsys.readouterr().out
    np.save(paths[0], np.stack([values[0, ..., 0], *[np.full((64, 64), 7.0)] * 2], axis=2))
    for wrong in ([1, 3], [-1], '0,1'):
        with pytest.raises(ValueError, match=r'0.npy has 3 bands, counted from 0; .*'):
            band_statistics(paths, wrong)
    with pytest.raises(ValueError, match='band 2 is 7 nearly everywhere'):
        band_statistics(paths[:1], [0, 2])
    np.save(paths[1], np.zeros((64, 64, 4)))
    with pytest.raises(ValueError, match='1.npy has 4 bands, earlier files 3; choose'):
        band_statistics(paths[:2])
    for words in (('--num-images', 0), ('--percentiles', 0, 101), ('--percentiles', 99, 1)):
        with pytest.raises(SystemExit):
            run_tool('datasets/band_statistics.py', tmp_path, *words)
        assert 'expected --num-images from 1' in capsys.readouterr().err
