"""Pretraining and fine-tuning on a folder of images: a run from its images to its report.

A run is a folder; its plan.json lets the same call resume it.
"""

import errno
import hashlib
import json
import math
import os
import secrets
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from filelock import BaseFileLock
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from beit_mm.apis.configs import RunConfig, run_config, write_config
from beit_mm.apis.rebuild import merge_lora_weights
from beit_mm.checkpoint.checkpoint import Checkpoint, PerChannel
from beit_mm.checkpoint.names import preview
from beit_mm.checkpoint.read import write_checkpoint
from beit_mm.engine.fit_head import fit_head_of_run
from beit_mm.engine.logs import ProgressHook, QuietRunner
from beit_mm.engine.progress import MIN_STEPS, NOMINAL_STEPS, ClockHook
from beit_mm.engine.signals import LOCK, InterruptionHook, exit_on_signals, lock_folder
from beit_mm.errors import UserError
from beit_mm.files import quoted, remove_leftovers
from beit_mm.own_images import report
from beit_mm.own_images.classification import Classification
from beit_mm.own_images.images import keep_split, lost_since, read_names, write_lists, written_lines
from beit_mm.own_images.look import sizes_of
from beit_mm.own_images.mistakes import TABLE
from beit_mm.own_images.pretraining import Pretraining
from beit_mm.own_images.record import ALL, RECORD, USUAL_LENGTH, Record
from beit_mm.own_images.segmentation import Segmentation
from beit_mm.own_images.tables import find_table
from beit_mm.own_images.task import Task
from beit_mm.pictures import read_scalars
from beit_mm.terminal import quiet, say, training_output, typed

REPORT = 'report.md'
WEIGHTS = dict(pretrain='pretrained.pth', finetune='finetuned.pth')
REPORT_SHARE, REPORT_SECONDS = 0.1, 120.0  # time for the report: a share of a timed run, else seconds
MAX_VALIDATIONS, VALIDATION_SHARE = 5, 0.05  # of a stage: their number, and their cost as a share of the training's
FULL = [getattr(errno, name, None) for name in ('ENOSPC', 'EDQUOT', 'EFBIG')]  # a disk, or one's share of it
GOES_ON = 'the same call goes on from the last checkpoint that was written'
WAITS_FOR_IMAGES = 'Reading images limits the training: {:.0%} of the time is spent waiting. More --workers may help.'
AT_LEAST = f'The training makes at least {MIN_STEPS} steps, however short the time.'


def pretrain(
    images: str | Path,
    out: str | Path,
    minutes: float | None = None,
    steps: int | None = None,
    init: str | Path | None = None,
    tokenizer: str | None = None,
    targets: str | None = None,
    teacher: str | Path | None = None,
    workers: int | None = None,
    batch: int | None = None,
    seed: int | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
) -> Path:
    """Learns from the images of a folder without labels. The same call resumes an unfinished run.

    Args:
        images: folder of images, searched to any depth; see docs/own_images.md for what is held out.
        out: folder of the run.
        minutes: wall-clock time of the whole run; 15 by default.
        steps: length of the pretraining in steps, instead of minutes; the tokenizer gets at most as many.
        init: weights to start from, any BEiT or plain ViT: file, folder of a run, or name; 'none' for random weights.
            By default 'demo' (the packaged weights) on a CPU; on a GPU the best free model that fits, if its file is
            found or can be downloaded, else, or where `tokenizer` or `targets` is given, 'none'.
        tokenizer: 'demo' (packaged), or 'new' to train one on these images; by default that of `init`, if it is found.
        targets: what to predict: visual 'tokens', or the 'features' of a teacher; by default features if `init` is a
            ViT wider than 192 channels and its head predicts no tokens of a tokenizer that is found, else tokens.
        teacher: for features, any BEiT or plain ViT, or 'ema', the model's own moving average; by default a frozen copy
            of an `init` so wide, else on a GPU the best free model that fits, else 'demo'.
        workers: processes that read images; by default chosen by the number of cores.
        batch: images per step; by default chosen by memory and number of images.
        seed: seed of all random choices; 0 by default.
        mean: mean of the images' channels, one number or one for each, pixels 0-255; by default as `init` records it,
            ImageNet's for random weights.
        std: their standard deviation, like `mean`.

    Returns:
        The pretrained weights, `<out>/pretrained.pth`; pictures and report.html lie beside them.
    """
    return start('pretrain', locals(), Pretraining.check)


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
    classes: Sequence[str] | None = None,
    maps: str | None = None,
    labels: str | None = None,
    merge: str | None = None,
    bands: str | Sequence[int] | None = None,
    lora: int | None = None,
    freeze: int | str | None = None,
    head: str | None = None,
    short_side: int | None = None,
    full_size: bool = False,
    mean: PerChannel = None,
    std: PerChannel = None,
) -> Path:
    """Trains a classifier on class folders, or a segmentor on label maps. The same call resumes an unfinished run.

    Args:
        images: folder with one folder per class or a table of classes (docs/own_images.md), or with images and label
            maps, polygons or boxes (docs/label_maps.md).
        out: see `pretrain`.
        init: weights to start from, see docs/own_images.md: any BEiT or plain ViT, by file, folder of a run, or name;
            'none' for random weights. By default DINOv2, on a GPU that it fits, or on a CPU if its features fit the
            minutes (label maps: frozen), if its file is found or can be downloaded, else 'demo'. A classifier's head
            is first fitted to their frozen features; then all is trained.
        minutes: see `pretrain`.
        epochs: passes over the images, instead of minutes.
        workers, batch, seed, mean, std: see `pretrain`.
        reduce_zero_label: whether 0 in label maps marks unlabelled pixels or is a class; by default as classes.txt
            shows.
        balance: show images of small classes more often, with mmengine's ClassBalancedDataset.
        classes: folders that are classes, such as cat,dog; by default all except parts such as train and test.
        maps: folder of the label maps, relative to `images`; by default it is found by its name or files.
        labels: column that holds the labels, in a .csv or .tsv table in the folder; by default the only column that
            can be meant.
        merge: classes to join, such as "road=1,2,7;car=3,cab": a new name, then numbers in label maps or names.
        bands: bands to read, from 0, of images with label maps; by default all if reading as RGB would lose some.
        lora: rank of the matrices that are trained beside the layers of the frozen backbone.
        freeze: number of blocks that are not trained, from the first on, with the embeddings. With 'all' the head of a
            classifier, or a segmentor's linear head, is fitted to features computed once, without augmentation, of as
            many images as the minutes allow.
        head: a segmentor's head: 'linear' (default for models as small as the packaged ones), 'upernet' (for larger
            ones), 'setr_pup', 'masks' (queries in the last blocks), or 'masks_decoder' (its own blocks).
        short_side: short side, in pixels, at which a segmentor sees images; by default large enough for the objects in
            the label maps.
        full_size: let a segmentor see images pixel by pixel, in crops and windows.

    Returns:
        The weights, `<out>/finetuned.pth`, for `classify` or `segment`.
    """
    bands = bands if isinstance(bands, str | None) else list(bands)
    classes = None if classes is None else list(classes)
    return start('finetune', dict(locals(), balance=balance or None, full_size=full_size or None), Segmentation.check)


def start(verb: str, arguments: Mapping[str, Any], check: Callable[[Record], None]) -> Path:
    """Begins or resumes a run with the arguments of the verb's function, which `check` may refuse."""
    options = {name: value for name, value in arguments.items() if name not in ('images', 'out')}
    with quiet(), DefaultScope.overwrite_default_scope('beit_mm'):  # a Runner would leave its scope behind
        call = Record.of_call(verb, arguments['images'], options)
        check(call)
        return Run(call, arguments['out']).run()


def find_task(record: Record) -> Task:
    """The kind of run that a call asks for; for a fine-tuning, the folder's table or images decide.

    What was held out from the run that it begins with stays held out.
    """
    if record.verb == 'pretrain':
        task: Task = Pretraining.find(record)
    else:
        table = find_table(record.images, record.options['labels'], record.options['freeze'] == ALL)
        task = (None if table else Segmentation.find(record)) or Classification.find(record, table)
    init = Path(str(record.options['init']))
    for folder in (init, *init.parents[:2]) if init.is_absolute() else ():  # a run's folder, or a checkpoint in it
        keep_split(task.images, folder / 'lists')
    return task


class Run:
    """A run in the folder `out`: begins a call, or resumes the one recorded there."""

    task: Task

    def __init__(self, call: Record, out: str | Path) -> None:
        self.began = time.monotonic()
        self.lock: BaseFileLock | None = None
        self.record = call  # plan_or_resume fills in what the call leaves open
        self.folder = Path(out).expanduser().resolve()
        self.lists = self.folder / 'lists'
        if Path(call.images) in (self.folder, *self.folder.parents):
            raise UserError(
                f'{self.folder} lies in the folder of the images, so its pictures would count as images too; choose '
                'another --out'
            )
        if (self.folder / RECORD).is_file():
            self.record = Record.read(self.folder / RECORD)
        elif self.folder.exists() and {path.name for path in self.folder.iterdir()} - {LOCK}:
            raise UserError(f'{self.folder} holds other files; expected a new or empty folder for the run')
        self.weights = self.folder / WEIGHTS[call.verb]
        self.is_finished = (self.folder / REPORT).is_file() and self.weights.is_file()
        if self.record is not call:
            self.record.resume(call, self.folder, self.is_finished)

    def run(self) -> Path:
        """Plans, trains each stage, writes weights and report; resumes an earlier call. Returns the weights' path."""
        if self.is_finished:
            say(f'{self.folder} is finished: {self.weights}, {(self.folder / REPORT).with_suffix(".html")}')
            try:
                self.task = find_task(self.record)
                if digest_of(self.task.images.identity()) != self.record.digest:
                    say(f'{self.changes()}. To go on from these weights: {self.command()}')
            except (UserError, OSError) as error:  # the weights serve without the images too
                say(f'The images have changed: {error}')
            return self.weights
        try:
            with exit_on_signals():
                self.task = find_task(self.record)
                self.plan_or_resume()
                for stage in self.record.stages:
                    self.train(stage)
                self.write_weights()
                self.write_report()
        except (KeyboardInterrupt, SystemExit) as end:
            say(f'Stopped. Resume with: {typed() or "the same call"}')
            raise SystemExit(end.code if isinstance(end, SystemExit) else 130) from None
        except OSError as error:
            if error.errno not in FULL:
                raise
            raise UserError(f'{error}; make room on the disk of {self.folder}, then {GOES_ON}') from error
        finally:
            if self.lock is not None:  # a call that is refused before writes nothing
                with suppress(OSError):  # on a full disk; the next call then counts less time
                    if self.record.digest:
                        self.write_record()
                self.lock.release(force=True)
        return self.weights

    # The record

    def write_record(self) -> None:
        """Writes the record, with the run's time up to now."""
        self.record.seconds, self.began = self.seconds(), time.monotonic()
        self.record.write(self.folder / RECORD)

    def seconds(self) -> float:
        """Time that the run has taken, earlier calls included."""
        return self.record.seconds + time.monotonic() - self.began

    def checkpoint(self, stage: str) -> Path:
        """The stage's last checkpoint, once the stage is done."""
        return self.folder / stage / f'iter_{self.record.stages[stage]["steps"]}.pth'

    @property
    def last_stage(self) -> str:
        """The stage that gives the run's weights."""
        return [*self.record.stages][-1]

    # Changed images

    def changes(self) -> str:
        """How the images differ from those of the run's lists, such as 'new images: 17 (crow/1.png, ...)'."""
        images, lists, names = self.task.images, self.lists, ('train', 'held_out')
        paths = [*map(quoted, [*images.train.names, *images.held_out.names])]
        now = dict(images=paths, classes=images.class_lines())
        before = dict(images=[*map(quoted, read_names(lists, *names))], classes=written_lines(lists, 'classes'))
        found = {f'new {kind}': Counter(now[kind]) - Counter(before[kind]) for kind in now}
        found |= {f'missing {kind}': Counter(before[kind]) - Counter(now[kind]) for kind in now}
        if not any(found.values()):  # other classes change the labels of all images
            lines = [*images.lines(images.train), *images.lines(images.held_out)]
            path_of = dict(zip(lines, paths, strict=True))
            changed = Counter(lines) - Counter(written_lines(lists, *names))
            found['images with other labels'] = Counter(path_of[line] for line in changed)
        texts = [f'{what}: {each.total():,} ({preview(each)})' for what, each in found.items() if each]
        what = ', '.join(texts) or 'other held-out images, or other values in label maps'
        return f'{self.record.images} has changed since {self.folder} was planned ({what})'

    def command(self) -> str:
        """The command of another run from the newest weights of this one, or from its start if it has none."""
        init: str | Path = self.folder
        if not self.weights.is_file():
            saved = () if self.record.options.get('lora') else (self.folder / self.last_stage).glob('*.pth')
            init = max(saved, key=os.path.getmtime, default=self.record.options['init'])
        return self.record.command(init, self.folder, self.record.length)

    # Planning

    def check_images(self) -> list[str]:
        """Refuses other images than those of the recorded plan; returns which of them are gone."""
        record, images = self.record, self.task.images
        if not record.digest or record.digest == digest_of(images.identity()):
            return []
        before = self.changes()
        lost = lost_since(images, self.lists) if record.rules == digest_of(images.rules()) else None
        if lost is None:
            raise UserError(f'{before}; undo that, or begin another run: {self.command()}')
        return lost

    def check_space(self) -> None:
        """Refuses a disk on which two checkpoints and the weights do not fit: they would be lost after the training."""
        plan, options = self.task.plan, self.record.options
        trains_all = not (options.get('lora') or options.get('freeze'))
        copies = 7 if trains_all else 3  # of the backbone: with the state of its optimizer, a checkpoint holds three
        saved = sum(path.stat().st_size for path in self.folder.rglob('*.pth'))  # if it resumes
        needed, free = 4 * 12 * plan.depth * plan.width**2 * copies - saved, shutil.disk_usage(self.folder).free
        if free < needed:
            raise UserError(
                f'{free / 1e6:,.0f} MB are free on the disk of {self.folder}; expected {needed / 1e6:,.0f} for '
                'two checkpoints and the weights: make room, or choose another --out'
            )

    def plan_or_resume(self) -> None:
        """Makes a plan, records and prints it; or resumes the recorded one, some of whose images may be gone."""
        record, task = self.record, self.task
        lost = self.check_images()
        task.make_plan()
        if record.predicts not in (None, task.targets_name):
            raise UserError(
                f'{self.folder} began with {record.predicts}, but now finds {task.targets_name}; put the first one back'
            )
        self.lock = lock_folder(self.folder)
        for folder in (self.folder, self.lists):
            remove_leftovers(folder)
        self.check_space()
        if record.digest:
            say(f'Resuming {self.folder} as planned.')
            if lost:
                say(f'{len(lost):,} of its images are gone ({preview(lost)}); it goes on without them.')
            if record.digest != digest_of(task.images.identity()):
                return  # the lists stay as they are
        else:
            record.options |= task.decided()
            record.length = record.length or USUAL_LENGTH
            record.device, record.predicts = task.plan.device, task.targets_name
            record.stages = {stage: {} for stage in task.stages}  # {}: its length is not chosen yet
            record.found = str(task.images)
            record.digest, record.rules = digest_of(task.images.identity()), digest_of(task.images.rules())
            self.write_record()  # first, so that a later call recognises the folder as a run
            self.say_plan()
        write_lists(task.images, self.lists, task.num_validated)

    def say_plan(self) -> None:
        length = 'one fit of the head' if self.task.fits_head else self.record.length
        text = f'{length}: {" and ".join(self.record.stages)}; log and configs in {self.folder}'
        sizes = sizes_of(self.task.images)
        for subject, line in [*self.task.described(), ('sizes', sizes), ('length', text)]:
            if line:
                say(f'{subject:<10} {line}')

    def choose_steps(self, stage: str) -> None:
        """Turns the run's length into steps of the stage; minutes into seconds too, for the clock."""
        length, task = self.record.length, self.task
        planned: dict[str, float] = {}
        if length.unit == 'minutes':
            left = max(0.0, (1 - REPORT_SHARE) * 60 * length.number - self.seconds())
            planned = dict(begun=self.seconds(), seconds=left * task.shares_of_time.get(stage, 1))
            steps = NOMINAL_STEPS
        elif length.unit == 'epochs' and not task.fits(stage):
            steps = max(1, round(length.number * (len(task.images.train.names) // task.plan.batch)))
            if steps < MIN_STEPS:
                say(f'{length} are {steps} steps, too few to learn much; give more epochs or a smaller batch.')
        else:
            steps = int(length.number)
        steps = 1 if task.fits(stage) else steps  # its checkpoint is called so
        self.record.stages[stage] = dict(steps=min(steps, task.most_steps.get(stage, steps)), **planned)
        self.write_record()

    # Stages

    def settings(self, stage: str, steps: int) -> tuple[str, dict[str, Any]]:
        """Name of the config that a stage builds on, and the settings that differ from it."""
        stages = [*self.record.stages]
        earlier = {name: self.checkpoint(name) for name in stages[: stages.index(stage)]}
        base, settings = self.task.settings(stage, self.lists, steps, earlier)
        # 3, because a validated image needs no backward pass and so costs a third of a trained one
        affordable = int(3 * VALIDATION_SHARE * steps * self.task.plan.batch / self.task.validation_cost)
        settings['train_cfg']['val_interval'] = math.ceil(steps / max(1, min(MAX_VALIDATIONS, affordable)))
        seed = self.record.options['seed']
        return base, dict(work_dir=str(self.folder / stage), randomness=dict(seed=seed), **settings)

    def train(self, stage: str) -> None:
        """Writes the stage's config, trains the stage unless it is done, and records the results."""
        if not self.record.stages[stage]:
            self.choose_steps(stage)
        planned = self.record.stages[stage]
        path = self.folder / ('config.py' if stage == self.last_stage else f'{stage}_config.py')
        base, settings = self.settings(stage, planned['steps'])
        title = f'{stage.capitalize()} on images of your own, written by python -m beit_mm.'
        if self.task.fits(stage):
            title += ' It fitted the head to features that were computed once, which this config does not.'
        write_config(path, title, base, settings)
        resumes = any((self.folder / stage).glob('*.pth'))
        config = run_config(base, dict(settings, resume=resumes), path)
        if self.checkpoint(stage).is_file() and 'images_per_second' in planned:
            return
        deadline = time.monotonic() + planned.get('seconds', math.inf)  # of a fit, which always begins anew
        progress = ProgressHook(stage)
        runner = make_runner(config, progress)
        with training_output():  # mmengine prints which files it loads
            if self.task.fits(stage):
                is_last = stage == self.last_stage
                most = math.inf if is_last else self.task.num_validated
                planned.update(fit_head_of_run(runner, progress, deadline, most, keep_features=is_last))
            elif 'seconds' in planned:
                self.train_in_time(runner, stage)
                write_config(path, title, *self.settings(stage, runner.iter))  # with the steps it took
            else:
                runner.train()
        if not self.checkpoint(stage).is_file():  # a warning has said why
            raise UserError(
                f'{self.checkpoint(stage)} could not be written; make room on the disk of {self.folder}, then {GOES_ON}'
            )
        planned.update(self.results(stage))
        if planned.get('note'):
            say(planned['note'])
        self.write_record()
        runner.visualizer.close()
        if code := max((hook.code for hook in runner.hooks if isinstance(hook, InterruptionHook)), default=0):
            sys.exit(code)  # a signal that came after the last step

    def train_in_time(self, runner: Runner, stage: str) -> None:
        """Trains by a clock; how many steps fit is known at the end."""
        planned = self.record.stages[stage]
        most_steps = self.task.most_steps.get(stage, math.inf)
        clock = ClockHook(planned['seconds'], self.began, most_steps, partial(self.intervals_for, stage))
        clock.register_in(runner)
        runner.train()
        planned['steps'] = runner.iter
        # the checkpoint knows the time of calls that were killed before they could record it
        self.record.seconds = max(self.record.seconds, planned['begun'] + clock.seconds_before)

    def intervals_for(self, stage: str, steps: int) -> dict[str, int]:
        _, settings = self.settings(stage, steps)
        saved, logged = (settings['default_hooks'][hook]['interval'] for hook in ('checkpoint', 'logger'))
        return dict(validation=settings['train_cfg']['val_interval'], checkpoint=saved, log=logged)

    def results(self, stage: str) -> dict[str, float]:
        """Results of a stage's last validation, and its speed, from the logs of all calls."""
        training, validations = read_scalars(self.folder / stage)  # from files: this call may have made no step
        rows = [*training.values()]
        results = self.task.results_of([*validations.values()])
        results['images_per_second'] = sum(row['images_per_second'] for row in rows) / len(rows)
        results['waiting'] = sum(row['data_time'] for row in rows) / sum(row['time'] for row in rows)
        return results

    # Results

    def write_weights(self) -> None:
        """Writes the last stage's weights, with the matrices of LoRA merged into the layers beside them."""
        trained = Checkpoint.open(self.checkpoint(self.last_stage))
        content = {key: trained.content[key] for key in ('state_dict', 'meta')}
        if self.record.options.get('lora'):
            config = run_config(*self.settings(self.last_stage, trained.meta['iter']))
            content = merge_lora_weights(trained, self.task.model, config)
        write_checkpoint(self.weights, content)

    def write_report(self) -> None:
        """Draws the pictures, writes report.md and report.html, and prints the metrics and the verdict."""
        record, task = self.record, self.task
        measured = record.stages[self.last_stage]
        speed, length = measured['images_per_second'], record.length
        seconds = 60 * length.number * REPORT_SHARE if length.unit == 'minutes' else REPORT_SECONDS
        known = [item for stage in record.stages.values() for item in stage.items()]
        metrics = {name: report.Metric(value) for name, value in known if name in report.ROWS}
        task.images.leave_out_lost()
        write_lists(task.images, self.lists, task.num_validated)
        found = task.make_report(self.weights, metrics, seconds, seconds * speed)
        record.metrics, record.verdict = found.metrics, f'Verdict: {found.verdict}.'
        self.write_record()
        following = f'Next: {found.following}'
        rows = report.rows_of(found.metrics)
        steps = ', '.join(
            'one fit of the head' if task.fits(stage) else f'{stage} of {planned["steps"]:,} steps'
            for stage, planned in record.stages.items()
        )
        taken = f'{record.seconds / 60:.1f} minutes: {steps}; {speed:,.0f} images a second in training'
        parts = [
            record.verdict,
            f'{task.images}. {taken}. Weights: {self.weights.name}.',
            [('on held-out images', 'value +- one standard error'), *rows],
            found.comparison,
            WAITS_FOR_IMAGES.format(measured['waiting']) if measured['waiting'] > 0.5 else '',
            AT_LEAST if 'seconds' in measured and measured['steps'] == MIN_STEPS else '',
            measured.get('note', ''),
            task.plan.assumed,
            *found.parts,
            following,
        ]
        path = report.write_report(self.folder, f'{record.verb} of {record.images}', parts)
        lines = [*report.aligned(rows), *report.aligned(found.comparison)]
        written = [self.weights, path.with_suffix('.html'), *self.folder.glob(TABLE)]
        for line in [*lines, *written, record.verdict, following]:
            say(line)


def digest_of(values: list[Any]) -> str:
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def make_runner(cfg: RunConfig, hook: ProgressHook) -> Runner:
    """A quiet runner. mmengine wants a different name for each runner in a process."""
    cfg.experiment_name = f'{Path(cfg.work_dir).name}_{secrets.token_hex(4)}'
    runner = QuietRunner.from_cfg(cfg)
    runner.register_hook(hook)
    return runner
