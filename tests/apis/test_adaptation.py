"""Fine-tuning that trains little: LoRA and frozen blocks, from plan to files that every verb takes."""

import re
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from label_maps import make_label_maps
from labelled import ARCH, make_images, save_backbone
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import nn

import beit_mm
from beit_mm import __main__ as command
from beit_mm.apis import split, training
from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.errors import UserError
from beit_mm.models import BEiTBackbone
from beit_mm.registry import MODELS


@pytest.fixture(scope='module', autouse=True)
def few_images():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(split, 'MIN_IMAGES', 10)
        yield


@pytest.fixture(scope='module')
def base(tmp_path_factory) -> str:
    return save_backbone(tmp_path_factory.mktemp('base') / 'base.pth')


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp('data')
    return dict(classes=make_images(root / 'images', 12) / 'train', maps=make_label_maps(root / 'maps', 12))


def finetune(images: Path, out: Path, init: str, **options: object) -> Path:
    return beit_mm.finetune(images, out, init, batch=4, workers=0, **dict(dict(epochs=1), **options))


@pytest.fixture(scope='module')
def runs(folders, base, tmp_path_factory) -> dict[str, Path]:
    """By LoRA, of class folders and of label maps."""
    root = tmp_path_factory.mktemp('lora')
    for kind, images in folders.items():
        finetune(images, root / kind, base, lora=2)
    return {kind: root / kind for kind in folders}


def last(run: Path) -> Path:
    return max(run.glob('finetune/iter_*.pth'), key=lambda path: int(path.stem.partition('_')[2]))


def unmerged(run: Path, weights: dict) -> nn.Module:
    """The model as it was trained."""
    config = Config.fromfile(run / 'config.py')
    with DefaultScope.overwrite_default_scope(config.default_scope):
        model = MODELS.build(config.model)
    model.load_state_dict(weights)
    return model.eval()


def test_checkpoints_are_small_and_the_result_is_a_plain_model(runs, base):
    for kind, run in runs.items():
        trained, result = Checkpoint.open(last(run)), Checkpoint.open(run / 'finetuned.pth')
        weights = trained.content['state_dict']
        assert {name.split('.')[0] for name in weights if '.lora_' not in name} <= {'head', 'neck', 'decode_head'}
        names = {f'backbone.{name}' for name in Checkpoint.open(base).weights}
        assert names - {'backbone.norm.weight', 'backbone.norm.bias'} <= {*result.weights}
        assert not any('lora' in name for name in result.weights)
        assert result.meta['config_dict']['model']['backbone']['type'] == 'beit_mm.BEiTBackbone'
        images = torch.randn(2, 3, 64, 64)
        inferencer = (ClassificationInferencer if kind == 'classes' else SegmentationInferencer)(result, 'cpu')
        assert type(inferencer.model.backbone) is BEiTBackbone
        with torch.no_grad():
            found, expected = (model.extract_feat(images)[-1] for model in (inferencer.model, unmerged(run, weights)))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_plan_says_how_much_is_trained(runs, folders, base, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(training.Run, 'train', lambda *_: exit())
    for kind, options in dict(classes=dict(lora=2), maps=dict(lora=2)).items():
        run = tmp_path / kind
        with pytest.raises(SystemExit):
            finetune(folders[kind], run, base, **options)
        weights = torch.load(last(runs[kind]), weights_only=True)['state_dict'].items()
        statistics = ('running_mean', 'running_var', 'num_batches_tracked')
        sizes = [(name, tensor.numel()) for name, tensor in weights if not name.endswith(statistics)]
        expected = [sum(size for name, size in sizes if ('lora' in name) == inside) for inside in (True, False)]
        (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('trained')]
        assert [int(number.replace(',', '')) for number in re.findall(r'[\d,]*\d', line)] == expected


def test_the_frozen_weights_are_those_of_the_start(runs, base):
    merged, start = Checkpoint.open(runs['classes'] / 'finetuned.pth').weights, Checkpoint.open(base).weights
    equal = {name: torch.equal(merged[f'backbone.{name}'], start[name]) for name in start if name[:4] != 'norm'}
    assert equal['patch_embed.proj.weight'] and equal['blocks.1.mlp.fc1.bias'] and equal['blocks.2.attn.q_bias']
    assert not any(equal[f'blocks.{block}.{layer}.weight'] for block in range(3) for layer in ('attn.qkv', 'mlp.fc2'))


def test_the_verbs_take_the_result(runs, folders, base, tmp_path):
    results = {kind: run / 'finetuned.pth' for kind, run in runs.items()}
    answers = beit_mm.classify(results['classes'], folders['classes'])
    assert len(answers) == 36 and {answer['name'] for answer in answers} <= {'blue', 'green', 'red'}
    assert len(beit_mm.segment(results['maps'], folders['maps'] / 'images/validation', tmp_path / 'maps')) == 12
    features = [
        beit_mm.embed(weights, folders['classes'], tmp_path / 'x.npz')['features']
        for weights in (results['classes'], base)
    ]
    assert features[0].shape == features[1].shape and not np.allclose(*features)
    again = finetune(folders['maps'], tmp_path / 'again', str(results['classes']), epochs=0.3)
    assert again.is_file()


def test_a_checkpoint_of_the_run_is_exported_as_plain_layers(runs, tmp_path):
    """With matrices that weigh something. Truth: the model that was trained, in torch."""
    onnxruntime = pytest.importorskip('onnxruntime')
    if torch.__version__.startswith('2.6.'):
        pytest.skip('torch 2.6 cannot export it')
    run = runs['classes']
    content = torch.load(last(run), weights_only=True)
    for name, tensor in content['state_dict'].items():
        if 'lora_up' in name:
            nn.init.normal_(tensor, std=0.3)
    torch.save(content, tmp_path / 'iter_9.pth')
    beit_mm.export(tmp_path / 'iter_9.pth', tmp_path / 'model.onnx', config=run / 'config.py')
    images = torch.randn(3, 3, 32, 32)
    session = onnxruntime.InferenceSession(str(tmp_path / 'model.onnx'), providers=['CPUExecutionProvider'])
    found = torch.from_numpy(session.run(['logits'], dict(images=images.numpy()))[0])
    with torch.no_grad():
        expected, before = (
            unmerged(run, weights)(images)
            for weights in (content['state_dict'], torch.load(last(run), weights_only=True)['state_dict'])
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)
    assert (expected - before).abs().max() > 1e-2


def test_a_resumed_run_equals_one_that_was_not_interrupted(runs, folders, base, tmp_path, monkeypatch):
    after = training.ProgressHook.after_train_iter

    def interrupt(hook, runner, *args, **kwargs):
        after(hook, runner, *args, **kwargs)
        if runner.iter == 3:
            signal.raise_signal(signal.SIGINT)

    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(training.ProgressHook, 'after_train_iter', interrupt)
        finetune(folders['classes'], tmp_path / 'run', base, lora=2)
    with pytest.raises(UserError, match='lora=2, this call says lora=3'):
        finetune(folders['classes'], tmp_path / 'run', base, lora=3)
    command.main(['finetune', str(folders['classes']), '--out', str(tmp_path / 'run')])
    runs_weights = [
        torch.load(run / 'finetuned.pth', weights_only=True)['state_dict']
        for run in (runs['classes'], tmp_path / 'run')
    ]
    for name, tensor in runs_weights[0].items():
        assert torch.equal(tensor, runs_weights[1][name]), name
