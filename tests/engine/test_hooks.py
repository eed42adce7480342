"""The hooks of a pretraining run, in a run."""

import json
import random
import re
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import make_runner, narrow_model, train
from mmengine.config import Config
from mmengine.hooks import EMAHook, Hook
from mmengine.logging import MessageHub
from PIL import Image

from beit_mm import engine
from beit_mm.engine import CompileHook, CompressGradientsHook, DenseKNNHook, DINOHook, KNNHook, TeacherMomentumHook
from beit_mm.engine.checkpoints import CheckpointMetaHook
from beit_mm.engine.checks import check_effective_batch, check_same_zero
from beit_mm.engine.logs import ProgressHook, ThroughputHook
from beit_mm.engine.steps import StepSeedHook
from beit_mm.registry import MODELS


def test_a_run_trains_validates_and_leaves_its_pictures(pretrain_config, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.logs.HISTORY', 4)
    pretrain_config.log_processor.window_size = 1
    pretrain_config.custom_hooks.append(dict(type='beit_mm.ReconstructionHook'))
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


def test_hooks_are_called_in_the_order_that_the_package_draws(pretrain_config):
    runner = make_runner(pretrain_config)
    others = [EMAHook(), KNNHook({}, {}), DenseKNNHook({}, {}), DINOHook(), TeacherMomentumHook()]
    for hook in (*others, CompileHook(), CompressGradientsHook(), ProgressHook('run')):
        runner.register_hook(hook)
    built = [[hook.priority, type(hook).__name__] for hook in runner.hooks]
    rows = [line.split()[:2] for line in engine.__doc__.splitlines() if line.startswith('    ')]
    assert rows == built


def test_a_tokenizer_in_half_precision_can_be_averaged(pretrain_config):
    """An EMAHook copies the model before the first batch."""
    pretrain_config.model.target_generator.precision = 'bf16'
    runner = train(pretrain_config, average := EMAHook())
    models = runner.model, average.ema_model.module
    weight, averaged = (model.target_generator.encoder.blocks.input.w for model in models)
    assert weight.dtype == torch.bfloat16 and torch.equal(averaged, weight)


def test_a_line_of_the_log_has_the_losses_up_to_its_step(pretrain_config, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.logs.STEPS_BETWEEN_FETCHES', 5)  # neither divides the other
    pretrain_config.train_cfg = dict(type='beit_mm.IterLoop', max_iters=16)
    pretrain_config.val_cfg = pretrain_config.val_dataloader = pretrain_config.val_evaluator = None
    pretrain_config.default_hooks.logger.interval = 7
    complete = []  # steps after which the history has them all

    class Watch(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            scalars = runner.message_hub.log_scalars
            if 'train/loss' in scalars and len(scalars['train/loss'].data[0]) == runner.iter + 1:
                complete.append(runner.iter + 1)

    train(pretrain_config, Watch())
    assert complete == [3, 5, 7, 10, 14, 15, 16]  # 3 is the end of the data, as mmengine counts


def runner_of(cfg: dict, **options: object) -> SimpleNamespace:
    loader, optimizer = SimpleNamespace(batch_size=4), SimpleNamespace(param_groups=[dict(lr=1e-3)])
    parts = dict(hooks=[], param_schedulers=[], optim_wrapper=SimpleNamespace(optimizer=optimizer))
    return SimpleNamespace(cfg=Config(cfg), train_dataloader=loader, **parts | options)


def test_an_effective_batch_that_is_not_the_recipes_is_warned_of(warnings):
    for recipe in (8, 2048):
        recipe_of = dict(auto_scale_lr=dict(base_batch_size=recipe), optim_wrapper=dict(accumulative_counts=2))
        check_effective_batch(runner_of(recipe_of))
    (text,) = warnings()
    assert '1 processes x 4 images x 2 accumulated = 8; the recipe has 2048' in text


@pytest.mark.parametrize(('interval', 'number'), [(1, 1), (4, 0)])
def test_an_average_of_single_batches_of_a_step_is_warned_of(interval, number, warnings):
    cfg = dict(optim_wrapper=dict(accumulative_counts=4))
    check_effective_batch(runner_of(cfg, hooks=[EMAHook(interval=interval)]))
    assert len(warnings()) == number


@pytest.mark.parametrize('other', [dict(reduce_zero_label=True), dict(reduce_zero_label=False), {}])
def test_label_maps_whose_zero_means_different_things_are_warned_of(other, warnings):
    train, val = (SimpleNamespace(metainfo=meta, data_root=name) for meta, name in ((other, 'a'), ({}, 'b')))
    check_same_zero(train, val)
    assert len(warnings()) == other.get('reduce_zero_label', False)


def test_fewer_images_than_a_batch_are_named_before_schedules_are_built(pretrain_config):
    """mmengine's complain of an epoch_length; without our check hook too."""
    pretrain_config.train_dataloader.batch_size = 13
    pretrain_config.custom_hooks = []
    pretrain_config.param_scheduler = [dict(type='LinearLR', start_factor=0.5, end=1, convert_to_iter_based=True)]
    with pytest.raises(ValueError, match=' 12 images.* 13 '):
        make_runner(pretrain_config).train()


def test_another_tokenizer_in_a_checkpoint_is_warned_of(warnings):
    runner = SimpleNamespace(model=MODELS.build(narrow_model()), cfg={}, message_hub=MessageHub('targets'))
    own = dict(runner.model.target_generator.provenance)
    for provenance in (own, dict(own, path='elsewhere.pth'), dict(own, sha256='0' * 64)):
        CheckpointMetaHook().after_load_checkpoint(runner, dict(meta=dict(tokenizer=provenance)))
    (text,) = warnings()
    assert 'was trained on' in text and '0' * 64 in text


def test_throughput_is_images_over_seconds_of_all_processes_not_a_mean_of_rates(monkeypatch):
    monkeypatch.setattr('beit_mm.engine.logs.get_world_size', lambda: 3)
    clock = iter([0.0, *(0.1 * step for step in range(1, 8)), 2.7])  # seven quick steps, then a stall of two seconds
    monkeypatch.setattr('beit_mm.engine.logs.time.perf_counter', lambda: next(clock))
    logged = {}
    runner = SimpleNamespace(message_hub=SimpleNamespace(update_scalar=logged.__setitem__, log_scalars={}))
    hook = ThroughputHook()
    hook.before_train_epoch(runner)
    for _ in range(8):
        hook.after_train_iter(runner, 0, dict(inputs=dict(images=torch.zeros(5, 4))), {})
    assert logged['train/images_per_second'] == pytest.approx(8 * 5 * 3 / 2.7)


class Tick(Hook):
    """A step of a training takes six seconds, a batch of a validation or a test three, by a clock of the test's."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        clock = SimpleNamespace(monotonic=lambda: self.now, perf_counter=time.perf_counter)
        monkeypatch.setattr('beit_mm.engine.logs.time', clock)

    def _after_iter(self, runner, batch_idx, data_batch=None, outputs=None, mode='train'):
        self.now += 6 if mode == 'train' else 3


def test_lines_of_progress_have_the_time_that_is_left_at_the_pace_so_far(pretrain_config, monkeypatch, capsys):
    cfg = pretrain_config
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=5, val_interval=2, val_begin=3)
    cfg.val_dataloader.batch_size = cfg.test_dataloader.batch_size = 2  # of 12 images
    runner = make_runner(cfg)
    for hook in (Tick(monkeypatch), ProgressHook('run', seconds=0)):
        runner.register_hook(hook)
    capsys.readouterr()
    runner.train()
    lines = [re.sub(r'  .*  ', ' ', line) for line in capsys.readouterr().out.splitlines() if line.endswith(' left')]
    expected = [f'run {step}/5 0:00:{6 * (5 - step):02}' for step in range(1, 5)]
    batches = [f'run, held-out images, batch {batch}/6  0:00:{18 - 3 * batch:02}' for batch in range(1, 7)]
    assert lines == [f'{line} left' for line in [*expected, *batches, 'run 5/5 0:00:00', *batches]]
    runner.test()
    lines = [line for line in capsys.readouterr().out.splitlines() if line.endswith(' left')]
    assert lines == [f'{line} left' for line in batches]


def test_an_early_end_names_the_weights_that_there_are(tmp_path, capsys):
    runner = SimpleNamespace(iter=3, max_iters=9, work_dir=str(tmp_path))
    for name, said in ((None, 'not saved'), ('best_mIoU_iter_2.pth', 'best_mIoU_iter_2.pth')):
        if name is not None:
            (tmp_path / name).touch()
        ProgressHook('run').after_train(runner)
        assert said in capsys.readouterr().out


def test_a_shortened_run_validates_on_its_share_of_the_images(pretrain_config, monkeypatch):
    monkeypatch.setattr('beit_mm.engine.loops.warn', (said := []).append)
    cfg, length = pretrain_config, dict(max_epochs=4)  # 12 steps
    for steps, batch, share in ((3, 1, [0, 4, 8]), (3, 4, [0, 3, 6, 9]), (12, 1, [*range(12)])):
        cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=steps, val_interval=steps, shortened_from=length)
        cfg.val_dataloader.batch_size = batch
        dataset = train(cfg).val_dataloader.dataset
        names = [int(Path(dataset.get_data_info(number)['img_path']).stem) for number in range(len(dataset))]
        assert names == share
    assert len(said) == 2 and '3 of 12' in said[0] and '4 of 12' in said[1]


def test_all_steps_of_all_ranks_and_runs_draw_their_own(monkeypatch):
    def drawn(seed: int, rank: int, step: int) -> tuple[float, float, float]:
        monkeypatch.setattr('beit_mm.engine.steps.get_rank', lambda: rank)
        StepSeedHook().before_train_iter(SimpleNamespace(seed=seed, iter=step), 0)
        return random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()

    places = [(seed, rank, step) for seed in (0, 1) for rank in range(4) for step in range(50)]
    first = [drawn(*place) for place in places]
    assert [len(set(numbers)) for numbers in zip(*first, strict=True)] == [len(places)] * 3
    assert first[::-1] == [drawn(*place) for place in places[::-1]]  # whatever was drawn before
