"""ONNX graphs hold the bias as a constant and give the model's logits."""

import copy
import json
import runpy
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT
from mmengine.registry import init_default_scope
from narrow_segmentors import narrow_segmentor
from torch import nn

from beit_mm.apis import export
from beit_mm.apis.export import export_onnx
from beit_mm.positions import bias_from_table
from beit_mm.registry import MODELS

onnx = pytest.importorskip('onnx')
onnxruntime = pytest.importorskip('onnxruntime')
pytest.importorskip('onnxscript')
pytestmark = pytest.mark.filterwarnings('ignore::FutureWarning', 'ignore::DeprecationWarning')

BUILT = (32, 32)
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
VARIANTS = {
    'vit': dict(),
    'per_layer': dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
    'shared': dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1),
}


def classifier_config(**backbone: object) -> dict:
    return dict(
        type='ImageClassifier',
        data_preprocessor=dict(type='ClsDataPreprocessor', mean=MEAN, std=STD),
        backbone=dict(
            dict(
                type='beit_mm.BEiTBackbone',
                arch=dict(embed_dims=32, num_layers=2, num_heads=4),
                img_size=BUILT,
                patch_size=8,
                out_type='avg_featmap',
            ),
            **backbone,
        ),
        head=dict(type='LinearClsHead', num_classes=7, in_channels=32),
    )


def classifier(**backbone: object) -> nn.Module:
    """A narrow classifier whose every parameter matters."""
    init_default_scope('mmpretrain')
    model = MODELS.build(classifier_config(**backbone))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.eval()


def run(path, images: torch.Tensor) -> torch.Tensor:
    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    return torch.from_numpy(session.run(['logits'], {'images': images.numpy()})[0])


def constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    return {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}


@pytest.mark.parametrize(
    ('variant', 'out_type', 'size'),
    [
        ('vit', 'cls_token', (24, 44)),
        ('per_layer', 'avg_featmap', (40, 24)),
        pytest.param('shared', 'avg_featmap', (40, 24), marks=pytest.mark.slow),
    ],
)
def test_graph_gives_the_models_logits_from_constants(variant, out_type, size, tmp_path):
    """For the size that the model is built for, others and padded rectangles; the model stays as it is."""
    model = classifier(**VARIANTS[variant], out_type=out_type)
    given = copy.deepcopy(model)
    if variant == 'per_layer':
        given.train()
        for part in (given.backbone, given.head):
            part.half()
    model.load_state_dict(given.state_dict())
    modules, training = [type(module) for module in given.modules()], given.training
    path = tmp_path / 'model.onnx'
    assert export_onnx(given, path, size) < 1e-4
    assert [file.name for file in tmp_path.iterdir()] == ['model.onnx']
    assert given.training == training and [type(module) for module in given.modules()] == modules
    assert all(torch.equal(tensor.float(), model.state_dict()[name]) for name, tensor in given.state_dict().items())

    images = torch.rand(5, 3, *size) * 4 - 2
    with torch.no_grad():
        logits = model(images)
    for batch in (1, 5):
        torch.testing.assert_close(
            run(path, images[:batch]), logits[:batch], rtol=0, atol=1e-4 * logits.abs().max().item()
        )

    check_metadata(onnx.load(path), size)
    graph = onnx.load(path).graph
    onnx.checker.check_model(path)
    derived = {'GatherND', 'GatherElements', 'Einsum', 'Resize', *(['Gather'] if out_type != 'cls_token' else [])}
    shapes = {node.output[0] for node in graph.node if node.op_type == 'Shape'}  # torch 2.6 gathers the batch's size
    assert not derived & {node.op_type for node in graph.node if not shapes & set(node.input)}
    held, read = constants(graph), {name for node in graph.node for name in node.input}
    grid, (heads, tokens) = (-(-size[0] // 8), -(-size[1] // 8)), (4, 1 + -(-size[0] // 8) * -(-size[1] // 8))
    tables = [p for name, p in model.named_parameters() if name.endswith('relative_position_bias_table')]
    assert len(tables) == dict(vit=0, per_layer=2, shared=1)[variant]
    assert not [name for name, value in held.items() if value.shape == (52, heads)]  # 7 x 7 offsets and 3
    for table in tables:
        bias = bias_from_table(table.detach(), (4, 4), grid)[..., :tokens].numpy()
        assert [
            name
            for name, value in held.items()
            if name in read
            and value.shape[:3] == (1, heads, tokens)
            and np.allclose(value[..., :tokens], bias, atol=1e-6)
        ]
    if variant == 'vit':
        embeddings = [value for name, value in held.items() if name in read and value.shape == (1, tokens, 32)]
        assert len(embeddings) == 1
        assert np.allclose(embeddings[0][0, 0], model.backbone.pos_embed[0, 0].detach())


def check_metadata(model: onnx.ModelProto, size: tuple[int, int]) -> None:
    """They say how images are prepared."""
    metadata = {entry.key: entry.value for entry in model.metadata_props}
    assert (json.loads(metadata['mean']), json.loads(metadata['std'])) == (MEAN, STD)
    assert json.loads(metadata['size']) == [*size]
    assert 'before the softmax' in metadata['output']
    shapes = [
        [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]
        for value in (model.graph.input[0], model.graph.output[0])
    ]
    batch = shapes[0][0]
    assert batch in ('batch', 's0')  # torch 2.6 gives a name of its own
    assert shapes == [[batch, 3, *size], [batch, 7]]


@pytest.mark.parametrize(
    'head', ['beit_mm.EfficientSETRUPHead', pytest.param('beit_mm.EfficientUPerHead', marks=pytest.mark.slow)]
)
def test_a_segmentors_graph_gives_its_logits_of_the_whole_image(head, tmp_path):
    pytest.importorskip('mmseg')
    model = narrow_segmentor('bias', head, crop_size=(64, 96), stride=(64, 96))
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


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


def test_a_graph_that_differs_is_not_written(tmp_path):
    model = classifier()
    model.head.fc = nn.Sequential(model.head.fc, Noise())
    with pytest.raises(ValueError, match='differs from the model by'):
        export_onnx(model, tmp_path / 'model.onnx', BUILT)
    assert not list(tmp_path.iterdir())


def test_what_is_no_classifier_is_refused(tmp_path):
    with pytest.raises(ValueError, match='whose backbone is a BEiTBackbone, not Linear on NoneType'):
        export_onnx(nn.Linear(2, 2), tmp_path / 'model.onnx', BUILT)
    with pytest.raises(ValueError, match=r"logits \(batch, classes\): .*'avg_featmap'"):
        export_onnx(classifier(out_type='raw'), tmp_path / 'model.onnx', BUILT)


def test_missing_packages_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(export, 'find_spec', lambda name: None if name == 'onnxruntime' else object())
    with pytest.raises(ValueError, match='^ONNX export needs onnxruntime: pip install onnx onnxruntime onnxscript$'):
        export_onnx(classifier(), tmp_path / 'model.onnx', BUILT)


def test_command(tmp_path, monkeypatch, capsys):
    """Of a large model, which has its weights in a second file."""
    monkeypatch.setattr(export, 'MAX_FILE_BYTES', 0)
    model = classifier(**VARIANTS['per_layer'])
    torch.save(dict(state_dict=model.state_dict()), tmp_path / 'weights.pth')
    config = dict(classifier_config(**VARIANTS['per_layer']))
    preprocessor = config.pop('data_preprocessor')  # mmpretrain's configs have it beside the model
    (tmp_path / 'config.py').write_text(f'model = {config}\ndata_preprocessor = {preprocessor}\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        sys, 'argv', ['export_onnx.py', 'config.py', 'weights.pth', 'new/model.onnx', '--size', '24', '40']
    )
    runpy.run_path(str(ROOT / 'tools/export_onnx.py'), run_name='__main__')
    assert '24 x 40 pixels' in capsys.readouterr().out
    assert sorted(file.name for file in (tmp_path / 'new').iterdir()) == ['model.onnx', 'model.onnx.data']
    images = torch.randn(1, 3, 24, 40)
    with torch.no_grad():
        logits = model(images)
    torch.testing.assert_close(run(tmp_path / 'new/model.onnx', images), logits, rtol=1e-4, atol=1e-4)
    metadata = {entry.key: entry.value for entry in onnx.load(tmp_path / 'new/model.onnx').metadata_props}
    assert json.loads(metadata['mean']) == MEAN


def test_command_without_a_config(tmp_path, monkeypatch, capsys):
    """The checkpoint says what the model is, and the backbone its size."""
    model = classifier(**VARIANTS['per_layer'])
    meta = dict(architecture=dict(num_heads=4), preprocessing=dict(mean=MEAN, std=STD, size=BUILT))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'weights.pth')
    exported = []
    monkeypatch.setattr(export, 'export_onnx', lambda *args: exported.append(args) or 1e-6)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, 'argv', ['export_onnx.py', 'weights.pth', 'model.onnx'])
    runpy.run_path(str(ROOT / 'tools/export_onnx.py'), run_name='__main__')
    assert '32 x 32 pixels' in capsys.readouterr().out
    ((built, path, size),) = exported
    images = torch.randn(1, 3, *BUILT)
    with torch.no_grad():
        torch.testing.assert_close(built(images), model(images))
    assert (path, size) == ('model.onnx', BUILT)
