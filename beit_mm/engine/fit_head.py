"""Fits the linear head of a classifier or segmentor to features of images or patches, which are computed once."""

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from mmengine.runner import Runner
from mmpretrain.models import ImageClassifier
from torch import Tensor
from torch.utils.data import DataLoader

from beit_mm.engine.checkpoints import CheckpointHook, checkpoint_hook_of
from beit_mm.engine.checks import check_number_of_images
from beit_mm.engine.logs import ProgressHook
from beit_mm.engine.loops import validate_on
from beit_mm.engine.signals import end_workers, shield_workers
from beit_mm.engine.unreadable import UnreadableImagesHook, replaced_in
from beit_mm.errors import UserError, log
from beit_mm.features.evaluation import choose_penalty, mean_and_std
from beit_mm.files import atomic_file
from beit_mm.precision import inference_autocast

FEATURES = 'features.pt'  # dict(files, features=(n, C) of their images, as the head sees them)
MIN_FEATURES = 100  # that a head is fitted to, however short the time, and at least as many as classes
MIN_MAPS = 10  # images with label maps, however short the time
MIN_PATCHES, MAX_PATCHES = 2_000, 50_000  # that a head is fitted to
PATCHES_PER_SECOND = 3_000  # of the time left, times classes: a core then fits in a quarter of that time
FIT_SHARES = 0.1, 0.5  # time for the fit, as a share of that for the features of images, and of patches

Examples = tuple[Tensor, Tensor, Tensor]  # features (n, C), classes (n,) or their shares (n, K), image of each (n,)


class FittedHead(NamedTuple):
    images: int  # that the head was fitted to
    loss: float  # mean cross entropy of the images or patches that the head was fitted to
    line: str  # for the log: the penalty, and the accuracy on held-out images at each penalty that was tried
    features: Tensor  # (n, C)
    indices: Tensor  # (n,), in the dataset, of the image of each


@torch.no_grad()
def fit_head(
    model: Any,
    loader: DataLoader,
    seed: int,
    unreadable: UnreadableImagesHook,
    show: Callable[[int, int], bool] | None = None,
    max_patches: int = MAX_PATCHES,
) -> FittedHead:
    """Sets a linear head to what `choose_penalty` fits to the features of a loader's images, or of their patches.

    It needs a single process and no Runner. The model is left in evaluation mode.

    Args:
        model: on its device, a classifier whose head has a linear layer `fc`, or a SlidingSegmentor whose decode head
            has `conv_seg` alone.
        loader: shows each image once, not augmented; its samples have `sample_idx` and `unreadable`.
        seed: for drawing the images that are held out to choose the penalty.
        unreadable: lists and counts images that cannot be read, once it has begun in a folder.
        show: called after each batch with the number of batches that are done, and of all; True leaves out the others.
        max_patches: about how many patches a segmentor's head is fitted to.
    """
    check_number_of_images(loader)
    model.eval()
    segments = hasattr(model, 'decode_head')
    layer = model.decode_head.conv_seg if segments else model.head.fc
    per_image = math.ceil(max_patches / len(loader.dataset))
    generator = torch.Generator().manual_seed(seed)
    parts: list[Examples] = []
    images, replaced = 0, set()
    for done, batch in enumerate(loader, start=1):
        parts += model.labelled_patches(batch, per_image, generator) if segments else [images_of(model, batch)]
        images += len(batch['data_samples'])
        replaced |= replaced_in(batch)
        if show is not None and show(done, len(loader)):
            break
    unreadable.add_replaced(replaced, len(loader.dataset))

    features, targets, indices = map(torch.cat, zip(*parts, strict=True))  # N
    if not len(features):
        raise UserError('no patch of the images to learn from is at least half labelled; label more of each image')
    mean, std = mean_and_std(features)
    standardised = (features - mean) / std
    fitted, found = choose_penalty(standardised, targets, len(layer.weight), indices, by_class=segments, seed=seed)
    weight = fitted.weight / std
    layer.weight.copy_(weight.view_as(layer.weight))
    layer.bias.copy_(fitted.bias - weight @ mean)
    loss = F.cross_entropy(fitted(standardised), targets)
    line = f'The head is fitted to {len(targets):,} features: {found}'
    return FittedHead(images, loss.item(), line, features.cpu(), indices.cpu())


def images_of(model: ImageClassifier, batch: Mapping[str, Any]) -> Examples:
    """Features of the images of a batch."""
    inputs = model.data_preprocessor(batch)['inputs']
    with inference_autocast(inputs.device):
        features = model.head.pre_logits(model.extract_feat(inputs)).float()  # B, C
    rows = [(sample.sample_idx, int(sample.gt_label)) for sample in batch['data_samples']]
    indices, labels = torch.tensor(rows, device=features.device).unbind(1)
    return features, labels, indices


def fit_head_of_run(
    runner: Runner,
    progress: ProgressHook,
    deadline: float = math.inf,
    max_validated: float = math.inf,
    keep_features: bool = True,
) -> dict[str, Any]:
    """Fits the head of a Runner's classifier, validates it, and leaves log and checkpoint as a step of training would.

    To meet the `deadline` (time.monotonic) it leaves out the loader's last images and the same share of the held-out
    ones, of which it takes at most `max_validated`, but fits at least MIN_FEATURES. With `keep_features` those of a
    classifier's images go to FEATURES in the work directory. Returns the number `validated`, and a `note` if images
    were left out.
    """
    loader, held_out = runner.train_dataloader, min(len(runner.val_dataloader.dataset), max_validated)
    segments = hasattr(runner.model, 'decode_head')
    least = math.ceil((MIN_MAPS if segments else max(MIN_FEATURES, runner.model.head.num_classes)) / loader.batch_size)
    validation = held_out / len(loader.dataset)  # takes as long for an image
    (unreadable,) = (hook for hook in runner.hooks if isinstance(hook, UnreadableImagesHook))

    def show(done: int, batches: int) -> bool:
        seconds_per_batch = (time.monotonic() - began) / done * (1 + FIT_SHARES[segments] + validation)
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
    most = (deadline - began) * PATCHES_PER_SECOND / runner.model.num_classes if segments else 0
    max_patches = int(min(MAX_PATCHES, max(MIN_PATCHES, most)))
    progress.begin_batches()
    shield_workers(loader)
    try:
        fitted = fit_head(runner.model, loader, runner.seed, unreadable, show, max_patches)
    finally:
        end_workers(loader)
    seconds = time.monotonic() - began
    log(fitted.line)
    if keep_features and not segments:
        images = getattr(loader.dataset, 'dataset', loader.dataset)  # a balanced dataset repeats some of them
        files = [images.get_data_info(index)['img_path'] for index in fitted.indices.tolist()]
        with atomic_file(Path(runner.work_dir, FEATURES)) as file:
            torch.save(dict(files=files, features=fitted.features), file)
    row = dict(iter=0, loss=fitted.loss, time=seconds, data_time=0.0, images_per_second=fitted.images / seconds)
    runner.visualizer.add_scalars(row, step=0)  # as the validation, since no step is made
    dataset = runner.val_dataloader.dataset  # without images that cannot be read
    validated = math.ceil(min(len(dataset), max_validated) * fitted.images / len(loader.dataset))
    if validated < len(dataset):
        validate_on(runner, [place * len(dataset) // validated for place in range(validated)])
    shield_workers(runner.val_dataloader)
    runner.val_loop.run()
    checkpoint_hook_of(runner).save(runner, 'iter_1.pth', resumable=False, epoch=0, iter=1)
    runner.call_hook('after_run')
    note = f'The head was fitted to {fitted.images:,} of {len(loader.dataset):,} images, as many as the time allowed.'
    return dict(validated=validated, note='' if fitted.images == len(loader.dataset) else note)
