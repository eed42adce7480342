"""Measures frozen features: k-NN and a linear layer, on labelled images and on their patches.

Shapes: N images or patches to be classified, M with labels (the bank), C channels, K classes, h x w patches.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dataset import BaseDataset, default_collate
from mmengine.dist import all_gather, all_gather_object, get_rank, get_world_size
from mmengine.registry import DefaultScope
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset

from beit_mm.datasets.image_folder import ImageFolder
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.datasets.transforms import resize_bicubic
from beit_mm.errors import UserError, check_choice
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.positions import Grid

CHUNK = 1024  # rows compared with the whole bank at a time, which bounds the memory
ROWS = 65536  # rows of which a linear layer's gradient is computed at a time, for the same reason
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of `fit_linear`, which are tried
RIDGE_PENALTIES = [10.0**power for power in range(-2, 5)]  # of `ridge`, pixels in [0, 1]
THUMBNAIL = (8, 8)  # pixels
HELD_OUT = 0.1  # share of the labelled images by which the penalty is chosen


def evaluate_images(
    extractor: FeatureExtractor,
    train: str | Path | DataLoader,
    val: str | Path | DataLoader,
    method: str = 'knn',
    layer: int | None = None,
    kind: str = 'mean',
    k: int = 20,
    workers: int = 0,
) -> dict[str, Any]:
    """Measures top-1 accuracy on labelled images: folders of class folders, or loaders of ImageFolders.

    `method` is 'knn', see `knn_predict`, or 'linear', see `choose_penalty`. Returns dict(top1=%, images=[training,
    validation], classes=number), of 'linear' also penalty and held_out.
    """
    check_choice('method', method, ('knn', 'linear'))

    def loader(source: str | Path | DataLoader) -> DataLoader:
        if isinstance(source, DataLoader):
            return source
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            dataset = ImageFolder(data_root=str(source), pipeline=extractor.pipeline, test_mode=True)
        sampler = SeededSampler(dataset, shuffle=False, seed=0)
        return DataLoader(dataset, 64, sampler=sampler, num_workers=workers, collate_fn=default_collate)

    loaders = loader(train), loader(val)
    number = check_same_classes(loaders[0].dataset, loaders[1].dataset)
    (bank, labels), (features, truth) = (image_features(extractor, loader, layer, kind) for loader in loaders)
    if method == 'knn':
        predicted, found = knn_predict(features, bank, labels, number, k), dict(k=k)
    else:
        standardise = standardiser(bank)
        rows = torch.arange(len(labels), device=labels.device)
        linear, found = choose_penalty(standardise(bank), labels, number, rows, by_class=False)
        predicted = linear(standardise(features)).argmax(dim=1)
    top1 = 100 * accuracy(confusion(predicted, truth, number))
    return dict(top1=top1, images=[len(labels), len(truth)], classes=number, **found)


def image_features(
    extractor: FeatureExtractor, loader: DataLoader, layer: int | None, kind: str
) -> tuple[Tensor, Tensor]:
    """Features (N, C) and classes (N,) in the dataset's order, of all processes."""
    pooled, rows = [], []
    for batch in loader:
        pooled.append(extractor.features(batch['inputs'], [layer])[kind][:, 0])
        rows += [(sample.sample_idx, int(sample.gt_label)) for sample in batch['data_samples']]
    features = torch.cat(all_gather(torch.cat(pooled)))
    index, labels = torch.cat(all_gather(torch.tensor(rows, device=features.device))).unbind(1)
    _, once = np.unique(index.cpu(), return_index=True)  # samplers repeat images to give each process as many
    return features[once], labels[once]


def evaluate_patches(
    extractor: FeatureExtractor,
    train: SegmentationFolder | dict,
    val: SegmentationFolder | dict,
    method: str = 'knn',
    layer: int | None = None,
    workers: int = 0,
    **options: int,
) -> dict[str, Any]:
    """Measures the mean intersection over union of all pixels, classified by the features of their patches.

    `train` and `val` are each a `patch_dataset`, or its options. Returns dict(miou=%, iou=[% of each class, None where
    it is neither there nor predicted], classes=names, images=[training, validation]), and the classifier's.

    Source: facebookresearch/capi `eval_segmentation.py`.
    """
    datasets = [one if isinstance(one, SegmentationFolder) else patch_dataset(extractor, **one) for one in (train, val)]
    number = check_same_classes(*datasets)
    scores_of, found = patch_classifier(extractor, datasets[0], method, layer, workers, **options)
    counts = torch.zeros(number, number, dtype=torch.float64)
    for patches, labels in labelled_patches(extractor, datasets[1], layer, workers):
        predicted = pixel_scores(scores_of(patches), labels.shape).argmax(dim=0)  # H, W
        counts += confusion(predicted, labels.to(predicted.device), number)
    counts = sum(all_gather_object(counts))
    iou = [None if math.isnan(value) else 100 * value for value in class_ious(counts).tolist()]
    classes, images = list(datasets[0].metainfo['classes']), [len(dataset) for dataset in datasets]
    return dict(miou=100 * mean_iou(counts), iou=iou, classes=classes, images=images, **found)


def patch_classifier(
    extractor: FeatureExtractor,
    dataset: SegmentationFolder,
    method: str = 'knn',
    layer: int | None = None,
    workers: int = 0,
    k: int = 30,
    max_patches: int = 50_000,
    seed: int = 0,
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """Makes a classifier by standardised features of at most `max_patches` patches of a `patch_dataset`.

    `method` is 'knn', see `knn_shares`, or 'linear', see `choose_penalty`. Returns a function, features (h, w, C) ->
    scores (h, w, K), and dict(patches=in the bank, k), of 'linear' dict(patches, penalty, held_out).
    """
    check_choice('method', method, ('knn', 'linear'))
    number, processes = len(dataset.metainfo['classes']), get_world_size()
    maps = labelled_patches(extractor, dataset, layer, workers)
    num_images = -(-len(dataset) // processes)  # rounded up, of this process
    bank, targets, images = sample_patches(maps, number, num_images, -(-max_patches // processes), seed)
    own = [tensor.cpu() for tensor in (bank, targets, images * processes + get_rank())]
    gathered = zip(*all_gather_object(own), strict=True)  # objects, as the processes differ in their number of patches
    bank, targets, images = (torch.cat(tensors).to(extractor.device) for tensors in gathered)
    standardise = standardiser(bank)
    bank = standardise(bank)
    classify: Callable[[Tensor], Tensor]
    if method == 'knn':
        classify, found = partial(knn_shares, bank=bank, targets=targets, k=k), dict(k=k)
    else:
        classify, found = choose_penalty(bank, targets, number, images, by_class=True, seed=seed)

    def scores_of(patches: Tensor) -> Tensor:
        return classify(standardise(patches.flatten(0, 1))).view(*patches.shape[:2], number)

    return scores_of, dict(patches=len(bank), **found)


def patch_dataset(extractor: FeatureExtractor, max_images: int | None = None, **options: Any) -> SegmentationFolder:
    """A SegmentationFolder, with its `options`, whose images (at most `max_images`) an extractor prepares."""
    extractor.check_whole()
    steps = [*extractor.pipeline[:-1], dict(type='beit_mm.LoadAnnotation')]
    dataset = SegmentationFolder(**dict(options, pipeline=steps, test_mode=True))
    if max_images and max_images < len(dataset):
        dataset.get_subset_([row * len(dataset) // max_images for row in range(max_images)])
    return dataset


def labelled_patches(
    extractor: FeatureExtractor, dataset: SegmentationFolder, layer: int | None, workers: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features of patches, float32 (h, w, C), and label map, uint8 (H, W), of each image of this process."""
    images = Subset(dataset, range(get_rank(), len(dataset), get_world_size()))
    generator = torch.Generator()  # a loader draws a seed: not from the generator of a training
    for sample in DataLoader(images, batch_size=None, num_workers=workers, generator=generator):
        features = extractor.features(sample['img'].permute(2, 0, 1)[None], [layer])
        yield features['patches'][0, 0], sample['gt_seg_map']


def class_shares(labels: Tensor, grid: Grid, num_classes: int) -> Tensor:
    """The share (h, w, K) that each class of a label map, uint8 (H, W), has of each patch's pixels."""
    rows, columns = (
        (torch.arange(side) * 2 + 1) * cells // (2 * side) for side, cells in zip(labels.shape, grid, strict=True)
    )
    patch = rows[:, None] * grid[1] + columns  # H, W
    pixels = patch.flatten().bincount(minlength=grid[0] * grid[1])  # h*w
    known = labels < num_classes
    cells = (patch[known] * num_classes + labels[known]).bincount(minlength=len(pixels) * num_classes)
    shares = cells.view(-1, num_classes) / pixels.clamp(min=1).unsqueeze(1)
    return shares.view(*grid, num_classes)


def sample_patches(
    maps: Iterable[tuple[Tensor, Tensor]], num_classes: int, num_images: int, max_patches: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws, evenly from `num_images` images, patches of which at least half has a class.

    Returns features (M, C), the classes' shares of their pixels (M, K), which add up to 1, and images' numbers (M,).
    """
    generator = torch.Generator().manual_seed(seed)
    per_image = -(-max_patches // num_images)  # rounded up
    features, targets, images = [], [], []
    for number, (patches, labels) in enumerate(maps):
        shares = class_shares(labels, patches.shape[:2], num_classes).flatten(0, 1)  # h*w, K
        usable = (shares.sum(dim=1) >= 0.5).nonzero().squeeze(1)
        chosen = usable[torch.randperm(len(usable), generator=generator)[:per_image]]
        features.append(patches.flatten(0, 1)[chosen.to(patches.device)])
        targets.append(F.normalize(shares[chosen], p=1, dim=1).to(patches.device))
        images.append(torch.full((len(chosen),), number, device=patches.device))
    if not sum(map(len, images)):
        raise UserError('no patch of the training images has a class; if 0 is unlabelled there, set reduce_zero_label')
    kept = torch.randperm(sum(map(len, images)), generator=generator)[:max_patches].sort().values
    kept = kept.to(features[0].device)
    return torch.cat(features)[kept], torch.cat(targets)[kept], torch.cat(images)[kept]


def neighbours(features: Tensor, bank: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Cosines (n, k), highest first, and rows (n, k) of the nearest of a bank, for n features at a time."""
    bank = F.normalize(bank, dim=1)
    for chunk in F.normalize(features, dim=1).split(CHUNK):
        yield (chunk @ bank.T).topk(min(k, len(bank)), dim=1)


def knn_predict(
    features: Tensor, bank: Tensor, labels: Tensor, num_classes: int, k: int = 20, temperature: float = 0.07
) -> Tensor:
    """Classes (N,) of features by a vote of the k nearest, with labels (M,), weighted by exp(cosine / temperature).

    Source: facebookresearch/dino `eval_knn.py`.
    """
    predicted = []
    for cosine, nearest in neighbours(features, bank, k):
        votes = cosine.new_zeros(len(cosine), num_classes)
        votes.scatter_add_(1, labels[nearest], ((cosine - 1) / temperature).exp())
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def thumbnail(image: np.ndarray) -> np.ndarray:
    """Pixels float64 (192,) in [0, 1] of an image uint8 (H, W, 3), resized to 8 x 8 pixels."""
    return resize_bicubic(image, THUMBNAIL).ravel() / 255.0


def ridge(x: Tensor, y: Tensor, held_out: Tensor) -> Tensor:
    """Classes of pixels float64 (N, P) by ridge regression on (M, P), its penalty by leave-one-out accuracy."""
    targets = F.one_hot(y).double()  # M, K
    mean, level = x.mean(dim=0), targets.mean(dim=0)
    u, scale, v = torch.linalg.svd(x - mean, full_matrices=False)  # M, R; R; R, P
    along = u.T @ (targets - level)  # R, K

    def left_out_accuracy(penalty: float) -> float:
        shrunk = scale**2 / (scale**2 + penalty)
        fitted = level + u * shrunk @ along
        leverage = (u**2 * shrunk).sum(dim=1, keepdim=True) + 1 / len(x)
        without_itself = targets - (targets - fitted) / (1 - leverage)
        return float((without_itself.argmax(dim=1) == y).double().mean())

    penalty = max(RIDGE_PENALTIES, key=left_out_accuracy)
    weights = v.T * (scale / (scale**2 + penalty)) @ along  # P, K
    return (level + (held_out - mean) @ weights).argmax(dim=1)


def mean_and_error(values: Tensor) -> tuple[float, float]:
    """Mean of values (N,) and its standard error, in %."""
    values = values.double()
    return 100 * float(values.mean()), 100 * float(values.std(correction=0)) / math.sqrt(len(values))


def knn_shares(features: Tensor, bank: Tensor, targets: Tensor, k: int = 30) -> Tensor:
    """Scores (N, K): the mean over the k nearest neighbours of their classes' shares, `targets` (M, K)."""
    return torch.cat([targets[nearest].mean(dim=1) for _, nearest in neighbours(features, bank, k)])


def mean_and_std(bank: Tensor) -> tuple[Tensor, Tensor]:
    """Of each channel of features (M, C)."""
    return bank.mean(dim=0), bank.std(dim=0, correction=0).clamp(min=1e-6)  # a channel may be the same everywhere


def standardiser(bank: Tensor) -> Callable[[Tensor], Tensor]:
    """A function that standardises each channel of features by the bank's."""
    mean, std = mean_and_std(bank)
    return lambda features: (features - mean) / std


def fit_linear(
    features: Tensor, targets: Tensor, num_classes: int, penalty: float, start: nn.Linear | None = None
) -> nn.Linear:
    """Multinomial logistic regression by L-BFGS: minimises mean cross entropy + penalty / 2 * sum of squared weights.

    `features` are standardised; `targets` are classes int64 (M,), or their shares (M, K); `start` replaces zeros.
    """
    layer = nn.Linear(features.shape[1], num_classes, device=features.device)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    if start:
        layer.load_state_dict(start.state_dict())
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=100, line_search_fn='strong_wolfe')

    def objective() -> Tensor:
        optimizer.zero_grad()
        total = penalty / 2 * layer.weight.square().sum()
        total.backward()
        for rows, wanted in zip(features.split(ROWS), targets.split(ROWS), strict=True):
            loss = F.cross_entropy(layer(rows), wanted, reduction='sum') / len(features)
            loss.backward()
            total = total + loss.detach()
        return total.detach()

    with torch.enable_grad():
        optimizer.step(objective)
    return layer.requires_grad_(False)


def choose_penalty(
    features: Tensor, targets: Tensor, num_classes: int, images: Tensor, by_class: bool, seed: int = 0
) -> tuple[nn.Linear, dict[str, Any]]:
    """`fit_linear` on all features, with the penalty that is best on a tenth of the images when fitted on the rest.

    `images`, int64 (M,), has the image of each feature; `by_class` judges by the mean intersection over union instead
    of the accuracy. Returns the layer, and dict(penalty, held_out={penalty: % on the tenth}).
    """
    names, image = images.unique(return_inverse=True)
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).to(images.device)
    held_out = torch.isin(image, order[: max(1, round(HELD_OUT * len(names)))])
    figures: dict[float, float] = {}
    layers: dict[float, nn.Linear] = {}
    layer = None
    for penalty in PENALTIES:  # from the largest on: each fit begins with the last one's result
        layer = layers[penalty] = fit_linear(features[~held_out], targets[~held_out], num_classes, penalty, start=layer)
        counts = confusion(layer(features[held_out]).argmax(dim=1), targets[held_out], num_classes)
        figures[penalty] = 100 * (mean_iou(counts) if by_class else accuracy(counts))
    best = max(figures, key=figures.__getitem__)
    return fit_linear(features, targets, num_classes, best, start=layers[best]), dict(penalty=best, held_out=figures)


def confusion(predicted: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """Counts float64 (K, K) on the CPU, by right and by predicted class, int64 of any shape.

    Targets are integers, ignored from `num_classes` on, or shares of classes (*shape, K).
    """
    if targets.is_floating_point():
        counts = targets.new_zeros(num_classes, num_classes, dtype=torch.float64)
        return counts.index_add_(0, predicted.flatten(), targets.flatten(0, -2).double()).T.cpu()
    known = targets < num_classes
    pairs = targets[known].long() * num_classes + predicted[known]
    return pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes).double().cpu()


def pixel_scores(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """Resizes scores of patches (h, w, K) bilinearly to the pixels of an image (K, H, W)."""
    return F.interpolate(scores.permute(2, 0, 1)[None], size, mode='bilinear')[0]


def class_ious(counts: Tensor) -> Tensor:
    """Intersection over union of each class (K,), nan of one that is neither there nor predicted."""
    hit = counts.diagonal()
    return hit / (counts.sum(dim=0) + counts.sum(dim=1) - hit)


def mean_iou(counts: Tensor) -> float:
    return float(class_ious(counts).nanmean())


def accuracy(counts: Tensor) -> float:
    return float(counts.diagonal().sum() / counts.sum())


def check_same_classes(train: BaseDataset, val: BaseDataset) -> int:
    """The number of classes, which two datasets must have in common."""
    classes, others = train.metainfo['classes'], val.metainfo['classes']
    if classes != others:
        found = f'the training images have {len(classes)} classes, the validation images {len(others)}'
        raise UserError(f'{found}, or their names differ; expected the same')
    return len(classes)
