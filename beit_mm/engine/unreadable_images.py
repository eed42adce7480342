"""Images that could not be read during training: counted, listed, and too many stop the run."""
import logging
from pathlib import Path

from mmengine.dist import get_rank
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner

from beit_mm.registry import HOOKS

# A handful of broken files in a small folder is no reason to stop.
ALWAYS_TOLERATED = 10


@HOOKS.register_module()
class UnreadableImagesHook(Hook):
    """Follows up on the dataset's `on_error='skip'`.

    Each unreadable image is named once in the log and in `unreadable_images_rank{rank}.txt` in the
    work directory. PackViews brings the numbers of replaced images here; PackInputs needs `unreadable` among its
    `meta_keys`.

    Args:
        max_rate: share of the dataset's images, found unreadable by this process, that stops the run
            (never fewer than 10 images).

    Raises:
        RuntimeError: too many images are unreadable.
    """

    def __init__(self, max_rate: float = 0.001):
        self.max_rate = max_rate
        self.found: set[int] = set()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        """Notes the images of this batch that were replaced."""
        inputs = data_batch['inputs']
        if isinstance(inputs, dict):
            replaced = inputs['unreadable'].tolist()
        else:  # classification: where PackInputs has it among its meta_keys
            replaced = [sample.get('unreadable', -1) for sample in data_batch['data_samples']]
        for index in set(replaced) - self.found - {-1}:
            self._note(runner, index)

    def _note(self, runner: Runner, index: int) -> None:
        dataset = runner.train_dataloader.dataset
        path = dataset.get_data_info(index)['img_path']
        self.found.add(index)
        listing = Path(runner.work_dir) / f'unreadable_images_rank{get_rank()}.txt'
        with listing.open('a') as file:
            file.write(f'{path}\n')
        print_log(f'{path} cannot be read, another image stands in ({len(self.found)} so far).',
                  logger='current', level=logging.WARNING)
        limit = max(self.max_rate * len(dataset), ALWAYS_TOLERATED)
        if len(self.found) > limit:
            raise RuntimeError(
                f'{len(self.found)} of {len(dataset)} images cannot be read, at most {limit:.0f} are '
                f'tolerated; see {listing}, or raise max_rate of UnreadableImagesHook')
