"""ONNX graphs give the model's logits and have no positions to resample."""

import copy
import json
from pathlib import Path

import pytest
import torch
from helpers import run_tool
from mmengine.registry import init_default_scope
from narrow_segmentors import narrow_segmentor
from peers import assert_equal
from torch import nn

from beit_mm.apis import export
from beit_mm.apis.export import export_onnx
from beit_mm.registry import MODELS

onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')
pytestmark = pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::DeprecationWarning')

BUILT, SIZE = (112, 112), (120, 100)  # tables of 732 x 12 numbers, as of 224 pixels: onnxscript resamples small ones
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
ARCH = dict(embed_dims=24, num_layers=2, num_heads=12)
BACKBONE = dict(type='beit_mm.BEiTBackbone', arch=ARCH, img_size=BUILT, patch_size=8, out_type='avg_featmap')
BACKBONE |= dict(rel_pos_bias='per_layer', layer_scale_init=0.1)  # both kinds of positions
CLASSIFIER = dict(
    type='ImageClassifier',
    data_preprocessor=dict(type='ClsDataPreprocessor', mean=MEAN, std=STD),
    backbone=BACKBONE,
    head=dict(type='LinearClsHead', num_classes=7, in_channels=24),
)


def classifier(**changes: object) -> nn.Module:
    """Whose every parameter matters."""
    init_default_scope('mmpretrain')
    model = MODELS.build(dict(CLASSIFIER, backbone=BACKBONE | changes))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def assert_gives(path: Path, images: torch.Tensor, logits: torch.Tensor) -> None:
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    found = torch.from_numpy(session.run(['logits'], {'images': images.numpy()})[0])
    torch.testing.assert_close(found, logits, rtol=0, atol=1e-4 * logits.abs().max().item())


def test_a_graph_gives_the_models_logits_says_what_it_takes_and_the_model_stays_as_it_is(tmp_path, monkeypatch):
    """Of a model in training and half precision, at a size that it is not built for."""
    given, paths = classifier().train(), [tmp_path / name / 'model.onnx' for name in ('small', 'large', 'wrong')]
    given.backbone.half()
    before, programs, trace = copy.deepcopy(given), [], torch.onnx.export
    monkeypatch.setattr(torch.onnx, 'export', lambda *x, **y: programs.append(trace(*x, **y)) or programs[0])
    assert export_onnx(given, paths[0], SIZE) < 1e-4
    assert given.training and [type(module) for module in given.modules()] == [type(x) for x in before.modules()]
    assert_equal(given.state_dict(), before.state_dict())
    monkeypatch.setattr(torch.onnx, 'export', lambda *_, **__: programs[0])
    monkeypatch.setattr(export, 'MAX_FILE_BYTES', 0)
    export_onnx(given, paths[1], SIZE)
    model = before.float().eval()
    for path, files in zip(paths, (['model.onnx'], ['model.onnx', 'model.onnx.data']), strict=False):
        assert sorted(file.name for file in path.parent.iterdir()) == files
        for batch in (1, 5):
            images = torch.rand(batch, 3, *SIZE) * 4 - 2
            with torch.no_grad():
                assert_gives(path, images, model(images))
    given.head.fc.bias.data += 0.1
    with pytest.raises(ValueError, match='differs from the model by'):
        export_onnx(given, paths[2], SIZE)
    assert not list(paths[2].parent.iterdir())

    onnx.checker.check_model(paths[0])
    graph = onnx.load(paths[0])
    assert not {node.op_type for node in graph.graph.node} & {'Einsum', 'Resize'}  # it resamples no positions
    metadata = {entry.key: entry.value for entry in graph.metadata_props}
    assert [json.loads(metadata[name]) for name in ('mean', 'std', 'size')] == [MEAN, STD, [*SIZE]]
    assert 'before the softmax' in metadata['output']
    values = graph.graph.input[0], graph.graph.output[0]
    shapes = [[d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in values]
    batch = shapes[0][0]
    assert batch in ('batch', 's0') and shapes == [[batch, 3, *SIZE], [batch, 7]]  # torch 2.6 gives its own name


def test_a_segmentors_graph_gives_its_logits_of_the_whole_image(tmp_path):
    model = narrow_segmentor('bias', 'beit_mm.EfficientSETRUPHead', crop_size=(64, 96), stride=(64, 96))
    if torch.__version__.startswith('2.6.'):
        with pytest.raises(ValueError, match='needs torch 2.7 or newer'):
            export_onnx(model, tmp_path / 'model.onnx', (64, 96))
        return
    assert export_onnx(model, tmp_path / 'model.onnx', (64, 96)) < 1e-4
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        assert_gives(tmp_path / 'model.onnx', images, model.inference(images))
    with pytest.raises(ValueError, match='72 x 96; this segmentor takes sides that are multiples of'):
        export_onnx(model, tmp_path / 'other.onnx', (72, 96))


def test_what_is_no_classifier_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match='whose backbone is a BEiTBackbone, not Linear on NoneType'):
        export_onnx(nn.Linear(2, 2), tmp_path / 'model.onnx', BUILT)
    with pytest.raises(ValueError, match=r"logits \(batch, classes\): .*'avg_featmap'"):
        export_onnx(classifier(out_type='raw'), tmp_path / 'model.onnx', BUILT)
    monkeypatch.setattr(export, 'find_spec', lambda name: None if name == 'onnxruntime' else object())
    with pytest.raises(ValueError, match='^ONNX export needs onnxruntime: pip install onnx onnxruntime onnxscript$'):
        export_onnx(classifier(), tmp_path / 'model.onnx', BUILT)


@pytest.mark.parametrize('with_config', [True, False])
def test_the_tool_takes_a_config_or_what_the_checkpoint_says(with_config, tmp_path, monkeypatch, capsys):
    model, called = classifier(), []
    monkeypatch.setattr(export, 'export_onnx', lambda *args: called.append(args) or 1e-6)
    monkeypatch.chdir(tmp_path)
    meta = dict(architecture=dict(num_heads=12), preprocessing=dict(mean=MEAN, std=STD, size=BUILT))
    torch.save(dict(state_dict=model.state_dict(), meta={} if with_config else meta), 'weights.pth')
    words = ['weights.pth', 'new.onnx']
    if with_config:
        config = dict(CLASSIFIER)
        preprocessor = config.pop('data_preprocessor')  # mmpretrain's configs have it beside the model
        loader = dict(dataset=dict(pipeline=[dict(type='beit_mm.LoadImage')]))
        text = f'model = {config}\ndata_preprocessor = {preprocessor}\ntest_dataloader = {loader}\n'
        Path('config.py').write_text(text)
        words = ['config.py', *words, '--size', *SIZE]
    run_tool('export_onnx.py', *words)
    ((built, path, size),) = called
    assert path == 'new.onnx' and size == (SIZE if with_config else BUILT)
    assert f'{size[0]} x {size[1]} pixels' in capsys.readouterr().out
    images = torch.randn(2, 3, *BUILT)
    with torch.no_grad():
        torch.testing.assert_close(built(images), model(images))
    assert export.preprocessing_of_model(built)['mean'] == MEAN
