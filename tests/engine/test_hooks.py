"""The hooks of a pretraining run, in a run."""

import json
import logging
import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_runner, narrow_model, train
from mmengine.config import Config
from mmengine.hooks import Hook, IterTimerHook
from mmengine.logging import MessageHub
from PIL import Image

from beit_mm.engine.checkpoints import CheckpointMetaHook
from beit_mm.engine.checks import state_effective_batch
from beit_mm.engine.steps import ProgressHook, StepSeedHook, ThroughputHook
from beit_mm.registry import MODELS


def test_a_run_trains_validates_and_leaves_its_pictures(pretrain_config, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.steps.HISTORY', 4)
    pretrain_config.log_processor.window_size = 1
    runner = train(pretrain_config)
    rows = [json.loads(line) for line in (Path(runner.log_dir) / 'vis_data/scalars.json').open()]
    losses, (first, second) = [r for r in rows if 'loss' in r], [r for r in rows if 'mim_loss' in r]
    assert len(losses) == 6 and (first['step'], second['step']) == (3, 6)  # 12 images, 4 a batch, two epochs
    assert all(r['images_per_second'] > 0 and 0 <= r['mim_acc'] <= 1 for r in losses)
    assert first['mim_loss'] != second['mim_loss']  # validations are not smoothed together
    assert 0 < first['position_entropy'] <= first['token_entropy']
    with Image.open(Path(pretrain_config.work_dir, 'pictures/iter_6.png')) as picture:
        assert picture.size == (4 + 4 * 164, 16 + 4 + 8 * 164)  # four columns, eight of the 12 images
    assert list(Path(runner.log_dir).glob('vis_data/events.out.tfevents*'))
    # the history stays short
    kept, _ = runner.message_hub.get_scalar('train/loss').data
    assert kept.tolist() == pytest.approx([row['loss'] for row in losses][-4:], rel=1e-6)
    again = runner.val_loop.run()
    for name in ('mim_loss', 'mim_acc', 'token_entropy', 'position_entropy'):
        assert second[name] == pytest.approx(again[name], rel=1e-6), name


@pytest.mark.parametrize('interval', [7, 70])
def test_a_line_of_the_log_has_the_losses_up_to_its_step(pretrain_config, interval, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.steps.STEPS_BETWEEN_LOOKS', 5)  # neither divides the other
    pretrain_config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=16)
    pretrain_config.val_cfg = pretrain_config.val_dataloader = pretrain_config.val_evaluator = None
    pretrain_config.default_hooks.logger.interval = interval
    runner = make_runner(pretrain_config)
    complete = []  # steps after which the history has them all

    class Watch(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            scalars = runner.message_hub.log_scalars
            if 'train/loss' in scalars and len(scalars['train/loss'].data[0]) == runner.iter + 1:
                complete.append(runner.iter + 1)

    runner.register_hook(Watch())
    runner.train()
    ends = {3}  # of the data, as mmengine counts
    assert complete == sorted({5, 10, 15, 16} | ends | ({7, 14} if interval == 7 else set()))


@pytest.fixture
def said(monkeypatch) -> list[str]:
    said: list[str] = []
    for place in ('engine.steps', 'engine.checks', 'engine.checkpoints', 'terminal'):
        monkeypatch.setattr(f'beit_mm.{place}.log', lambda text, level=logging.INFO: said.append((level, text)))
    return said


def test_effective_batch_is_stated_and_a_difference_warned_of(said):
    for recipe in (8, 2048):
        cfg = Config(dict(auto_scale_lr=dict(base_batch_size=recipe), optim_wrapper=dict(accumulative_counts=2)))
        state_effective_batch(SimpleNamespace(cfg=cfg, train_dataloader=SimpleNamespace(batch_size=4)))
    assert [level for level, _ in said] == [logging.INFO, logging.WARNING]
    assert '1 processes x 4 images x 2 accumulated = 8; the recipe has 2048' in said[1][1]


def test_fewer_images_than_a_batch_are_named_before_schedules_are_built(pretrain_config):
    """mmengine's complain of an epoch_length; without our check hook too."""
    pretrain_config.train_dataloader.batch_size = 13
    pretrain_config.custom_hooks = []
    warmup = dict(type='LinearLR', start_factor=0.5, end=1, convert_to_iter_based=True)
    for loop, schedule in ((dict(type='EpochLoop', max_epochs=2), [warmup]), (dict(type='IterLoop', max_iters=2), [])):
        pretrain_config.train_cfg = dict(loop, type=f'beit_mm.{loop["type"]}')
        pretrain_config.param_scheduler = schedule
        with pytest.raises(ValueError, match='has 12 images, less than one batch of 13 for each process'):
            make_runner(pretrain_config).train()


def test_another_tokenizer_in_a_checkpoint_is_warned_of(said):
    runner = SimpleNamespace(model=MODELS.build(narrow_model()), _load_from='x.pth', _resume=False)
    own = dict(runner.model.target_generator.provenance)
    for provenance in (own, dict(own, path='elsewhere.pth'), dict(own, sha256='0' * 64)):
        CheckpointMetaHook().after_load_checkpoint(runner, dict(meta=dict(tokenizer=provenance)))
    ((level, text),) = said
    assert level == logging.WARNING and 'was trained on the visual tokens of' in text and '0' * 64 in text


def test_throughput_is_images_over_seconds_of_all_processes_not_a_mean_of_rates(monkeypatch):
    monkeypatch.setattr('beit_mm.engine.steps.get_world_size', lambda: 3)
    clock = iter([0.0, *(0.1 * step for step in range(1, 8)), 2.7])  # seven quick steps, then a stall of two seconds
    monkeypatch.setattr('beit_mm.engine.steps.time.perf_counter', lambda: next(clock))
    logged = {}
    runner = SimpleNamespace(message_hub=SimpleNamespace(update_scalar=logged.__setitem__, log_scalars={}))
    hook = ThroughputHook()
    hook.before_train_epoch(runner)
    for _ in range(8):
        hook.after_train_iter(runner, 0, dict(inputs=dict(images=torch.zeros(5, 4))), {})
    assert logged['train/images_per_second'] == pytest.approx(8 * 5 * 3 / 2.7)


@pytest.mark.parametrize(('wait', 'expected'), [(0.6, 1), (0.4, 0)])
def test_a_training_that_waits_for_images_says_so_once(wait, expected, said, monkeypatch):
    """Neither the start of the workers counts, nor what follows the last batch of a validation between two steps."""
    now, batch = [0.0], dict(inputs=torch.zeros(5, 4))
    monkeypatch.setattr('beit_mm.engine.steps.time.perf_counter', lambda: now[0])
    monkeypatch.setattr('mmengine.hooks.iter_timer_hook.time.time', lambda: now[0])
    runner = SimpleNamespace(message_hub=MessageHub.get_instance(f'waits {wait}'), iter=0, max_iters=80)
    timer, hook = hooks = IterTimerHook(), ThroughputHook()
    for each in hooks:
        each.before_train(runner)
        each.before_train_epoch(runner)
    for step in range(80):
        now[0] += wait if step else 50
        timer.before_train_iter(runner, step, batch)
        now[0] += 1 - wait
        for each in hooks:
            each.after_train_iter(runner, step, batch, {})
        if step % 10 == 9:
            timer.before_val_epoch(runner)
            now[0] += 100
            for each in hooks:
                each.after_val_epoch(runner, {})
    assert len(said) == expected and all('60% of the time' in text for _, text in said)
    assert runner.message_hub.get_scalar('train/images_per_second').current() == pytest.approx(5)


def test_a_validation_prints_the_numbers_that_mmseg_gives_and_the_first_picture(tmp_path, capsys, monkeypatch):
    metrics = {'aAcc': np.float32(52.0), 'mIoU': np.float32(17.5), 'classes': ['sky']}
    hook, line = ProgressHook('upernet'), 'upernet {}, held-out images:  aAcc 52  mIoU 17.5\n'
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'pictures').mkdir()
    for step in (200, 300, 400):
        if step > 200:
            (tmp_path / f'pictures/iter_{step}.png').touch()
        hook.after_val_epoch(SimpleNamespace(iter=step, work_dir=tmp_path), metrics)
    first = 'upernet: first picture, pictures/iter_300.png\n'
    assert capsys.readouterr().out == line.format(200) + line.format(300) + first + line.format(400)


def test_all_steps_of_all_ranks_and_runs_draw_their_own(monkeypatch):
    def drawn(seed: int, rank: int, step: int) -> tuple[float, float, float]:
        monkeypatch.setattr('beit_mm.engine.steps.get_rank', lambda: rank)
        StepSeedHook().before_train_iter(SimpleNamespace(seed=seed, iter=step), 0)
        return random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()

    places = [(seed, rank, step) for seed in (0, 1) for rank in range(4) for step in range(50)]
    first = [drawn(*place) for place in places]
    for numbers in zip(*first, strict=True):
        assert len(set(numbers)) == len(places)
        # first draws of near places are as far from each other as any: uniform
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert ((counts - 40) ** 2 / 40).sum() < 30  # chi square of 9 degrees of freedom: 1 of 2000 is above
    assert first[::-1] == [drawn(*place) for place in places[::-1]]  # whatever was drawn before
