"""What a run does about bad data: steps whose gradient is infinite or NaN, and images that cannot be read."""

import copy
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from mmengine.dist import all_gather_object, barrier, get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.utils.data import DataLoader, Dataset

from beit_mm.datasets import UnlabeledImages, UnreadableImageError
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.engine.checkpoints import CheckpointHook, at_boundary, checkpoint_hook_of, in_main_process
from beit_mm.engine.interruption import end_if_told, shield_workers, validate_on
from beit_mm.engine.optim import MAX_SKIPPED_IN_A_ROW, AutocastOptimWrapper, SkippedSteps
from beit_mm.engine.steps import fetch_logs, look_due, written_if_possible
from beit_mm.errors import UserError, log, warn
from beit_mm.files import quoted
from beit_mm.registry import HOOKS

LIST = 'unreadable_images.txt'


@HOOKS.register_module()
class BadStepHook(Hook):
    """Stops a run after 25 skipped steps in a row, and leaves what is needed to find out why.

    It looks at the counters of AutocastOptimWrapper where the logger writes a line, at least every 50 steps, and at the
    end. In `bad_step_ITER/` in the work directory are then, ITER being the iteration of the first of these steps:

    - `checkpoint.pth`: the run as it is now, to resume from. Its weights are those before that step.
    - `rank{rank}.json`: the samples of that step on this rank, and the losses from it on.
    """

    def __init__(self):
        self.skipped = SkippedSteps()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        if look_due(runner, batch_idx) and isinstance(runner.optim_wrapper, AutocastOptimWrapper):
            self.skipped = runner.optim_wrapper.look()

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        if at_boundary(runner):
            self.stop_if_bad(runner)

    def after_train(self, runner: Runner) -> None:
        self.stop_if_bad(runner)

    def stop_if_bad(self, runner: Runner) -> None:
        if self.skipped.in_a_row < MAX_SKIPPED_IN_A_ROW:
            return
        first, loader = self.skipped.first, runner.train_dataloader
        folder = Path(runner.work_dir, f'bad_step_{first}')
        fetch_logs(runner)
        losses = runner.message_hub.get_scalar('train/loss').data[0]
        iterations = range(first, first + runner.optim_wrapper.accumulative_counts)
        content = dict(
            iteration=first,
            rank=get_rank(),
            world_size=get_world_size(),
            seed=runner.seed,
            skipped_steps=self.skipped.in_a_row,
            losses=[str(loss) for loss in losses[first - runner.iter :]],  # JSON has no NaN
            samples=[dict(sample, iteration=i) for i in iterations for sample in samples_of(loader, i)],
        )
        with written_if_possible(runner):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f'rank{get_rank()}.json').write_text(json.dumps(content, indent=1))
        (checkpoint_hook_of(runner) or CheckpointHook()).save(
            runner, f'{folder.name}/checkpoint.pth', epoch=runner.iter // len(loader), iter=runner.iter
        )
        barrier()  # the first rank to end would end the others while they write
        raise UserError(
            f'the gradient was not finite in {self.skipped.in_a_row} steps in a row. {folder} has the run, and the '
            f'names of the images of the first of them: resume (--resume {folder}/checkpoint.pth) with a smaller '
            'learning rate, with optim_wrapper.dtype=float32, or without a broken image'
        )


def samples_of(loader: DataLoader, iteration: int) -> list[dict]:
    """The samples of this rank's batch: `key` (seed, epoch, index) and `img_path`; with our samplers only."""
    if not isinstance(loader.sampler, SeededSampler):
        return []
    epoch, batch = divmod(iteration, len(loader))
    sampler = copy.copy(loader.sampler)
    sampler.set_epoch(epoch)
    keys = islice(sampler.keys(batch * loader.batch_size), loader.batch_size)
    info = getattr(loader.dataset, 'get_data_info', lambda index: {})  # not every dataset has it
    return [dict(key=list(key), img_path=info(key.index).get('img_path')) for key in keys]


@HOOKS.register_module()
class UnreadableImagesHook(Hook):
    """Names each image that the dataset's `on_error='skip'` replaced, and stops a run with too many of them.

    Every 50 steps at least the new paths of all processes go into the log and, one a line, into
    `unreadable_images.txt` in the work directory, with which a resumed run continues. In classification and
    segmentation `unreadable` has to be among the `meta_keys` of the pipeline's last transform.

    Held-out images are read once before training. With `on_error='raise'` of their dataset one that cannot be read
    stops the run at once; with 'skip' it is left out of every validation. Tests never leave images out.

    Args:
        max_rate: share of the dataset's images that may be unreadable, 0 to 1; 10 images are tolerated in any case.
    """

    def __init__(self, max_rate: float = 0.05):
        self.max_rate = max_rate
        self.path = Path(LIST)
        self.met: list[str] = []  # by this process since the last look
        self.listed: set[str] = set()
        self.held_out: set[str] = set()

    def before_train(self, runner: Runner) -> None:
        self.path = path = Path(runner.work_dir, LIST)
        lines = in_main_process(lambda: path.read_text(errors='replace').splitlines() if path.is_file() else [])
        self.listed = set(lines)
        if runner.val_loop is not None and isinstance(runner.val_dataloader.dataset, UnlabeledImages):
            self.check_held_out(runner)

    def check_held_out(self, runner: Runner) -> None:
        dataset = runner.val_dataloader.dataset
        log(f'Reading the {len(dataset)} held-out images once, to see that none is broken.')
        broken = find_unreadable(dataset, runner)
        if not broken:
            return
        self.held_out = {quoted(error.path) for error in broken.values()}
        self.add(runner, self.held_out)
        count = f'{len(broken)} of {len(dataset)} held-out images cannot be read, see {self.path}'
        if dataset.on_error == 'raise':
            advice = "Fix or remove them, or leave them out with val_dataloader.dataset.on_error='skip'"
            raise UnreadableImageError(f'{next(iter(broken.values()))}; {count}. {advice}')
        self.check_rate(len(broken), len(dataset))
        readable_ones = [index for index in range(len(dataset)) if index not in broken]
        validate_on(runner, readable_ones)
        warn(f'{count}. They are left out: every validation of this run is of the other {len(readable_ones)}.')

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict | None = None) -> None:
        if isinstance(inputs := data_batch['inputs'], dict):
            replaced = inputs['unreadable']
        else:
            replaced = [sample.get('unreadable', '') for sample in data_batch['data_samples']]
        self.met += [quoted(path) for path in replaced if path]
        if look_due(runner, batch_idx):
            added = self.add(runner, set().union(*all_gather_object(self.met)))
            self.met = []
            for path in added:
                warn(f'{path} cannot be read, another image replaces it.')
            if added:
                self.check_rate(len(self.listed - self.held_out), len(runner.train_dataloader.dataset))

    def add(self, runner: Runner, paths: set[str]) -> list[str]:
        """Lists the paths that are not listed yet, and returns them."""
        added = sorted(paths - self.listed)
        self.listed.update(added)
        if added and is_main_process():
            with written_if_possible(runner), self.path.open('a', encoding='utf-8') as file:
                file.write(''.join(f'{path}\n' for path in added))
        return added

    def check_rate(self, count: int, total: int) -> None:
        limit = min(max(self.max_rate * total, 10), total - 1)  # a few are tolerated, however small the dataset
        if count > limit:
            raise UserError(f'{count} of {total} images cannot be read, at most {limit:.0f} may be; see {self.path}')


class _Reading(Dataset):
    """Instead of a sample: None, or the index and the error of one that cannot be read."""

    def __init__(self, dataset: Dataset):
        self.dataset = copy.copy(dataset)
        self.dataset.on_error = 'raise'  # no substitutes

    def __getitem__(self, index: int) -> tuple[int, UnreadableImageError] | None:
        try:
            self.dataset[index]
        except UnreadableImageError as error:
            return index, error
        return None


def find_unreadable(dataset: UnlabeledImages, runner: Runner) -> dict[int, UnreadableImageError]:
    """The held-out samples that cannot be read: the error by index, in order. All processes share the work."""
    loader = DataLoader(
        _Reading(dataset),
        batch_size=None,
        sampler=range(get_rank(), len(dataset), get_world_size()),
        num_workers=runner.val_dataloader.num_workers,
        generator=torch.Generator(),  # of its own: nothing is drawn from the run's
    )
    shield_workers(loader)
    broken = []
    for answer in loader:
        end_if_told(runner)
        if answer is not None:
            broken.append(answer)
    return dict(sorted(sum(all_gather_object(broken), []), key=lambda answer: answer[0]))
