"""Pretraining and fine-tuning on a folder of images, from a plan to a report.

A run is a folder: its configs, lists of its images, logs, the trained weights, pictures, report.md, and plan.json, by
which the same call resumes it.
"""

import hashlib
import json
import math
import os
import secrets
import shlex
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook, ParamSchedulerHook
from mmengine.runner import Runner

from beit_mm.apis import reports
from beit_mm.apis.configs import RunConfig, own_config, run_config, write_config
from beit_mm.apis.plans import MIN_STEPS, NEW, NONE, SETTINGS, plan_training
from beit_mm.apis.rebuild import TOKENIZER, own_tokenizer
from beit_mm.apis.segmentation_report import describe_segmentation
from beit_mm.apis.split import Images, LabelMaps, find_images, find_label_maps, write_lists
from beit_mm.checkpoint.checkpoint import Checkpoint, given_levels
from beit_mm.checkpoint.find import DEMO, path_of_checkpoint
from beit_mm.checkpoint.read import write_checkpoint
from beit_mm.engine.checkpoints import RUN_FILE
from beit_mm.engine.logs import ProgressHook, TerminalRunner, waits_for_images
from beit_mm.engine.signals import shield_workers
from beit_mm.errors import UserError
from beit_mm.files import atomic_file
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.pictures import read_scalars
from beit_mm.terminal import quiet, say, typed, without_output

RECORD, REPORT = 'plan.json', 'report.md'
REPORT_SHARE, REPORT_SECONDS = 0.1, 120.0  # of the time, for report and pictures; where no time is given
FIRST_STEPS = 4  # slow ones, before those that are measured
MIN_BANK, MAX_BANK = 200, 2000  # images that held-out ones are compared with; MIN_BANK even if time is short
MAX_WORKERS = 1024
MAX_SEED = 2**32  # numpy's
MAX_TOKENIZER_STEPS = 4000  # more of them make its tokens hardly better
MAX_VALIDATIONS, VALIDATION_SHARE = 5, 0.05  # of a stage, and of the images that pass through the model


def pretrain(
    images: str | Path,
    out: str | Path,
    minutes: float | None = None,
    steps: int | None = None,
    init: str | Path | None = None,
    tokenizer: str | None = None,
    workers: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
    **levels: Any,
) -> Path:
    """Pretrains a BEiT on a folder of images; labels are not looked at. The same call resumes an unfinished run.

    Args:
        images: folder, searched to any depth; see `find_images` for what is held out.
        out: folder of the run.
        minutes: of wall clock for all of it, by default 15; the schedule follows the time that has passed.
        steps: instead of minutes; of the pretraining, the tokenizer gets at most as many.
        init: checkpoint of any BEiT to begin with, or the folder of a run; its architecture is kept. 'demo',
            the packaged weights, is the default on a CPU; 'none', random ones, on a GPU.
        tokenizer: 'demo', the packaged one, or 'new' for one of these images; by default that of `init`.
        workers: processes that read images.
        batch: images of a step.
        seed: of every random choice, by default 0.
        levels: `mean` and `std` of the images, pixels 0-255; by default those of `init`, ImageNet's for random weights.

    Returns:
        The pretrained weights, `<out>/pretrained.pth`; pictures and report.md lie beside them.
    """
    with quiet():
        options: dict[str, Any] = dict(levels=levels, minutes=minutes, steps=steps)
        return Run('pretrain', images, out, init, tokenizer, workers, batch, seed, **options).run()


def finetune(
    images: str | Path,
    out: str | Path,
    init: str | Path | None = None,
    minutes: float | None = None,
    epochs: float | None = None,
    workers: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
    reduce_zero_label: bool | None = None,
    balance: bool = False,
    bands: str | Sequence[int] | None = None,
    **levels: Any,
) -> Path:
    """Fine-tunes a pretrained BEiT into a classifier of class folders, or into a segmentor of label maps.

    Args:
        images: folder with one folder a class, or with images and label maps, see `find_label_maps`.
        out, workers, batch, seed, levels: as of `pretrain`.
        init: checkpoint of any BEiT, or the folder of a run; by default 'demo'; 'none' for random weights.
        minutes: of wall clock for all of it, by default 15.
        epochs: instead of minutes; times through the images.
        reduce_zero_label: whether 0 in label maps marks unlabelled pixels; None: as classes.txt shows.
        balance: show images of small classes more often, by mmengine's ClassBalancedDataset.
        bands: of images with label maps, see `find_label_maps`.

    Returns:
        The weights, `<out>/finetuned.pth`, for `classify` or `segment`.
    """
    with quiet():
        options: dict[str, Any] = dict(balance=balance, bands=bands, levels=levels, minutes=minutes, epochs=epochs)
        return Run('finetune', images, out, init, None, workers, batch, seed, reduce_zero_label, **options).run()


class Run:
    """A run of 'pretrain' or 'finetune' in its folder; arguments as of pretrain and finetune."""

    def __init__(
        self,
        verb: str,
        images: str | Path,
        out: str | Path,
        init: str | Path | None,
        tokenizer: str | None = None,
        workers: int | None = None,
        batch: int | None = None,
        seed: int | None = None,
        reduce_zero_label: bool | None = None,
        balance: bool = False,
        bands: str | Sequence[int] | None = None,
        levels: dict | None = None,
        **lengths: float | None,
    ) -> None:
        given = {name: number for name, number in lengths.items() if number is not None}
        if len(given) > 1:
            raise UserError(f'{" and ".join(given)} are both given; expected one of them')
        for name, number in given.items():
            if not 0 < number < float('inf'):
                raise UserError(f'{name} is {number:g}; expected more than 0')
        if given.get('steps', MIN_STEPS) < MIN_STEPS:
            raise UserError(f'steps is {given["steps"]}; expected at least {MIN_STEPS}')
        for name, whole, most in (('workers', workers, MAX_WORKERS), ('seed', seed, MAX_SEED - 1)):
            if whole is not None and not 0 <= whole <= most:
                raise UserError(f'{name} is {whole}; expected 0 to {most}')
        if tokenizer not in (None, DEMO, NEW):
            raise UserError(f'tokenizer is {tokenizer!r}; expected {DEMO} or {NEW}')
        if init not in (None, DEMO, NONE) and '://' not in str(init):
            init = path_of_checkpoint(init).absolute()  # links stay: name and neighbouring files tell what it is
        self.began = time.monotonic()
        self.verb, self.workers, self.batch = verb, workers, batch
        self.folder = Path(out).expanduser().resolve()
        self.lists = self.folder / 'lists'
        self.weights = self.folder / ('pretrained.pth' if verb == 'pretrain' else 'finetuned.pth')
        self.record: dict[str, Any] = dict(
            verb=verb,
            images=str(Path(images).expanduser().resolve()),
            init=init and str(init),
            tokenizer_option=tokenizer,
            length=next(([number, name] for name, number in given.items()), None),
            batch=batch,
            seed=seed,
            reduce_zero_label=reduce_zero_label,
            balance=balance or None,
            bands=bands if isinstance(bands, str | None) else [*bands],
            levels=given_levels(**(levels or {})) or None,
            seconds=0.0,
            stages={},
        )
        self.read_record()

    def read_record(self) -> None:
        """Reads what was planned before, and refuses folders of other things."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f'{self.folder} is a file; expected a folder for the run')
        if Path(self.record['images']) in (self.folder, *self.folder.parents):
            inside = 'lies in the folder of the images, where its pictures would count as such'
            raise UserError(f'{self.folder} {inside}; choose another --out')
        path = self.folder / RECORD
        if not path.is_file():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise UserError(f'{self.folder} holds other files; expected a new or empty folder for the run')
            return
        try:
            known = dict(bands=None) | json.loads(path.read_text())  # which earlier runs do not name
            differing = [key for key in ('verb', 'images') if known[key] != self.record[key]]
            options = ['init', 'tokenizer_option', 'length', 'batch', 'seed']
            options += ['reduce_zero_label', 'balance', 'bands', 'levels']
            differing += [key for key in options if self.record[key] not in (None, known[key])]
            number, unit = known['length']
            fits = unit in ('minutes', 'steps', 'epochs') and type(number) in (int, float)
            fits &= 0 < float(number) < math.inf
            fits &= 0 <= known['seconds'] < math.inf and known['device'] in ('cpu', 'cuda')
            fits &= known['reduce_zero_label'] in (None, True, False) and known['balance'] in (None, True)
            # stages are names of folders: only those that `make_plan` gives
            stages = [known['verb']] if known['tokenizer'] or known['verb'] == 'finetune' else ['tokenizer', 'pretrain']
            whole = [known['batch'], *(stage.get('steps', MIN_STEPS) for stage in known['stages'].values())]
            fits &= [*known['stages']] == stages and {*map(type, [known['workers'], known['seed'], *whole])} == {int}
            fits &= 0 <= known['seed'] < MAX_SEED and 0 <= known['workers'] <= MAX_WORKERS and min(whole) > 0
            numbers = [number for stage in known['stages'].values() for number in stage.values()]
            fits &= {*map(type, numbers)} <= {int, float}
            fits &= all(0 <= stage.get('seconds', 0) < math.inf for stage in known['stages'].values())
            # a symbolic link could send what we write elsewhere, also one in a folder that cannot be listed
            wrong: list[Any] = []
            for folder, *names in os.walk(self.folder, onerror=wrong.append):
                wrong += [name for name in sum(names, []) if os.path.islink(os.path.join(folder, name))]
            if not fits or wrong:
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            damaged = 'is damaged, or of another version of beit_mm, or has links beside it'
            raise UserError(f'{path} {damaged}; choose another --out, or delete the folder') from None
        for key in differing:
            shown = [text_of(record[key]) if key == 'length' else record[key] for record in (known, self.record)]
            values = f'{key} {shown[0]}, not {shown[1]}'
            raise UserError(f'{self.folder} is a run with {values}; choose another --out')
        self.record = known

    def write_record(self) -> None:
        """Writes the record, with the time that has passed."""
        self.record['seconds'], self.began = self.seconds(), time.monotonic()
        with atomic_file(self.folder / RECORD) as file:
            file.write(json.dumps(self.record, indent=2).encode())

    def seconds(self) -> float:
        """Time that the run has taken so far, with earlier calls."""
        return self.record['seconds'] + time.monotonic() - self.began

    def last_checkpoint(self, stage: str) -> Path:
        """The stage's last checkpoint; exists once the stage is done."""
        return self.folder / stage / f'iter_{self.record["stages"][stage]["steps"]}.pth'

    def run(self) -> Path:
        """Plans, trains each stage, writes weights and report; resumes what is there. Returns the weights."""
        if (self.folder / REPORT).is_file() and self.weights.is_file():
            say(f'{self.folder} is finished: {self.weights}, {self.folder / REPORT}')
            return self.weights
        images: Images | None = None
        if self.verb == 'finetune':
            zero, bands = self.record['reduce_zero_label'], self.record['bands']
            images = find_label_maps(self.record['images'], zero, bands=bands)
            if images is None and (zero, bands) != (None, None):
                options = '--reduce-zero-label, --keep-zero-label and --bands'
                raise UserError(f'{self.record["images"]} has no label maps; leave {options} out')
        if images and self.record['balance']:
            advice = 'leave it out; docs/options.md has class_weight for the classes of label maps'
            raise UserError(f'--balance is for class folders, and {self.record["images"]} has label maps: {advice}')
        images = images or find_images(self.record['images'])
        if self.verb == 'finetune' and not images.classes:
            expected = 'expected <class>/<image>, at least two classes, and in val no others than in train'
            raise UserError(f'{self.record["images"]} has no class folders: {expected}; or images/ and annotations/')
        try:
            self.make_plan(images)
            for stage in self.record['stages']:
                if not self.record['stages'][stage]:
                    self.choose_steps(images, stage)
                self.train(images, stage)
            trained = Checkpoint.open(self.last_checkpoint(self.verb))
            write_checkpoint(self.weights, {key: trained.content[key] for key in ('state_dict', 'meta')})
            self.report(images)
        except (KeyboardInterrupt, SystemExit) as end:
            kept = '; what was learned so far is kept' if any(self.folder.glob('*/*.pth')) else ''
            say(f'Stopped{kept}. Resume with: {typed() or "the same call"}')
            raise SystemExit(end.code if isinstance(end, SystemExit) else 130) from None
        finally:
            if 'found' in self.record:
                self.write_record()
        return self.weights

    def make_plan(self, images: Images) -> None:
        """Resumes the stored plan, or makes one; until a checkpoint exists, changed images are planned anew."""
        names: list[Any] = [sorted(images.train.names), sorted(images.held_out.names), images.classes]
        names += [images.values, images.suffix] if isinstance(images, LabelMaps) else []
        names += [images.colours] if isinstance(images, LabelMaps) and images.colours else []
        digest = hashlib.sha256(json.dumps(names).encode()).hexdigest()  # counts do not tell other images
        counts, said = self.record.get('found'), [self.record['init'], self.record['tokenizer_option']]
        if self.record.get('digest') == digest:
            self.record['workers'] = self.record['workers'] if self.workers is None else self.workers
            planned = {key: self.record[key] for key in ('workers', 'device', 'batch', 'levels')}
            self.plan = plan_training(images, self.verb, *said, balance=bool(self.record['balance']), **planned)
            if (began := self.record['tokenizer']) and self.plan.tokenizer_name != began:
                raise UserError(f'{self.folder} began with {began}, now it has {self.plan.tokenizer_name}; put it back')
            write_lists(images, self.lists)
            say(f'Resuming {self.folder} as it was planned.')
            return
        if counts and any(self.folder.glob('*/*.pth')):
            changed = f'other images, or names of them, than when {self.folder} was planned ({counts}; now {images})'
            raise UserError(f'{self.record["images"]} has {changed}; choose another --out')
        options: dict[str, Any] = dict(workers=self.workers, batch=self.batch, levels=self.record['levels'])
        plan = self.plan = plan_training(images, self.verb, *said, balance=bool(self.record['balance']), **options)
        stages = ['tokenizer', 'pretrain'] if self.verb == 'pretrain' and not plan.tokenizer else [self.verb]
        self.record.update(
            found=str(images),
            digest=digest,
            length=self.record['length'] or [15, 'minutes'],
            batch=plan.batch,
            seed=self.record['seed'] or 0,
            workers=plan.workers,
            device=plan.device,
            tokenizer=plan.tokenizer_name,
            init=said[0] or plan.init or NONE,
            stages={stage: {} for stage in stages},
        )
        self.write_record()  # first: from here on the folder is recognised as a run
        write_lists(images, self.lists)
        for line in plan.reasons:
            say(line)
        say(f'length     {text_of(self.record["length"])}: {" and ".join(stages)}; log and configs in {self.folder}')

    def choose_steps(self, images: Images, stage: str) -> None:
        """Turns the run's length into steps of the stage; minutes into its seconds, and steps as measured."""
        number, unit = self.record['length']
        planned: dict[str, float] = {}
        if unit == 'minutes':
            cfg = run_config(*self.settings(images, stage, steps=1000))
            needed, setup = seconds_per_step(cfg, limit=0.03 * 60 * number)  # for measuring
            left = (1 - REPORT_SHARE) * 60 * number - self.seconds() - setup
            left = max(0.0, left / 3 if stage == 'tokenizer' else left)  # a third for the tokenizer
            planned = dict(begun=self.seconds(), seconds=setup + left)
            steps = max(int(left / needed), MIN_STEPS)
            say(f'{stage}: {needed:.2f} s a step, so about {steps:,} steps')
        elif unit == 'epochs':
            steps = max(1, round(number * (len(images.train.names) // self.record['batch'])))
        else:
            steps = int(number)
        most = MAX_TOKENIZER_STEPS if stage == 'tokenizer' else steps
        self.record['stages'][stage] = dict(steps=min(steps, most), **planned)
        self.write_record()

    def config_path(self, stage: str) -> Path:
        return self.folder / ('tokenizer_config.py' if stage == 'tokenizer' else 'config.py')

    def settings(self, images: Images, stage: str, steps: int) -> tuple[str, dict[str, Any]]:
        """Name of the config that a stage builds on, and the settings that differ."""
        plan = self.plan
        if stage == 'pretrain' and 'tokenizer' in self.record['stages']:
            plan = replace(plan, tokenizer=own_tokenizer(self.last_checkpoint('tokenizer')), keeps_head=False)
        base = TOKENIZER if stage == 'tokenizer' else plan.base
        segments = isinstance(images, LabelMaps)
        settings = SETTINGS['segment' if segments else stage](own_config(base), images, plan, self.lists, steps)
        validated = len(images.held_out.names)
        if segments or stage != 'finetune':
            validated = min(validated, images.num_validated) * images.validation_cost
        affordable = 3 * VALIDATION_SHARE * steps * plan.batch / validated  # a validation has no backward pass
        settings['train_cfg']['val_interval'] = math.ceil(steps / max(1, min(MAX_VALIDATIONS, int(affordable))))
        return base, dict(work_dir=str(self.folder / stage), randomness=dict(seed=self.record['seed']), **settings)

    def train(self, images: Images, stage: str) -> None:
        """Writes the stage's config, trains to its last step unless that is done, and records the results."""
        planned, path = self.record['stages'][stage], self.config_path(stage)
        base, settings = self.settings(images, stage, planned['steps'])
        title = f'{stage.capitalize()} on images of your own, written by python -m beit_mm.'
        write_config(path, title, base, settings)
        if self.last_checkpoint(stage).is_file() and 'images_per_second' in planned:
            return
        (self.folder / stage / RUN_FILE).unlink(missing_ok=True)  # a stage that ended unrecorded validates once more
        begun = any((self.folder / stage).glob('*.pth'))
        runner = make_runner(run_config(base, dict(settings, resume=begun), path), ProgressHook(stage))
        clock = None
        if 'seconds' in planned:
            most = MAX_TOKENIZER_STEPS if stage == 'tokenizer' else math.inf
            clock = MinutesHook(planned['seconds'], self.began, planned['steps'], most)
            runner.hooks[:] = [hook for hook in runner.hooks if not isinstance(hook, ParamSchedulerHook)]
            runner.register_hook(clock)
        with without_output():
            runner.train()
        last = self.folder / stage / f'iter_{runner.iter}.pth'
        if not last.is_file():
            raise UserError(f'{last} could not be written (see the warnings); make room and repeat the command')
        if clock is not None:
            planned['steps'] = runner.iter
            write_config(path, title, *self.settings(images, stage, runner.iter))  # the steps that it took
            # a call that was killed has recorded no time
            self.record['seconds'] = max(self.record['seconds'], planned['begun'] + clock.earlier)
        training, validations = read_scalars(self.folder / stage)  # of all calls: this one may have made no step
        rows, measured = [*training.values()], [*validations.values()]
        numbers = {name: float(measured[-1][name]) for name in reports.ROWS if name in measured[-1]}
        if self.plan.keeps_head:  # IterLoop has validated before the first step
            numbers['mim_loss_start'] = float(measured[0]['mim_loss'])
        numbers['images_per_second'] = sum(row['images_per_second'] for row in rows) / len(rows)
        numbers['waiting'] = sum(row['data_time'] for row in rows) / sum(row['time'] for row in rows)
        self.record['stages'][stage].update(numbers)
        self.write_record()
        runner.visualizer.close()

    def report(self, images: Images) -> None:
        """Draws the pictures, writes report.md and report.html, and prints their figures and the verdict."""
        numbers = self.record['stages'][self.verb]
        number, unit = self.record['length']
        seconds = 60 * number * REPORT_SHARE if unit == 'minutes' else REPORT_SECONDS
        seen = numbers.get('images_per_second', 0.0)
        try:
            if self.verb == 'pretrain':
                # the images and half as many held-out ones, each at most as costly as in a step
                compared = min(MAX_BANK, max(MIN_BANK, int(seconds * seen * 2 / 3)))
                start = None if self.record['init'] == NONE else self.record['init']
                said, told = reports.describe_pretraining(self.weights, images, numbers, compared, start)
            elif isinstance(images, LabelMaps):
                said, told = describe_segmentation(self.folder, self.weights, images, numbers, seconds)
            else:
                again = ['finetune', str(images.train.root), '--init', self.record['init'], '--out', f'{self.folder}_2']
                again += [f'--{unit}', f'{2 * number:g}', *['--balance'] * (self.plan.balance or images.unequal)]
                command = shlex.join(['beit-mm', *again])
                arguments = self.weights, images, numbers, seconds, self.plan.balance, command
                said, told = reports.describe_finetuning(*arguments)
        except (OSError, UserError) as error:  # images that are gone since the training began
            advice = f'mend it, delete {REPORT} and repeat the command: the training is kept'
            reports.draw_curves(self.folder / self.verb, self.folder / 'loss.png', {})
            said, told = f'No verdict: {error}; {advice}.', [reports.Picture('loss.png', 'Loss in training')]
        self.write_record()
        rows = reports.rows_of(self.record['stages'].get('tokenizer', {}) | numbers)
        stages = [(name, f'{stage["steps"]:,} steps') for name, stage in self.record['stages'].items()]
        waiting = numbers.get('waiting', 0)
        paragraphs = [
            said,
            f'{images}. {self.record["seconds"] / 60:.1f} minutes, {seen:,.0f} images a second in training. Weights: '
            f'{self.weights.name}.',
            [('on held-out images', 'value +- one standard error'), *rows] if rows else '',
            f'{waits_for_images(waiting)}.' if waiting > 0.5 else '',
            self.plan.assumed,
            *told,
            [('stage', 'length', 'config'), *((*row, self.config_path(row[0]).name) for row in stages)],
        ]
        path = reports.write_report(self.folder, f'{self.verb} of {self.record["images"]}', paragraphs)
        width = max((len(name) for name, _ in rows), default=0)
        for line in filter(None, (*(f'{name:<{width}}  {value}' for name, value in rows), self.weights, path, said)):
            say(line)


def text_of(length: tuple[float, str]) -> str:
    return f'{length[0]:.12g} {length[1]}'


def make_runner(cfg: RunConfig, hook: Hook) -> Runner:
    """A quiet runner. mmengine wants a different name for each runner in a process."""
    cfg.experiment_name = f'{Path(cfg.work_dir).name}_{secrets.token_hex(4)}'
    runner = TerminalRunner.from_cfg(cfg)
    runner.register_hook(hook)
    return runner


class MinutesHook(Hook):
    """Ends a training when its time is over, and has its schedules follow the time in place of the steps.

    It replaces mmengine's ParamSchedulerHook. Each step moves the schedules of the plan by its part of the time that is
    left; a validation, or the start of a call, leaves less time. Checkpoints keep both, for a call that resumes.

    Args:
        seconds: of the training, in all its calls.
        began: when this call did, by time.monotonic.
        planned: steps of the plan.
        most: steps after which it ends before its time. It makes `MIN_STEPS` of them in any case.
    """

    priority = 'HIGHEST'  # the others ask which step is the last

    def __init__(self, seconds: float, began: float, planned: int, most: float):
        self.seconds, self.began, self.planned, self.most = seconds, began, planned, most

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        runner.train_loop.set_length(max(self.planned, checkpoint['meta']['iter'] + 1))  # its end is a time

    def before_train(self, runner: Runner) -> None:
        info = runner.message_hub.runtime_info
        self.earlier = info.get('training_seconds', 0.0)  # of the calls before
        self.share = info.get('schedule_share', 0.0)  # how far the schedules are
        self.deadline = self.began + self.seconds - self.earlier
        self.last = math.nan  # end of the last step or validation
        self.rate_known = False
        self.set_length(runner, runner.iter)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.last = time.monotonic()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        now, done, before = time.monotonic(), runner.iter + 1, int(self.share * self.planned)
        if now >= self.deadline:
            self.share = 1.0
        elif self.last < now:
            self.share += (1 - self.share) * (now - self.last) / (self.deadline - self.last)
        self.share = max(done / self.most, min(self.share, done / MIN_STEPS))
        self.last = now
        place = int(self.share * self.planned)
        for scheduler in (place - before) * runner.param_schedulers:
            scheduler.step()
        if isinstance(runner.model, DiscreteVAE):
            runner.model.steps.fill_(place)  # its temperature is a schedule too
        passed = self.earlier + now - self.began
        runner.message_hub.update_info_dict(dict(training_seconds=passed, schedule_share=self.share))
        self.set_length(runner, done)

    def set_length(self, runner: Runner, done: int) -> None:
        """Tells the loop how many steps it will be, by what is done; once that is a tenth, when to validate too."""
        loop: Any = runner.train_loop
        expected = self.planned if self.share == 0 else round(done / self.share)
        loop.set_length(done if self.share >= 1 else max(done + 1, expected))
        if self.share >= 0.1 and not self.rate_known:
            self.rate_known = True
            interval = math.ceil(loop.val_interval * max(1, expected / self.planned))
            loop.dynamic_intervals = [interval]  # from which mmengine sets val_interval after each step


class StepClock(Hook):
    """Measures steps; stops after 20 measured ones and `limit` seconds, or after one and three times that."""

    def __init__(self, limit: float):
        self.limit = limit
        self.times: list[float] = []

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.times.append(time.monotonic())
        steps, seconds = len(self.times) - FIRST_STEPS, self.times[-1] - self.times[0]
        if steps > 20 and seconds > self.limit or steps > 1 and seconds > 3 * self.limit:
            runner.train_loop.stop_training = True


def seconds_per_step(cfg: RunConfig, limit: float) -> tuple[float, float]:
    """How long a step of a config takes here, and everything before the first one, in seconds; changes the config."""
    began = time.monotonic()
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    # the training itself says which images are broken, and whether too many are
    left_out = ('beit_mm.InterruptionHook', 'beit_mm.UnreadableImagesHook', 'beit_mm.ThroughputHook')
    cfg.custom_hooks = [hook for hook in cfg.custom_hooks if hook['type'] not in left_out]
    cfg.default_hooks.checkpoint.update(interval=10**9, save_last=False)
    cfg.visualizer = dict(type='Visualizer')
    for module in (cfg.model.get('head', {}), cfg.model.get('backbone', {})):
        module.pop('init_cfg', None)  # weights do not change the time
    clock_hook = StepClock(limit)
    with tempfile.TemporaryDirectory() as folder:
        cfg.work_dir = f'{folder}/measured'
        runner = make_runner(cfg, clock_hook)
        shield_workers(runner.train_dataloader)
        runner.train()
    times = clock_hook.times[FIRST_STEPS:]
    return (times[-1] - times[0]) / (len(times) - 1), clock_hook.times[0] - began
