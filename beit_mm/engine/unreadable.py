"""Lists and counts images that could not be read, and stops a run that has too many."""

import copy
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from mmengine.dist import all_gather_object, get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.utils.data import DataLoader, Dataset

from beit_mm.datasets import UnlabeledImages, UnreadableImageError
from beit_mm.engine.checkpoints import in_main_process, is_training
from beit_mm.engine.logs import fetch_due, written_if_possible
from beit_mm.engine.loops import validate_on
from beit_mm.engine.signals import end_workers, shield_workers
from beit_mm.errors import UserError, log, warn
from beit_mm.files import quoted
from beit_mm.registry import HOOKS

LIST = 'unreadable_images.txt'


@HOOKS.register_module()
class UnreadableImagesHook(Hook):
    """Names each image that the dataset's `on_error='skip'` replaced, and stops a run with too many of them.

    At least every 50 steps the new paths of all processes go into the log and into `unreadable_images.txt` in the work
    directory, which a resumed run continues. In classification and segmentation `unreadable` has to be among the
    `meta_keys` of the pipeline's last transform.

    Held-out images are read once before training. If their dataset has `on_error='raise'`, an unreadable one stops the
    run at once; with 'skip' it is left out of every validation. Tests never leave images out.

    Args:
        max_rate: share of the dataset's images that may be unreadable, 0 to 1; 10 images are tolerated in any case.
    """

    def __init__(self, max_rate: float = 0.05):
        self.max_rate = max_rate
        self.new_paths: set[str] = set()  # found by this process since it last listed any
        self.held_out: set[str] = set()
        self.left_out = 0  # of the held-out images

    def begin(self, folder: Path) -> None:
        """Goes on with the list in a run's folder. Without a Runner, call it before the other methods."""
        self.path = path = folder / LIST
        text = in_main_process(lambda: path.read_text(errors='replace') if path.is_file() else '')
        self.listed = set(text.splitlines())

    def before_train(self, runner: Runner) -> None:
        self.begin(Path(runner.work_dir))
        if runner.val_loop is not None and isinstance(runner.val_dataloader.dataset, UnlabeledImages):
            self.check_held_out(runner)

    def check_held_out(self, runner: Runner) -> None:
        dataset = runner.val_dataloader.dataset
        total = len(dataset)
        log(f'Reading the {total} held-out images once, to check that none is broken.')
        broken = find_unreadable(dataset, runner.val_dataloader.num_workers)
        if broken:
            self.leave_out(runner, broken)

    def before_val(self, runner: Runner) -> None:
        """Leaves out held-out images, or label maps, whose files have since disappeared."""
        dataset = runner.val_dataloader.dataset
        if is_training(runner) and isinstance(dataset, UnlabeledImages) and dataset.on_error == 'skip':
            gone = in_main_process(lambda: find_gone(dataset))
            if gone:
                end_workers(runner.val_dataloader)
                self.leave_out(runner, gone)

    def leave_out(self, runner: Runner, broken: Mapping[int, UnreadableImageError]) -> None:
        """Validates without held-out images, given by their index, from now on; ends the run if it may not."""
        dataset = runner.val_dataloader.dataset
        total = len(dataset)
        self.held_out |= {quoted(error.path) for error in broken.values()}
        self.add(self.held_out)
        first = next(iter(broken.values()))
        if dataset.on_error == 'raise':
            raise UnreadableImageError(
                f'{first}; {len(broken)} of {total} held-out images cannot be read, see {self.path}; '
                "val_dataloader.dataset.on_error='skip' leaves them out"
            )
        self.check_rate(self.left_out + len(broken), self.left_out + total)
        self.left_out += len(broken)
        validate_on(runner, [index for index in range(total) if index not in broken])
        warn(f'{first}; {len(broken)} of {total} held-out images cannot be read and are left out, see {self.path}')

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict | None = None) -> None:
        self.new_paths |= replaced_in(data_batch)
        if fetch_due(runner, batch_idx):
            paths = set().union(*all_gather_object(self.new_paths))
            self.new_paths = set()
            self.add_replaced(paths, len(runner.train_dataloader.dataset))

    def add_replaced(self, paths: set[str], total: int) -> None:
        """Lists and names images that were replaced in training; UserError if they are too many of `total`."""
        added = self.add(paths)
        for path in added:
            warn(f'{path} cannot be read; another image replaces it.')
        if added:
            self.check_rate(len(self.listed - self.held_out), total)

    def add(self, paths: set[str]) -> list[str]:
        """Lists the paths that are not listed yet, and returns them."""
        added = sorted(paths - self.listed)
        self.listed.update(added)
        if added and is_main_process():
            with written_if_possible(self.path.parent), self.path.open('a', encoding='utf-8') as file:
                file.writelines(f'{path}\n' for path in added)
        return added

    def check_rate(self, count: int, total: int) -> None:
        limit = min(max(self.max_rate * total, 10), total - 1)  # a few are tolerated, however small the dataset
        if count > limit:
            raise UserError(f'{count} of {total} images cannot be read, at most {limit:.0f}; see {self.path}')


def find_gone(dataset: UnlabeledImages) -> dict[int, UnreadableImageError]:
    """An error for each sample whose image or label map is gone, by its index in order."""
    found = {}
    for index in range(len(dataset)):
        sample = dataset.get_data_info(index)
        paths = [getattr(sample['img_path'], 'archive', sample['img_path']), sample.get('seg_map_path')]
        if gone := [path for path in paths if path is not None and not os.path.isfile(path)]:
            found[index] = UnreadableImageError(f'{quoted(gone[0])}: the file is gone')
            found[index].path = gone[0]
    return found


def replaced_in(batch: dict) -> set[str]:
    """Paths of the images of a batch that could not be read, and were replaced by others."""
    if isinstance(batch['inputs'], dict):  # in pretraining
        paths = batch['inputs']['unreadable']
    else:
        paths = [sample.get('unreadable', '') for sample in batch['data_samples']]
    return {quoted(path) for path in paths if path}


class ReadingErrors(Dataset):
    """For each sample of a dataset, the error of reading it, or None if it can be read."""

    def __init__(self, dataset: UnlabeledImages):
        self.dataset = copy.copy(dataset)
        self.dataset.on_error = 'raise'  # no substitutes

    def __getitem__(self, index: int) -> UnreadableImageError | None:
        try:
            self.dataset[index]
        except UnreadableImageError as error:
            return error
        return None


def find_unreadable(dataset: UnlabeledImages, num_workers: int) -> dict[int, UnreadableImageError]:
    """The errors of the samples that cannot be read, by their index in order; all processes share the work."""
    indices = range(get_rank(), len(dataset), get_world_size())
    generator = torch.Generator()  # leaves the run's random numbers as they are
    loader = DataLoader(ReadingErrors(dataset), None, sampler=indices, num_workers=num_workers, generator=generator)
    shield_workers(loader)
    answers = zip(indices, loader, strict=True)
    broken = all_gather_object([(index, error) for index, error in answers if error is not None])
    return dict(sorted(sum(broken, []), key=lambda answer: answer[0]))
