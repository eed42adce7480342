"""Unreadable images of a run: named in the log, listed once whichever process or run meets them, and counted."""

import copy
import logging
from pathlib import Path

import torch
from mmengine.dist import all_gather_object, broadcast_object_list, get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch.utils.data import DataLoader, Dataset

from beit_mm.datasets import UnlabeledImages, UnreadableImageError
from beit_mm.engine.interruption import shield_workers
from beit_mm.engine.steps import look_due
from beit_mm.files import readable
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError

LIST = 'unreadable_images.txt'


@HOOKS.register_module()
class UnreadableImagesHook(Hook):
    """Names each image that the dataset's `on_error='skip'` replaced, and stops a run with too many of them.

    Where the logger writes a line, at least every 50 steps, the new paths of all processes go into the log and, one a
    line, into `unreadable_images.txt` in the work directory, with which a resumed run continues. In classification and
    segmentation `unreadable` has to be among the `meta_keys` of the pipeline's last transform.

    Held-out images are read once before training. With `on_error='raise'` of their dataset one that cannot be read
    stops the run at once; with 'skip' it is left out of every validation. Tests never leave images out.

    Args:
        max_rate: share of the dataset's images that may be unreadable, 0 to 1; 10 images are tolerated in any case.
    """

    def __init__(self, max_rate: float = 0.05):
        if not 0 <= max_rate <= 1:
            raise UserError(f'max_rate is {max_rate}; expected 0 to 1, a share of the images')
        self.max_rate = max_rate
        self.path = Path(LIST)
        self.met: list[str] = []  # by this process since the last look
        self.listed: set[str] = set()
        self.held_out: set[str] = set()

    def before_train(self, runner: Runner) -> None:
        self.path = Path(runner.work_dir, LIST)
        lines = [self.path.read_text(errors='replace').splitlines() if self.path.is_file() else []]
        broadcast_object_list(lines)
        self.listed = set(lines[0])
        if runner.val_loop is not None and isinstance(runner.val_dataloader.dataset, UnlabeledImages):
            self.check_held_out(runner)

    def check_held_out(self, runner: Runner) -> None:
        dataset = runner.val_dataloader.dataset
        print_log(f'Reading the {len(dataset)} held-out images once, to see that none is broken.', logger='current')
        broken = find_unreadable(dataset, runner.val_dataloader.num_workers)
        if not broken:
            return
        self.held_out = {readable(path) for path, _ in broken.values()}
        self.add(self.held_out)
        count = f'{len(broken)} of {len(dataset)} held-out images cannot be read, see {self.path}'
        if dataset.on_error == 'raise':
            _, reason = next(iter(broken.values()))
            raise UnreadableImageError(
                f"{reason}; {count}. Fix or remove them, or leave them out with val_dataloader.dataset.on_error='skip'"
            )
        self.check_rate(len(broken), len(dataset))
        dataset = dataset.get_subset([index for index in range(len(dataset)) if index not in broken])
        config = dict(copy.deepcopy(runner.cfg.val_dataloader), dataset=dataset)
        runner.val_loop.dataloader = runner.build_dataloader(config, seed=runner.seed)
        message = f'{count}. They are left out: every validation of this run is of the other {len(dataset)}.'
        print_log(message, logger='current', level=logging.WARNING)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict | None = None) -> None:
        if isinstance(inputs := data_batch['inputs'], dict):
            replaced = inputs['unreadable']
        else:
            replaced = [sample.get('unreadable', '') for sample in data_batch['data_samples']]
        self.met += [readable(path) for path in replaced if path]
        if look_due(runner, batch_idx):
            added = self.add(set().union(*all_gather_object(self.met)))
            self.met = []
            for path in added:
                print_log(f'{path} cannot be read, another image replaces it.', 'current', logging.WARNING)
            if added:
                self.check_rate(len(self.listed - self.held_out), len(runner.train_dataloader.dataset))

    def add(self, paths: set[str]) -> list[str]:
        """Lists the paths that are not listed yet, and returns them."""
        added = sorted(paths - self.listed)
        self.listed.update(added)
        if added and is_main_process():
            try:
                with self.path.open('a', encoding='utf-8') as file:
                    file.write(''.join(f'{path}\n' for path in added))
            except OSError as error:
                print_log(f'{self.path} cannot be written ({error}).', logger='current', level=logging.WARNING)
        return added

    def check_rate(self, count: int, total: int) -> None:
        limit = min(max(self.max_rate * total, 10), total - 1)  # a few are tolerated, however small the dataset
        if count > limit:
            raise UserError(
                f'{count} of {total} images cannot be read, at most {limit:.0f} are tolerated; see '
                f'{self.path}, or raise max_rate of UnreadableImagesHook'
            )


class _Reading(Dataset):
    """Instead of a sample: None, or index, path and reason of one that cannot be read."""

    def __init__(self, dataset: Dataset, indices: range):
        self.dataset, self.indices = dataset, indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, number: int) -> tuple[int, str, str] | None:
        index = self.indices[number]
        try:
            self.dataset[index]
        except UnreadableImageError as error:
            return index, error.path, str(error)
        return None


def find_unreadable(dataset: UnlabeledImages, num_workers: int) -> dict[int, tuple[str, str]]:
    """The samples that cannot be read: file and reason by index, in order. All processes share the work."""
    share = _Reading(dataset, range(get_rank(), len(dataset), get_world_size()))
    # a generator of its own: nothing is drawn from the run's
    loader = DataLoader(share, batch_size=None, num_workers=num_workers, generator=torch.Generator())
    shield_workers(loader)
    broken = [answer for answer in loader if answer is not None]
    return {index: (path, reason) for index, path, reason in sorted(sum(all_gather_object(broken), []))}
