"""Fits a classifier's linear head to features of all images, which are computed once."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from mmengine.runner import Runner
from mmpretrain.models import ImageClassifier
from torch.utils.data import DataLoader

from beit_mm.engine.checkpoints import CheckpointHook, checkpoint_hook_of
from beit_mm.engine.checks import check_number_of_images
from beit_mm.engine.logs import ProgressHook
from beit_mm.engine.signals import InterruptionHook, shield_workers, signals_handled
from beit_mm.engine.unreadable import UnreadableImagesHook, replaced_in
from beit_mm.errors import log
from beit_mm.features.evaluation import choose_penalty, mean_and_std
from beit_mm.precision import inference_autocast


class FittedHead(NamedTuple):
    loss: float  # mean cross entropy of the images that the head was fitted to
    line: str  # for the log: the penalty, and the accuracy on held-out images at each penalty that was tried


@torch.no_grad()
def fit_head(
    model: ImageClassifier,
    loader: DataLoader,
    seed: int,
    unreadable: UnreadableImagesHook,
    show: Callable[[int, int], None] | None = None,
) -> FittedHead:
    """Sets a classifier's linear head to what `choose_penalty` fits to the features of all images of a loader.

    It needs a single process and no Runner. The model is left in evaluation mode.

    Args:
        model: a classifier on its device, whose head has a linear layer `fc`.
        loader: shows each image once, not augmented; its samples have `sample_idx` and `unreadable`.
        seed: for drawing the images that are held out to choose the penalty.
        unreadable: lists and counts images that cannot be read, once it has begun in a folder.
        show: called after each batch with the number of batches that are done, and of all.
    """
    check_number_of_images(loader)
    model.eval()
    parts, rows, replaced = [], [], set()
    for done, batch in enumerate(loader, start=1):
        inputs = model.data_preprocessor(batch)['inputs']
        with inference_autocast(inputs.device):
            parts.append(model.head.pre_logits(model.extract_feat(inputs)).float())  # B, C
        rows += [(sample.sample_idx, int(sample.gt_label)) for sample in batch['data_samples']]
        replaced |= replaced_in(batch)
        if show is not None:
            show(done, len(loader))
    unreadable.add_replaced(replaced, len(loader.dataset))

    features = torch.cat(parts)  # N, C
    indices, labels = torch.tensor(rows, device=features.device).unbind(1)  # N
    mean, std = mean_and_std(features)
    layer, standardised = model.head.fc, (features - mean) / std
    fitted, found = choose_penalty(standardised, labels, len(layer.weight), indices, by_class=False, seed=seed)
    layer.weight.copy_(fitted.weight / std)
    layer.bias.copy_(fitted.bias - layer.weight @ mean)
    loss = F.cross_entropy(layer(features), labels)
    return FittedHead(loss.item(), f'The head is fitted to {len(features):,} features: {found}')


def fit_head_of_run(runner: Runner, progress: ProgressHook) -> None:
    """Fits the head of a Runner's classifier, validates it, and leaves log and checkpoint as a step of training would.

    A signal ends it after the batch.
    """
    loader = runner.train_dataloader
    (unreadable,) = (hook for hook in runner.hooks if isinstance(hook, UnreadableImagesHook))
    (interruption,) = (hook for hook in runner.hooks if isinstance(hook, InterruptionHook))

    def show(done: int, batches: int) -> None:
        progress.show_batch(done, batches, 'features')
        if interruption.code:
            sys.exit(interruption.code)

    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)  # by which hooks recognise a training
    runner.call_hook('before_run')
    runner.model.init_weights()
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook | UnreadableImagesHook):  # others prepare steps of the optimizer
            hook.before_train(runner)
    began = time.monotonic()
    progress.begin_batches()
    shield_workers(loader)
    shield_workers(runner.val_dataloader)
    with signals_handled(runner):
        fitted = fit_head(runner.model, loader, runner.seed, unreadable, show)
    seconds = time.monotonic() - began
    log(fitted.line)
    row = dict(iter=0, loss=fitted.loss, time=seconds, data_time=0.0, images_per_second=len(loader.dataset) / seconds)
    runner.visualizer.add_scalars(row, step=0)  # as the validation, since no step is made
    runner.val_loop.run()
    checkpoint_hook_of(runner).save(runner, 'iter_1.pth', resumable=False, epoch=0, iter=1)
    runner.call_hook('after_run')
