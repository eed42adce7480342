"""What a run states and checks before its first step."""
import logging

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import BaseLoop, Runner
from torch.utils.data import DataLoader

from beit_mm.checkpoint.loader import meta_of
from beit_mm.registry import HOOKS

from .class_check import check_num_classes, check_same_classes, classes_of, path_of
from .plain_checkpoint import tokenizer_origin


@HOOKS.register_module()
class StartCheckHook(Hook):
    """Prints the effective batch beside the recipe's own and checks that model and data fit.

    Results that cannot be reproduced mostly come from another number of GPUs at the same learning
    rate, so both numbers stand at the top of the log. The recipe's own batch is
    `auto_scale_lr.base_batch_size` of the config.

    Raises:
        ValueError: fewer images than a batch; a model with `check_data(transforms)` finds that the pipeline does not
            fit it; or classes of the model, the datasets and, in a test, the checkpoint disagree.
    """

    def __init__(self):
        self.loaded: dict = {}  # meta of the checkpoint that the weights come from

    def before_train(self, runner: Runner) -> None:
        """Runs once, after everything is built."""
        batch = runner.train_dataloader.batch_size
        accumulation = runner.optim_wrapper._accumulative_counts
        effective = get_world_size() * batch * accumulation
        expected = runner.cfg.get('auto_scale_lr', {}).get('base_batch_size')
        statement = (f'Effective batch: {get_world_size()} processes x {batch} images x {accumulation} '
                     f'accumulated = {effective}; the recipe has {expected}.')
        if expected in (None, effective) or runner.cfg.auto_scale_lr.get('enable'):
            print_log(statement, logger='current')
        else:
            print_log(
                f'{statement} The learning rate belongs to the recipe\'s batch: change '
                'train_dataloader.batch_size or optim_wrapper.accumulative_counts to meet it, or '
                'scale the rate yourself (half the batch, half the rate).',
                logger='current',
                level=logging.WARNING)
        self.loaded = {}  # what is tested afterwards are this run's weights
        model = runner.model.module if is_model_wrapper(runner.model) else runner.model
        check_size(runner.train_dataloader)
        dataset = runner.train_dataloader.dataset
        if runner.val_loop is not None:
            held_out = runner.val_dataloader.dataset
            check_same_classes(classes_of(held_out), path_of(held_out), classes_of(dataset), path_of(dataset))
        check_num_classes(model, dataset)
        pipeline = getattr(dataset, 'pipeline', None)  # a concatenation has none of its own
        if hasattr(model, 'check_data') and pipeline is not None:
            model.check_data(pipeline.transforms)
        if (origin := tokenizer_origin(runner)) is not None:
            level = logging.WARNING if origin.get('path') == 'random weights' else logging.INFO
            print_log(f'Visual tokens: {origin}', logger='current', level=level)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Notes what the checkpoint says of itself; runs before its weights are put into the model."""
        self.loaded = meta_of(checkpoint)
        if isinstance(runner._test_loop, BaseLoop):  # it is built when a test begins
            self._check_trained_classes(runner)

    def before_test(self, runner: Runner) -> None:
        """Runs once, after everything is built and loaded."""
        dataset = runner.test_dataloader.dataset
        self._check_trained_classes(runner)
        check_num_classes(runner.model.module if is_model_wrapper(runner.model) else runner.model, dataset)

    def _check_trained_classes(self, runner: Runner) -> None:
        dataset = runner.test_dataloader.dataset
        trained = (self.loaded.get('dataset_meta') or {}).get('classes')
        check_same_classes(classes_of(dataset), path_of(dataset), trained and tuple(trained), 'the checkpoint')


def check_size(loader: DataLoader) -> None:
    """Raises ValueError when a loader has no batch to give."""
    if not len(loader):
        raise ValueError(f'{path_of(loader.dataset)} has {len(loader.dataset)} images, less than one batch of '
                         f'{loader.batch_size} for each of {get_world_size()} processes; set a smaller '
                         'train_dataloader.batch_size')
