"""Unreadable images of a run: named in the log, listed once whichever process or run finds them, and counted."""

import contextlib
import copy
import fcntl
import hashlib
import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path

import torch
from mmengine.dist import all_gather_object, broadcast_object_list, get_rank, get_world_size, is_main_process
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch.utils.data import DataLoader, Dataset

from beit_mm.datasets import UnlabeledImages, UnreadableImageError
from beit_mm.datasets.reading import MemberPath
from beit_mm.engine.workers import LOST_CONNECTION, check_dead_worker, watch_workers
from beit_mm.files import readable
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError

LIST = 'unreadable_images.txt'
CLEAN = 'held_out_images_read.txt'  # what was found without fault, so that a resumed run does not read it again
MIN_TOLERATED = 10  # unreadable images that are no reason to stop, however small the dataset


class SharedList:
    """Lines in a file, each once, to which all processes and later runs of a work directory add.

    Where the file cannot be written, the lines of this process stay in its memory, and the log says so.
    """

    def __init__(self, path: Path):
        self.path = path
        self.lines: set[str] = set()
        self.position = 0  # in the file, up to which it was read

    def add(self, lines: Iterable[str]) -> list[str]:
        """Adds lines, and returns those that nobody had added before."""
        lines = [line for line in dict.fromkeys(lines) if line not in self.lines]
        if not lines:
            return []
        try:
            with self.path.open('ab+', buffering=0) as file:
                with contextlib.suppress(OSError):  # a file system without locks; a line is written in one piece
                    fcntl.flock(file, fcntl.LOCK_EX)  # until the file is closed
                file.seek(self.position)
                rest = file.read()
                self.lines.update(rest.decode('utf-8', 'replace').split('\n'))
                self.lines.discard('')
                lines = [line for line in lines if line not in self.lines]
                cut = rest and not rest.endswith(b'\n')  # by a full disk
                file.write(b'\n' * bool(cut) + ''.join(f'{line}\n' for line in lines).encode())
                self.position = file.tell()
        except OSError as error:
            print_log(f'{self.path} cannot be written ({error}).', logger='current', level=logging.WARNING)
        self.lines.update(lines)
        return lines


@HOOKS.register_module()
class UnreadableImagesHook(Hook):
    """Names each image that the dataset's `on_error='skip'` replaced, and stops a run with too many of them.

    The paths stand in the log and, one a line and each once, in `unreadable_images.txt` in the work directory, which
    all processes and resumed runs share. In classification and segmentation `unreadable` has to be among the
    `meta_keys` of the pipeline's last transform.

    Held-out images are read once before training, so that no run ends at its first validation; a resumed run reads
    them again only if some were broken, or if paths, sizes, times or transforms have changed. With `on_error='raise'`
    of their dataset one that cannot be read stops the run at once. With 'skip' it is left out of every validation,
    whose metrics are then of fewer images; the log and the list say so. Tests never leave images out.

    Args:
        max_rate: part of the dataset's images that may be unreadable; 10 images are tolerated in any case.

    Raises:
        ValueError: too many images are unreadable.
        UnreadableImageError: a held-out image is.
        ValueError: `max_rate` is no part.
    """

    def __init__(self, max_rate: float = 0.05):
        if not 0 <= max_rate <= 1:
            raise UserError(f'max_rate is {max_rate}; expected 0 to 1, a part of the images')
        self.max_rate = max_rate
        self.held_out: set[str] = set()

    def before_train(self, runner: Runner) -> None:
        """Opens the list, and reads the held-out images."""
        self.listing = SharedList(Path(runner.work_dir) / LIST)
        if runner.val_loop is not None and isinstance(runner.val_dataloader.dataset, UnlabeledImages):
            self.check_held_out(runner)

    def check_held_out(self, runner: Runner) -> None:
        """Stops at held-out images that cannot be read, or leaves them out, as `on_error` of their dataset says."""
        dataset = runner.val_dataloader.dataset
        state, note = [''], Path(runner.work_dir) / CLEAN
        if is_main_process():
            state[0] = state_of(dataset)
            with contextlib.suppress(OSError):
                state[0] = state[0] if not state[0] or note.read_text() != state[0] else 'read'
        broadcast_object_list(state)
        if state[0] == 'read':
            return
        print_log(f'Reading the {len(dataset)} held-out images once, to see that none is broken.', logger='current')
        broken = find_unreadable(dataset, runner.val_dataloader.num_workers)
        if not broken:
            if is_main_process():
                with contextlib.suppress(OSError):
                    note.write_text(state[0])
            return
        self.held_out = {readable(path) for path, _ in broken.values()}
        self.listing.add(sorted(self.held_out))
        count = f'{len(broken)} of {len(dataset)} held-out images cannot be read, see {self.listing.path}'
        if dataset.on_error == 'raise':
            _, reason = next(iter(broken.values()))
            raise UnreadableImageError(
                f"{reason}; {count}. Mend or remove them, or leave them out with val_dataloader.dataset.on_error='skip'"
            )
        self.check_rate(len(broken), len(dataset))
        dataset = dataset.get_subset([index for index in range(len(dataset)) if index not in broken])
        config = dict(copy.deepcopy(runner.cfg.val_dataloader), dataset=dataset)
        runner.val_loop.dataloader = runner.build_dataloader(config, seed=runner.seed)
        message = f'{count}. They are left out: every validation of this run is of the other {len(dataset)}.'
        print_log(message, logger='current', level=logging.WARNING)

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        """Notes the images of this batch that were replaced."""
        inputs = data_batch['inputs']
        if isinstance(inputs, dict):
            replaced = inputs['unreadable']
        else:
            replaced = [sample.get('unreadable', '') for sample in data_batch['data_samples']]
        added = self.listing.add(readable(path) for path in replaced if path)
        if not added:
            return
        count = len(self.listing.lines - self.held_out)
        for number, path in enumerate(added, count - len(added) + 1):
            message = f'{path} cannot be read, another image stands in ({number} so far).'
            print_log(message, logger='current', level=logging.WARNING)
        self.check_rate(count, len(runner.train_dataloader.dataset))

    def check_rate(self, count: int, total: int) -> None:
        """Raises UserError if `count` of `total` images are too many."""
        limit = min(max(self.max_rate * total, MIN_TOLERATED), total - 1)
        if count > limit:
            raise UserError(
                f'{count} of {total} images cannot be read, at most {limit:.0f} are tolerated; see '
                f'{self.listing.path}, or raise max_rate of UnreadableImagesHook'
            )


def state_of(dataset: UnlabeledImages) -> str:
    """Number of images, and a hash of their paths, sizes, times and pipeline; '' where there is none."""
    digest = hashlib.sha256(re.sub(' at 0x[0-9a-f]+', '', repr(dataset.pipeline)).encode())
    try:
        for index in range(len(dataset)):
            path = dataset.get_data_info(index)['img_path']
            status = os.stat(path.archive if isinstance(path, MemberPath) else path)
            digest.update(os.fsencode(f'{path}\0{status.st_size}\0{status.st_mtime_ns}\0'))
    except OSError:
        return ''
    return f'{len(dataset)} {digest.hexdigest()}\n'


class _Reading(Dataset):
    """Instead of a sample: None, or index, path and reason of one that cannot be read."""

    def __init__(self, dataset: Dataset, indices: range):
        self.dataset = dataset
        self.indices = indices

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, place: int) -> tuple[int, str, str] | None:
        index = self.indices[place]
        try:
            self.dataset[index]
        except UnreadableImageError as error:
            return index, error.path, str(error)
        return None


def find_unreadable(dataset: UnlabeledImages, num_workers: int) -> dict[int, tuple[str, str]]:
    """Index of each sample that cannot be read, in order, with its file and the reason; all processes look for them."""
    part = _Reading(dataset, range(get_rank(), len(dataset), get_world_size()))
    # a generator of its own: nothing is drawn from the run's
    loader = DataLoader(part, batch_size=None, num_workers=num_workers, generator=torch.Generator())
    workers = watch_workers([loader])  # a signal to all processes of the run is not for them
    try:
        found = [answer for answer in loader if answer is not None]
    except (RuntimeError, *LOST_CONNECTION) as error:
        check_dead_worker(error, workers)
        raise
    return {index: (path, reason) for index, path, reason in sorted(sum(all_gather_object(found), []))}
