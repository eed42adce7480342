"""Fits a classifier's linear head to features of images, which are computed once."""

import math
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.runner import Runner
from mmpretrain.models import ImageClassifier
from torch.utils.data import DataLoader

from beit_mm.engine.checkpoints import CheckpointHook, checkpoint_hook_of
from beit_mm.engine.checks import check_number_of_images
from beit_mm.engine.logs import ProgressHook
from beit_mm.engine.loops import validate_on
from beit_mm.engine.signals import InterruptionHook, shield_workers, signals_handled
from beit_mm.engine.unreadable import UnreadableImagesHook, replaced_in
from beit_mm.errors import log
from beit_mm.features.evaluation import choose_penalty, mean_and_std
from beit_mm.precision import inference_autocast

MIN_FEATURES = 100  # that a head is fitted to, however short the time, and at least as many as classes


class FittedHead(NamedTuple):
    images: int  # that the head was fitted to
    loss: float  # mean cross entropy of the images that the head was fitted to
    line: str  # for the log: the penalty, and the accuracy on held-out images at each penalty that was tried


@torch.no_grad()
def fit_head(
    model: ImageClassifier,
    loader: DataLoader,
    seed: int,
    unreadable: UnreadableImagesHook,
    show: Callable[[int, int], bool] | None = None,
) -> FittedHead:
    """Sets a classifier's linear head to what `choose_penalty` fits to the features of a loader's images.

    It needs a single process and no Runner. The model is left in evaluation mode.

    Args:
        model: a classifier on its device, whose head has a linear layer `fc`.
        loader: shows each image once, not augmented; its samples have `sample_idx` and `unreadable`.
        seed: for drawing the images that are held out to choose the penalty.
        unreadable: lists and counts images that cannot be read, once it has begun in a folder.
        show: called after each batch with the number of batches that are done, and of all; True leaves out the others.
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
        if show is not None and show(done, len(loader)):
            break
    unreadable.add_replaced(replaced, len(loader.dataset))

    features = torch.cat(parts)  # N, C
    indices, labels = torch.tensor(rows, device=features.device).unbind(1)  # N
    mean, std = mean_and_std(features)
    layer, standardised = model.head.fc, (features - mean) / std
    fitted, found = choose_penalty(standardised, labels, len(layer.weight), indices, by_class=False, seed=seed)
    layer.weight.copy_(fitted.weight / std)
    layer.bias.copy_(fitted.bias - layer.weight @ mean)
    loss = F.cross_entropy(layer(features), labels)
    return FittedHead(len(features), loss.item(), f'The head is fitted to {len(features):,} features: {found}')


def fit_head_of_run(runner: Runner, progress: ProgressHook, deadline: float = math.inf) -> dict[str, Any]:
    """Fits the head of a Runner's classifier, validates it, and leaves log and checkpoint as a step of training would.

    A signal ends it after the batch. To meet the `deadline` (time.monotonic) it leaves out the loader's last images and
    the same share of the held-out ones, but fits at least MIN_FEATURES. Returns the number `validated`, and a `note` if
    images were left out.
    """
    loader, held_out = runner.train_dataloader, len(runner.val_dataloader.dataset)
    least = math.ceil(max(MIN_FEATURES, runner.model.head.num_classes) / loader.batch_size)
    (unreadable,) = (hook for hook in runner.hooks if isinstance(hook, UnreadableImagesHook))
    (interruption,) = (hook for hook in runner.hooks if isinstance(hook, InterruptionHook))

    def show(done: int, batches: int) -> bool:
        if interruption.code:
            sys.exit(interruption.code)
        # the validation takes as long for an image; a tenth more is for the fit
        seconds_per_batch = (time.monotonic() - began) / done * (1.1 + held_out / len(loader.dataset))
        batches = int(min(batches, max(least, (deadline - began) / seconds_per_batch)))
        progress.show_batch(done, batches, 'features')
        return done >= batches

    runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)  # by which hooks recognise a training
    runner.call_hook('before_run')
    runner.model.init_weights()
    for hook in runner.hooks:
        if isinstance(hook, CheckpointHook | UnreadableImagesHook):  # others prepare steps of the optimizer
            hook.before_train(runner)
    began = time.monotonic()
    progress.begin_batches()
    shield_workers(loader)
    with signals_handled(runner):
        fitted = fit_head(runner.model, loader, runner.seed, unreadable, show)
    seconds = time.monotonic() - began
    log(fitted.line)
    row = dict(iter=0, loss=fitted.loss, time=seconds, data_time=0.0, images_per_second=fitted.images / seconds)
    runner.visualizer.add_scalars(row, step=0)  # as the validation, since no step is made
    dataset = runner.val_dataloader.dataset  # without images that cannot be read
    validated = math.ceil(len(dataset) * fitted.images / len(loader.dataset))
    if validated < len(dataset):
        validate_on(runner, [place * len(dataset) // validated for place in range(validated)])
    shield_workers(runner.val_dataloader)
    runner.val_loop.run()
    checkpoint_hook_of(runner).save(runner, 'iter_1.pth', resumable=False, epoch=0, iter=1)
    runner.call_hook('after_run')
    note = f'The head was fitted to {fitted.images:,} of {len(loader.dataset):,} images, as many as the time allowed.'
    return dict(validated=validated, note='' if fitted.images == len(loader.dataset) else note)
