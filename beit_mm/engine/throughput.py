"""Images per second in the log."""
import time

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.runner import Runner

from beit_mm.registry import HOOKS


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Logs `images_per_second` of all processes together, waiting for data included.

    It is smoothed like every logged number, over the logging window.
    """

    last = 0.0

    def before_train_epoch(self, runner: Runner) -> None:
        """Starts the clock."""
        self.last = time.perf_counter()

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Starts the clock again; validation in the middle of an epoch does not count."""
        self.last = time.perf_counter()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        """Counts the images of this step."""
        now = time.perf_counter()
        images = len(data_batch['inputs']['images']) * get_world_size()
        runner.message_hub.update_scalar('train/images_per_second', images / (now - self.last))
        self.last = now
