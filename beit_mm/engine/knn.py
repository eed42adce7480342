"""Labelled images and patches classified by their nearest neighbours after each validation."""

from collections.abc import Iterator

import torch
from mmengine.dataset import BaseDataset
from mmengine.dist import all_gather_object, get_rank, get_world_size
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.engine.steps import unwrap
from beit_mm.features.probing import (
    Standardise,
    image_features,
    knn_predict,
    knn_shares,
    mean_iou,
    patch_dataset,
    patch_features,
    pixel_confusion,
    sample_patches,
)
from beit_mm.models.beit import backbone_of
from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError


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
        ValueError: the two datasets have different classes, samples lack `sample_idx`, or the model has no
            BEiTBackbone.
    """

    def __init__(self, train_dataloader: dict, val_dataloader: dict, k: int = 20):
        self.configs = train_dataloader, val_dataloader
        self.loaders: list[DataLoader] = []
        self.k = k

    def before_train(self, runner: Runner) -> None:
        """Builds the loaders, so that a wrong path shows before the first step."""
        probed_backbone(self, unwrap(runner))
        self.loaders = [runner.build_dataloader(config, seed=0) for config in self.configs]
        check_classes(self, *(loader.dataset for loader in self.loaders))

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Classifies the images; runs before the log is written."""
        if not self.loaders:  # a validation outside training
            return
        model = unwrap(runner)
        backbone, pixels = probed_backbone(self, model), model.data_preprocessor
        (bank, labels), (features, truth) = (
            image_features(backbone, pixels.mean, pixels.std, loader) for loader in self.loaders
        )
        num_classes = len(self.loaders[0].dataset.metainfo['classes'])
        predicted = knn_predict(features, bank, labels, num_classes, self.k)
        accuracy = 100 * (predicted == truth).float().mean().item()
        runner.message_hub.update_scalar('val/knn_accuracy', accuracy)
        if metrics is not None:
            metrics['knn_accuracy'] = accuracy  # CheckpointHook's save_best can follow it


@HOOKS.register_module()
class DenseKNNHook(Hook):
    """Logs `dense_knn_miou` (percent) after each validation: pixels classified by the nearest patches of other images.

    The features are those of KNNHook, of each patch; see docs/features.md. The labels have no part in training. mmseg
    is not needed.

    Args:
        train, val: configs of SegmentationFolders without type and pipeline, as
            `dict(data_root='data/camvid', classes='classes.txt', reduce_zero_label=True,
            data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'))`.
        short_side: of the images, which are shown whole, in pixels; None: the backbone's image size.
        k: neighbours that vote.
        max_images: of each of the two that are looked at, evenly spread.
        max_patches: of the training images that may be neighbours, drawn at random, the same at each validation.

    Raises:
        ValueError: a number below 1; when training starts, the two datasets have different classes, or the model has
            no BEiTBackbone for RGB images.
    """

    def __init__(
        self,
        train: dict,
        val: dict,
        short_side: int | None = None,
        k: int = 30,
        max_images: int = 200,
        max_patches: int = 20_000,
    ):
        for name, number in dict(k=k, max_images=max_images, max_patches=max_patches).items():
            if number < 1:
                raise UserError(f'DenseKNNHook: {name} is {number}; expected 1 or more')
        self.configs = train, val
        self.datasets: list[SegmentationFolder] = []
        self.short_side = short_side
        self.k = k
        self.max_images = max_images
        self.max_patches = max_patches

    def before_train(self, runner: Runner) -> None:
        """Lists the images, so that a wrong path shows before the first step."""
        backbone = probed_backbone(self, unwrap(runner))
        self.datasets = [patch_dataset(backbone, self.short_side, **config) for config in self.configs]
        check_classes(self, *self.datasets)
        if (number := len(self._rows(self.datasets[0]))) < get_world_size():
            raise UserError(f'DenseKNNHook: {number} training images for {get_world_size()} processes; each needs one')

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        """Classifies the pixels; runs before the log is written."""
        if not self.datasets:  # a validation outside training
            return
        model = unwrap(runner)
        train, val = (self._maps(model, dataset) for dataset in self.datasets)
        num_classes = len(self.datasets[0].metainfo['classes'])
        shares = [-(-number // get_world_size()) for number in (len(self._rows(self.datasets[0])), self.max_patches)]
        own = [tensor.cpu() for tensor in sample_patches(train, num_classes, *shares)[:2]]
        device = model.data_preprocessor.mean.device
        # all processes together; objects, as each has a number of patches of its own
        bank, targets = (torch.cat(parts).to(device) for parts in zip(*all_gather_object(own), strict=True))
        standardise = Standardise(bank)
        bank = standardise(bank)
        counts = torch.zeros(num_classes, num_classes, dtype=torch.float64)
        for patches, labels in val:
            scores = knn_shares(standardise(patches.flatten(0, 1)), bank, targets, self.k)  # h*w, K
            counts += pixel_confusion(scores.view(*patches.shape[:2], -1), labels)
        miou = 100 * mean_iou(sum(all_gather_object(counts)))
        runner.message_hub.update_scalar('val/dense_knn_miou', miou)
        if metrics is not None:
            metrics['dense_knn_miou'] = miou  # CheckpointHook's save_best can follow it

    def _rows(self, dataset: SegmentationFolder) -> list[int]:
        """The images that are looked at."""
        number = min(self.max_images, len(dataset))
        return [row * len(dataset) // number for row in range(number)]

    def _maps(self, model: nn.Module, dataset: SegmentationFolder) -> Iterator[tuple[Tensor, Tensor]]:
        """What `patch_features` yields, of this process's part of the images."""
        rows = self._rows(dataset)[get_rank() :: get_world_size()]
        pixels = model.data_preprocessor
        return patch_features(probed_backbone(self, model), pixels.mean, pixels.std, map(dataset.__getitem__, rows))


def probed_backbone(hook: Hook, model: nn.Module) -> BEiTBackbone:
    """The backbone whose features a hook looks at; raises ValueError where the model has none of ours."""
    backbone = backbone_of(model)
    if backbone is None:
        raise UserError(
            f'{type(hook).__name__} looks at the blocks of a BEiTBackbone; the {type(model).__name__} has none'
        )
    return backbone


def check_classes(hook: Hook, train: BaseDataset, val: BaseDataset) -> None:
    """Raises ValueError where a hook's two datasets have different classes."""
    classes, others = train.metainfo['classes'], val.metainfo['classes']
    if classes != others:
        raise UserError(
            f'{type(hook).__name__}: its training images have {len(classes)} classes, its validation images '
            f'{len(others)}, or their names differ; give both datasets the same classes=...'
        )
