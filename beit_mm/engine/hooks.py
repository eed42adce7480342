"""What happens around the steps of a run: seeds, throughput, neighbours."""

import os
import random
import time
from collections import deque

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import all_gather, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.logging import print_log
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.datasets.samplers import mixed_seed
from beit_mm.engine.checks import unwrap
from beit_mm.registry import HOOKS

HISTORY = 10_000  # steps of which the logged numbers are kept
DETERMINISTIC = (
    'Deterministic: on the same machine the same run gives the same bits. It costs time on a GPU: cuDNN chooses '
    'convolutions without measuring, gradients of indexing (bias tables, masked positions) and of attention are summed '
    'in a fixed order. Where a GPU has no such kernel, as for segmentation losses, torch names the operation and stops.'
)
CHUNK = 1024  # images compared with all training images at a time


@HOOKS.register_module()
class StepSeedHook(Hook):
    """Seeds all random generators before each training step, from the run's seed, the rank and the step's number.

    What a step draws (mixup, drop path, erasing) then follows from these alone: a run that goes on draws what it would
    have drawn, whatever was loaded, validated or drawn meanwhile, and a single step can be run again. Weights are drawn
    before and samples by their own keys (see datasets.samplers), so both are the same for any number of processes.
    """

    priority = 'VERY_HIGH'

    def before_run(self, runner: Runner) -> None:
        """Completes mmengine's `randomness.deterministic`, before the first multiplication of matrices on a GPU."""
        if runner.deterministic:
            os.environ.setdefault('CUBLAS_WORKSPACE_CONFIG', ':4096:8')  # without it cuBLAS is refused
            print_log(DETERMINISTIC, logger='current')

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict | None = None) -> None:
        """Seeds the generators that a step may draw from."""
        seed = mixed_seed(runner.seed, get_rank(), runner.iter)
        random.seed(seed)
        np.random.seed(seed >> 32)
        torch.default_generator.manual_seed(seed >> 1)  # torch.manual_seed takes 1 ms where there is no GPU
        if torch.cuda.is_initialized():
            torch.cuda.manual_seed(seed >> 1)


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Logs `images_per_second` of all processes in the last 50 steps, with the wait for data, without validation.

    It also keeps mmengine's histories of logged numbers to 10,000 entries. They are copied whole at every step: at a
    million of them that takes 14 ms, and 64 MB in each checkpoint.
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
        for history in runner.message_hub.log_scalars.values():
            history.max_length = HISTORY


def knn_predict(
    features: Tensor, bank: Tensor, labels: Tensor, num_classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Classes, int64 (N,), by a vote of the nearest neighbours, each weighted with exp(cosine / temperature).

    Args:
        features: (N, C) to be classified.
        bank: (M, C) of images with labels.
        labels: int64 (M,) of the bank.
        num_classes: number of classes.
        k: neighbours that vote; at most M do.
        temperature: the lower, the more the nearest count.

    Source: facebookresearch/dino `eval_knn.py`.
    """
    bank = F.normalize(bank, dim=1)
    predicted = []
    for chunk in F.normalize(features, dim=1).split(CHUNK):
        cosine, nearest = (chunk @ bank.T).topk(min(k, len(bank)), dim=1)
        votes = cosine.new_zeros(len(chunk), num_classes)
        votes.scatter_add_(1, labels[nearest], ((cosine - 1) / temperature).exp())
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


@HOOKS.register_module()
class KNNHook(Hook):
    """Logs `knn_accuracy` (percent) after each validation: labelled images classified by their nearest neighbours.

    The features are the mean of the patch tokens after two thirds of the blocks, for the whole, unmasked image. The
    labels have no part in training.

    Args:
        train_dataloader, val_dataloader: configs with an ImageFolder whose pipeline crops to one size and ends with
            PackInputs; a subset of the images will do. They are read at every validation.
        k: neighbours that vote.

    Raises:
        ValueError: the two datasets have different classes, or samples lack `sample_idx`.
    """

    def __init__(self, train_dataloader: dict, val_dataloader: dict, k: int = 20):
        self.configs = train_dataloader, val_dataloader
        self.loaders: list[DataLoader] = []
        self.k = k

    def before_train(self, runner: Runner) -> None:
        """Builds the loaders, so that a wrong path shows before the first step."""
        self.loaders = [runner.build_dataloader(config, seed=0) for config in self.configs]
        train, val = (loader.dataset.metainfo['classes'] for loader in self.loaders)
        if train != val:
            raise ValueError(
                f'KNNHook: its train_dataloader has {len(train)} classes, its val_dataloader {len(val)}, or their '
                'names differ; give both datasets the same classes=...'
            )

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Classifies the images; runs before the log is written."""
        if not self.loaders:  # a validation outside training
            return
        (bank, labels), (features, truth) = (extract(unwrap(runner), loader) for loader in self.loaders)
        num_classes = len(self.loaders[0].dataset.metainfo['classes'])
        predicted = knn_predict(features, bank, labels, num_classes, self.k)
        accuracy = 100 * (predicted == truth).float().mean().item()
        runner.message_hub.update_scalar('val/knn_accuracy', accuracy)
        if metrics is not None:
            metrics['knn_accuracy'] = accuracy  # CheckpointHook's save_best can follow it


@torch.no_grad()
def extract(model: nn.Module, loader: DataLoader) -> tuple[Tensor, Tensor]:
    """Features (N, C) and classes (N,) of a dataset, in its order, on the model's device."""
    blocks = model.backbone.blocks
    preprocessor = model.data_preprocessor
    device = preprocessor.mean.device
    pooled, rows = [], []
    handle = blocks[2 * len(blocks) // 3 - 1].register_forward_hook(
        lambda module, inputs, tokens: pooled.append(tokens[:, 1:].mean(dim=1))
    )
    try:
        for batch in loader:
            if 'sample_idx' not in batch['data_samples'][0]:
                raise ValueError("KNNHook needs 'sample_idx' among the meta_keys of PackInputs, where it is by default")
            images = (batch['inputs'].to(device).float() - preprocessor.mean) / preprocessor.std
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
                model.backbone(images)
            rows += [(sample.sample_idx, int(sample.gt_label)) for sample in batch['data_samples']]
    finally:
        handle.remove()
    features = torch.cat(all_gather(torch.cat(pooled).float()))
    index, labels = torch.cat(all_gather(torch.tensor(rows, device=device))).unbind(1)
    _, once = np.unique(index.cpu(), return_index=True)  # samplers repeat images to give each process as many
    return features[once], labels[once]
