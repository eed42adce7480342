"""Do the labels of the first batch fit the model?"""
import logging
from collections.abc import Sequence

import torch
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.model import is_model_wrapper
from mmengine.runner import Runner
from mmengine.structures import BaseDataElement

from beit_mm.registry import HOOKS

WARN_IGNORED = 0.5  # part of the pixels that may be ignored without a warning


@HOOKS.register_module()
class LabelCheckHook(Hook):
    """Looks at the labels of a run's first batch, whatever dataset and pipeline they come from.

    With a wrong `num_classes` or `reduce_zero_label` training ends in an assertion inside of a GPU, or learns classes
    that are all one off.

    Raises:
        ValueError: a label that the model has no class for, with the name of its file; or no labelled pixel at all.
    """

    def __init__(self):
        self.looked = False

    def before_train(self, runner: Runner) -> None:
        """Each training looks again."""
        self.looked = False

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Checks the first batch, before the model sees it."""
        if not self.looked:
            self.looked = True
            model = runner.model.module if is_model_wrapper(runner.model) else runner.model
            head = model.decode_head
            check_labels(data_batch['data_samples'], head.num_classes, head.ignore_index)


def check_labels(samples: Sequence[BaseDataElement], num_classes: int, ignore_index: int) -> None:
    """Raises ValueError when labels do not fit; warns when most pixels are ignored."""
    ignored = pixels = 0
    for sample in samples:
        labels = sample.gt_sem_seg.data
        reduced = sample.get('reduce_zero_label', False)
        counted = labels != ignore_index
        ignored += int((~counted).sum())
        pixels += labels.numel()
        if len(wrong := torch.unique(labels[counted & ((labels < 0) | (labels >= num_classes))])):
            advice = ('reduce_zero_label=True has already made labels one lower' if reduced else
                      'if 0 marks unlabelled pixels, reduce_zero_label=True')
            raise ValueError(
                f'{sample.get("seg_map_path", "an annotation")} gives label {wrong[0]}, the model has num_classes='
                f'{num_classes} (0 to {num_classes - 1}); set num_classes of every head to that of the data ({advice})')
    cause = f'label {ignore_index}' + (', and label 0 with reduce_zero_label=True' if reduced else '')
    if ignored == pixels:
        raise ValueError(f'every pixel of the first batch is ignored ({cause}), {sample.get("seg_map_path")} among '
                         'them; are these annotations of another kind?')
    if ignored > WARN_IGNORED * pixels:
        print_log(f'{ignored / pixels:.0%} of the pixels of the first batch are ignored ({cause}). Is it meant?',
                  logger='current', level=logging.WARNING)
