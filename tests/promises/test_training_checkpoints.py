"""What a run's checkpoints hold is read again, and nothing in a file is executed."""

import copy
from pathlib import Path

import pytest
import torch
from conftest import narrow_pretraining
from helpers import make_runner
from mmengine.config import Config
from mmengine.model import BaseModel
from mmengine.runner import Runner
from promises.test_resume import differences
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.checkpoints import run_state
from beit_mm.engine.checks import check_normalisation
from beit_mm.engine.steps import unwrap

HOOKS = ('beit_mm.CheckpointMetaHook', 'beit_mm.FitCheckHook')


def small_run(config: Config, folder: Path, epochs: int, **changes: object) -> Runner:
    """A runner that saves each epoch, and its best one."""
    config = copy.deepcopy(config)
    config.work_dir = str(folder)
    config.train_cfg.max_epochs = epochs
    saved = dict(interval=1, max_keep_ckpts=2, save_best='mim_acc', rule='greater')
    config.default_hooks.checkpoint = dict(type='beit_mm.CheckpointHook', **saved)
    config.custom_hooks = [hook for hook in config.custom_hooks if hook.type in HOOKS]
    config.update(changes)
    return make_runner(config)


@pytest.fixture(scope='module')
def run(images, tmp_path_factory) -> tuple[Runner, Config]:
    """Three epochs."""
    config = narrow_pretraining(images, folder := tmp_path_factory.mktemp('training'))
    runner = small_run(config, folder / 'work', 3)
    runner.train()
    return runner, config


@pytest.fixture
def content(run) -> dict:
    """Of its last checkpoint."""
    return torch.load(f'{run[0].work_dir}/epoch_3.pth', weights_only=True)


@pytest.fixture
def resumed(run, tmp_path):
    """A function that gives a runner which resumes from a file of this content."""

    def resume(content: dict, config: Config = run[1], resume: bool = True) -> Runner:
        path = tmp_path / 'epoch_3.pth'
        torch.save(content, path)
        return small_run(config, tmp_path / f'work_{resume}', 4, resume=resume, load_from=str(path))

    return resume


def test_a_file_holds_plain_values_that_torch_reads_by_itself(run, content):
    runner, config = run
    meta = content['meta']
    assert not [key for key in content['state_dict'] if key.startswith('target_generator')]
    assert meta['beit_mm_format'] == 1 and meta['tokenizer'] == dict(runner.model.target_generator.provenance)
    assert meta['config_dict']['model']['backbone']['arch'] == dict(config.model.backbone.arch)
    assert meta['preprocessing'] == dict(mean=[127.5] * 3, std=[127.5] * 3, size=[32, 32])
    assert meta['architecture'] == dict(num_heads=4, interpolate_mode='bicubic', out_indices=[1])


def test_text_of_the_config_is_no_template(run, monkeypatch):
    """mmengine's inferencers fill `{{...}}` in before they execute it."""
    monkeypatch.setitem(run[0].message_hub.runtime_info, 'cfg', "a = '{{$HOME:x}}'")
    assert '{{' not in run_state(run[0], False, {})['meta']['cfg']


def test_a_file_with_mmengines_own_pickled_history_is_resumed(run, resumed, tmp_path):
    first, hooks = run[0], run[0]._hooks
    first._hooks = [hook for hook in hooks if type(hook).__name__ != 'CheckpointMetaHook']
    first.save_checkpoint(str(tmp_path), 'mmengine.pth', meta=dict(epoch=3, iter=9))
    first._hooks = hooks
    second = resumed(torch.load(tmp_path / 'mmengine.pth', weights_only=False))
    second.load_or_resume()
    assert (second.epoch, second.iter) == (3, 9)
    assert not differences(first.model.state_dict(), second.model.state_dict())
    moments = (runner.optim_wrapper.optimizer.state_dict()['state'] for runner in (first, second))
    assert not differences(*moments)
    assert not second.message_hub.log_scalars  # the log of the first run has them


def test_resuming_executes_nothing_deletes_nothing_of_others_and_takes_over_no_text(content, resumed, tmp_path):
    """mmengine's resume executes `meta['config']`, and its CheckpointHook deletes what `runtime_info` names.

    Its inferencers execute `cfg`, and a run's own is the present one's, not the earlier one's.
    """
    said, hub = 'of_the_file', content['message_hub']
    others = [tmp_path / name for name in ('mine/best_of_all.pth', 'work_True/epoch_1.pth', 'work_True/epoch_2.pth')]
    for path in others:
        path.parent.mkdir(exist_ok=True)
        path.touch()
    texts = dict.fromkeys(('cfg', 'experiment_name', 'mmengine_version', 'last_ckpt', 'other'), said)
    config = f"open('{tmp_path}/ran', 'w')  # {said}"
    content['meta'] |= dict(texts, run=f'{said}\x1b', config=config, config_dict=texts, dataset_meta=texts)
    told = dict(best_ckpt=f'{tmp_path}/mine', kept_checkpoints=['epoch_1.pth', 'epoch_2.pth'], number=1.5)
    hub['runtime_info'] |= dict(texts, dataset_meta=dict(classes=[said]), **told)
    hub['log_scalars'] = {f'train/{said}\x1b[2J': dict(values=torch.ones(3), counts=torch.ones(3), max_length=9)}
    hub['resumed_keys'] |= dict.fromkeys((*texts, *told, f'train/{said}\x1b[2J'), True)
    runner = resumed(content)
    runner.train()
    assert runner.iter == 12 and not (tmp_path / 'ran').exists() and all(path.exists() for path in others)
    found = torch.load(f'{runner.work_dir}/epoch_4.pth', weights_only=True)
    # but for its own config, which names the file that it resumes from
    assert said not in repr({key: value for key, value in found.items() if key not in ('state_dict', 'optimizer')})
    assert said.encode() not in Path(runner.work_dir, 'run_id').read_bytes()
    info = found['message_hub']['runtime_info']
    assert found['meta']['cfg'] == info['cfg'] == runner.cfg.pretty_text and info['seed'] == runner.seed
    assert info['number'] == 1.5 and not found['message_hub']['log_scalars']


def test_a_run_does_not_go_on_with_nan(content, resumed):
    """The backbone's own weights are looked at whenever they are loaded."""
    content['state_dict']['head.lm_head.bias'][1] = float('nan')
    with pytest.raises(CheckpointError, match='1 of .* tensors hold NaN or infinity: head.lm_head.bias'):
        resumed(content).load_or_resume()


def test_a_run_that_began_with_030_keeps_its_best_checkpoint(content, resumed, tmp_path):
    info, best = content['message_hub']['runtime_info'], tmp_path / 'work_True/best_mim_acc_epoch_2.pth'
    info['best_score'] = 1 + info.pop('best_score_mim_acc')
    best.parent.mkdir()
    best.touch()
    runner = resumed(content)
    runner.train()
    assert runner.epoch == 4 and [*best.parent.glob('best_*')] == [best]


@pytest.mark.parametrize('wrapper', ['beit_mm.AutocastOptimWrapper', 'OptimWrapper'])
def test_weights_without_a_run_cannot_be_resumed(wrapper, run, resumed):
    config = copy.deepcopy(run[1])
    config.optim_wrapper = dict(type=wrapper, optimizer=config.optim_wrapper.optimizer)
    runner = resumed(run[0].model.backbone.state_dict(), config)
    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
    with pytest.raises(ValueError, match='only weights to load_from, not a run'):
        runner.load_or_resume()


@pytest.mark.parametrize(('mean', 'warned'), [(127.5, False), (123.675, True)])
def test_a_warning_when_images_were_normalised_otherwise(mean, warned, run, content, resumed, caplog):
    config = copy.deepcopy(run[1])
    config.model.data_preprocessor.mean = [mean] * 3
    runner = resumed(content, config, resume=False)
    runner.logger.addHandler(caplog.handler)
    runner.load_or_resume()
    check_normalisation(unwrap(runner))
    assert warned == ('trained on images with mean [127.5, 127.5, 127.5]' in caplog.text)


class Uneven(list):
    """Batches of several sizes."""

    sampler = None


class Line(BaseModel):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor, mode: str = 'loss') -> dict:
        return dict(loss=self.layer(inputs).mean())


def test_a_batch_sampler_says_the_batch_if_it_can(tmp_path):
    """A run saves its checkpoints either way."""
    rows = [dict(inputs=torch.ones(1))] * 8
    batches = Uneven([[0, 1, 2], [3], [4, 5, 6, 7]])
    for name, sampler in (('known', BatchSampler(SequentialSampler(rows), 4, False)), ('unknown', batches)):
        runner = Runner(
            Line(),
            str(tmp_path / name),
            train_dataloader=DataLoader(rows, batch_sampler=sampler),
            train_cfg=dict(by_epoch=False, max_iters=2),
            optim_wrapper=dict(optimizer=dict(type='SGD', lr=0.1)),
            default_hooks=dict(checkpoint=dict(type='beit_mm.CheckpointHook', interval=2, by_epoch=False)),
            custom_hooks=[dict(type=hook) for hook in HOOKS],
            experiment_name=f'{tmp_path}/{name}',
        )
        runner.train()
    known, unknown = (torch.load(tmp_path / name / 'iter_2.pth')['meta'] for name in ('known', 'unknown'))
    assert known['batch'] == dict(images=4, accumulated=1, per_epoch=2) and 'batch' not in unknown
