"""Pretraining and fine-tuning on a folder of images: the plan, the length in minutes or steps, the report.

A run is a folder; its plan.json lets the same call resume it.
"""

import hashlib
import json
import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook, LoggerHook, ParamSchedulerHook
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from beit_mm.apis import reports
from beit_mm.apis.configs import RunConfig, bundled_config, run_config, write_config
from beit_mm.apis.plans import NONE, SETTINGS, Length, Plan, Record, describe_plan, new_call, plan_training
from beit_mm.apis.rebuild import TOKENIZER, merge_lora_weights, trained_tokenizer
from beit_mm.apis.reports import Metric, Report
from beit_mm.apis.segmentation_report import describe_segmentation
from beit_mm.apis.split import Images, LabelMaps, find_images, find_label_maps, write_lists
from beit_mm.checkpoint.checkpoint import Checkpoint, PerChannel
from beit_mm.checkpoint.names import preview
from beit_mm.checkpoint.read import write_checkpoint
from beit_mm.datasets.segmentation_folder import check_images_alone
from beit_mm.engine.checkpoints import CheckpointHook
from beit_mm.engine.logs import ProgressHook, QuietRunner
from beit_mm.errors import UserError
from beit_mm.models.tokenizers.discrete_vae import DiscreteVAE
from beit_mm.pictures import read_scalars
from beit_mm.terminal import quiet, say, typed, without_output

RECORD, REPORT = 'plan.json', 'report.md'
MIN_STEPS = 20  # of a timed run; with fewer, it learns hardly anything
REPORT_SHARE, REPORT_SECONDS = 0.1, 120.0  # time for the report: a share of a timed run, else seconds
NOMINAL_STEPS = 1000  # length of the schedules of a timed stage; the clock advances them
KNOWN_SHARE = 0.03  # of a timed stage; after it, the number of steps is known well enough to set intervals
MIN_BANK, MAX_BANK = 200, 2000  # images to compare held-out ones with; MIN_BANK even if time is short
MIN_KNOWN, MAX_KNOWN = 10, 100  # images with label maps whose patches are compared
MAX_TOKENIZER_STEPS = 4000  # more steps hardly improve its tokens
MAX_VALIDATIONS, VALIDATION_SHARE = 5, 0.05  # of a stage: their number, and their cost as a share of the training's
WAITS_FOR_IMAGES = 'Reading images limits the training: {:.0%} of the time is spent waiting. More --workers may help.'
AT_LEAST = f'The training makes at least {MIN_STEPS} steps, however short the time.'
FEW_PASSES = 5  # over the images; with fewer, a head on frozen features did better
FREEZE = 'Each image was seen {:.1f} times. With so few, `--freeze all` did better ("What pays" in docs/own_images.md).'


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
    """Pretrains a BEiT on a folder of images and ignores labels. The same call resumes an unfinished run.

    Args:
        images: folder, searched to any depth; see `find_images` for what is held out.
        out: folder of the run.
        minutes: wall-clock time of the whole run, by default 15.
        steps: length of the pretraining in steps, instead of minutes; the tokenizer gets at most as many.
        init: checkpoint of any BEiT or plain ViT, or folder of a run, to start from; by default 'demo' (the packaged
            weights) on a CPU and 'none' (random weights) on a GPU.
        tokenizer: 'demo' (packaged), or 'new' to train one on these images; by default the tokenizer of `init`.
        targets: what to predict: 'tokens' (default), or a teacher's 'features'.
        teacher: gives the features: file, run folder or name of any BEiT or plain ViT, or 'ema', the model's own moving
            average; by default DINOv2 on a GPU that it fits, if its file is found or can be downloaded, else 'demo'.
        workers: processes that read images.
        batch: images per step.
        seed: for every random choice, by default 0.
        mean, std: of the images, pixels 0-255; by default from `init`, ImageNet's for random weights.

    Returns:
        The pretrained weights, `<out>/pretrained.pth`; pictures and report.md lie beside them.
    """
    options: dict[str, Any] = dict(minutes=minutes, steps=steps, workers=workers, batch=batch, seed=seed)
    options |= dict(tokenizer_option=tokenizer, targets=targets, teacher=teacher, mean=mean, std=std)
    with quiet(), DefaultScope.overwrite_default_scope('beit_mm'):  # a Runner would leave its scope behind
        return Run(new_call('pretrain', images, init, **options), out).run()


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
    lora: int | None = None,
    freeze: int | str | None = None,
    head: str | None = None,
    mean: PerChannel = None,
    std: PerChannel = None,
) -> Path:
    """Fine-tunes a pretrained BEiT into a classifier (class folders) or a segmentor (label maps).

    Args:
        images: folder with one folder per class, or with images and label maps, see `find_label_maps`.
        out, workers, batch, seed, mean, std: as for `pretrain`.
        init: checkpoint of any BEiT or plain ViT, or the folder of a run; 'none' for random weights; by default
            DINOv2 on a GPU that it fits, if its file is found or can be downloaded, else 'demo'.
        minutes: wall-clock time of the whole run, by default 15.
        epochs: passes over the images, instead of minutes.
        reduce_zero_label: whether 0 in label maps marks unlabelled pixels; None: classes.txt decides.
        balance: show images of small classes more often, with mmengine's ClassBalancedDataset.
        bands: which bands to read from images with label maps, see `find_label_maps`.
        lora: rank of LoRA's matrices; the backbone's own weights are frozen.
        freeze: number of blocks to freeze, from the first on, together with the embeddings. With 'all' a
            classifier's head is fitted to features computed once, without augmentation, however long that takes.
        head: of a segmentor: 'linear' (default for models as small as the packaged ones), 'upernet' (for larger ones),
            'setr_pup', 'masks' (queries in the last blocks), or 'masks_decoder' (its own blocks).

    Returns:
        The weights, `<out>/finetuned.pth`, for `classify` or `segment`.
    """
    options: dict[str, Any] = dict(minutes=minutes, epochs=epochs, workers=workers, batch=batch, seed=seed)
    options |= dict(reduce_zero_label=reduce_zero_label, balance=balance or None, mean=mean, std=std)
    options |= dict(lora=lora, freeze=freeze, head=head)
    options['bands'] = bands if isinstance(bands, str | None) else list(bands)
    with quiet(), DefaultScope.overwrite_default_scope('beit_mm'):
        return Run(new_call('finetune', images, init, **options), out).run()


class Run:
    """A run in the folder `out`: begins a `new_call`, or resumes the call recorded there."""

    plan: Plan

    def __init__(self, call: Record, out: str | Path) -> None:
        self.began = time.monotonic()
        self.record, self.verb = call, call.verb  # make_plan fills in what the call leaves open
        self.folder = Path(out).expanduser().resolve()
        self.lists = self.folder / 'lists'
        self.weights = self.folder / ('pretrained.pth' if self.verb == 'pretrain' else 'finetuned.pth')
        if Path(call.images) in (self.folder, *self.folder.parents):
            inside = 'lies in the folder of the images, so its pictures would count as images too'
            raise UserError(f'{self.folder} {inside}; choose another --out')
        if (self.folder / RECORD).is_file():
            self.record = Record.read(self.folder / RECORD)
            self.record.check_call(call, self.folder)
            if call.workers is not None:
                self.record.workers = call.workers
        elif self.folder.exists() and any(self.folder.iterdir()):
            raise UserError(f'{self.folder} holds other files; expected a new or empty folder for the run')

    def run(self) -> Path:
        """Plans, trains each stage, writes weights and report; resumes an earlier call. Returns the weights' path."""
        if (self.folder / REPORT).is_file() and self.weights.is_file():
            say(f'{self.folder} is finished: {self.weights}, {self.folder / REPORT}')
            return self.weights
        images = self.find_images()
        try:
            self.make_plan(images)
            for stage, planned in self.record.stages.items():
                if not planned:  # {}: its length is not chosen yet
                    self.choose_steps(images, stage)
                self.train(images, stage)
            trained = Checkpoint.open(self.last_checkpoint(self.verb))
            content = {key: trained.content[key] for key in ('state_dict', 'meta')}
            if self.plan.lora:
                task = 'segmentor' if isinstance(images, LabelMaps) else 'classifier'
                config = run_config(*self.settings(images, self.verb, trained.meta['iter']))
                content = merge_lora_weights(trained, task, config)
            write_checkpoint(self.weights, content)
            self.report(images)
        except (KeyboardInterrupt, SystemExit) as end:
            say(f'Stopped. Resume with: {typed() or "the same call"}')
            raise SystemExit(end.code if isinstance(end, SystemExit) else 130) from None
        finally:
            if self.record.digest:
                self.write_record()
        return self.weights

    def write_record(self) -> None:
        """Writes the record, with the run's time up to now."""
        self.record.seconds, self.began = self.seconds(), time.monotonic()
        self.record.write(self.folder / RECORD)

    def seconds(self) -> float:
        """Time that the run has taken, earlier calls included."""
        return self.record.seconds + time.monotonic() - self.began

    def last_checkpoint(self, stage: str) -> Path:
        """The stage's last checkpoint; exists once the stage is done."""
        return self.folder / stage / f'iter_{self.record.stages[stage]["steps"]}.pth'

    def config_path(self, stage: str) -> Path:
        return self.folder / ('tokenizer_config.py' if stage == 'tokenizer' else 'config.py')

    def find_images(self) -> Images:
        """Finds the images and, for a fine-tuning, classes or label maps; refuses options that do not fit them."""
        folder, record = self.record.images, self.record
        if self.verb == 'pretrain':
            check_images_alone(Path(folder))
            return find_images(folder)
        maps = find_label_maps(folder, record.reduce_zero_label, bands=record.bands)
        for_maps = dict(reduce_zero_label='--reduce-zero-label or --keep-zero-label', bands='--bands', head='--head')
        unsuitable = dict(balance='--balance') if maps else for_maps
        given = [option for name, option in unsuitable.items() if getattr(record, name) is not None]
        if given:
            kind = 'label maps' if maps else 'no label maps'
            raise UserError(f'{folder} has {kind}; leave out {", ".join(given)}')
        if maps:
            return maps
        images = find_images(folder)
        if not images.classes:
            expected = 'expected <class>/<image>, at least two classes, each with images that are not held out'
            learned = {*images.train.names.values()} - {''}  # '': images in no folder
            held_out = {*images.held_out.names.values()} - {''}
            found = f'{preview(sorted(learned))}; only among held-out images: {preview(sorted(held_out - learned))}'
            raise UserError(f'{folder} has class folders: {found}; {expected}; or images/ and annotations/')
        return images

    def make_plan(self, images: Images) -> None:
        """Resumes the recorded plan, or makes one and prints it."""
        record, digest = self.record, digest_of(images)
        resumes = bool(record.digest)
        if resumes and record.digest != digest:
            changed = f'other images, file names or classes than when {self.folder} was planned'
            advice = 'choose another --out, or delete the folder'
            raise UserError(f'{record.images} has {changed} ({record.found}; now {images}); {advice}')
        plan = self.plan = plan_training(images, record)
        if resumes:
            if record.tokenizer not in (None, plan.targets_name):
                found = f'{self.folder} began with {record.tokenizer}, but now finds {plan.targets_name}'
                raise UserError(f'{found}; put the first one back')
            say(f'Resuming {self.folder} as planned.')
        else:
            record.init, record.tokenizer, record.head = plan.init or NONE, plan.targets_name, plan.head
            if self.verb == 'pretrain':
                record.targets = record.targets or 'tokens'
                record.teacher = (plan.targets or {}).get('teacher')
            record.length = record.length or Length(15, 'minutes')
            record.seed = record.seed or 0
            record.batch, record.workers, record.device = plan.batch, plan.workers, plan.device
            trains_tokenizer = self.verb == 'pretrain' and not plan.targets
            record.stages = dict(tokenizer={}, pretrain={}) if trains_tokenizer else {self.verb: {}}
            record.found, record.digest = str(images), digest
            self.write_record()  # first, so that a later call recognises the folder as a run
            length = 'one fit of the head' if plan.fits_head else record.length
            text = f'{length}: {" and ".join(record.stages)}; log and configs in {self.folder}'
            for line in [*describe_plan(plan, images), f'length     {text}']:
                say(line)
        write_lists(images, self.lists)

    def choose_steps(self, images: Images, stage: str) -> None:
        """Turns the run's length into steps of the stage; minutes into seconds, for MinutesHook."""
        length = self.record.length
        planned: dict[str, float] = {}
        if self.plan.fits_head:
            steps = 1
        elif length.unit == 'minutes':
            left = max(0.0, (1 - REPORT_SHARE) * 60 * length.number - self.seconds())
            planned = dict(begun=self.seconds(), seconds=left / 3 if stage == 'tokenizer' else left)
            steps = NOMINAL_STEPS
        elif length.unit == 'epochs':
            steps = max(1, round(length.number * (len(images.train.names) // self.plan.batch)))
            if steps < MIN_STEPS:
                say(f'{length} are {steps} steps, too few to learn much; give more epochs or a smaller batch.')
        else:
            steps = int(length.number)
        self.record.stages[stage] = dict(steps=int(min(steps, most_steps(stage))), **planned)
        self.write_record()

    def settings(self, images: Images, stage: str, steps: int) -> tuple[str, dict[str, Any]]:
        """Name of the config that a stage builds on, and the settings that differ from it."""
        plan = self.plan
        if stage == 'pretrain' and 'tokenizer' in self.record.stages:
            plan = replace(plan, targets=trained_tokenizer(self.last_checkpoint('tokenizer')), keeps_head=False)
        base = TOKENIZER if stage == 'tokenizer' else plan.base
        segments = isinstance(images, LabelMaps)
        settings = SETTINGS['segment' if segments else stage](bundled_config(base), images, plan, self.lists, steps)
        validation_cost = len(images.held_out.names)
        if segments or stage != 'finetune':
            validation_cost = min(validation_cost, images.num_validated) * images.validation_cost
        # 3, because a validated image needs no backward pass and so costs a third of a trained one
        affordable = int(3 * VALIDATION_SHARE * steps * plan.batch / validation_cost)
        validations = max(1, min(MAX_VALIDATIONS, affordable))
        settings['train_cfg']['val_interval'] = math.ceil(steps / validations)
        return base, dict(work_dir=str(self.folder / stage), randomness=dict(seed=self.record.seed), **settings)

    def train(self, images: Images, stage: str) -> None:
        """Writes the stage's config, trains the stage unless it is done, and records the results."""
        planned, path = self.record.stages[stage], self.config_path(stage)
        base, settings = self.settings(images, stage, planned['steps'])
        title = f'{stage.capitalize()} on images of your own, written by python -m beit_mm.'
        write_config(path, title, base, settings)
        if self.last_checkpoint(stage).is_file() and 'images_per_second' in planned:
            return
        resumes = any((self.folder / stage).glob('*.pth'))
        runner = make_runner(run_config(base, dict(settings, resume=resumes), path), ProgressHook(stage))
        clock = None
        if 'seconds' in planned:
            settings_for = partial(self.settings, images, stage)
            clock = MinutesHook(planned['seconds'], self.began, most_steps(stage), settings_for)
            runner.hooks[:] = [hook for hook in runner.hooks if not isinstance(hook, ParamSchedulerHook)]
            runner.register_hook(clock)
        with without_output():
            runner.train()
        if clock:
            planned['steps'] = runner.iter
            write_config(path, title, *self.settings(images, stage, runner.iter))  # with the steps it took
            # a call that was killed did not record its time
            self.record.seconds = max(self.record.seconds, planned['begun'] + clock.earlier)
        planned.update(self.results(stage))
        self.write_record()
        runner.visualizer.close()

    def results(self, stage: str) -> dict[str, float]:
        """Results of a stage's last validation, and its speed, from the logs of all calls."""
        training, validations = read_scalars(self.folder / stage)  # from files: this call may have made no step
        rows, measured = [*training.values()], [*validations.values()]
        results = {name: float(measured[-1][name]) for name in reports.ROWS if name in measured[-1]}
        if self.plan.keeps_head:  # then IterLoop validated before the first step too
            results['mim_loss_start'] = float(measured[0]['mim_loss'])
        results['images_per_second'] = sum(row['images_per_second'] for row in rows) / len(rows)
        results['waiting'] = sum(row['data_time'] for row in rows) / sum(row['time'] for row in rows)
        return results

    def report(self, images: Images) -> None:
        """Draws the pictures, writes report.md and report.html, and prints the metrics and the verdict."""
        record, measured = self.record, self.record.stages[self.verb]
        report = self.describe(images)
        record.metrics, record.verdict = report.metrics, report.verdict
        self.write_record()
        rows = reports.rows_of(report.metrics)
        steps = ', '.join(f'{stage} of {planned["steps"]:,} steps' for stage, planned in record.stages.items())
        speed = f'{measured["images_per_second"]:,.0f} images a second in training'
        parts = [
            report.verdict,
            f'{images}. {record.seconds / 60:.1f} minutes: {steps}; {speed}. Weights: {self.weights.name}.',
            [('on held-out images', 'value +- one standard error'), *rows],
            report.comparison,
            WAITS_FOR_IMAGES.format(measured['waiting']) if measured['waiting'] > 0.5 else '',
            AT_LEAST if 'seconds' in measured and measured['steps'] == MIN_STEPS else '',
            self.advice_on_passes(images, measured['steps']),
            self.plan.assumed,
            *report.parts,
            report.following,
        ]
        path = reports.write_report(self.folder, f'{self.verb} of {record.images}', parts)
        lines = [*reports.aligned(rows), *reports.aligned(report.comparison)]
        for line in [*lines, self.weights, path, report.verdict, report.following]:
            say(line)

    def advice_on_passes(self, images: Images, steps: float) -> str:
        """FREEZE if a classifier's whole backbone was tuned in too few passes over the images, else ''."""
        passes = steps * self.plan.batch / len(images.train.names)
        classifies = self.verb == 'finetune' and not isinstance(images, LabelMaps)
        tunes_all = self.plan.init and self.plan.frozen is None and not self.plan.lora
        return FREEZE.format(passes) if classifies and tunes_all and passes < FEW_PASSES else ''

    def describe(self, images: Images) -> Report:
        """Compares the trained model with baselines, in the time kept for the report."""
        length, record = self.record.length, self.record
        seconds = 60 * length.number * REPORT_SHARE if length.unit == 'minutes' else REPORT_SECONDS
        images_in_time = seconds * record.stages[self.verb]['images_per_second']
        measured = [item for stage in record.stages.values() for item in stage.items()]
        metrics = {name: Metric(value) for name, value in measured if name in reports.ROWS}
        start = None if record.init == NONE else record.init
        if isinstance(images, LabelMaps):
            known = min(MAX_KNOWN, max(MIN_KNOWN, int(images_in_time / 4)))
            return describe_segmentation(self.weights, images, metrics, seconds, start, known, record.mean_std or {})
        if self.verb == 'finetune':  # half of the time; without a backward pass an image costs a third
            asked = max(reports.MIN_ANSWERS, int(3 / 2 * images_in_time))
            return reports.describe_finetuning(self.weights, images, metrics, seconds / 2, asked, self.plan.balance)
        # features are also computed for half as many held-out images, each at most at twice its cost in training
        compared = min(MAX_BANK, max(MIN_BANK, int(images_in_time / 3)))
        return reports.describe_pretraining(self.weights, images, metrics, compared, start, self.plan.teacher)


def most_steps(stage: str) -> float:
    return MAX_TOKENIZER_STEPS if stage == 'tokenizer' else math.inf


def digest_of(images: Images) -> str:
    """SHA-256 of the images' names and labels; the number of images alone would miss a change."""
    names: list[Any] = [sorted(images.train.names), sorted(images.held_out.names), images.classes]
    if isinstance(images, LabelMaps):
        names += [images.values, images.suffix, *([images.colours] if images.colours else [])]
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()


def make_runner(cfg: RunConfig, hook: Hook) -> Runner:
    """A quiet runner. mmengine wants a different name for each runner in a process."""
    cfg.experiment_name = f'{Path(cfg.work_dir).name}_{secrets.token_hex(4)}'
    runner = QuietRunner.from_cfg(cfg)
    runner.register_hook(hook)
    return runner


class MinutesHook(Hook):
    """Ends a training when its time is up. A step advances the schedules by its share of the remaining time.

    It replaces mmengine's ParamSchedulerHook. Checkpoints store time and schedules, for a call that resumes.

    Args:
        seconds: time for the training, all calls together.
        began: time.monotonic() when this call's part of `seconds` began.
        most: number of steps at which the training ends even if time is left. It makes at least `MIN_STEPS`.
        settings_for: gives a config's name and settings for a number of steps; they hold the intervals.
    """

    priority = 'HIGHEST'  # other hooks ask which step is the last

    def __init__(self, seconds: float, began: float, most: float, settings_for: Callable):
        self.seconds, self.began, self.most, self.settings_for = seconds, began, most, settings_for

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        # beyond the steps already done, because otherwise the loop would end at once
        runner.train_loop.set_length(max(NOMINAL_STEPS, checkpoint['meta']['iter'] + 1))

    def before_train(self, runner: Runner) -> None:
        info = runner.message_hub.runtime_info
        self.earlier = info.get('training_seconds', 0.0)  # of earlier calls, in seconds
        self.share = info.get('schedule_share', 0.0)  # part of the schedules that is done, 0 to 1
        self.deadline = self.began + self.seconds - self.earlier
        self.last = math.nan  # when the last step or validation ended
        self.rate_known = False
        self.update_length(runner, runner.iter)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        self.last = time.monotonic()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        now, done = time.monotonic(), runner.iter + 1
        place_before = int(self.share * NOMINAL_STEPS)
        if now >= self.deadline:
            self.share = 1.0
        elif not math.isnan(self.last):  # when this call's first step began is not known
            self.share += (1 - self.share) * (now - self.last) / (self.deadline - self.last)
        # below 1 before step MIN_STEPS, and 1 at step self.most
        self.share = max(done / self.most, min(self.share, done / MIN_STEPS))
        self.last = now
        place = int(self.share * NOMINAL_STEPS)
        for _ in range(place - place_before):
            for scheduler in runner.param_schedulers:
                scheduler.step()
        if isinstance(runner.model, DiscreteVAE):
            runner.model.steps.fill_(place)  # its temperature is a schedule too
        passed = self.earlier + now - self.began
        runner.message_hub.update_info_dict(dict(training_seconds=passed, schedule_share=self.share))
        self.update_length(runner, done)

    def update_length(self, runner: Runner, done: int) -> None:
        """Sets the loop's length from the steps done and, once, the intervals of logging, saving and validating."""
        loop: Any = runner.train_loop
        expected = NOMINAL_STEPS if self.share == 0 else round(done / self.share)
        loop.set_length(done if self.share >= 1 else max(done + 1, expected))
        if self.share >= KNOWN_SHARE and not self.rate_known:
            self.rate_known = True
            _, settings = self.settings_for(expected)
            loop.dynamic_intervals = [settings['train_cfg']['val_interval']]  # mmengine reads it after each step
            for hook in runner.hooks:
                if isinstance(hook, CheckpointHook):
                    hook.interval = settings['default_hooks']['checkpoint']['interval']
                if isinstance(hook, LoggerHook):
                    hook.interval = settings['default_hooks']['logger']['interval']
