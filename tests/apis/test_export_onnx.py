"""ONNX files give the model's logits at any size, and the program without torch its labels."""

import copy
import json
import os
import subprocess
import sys
from functools import partial, partialmethod
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from helpers import ROOT
from labelled import BACKBONE, CLASSES, TEST_PIPELINE, make_images
from mmengine.registry import DefaultScope
from narrow_segmentors import CROP, SEGMENTOR, build_segmentor, narrow_config, narrow_segmentor
from PIL import Image
from torch import nn

import beit_mm
from beit_mm.apis import export
from beit_mm.apis.export import AveragePool, StoredPositions, export_onnx, interpolation
from beit_mm.checkpoint.read import write_checkpoint
from beit_mm.positions import POSITION_MODES, resize_position_embedding
from beit_mm.registry import MODELS, TRANSFORMS

onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')
quantize_dynamic = pytest.importorskip('onnxruntime.quantization').quantize_dynamic
pytest.importorskip('onnxscript')
pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::DeprecationWarning'),
    pytest.mark.skipif(torch.__version__.startswith('2.6.'), reason='torch 2.6 cannot export it'),
]

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
SHAPES = [(5, 7), (33, 47), (40, 170), (64, 64), (65, 64), (128, 128), (150, 90), (300, 61), (1, 1), (97, 131)]
POSITIONS = dict(rel_pos_bias='shared', abs_pos_embed=True)  # segmentors have a bias in each block
CLASSIFIER = dict(
    type='ImageClassifier',
    data_preprocessor=dict(type='ClsDataPreprocessor', mean=MEAN, std=STD),
    backbone=dict(BACKBONE, out_type='avg_featmap', layer_scale_init=0.1, **POSITIONS),
    head=dict(type='LinearClsHead', num_classes=3, in_channels=32),
)
VIEWS = dict(type='beit_mm.MultiScaleViews', short_side=CROP, crop_size=(CROP, CROP), ratios=(0.5, 1.0, 1.3))
COLOURS = [[40 * place, 255 - 40 * place, 0] for place in range(5)]


@pytest.fixture
def trace_once(monkeypatch) -> None:
    """Later exports of a test get the graph of its first."""
    trace, graphs = torch.onnx.export, []

    def first(*args: object, **kwargs: object) -> object:
        if not graphs:
            graphs.append(trace(*args, **kwargs))
        return graphs[0]

    monkeypatch.setattr(torch.onnx, 'export', first)


def classifier() -> nn.Module:
    """Whose every parameter matters, the same at every call."""
    torch.manual_seed(0)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(CLASSIFIER)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def files(folder: Path, head: str = 'beit_mm.EfficientUPerHead') -> tuple[Path, Path]:
    """A segmentor's checkpoint with its config, and its ONNX file."""
    steps = [dict(type='beit_mm.LoadImage'), dict(type='Resize', scale=(2048, CROP), keep_ratio=True)]
    dataset = dict(type='beit_mm.SegmentationFolder', pipeline=[*steps, dict(type='PackSegInputs')])
    tta = dict(tta_model=dict(type='beit_mm.MultiScaleTTA'), tta_pipeline=[steps[0], VIEWS])
    config = dict(
        model=narrow_config('bias', head).to_dict(), test_dataloader=dict(dataset=dataset), default_scope='mmseg', **tta
    )
    meta = dict(config_dict=config, dataset_meta=dict(classes=[*'abcde'], palette=COLOURS))
    model = narrow_segmentor('bias', head)
    pixels = torch.rand(4, 3, 6, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():  # without this one class would be everywhere
        logits = model.decode_head(model.extract_feat(nn.functional.interpolate(pixels, (CROP, CROP), mode='bicubic')))
        if head == SEGMENTOR['decode_head']['type']:
            model.decode_head.conv_seg.bias -= logits.mean(dim=(0, 2, 3))
        else:
            model.decode_head.class_predictor.bias[:-1] -= logits.mean(dim=(0, 2, 3)).log()
    write_checkpoint(folder / 'model.pth', dict(state_dict=model.state_dict(), meta=meta))
    return folder / 'model.pth', beit_mm.export(folder / 'model.pth', folder / 'model.onnx')


@pytest.fixture(
    scope='module', params=[pytest.param(where, marks=pytest.mark.slow) for where in ('decoder', 'backbone')]
)
def mask_segmentor(request, tmp_path_factory) -> tuple[Path, Path]:
    return files(tmp_path_factory.mktemp('onnx_masks'), request.param)


@pytest.fixture(scope='module')
def segmentor(tmp_path_factory) -> tuple[Path, Path]:
    return files(tmp_path_factory.mktemp('onnx'))


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> list[Path]:
    """Smooth ones, one of them sideways by its EXIF tag and one with transparency."""
    folder, rng = tmp_path_factory.mktemp('images'), np.random.default_rng(0)
    for place, (height, width) in enumerate(SHAPES):
        image = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8)).resize((width, height))
        if place == 3:
            image.putalpha(Image.linear_gradient('L').resize((width, height)))
        exif = Image.Exif()
        exif[0x0112] = 6 if place == 6 else 1
        image.save(folder / f'{place}.{"jpg" if place > 3 else "png"}', exif=exif, quality=95)
    return sorted(folder.iterdir())


def run(path: Path, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return torch.from_numpy(session.run(['logits'], {'images': images.numpy()})[0])


def predict(*words: object, status: int = 0, **environment: str) -> str:
    """What tools/onnx_predict.py says, or why it stops, in a process that has no torch and none of us."""
    code = f"""import runpy, sys
sys.modules.update(dict.fromkeys(('torch', 'beit_mm', 'mmengine', 'mmcv', 'cv2', 'scipy', 'onnx')))
sys.argv = {[str(ROOT / 'tools/onnx_predict.py'), *map(str, words)]}
runpy.run_path(sys.argv[0], run_name='__main__')"""
    program = [sys.executable, '-I', '-c', code]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=100, env={**os.environ, **environment})
    assert ended.returncode == status, ended
    return ended.stderr if status == 2 else ended.stdout


def labels_of(folder: Path) -> dict[str, np.ndarray]:
    return {path.stem: np.asarray(Image.open(path)) for path in sorted(folder.iterdir())}


def check_labels(files: tuple[Path, Path], images: list[Path], folder: Path, multi_scale: bool) -> None:
    """The program without torch gives the labels of the checkpoint, with the ONNX file beside it."""
    checkpoint, path = files
    images = [*images, images[0]]  # twice the same name
    beit_mm.segment(checkpoint, images, folder / 'truth', multi_scale=multi_scale)
    said = predict(path, *images, '--out', folder / 'maps', *['--multi-scale'] * multi_scale)
    truth, found = (labels_of(folder / part) for part in ('truth/labels', 'maps'))
    assert len(said.splitlines()) == len(truth) == len(SHAPES) + 1
    assert truth.keys() == found.keys()
    for name, labels in truth.items():
        differing = (labels != found[name]).sum()  # where two classes are equal except for rounding
        assert labels.shape == found[name].shape and differing <= labels.size // 2000, (name, differing)
    assert len({label for labels in found.values() for label in np.unique(labels)}) > 2
    assert Image.open(folder / 'maps/0.png').getpalette()[:15] == sum(COLOURS, [])


@pytest.mark.parametrize('multi_scale', [False, True])
def test_the_program_without_torch_gives_the_segmentors_labels(segmentor, images, tmp_path, multi_scale):
    check_labels(segmentor, images, tmp_path, multi_scale)


@torch.no_grad()
@pytest.mark.parametrize(('loader', 'sees_bgr'), [('LoadImageFromFile', True), ('beit_mm.LoadImage', False)])
def test_a_model_that_sees_bgr_is_written_for_rgb(segmentor, tmp_path, monkeypatch, loader, sees_bgr):
    content = torch.load(segmentor[0], weights_only=True)
    config = content['meta']['config_dict']
    config['test_dataloader']['dataset']['pipeline'][0] = dict(type=loader)
    config['model']['data_preprocessor']['mean'] = [10, 20, 30]
    write_checkpoint(tmp_path / 'model.pth', content)
    models = [beit_mm.SegmentationInferencer(tmp_path / 'model.pth', 'cpu').model]
    monkeypatch.setattr(export, 'export_onnx', lambda model, *_: models.append(model) or 0.0)
    beit_mm.export(tmp_path / 'model.pth', tmp_path / 'model.onnx')
    pixels = 255 * torch.rand(1, 3, CROP, CROP)
    seen = pixels.flip(1) if sees_bgr else pixels, pixels
    expected, found = (
        model.logits((image - model.data_preprocessor.mean) / model.data_preprocessor.std)
        for model, image in zip(models, seen, strict=True)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


def test_the_program_takes_the_results_of_a_mask_head_as_probabilities(mask_segmentor, images, tmp_path):
    for multi_scale in (False, True):
        check_labels(mask_segmentor, images, tmp_path / str(multi_scale), multi_scale)


def test_one_bad_image_costs_none_of_the_others_and_starts_no_program(segmentor, images, tmp_path):
    started = tmp_path / 'started'
    (tmp_path / 'gs').write_text(f'#!/bin/sh\ntouch {started}\n')  # Ghostscript
    (tmp_path / 'gs').chmod(0o755)
    bad = [tmp_path / name for name in ('gone.png', 'program.jpg', 'long.png', 'pipe.png', 'cut\x1b]0;owned\x07.jpg')]
    bad[1].write_text('%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n%%EndComments\n')
    Image.new('RGB', (20_000, 1)).save(bad[2])
    os.mkfifo(bad[3])
    bad[4].write_bytes(images[-1].read_bytes()[:500])
    paths = f'{tmp_path}:{os.environ["PATH"]}'
    lines = predict(segmentor[1], *bad, images[0], '--out', tmp_path / 'maps', status=1, PATH=paths).splitlines()
    named = [str(path).replace('\x1b', r'\x1b').replace('\x07', r'\x07') for path in bad]
    assert all(line.startswith(f'{name}: failed') for name, line in zip(named, lines, strict=False))
    assert lines[5].startswith(f'{images[0]}: ') and len(lines) == 6 and not started.exists()
    assert [path.name for path in (tmp_path / 'maps').iterdir()] == ['0.png']


@pytest.mark.parametrize(
    ('changes', 'status', 'message'),
    [
        (dict(stride=[1, 1]), 2, 'strides=[1, 1]'),
        (dict(ratios=[1] * 10**6), 2, '1000000 scales'),
        (dict(divisor=10**9), 2, 'divisor=1000000000'),
        (dict(ratios=[10**6]), 1, 'pixels become'),
        (dict(classes=None), 1, 'failed'),
        (dict(bands=dict(bands=None, low=[0], high=[9])), 2, 'reads only RGB'),
        (None, 2, 'beit-mm export'),
    ],
)
def test_metadata_are_believed_within_limits(segmentor, images, tmp_path, changes, status, message):
    model = onnx.load(segmentor[1])
    (entry,) = (entry for entry in model.metadata_props if entry.key == 'beit_mm')
    entry.value = json.dumps(json.loads(entry.value) | changes) if changes else 'no JSON'
    onnx.save(model, path := tmp_path / 'other.onnx')
    assert message in predict(path, images[0], '--multi-scale', '--out', tmp_path / 'maps', status=status)


@pytest.mark.slow
@pytest.mark.parametrize('variant', ['absolute', 'rotary'])
def test_a_graph_gives_the_models_logits_at_any_size(variant, tmp_path, trace_once):
    """SETR-PUP, whose resizings share a factor, on positions without a bias; also at that of its long windows."""
    windows = dict(crop_size=(1056, CROP), stride=(700, CROP))
    model = build_segmentor(narrow_config(variant, 'beit_mm.EfficientSETRUPHead', **windows).to_dict())
    state = copy.deepcopy(model.state_dict())
    export_onnx(model, tmp_path / 'model.onnx')
    export_onnx(model, tmp_path / 'half.onnx', float16=True)  # which compares it with the model
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    for batch, height, width in ((1, 16, 16), (2, 64, 32), (1, 160, 48), (1, 1056, 16)):
        inputs = torch.randn(batch, 3, height, width)
        with torch.no_grad():
            logits = model.decode_head(model.extract_feat(inputs))
        expected = nn.functional.interpolate(logits, (height, width), mode='bilinear')
        found = run(tmp_path / 'model.onnx', inputs)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4 * expected.abs().max().item())


def test_classes_are_those_of_the_classifier_in_half_precision_too(tmp_path, trace_once):
    """Both resizings of Pillow and the crop."""
    make_images(tmp_path / 'data')
    config = dict(
        model=CLASSIFIER,
        test_dataloader=dict(dataset=dict(type='beit_mm.ImageFolder', pipeline=TEST_PIPELINE)),
        default_scope='mmpretrain',
    )
    meta = dict(config_dict=config, dataset_meta=dict(classes=CLASSES))
    write_checkpoint(tmp_path / 'model.pth', dict(state_dict=classifier().state_dict(), meta=meta))
    images = sorted((tmp_path / 'data/val').glob('*/*.png'))
    truth = beit_mm.classify(tmp_path / 'model.pth', images)
    for float16, tolerance in ((False, 0.0011), (True, 0.02)):
        path = beit_mm.export(tmp_path / 'model.pth', tmp_path / f'{float16}.onnx', float16=float16)
        for line, result in zip(predict(path, *images).splitlines(), truth, strict=True):
            name, probability = line.split(': ')[1].split(', ')[0].split()
            best, second, *_ = [score for _, score in result['scores']]
            assert abs(float(probability) - best) < tolerance and (name == result['name'] or best - second < tolerance)
    assert '--multi-scale' in predict(path, *images, '--multi-scale', status=2)  # a classifier has no scales
    assert '--out' in predict(path, *images, '--out', tmp_path / 'maps', status=2).splitlines()[-1]  # and no label maps
    quantize_dynamic(tmp_path / 'False.onnx', tmp_path / 'int8.onnx')
    assert len(predict(tmp_path / 'int8.onnx', *images).splitlines()) == len(images)
    sizes = [(tmp_path / f'{float16}.onnx').stat().st_size for float16 in (False, True)]
    assert sizes[1] < 0.75 * sizes[0]
    notes = {entry.key: entry.value for entry in onnx.load(tmp_path / 'False.onnx').metadata_props}
    described = json.loads(notes['beit_mm'])
    assert [described[name] for name in ('mean', 'std', 'size', 'divisor')] == [MEAN, STD, [32, 32], 8]


@pytest.mark.slow
def test_a_probe_of_one_layer_is_a_classifier_too(tmp_path):
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        preprocessor = CLASSIFIER['data_preprocessor']
        sizes = dict(backbone=BACKBONE, num_classes=3, layers=1, data_preprocessor=preprocessor)
        probe = MODELS.build(dict(type='beit_mm.AttentiveProbe', **sizes)).eval()
    assert export_onnx(probe, tmp_path / 'probe.onnx') < 1e-4  # compares it with the model


def test_resizing_is_that_of_cv2_and_pooling_that_of_torch():
    sys.path.insert(0, str(ROOT / 'tools'))
    from onnx_predict import resize

    rng = np.random.default_rng(0)
    for case in range(60):
        height, width, *size = rng.integers(1, 120, 4).tolist()
        size = [height // 2 + 1, width // 2 + 1] if case < 6 else size
        pixels = rng.integers(0, 256, (2 * size[0], 2 * size[1], 3) if case < 6 else (height, width, 3), dtype=np.uint8)
        assert np.array_equal(resize(pixels, size), cv2.resize(pixels, size[::-1]))
        if min(height, width) > 5:
            x = torch.rand(2, 3, height, width)
            expected = nn.functional.adaptive_avg_pool2d(x, case % 6 + 1)
            torch.testing.assert_close(AveragePool(case % 6 + 1)(x), expected, rtol=0, atol=1e-5)


def test_a_large_graph_has_its_weights_beside_it_and_one_that_differs_is_not_written(tmp_path, monkeypatch, trace_once):
    model = classifier()
    with_data = partialmethod(torch.onnx.ONNXProgram.save, external_data=True)  # as torch saves one above 2 GB
    monkeypatch.setattr(torch.onnx.ONNXProgram, 'save', with_data)
    export_onnx(model, tmp_path / 'new/model.onnx')
    export_onnx(model, tmp_path / 'new/half.onnx', float16=True)
    assert sorted(file.name for file in (tmp_path / 'new').iterdir()) == ['half.onnx', 'model.onnx', 'model.onnx.data']
    inputs = torch.randn(2, 3, 24, 40)
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path / 'new/model.onnx', inputs), model(inputs), rtol=0, atol=1e-3)
    model.head.fc.bias.data += 1
    with pytest.raises(ValueError, match='differs from the model by'):
        export_onnx(model, tmp_path / 'other/model.onnx')
    assert not list((tmp_path / 'other').iterdir())


def test_what_no_file_can_hold_and_missing_packages_are_named(tmp_path, monkeypatch):
    segmentor = narrow_segmentor('bias')
    segmentor.decode_head.out_channels = 1
    with pytest.raises(ValueError, match='a logit for each class'):
        export_onnx(segmentor, tmp_path / 'model.onnx')
    step = TRANSFORMS.build(dict(type='mmcv.Resize', scale=(8, 8), interpolation='bicubic'))
    with pytest.raises(ValueError, match='expected Resize'):
        export.describe_step(step)
    monkeypatch.setattr(export, 'find_spec', lambda name: None if name == 'onnxruntime' else object())
    with pytest.raises(ValueError, match='pip install .*onnxruntime'):
        export_onnx(classifier(), tmp_path / 'model.onnx')


@pytest.mark.parametrize('mode', POSITION_MODES)
def test_a_graph_resizes_positions_as_the_model(mode):
    positions, grid = torch.randn(1, 1 + 5 * 6, 8), (5, 6)
    stored = StoredPositions(grid, 9, partial(interpolation, mode=mode))
    for target in ((5, 6), (9, 7), (3, 4)):
        expected = resize_position_embedding(positions, grid, target, mode)
        torch.testing.assert_close(stored(positions, grid, target, mode), expected, atol=1e-5, rtol=1e-5)
