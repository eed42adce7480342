"""Pretraining and fine-tuning on a folder of images: plan, configs, stages, report.

A run is a folder: its configs, lists of its images, logs, the trained weights, pictures, report.md, and plan.json, by
which the same call resumes it.
"""

import hashlib
import json
import math
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
from beit_mm.apis.plans import MIN_STEPS, NONE, SETTINGS, Length, Plan, Record, describe_plan, new_call, plan_training
from beit_mm.apis.rebuild import TOKENIZER, own_tokenizer
from beit_mm.apis.reports import Metric, Report
from beit_mm.apis.segmentation_report import describe_segmentation
from beit_mm.apis.split import Images, LabelMaps, find_images, find_label_maps, write_lists
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.read import write_checkpoint
from beit_mm.engine.checkpoints import RUN_FILE
from beit_mm.engine.logs import ProgressHook, TerminalRunner
from beit_mm.engine.signals import shield_workers
from beit_mm.errors import UserError
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.pictures import read_scalars
from beit_mm.terminal import quiet, say, typed, without_output

RECORD, REPORT = 'plan.json', 'report.md'
REPORT_SHARE, REPORT_SECONDS = 0.1, 120.0  # of the time, for report and pictures; where no time is given
FIRST_STEPS = 4  # slow ones, before the measuring begins
MIN_BANK, MAX_BANK = 200, 2000  # images that held-out ones are compared with; MIN_BANK even if time is short
MAX_TOKENIZER_STEPS = 4000  # more of them hardly make its tokens better
MAX_VALIDATIONS, VALIDATION_SHARE = 5, 0.05  # of a stage, and of the images that pass through the model
WAITS_FOR_IMAGES = (
    'Reading images limits the training: {:.0%} of the time is spent waiting for them. More workers help, or smaller '
    'copies of the images (tools/datasets/resize_images.py).'
)


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
        options = dict(minutes=minutes, steps=steps, workers=workers, batch=batch, seed=seed, levels=levels)
        return Run(new_call('pretrain', images, init, tokenizer_option=tokenizer, **options), out).run()


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
        options: dict[str, Any] = dict(
            minutes=minutes, epochs=epochs, workers=workers, batch=batch, seed=seed, levels=levels
        )
        options |= dict(reduce_zero_label=reduce_zero_label, balance=balance or None)
        options['bands'] = bands if isinstance(bands, str | None) else [*bands]
        return Run(new_call('finetune', images, init, **options), out).run()


class Run:
    """A run in a folder `out`: that of a `new_call`, or of an earlier call, which it resumes."""

    plan: Plan

    def __init__(self, call: Record, out: str | Path) -> None:
        self.began = time.monotonic()
        self.call, self.record = call, replace(call)  # what the call leaves open is filled in in the record
        self.verb = call.verb
        self.folder = Path(out).expanduser().resolve()
        self.lists = self.folder / 'lists'
        self.weights = self.folder / ('pretrained.pth' if self.verb == 'pretrain' else 'finetuned.pth')
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f'{self.folder} is a file; expected a folder for the run')
        if Path(call.images) in (self.folder, *self.folder.parents):
            inside = 'lies in the folder of the images, where its pictures would count as such'
            raise UserError(f'{self.folder} {inside}; choose another --out')
        if (self.folder / RECORD).is_file():
            self.record = Record.read(self.folder / RECORD)
            self.record.check_call(call, self.folder)
        elif self.folder.is_dir() and any(self.folder.iterdir()):
            raise UserError(f'{self.folder} holds other files; expected a new or empty folder for the run')

    def write_record(self) -> None:
        """Writes the record, with the time that has passed."""
        self.record.seconds, self.began = self.seconds(), time.monotonic()
        self.record.write(self.folder / RECORD)

    def seconds(self) -> float:
        """Time that the run has taken so far, with earlier calls."""
        return self.record.seconds + time.monotonic() - self.began

    def last_checkpoint(self, stage: str) -> Path:
        """The stage's last checkpoint; exists once the stage is done."""
        return self.folder / stage / f'iter_{self.record.stages[stage]["steps"]}.pth'

    def run(self) -> Path:
        """Plans, trains each stage, writes weights and report; resumes what is there. Returns the weights."""
        if (self.folder / REPORT).is_file() and self.weights.is_file():
            say(f'{self.folder} is finished: {self.weights}, {self.folder / REPORT}')
            return self.weights
        images = self.find_images()
        try:
            self.make_plan(images)
            for stage in self.record.stages:
                if not self.record.stages[stage]:
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
            if self.record.digest:
                self.write_record()
        return self.weights

    def find_images(self) -> Images:
        """The images, for a fine-tuning with classes or label maps; refuses options that do not fit them."""
        folder, record = self.record.images, self.record
        if self.verb == 'pretrain':
            return find_images(folder)
        maps = find_label_maps(folder, record.reduce_zero_label, bands=record.bands)
        if maps is None and (record.reduce_zero_label, record.bands) != (None, None):
            options = '--reduce-zero-label, --keep-zero-label and --bands'
            raise UserError(f'{folder} has no label maps; leave {options} out')
        if maps and record.balance:
            advice = 'leave it out; docs/options.md has class_weight for the classes of label maps'
            raise UserError(f'--balance is for class folders, and {folder} has label maps: {advice}')
        images = maps or find_images(folder)
        if not images.classes:
            expected = 'expected <class>/<image>, at least two classes, and in val no others than in train'
            raise UserError(f'{folder} has no class folders: {expected}; or images/ and annotations/')
        return images

    def make_plan(self, images: Images) -> None:
        """Resumes the recorded plan, or makes one; changed images get a new plan until there is a checkpoint."""
        record, digest = self.record, digest_of(images)
        resumes = record.digest == digest
        if not resumes and any(self.folder.glob('*/*.pth')):
            changed = f'other images, or names of them, than when {self.folder} was planned'
            raise UserError(f'{record.images} has {changed} ({record.found}; now {images}); choose another --out')
        if not resumes:
            record.batch, record.device, record.workers = self.call.batch, None, None
        if self.call.workers is not None:
            record.workers = self.call.workers
        plan = self.plan = plan_training(images, record)
        if resumes:
            if record.tokenizer not in (None, plan.tokenizer_name):
                began = f'{self.folder} began with {record.tokenizer}, now it has {plan.tokenizer_name}'
                raise UserError(f'{began}; put it back')
            say(f'Resuming {self.folder} as it was planned.')
        else:
            record.init, record.tokenizer = plan.init or NONE, plan.tokenizer_name
            record.length, record.seed = record.length or Length(15, 'minutes'), record.seed or 0
            record.batch, record.workers, record.device = plan.batch, plan.workers, plan.device
            trains_tokenizer = self.verb == 'pretrain' and not plan.tokenizer
            record.stages = dict(tokenizer={}, pretrain={}) if trains_tokenizer else {self.verb: {}}
            record.found, record.digest = str(images), digest
            self.write_record()  # first: from here on the folder is recognised as a run
            for line in describe_plan(plan, images):
                say(line)
            say(f'length     {record.length}: {" and ".join(record.stages)}; log and configs in {self.folder}')
        write_lists(images, self.lists)

    def choose_steps(self, images: Images, stage: str) -> None:
        """Turns the run's length into steps of the stage; minutes into its seconds, and steps as measured."""
        length = self.record.length
        planned: dict[str, float] = {}
        if length.unit == 'minutes':
            cfg = run_config(*self.settings(images, stage, steps=1000))
            needed, setup = seconds_per_step(cfg, limit=0.03 * 60 * length.number)  # for measuring
            left = (1 - REPORT_SHARE) * 60 * length.number - self.seconds() - setup
            left = max(0.0, left / 3 if stage == 'tokenizer' else left)  # a third for the tokenizer
            planned = dict(begun=self.seconds(), seconds=setup + left)
            steps = max(int(left / needed), MIN_STEPS)
            say(f'{stage}: {needed:.2f} s a step, so about {steps:,} steps')
        elif length.unit == 'epochs':
            steps = max(1, round(length.number * (len(images.train.names) // self.plan.batch)))
        else:
            steps = int(length.number)
        most = MAX_TOKENIZER_STEPS if stage == 'tokenizer' else steps
        self.record.stages[stage] = dict(steps=min(steps, most), **planned)
        self.write_record()

    def config_path(self, stage: str) -> Path:
        return self.folder / ('tokenizer_config.py' if stage == 'tokenizer' else 'config.py')

    def settings(self, images: Images, stage: str, steps: int) -> tuple[str, dict[str, Any]]:
        """Name of the config that a stage builds on, and the settings that differ."""
        plan = self.plan
        if stage == 'pretrain' and 'tokenizer' in self.record.stages:
            plan = replace(plan, tokenizer=own_tokenizer(self.last_checkpoint('tokenizer')), keeps_head=False)
        base = TOKENIZER if stage == 'tokenizer' else plan.base
        segments = isinstance(images, LabelMaps)
        settings = SETTINGS['segment' if segments else stage](own_config(base), images, plan, self.lists, steps)
        validated = len(images.held_out.names)
        if segments or stage != 'finetune':
            validated = min(validated, images.num_validated) * images.validation_cost
        affordable = 3 * VALIDATION_SHARE * steps * plan.batch / validated  # a validation has no backward pass
        settings['train_cfg']['val_interval'] = math.ceil(steps / max(1, min(MAX_VALIDATIONS, int(affordable))))
        return base, dict(work_dir=str(self.folder / stage), randomness=dict(seed=self.record.seed), **settings)

    def train(self, images: Images, stage: str) -> None:
        """Writes the stage's config, trains to its last step unless that is done, and records the results."""
        planned, path = self.record.stages[stage], self.config_path(stage)
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
            clock = MinutesHook(planned['seconds'], self.began, int(planned['steps']), most)
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
            self.record.seconds = max(self.record.seconds, planned['begun'] + clock.earlier)
        planned.update(self.results(stage))
        self.write_record()
        runner.visualizer.close()

    def results(self, stage: str) -> dict[str, float]:
        """What the last validation of a stage measured, and its speed, from the logs of all calls."""
        training, validations = read_scalars(self.folder / stage)  # this call may have made no step
        rows, measured = [*training.values()], [*validations.values()]
        results = {name: float(measured[-1][name]) for name in reports.ROWS if name in measured[-1]}
        if self.plan.keeps_head:  # IterLoop has validated before the first step
            results['mim_loss_start'] = float(measured[0]['mim_loss'])
        results['images_per_second'] = sum(row['images_per_second'] for row in rows) / len(rows)
        results['waiting'] = sum(row['data_time'] for row in rows) / sum(row['time'] for row in rows)
        return results

    def report(self, images: Images) -> None:
        """Draws the pictures, writes report.md and report.html, and prints the metrics and the verdict."""
        record, measured = self.record, self.record.stages[self.verb]
        try:
            report = self.describe(images)
        except (OSError, UserError) as error:  # images that are gone since the training began
            advice = f'mend it, delete {REPORT} and repeat the command: the training is kept'
            curves = reports.draw_curves(self.folder / self.verb, {})
            report = Report(self.metrics(), f'No verdict: {error}; {advice}.', pictures=[curves])
        record.metrics, record.verdict = report.metrics, report.verdict
        self.write_record()
        rows = reports.rows_of(report.metrics)
        speed, waiting = measured.get('images_per_second', 0.0), measured.get('waiting', 0)
        stages = [
            (stage, f'{planned["steps"]:,} steps', self.config_path(stage).name)
            for stage, planned in record.stages.items()
        ]
        paragraphs = [
            report.verdict,
            f'{images}. {record.seconds / 60:.1f} minutes, {speed:,.0f} images a second in training. Weights: '
            f'{self.weights.name}.',
            [('on held-out images', 'value +- one standard error'), *rows] if rows else '',
            WAITS_FOR_IMAGES.format(waiting) if waiting > 0.5 else '',
            self.plan.assumed,
            *report.paragraphs,
            *report.pictures,
            report.following,
            [('stage', 'length', 'config'), *stages],
        ]
        path = reports.write_report(self.folder, f'{self.verb} of {record.images}', paragraphs)
        width = max((len(name) for name, _ in rows), default=0)
        lines = [f'{name:<{width}}  {value}' for name, value in rows]
        for line in filter(None, [*lines, self.weights, path, report.verdict, report.following]):
            say(line)

    def metrics(self) -> dict[str, Metric]:
        """What the validations measured, by the names of ROWS."""
        measured = [item for stage in self.record.stages.values() for item in stage.items()]
        return {name: Metric(value) for name, value in measured if name in reports.ROWS}

    def describe(self, images: Images) -> Report:
        """Compares what was trained with what needs no training, in the time that is left for it."""
        length, record = self.record.length, self.record
        seconds = 60 * length.number * REPORT_SHARE if length.unit == 'minutes' else REPORT_SECONDS
        speed = record.stages[self.verb].get('images_per_second', 0.0)
        if isinstance(images, LabelMaps):
            return describe_segmentation(self.weights, images, self.metrics(), seconds)
        if self.verb == 'pretrain':
            # the images and half as many held-out ones, each at most as costly as in a step
            compared = min(MAX_BANK, max(MIN_BANK, int(seconds * speed * 2 / 3)))
            start = None if record.init == NONE else record.init
            return reports.describe_pretraining(self.weights, images, self.metrics(), compared, start)
        again = ['beit-mm', 'finetune', str(images.train.root), '--init', str(record.init), '--out', f'{self.folder}_2']
        again += [f'--{length.unit}', f'{2 * length.number:g}']
        again += ['--balance'] if self.plan.balance or images.unequal else []
        # two for each that it classifies, which costs a third of a step
        answers = max(reports.MIN_ANSWERS, int(3 * seconds * speed))
        arguments = self.weights, images, self.metrics(), seconds, answers, self.plan.balance
        return reports.describe_finetuning(*arguments, shlex.join(again))


def digest_of(images: Images) -> str:
    """SHA-256 of what the images are called and how they are labelled; their numbers alone would miss a change."""
    names: list[Any] = [sorted(images.train.names), sorted(images.held_out.names), images.classes]
    if isinstance(images, LabelMaps):
        names += [images.values, images.suffix]
        names += [images.colours] if images.colours else []
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


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
