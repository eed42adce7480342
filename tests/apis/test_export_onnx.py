"""ONNX graphs give the model's logits and have no positions to resample."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch
from helpers import run_tool
from mmengine.registry import init_default_scope
from narrow_segmentors import narrow_segmentor
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


def classifier_config(out_type: str = 'avg_featmap') -> dict:
    """Of a narrow classifier with both kinds of positions."""
    arch = dict(embed_dims=24, num_layers=2, num_heads=12)
    backbone = dict(type='beit_mm.BEiTBackbone', arch=arch, img_size=BUILT, patch_size=8, out_type=out_type)
    return dict(
        type='ImageClassifier',
        data_preprocessor=dict(type='ClsDataPreprocessor', mean=MEAN, std=STD),
        backbone=dict(backbone, rel_pos_bias='per_layer', layer_scale_init=0.1),
        head=dict(type='LinearClsHead', num_classes=7, in_channels=24),
    )


def classifier(out_type: str = 'avg_featmap') -> nn.Module:
    """Whose every parameter matters."""
    init_default_scope('mmpretrain')
    model = MODELS.build(classifier_config(out_type))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def run(path, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return torch.from_numpy(session.run(['logits'], {'images': images.numpy()})[0])


def assert_gives_the_models_logits(path, model: nn.Module) -> None:
    for batch in (1, 5):
        images = torch.rand(batch, 3, *SIZE) * 4 - 2
        with torch.no_grad():
            logits = model(images)
        torch.testing.assert_close(run(path, images), logits, rtol=0, atol=1e-4 * logits.abs().max().item())


@pytest.fixture(scope='module')
def exported(tmp_path_factory) -> SimpleNamespace:
    """A model in training and half precision at a size that it is not built for, the same as it was, its graph."""
    torch.manual_seed(0)
    given, path = classifier().train(), tmp_path_factory.mktemp('onnx') / 'model.onnx'
    for part in (given.backbone, given.head):
        part.half()
    model, programs, trace = copy.deepcopy(given), [], torch.onnx.export
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.onnx, 'export', lambda *x, **y: programs.append(trace(*x, **y)) or programs[0])
        difference = export_onnx(given, path, SIZE)
    return SimpleNamespace(given=given, model=model, path=path, program=programs[0], difference=difference)


def test_a_graph_gives_the_models_logits_says_what_it_takes_and_the_model_stays_as_it_is(exported):
    given, model = exported.given, exported.model
    assert given.training and [type(module) for module in given.modules()] == [type(x) for x in model.modules()]
    state = given.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert exported.difference < 1e-4 and [file.name for file in exported.path.parent.iterdir()] == ['model.onnx']
    assert_gives_the_models_logits(exported.path, copy.deepcopy(model).float().eval())
    graph = onnx.load(exported.path)
    metadata = {entry.key: entry.value for entry in graph.metadata_props}
    assert [json.loads(metadata[name]) for name in ('mean', 'std', 'size')] == [MEAN, STD, [*SIZE]]
    assert 'before the softmax' in metadata['output']
    values = graph.graph.input[0], graph.graph.output[0]
    shapes = [[d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim] for value in values]
    batch = shapes[0][0]
    assert batch in ('batch', 's0') and shapes == [[batch, 3, *SIZE], [batch, 7]]  # torch 2.6 gives its own name


def test_a_graph_resamples_no_positions(exported):
    onnx.checker.check_model(exported.path)
    assert not {node.op_type for node in onnx.load(exported.path).graph.node} & {'Einsum', 'Resize'}


def test_a_large_graph_has_its_weights_beside_it_and_one_that_differs_is_not_written(exported, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.onnx, 'export', lambda *_, **__: exported.program)
    model = copy.deepcopy(exported.model)
    monkeypatch.setattr(export, 'MAX_FILE_BYTES', 0)
    export_onnx(model, tmp_path / 'new/model.onnx', SIZE)
    assert sorted(file.name for file in (tmp_path / 'new').iterdir()) == ['model.onnx', 'model.onnx.data']
    assert_gives_the_models_logits(tmp_path / 'new/model.onnx', copy.deepcopy(model).float().eval())
    model.head.fc.bias.data += 0.1
    with pytest.raises(ValueError, match='differs from the model by'):
        export_onnx(model, tmp_path / 'other/model.onnx', SIZE)
    assert not list((tmp_path / 'other').iterdir())


def test_a_segmentors_graph_gives_its_logits_of_the_whole_image(tmp_path):
    model = narrow_segmentor('bias', 'beit_mm.EfficientSETRUPHead', crop_size=(64, 96), stride=(64, 96))
    if torch.__version__.startswith('2.6.'):
        with pytest.raises(ValueError, match='needs torch 2.7 or newer'):
            export_onnx(model, tmp_path / 'model.onnx', (64, 96))
        return
    assert export_onnx(model, tmp_path / 'model.onnx', (64, 96)) < 1e-4
    images = torch.randn(2, 3, 64, 96)
    with torch.no_grad():
        expected = model.inference(images)  # 2, classes, 64, 96
    torch.testing.assert_close(run(tmp_path / 'model.onnx', images), expected, rtol=0, atol=1e-4 * expected.abs().max())
    with pytest.raises(ValueError, match='72 x 96; this segmentor takes sides that are multiples of'):
        export_onnx(model, tmp_path / 'other.onnx', (72, 96))


def test_what_is_no_classifier_and_missing_packages_are_named(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match='whose backbone is a BEiTBackbone, not Linear on NoneType'):
        export_onnx(nn.Linear(2, 2), tmp_path / 'model.onnx', BUILT)
    with pytest.raises(ValueError, match=r"logits \(batch, classes\): .*'avg_featmap'"):
        export_onnx(classifier('raw'), tmp_path / 'model.onnx', BUILT)
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
        config = classifier_config()
        preprocessor = config.pop('data_preprocessor')  # mmpretrain's configs have it beside the model
        loader = dict(dataset=dict(pipeline=[dict(type='beit_mm.LoadImage')]))
        text = f'model = {config}\ndata_preprocessor = {preprocessor}\ntest_dataloader = {loader}\n'
        (tmp_path / 'config.py').write_text(text)
        words = ['config.py', *words, '--size', *SIZE]
    run_tool('export_onnx.py', *words)
    ((built, path, size),) = called
    assert path == 'new.onnx' and size == (SIZE if with_config else BUILT)
    assert f'{size[0]} x {size[1]} pixels' in capsys.readouterr().out
    images = torch.randn(2, 3, *BUILT)
    with torch.no_grad():
        torch.testing.assert_close(built(images), model(images))
    assert export.preprocessing_of_model(built)['mean'] == MEAN
