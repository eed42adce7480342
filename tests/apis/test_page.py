"""The page that runs a model in a browser gives the answers of Python, with the network off."""

import base64
import copy
import csv
import gzip
import io
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import CHROMIUM, Browser
from helpers import ROOT
from PIL import Image

import beit_mm
from beit_mm.apis import page
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import PACKAGED
from beit_mm.errors import UserError

onnx = pytest.importorskip('onnx')
in_browser = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason='no Chromium')]
RESIZE = dict(type='Resize', scale=[90, 60], interpolation='bilinear', backend='cv2', keep_ratio=True)
SCALE = dict(type='ResizeToScale', short_side=50, within=2.0, interpolation='bilinear', backend='cv2')
PREPARATIONS = [
    [dict(type='ResizeEdge', scale=45, interpolation='bicubic', backend='pillow')],
    [dict(type='ResizeEdge', scale=130, interpolation='bilinear', backend='pillow')],
    [RESIZE],
    [dict(RESIZE, keep_ratio=False, scale=[31, 150])],
    [dict(SCALE, factor=None)],
    [dict(SCALE, factor=1.0)],
    [dict(SCALE, factor=0.1)],
    [dict(type='CenterCrop', crop_size=[48, 33])],
    [dict(type='CenterCropDown', crop_size=[47, 500]), RESIZE],
]


def write_graph(path: Path, of_type: type = np.float32, **notes: object) -> Path:
    """An ONNX file with a weight alone, and metadata."""
    model = onnx.ModelProto()
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.zeros(1, of_type), 'weight'))
    notes = dict(classes=['a'], steps=[]) | notes
    model.metadata_props.add(key='beit_mm', value=json.dumps(notes))
    path.write_bytes(model.SerializeToString())
    return path


@pytest.fixture
def runtime(tmp_path: Path) -> Path:
    """A folder that looks like the unpacked package."""
    for file in page.FILES.values():
        path = tmp_path / 'package/dist' / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'</script>{file}' * 1000)
    return tmp_path / 'package'


def test_a_page_holds_model_runtime_and_names(tmp_path, runtime, monkeypatch):
    """In parts, and no name can end a script."""
    monkeypatch.setattr(page, 'PART', 30)
    model = write_graph(tmp_path / 'model.onnx', classes=['</script><b>'])
    page.write_page(model, tmp_path / 'page.html', runtime)
    text = (tmp_path / 'page.html').read_text()
    packed = {name: b'' for name in ('notes', 'model', 'script', 'wasm')}
    for name, part in re.findall(r'<script type="text/plain" class="(\w+)">([\w+/=]*)</script>', text):
        assert len(part) <= 40
        packed[name] += base64.b64decode(part)
    contents = {name: gzip.decompress(content) for name, content in packed.items()}
    assert contents['model'] == model.read_bytes()
    assert json.loads(contents['notes'])['classes'] == ['</script><b>']
    assert all(contents[name] == (runtime / 'dist' / file).read_bytes() for name, file in page.FILES.items())
    assert 'MIT' in text and 'http://' not in text and 'https://' not in text


def test_an_ending_that_is_neither_of_the_two_is_refused(tmp_path):
    """Also a folder with one of them, before the checkpoint is looked for."""
    (tmp_path / 'page.html').mkdir()
    for out in ('page4/', 'page4', 'page.htm', 'new.onnx/', 'page.html'):
        with pytest.raises(UserError, match=r'\.onnx.*\.html'):
            beit_mm.export('missing.pth', f'{tmp_path}/{out}')
    assert [path.name for path in tmp_path.iterdir()] == ['page.html']


def test_what_a_page_cannot_hold_is_named_with_the_cure(tmp_path, runtime, monkeypatch, capsys):
    lanczos = dict(type='ResizeEdge', scale=8, interpolation='lanczos', backend='pillow')
    refused = [(dict(bands=dict(bands=[1])), 'bands.*onnx'), (dict(steps=[lanczos]), 'lanczos.*onnx')]
    for notes, message in refused:
        with pytest.raises(UserError, match=message):
            page.write_page(write_graph(tmp_path / 'model.onnx', **notes), tmp_path / 'page.html', runtime)
    model = write_graph(tmp_path / 'model.onnx')
    with pytest.raises(UserError, match='nowhere.*--runtime'):
        page.write_page(model, tmp_path / 'page.html', tmp_path / 'nowhere')
    monkeypatch.setattr(page.torch.hub, 'get_dir', lambda: str(tmp_path / 'cache'))
    monkeypatch.setenv('PATH', str(tmp_path))
    with pytest.raises(UserError, match='npm.*--runtime'):
        page.cached_runtime()
    npm = tmp_path / 'npm'
    npm.write_text('#!/bin/sh\necho "npm error request failed, reason: no address" >&2\necho "A log" >&2\nexit 1\n')
    npm.chmod(0o755)
    with pytest.raises(UserError, match='reason: no address.*--runtime'):
        page.cached_runtime()
    assert page.RUNTIME in capsys.readouterr().out
    (tmp_path / 'model.onnx.data').write_bytes(b'weights')
    monkeypatch.setattr(page, 'MAX_BYTES', len(model.read_bytes()))
    with pytest.raises(UserError, match='--float16'):
        page.write_page(model, tmp_path / 'page.html', runtime)
    write_graph(model, np.float16)
    monkeypatch.setattr(page, 'MAX_BYTES', 2**30)
    monkeypatch.setattr(page, 'MAX_BYTES_FLOAT16', 10)
    with pytest.raises(UserError, match='onnx') as refused:
        page.write_page(model, tmp_path / 'page.html', runtime)
    assert '--float16' not in str(refused.value)
    assert not (tmp_path / 'page.html').exists()


@pytest.fixture(scope='module')
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Twenty images: turned in all ways, with transparency, gray, of several formats, one above a megapixel."""
    folder = tmp_path_factory.mktemp('photos')
    packaged = [Image.open(path) for path in sorted(PACKAGED.glob('*/*.jpg'))]
    for number, image in enumerate(packaged):
        image.save(folder / f'{number}.jpg', quality=95)
    for tag in range(2, 9):
        exif = Image.Exif()
        exif[0x0112] = tag
        packaged[tag % 8].save(folder / f'turned{tag}.jpg', exif=exif, quality=95)
    seen = packaged[0].copy()
    seen.putalpha(Image.linear_gradient('L').resize(seen.size))
    seen.save(folder / 'transparent.png')
    packaged[1].convert('L').save(folder / 'gray.png')
    packaged[2].convert('P').save(folder / 'palette.png')
    packaged[3].save(folder / 'photo.webp', lossless=True)
    packaged[4].resize((1300, 1100)).save(folder / 'large.jpg', quality=95)
    return sorted(folder.iterdir())


def save_with_several_labels(path: Path) -> Path:
    """The packaged classifier, with a probability of its own for each class."""
    content = copy.deepcopy(Checkpoint.open(PACKAGED / 'classifier.safetensors').content)
    model = content['meta']['config_dict']['model']
    model['head'] = dict(type='MultiLabelLinearClsHead', num_classes=97, in_channels=128)
    model['data_preprocessor']['to_onehot'] = False
    torch.save(dict(state_dict=content['state_dict'], meta=content['meta']), path)
    return path


@pytest.fixture(scope='module', params=['classifier', 'segmentor', 'several labels, float16'])
def opened(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Browser]]:
    """A packaged model, or one made of it, and its page in a browser."""
    try:
        page.cached_runtime()
    except UserError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp('page')
    several = 'several' in request.param
    model = PACKAGED / f'{request.param}.safetensors'
    model = save_with_several_labels(folder / 'several.pth') if several else model
    beit_mm.export(model, folder / 'page.html', float16=several)
    browser = Browser(folder / 'page.html', folder / 'browser')
    yield model, browser
    browser.close()


def answers(browser: Browser, photos: list[Path]) -> dict[str, dict[str, str]]:
    """The rows of the page's CSV, by file."""
    browser.wait_for('typeof session === "object"')
    browser.choose_files('input', photos)
    browser.wait_for(f'results.length === {len(photos)}')
    browser.evaluate('find("#csv").click()')
    table = browser.bytes_of('find("#csv").href').decode('utf-8-sig')
    return {row['file']: row for row in csv.DictReader(io.StringIO(table))}


class TestInABrowser:
    pytestmark = in_browser

    def test_the_answers_are_those_of_python(self, opened, photos, tmp_path):
        model, browser = opened
        (tmp_path / '=no <b>image.jpg').write_text('text')
        found = answers(browser, [*photos, tmp_path / '=no <b>image.jpg'])
        assert not browser.errors
        failed = found.pop("'=no <b>image.jpg")
        assert None not in failed.values()  # as many cells as all rows
        assert failed['error'] and 'image' in browser.evaluate('document.body.innerText').splitlines()[-3]
        if model.stem == 'several':
            for path, result in zip(photos, beit_mm.classify(model, photos), strict=True):
                for name, share in result['probabilities'].items():
                    assert abs(float(found[path.name][name]) - share) < 0.02, path
            return
        if model.stem == 'classifier':
            truth = beit_mm.classify(model, photos)
            for path, result in zip(photos, truth, strict=True):
                row, names = found[path.name], browser.evaluate('notes.classes')
                expected = {names[label]: share for label, share in result['scores']}
                for rank in (1, 2, 3):
                    assert abs(float(row[f'probability {rank}']) - expected[row[f'class {rank}']]) < 0.02, path
            return
        colours = {tuple(colour): label for label, colour in enumerate(browser.evaluate('notes.palette'))}
        truth = beit_mm.segment(model, photos, tmp_path / 'maps')
        for number, result in enumerate(truth):
            link = f'document.querySelectorAll("section")[{number}].querySelector("a").href'
            drawn = np.array(Image.open(io.BytesIO(browser.bytes_of(link))).convert('RGB'))
            labels = np.apply_along_axis(lambda colour: colours[tuple(colour)], 2, drawn)
            expected = np.array(Image.open(result['labels']))
            assert (labels == expected).mean() >= 0.995, result['path']
            shares = [float(found[Path(result['path']).name][name]) for name in browser.evaluate('notes.classes')]
            assert np.abs(shares - np.bincount(labels.ravel(), minlength=len(shares)) / labels.size).max() < 1e-4

    def test_images_are_prepared_as_in_python(self, opened):
        """Bit for bit as Pillow, for each kind of step; as cv2 to a level of 255 in few pixels, most along the border.

        There cv2 rounds twice, and it has its positions in float32.
        """
        sys.path.insert(0, str(ROOT / 'tools'))
        from onnx_predict import prepare

        browser, rng = opened[1], np.random.default_rng(0)
        browser.wait_for('typeof session === "object"')
        for shape in ((77, 101), (120, 64), (40, 41)):
            image = rng.integers(0, 256, (*shape, 3), dtype=np.uint8)
            rgba = np.dstack([image, np.full(shape, 255, np.uint8)])
            for steps in PREPARATIONS:
                view = (
                    f'{{data: Uint8ClampedArray.from({rgba.ravel().tolist()}), height: {shape[0]}, width: {shape[1]}}}'
                )
                usual = f'const usual = notes.steps; notes.steps = {json.dumps(steps)}; const found = prepare({view})'
                found = browser.evaluate(
                    f'(() => {{ {usual}; notes.steps = usual; return [found.height, found.width, ...found.data] }})()'
                )
                expected = prepare(image, steps)
                assert found[:2] == list(expected.shape[:2]), steps
                difference = np.abs(np.reshape(found[2:], (*found[:2], 4))[..., :3] - expected.astype(int))
                most = 0.005 if any(step.get('backend') == 'cv2' for step in steps) else 0
                assert difference.max() <= 1 and (difference > 0).mean() <= most, steps

    @pytest.mark.parametrize('width', [375, 1280])
    def test_the_page_fits_the_window(self, opened, photos, width):
        browser = opened[1]
        if not browser.evaluate('results.length'):
            answers(browser, photos[:2])
        browser.screenshot(width)
        assert browser.evaluate('[innerWidth, document.documentElement.scrollWidth <= innerWidth]') == [width, True]
        sizes = browser.evaluate('[...document.images].map(image => image.naturalWidth)')
        assert sizes and all(sizes)
