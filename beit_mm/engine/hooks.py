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
from mmpretrain.structures import DataSample
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.checkpoint.names import FORMAT_VERSION
from beit_mm.engine.checks import backbone_of, preprocessing_of_model, tokenizer_provenance, unwrap
from beit_mm.registry import HOOKS


@HOOKS.register_module()
class RankSeedHook(Hook):
    """Seeds each process with the run's seed plus its rank, once the model stands.

    mmengine seeds all alike: sixteen processes would mix, cut and drop with the same draws. (Its own
    `randomness.diff_rank_seed` takes the seed away from the samplers.) Weights are drawn before and stay the same in
    all processes; samples are drawn by their own keys (see datasets.samplers) and stay the same for any number
    of them; process 0 draws what a run of one process draws.

    Source: microsoft/unilm `beit/run_class_finetuning.py`: seed = args.seed + rank.
    """

    def before_train(self, runner: Runner) -> None:
        """Runs once, after the weights are drawn or loaded."""
        if get_rank() > 0:
            set_random_seed(runner.seed + get_rank())


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
        print_log(
            f'{path} cannot be read, another image stands in ({len(self.found)} so far).',
            logger='current',
            level=logging.WARNING,
        )
        limit = max(self.max_rate * len(dataset), ALWAYS_TOLERATED)
        if len(self.found) > limit:
            raise RuntimeError(
                f'{len(self.found)} of {len(dataset)} images cannot be read, at most {limit:.0f} are '
                f'tolerated; see {listing}, or raise max_rate of UnreadableImagesHook'
            )


VALUES = (str, int, float, bool, type(None))


@HOOKS.register_module()
class CheckpointMetaHook(Hook):
    """Writes the config, the logged history, the preprocessing and the origin of the visual tokens as plain values.

    mmengine stores its history as pickled objects and its config as Python text: torch.load refuses the first, the
    second has to be executed to be read. A file of tensors and plain values needs neither.
    """

    priority = 'VERY_LOW'  # last to touch the file, so that nothing is added after it

    def before_save_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Replaces the history's objects, and adds what only the run knows of its weights."""
        meta = checkpoint['meta']
        meta['beit_mm_format'] = FORMAT_VERSION
        meta['config_dict'] = plain_values(runner.cfg.to_dict())
        meta['preprocessing'] = preprocessing_of_model(unwrap(runner))
        meta['architecture'] = architecture_of_model(unwrap(runner))
        if (origin := tokenizer_provenance(unwrap(runner))) is not None:
            meta['tokenizer'] = origin
        hub = checkpoint['message_hub']
        scalars, info = hub['log_scalars'], hub['runtime_info']
        info = {key: value.item() if isinstance(value, np.generic) else value for key, value in info.items()}
        info = {key: value for key, value in info.items() if _is_plain(value)}
        checkpoint['message_hub'] = dict(
            log_scalars={key: _buffer_to_tensors(buffer) for key, buffer in scalars.items()},
            runtime_info=info,
            resumed_keys={key: flag for key, flag in hub['resumed_keys'].items() if key in info or key in scalars},
        )

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict) -> None:
        """Restores the history, and says so when the tokens are not those of the earlier run.

        Raises:
            ValueError: a run is to go on from a file that holds weights only.
        """
        meta = checkpoint.get('meta', {})
        if runner.cfg.get('resume') and 'epoch' not in meta:
            raise ValueError(
                'The checkpoint holds weights without the state of a run: there is nothing to resume. To '
                'start a new run from it, name it as load_from instead of --resume.'
            )
        before, now = meta.get('tokenizer'), tokenizer_provenance(unwrap(runner))
        if before and now and _without_path(before) != _without_path(now):
            print_log(
                f'The checkpoint was trained on the visual tokens of {before}; this run has {now}.',
                logger='current',
                level=logging.WARNING,
            )
        if 'message_hub' in checkpoint:
            scalars, info = checkpoint['message_hub']['log_scalars'], checkpoint['message_hub']['runtime_info']
            for key, history in scalars.items():
                if isinstance(history, dict):  # ours; mmengine's own are read as they are
                    scalars[key] = HistoryBuffer(
                        history['values'].numpy(), history['counts'].numpy(), history['max_length']
                    )
            _forget_foreign_files(runner, info)


def plain_values(value: Any) -> Any:
    """Nested containers and plain values of a config; anything else by its text."""
    if isinstance(value, dict):
        return {key if isinstance(key, VALUES) else str(key): plain_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain_values, value)) if type(value) in (list, tuple) else [*map(plain_values, value)]
    return value if type(value) in VALUES else str(value)


def architecture_of_model(model: nn.Module) -> dict:
    """What the shapes of a backbone's weights do not show: `num_heads`, and the blocks `out_indices`."""
    backbone = backbone_of(model)
    if backbone is None:
        return {}
    return dict(num_heads=backbone.num_heads, out_indices=list(backbone.out_indices))


def _forget_foreign_files(runner: Runner, info: dict) -> None:
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


def _is_plain(value: object) -> bool:
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return isinstance(value, (*VALUES, torch.Tensor))


def _without_path(origin: dict) -> dict:
    return {key: value for key, value in origin.items() if not key.endswith('path')}


def _buffer_to_tensors(buffer: HistoryBuffer) -> dict:
    values, counts = buffer.data
    return dict(
        values=torch.from_numpy(np.asarray(values, dtype=np.float64)),
        counts=torch.from_numpy(np.asarray(counts, dtype=np.float64)),
        max_length=buffer.max_length,
    )


CHUNK = 1024  # images compared with all training images at a time


def knn_predict(
    features: Tensor, known: Tensor, labels: Tensor, num_classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Classes by a vote of the nearest neighbours, each weighted with exp(cosine / temperature).

    Args:
        features: (N, C) to be classified.
        known: (M, C) whose classes are known.
        labels: int64 (M,) classes of `known`.
        num_classes: number of classes.
        k: neighbours that vote; at most M do.
        temperature: the lower, the more the nearest count.

    Returns:
        int64 (N,).

    Source: facebookresearch/dino `eval_knn.py`.
    """
    known = F.normalize(known, dim=1)
    predicted = []
    for chunk in F.normalize(features, dim=1).split(CHUNK):
        cosine, nearest = (chunk @ known.T).topk(min(k, len(known)), dim=1)
        votes = cosine.new_zeros(len(chunk), num_classes)
        votes.scatter_add_(1, labels[nearest], ((cosine - 1) / temperature).exp())
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def index_of(sample: DataSample) -> int:
    """Position of a image in its dataset."""
    if 'sample_idx' not in sample:
        raise ValueError(
            "KNNHook tells images apart by 'sample_idx'; its pipelines end with PackInputs without "
            'meta_keys, or with sample_idx among them'
        )
    return sample.sample_idx


@HOOKS.register_module()
class KNNHook(Hook):
    """Logs `knn_accuracy` (percent) after each validation: labelled images classified by their nearest neighbours.

    The features are the mean of a block's patch tokens for the whole, unmasked image. Loss and `mim_acc` say how well
    the task is solved, this says what the features are good for; the labels have no part in training.

    Args:
        train_dataloader, val_dataloader: configs with an ImageFolder whose pipeline crops to one size and ends with
            PackInputs; a subset of the images will do. They are read at every validation.
        layer: block whose output is taken, from 0, negative from the end; None: the last of the middle third.
        k, temperature: see `knn_predict`.

    Raises:
        ValueError: the two datasets have different classes.
    """

    def __init__(
        self,
        train_dataloader: dict,
        val_dataloader: dict,
        layer: int | None = None,
        k: int = 20,
        temperature: float = 0.07,
    ):
        self.configs = train_dataloader, val_dataloader
        self.loaders: list[DataLoader] = []
        self.layer = layer
        self.k = k
        self.temperature = temperature

    def before_train(self, runner: Runner) -> None:
        """Builds the loaders, so that a wrong path shows before the first step."""
        self.loaders = [runner.build_dataloader(config, seed=0) for config in self.configs]
        train, val = (loader.dataset.metainfo['classes'] for loader in self.loaders)
        if train != val:
            raise ValueError(
                f'KNNHook: its train_dataloader has {len(train)} classes, its val_dataloader {len(val)}, '
                'or their names differ; give both datasets the same classes=...'
            )

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Classifies the images; runs before the log is written."""
        if not self.loaders:  # a validation outside training
            return
        model = unwrap(runner)
        (known, labels), (features, truth) = (self._extract(model, loader) for loader in self.loaders)
        classes = len(self.loaders[0].dataset.metainfo['classes'])
        predicted = knn_predict(features, known, labels, classes, self.k, self.temperature)
        accuracy = 100 * (predicted == truth).float().mean().item()
        runner.message_hub.update_scalar('val/knn_accuracy', accuracy)
        if metrics is not None:
            metrics['knn_accuracy'] = accuracy  # CheckpointHook's save_best can follow it

    @torch.no_grad()
    def _extract(self, model: nn.Module, loader: DataLoader) -> tuple[Tensor, Tensor]:
        """Features (N, C) and classes (N,) of a dataset, in its order, on the model's device."""
        blocks = model.backbone.blocks
        block = blocks[2 * len(blocks) // 3 - 1 if self.layer is None else self.layer]
        preprocessor = model.data_preprocessor
        device = preprocessor.mean.device
        taken, rows = [], []
        handle = block.register_forward_hook(lambda module, inputs, tokens: taken.append(tokens[:, 1:].mean(dim=1)))
        try:
            for batch in loader:
                images = (batch['inputs'].to(device).float() - preprocessor.mean) / preprocessor.std
                with torch.autocast(device.type, torch.bfloat16, enabled=device.type == 'cuda'):
                    model.backbone(images)
                rows += [(index_of(sample), int(sample.gt_label)) for sample in batch['data_samples']]
        finally:
            handle.remove()
        features = torch.cat(all_gather(torch.cat(taken).float()))
        index, label = torch.cat(all_gather(torch.tensor(rows, device=device))).unbind(1)
        # Each image once: the samplers repeat some to give each process as many.
        order = index.new_full((len(loader.dataset),), -1)
        order[index] = torch.arange(len(index), device=device)
        order = order[order >= 0]  # drop_last leaves some out
        return features[order], label[order]
