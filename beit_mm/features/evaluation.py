"""What the frozen features of a checkpoint are worth: k-NN and a linear layer, on labelled images and on their patches.

Nothing of the backbone is trained. Beside each figure stands, if asked for, that of the same backbone with random
weights: what there is of it comes from pixels and positions alone.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from mmengine.dataset import default_collate
from mmengine.registry import DefaultScope
from torch import Tensor
from torch.utils.data import DataLoader

from beit_mm.datasets.image_folder import ImageFolder
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.features.probing import (
    MAX_PATCHES,
    Standardise,
    accuracy,
    choose_penalty,
    class_ious,
    confusion,
    image_features,
    knn_predict,
    knn_shares,
    mean_iou,
    patch_dataset,
    patch_features,
    pixel_confusion,
    sample_patches,
)
from beit_mm.terminal import UserError

LAYOUT = dict(  # ADE20K's, and CamVid's here
    train=dict(img_path='images/training', seg_map_path='annotations/training'),
    val=dict(img_path='images/validation', seg_map_path='annotations/validation'),
)


def evaluate_images(
    extractor: FeatureExtractor,
    train: str | Path,
    val: str | Path,
    method: str = 'knn',
    layer: int | None = None,
    kind: str = 'mean',
    k: int = 20,
    batch_size: int = 64,
    workers: int = 0,
) -> dict[str, Any]:
    """Top-1 accuracy on labelled images.

    Args:
        extractor: what gives the features.
        train, val: folders of class folders.
        method: 'knn', a vote of the `k` nearest training images weighted by exp(cosine / 0.07) (DINO's); or 'linear',
            multinomial logistic regression on standardised features, its penalty chosen on a tenth of the training
            images.
        layer, kind: of the features; see FeatureExtractor.
        batch_size: images at a time.
        workers: processes that read images.

    Returns:
        dict(top1=%, images=[training, validation], classes=their number), of 'linear' also penalty and held_out, the
        accuracy in % of each penalty.

    Raises:
        ValueError: another method or kind, or two different sets of classes; FileNotFoundError: as ImageFolder.
    """
    check_choice('method', method, ('knn', 'linear'))
    check_choice('kind', kind, ('mean', 'class_token'))
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        datasets = [
            ImageFolder(data_root=str(folder), pipeline=extractor.pipeline, test_mode=True) for folder in (train, val)
        ]
    classes, others = (dataset.metainfo['classes'] for dataset in datasets)
    if classes != others:
        raise UserError(
            f'{train} has {len(classes)} class folders, {val} {len(others)}, or their names differ; expected the same'
        )
    parts = []
    for dataset in datasets:
        loader = DataLoader(
            dataset,
            batch_size,
            sampler=SeededSampler(dataset, shuffle=False, seed=0),
            num_workers=workers,
            collate_fn=default_collate,
        )
        parts.append(
            image_features(extractor.backbone, extractor.mean, extractor.std, loader, extractor.layer(layer), kind)
        )
    (bank, labels), (features, truth) = parts
    number = len(classes)
    found: dict[str, Any] = dict(images=[len(labels), len(truth)], classes=number)
    if method == 'knn':
        predicted = knn_predict(features, bank, labels, number, k)
        found['k'] = k
    else:
        standardise = Standardise(bank)
        rows = torch.arange(len(labels), device=labels.device)
        linear, found['penalty'], found['held_out'] = choose_penalty(
            standardise(bank), labels, number, rows, by_class=False
        )
        predicted = linear(standardise(features)).argmax(dim=1)
    return dict(top1=100 * accuracy(confusion(predicted, truth, number)), **found)


def evaluate_patches(
    extractor: FeatureExtractor,
    train: SegmentationFolder | dict,
    val: SegmentationFolder | dict,
    method: str = 'knn',
    layer: int | None = None,
    short_side: int | None = None,
    k: int = 30,
    max_patches: int = MAX_PATCHES,
    workers: int = 0,
    seed: int = 0,
) -> dict[str, Any]:
    """Mean intersection over union of pixels that are classified by the features of the patches that they lie in.

    A training patch has as its answer the shares of the classes among its pixels; patches of which less than half has
    a class are left out. The scores of the classes at the patches of a validation image, (h, w, K), are brought to the
    size of its annotation bilinearly; the highest decides. As in mmseg, the mIoU is that of all pixels together.

    Args:
        extractor: what gives the features.
        train, val: options of SegmentationFolder: data_root, classes, reduce_zero_label, data_prefix.
        method: 'knn', the mean of the answers of the `k` nearest training patches by cosine; or 'linear', multinomial
            logistic regression whose penalty is chosen by the mIoU of patches of a tenth of the training images.
            Both see features that are standardised by those of the training patches.
        layer: block; see FeatureExtractor.
        short_side: of the images, which are shown whole, in pixels; None: the checkpoint's image size.
        k: neighbours.
        max_patches: training patches, drawn at random, equally many of each image. They are all in memory, and every
            validation patch is compared with each of them.
        workers: processes that read images.
        seed: of the drawing.

    Returns:
        dict(miou=%, iou=[% of each class, None where it is neither there nor predicted], classes=names,
        images=[training, validation], patches=in the bank), of 'linear' also penalty and held_out, the mIoU in % of
        each penalty.

    Raises:
        ValueError: another method, two different sets of classes, or no patch with a class; FileNotFoundError: as
            SegmentationFolder.

    Source: facebookresearch/capi `eval_segmentation.py`. It differs in these: there images are squeezed into squares
    of 224 pixels, and labels with them; k and the distance (cosine, L2) are chosen on a tenth of the training images
    too; each neighbour votes with its pixel in the same place of the patch, and a linear layer's answer for a patch is
    that of all its pixels, where here scores are interpolated; a linear layer learns the most frequent class of a
    patch, not the shares; all patches are used, of the last block.
    """
    datasets = [patch_dataset(extractor.backbone, short_side, **options) for options in (train, val)]
    classes, others = (dataset.metainfo['classes'] for dataset in datasets)
    if classes != others:
        raise UserError(f'{len(classes)} classes to train on, {len(others)} to validate on; expected the same names')
    scores_of, found = patch_classifier(extractor, datasets[0], method, layer, k, max_patches, workers, seed)
    counts = torch.zeros(len(classes), len(classes), dtype=torch.float64)
    for patches, labels in labelled_patches(extractor, datasets[1], layer, workers):
        counts += pixel_confusion(scores_of(patches), labels)
    found.update(classes=list(classes), images=[*map(len, datasets)])
    return dict(miou=100 * mean_iou(counts), iou=ious(counts), **found)


def patch_classifier(
    extractor: FeatureExtractor,
    dataset: SegmentationFolder,
    method: str = 'knn',
    layer: int | None = None,
    k: int = 30,
    max_patches: int = MAX_PATCHES,
    workers: int = 0,
    seed: int = 0,
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """What classifies the patches of an image by those of labelled images.

    Args:
        dataset: a `patch_dataset`.
        extractor, method, layer, k, max_patches, workers, seed: as of `evaluate_patches`.

    Returns:
        A function: features of patches (h, w, C) -> scores of the classes (h, w, K); and dict(patches=in the bank, k),
        of 'linear' dict(patches, penalty, held_out).

    Raises:
        ValueError: another method, or no patch with a class.
    """
    check_choice('method', method, ('knn', 'linear'))
    if max_patches < 1:
        raise UserError(f'max_patches is {max_patches}; expected 1 or more')
    number = len(dataset.metainfo['classes'])
    maps = labelled_patches(extractor, dataset, layer, workers)
    bank, targets, images = sample_patches(maps, number, len(dataset), max_patches, seed)
    standardise = Standardise(bank)
    bank = standardise(bank)
    found: dict[str, Any] = dict(patches=len(bank))
    if method == 'knn':
        found['k'] = k
    else:
        linear, found['penalty'], found['held_out'] = choose_penalty(
            bank, targets, number, images, by_class=True, seed=seed
        )

    def scores_of(patches: Tensor) -> Tensor:
        features = standardise(patches.flatten(0, 1))  # h*w, C
        scores = knn_shares(features, bank, targets, k) if method == 'knn' else linear(features)  # h*w, K
        return scores.view(*patches.shape[:2], number)

    return scores_of, found


def labelled_patches(
    extractor: FeatureExtractor, dataset: SegmentationFolder, layer: int | None, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Of each image the features of its patches (h, w, C), and its label map (H, W)."""
    samples: Iterable = DataLoader(dataset, batch_size=None, num_workers=workers, collate_fn=as_it_is)
    return patch_features(extractor.backbone, extractor.mean, extractor.std, samples, extractor.layer(layer))


def ious(counts: Tensor) -> list[float | None]:
    """Intersection over union of each class in %, None where there is no union."""
    return [None if math.isnan(value) else 100 * value for value in class_ious(counts).tolist()]


def segmentation_options(
    root: str | Path, split: str, classes: str = 'classes.txt', reduce_zero_label: bool = True, **folders: str
) -> dict[str, Any]:
    """Options of SegmentationFolder for a folder in ADE20K's layout.

    Args:
        root: with images/{training,validation} and annotations/{training,validation}.
        split: 'train' or 'val'.
        classes: file below `root` with the classes' names, or as SegmentationFolder's.
        reduce_zero_label: 0 in the annotations marks unlabelled pixels.
        folders: img_path, seg_map_path: other folders below `root`.
    """
    prefix = dict(LAYOUT[split], **folders)
    return dict(data_root=str(root), classes=classes, reduce_zero_label=reduce_zero_label, data_prefix=prefix)


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError for a value that is none of the choices."""
    if value not in choices:
        raise UserError(f'{name} is {value!r}; choose one of {choices}')


def as_it_is(sample: dict) -> dict:
    """What a loader without batches collates: nothing."""
    return sample
