"""The hooks of a pretraining run, in a run."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from helpers import make_runner
from mmengine.hooks import Hook, IterTimerHook
from mmengine.logging import HistoryBuffer, MessageHub
from PIL import Image

from beit_mm.engine.steps import ThroughputHook


def test_a_run_trains_validates_and_leaves_its_pictures(pretrain_config):
    runner = make_runner(pretrain_config)
    runner.train()
    work = Path(pretrain_config.work_dir)
    rows = [json.loads(line) for line in (Path(runner.log_dir) / 'vis_data/scalars.json').open()]
    train, val = [r for r in rows if 'loss' in r], [r for r in rows if 'mim_loss' in r]
    assert len(train) == 6 and len(val) == 2  # 12 images / 4 an image batch, two epochs
    assert all(r['images_per_second'] > 0 and 0 <= r['mim_acc'] <= 1 for r in train)
    assert 0 < val[0]['position_entropy'] <= val[0]['token_entropy']
    with Image.open(work / 'pictures/iter_6.png') as picture:
        assert picture.size == (4 + 4 * 164, 16 + 4 + 8 * 164)  # four columns, eight of the 12 images
    assert list(Path(runner.log_dir).glob('vis_data/events.out.tfevents*'))


def test_logged_validations_are_not_smoothed_together(pretrain_config):
    runner = make_runner(pretrain_config)
    runner.train()
    rows = [json.loads(line) for line in (Path(runner.log_dir) / 'vis_data/scalars.json').open()]
    first, second = [row for row in rows if 'mim_loss' in row]
    assert (first['step'], second['step']) == (3, 6)
    assert first['mim_loss'] != second['mim_loss']
    again = runner.val_loop.run()
    for name in ('mim_loss', 'mim_acc', 'token_entropy', 'position_entropy'):
        assert second[name] == pytest.approx(again[name], rel=1e-6), name


def test_the_history_of_logged_numbers_stays_short(pretrain_config, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.steps.HISTORY', 4)
    pretrain_config.log_processor.window_size = 1
    runner = make_runner(pretrain_config)
    runner.train()
    rows = [json.loads(line) for line in (Path(runner.log_dir) / 'vis_data/scalars.json').open()]
    kept, _ = runner.message_hub.get_scalar('train/loss').data
    assert kept.tolist() == pytest.approx([row['loss'] for row in rows if 'loss' in row][-4:], rel=1e-6)


@pytest.mark.parametrize('interval', [7, 70])
def test_a_line_of_the_log_has_the_losses_up_to_its_step(pretrain_config, interval, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.steps.STEPS_BETWEEN_LOOKS', 5)  # neither divides the other
    pretrain_config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=16)
    pretrain_config.val_cfg = pretrain_config.val_dataloader = pretrain_config.val_evaluator = None
    pretrain_config.param_scheduler = []
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


def test_effective_batch_is_stated_and_a_difference_warned_of(pretrain_config):
    pretrain_config.auto_scale_lr.base_batch_size = 2048
    pretrain_config.train_cfg.max_epochs = 1
    pretrain_config.optim_wrapper.accumulative_counts = 2
    _, text = _train_log(pretrain_config)
    line = next(line for line in text.splitlines() if 'Effective batch' in line)
    assert 'WARNING' in line and '1 processes x 4 images x 2 accumulated = 8; the recipe has 2048' in line


@pytest.mark.parametrize('loop', [dict(type='EpochLoop', max_epochs=2), dict(type='IterLoop', max_iters=2)])
def test_fewer_images_than_a_batch_are_named_before_schedules_are_built(loop, pretrain_config):
    """mmengine's complain of an epoch_length; without our check hook too."""
    pretrain_config.train_cfg = dict(loop, type=f'beit_mm.{loop["type"]}')
    if 'max_epochs' in loop:
        pretrain_config.param_scheduler = [dict(type='LinearLR', start_factor=0.5, end=1, convert_to_iter_based=True)]
    pretrain_config.train_dataloader.batch_size = 13
    pretrain_config.custom_hooks = []
    with pytest.raises(ValueError, match='has 12 images, less than one batch of 13 for each of 1 processes'):
        make_runner(pretrain_config).train()


def test_second_view_of_the_wrong_size_is_refused_before_the_first_step(pretrain_config):
    for transform in pretrain_config.train_dataloader.dataset.pipeline:
        if 'second_size' in transform:
            transform.second_size = 16
    runner = make_runner(pretrain_config)
    with pytest.raises(ValueError, match='set second_size to 32 x 32'):
        runner.train()
    assert runner.iter == 0


def test_unreadable_images_are_listed_and_too_many_stop_the_run(pretrain_config, images, tmp_path):
    folder = tmp_path / 'some_broken'
    folder.mkdir()
    for index in range(40):
        good = (images / f'{index % 12:02}.jpg').read_bytes()
        (folder / f'{index:02}.jpg').write_bytes(good if index % 3 else good[:100])
    pretrain_config.train_dataloader.dataset.data_root = str(folder)
    runner = make_runner(pretrain_config)
    with pytest.raises(ValueError, match='11 of 40 images cannot be read, at most 10'):
        runner.train()
    listed = (Path(pretrain_config.work_dir) / 'unreadable_images.txt').read_text().split()
    assert len(listed) == len(set(listed)) == 11
    assert all(int(Path(path).stem) % 3 == 0 for path in listed)


def test_resume_continues_from_a_file_of_plain_values(pretrain_config):
    pretrain_config.param_scheduler = [
        dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=2),
        dict(type='CosineAnnealingLR', by_epoch=False, begin=2, end=6, T_max=4, eta_min=1e-5),
    ]
    pretrain_config.default_hooks.checkpoint.max_keep_ckpts = 3
    whole = make_runner(pretrain_config)
    whole.train()
    work = Path(pretrain_config.work_dir)
    first = torch.load(work / 'epoch_1.pth', weights_only=True)
    assert first['meta']['beit_mm_format'] == 1
    assert first['meta']['tokenizer'] == dict(whole.model.target_generator.provenance)
    assert not [k for k in first['state_dict'] if k.startswith('target_generator')]

    pretrain_config.load_from = str(work / 'epoch_1.pth')
    pretrain_config.resume = True
    pretrain_config.work_dir = str(work.parent / 'resumed')
    resumed = make_runner(pretrain_config)
    resumed.train()
    assert resumed.iter == whole.iter == 6
    # mmengine's list of the checkpoints it may delete survives too
    assert first['message_hub']['runtime_info']['keep_ckpt_ids'] == [1]
    history = resumed.message_hub.get_scalar('train/loss').data[0]
    assert resumed.optim_wrapper.get_lr() == whole.optim_wrapper.get_lr()
    assert len(history) == 6  # three steps of the first run, three of the second
    assert history[0] == pytest.approx(whole.message_hub.get_scalar('train/loss').data[0][0])
    ours, theirs = resumed.model.state_dict(), whole.model.state_dict()
    for name in theirs:  # no stochastic depth here, so the second epoch is the same
        torch.testing.assert_close(ours[name], theirs[name], atol=1e-5, rtol=1e-4)


def test_another_tokenizer_at_resume_is_warned_of(pretrain_config):
    pretrain_config.train_cfg.max_epochs = 1
    make_runner(pretrain_config).train()
    path = Path(pretrain_config.work_dir) / 'epoch_1.pth'
    content = torch.load(path, weights_only=True)
    content['meta']['tokenizer'] = dict(type='DALLETokenizer', path='other.pth', sha256='0' * 64)
    torch.save(content, path)
    pretrain_config.load_from, pretrain_config.resume = str(path), True
    pretrain_config.train_cfg.max_epochs = 2
    _, text = _train_log(pretrain_config)
    assert 'was trained on the visual tokens of' in text and 'other.pth' in text


@pytest.mark.parametrize('processes', [1, 3])
def test_throughput_is_images_over_seconds_not_a_mean_of_rates(processes, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.steps.get_world_size', lambda: processes)
    clock = iter([0.0, *(0.1 * step for step in range(1, 8)), 2.7])  # seven quick steps, then a stall of two seconds
    monkeypatch.setattr('beit_mm.engine.steps.time.perf_counter', lambda: next(clock))
    logged = {}
    runner = SimpleNamespace(message_hub=SimpleNamespace(update_scalar=logged.__setitem__, log_scalars={}))
    hook = ThroughputHook()
    hook.before_train_epoch(runner)
    for _ in range(8):
        hook.after_train_iter(runner, 0, dict(inputs=dict(images=torch.zeros(5, 4))), {})
    assert logged['train/images_per_second'] == pytest.approx(8 * 5 * processes / 2.7)  # of all processes


@pytest.mark.parametrize(('wait', 'said'), [(0.6, 1), (0.4, 0)])
def test_a_training_that_waits_for_images_says_so_once(wait, said, monkeypatch):
    """Not of the first batch: its wait is the start of the workers."""
    lines, scalars = [], {f'train/{name}': HistoryBuffer() for name in ('data_time', 'time')}
    monkeypatch.setattr('beit_mm.engine.steps.print_log', lambda message, **_: lines.append(message))
    runner = SimpleNamespace(message_hub=SimpleNamespace(update_scalar=lambda *_: None, log_scalars=scalars))
    hook = ThroughputHook()
    for step in range(80):
        scalars['train/data_time'].update(wait if step else 100)
        scalars['train/time'].update(1 if step else 101)
        hook.after_train_iter(runner, step, dict(inputs=torch.zeros(5, 4)), {})
    assert len(lines) == said and all('60% of the time' in line for line in lines)


@pytest.mark.parametrize(('wait', 'said'), [(0.6, 1), (0.1, 0)])
def test_a_validation_is_no_wait_for_images(wait, said, monkeypatch):
    """mmengine's timer counts what follows the last batch of a validation in the middle of an epoch."""
    lines, now, batch = [], [0.0], dict(inputs=torch.zeros(5, 4))
    monkeypatch.setattr('beit_mm.engine.steps.print_log', lambda message, **_: lines.append(message))
    monkeypatch.setattr('beit_mm.engine.steps.time.perf_counter', lambda: now[0])
    monkeypatch.setattr('mmengine.hooks.iter_timer_hook.time.time', lambda: now[0])
    runner = SimpleNamespace(message_hub=MessageHub.get_instance(f'waits {wait}'), iter=0, max_iters=80)
    timer, hook = hooks = IterTimerHook(), ThroughputHook()
    for each in hooks:
        each.before_train(runner)
        each.before_train_epoch(runner)
    for step in range(80):
        now[0] += wait
        timer.before_train_iter(runner, step, batch)
        now[0] += 1 - wait
        for each in hooks:
            each.after_train_iter(runner, step, batch, {})
        if step % 10 == 9:
            timer.before_val_epoch(runner)
            now[0] += 100
            for each in hooks:
                each.after_val_epoch(runner, {})
    assert len(lines) == said and all('60% of the time' in line for line in lines)
    assert runner.message_hub.get_scalar('train/images_per_second').current() == pytest.approx(5)


def _train_log(cfg) -> tuple[object, str]:
    """Trains, and returns the runner and its log file."""
    runner = make_runner(cfg)
    runner.train()
    return runner, next(Path(runner.log_dir).glob('*.log')).read_text()
