"""Pretraining and fine-tuning on a folder of images, from a plan to a report.

A run is a folder: its configs, lists of its images, logs, the trained weights, pictures, report.md, and plan.json, by
which the same call goes on with it.
"""

import dataclasses
import json
import math
import secrets
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.hooks import Hook
from mmengine.runner import Runner

from beit_mm.apis.configs import RunConfig, write_config
from beit_mm.apis.inference import reconstruct
from beit_mm.apis.plans import (
    MAX_TOKENIZER_STEPS,
    MIN_STEPS,
    TOKENIZER,
    Plan,
    finetuning_settings,
    located,
    plan_training,
    pretraining_settings,
    tokenizer_settings,
)
from beit_mm.apis.split import Images, find_images, spread, write_lists
from beit_mm.checkpoint.find import checkpoint_of
from beit_mm.checkpoint.read import read_checkpoint, write_checkpoint
from beit_mm.datasets.reading import readable
from beit_mm.engine.progress import ProgressHook, TerminalRunner
from beit_mm.engine.steps import waits_for_images
from beit_mm.engine.workers import end_workers, watch_workers
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.features.probing import knn_predict
from beit_mm.files import atomic_file
from beit_mm.pictures.training import draw_runs, read_scalars
from beit_mm.terminal import UserError, folder_of_images, quiet, say, without_output

RECORD, REPORT = 'plan.json', 'report.md'
MINUTES = 15.0
REST = 0.1  # of the time, for pictures and the report
TOKENIZER_SHARE = 1 / 3  # of the time for training
MEASURING = 0.03  # of the time, for measuring the steps of a stage
MEASURED_STEPS, FIRST_STEPS = 20, 4  # steps that are timed at least, and those before, which are slow
MAX_BANK, MAX_QUERIES = 2000, 1000  # images with labels for k-NN, and held-out ones
MIN_BANK = 200  # images with labels, however long it takes
NUM_PICTURES = 8
METRICS = ('mim_loss', 'token_entropy', 'mim_acc', 'accuracy/top1', 'tokenizer/recon_mae_01', 'tokenizer/codes_used')


def pretrain(
    images: str | Path,
    out: str | Path,
    minutes: float | None = None,
    steps: int | None = None,
    init: str | Path | None = None,
    workers: int | None = None,
    batch: int | None = None,
) -> Path:
    """Pretrains a BEiT on a folder of images; labels are not looked at. The same call goes on with an unfinished run.

    Args:
        images: folder, searched to any depth. Where it holds `train` and `val`, or is called `train` with `val` beside
            it, `val` is held out, else a tenth.
        out: folder of the run.
        minutes: of wall clock for all of it, by default 15; the steps are measured, and their number follows.
        steps: of the pretraining, instead, and at most as many of the tokenizer.
        init: checkpoint of any BEiT to begin with, or the folder of a run; its architecture is taken over.
        workers: processes that read images.
        batch: images of a step.

    Returns:
        The pretrained weights, `<out>/pretrained.pth`; pictures and report.md lie beside them.

    Raises:
        FileNotFoundError: no folder, or no images in it.
        ValueError: too few images, a folder of other images, a number that is none, or `init` is no BEiT.
    """
    check_numbers(minutes=minutes, steps=steps, workers=workers)
    if steps is not None and steps < MIN_STEPS:
        raise UserError(f'steps is {steps}; expected at least {MIN_STEPS}')
    with quiet():
        return Run('pretrain', images, out, init, workers, batch).finish(dict(minutes=minutes, steps=steps))


def finetune(
    images: str | Path,
    out: str | Path,
    init: str | Path | None = None,
    minutes: float | None = None,
    epochs: float | None = None,
    workers: int | None = None,
    batch: int | None = None,
) -> Path:
    """Fine-tunes a pretrained BEiT into a classifier of a folder with one folder a class.

    Args:
        images, out, workers, batch: as of `pretrain`.
        init: checkpoint of any BEiT, or the folder of a run.
        minutes: of wall clock for all of it, by default 15.
        epochs: times through the images, instead.

    Returns:
        The classifier, `<out>/finetuned.pth`, for `classify`.

    Raises:
        As `pretrain`; ValueError: no class folders.
    """
    check_numbers(minutes=minutes, epochs=epochs, workers=workers)
    with quiet():
        return Run('finetune', images, out, init, workers, batch).finish(dict(minutes=minutes, epochs=epochs))


def check_numbers(workers: int | None, **lengths: float | None) -> None:
    """Raises ValueError for a length that is none, and for two of them."""
    given = {name: value for name, value in lengths.items() if value is not None}
    if len(given) > 1:
        raise UserError(f'{" and ".join(given)} are both given; expected one of them')
    for name, value in given.items():
        if not 0 < value < float('inf'):
            raise UserError(f'{name} is {value:g}; expected more than 0')
    if workers is not None and workers < 0:
        raise UserError(f'workers is {workers}; expected 0 or more')


class Run:
    """A run in its folder.

    Args:
        verb: 'pretrain' or 'finetune'.
        images, out, init, workers, batch: as of `pretrain`.
    """

    def __init__(
        self,
        verb: str,
        images: str | Path,
        out: str | Path,
        init: str | Path | None,
        workers: int | None = None,
        batch: int | None = None,
    ) -> None:
        self.began = time.monotonic()
        self.verb, self.workers, self.batch = verb, workers, batch
        self.folder = Path(out).expanduser().resolve()
        self.lists = self.folder / 'lists'
        self.record: dict[str, Any] = dict(
            verb=verb,
            images=str(folder_of_images(images)),
            init=init and located(str(init) if '://' in str(init) else str(checkpoint_of(init))),
            seconds=0.0,
            stages={},
        )
        self.open()

    # --- the folder -------------------------------------------------------------------------------

    def open(self) -> None:
        """Takes up what was planned before, and refuses folders of other things."""
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f'{self.folder} is a file; expected a folder for the run')
        if Path(self.record['images']) in (self.folder, *self.folder.parents):
            raise UserError(
                f'{self.folder} lies in the folder of the images, where its pictures would count as such; choose '
                'another --out'
            )
        path = self.folder / RECORD
        if not path.is_file():
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise UserError(f'{self.folder} holds other files; expected a new or empty folder for the run')
            return
        try:
            known = json.loads(path.read_text())
            differing = [key for key in ('verb', 'images', 'init') if known[key] != self.record[key]]
            steps = [stage.get('steps', 0) for stage in known['stages'].values()]
            # names of stages are folders' names, and a link would lead what is written elsewhere
            fits = {*known['stages']} <= {'tokenizer', 'pretrain', 'finetune'} and {*map(type, steps)} <= {int}
            fits = fits and ('plan' not in known or Plan(**known['plan']).init == known['init'])
            if not fits or any(file.is_symlink() for file in self.folder.rglob('*')):
                raise ValueError
        except (ValueError, KeyError, TypeError, AttributeError):
            raise UserError(
                f'{path} is damaged, or of another version of beit_mm, or has links beside it; choose another --out, '
                'or delete the folder'
            ) from None
        if differing:
            key = differing[0]
            raise UserError(
                f'{self.folder} is a run with other {key} ({known[key]}, not {self.record[key]}); choose another --out'
            )
        self.record = known

    def save(self) -> None:
        """Writes the record, with the time that has passed."""
        self.record['seconds'], self.began = self.seconds(), time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(self.folder / RECORD) as file:
            file.write(json.dumps(self.record, indent=2).encode())

    def last_checkpoint(self, stage: str) -> Path:
        """The checkpoint at the end of a stage, which is there when that is finished."""
        return self.folder / stage / f'iter_{self.record["stages"][stage]["steps"]}.pth'

    @property
    def weights(self) -> Path:
        """What the run is for."""
        return self.folder / ('pretrained.pth' if self.verb == 'pretrain' else 'finetuned.pth')

    # --- all of it --------------------------------------------------------------------------------

    def finish(self, length: Mapping[str, float | None]) -> Path:
        """Does what is left to do; `length` is one of minutes, steps and epochs."""
        given = {name: value for name, value in length.items() if value is not None}
        if 'plan' in self.record:
            self.check_same(given)
        if (self.folder / REPORT).is_file() and self.weights.is_file():
            say(f'{self.folder} is finished: {self.weights}, {self.folder / REPORT}')
            return self.weights
        images = find_images(self.record['images'])
        if self.verb == 'finetune' and not images.classes:
            raise UserError(
                f'{self.record["images"]} has no class folders: expected <class>/<image>, at least two classes, and in '
                'val no others than in train'
            )
        try:
            if 'plan' in self.record:
                self.go_on(images)
            else:
                self.choose(images, given)
            for stage in self.record['stages']:
                if not self.record['stages'][stage]:
                    self.prepare(images, stage)
                self.train(images, stage)
            content = read_checkpoint(self.last_checkpoint(self.verb))
            write_checkpoint(self.weights, {key: content[key] for key in ('state_dict', 'meta')})
            self.report(images)
        except (KeyboardInterrupt, SystemExit) as end:
            kept = '; what was learned so far is kept' if any(self.folder.glob('*/*.pth')) else ''
            say(f'Stopped{kept}. Resume with: {this_command()}')
            raise SystemExit(end.code if isinstance(end, SystemExit) else 130) from None
        finally:
            if 'plan' in self.record:
                self.save()
        return self.weights

    def choose(self, images: Images, length: dict[str, float]) -> None:
        """Makes the plan and says what was chosen."""
        plan = plan_training(images, self.verb, self.record['init'], self.workers, batch=self.batch)
        stages = ['tokenizer', 'pretrain'] if self.verb == 'pretrain' and not plan.tokenizer else [self.verb]
        length = length or dict(minutes=MINUTES)
        self.record.update(
            plan=dataclasses.asdict(plan), found=str(images), length=length, stages={stage: {} for stage in stages}
        )
        self.save()  # by which the folder is known as a run's, whatever ends it from here on
        write_lists(images, self.lists)
        name, number = next(iter(length.items()))
        for line in (
            *plan.reasons,
            f'length     {number:g} {name}: {" and ".join(stages)}; log and configs in {self.folder}',
        ):
            say(line)

    def check_same(self, length: Mapping[str, float]) -> None:
        """Raises ValueError for a length or a batch that differs from the plan's."""
        planned, batch = self.record['length'], self.record['plan']['batch']
        if length and length != planned:
            (name, number), (was, before) = next(iter(length.items())), next(iter(planned.items()))
            raise UserError(
                f'{self.folder} was planned for {before:g} {was}, not {number:g} {name}; choose another --out'
            )
        if self.batch not in (None, batch):
            raise UserError(
                f'{self.folder} was planned with batches of {batch}, not {self.batch}; choose another --out'
            )

    def go_on(self, images: Images) -> None:
        """Says so, if the images are still those of the plan. The run may have been moved, and have other workers."""
        begun = any(self.folder.glob('*/*.pth'))
        if str(images) != self.record['found'] and not begun:
            self.choose(images, self.record['length'])
            return
        if str(images) != self.record['found']:
            raise UserError(
                f'{self.record["images"]} had {self.record["found"]} when {self.folder} was planned, now {images}; '
                'choose another --out'
            )
        if self.workers is not None:
            self.record['plan']['workers'] = self.workers
        write_lists(images, self.lists)
        say(f'Resuming {self.folder} as it was planned.')

    def prepare(self, images: Images, stage: str) -> None:
        """Finds out how many steps a stage has, and writes its config."""
        plan, length = Plan(**self.record['plan']), self.record['length']
        if 'minutes' in length:
            seconds = 60 * length['minutes']
            needed, setup = seconds_per_step(self.write(images, stage, steps=1000), limit=MEASURING * seconds)
            left = (1 - REST) * seconds - self.seconds() - setup
            share = TOKENIZER_SHARE * left if stage == 'tokenizer' else left
            steps = int(share / needed)
            say(f'{stage}: {needed:.2f} s a step, so {max(steps, MIN_STEPS):,} steps')
        elif 'epochs' in length:
            steps = round(length['epochs'] * (len(images.train.paths) // plan.batch))
        else:
            steps = int(length['steps'])
        if stage == 'tokenizer':
            steps = min(steps, MAX_TOKENIZER_STEPS)
        self.record['stages'][stage] = dict(steps=max(steps, MIN_STEPS))
        self.save()

    def seconds(self) -> float:
        """Time that the run has taken so far, of earlier calls too."""
        return self.record['seconds'] + time.monotonic() - self.began

    def config(self, stage: str) -> Path:
        """The config of a stage."""
        return self.folder / ('tokenizer_config.py' if stage == 'tokenizer' else 'config.py')

    def write(self, images: Images, stage: str, steps: int) -> RunConfig:
        """The config of a stage; writes it for the user."""
        plan = Plan(**self.record['plan'])
        common = (images, plan, self.lists, steps, self.folder / stage)
        base = plan.base
        if stage == 'tokenizer':
            settings, base = tokenizer_settings(*common), TOKENIZER
        elif stage == 'pretrain':
            settings = pretraining_settings(*common, None if plan.tokenizer else self.last_checkpoint('tokenizer'))
        else:
            settings = finetuning_settings(*common)
        title = f'{stage.capitalize()} on images of your own, written by python -m beit_mm.'
        return write_config(self.config(stage), title, base, settings)

    def train(self, images: Images, stage: str) -> None:
        """Trains a stage to its end, if it is not there yet."""
        cfg = self.write(images, stage, self.record['stages'][stage]['steps'])
        if self.last_checkpoint(stage).is_file():
            return
        cfg.resume = True
        runner = make_runner(cfg, ProgressHook(stage))
        with without_output():
            runner.train()
        if not self.last_checkpoint(stage).is_file():
            raise UserError(
                f'{self.last_checkpoint(stage)} could not be written (see the warnings); make room and repeat the '
                'command'
            )
        scalars = runner.message_hub.log_scalars
        numbers = {name: float(scalars[f'val/{name}'].current()) for name in METRICS if f'val/{name}' in scalars}
        numbers['images_per_second'] = float(scalars['train/images_per_second'].mean())
        numbers['waiting'] = float(scalars['train/data_time'].mean() / scalars['train/time'].mean())
        self.record['stages'][stage].update(numbers)
        self.save()
        end_runner(runner)

    # --- the report -------------------------------------------------------------------------------

    def report(self, images: Images) -> None:
        """Draws the pictures and writes report.md."""
        numbers = self.record['stages'][self.verb]
        name = readable(self.record['images']).replace('`', '\\x60')  # nothing in it is Markdown
        lines = [f'# {self.verb} of `{name}`', '', f'{images}.', '']
        if self.verb == 'pretrain':
            held_out = [images.held_out.root / path for path in images.held_out.paths]
            chosen = held_out[:: max(1, len(held_out) // NUM_PICTURES)][:NUM_PICTURES]
            reconstruct(self.weights, chosen, self.folder / 'reconstruction.png')
            if images.classes:
                numbers |= self.neighbours(images)
        draw_curve(self.folder / self.verb, self.folder / 'loss.png', numbers.get('token_entropy'))
        self.save()
        rows = describe_numbers(self.record['stages'].get('tokenizer', {}) | numbers)
        for name, stage in self.record['stages'].items():
            lines.append(f'- {name}: {stage["steps"]:,} steps, {self.config(name).name}')
        lines += ['', '| held-out images | |', '| --- | --- |', *(f'| {name} | {value} |' for name, value in rows)]
        lines += ['', f'{self.record["seconds"] / 60:.1f} minutes. Weights: {self.weights.name}.', '']
        if (waiting := numbers.get('waiting', 0)) > 0.5:
            lines += [f'{waits_for_images(waiting)}.', '']
        if self.verb == 'pretrain':
            lines += ['![image, masked image, tokens decoded, prediction decoded](reconstruction.png)', '']
        lines += ['![loss](loss.png)', '']
        with atomic_file(self.folder / REPORT) as file:
            file.write('\n'.join(lines).encode())
        width = max(len(name) for name, _ in rows)
        for line in (*(f'{name:<{width}}  {value}' for name, value in rows), self.weights, self.folder / REPORT):
            say(line)

    def neighbour_sizes(self) -> tuple[int, int]:
        """Images with labels and held-out ones for k-NN: so many that it takes about the time that is left for it.

        Features of an image take at most half of what its training step takes; each is computed by two networks.
        """
        if 'minutes' not in self.record['length']:
            return MAX_BANK, MAX_QUERIES
        seconds = 60 * self.record['length']['minutes'] * REST
        images = seconds * self.record['stages'][self.verb]['images_per_second']
        return (
            min(MAX_BANK, max(MIN_BANK, int(images * 2 / 3))),
            min(MAX_QUERIES, max(MIN_BANK // 2, int(images / 3))),
        )

    def neighbours(self, images: Images) -> dict[str, float]:
        """k-NN accuracy, %, of the pretrained backbone and of one with random weights; on how many images."""
        bank_size, queries_size = self.neighbour_sizes()
        trained = FeatureExtractor(self.weights)
        labels = [
            {
                str(part.root / path): images.classes.index(name)
                for path, name in zip(part.paths, part.names, strict=True)
            }
            for part in (spread(images.train, bank_size), spread(images.held_out, queries_size))
        ]
        found = {}
        for name, network in (('knn_accuracy', trained), ('knn_accuracy_random', trained.with_random_weights())):
            (bank, of_bank, _), (features, truth, _) = (network.of_files(part) for part in labels)
            predicted = knn_predict(features, bank, of_bank, len(images.classes))
            found[name] = 100 * (predicted == truth).float().mean().item()
        return dict(found, knn_images=len(truth))


def describe_numbers(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """Rows of the report."""
    rows = {
        'mim_loss': ('loss (mim_loss), nats', '{:.3f}'),
        'token_entropy': ('loss of a guess by how frequent tokens are (token_entropy)', '{:.3f}'),
        'tokenizer/codes_used': ('different visual tokens in use', '{:.0f}'),
        'mim_acc': ('masked tokens predicted right (mim_acc)', '{:.3f}'),
        'accuracy/top1': ('classified right, %', '{:.1f}'),
        'knn_accuracy': ('classified right by nearest neighbours, %', '{:.1f}'),
        'knn_accuracy_random': ('the same with random weights, %', '{:.1f}'),
        'images_per_second': ('images a second in training', '{:,.0f}'),
    }
    found = [(text, form.format(numbers[name])) for name, (text, form) in rows.items() if name in numbers]
    if number := numbers.get('knn_images'):
        share = numbers['knn_accuracy'] / 100
        error = 100 * math.sqrt(share * (1 - share) / number)
        far = numbers['knn_accuracy'] - numbers['knn_accuracy_random'] > 2 * error
        text = f'{number:,} images, standard error {error:.1f}' + ('' if far else ': too close to tell')
        found.insert(-1, ('neighbours were tried on', text))
    return found


# --- training -------------------------------------------------------------------------------------


def make_runner(cfg: RunConfig, *hooks: Hook) -> Runner:
    """A quiet runner under a name of its own, which mmengine wants for each in a process."""
    cfg.experiment_name = f'{Path(cfg.filename).stem}_{secrets.token_hex(4)}'
    runner = TerminalRunner.from_cfg(cfg)
    for hook in hooks:
        runner.register_hook(hook)
    return runner


def end_runner(runner: Runner) -> None:
    """Ends the workers of a run at once."""
    runner.visualizer.close()
    end_workers(runner.train_dataloader)
    if runner.val_loop is not None:
        end_workers(runner.val_dataloader)


class StepClock(Hook):
    """Measures steps, and ends the run when there are enough of them.

    Args:
        limit: seconds after which 20 steps are enough; after three times as many a few are.
    """

    def __init__(self, limit: float):
        self.limit = limit
        self.times: list[float] = []

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        self.times.append(time.monotonic())
        steps, seconds = len(self.times) - FIRST_STEPS, self.times[-1] - self.times[0]
        if steps > MEASURED_STEPS and seconds > self.limit or steps > 1 and seconds > 3 * self.limit:
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
    clock_hook = StepClock(limit)
    with tempfile.TemporaryDirectory() as folder:
        cfg.work_dir = f'{folder}/measured'
        runner = make_runner(cfg, clock_hook)
        watch_workers([runner.train_dataloader])
        try:
            runner.train()
        finally:
            end_workers(runner.train_dataloader)
    times = clock_hook.times[FIRST_STEPS:]
    return (times[-1] - times[0]) / (len(times) - 1), clock_hook.times[0] - began


def draw_curve(work_dir: Path, out: Path, entropy: float | None) -> None:
    """Draws the loss of a run, over its steps."""
    figure = draw_runs({'training loss': read_scalars(work_dir)}, ['loss'])
    axes = figure.axes[0]
    if entropy is not None:
        axes.axhline(entropy, color='gray', linestyle='--', label='how frequent each token is')
    axes.set_ylabel('nats')
    axes.legend()
    figure.savefig(out, dpi=120)


def this_command() -> str:
    """What the user has typed, to be typed again."""
    ours = Path(sys.argv[0]).parts[-2:] == ('beit_mm', '__main__.py')
    return shlex.join(sys.orig_argv) if ours else 'the same call'
