"""What happens around the steps of a run: seeds, throughput, unreadable images, checkpoints' meta, neighbours."""

import logging
import time
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import all_gather, get_rank, get_world_size
from mmengine.hooks import CheckpointHook, Hook
from mmengine.logging import HistoryBuffer, print_log
from mmengine.runner import Runner, set_random_seed
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.checkpoint.names import FORMAT_VERSION
from beit_mm.engine.checks import backbone_of, preprocessing_of_model, tokenizer_provenance, unwrap
from beit_mm.registry import HOOKS

MIN_TOLERATED = 10  # unreadable images that are no reason to stop, however small the dataset
PLAIN_TYPES = (str, int, float, bool, type(None))
CHUNK = 1024  # images compared with all training images at a time


@HOOKS.register_module()
class RankSeedHook(Hook):
    """Seeds each process with the run's seed plus its rank, once the model stands.

    mmengine seeds all alike, so all processes would mix, cut and drop with the same draws; its own
    `randomness.diff_rank_seed` takes the seed away from the samplers. Weights are drawn before, and samples by their
    own keys (see datasets.samplers), so both stay the same for any number of processes.

    Source: microsoft/unilm `beit/run_class_finetuning.py`: seed = args.seed + rank.
    """

    def before_train(self, runner: Runner) -> None:
        """Runs once, after the weights are drawn or loaded."""
        if get_rank() > 0:
            set_random_seed(runner.seed + get_rank())


@HOOKS.register_module()
class ThroughputHook(Hook):
    """Logs `images_per_second` of all processes in the last 50 steps, with the wait for data, without validation."""

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


@HOOKS.register_module()
class UnreadableImagesHook(Hook):
    """Names each image that the dataset's `on_error='skip'` replaced, and stops a run with too many of them.

    The paths stand in the log and in `unreadable_images_rank{rank}.txt` in the work directory. In classification and
    segmentation `unreadable` has to be among the `meta_keys` of the pipeline's last transform.

    Args:
        max_rate: part of the dataset's images that may be unreadable; 10 images are tolerated in any case.

    Raises:
        RuntimeError: too many images are unreadable.
    """

    def __init__(self, max_rate: float = 0.001):
        self.max_rate = max_rate
        self.unreadable: set[int] = set()

    def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: dict, outputs: dict) -> None:
        """Notes the images of this batch that were replaced."""
        inputs, dataset = data_batch['inputs'], runner.train_dataloader.dataset
        if isinstance(inputs, dict):
            replaced = inputs['unreadable'].tolist()
        else:
            replaced = [sample.get('unreadable', -1) for sample in data_batch['data_samples']]
        listing = Path(runner.work_dir) / f'unreadable_images_rank{get_rank()}.txt'
        limit = max(self.max_rate * len(dataset), MIN_TOLERATED)
        for index in set(replaced) - self.unreadable - {-1}:
            self.unreadable.add(index)
            count, path = len(self.unreadable), dataset.get_data_info(index)['img_path']
            with listing.open('a') as file:
                file.write(f'{path}\n')
            message = f'{path} cannot be read, another image stands in ({count} so far).'
            print_log(message, logger='current', level=logging.WARNING)
            if count > limit:
                raise RuntimeError(
                    f'{count} of {len(dataset)} images cannot be read, at most {limit:.0f} are tolerated; see '
                    f'{listing}, or raise max_rate of UnreadableImagesHook'
                )


@HOOKS.register_module()
class CheckpointMetaHook(Hook):
    """Writes the config, the logged history, the preprocessing and the origin of the visual tokens as plain values.

    mmengine stores its history as pickled objects, which torch.load refuses, and its config as Python text, which has
    to be executed to be read.
    """

    priority = 'VERY_LOW'  # last to touch the file, so that nothing is added after it

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replaces the history's objects, and adds what only the run knows of its weights."""
        model, meta, hub = unwrap(runner), checkpoint['meta'], checkpoint['message_hub']
        meta['beit_mm_format'] = FORMAT_VERSION
        meta['config_dict'] = plain_values(runner.cfg.to_dict())
        meta['preprocessing'] = preprocessing_of_model(model)
        backbone = backbone_of(model)
        meta['architecture'] = {}  # what the shapes of the weights do not show
        if backbone is not None:
            meta['architecture'] = dict(num_heads=backbone.num_heads, out_indices=list(backbone.out_indices))
        if (provenance := tokenizer_provenance(model)) is not None:
            meta['tokenizer'] = provenance
        storable = (*PLAIN_TYPES, np.generic, Tensor, dict, list, tuple)
        info = {key: plain_values(value) for key, value in hub['runtime_info'].items() if isinstance(value, storable)}
        scalars = {}
        for key, history in hub['log_scalars'].items():
            values, counts = (torch.from_numpy(np.asarray(numbers, np.float64)) for numbers in history.data)
            scalars[key] = dict(values=values, counts=counts, max_length=history.max_length)
        resumed = {key: flag for key, flag in hub['resumed_keys'].items() if key in info or key in scalars}
        checkpoint['message_hub'] = dict(log_scalars=scalars, runtime_info=info, resumed_keys=resumed)

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Restores the history, and says so when the tokens are not those of the earlier run.

        Raises:
            ValueError: a run is to go on from a file that holds weights only.
        """
        meta = checkpoint.get('meta', {})
        if runner.cfg.get('resume') and 'epoch' not in meta:
            raise ValueError(
                'The checkpoint holds weights without the state of a run: there is nothing to resume. To start a new '
                'run from it, name it as load_from instead of --resume.'
            )
        before, now = meta.get('tokenizer'), tokenizer_provenance(unwrap(runner))
        if before and now and any(before.get(k) != now.get(k) for k in {*before, *now} if not k.endswith('path')):
            message = f'The checkpoint was trained on the visual tokens of {before}; this run has {now}.'
            print_log(message, logger='current', level=logging.WARNING)
        if 'message_hub' in checkpoint:
            scalars = checkpoint['message_hub']['log_scalars']
            for key, history in scalars.items():
                if isinstance(history, dict):  # ours; mmengine's own are read as they are
                    values, counts = history['values'].numpy(), history['counts'].numpy()
                    scalars[key] = HistoryBuffer(values, counts, history['max_length'])
            forget_foreign_files(runner, checkpoint['message_hub']['runtime_info'])


def plain_values(value: Any) -> Any:
    """Nested containers with their plain values and tensors; anything else by its text."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, dict):
        return {key if isinstance(key, PLAIN_TYPES) else str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        items = map(plain_values, value)
        return tuple(items) if type(value) is tuple else list(items)
    return value if type(value) in (*PLAIN_TYPES, Tensor) else str(value)


def forget_foreign_files(runner: Runner, info: dict) -> None:
    """Takes out of a file's `runtime_info` what names no checkpoint of this run: CheckpointHook would delete it."""
    folders = [runner.work_dir, *(hook.out_dir for hook in runner.hooks if isinstance(hook, CheckpointHook))]
    folders = [Path(folder).resolve() for folder in folders if folder]
    for key in [key for key in info if key.startswith('best_ckpt')]:
        path = Path(str(info[key])).resolve()
        if not (path.name.startswith('best_') and path.is_file() and set(folders) & {path.parent, path.parent.parent}):
            del info[key]
    resumed, ids = runner.cfg.get('load_from'), info.get('keep_ckpt_ids', [])
    elsewhere = resumed and Path(resumed).resolve().parent not in folders
    if elsewhere or not (isinstance(ids, list) and all(type(step) is int for step in ids)):
        info.pop('keep_ckpt_ids', None)


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
