"""A resumed run goes on at the position of its checkpoint with the settings of its config, and names what changed."""

import copy
import re
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from helpers import make_runner
from labelled import classifier_config, make_images
from mmengine.config import Config
from mmengine.evaluator import BaseMetric, Evaluator
from mmengine.hooks import Hook
from mmengine.model import BaseModel
from mmengine.registry import OPTIMIZERS
from mmengine.runner import Runner
from promises.test_resume import differences
from torch import nn
from torch.utils.data import DataLoader

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine import CheckpointHook
from beit_mm.engine.checkpoints import INTERRUPTED, checkpoint_hook_of
from beit_mm.errors import UserError

IMAGES, BATCH = 12, 4  # three steps an epoch


class Line(BaseModel):
    def __init__(self, init_cfg: dict | None = None):
        super().__init__(init_cfg=init_cfg)
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        self.register_buffer('steps', torch.zeros((), dtype=torch.int64))  # as in DiscreteVAE

    def forward(self, inputs: torch.Tensor, mode: str) -> dict | list:
        self.steps += mode == 'loss'
        loss = self.layers(inputs).square().mean()
        return dict(loss=loss) if mode == 'loss' else [loss]


class Points(list):
    def __getitem__(self, key) -> dict:
        return dict(inputs=super().__getitem__(getattr(key, 'index', key)))


class Score(BaseMetric):
    """The loss as two metrics: one is better when it is low, the other when it is high."""

    def process(self, data_batch: dict, data_samples: list) -> None:
        self.results += data_samples

    def compute_metrics(self, results: list) -> dict[str, float]:
        return dict(loss=float(torch.stack(results).mean()), accuracy=-1.0)


class Notes(Hook):
    """The settings of the optimizer's groups before each step, and what the run did."""

    def __init__(self):
        self.groups: dict[int, list] = {}
        self.called: list[str] = []

    def before_train(self, runner: Runner) -> None:
        self.called.append('before_train')
        self.begun = copy.deepcopy(runner.optim_wrapper.optimizer.state_dict())

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        names = 'lr', 'weight_decay', 'betas', 'eps', 'names'
        self.groups[runner.iter] = [[group.get(name) for name in names] for group in runner.optim_wrapper.param_groups]

    def before_val(self, runner: Runner) -> None:
        self.called.append('before_val')


class Interruption(Hook):
    """Ends the run after a step, and saves it as a signal does."""

    priority = 'LOWEST'

    def __init__(self, steps: int):
        self.steps = steps

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs=None) -> None:
        if runner.iter + 1 == self.steps:
            checkpoint_hook_of(runner).save(runner, INTERRUPTED, iter=self.steps)
            raise KeyboardInterrupt


def loader(batch_size: int, train: bool) -> DataLoader:
    points = Points(torch.randn(IMAGES, 2, generator=torch.Generator().manual_seed(0)))
    sampler = SeededSampler(points, seed=0, shuffle=train) if train else None
    return DataLoader(points, batch_size=batch_size, sampler=sampler)


def settings(options: dict | None = None, **sections: object) -> dict:
    """A config of six steps in two epochs, less its model and data; options as on a command line."""
    optimizer = dict(type='AdamW', lr=0.1, weight_decay=0.05, betas=(0.9, 0.98))
    wrapper = dict(type='beit_mm.AutocastOptimWrapper', dtype='float32', optimizer=optimizer)
    wrapper['constructor'] = 'beit_mm.BEiTOptimWrapperConstructor'
    checkpoint = dict(type='beit_mm.CheckpointHook', by_epoch=False, interval=1)
    config = dict(
        train_cfg=dict(type='beit_mm.EpochLoop', max_epochs=2),
        optim_wrapper=wrapper,
        param_scheduler=[],
        default_hooks=dict(checkpoint=checkpoint),
        custom_hooks=[dict(type='beit_mm.CheckpointMetaHook')],
    )
    config = Config(config | sections)
    config.merge_from_dict(options or {})
    return config.to_dict()


def run(
    folder: Path,
    config: dict,
    batch: int = BATCH,
    validated: bool = False,
    hooks: Sequence[Hook] = (),
    init_cfg: dict | None = None,
    **arguments: object,
) -> tuple:
    """The runner after a training, and the notes."""
    if validated:
        arguments |= dict(val_dataloader=loader(BATCH, False), val_cfg={}, val_evaluator=Evaluator([Score()]))
    run.count += 1
    arguments['experiment_name'] = f'{folder.parent.name}_{run.count}'
    own = copy.deepcopy(config)  # mmengine takes entries out
    runner = Runner(Line(init_cfg), str(folder), loader(batch, True), cfg=Config(config), **own, **arguments)
    for hook in (*hooks, notes := Notes()):
        runner.register_hook(hook)
    runner.train()
    return runner, notes


run.count = 0


def resumed(folder: Path, at: Path, config: dict, **arguments: object) -> tuple:
    return run(folder, config, resume=True, load_from=str(at), **arguments)


@pytest.mark.parametrize('by', ['load_from', 'init_cfg'])
def test_weights_of_another_run_leave_the_temperature_at_its_start(by, tmp_path, capsys):
    run(tmp_path / 'first', settings())
    weights = str(tmp_path / 'first/iter_6.pth')
    source = weights if by == 'load_from' else dict(type='Pretrained', checkpoint=weights)
    runner, _ = run(tmp_path / 'second', settings(), **{by: source})
    assert runner.model.steps == 6
    assert 'missing keys' not in capsys.readouterr().out


def schedules(kind: str, epochs: int) -> dict:
    """Loop and schedules of a run: a warm-up of one epoch, then a cosine or a polynomial."""
    loop, begin, end, counted = dict(type='beit_mm.EpochLoop', max_epochs=epochs), 1, epochs, {}
    if kind == 'by iteration':
        loop, begin, end = dict(type='beit_mm.IterLoop', max_iters=3 * epochs), 3, 3 * epochs
        counted = dict(by_epoch=False)
    elif kind == 'converted':
        counted = dict(convert_to_iter_based=True)
    decay = [
        dict(type='CosineAnnealingLR', begin=begin, end=end, eta_min_ratio=0.1, **counted),
        dict(type='CosineAnnealingParamScheduler', param_name='weight_decay', eta_min=0.4, end=end, **counted),
    ]
    if kind == 'by epoch':
        decay = [dict(type='PolyLR', begin=1, end=epochs + 1, power=0.9, eta_min=0.01)]
    warm_up = dict(type='LinearLR', start_factor=0.1, end=3, by_epoch=False)
    return dict(train_cfg=loop, param_scheduler=[warm_up, *decay])


@pytest.mark.parametrize('kind', ['by iteration', 'by epoch', 'converted'])
def test_rates_are_those_of_a_run_that_had_the_config_from_its_start(kind, tmp_path):
    own = schedules(kind, 3)
    run(tmp_path / 'first', settings(**own))
    scaled = dict(enable=True, base_batch_size=8)
    decay = {'weight_decay': 0.1, 'betas': (0.8, 0.9), 'eps': 1}
    changed = [
        (9, settings(**schedules(kind, 5))),  # longer
        (5, settings(**schedules(kind, 2))),  # shorter
        (2, settings({'optim_wrapper.optimizer.lr': 0.05}, auto_scale_lr=scaled, **own)),
        (5, settings({f'optim_wrapper.optimizer.{key}': value for key, value in decay.items()}, **own)),
        (5, settings(train_cfg=own['train_cfg'])),  # without schedules
    ]
    for number, (position, config) in enumerate(changed):
        _, whole = run(tmp_path / f'whole_{number}', config)
        _, rest = resumed(tmp_path / f'rest_{number}', tmp_path / f'first/iter_{position}.pth', config)
        assert rest.groups == {step: groups for step, groups in whole.groups.items() if step >= position}, number


def test_one_cycle_is_resumed_and_made_longer(tmp_path):
    """mmengine stores a function of it, which no checkpoint may name."""
    config = settings(param_scheduler=[dict(type='OneCycleLR', eta_max=0.1, total_steps=6, by_epoch=False)])
    run(tmp_path / 'first', config)
    for number, total_steps in enumerate((6, 9)):
        config['param_scheduler'][0]['total_steps'] = total_steps
        _, whole = run(tmp_path / f'whole_{number}', config)
        _, rest = resumed(tmp_path / f'rest_{number}', tmp_path / 'first/iter_4.pth', config)
        assert rest.groups == {step: whole.groups[step] for step in (4, 5)}


class Faster(Hook):
    """Moves schedules by a step more than the run makes."""

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None, outputs=None) -> None:
        for scheduler in runner.param_schedulers:
            scheduler.step()


def test_schedules_that_do_not_follow_the_steps_keep_their_own_position(tmp_path):
    """As in a run of so many minutes."""
    config = settings(train_cfg=dict(type='beit_mm.IterLoop', max_iters=6))
    config['param_scheduler'] = [dict(type='PolyLR', end=13, by_epoch=False)]
    run(tmp_path / 'first', config, hooks=[Faster()])
    config['optim_wrapper']['optimizer']['lr'] = 0.01
    _, whole = run(tmp_path / 'whole', config, hooks=[Faster()])
    _, rest = resumed(tmp_path / 'rest', tmp_path / 'first/iter_2.pth', config, hooks=[Faster()])
    assert rest.groups == {step: groups for step, groups in whole.groups.items() if step >= 2}


def lines_of(text: str) -> set[str]:
    """The changes that a run names."""
    return {line.strip() for line in text.splitlines() if ', was ' in line}


def test_each_change_is_a_line_with_both_values_and_nothing_changed_is_none(tmp_path, capfd):
    run(tmp_path / 'first', settings())
    capfd.readouterr()
    resumed(tmp_path / 'same', tmp_path / 'first/iter_3.pth', settings())
    assert not lines_of(''.join(capfd.readouterr()))
    config = settings({'optim_wrapper.optimizer.lr': 0.01, 'train_cfg.max_epochs': 3})
    config['custom_hooks'].append(dict(type='EMAHook', momentum=0.1))
    resumed(tmp_path / 'second', tmp_path / 'first/iter_3.pth', config)
    named = ['optim_wrapper.optimizer.lr 0.01, was 0.1', 'train_cfg.max_epochs 3, was 2']
    named += ["custom_hooks.1.type 'EMAHook', was not set", 'custom_hooks.1.momentum 0.1, was not set']
    assert lines_of(''.join(capfd.readouterr())) == set(named)
    config['custom_hooks'][1]['momentum'] = 0.2
    resumed(tmp_path / 'third', tmp_path / 'second/iter_5.pth', config)
    assert lines_of(''.join(capfd.readouterr())) == {'custom_hooks.1.momentum 0.2, was 0.1'}


def moments_of(optimizer: dict) -> dict[str, torch.Tensor]:
    """By the names of the parameters."""
    pairs = [pair for group in optimizer['param_groups'] for pair in zip(group['names'], group['params'], strict=True)]
    return {name: optimizer['state'][number]['exp_avg'] for name, number in pairs if number in optimizer['state']}


def test_layer_decay_and_frozen_layers_are_those_of_the_config(tmp_path):
    def trained(folder: str, **changes: object) -> Notes:
        config.work_dir = str(tmp_path / folder)
        runner = make_runner(Config(dict(config, **changes)))
        runner.register_hook(notes := Notes())
        runner.train()
        return notes

    config = classifier_config(make_images(tmp_path / 'images', per_class=4), tmp_path)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.default_hooks.checkpoint.update(by_epoch=False, interval=1)
    config.optim_wrapper.constructor = 'beit_mm.BEiTOptimWrapperConstructor'
    config.param_scheduler = [dict(type='PolyLR', end=11, by_epoch=False)]
    config.model.backbone.frozen_stages = 1
    trained('first')
    first = torch.load(tmp_path / 'first/iter_2.pth', weights_only=True)
    config.model.backbone.frozen_stages = -1
    config.optim_wrapper.paramwise_cfg = dict(layer_decay_rate=0.5)  # a group for each layer: there was none
    whole = trained('whole')
    rest = trained('rest', resume=True, load_from=str(tmp_path / 'first/iter_2.pth'))
    assert rest.groups == {step: groups for step, groups in whole.groups.items() if step >= 2}
    assert len(rest.groups[2]) > len(first['optimizer']['param_groups']) + 1
    before, after = moments_of(first['optimizer']), moments_of(rest.begun)
    assert len(before) > 10 and not differences(before, after)


def test_a_run_that_accumulates_no_more_has_the_rates_of_its_own_batches(tmp_path):
    config = settings(**schedules('converted', 3))
    run(tmp_path / 'first', settings({'optim_wrapper.accumulative_counts': 2}, **schedules('converted', 3)), batch=2)
    _, whole = run(tmp_path / 'whole', config, batch=4)
    # iteration 10 is the fourth of six in its epoch
    runner, rest = resumed(tmp_path / 'rest', tmp_path / 'first/iter_10.pth', config, batch=4)
    assert rest.groups == {step: groups for step, groups in whole.groups.items() if step >= 5}
    assert runner.model.steps == 9


def test_a_run_in_larger_batches_validates_and_is_resumed_from_its_own_files(tmp_path, monkeypatch):
    """Whose numbers are lower than those of the files before; killed before its first one, it has these."""
    loop = dict(type='beit_mm.IterLoop', max_iters=14, val_interval=4)
    small = settings({'optim_wrapper.accumulative_counts': 2}, train_cfg=loop)
    run(tmp_path / 'work', small, batch=2, validated=True)  # its last validation but one is that of iteration 12
    (tmp_path / 'work/iter_14.pth').unlink()
    config = settings(train_cfg=dict(loop, max_iters=8))
    with monkeypatch.context() as patch:
        patch.setattr(CheckpointHook, 'save', lambda *args, **kwargs: None)
        run(tmp_path / 'work', config, resume=True)
    for train_cfg, begun in ((config['train_cfg'], 6), (dict(loop, max_iters=12), 8)):
        _, notes = run(tmp_path / 'work', settings(train_cfg=train_cfg), validated=True, resume=True)
        assert min(notes.groups) == begun and notes.called[-1] == 'before_val'


def test_a_run_of_iterations_on_more_images_makes_the_steps_that_were_left(tmp_path, monkeypatch):
    config = settings(**schedules('by iteration', 3))
    _, whole = run(tmp_path / 'first', config)
    monkeypatch.setitem(globals(), 'IMAGES', 20)
    _, rest = resumed(tmp_path / 'rest', tmp_path / 'first/iter_5.pth', config)
    assert rest.groups == {step: groups for step, groups in whole.groups.items() if step >= 5}


def test_without_its_moving_average_a_run_goes_on_with_the_weights_that_it_trained(tmp_path):
    config = settings()
    whole, _ = run(tmp_path / 'whole', config)
    averaging = settings(custom_hooks=[*config['custom_hooks'], dict(type='EMAHook', momentum=0.1)])
    run(tmp_path / 'first', averaging)
    rest, _ = resumed(tmp_path / 'rest', tmp_path / 'first/iter_3.pth', config)
    assert not differences(whole.model.state_dict(), rest.model.state_dict())


def test_a_run_of_iterations_is_continued_by_epochs(tmp_path):
    config = settings(**schedules('by epoch', 3))
    run(tmp_path / 'first', settings(train_cfg=dict(type='beit_mm.IterLoop', max_iters=7)))
    _, whole = run(tmp_path / 'whole', config)
    _, rest = resumed(tmp_path / 'rest', tmp_path / 'first/iter_7.pth', config, validated=True)
    assert rest.groups == {step: whole.groups[step] for step in (7, 8)} and rest.called == [
        'before_train',
        'before_val',
    ]


def test_steps_between_epochs_are_not_made_again(tmp_path):
    """Files numbered by iteration come after those numbered by epoch, but these are of before."""
    by_epoch = {'default_hooks.checkpoint.by_epoch': True}
    steps = settings(train_cfg=dict(type='beit_mm.IterLoop', max_iters=7))
    for config, begun in ((settings(by_epoch), 0), (steps, 6), (settings(by_epoch | {'train_cfg.max_epochs': 3}), 7)):
        _, notes = run(tmp_path / 'work', config, resume='auto')
        assert min(notes.groups) == begun


def test_steps_after_an_interruption_between_epochs_are_not_made_again(tmp_path):
    by_epoch = settings({'default_hooks.checkpoint.by_epoch': True})
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / 'work', by_epoch, hooks=[Interruption(4)])
    for config, begun in ((settings(train_cfg=dict(type='beit_mm.IterLoop', max_iters=5)), 4), (by_epoch, 5)):
        _, notes = run(tmp_path / 'work', config, resume=True)
        assert min(notes.groups) == begun


def test_a_run_that_is_interrupted_twice_deletes_its_old_files(tmp_path):
    config = settings({'default_hooks.checkpoint.interval': 3, 'default_hooks.checkpoint.max_keep_ckpts': 1})
    for steps in (4, 5):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, config, resume=True, hooks=[Interruption(steps)])
    run(tmp_path, config, resume=True)
    assert [path.name for path in tmp_path.glob('*.pth')] == ['iter_6.pth']


def test_what_follows_measurements_stays_the_checkpoints_and_a_line_says_so(tmp_path, capfd):
    plateau = [dict(type='ReduceOnPlateauLR', monitor='accuracy', rule='greater', patience=0, threshold=0)]
    loop = dict(type='beit_mm.EpochLoop', max_epochs=4)
    _, whole = run(tmp_path / 'first', settings(train_cfg=loop, param_scheduler=plateau), validated=True)
    rates = [whole.groups[step][0][0] for step in (0, 6, 9)]
    assert rates == pytest.approx([0.1, 0.01, 0.001])
    options = {'optim_wrapper.optimizer.lr': 0.05, 'optim_wrapper.optimizer.weight_decay': 0.2}
    config = settings(options, train_cfg=loop, param_scheduler=plateau)
    capfd.readouterr()
    _, rest = resumed(tmp_path / 'rest', tmp_path / 'first/iter_8.pth', config, validated=True)
    assert [rest.groups[step][0][:2] for step in (8, 9)] == [[pytest.approx(0.01), 0.2], [pytest.approx(0.001), 0.2]]
    assert re.search('ReduceOnPlateau.* lr ', ''.join(capfd.readouterr()))


@OPTIMIZERS.register_module()
class CountingSGD(torch.optim.SGD):
    """Keeps a number in its groups, as Prodigy and schedule-free optimizers do."""

    def __init__(self, params: list, lr: float):
        super().__init__([dict(group, k=0) for group in params], lr)
        self.defaults['k'] = 0

    def step(self, closure: None = None) -> None:
        super().step(closure)
        for group in self.param_groups:
            group['k'] += 1


def test_what_an_optimizer_keeps_in_its_groups_is_the_checkpoints(tmp_path):
    config = settings()
    config['optim_wrapper']['optimizer'] = dict(type='CountingSGD', lr=0.1)
    run(tmp_path / 'first', config)
    config['optim_wrapper']['optimizer']['lr'] = 0.01
    runner, rest = resumed(tmp_path / 'rest', tmp_path / 'first/iter_3.pth', config)
    assert [(group['lr'], group['k']) for group in runner.optim_wrapper.optimizer.param_groups] == [(0.01, 6)] * 2


def test_the_state_of_another_optimizer_is_refused_by_name(tmp_path):
    run(tmp_path / 'first', settings())
    config = settings()
    config['optim_wrapper']['optimizer'] = dict(type='SGD', lr=0.1)
    with pytest.raises(UserError, match='SGD.*AdamW.*load_from'):
        resumed(tmp_path / 'rest', tmp_path / 'first/iter_3.pth', config)


def test_groups_of_another_constructor_are_refused_by_its_setting(tmp_path):
    config = settings()
    del config['optim_wrapper']['constructor']
    run(tmp_path / 'first', config)
    config['optim_wrapper']['paramwise_cfg'] = dict(bias_decay_mult=0.0)
    with pytest.raises(CheckpointError, match='1 groups .*paramwise_cfg.*load_from'):
        resumed(tmp_path / 'rest', tmp_path / 'first/iter_3.pth', config)


LOOPS = [dict(type='beit_mm.EpochLoop', max_epochs=2), dict(type='beit_mm.IterLoop', max_iters=6, val_interval=3)]


@pytest.mark.parametrize('loop', LOOPS)
def test_a_finished_run_says_so_validates_and_ends(loop, tmp_path, capfd):
    shorter = {key: value // 2 if key.startswith('max_') else value for key, value in loop.items()}
    expected = [
        (loop, ['before_train', 'before_val', 'before_val'], ()),
        (loop, ['before_train', 'before_val'], '66'),  # it may have been killed in its last validation
        (shorter, [], '63'),
    ]
    for train_cfg, called, numbers in expected:
        capfd.readouterr()
        _, notes = run(tmp_path / 'work', settings(train_cfg=train_cfg), validated=True, resume=True)
        assert notes.called == called
        finished = re.findall(r'checkpoint has (\d) .* config asks for (\d)', ''.join(capfd.readouterr()))
        assert [*map(''.join, finished)] == [*filter(None, [''.join(numbers)])]


def test_the_best_of_another_metric_begins_anew(tmp_path):
    """A loss is never below -1, the accuracy before."""
    run(tmp_path / 'work', settings({'default_hooks.checkpoint.save_best': 'accuracy'}), validated=True)
    options = {'default_hooks.checkpoint.save_best': 'loss', 'train_cfg.max_epochs': 3}
    run(tmp_path / 'work', settings(options), validated=True, resume=True)
    assert [path.name for path in (tmp_path / 'work').glob('best_loss_*')] == ['best_loss_iter_9.pth']


def test_another_seed_has_no_effect_and_a_line_says_so(tmp_path, capfd):
    run(tmp_path / 'first', settings(), randomness=dict(seed=5))
    runner, _ = resumed(tmp_path / 'rest', tmp_path / 'first/iter_3.pth', settings(randomness=dict(seed=7)))
    assert runner.seed == 5 and re.search(r'seed=7 .*5\.', ''.join(capfd.readouterr()))
