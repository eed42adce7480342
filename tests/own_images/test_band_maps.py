"""Segmentors of images with many bands: one call from .tif files and label maps to a report and to label maps."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from calls import task_of
from label_maps import make_label_maps
from mmengine.registry import DefaultScope
from narrow_segmentors import SEGMENTOR
from PIL import Image
from tifffile import imwrite

import beit_mm
from beit_mm import __main__ as command
from beit_mm.apis import export
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.datasets import reading
from beit_mm.errors import CheckpointError, UserError
from beit_mm.own_images.label_maps import find_label_maps
from beit_mm.registry import MODELS

pytestmark = pytest.mark.long


def make_bands(folder: Path, number: int = 12, **options: object) -> Path:
    """16-bit noise in three bands, and a fourth that shows the class; as uint8 where options say how it is stored."""
    make_label_maps(folder, number)
    rng = np.random.default_rng(0)
    for file in sorted(folder.glob('images/*/*.png')):
        labels = np.asarray(Image.open(str(file).replace('images', 'annotations')))
        values = rng.integers(1000, 3000, (*labels.shape, 4), dtype=np.uint16)
        values[..., 3] = 9000 + 5000 * labels.astype(int)
        file.unlink()
        values = (values // 100).astype(np.uint8) if options else values
        imwrite(file.with_suffix('.tif'), values, **(options or dict(photometric='minisblack', planarconfig='contig')))
    return folder


@pytest.fixture(scope='module')
def run(tmp_path_factory) -> Path:
    """The folder of a segmentor that was trained by the verb, beside its data."""
    folder = tmp_path_factory.mktemp('bands')
    make_bands(folder / 'data')
    words = ['finetune', folder / 'data', '--out', folder / 'run', '--epochs', 6, '--batch', 4, '--workers', 0]
    command.main([*map(str, words)])
    return folder / 'run'


def test_bands_train_and_report_and_the_file_segments_by_them(run, tmp_path):
    report = (run / 'report.md').read_text()
    assert 'Verdict: the segmentor is better than naive Bayes' in report and 'bands 1 to 3' in report
    assert Image.open(run / 'overlays.png').width > 100
    data = run.parent / 'data'
    words = ['segment', run / 'finetuned.pth', data / 'images/validation', '--out', tmp_path / 'maps']
    command.main([*map(str, words)])
    right = []
    for file in sorted((data / 'annotations/validation').iterdir()):
        truth, found = (np.asarray(Image.open(path)) for path in (file, tmp_path / 'maps/labels' / file.name))
        right.append((found == truth - 1)[truth > 0].mean())
        assert Image.open(tmp_path / 'maps/overlays' / file.name).size[1] > truth.shape[0]
    assert np.mean(right) > 0.7  # a class is a third of the pixels, and only the fourth band shows it


def test_an_inferencer_takes_arrays_of_the_values_in_files(run):
    segmenter, file = SegmentationInferencer(run / 'finetuned.pth'), run.parent / 'data/images/validation/0.tif'
    of_file, of_array = (next(segmenter(image))['labels'] for image in (file, reading.read_bands(str(file))))
    assert np.array_equal(of_file, of_array)
    multi_scale = SegmentationInferencer(run / 'finetuned.pth', multi_scale=True)
    assert next(multi_scale(file))['labels'].shape == of_file.shape


def test_an_export_says_how_the_values_of_bands_are_scaled(run, tmp_path, monkeypatch):
    written = []
    monkeypatch.setattr(export, 'export_onnx', lambda *args: written.append(json.dumps(args[3])) or 0.0)
    beit_mm.export(run / 'finetuned.pth', tmp_path / 'model.onnx')
    bands = find_label_maps(run.parent / 'data').bands['load']
    assert json.loads(written[0])['bands'] == dict(bands=None, low=bands['low'], high=bands['high'], nodata=[])


def test_a_model_of_bands_is_no_start_for_rgb_images(run, tmp_path):
    images = make_label_maps(tmp_path / 'data', 12)
    with pytest.raises(CheckpointError, match='takes images with 4 bands; expected RGB'):
        beit_mm.finetune(images, tmp_path / 'run', run, epochs=1)
    assert not (tmp_path / 'run').exists()


def test_a_segmentor_normalises_each_band_by_its_own_numbers():
    mean, std, images = [10.0, 20, 30, 40], [1.0, 2, 4, 8], torch.arange(4 * 4 * 4.0).view(4, 4, 4)
    preprocessor = dict(SEGMENTOR['data_preprocessor'], mean=mean, std=std, bgr_to_rgb=False)
    config = dict(SEGMENTOR, backbone=dict(SEGMENTOR['backbone'], in_channels=4), data_preprocessor=preprocessor)
    with DefaultScope.overwrite_default_scope('mmseg'):
        model = MODELS.build(config)
        found = model.data_preprocessor(dict(inputs=[images]))['inputs'][0]
    assert torch.equal(found, (images - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None])


def test_a_band_that_is_marked_as_transparency_is_named_and_read_as_one(tmp_path, monkeypatch):
    folder = make_bands(tmp_path / 'data', photometric='rgb', extrasamples=['unassalpha'])
    image = str(next(folder.glob('images/*/*.tif')))
    said = []
    monkeypatch.setattr(reading, 'warn', said.append)
    monkeypatch.setattr(reading, 'WARNED', [])
    assert find_label_maps(folder).bands is None
    reading.LoadImage()(dict(img_path=image))
    (line,) = said
    assert 'transparency' in line and '--bands all' in line and 'LoadBands' in line and '.tif' in line
    for bands, number in (('all', 4), ([3, 0], 2)):
        found = find_label_maps(folder, bands=bands)
        assert len(found.bands['mean']) == number
        plan = task_of(found, 'finetune', device='cpu').plan
        assert plan.backbone['in_channels'] == number and plan.preprocessing['mean'] == found.bands['mean']
    values = np.asarray(reading.read_bands(image))
    for shown, rest in ((values, 'opaque'), (np.dstack([values, values[..., 0]]), '3 of its 5 bands')):
        monkeypatch.setattr(reading, 'WARNED', [])
        said.clear()
        shown = shown.copy()
        shown[..., 3] = 255
        imwrite(image, shown, photometric='rgb')
        reading.LoadImage()(dict(img_path=image))
        assert [rest in line for line in said] == [True] * (rest != 'opaque')


@pytest.mark.parametrize('bands', [1, 3])
def test_sixteen_bits_of_gray_or_rgb_are_read_in_full(tmp_path, bands):
    """As RGB they would be nearly black: values up to 3,000 of 65,535."""
    folder = make_bands(tmp_path / 'data')
    for file in folder.glob('images/*/*.tif'):
        imwrite(file, reading.read_bands(str(file))[..., :bands].squeeze(), photometric='rgb' if bands == 3 else None)
    load = find_label_maps(folder).bands['load']
    assert len(load['low']) == bands and 2900 < max(load['high']) <= 3000


@pytest.mark.parametrize('name', ['gray.png', 'gray.tif', 'rgb.tif'])
def test_sixteen_bits_that_become_nearly_black_are_named(tmp_path, monkeypatch, name):
    said, file = [], tmp_path / name
    monkeypatch.setattr(reading, 'warn', said.append)
    for highest in (4095, 65_535):  # of 12 and of 16 bits
        monkeypatch.setattr(reading, 'WARNED', [])
        values = np.full((4, 4), highest, np.uint16)
        Image.fromarray(values).save(file) if name == 'gray.png' else imwrite(file, values)
        if name == 'rgb.tif':
            imwrite(file, np.dstack([values] * 3), photometric='rgb')
        assert reading.read_image(str(file)).max() in (15, 16, 255)
    (line,) = said
    assert name in line and ' 15 of 255' in line and ('LoadBands' in line) == name.endswith('tif')


@pytest.mark.parametrize('kind', ['page', 'npy'])
def test_bands_in_pages_and_arrays_are_found_and_the_first_image_decides(tmp_path, kind):
    folder = make_bands(tmp_path / 'data')
    for file in folder.glob('images/*/*.tif'):
        values = reading.read_bands(str(file))
        if kind == 'npy':
            file.unlink()
            np.save(file.with_suffix('.npy'), values)
        else:
            imwrite(file, values.transpose(2, 0, 1), photometric='minisblack')
    found = find_label_maps(folder)
    assert found.bands['load']['bands'] is None and len(found.bands['mean']) == 4
    assert found.bands['load']['low'][3] == 9000 and found.bands['load']['high'][3] == 24_000
    assert len(found.train.names) == 12


def test_bands_where_there_are_none_are_refused(tmp_path):
    with pytest.raises(UserError, match='left out, unreadable: .*0.png: .*TIFF'):
        find_label_maps(make_label_maps(tmp_path / 'data', 12), bands='all')
    with pytest.raises(UserError, match='no label maps; leave out --bands'):
        beit_mm.finetune(make_label_maps(tmp_path / 'other', 12) / 'images/training', tmp_path / 'run', bands='all')


def test_a_file_of_another_depth_is_refused_by_name(tmp_path):
    """One scale would show it white, or all others black."""
    folder = make_bands(tmp_path / 'data')
    odd = str(folder / 'images/validation/3.tif')
    imwrite(odd, (reading.read_bands(odd) // 100).astype(np.uint8), photometric='minisblack', planarconfig='contig')
    with pytest.raises(UserError, match='validation/3.tif holds 8 bits, .* 16 bits'):
        find_label_maps(folder)
