"""Images of many bands: every layout of .tif and .npy files, their values on one scale, statistics, listing."""

import numpy as np
import pytest
from helpers import run_tool
from PIL import Image
from tifffile import TiffWriter, imwrite

from beit_mm.datasets.image_folder import ImageFolder, UnlabeledImages
from beit_mm.datasets.reading import (
    LoadBands,
    MemberPath,
    UnreadableImageError,
    band_statistics,
    read_bands,
    read_image,
)
from beit_mm.datasets.segmentation_folder import LoadAnnotation


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


@pytest.mark.parametrize('count', [2, 5, 6, 7, 13, 16])
@pytest.mark.parametrize('planarconfig', ['contig', 'separate'])
def test_bands_that_are_not_rgb_are_never_read_as_rgb_and_the_error_says_what_reads_them(tmp_path, count, planarconfig):
    values = values_of('uint16', count)
    array = values if planarconfig == 'contig' else values.transpose(2, 0, 1)
    imwrite(tmp_path / 'a.tif', array, photometric='minisblack', planarconfig=planarconfig)
    with pytest.raises(UnreadableImageError, match='LoadBands'):
        read_image(str(tmp_path / 'a.tif'))


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


NODATA = dict(minus_9999=(-9999, 'float32'), lowest=(-3.4028235e38, 'float32'), highest=(65535, 'uint16'))
NODATA |= dict(zero=(0, 'uint16'), nan=(np.nan, 'float32'))


def tiles(folder, nodata: float, dtype: str, tag: str = '') -> tuple[list[str], np.ndarray]:
    """Paths of four images of three bands, 3,000 to 5,000, a sixth without data; and the pixels with data (N, 3)."""
    values = np.random.default_rng(0).integers(3000, 5000, (4, 48, 64, 3)).astype(dtype)
    values[:, :8] = nodata
    options = dict(extratags=[(42113, 's', 0, tag, True)]) if tag else {}
    for index, image in enumerate(values):
        imwrite(folder / f'{index}.tif', image, photometric='minisblack', planarconfig='contig', **options)
    return [str(folder / f'{index}.tif') for index in range(4)], values[:, 8:].reshape(-1, 3)


@pytest.mark.parametrize('name', NODATA)
@pytest.mark.parametrize('tagged', [True, False])
def test_no_data_changes_no_statistics_and_is_ignored_in_label_maps(tmp_path, name, tagged):
    nodata, dtype = NODATA[name]
    paths, rest = tiles(tmp_path, nodata, dtype, f'{nodata:g}' if tagged else '')
    found = band_statistics(paths)
    left_out = tagged or name != 'zero'
    assert (len(found['notes']) == 0) == (tagged or name == 'nan')  # a tag says it
    assert all(f'{nodata:g}, on 17 %' in note for note in found['notes'])
    assert ('rio edit-info' in ''.join(found['notes'])) == (not left_out)
    assert (found['low'][0] == 0) == (not left_out)
    if not left_out:
        return
    low, high = np.percentile(rest, (1, 99), axis=0)
    scaled = 255 * ((rest - low) / (high - low)).clip(0, 1)
    assert np.allclose(found['low'], low) and np.allclose(found['high'], high)
    assert np.allclose(found['mean'], scaled.mean(0), atol=0.1) and np.allclose(found['std'], scaled.std(0), atol=0.1)
    load = LoadBands(low=found['low'], high=found['high'], nodata=found['nodata'])
    Image.fromarray(np.ones((48, 64), np.uint8)).save(tmp_path / 'map.png')
    sample = LoadAnnotation()(dict(load(dict(img_path=paths[0])), seg_map_path=str(tmp_path / 'map.png')))
    assert not sample['img'][:8].any() and sample['img'][8:].mean() > 100
    assert (sample['gt_seg_map'][:8] == 255).all() and (sample['gt_seg_map'][8:] == 1).all()


def test_one_band_without_data_leaves_the_label(tmp_path):
    paths, _ = tiles(tmp_path, -9999, 'float32', '-9999')
    values = read_bands(paths[0])
    assert values.mask[:8].all() and not values.mask[8:].any()
    missing = LoadBands(low=0, high=9, nodata=7)(dict(img=np.array([[[7.0, 9.0], [7.0, 7.0]]])))
    assert missing['img'].tolist() == [[[0, 255], [0, 0]]] and missing['nodata'].tolist() == [[False, True]]


@pytest.mark.parametrize('values', [[0, 255], [0, 1, 2, 3, 6], range(200)])
def test_codes_saturation_and_shadows_are_measurements(tmp_path, values):
    """Also where they are frequent, as long as nothing lies apart."""
    image = np.random.default_rng(0).choice([*values], (64, 64, 1)).astype(np.uint8)
    image[:, :20] = max(values)
    np.save(tmp_path / 'a.npy', image)
    assert band_statistics([str(tmp_path / 'a.npy')])['nodata'] == []
