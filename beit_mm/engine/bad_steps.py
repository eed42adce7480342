"""What a run does when its numbers stay bad: it stops, leaves what shows why, and one step of it can be run again.

AutocastOptimWrapper skips and counts the steps. A step's data and random draws follow from its number
(datasets.samplers, engine.hooks.StepSeedHook), so the weights before it and that number are enough to run it again.
"""

import copy
import json
import logging
import shlex
from collections import deque
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from mmengine.dist import barrier, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checkpoints import CheckpointHook, checkpoint_hook_of
from beit_mm.engine.checks import unwrap
from beit_mm.engine.hooks import fetch_logs, look_intervals
from beit_mm.engine.optim import MAX_SKIPPED_IN_A_ROW, STEPS_BETWEEN_LOOKS, AutocastOptimWrapper, SkippedSteps
from beit_mm.registry import HOOKS


class Moment(NamedTuple):
    """What changes in a run though a step is skipped, as it was before a step."""

    iteration: int
    groups: list[dict]  # settings of the optimizer's parameter groups
    schedules: list[dict]


@HOOKS.register_module()
class BadStepHook(Hook):
    """Stops a run after 25 skipped steps in a row, and leaves what is needed to find out why.

    It looks at the counters of AutocastOptimWrapper where the logger writes a line, at least every 50 steps, and at the
    end; the weights do not change between the 25th step and the look. In `bad_step_ITER/` in the folder of the
    checkpoints are then, ITER being the first iteration of the first of these steps:

    - `checkpoint.pth`: the run as it was before that step, to resume from or to replay the step from. Only a moving
      average of the weights (EMAHook) is further on.
    - `rank{rank}.json`: the samples of the step on this rank, the losses from it on, the loss scale before it.

    Raises:
        FloatingPointError: on all ranks; with the command that replays the step.
    """

    def __init__(self):
        self.moments: deque[Moment] = deque(maxlen=2 * STEPS_BETWEEN_LOOKS)  # before each of the last steps
        self.intervals = [STEPS_BETWEEN_LOOKS]

    def before_train(self, runner: Runner) -> None:
        """Takes over the logger's interval."""
        self.intervals = look_intervals(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Remembers rates and schedules, which go on while steps are skipped."""
        wrapper = runner.optim_wrapper
        if isinstance(wrapper, AutocastOptimWrapper) and wrapper.should_update():  # the first batch of a step
            groups = [
                {k: v for k, v in group.items() if k not in ('params', 'names')} for group in wrapper.param_groups
            ]
            schedules = [schedule.state_dict() for schedule in runner.param_schedulers or []]
            self.moments.append(Moment(runner.iter, groups, schedules))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Looks where a line of the log is due."""
        due = any(self.every_n_inner_iters(batch_idx, interval) for interval in self.intervals)
        if due or self.end_of_epoch(runner.train_dataloader, batch_idx):
            self.look(runner)

    def after_train(self, runner: Runner) -> None:
        """Looks once more."""
        self.look(runner)

    def look(self, runner: Runner) -> None:
        """Logs what was skipped, and stops the run if that was too much."""
        wrapper = runner.optim_wrapper
        if not isinstance(wrapper, AutocastOptimWrapper):
            return
        skipped = wrapper.look()
        if skipped.in_a_row < MAX_SKIPPED_IN_A_ROW:
            return
        folder = self.write(runner, skipped)
        barrier()  # a rank that ends would end the others while they write
        raise FloatingPointError(
            f'the gradient was not finite in {skipped.in_a_row} steps in a row. The run before the first of them is in '
            f'{folder}, with the names of its images; what goes wrong in it is shown by\n'
            f'{replay_command(runner, folder)}\nTo go on, resume from there with a smaller learning rate, or with '
            'optim_wrapper.dtype=float32'
        )

    def write(self, runner: Runner, skipped: SkippedSteps) -> Path:
        """Takes the run back to the first of the skipped steps, and writes it and each rank's part in it."""
        # A run that was resumed within the row knows only the later of its steps.
        moment = next(moment for moment in self.moments if moment.iteration >= skipped.first)
        wrapper = runner.optim_wrapper
        for group, settings in zip(wrapper.param_groups, moment.groups, strict=True):
            group.update(settings)
        for schedule, state in zip(runner.param_schedulers or [], moment.schedules, strict=True):
            schedule.load_state_dict(state)
        wrapper.forget_row()
        hook = checkpoint_hook_of(runner) or CheckpointHook(out_dir=runner.work_dir)
        name = f'bad_step_{moment.iteration}'
        folder = Path(hook.out_dir, name)
        loader = runner.train_dataloader
        iterations = range(moment.iteration, moment.iteration + wrapper.accumulative_counts)
        fetch_logs(runner)
        losses = runner.message_hub.get_scalar('train/loss').data[0]
        part = dict(
            iteration=moment.iteration,
            rank=get_rank(),
            world_size=get_world_size(),
            seed=runner.seed,
            skipped_steps=skipped.in_a_row,
            loss_scale=skipped.scale,
            losses=[str(loss) for loss in losses[-(runner.iter + 1 - moment.iteration) :]],  # JSON has no NaN
            samples=[dict(sample, iteration=i) for i in iterations for sample in samples_of(loader, i)],
        )
        try:
            folder.mkdir(exist_ok=True)
            (folder / f'rank{get_rank()}.json').write_text(json.dumps(part, indent=1))
        except OSError as error:
            print_log(f'{folder} could not be written ({error}).', logger='current', level=logging.WARNING)
        hook.save(runner, f'{name}/checkpoint.pth', epoch=moment.iteration // len(loader), iter=moment.iteration)
        hook.wait()
        return folder


def samples_of(loader: DataLoader, iteration: int) -> list[dict]:
    """The samples of this rank's batch: `key` (seed, epoch, index) and `img_path`; with our samplers only."""
    if not isinstance(loader.sampler, SeededSampler) or loader.batch_size is None:
        return []
    epoch, place = divmod(iteration, len(loader))
    sampler = copy.copy(loader.sampler)
    sampler.set_epoch(epoch)
    keys = list(islice(sampler.keys(place * loader.batch_size), loader.batch_size))
    info = getattr(loader.dataset, 'get_data_info', lambda index: {})
    return [dict(key=list(key), img_path=info(key.index).get('img_path')) for key in keys]


def replay_command(runner: Runner, folder: Path) -> str:
    """The command that runs the step again; mmengine has written the config, with all changes, into the folder."""
    config = Path(runner.work_dir, Path(runner.cfg.filename or f'{runner.timestamp}.py').name)
    options = ['--resume', str(folder / 'checkpoint.pth'), '--replay']
    if (processes := get_world_size()) > 1:
        return shlex.join(['tools/dist_train.sh', str(config), str(processes), *options])
    return shlex.join(['python', 'tools/train.py', str(config), *options])


# --- replay ---------------------------------------------------------------------------------------


def replay_config(cfg: Config, checkpoint: str, folder: str) -> None:
    """Changes a run's config into one that replays the step after a checkpoint and writes nothing but into `folder`."""
    cfg.update(resume=True, load_from=checkpoint, work_dir=folder, compile=False, visualizer=dict(type='Visualizer'))
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    for hook in cfg.get('default_hooks', {}).values():
        if hook is not None:
            hook.pop('out_dir', None)
    hooks = [hook for hook in cfg.get('custom_hooks', []) if hook['type'] != 'beit_mm.CompileHook']
    cfg.custom_hooks = [*hooks, dict(type='beit_mm.ReplayHook')]


@HOOKS.register_module()
class ReplayHook(Hook):
    """Ends the run after one step and prints, on each rank, where numbers that are not finite first came up in it.

    Raises:
        SystemExit: with code 0, after the step.
    """

    priority = 'LOWEST'

    def __init__(self):
        self.samples: list[dict] = []  # of the present batch
        self.found: dict[str, str] = {}  # what is not finite: where first
        self.losses: list[float] = []

    def before_train(self, runner: Runner) -> None:
        """Watches all modules and parameters."""
        model = unwrap(runner)
        for name, module in model.named_modules():
            module.register_forward_hook(partial(self.after_module, name or 'the whole model'))
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_hook(partial(self.after_gradient, name))

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Looks at the batch as the data loader gives it."""
        self.samples = samples_of(runner.train_dataloader, runner.iter)
        inputs = (data_batch or {}).get('inputs')
        if isinstance(inputs, list):  # of images
            rows = {row for row, image in enumerate(inputs) if rows_not_finite(image, 0)}
        else:
            rows = rows_not_finite(inputs, len(self.samples))
        if rows:
            self.found.setdefault('images, as they were loaded', self.named(rows))

    def after_module(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A forward hook."""
        if 'output of a module' not in self.found and (rows := rows_not_finite(output, len(self.samples))):
            self.found['output of a module'] = f'{name} ({type(module).__name__}), {self.named(rows)}'

    def after_gradient(self, name: str, gradient: Tensor) -> None:
        """A hook of a parameter."""
        if rows_not_finite(gradient, 0):
            self.found.setdefault('gradient of a parameter, the last layer first', name)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: dict | None = None
    ) -> None:
        """Prints the report after the last batch of the step."""
        self.losses.append((outputs or {})['loss'].item())
        if not runner.optim_wrapper.should_update():
            return
        taken = 'skipped' if runner.optim_wrapper.look().in_a_row else 'taken'
        lines = [f'Replay of the step up to iteration {runner.iter}, rank {get_rank()}: {taken}, loss {self.losses}']
        lines += [f'  first not finite: {what}: {where}' for what, where in self.found.items()]
        if not self.found:
            lines += ['  all numbers of this rank are finite']
        print('\n'.join(lines), flush=True)
        barrier()
        raise SystemExit(0)

    def named(self, rows: set[int]) -> str:
        """The images in these rows of the batch."""
        paths = [self.samples[row]['img_path'] for row in sorted(rows) if row < len(self.samples)]
        return f'{len(rows)} of the {len(self.samples)} images of the batch: {", ".join(map(str, paths))}'


def rows_not_finite(value: Any, size: int) -> set[int]:
    """Rows of a nested value's tensors that are not finite; {0, ..., size - 1}, or {0}, where they have no rows.

    Args:
        value: tensors in lists, tuples and dicts; anything else is left out.
        size: of the batch, the first axis of a tensor that has rows; 0: none has.
    """
    if isinstance(value, dict):
        return set().union(*(rows_not_finite(item, size) for item in value.values()))
    if isinstance(value, (list, tuple)):
        return set().union(*(rows_not_finite(item, size) for item in value))
    if not isinstance(value, Tensor) or not (bad := ~torch.isfinite(value)).any():
        return set()
    if size and value.ndim and len(value) == size:
        return set(bad.view(size, -1).any(1).nonzero().flatten().tolist())
    return set(range(max(size, 1)))
