"""Fine-tuning that trains little: LoRA and frozen blocks, from plan to files that every verb takes."""

import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import interrupt_after, run_tool
from label_maps import make_label_maps
from labelled import make_images, save_backbone
from mmengine.config import Config
from mmengine.registry import DefaultScope
from mmseg.registry import MODELS as MMSEG
from peers import dinov2_layout
from PIL import Image
from torch import nn

import beit_mm
from beit_mm import __main__ as command
from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.engine.fit_head import FEATURES
from beit_mm.errors import CheckpointError, UserError
from beit_mm.features import evaluation
from beit_mm.models import BEiTBackbone
from beit_mm.own_images import images as finding
from beit_mm.own_images.run import Run
from beit_mm.registry import MODELS

pytestmark = pytest.mark.long


@pytest.fixture(scope='module', autouse=True)
def few_images():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finding, 'MIN_IMAGES', 10)
        yield


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, 'write_report', lambda *_: None)  # it takes longer than such a run
        for kind, images in folders.items():
            finetune(images, root / kind, base, lora=2)
    return {kind: root / kind for kind in folders}


@pytest.fixture
def no_report(monkeypatch):
    """It takes longer than such a run."""
    monkeypatch.setattr(Run, 'write_report', lambda *_: None)


def test_a_run_leaves_the_default_scope_to_others(folders, base, tmp_path, no_report):
    """Else mmseg would look for its types in mmpretrain from then on."""
    with DefaultScope.overwrite_default_scope('mmseg'):
        finetune(folders['classes'], tmp_path / 'run', base)
        MMSEG.build(dict(type='FCNHead', in_channels=8, channels=4, num_classes=2))


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
        if kind == 'maps':  # windows are padded alike
            assert inferencer.model.divisor == unmerged(run, weights).divisor
        with torch.no_grad():
            found, expected = (model.extract_feat(images)[-1] for model in (inferencer.model, unmerged(run, weights)))
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_the_frozen_weights_are_those_of_the_start(runs, base):
    merged, start = Checkpoint.open(runs['classes'] / 'finetuned.pth').weights, Checkpoint.open(base).weights
    equal = {name: torch.equal(merged[f'backbone.{name}'], start[name]) for name in start if name[:4] != 'norm'}
    assert equal['patch_embed.proj.weight'] and equal['blocks.1.mlp.fc1.bias'] and equal['blocks.2.attn.q_bias']
    assert not any(equal[f'blocks.{block}.{layer}.weight'] for block in range(3) for layer in ('attn.qkv', 'mlp.fc2'))


def test_a_checkpoint_of_the_run_is_tested_whole_or_not_at_all(runs, tmp_path):
    run = runs['classes']
    words = 'test.py', run / 'config.py', last(run), '--work-dir', tmp_path
    run_tool(*words)
    with pytest.raises(SystemExit, match='lora_down'):
        run_tool(*words, '--cfg-options', 'model.backbone.rank=3')


@torch.no_grad()
def test_a_checkpoint_of_the_run_is_rebuilt_by_its_config_as_plain_layers(runs, tmp_path):
    """With matrices that weigh something. Truth: the model that was trained."""
    run = runs['classes']
    content = torch.load(last(run), weights_only=True)
    for name, tensor in content['state_dict'].items():
        if 'lora_up' in name:
            nn.init.normal_(tensor, std=0.3)
    torch.save(content, tmp_path / 'iter_9.pth')
    model = ClassificationInferencer(tmp_path / 'iter_9.pth', 'cpu', run / 'config.py').model
    images = torch.randn(3, 3, 64, 64)
    assert type(model.backbone) is BEiTBackbone
    torch.testing.assert_close(model(images), unmerged(run, content['state_dict'])(images), atol=1e-5, rtol=1e-5)


def test_a_checkpoint_of_the_run_or_its_result_in_place_of_the_other_is_refused_with_what_to_take(runs):
    run = runs['classes']
    with pytest.raises(CheckpointError, match='finetuned.pth'):
        BEiTBackbone.from_checkpoint(last(run))
    with pytest.raises(CheckpointError, match='LoRA'):
        unmerged(run, torch.load(run / 'finetuned.pth', weights_only=True)['state_dict'])


def test_a_resumed_run_equals_one_that_was_not_interrupted(runs, folders, base, tmp_path, monkeypatch):
    interrupt_after(monkeypatch, 'finetune', 3)
    with pytest.raises(SystemExit):
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


@pytest.fixture(scope='module')
def fitted(folders, base, tmp_path_factory) -> Path:
    """A classifier on features that were computed once."""
    run = tmp_path_factory.mktemp('fitted') / 'run'
    finetune(folders['classes'], run, base, freeze='all')
    return run


def test_a_head_on_features_that_are_computed_once_is_the_linear_fit(fitted, folders, base):
    """Truth: features of the images in another program, and `choose_penalty` on them."""
    trained = Checkpoint.open(fitted / 'finetuned.pth')
    for name, tensor in Checkpoint.open(base).weights.items():
        assert name.startswith('norm.') or torch.equal(trained.weights[f'backbone.{name}'], tensor), name
    inferencer = ClassificationInferencer(trained, 'cpu')

    def features(paths: list[Path]) -> torch.Tensor:
        samples = [inferencer.reader.prepare(dict(img=np.asarray(Image.open(path)))) for path in paths]
        images = [model.data_preprocessor(dict(inputs=[sample['inputs']]))['inputs'] for sample in samples]
        return torch.cat([model.backbone(image)[0] for image in images])

    model, lines = inferencer.model, (fitted / 'lists/train.txt').read_text().splitlines()
    with torch.no_grad():
        bank = features([folders['classes'] / line.split()[0] for line in lines])
        held_out = features(sorted((folders['classes'].parent / 'val').rglob('*.png')))
    labels, standardise = torch.tensor([int(line.split()[1]) for line in lines]), evaluation.standardiser(bank)
    linear, _ = evaluation.choose_penalty(standardise(bank), labels, 3, torch.arange(36), by_class=False)
    truth = linear(standardise(held_out)).softmax(dim=1)
    answers = inferencer(folders['classes'].parent / 'val', top=3)
    scores = torch.tensor([[dict(answer['scores'])[label] for label in range(3)] for answer in answers])
    torch.testing.assert_close(scores, truth, atol=2e-3, rtol=0)
    assert scores.amax(dim=1).min() > 0.5


def test_the_fit_is_repeated_to_the_bit(fitted, folders, base, tmp_path, capsys):
    again = Checkpoint.open(
        finetune(folders['classes'], tmp_path / 'again', base, freeze='all', minutes=9, epochs=None)
    )
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('trained')]
    assert 'augmented' in line
    expected = Checkpoint.open(fitted / 'finetuned.pth').weights
    assert all(torch.equal(again.weights[name], tensor) for name, tensor in expected.items())
    assert (fitted / 'finetune/run.lock').is_file()  # as a training; a second run there would be refused
    begun = tmp_path / 'begun'
    shutil.copytree(fitted, begun)
    (begun / 'report.md').unlink()
    finetune(folders['classes'], begun, base, freeze='all')
    assert 'classified correctly, %' in (begun / 'report.md').read_text()


def test_a_balanced_fit_shows_images_of_small_classes_more_often(folders, base, tmp_path):
    folder = shutil.copytree(folders['classes'].parent, tmp_path / 'images')
    for index in range(3, 12):
        (folder / f'train/red/{index}.png').unlink()
    (folder / 'train/blue/0.png').write_bytes(b'nothing')
    heads = []
    for balance in (False, True):
        run = tmp_path / str(balance)
        heads.append(
            Checkpoint.open(finetune(folder, run, base, freeze='all', balance=balance)).weights['head.fc.bias']
        )
        assert 'blue/0.png' in (run / 'finetune/unreadable_images.txt').read_text()
    first, second = (head.softmax(dim=0)[2] for head in heads)
    assert second > first
    found = [torch.load(tmp_path / str(balance) / 'finetune' / FEATURES) for balance in (False, True)]
    plain, balanced = (dict(zip(each['files'], each['features'], strict=True)) for each in found)
    assert plain.keys() == balanced.keys()  # an image that is shown three times keeps its own features
    for file, features in plain.items():
        torch.testing.assert_close(balanced[file], features)
    (run / 'report.md').unlink()
    (folder / 'train/red/0.png').unlink()  # after its features were saved
    finetune(folder, run, base, freeze='all', balance=True)
    assert 'train/red/0.png' not in (run / 'mistakes.csv').read_text()


def test_runs_from_rotary_positions_are_used_again(folders, tmp_path):
    start = save_backbone(tmp_path / 'vit.pth', rotary_base=50.0, abs_pos_embed=False)
    for kind, inferencer in (('classes', ClassificationInferencer), ('maps', SegmentationInferencer)):
        weights = finetune(folders[kind], tmp_path / kind, start, freeze='all')
        assert (tmp_path / kind / 'report.md').is_file()
        assert float(inferencer(weights).model.backbone.rotary_base) == 50


def test_frozen_blocks_stay_as_they_were(folders, base, tmp_path, no_report):
    start = Checkpoint.open(base).weights
    for kind, freeze in (('classes', 1), ('maps', 'all')):
        weights = Checkpoint.open(finetune(folders[kind], tmp_path / f'{kind}_{freeze}', base, freeze=freeze)).weights
        equal = {
            name: torch.equal(weights[f'backbone.{name}'], tensor)
            for name, tensor in start.items()
            if 'norm.' not in name
        }
        frozen = 3 if freeze == 'all' else freeze
        assert equal['cls_token'] and equal['patch_embed.proj.weight']
        assert [equal[f'blocks.{block}.mlp.fc1.weight'] for block in range(3)] == [block < frozen for block in range(3)]


@pytest.mark.parametrize(
    ('options', 'said'),
    [
        (dict(freeze='all', lora=2), '--lora and --freeze'),
        (dict(freeze=4), '--freeze is 4; expected all, or blocks from 0 to 3'),
        (dict(freeze=1, init='none'), '--init'),
        (dict(lora=2, init='none'), '--init'),
    ],
)
def test_what_does_not_go_together_is_said(options, said, folders, base, tmp_path):
    options = dict(dict(init=base), **options)
    with pytest.raises(UserError, match=said):
        finetune(folders['classes'], tmp_path / 'run', **options)


@pytest.mark.parametrize('options', [{}, dict(lora=2), dict(freeze='all')])
@pytest.mark.parametrize('kind', ['classes', 'maps'])
def test_weights_in_the_layout_of_dinov2_are_tuned(kind, options, folders, tmp_path, no_report):
    """At a size of whole patches of 14 pixels, as large for label maps as other weights."""
    init = dinov2_layout(tmp_path / 'dinov2.pth')
    run = finetune(folders[kind], tmp_path / 'run', init, epochs=0.4, **options).parent
    model, side = Config.fromfile(run / 'config.py').model, dict(classes=224, maps=126)[kind]
    backbone = model.backbone.get('module', model.backbone)
    assert tuple(backbone.img_size) == (side, side) and (backbone.patch_size, backbone.num_registers) == (14, 4)
    crops = re.findall(r"'crop_size': \(?(\d+)", (run / 'config.py').read_text())
    assert {*crops} == {str(side)}
    weights = Checkpoint.open(run / 'finetuned.pth').weights
    start, tuned = torch.load(init)['register_tokens'], weights['backbone.register_tokens']
    assert torch.allclose(start, tuned, atol=1e-2) and tuned.shape == (1, 4, 64)
    if kind == 'classes':
        assert len(beit_mm.classify(run, folders['classes'] / 'red')) == 12
    else:
        assert len(beit_mm.segment(run, folders['maps'] / 'images/validation/0.png', tmp_path / 'labels')) == 1
