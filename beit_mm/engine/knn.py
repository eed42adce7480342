"""Labelled images and patches classified by their nearest neighbours after each validation."""

from typing import Any

from mmengine.dist import get_world_size
from mmengine.hooks import Hook
from mmengine.runner import Runner
from torch.utils.data import DataLoader

from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.engine.steps import unwrap
from beit_mm.features.evaluation import (
    check_same_classes,
    evaluate_images,
    evaluate_patches,
    patch_dataset,
    spread_rows,
)
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.interop import backbone_of
from beit_mm.registry import HOOKS
from beit_mm.terminal import UserError


@HOOKS.register_module()
class KNNHook(Hook):
    """Logs `knn_accuracy` (percent) after each validation: labelled images classified by their nearest neighbours.

    The features are the mean of the patch tokens after two thirds of the blocks, of unmasked images. The labels have no
    part in training.

    Args:
        train_dataloader, val_dataloader: configs with an ImageFolder whose pipeline crops to one size and ends with
            PackInputs; a subset of the images will do. They are read at every validation.
        k: neighbours that vote.
    """

    def __init__(self, train_dataloader: dict, val_dataloader: dict, k: int = 20):
        self.configs = train_dataloader, val_dataloader
        self.loaders: list[DataLoader] = []
        self.k = k

    def before_train(self, runner: Runner) -> None:
        self.extractor = extractor_of(self, runner)
        self.loaders = [runner.build_dataloader(config, seed=0) for config in self.configs]
        check_same_classes(*(loader.dataset for loader in self.loaders))

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        if self.loaders:  # in a training
            log(runner, metrics, 'knn_accuracy', evaluate_images(self.extractor, *self.loaders, k=self.k)['top1'])


@HOOKS.register_module()
class DenseKNNHook(Hook):
    """Logs `dense_knn_miou` (percent) after each validation: pixels classified by the nearest patches of other images.

    The features are those of KNNHook, of each patch; see docs/features.md. mmseg is not needed.

    Args:
        train, val: configs of SegmentationFolders without type and pipeline, as
            `dict(data_root='data/camvid', classes='classes.txt', reduce_zero_label=True,
            data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'))`.
        short_side: of the images in pixels; None: the backbone's image size.
        k: neighbours that vote.
        max_images: of each of the two that are looked at, evenly spread.
        max_patches: of the training images that may be neighbours, drawn at random, the same at each validation.
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
        self.limits: dict[str, Any] = dict(k=k, max_images=max_images, max_patches=max_patches)
        for name, number in self.limits.items():
            if number < 1:
                raise UserError(f'DenseKNNHook: {name} is {number}; expected 1 or more')
        self.configs = train, val
        self.datasets: list[SegmentationFolder] = []
        self.short_side = short_side

    def before_train(self, runner: Runner) -> None:
        self.extractor = extractor_of(self, runner, size=self.short_side, whole=True)
        self.datasets = [patch_dataset(self.extractor, **config) for config in self.configs]
        check_same_classes(*self.datasets)
        number, processes = len(spread_rows(self.datasets[0], self.limits['max_images'])), get_world_size()
        if number < processes:
            raise UserError(f'DenseKNNHook: {number} training images for {processes} processes; each needs one')

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        if self.datasets:  # in a training
            miou = evaluate_patches(self.extractor, *self.datasets, **self.limits)['miou']
            log(runner, metrics, 'dense_knn_miou', miou)


def extractor_of(hook: Hook, runner: Runner, **options: Any) -> FeatureExtractor:
    model = unwrap(runner)
    if (backbone := backbone_of(model)) is None:
        raise UserError(f'{type(hook).__name__} needs a BEiTBackbone; the {type(model).__name__} has none')
    preprocessor = model.data_preprocessor
    return FeatureExtractor(backbone, mean=preprocessor.mean, std=preprocessor.std, **options)


def log(runner: Runner, metrics: dict | None, name: str, value: float) -> None:
    """Adds a figure to a validation's log, which is written later, and to the metrics."""
    runner.message_hub.update_scalar(f'val/{name}', value)
    if metrics is not None:
        metrics[name] = value  # CheckpointHook's save_best can follow it
