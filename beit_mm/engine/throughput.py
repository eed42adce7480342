"""Images per second in the log."""
import time
from collections import deque

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.runner import Runner

from beit_mm.registry import HOOKS


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Logs `images_per_second` of all processes together, waiting for data included.

    It is images over seconds of the last 50 steps, not a mean of rates, so that a stall of the loader shows.
    Validation does not count.
    """

    def __init__(self):
        self.steps: deque[tuple[int, float]] = deque(maxlen=50)  # images, seconds
        self.last = 0.0

    def before_train_epoch(self, runner: Runner) -> None:
        """Starts the clock."""
        self.last = time.perf_counter()

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Starts the clock again; iteration-based runs validate in the middle of an epoch."""
        self.last = time.perf_counter()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        """Counts the images of this step."""
        now = time.perf_counter()
        inputs = data_batch['inputs']  # a dict in pretraining, the images themselves in classification
        images = inputs['images'] if isinstance(inputs, dict) else inputs
        self.steps.append((len(images) * get_world_size(), now - self.last))
        self.last = now
        count, seconds = map(sum, zip(*self.steps, strict=True))
        runner.message_hub.update_scalar('train/images_per_second', count / seconds)
