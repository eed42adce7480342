"""Measures frozen features of images and patches: k-NN, a linear layer, an attentive probe.

Shapes: N images or patches to be classified, M with labels (the bank), C channels, K classes, h x w = P patches.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dataset import BaseDataset, default_collate
from mmengine.dist import all_gather
from mmpretrain.evaluation import AveragePrecision
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.datasets.image_folder import ImageFolder
from beit_mm.datasets.samplers import SeededSampler
from beit_mm.datasets.segmentation_folder import Readable, SegmentationFolder
from beit_mm.datasets.transforms import resize_bicubic
from beit_mm.errors import UserError, check_choice, warn
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.probe import attentive_classifier
from beit_mm.positions import Grid
from beit_mm.registry import building

CHUNK = 1024  # rows compared with the whole bank at a time, which bounds the memory
ROWS = 65536  # rows at a time when a linear layer's gradient is computed, for the same reason
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-7)  # tried in `fit_linear`
# Of `cross_fit`. Of five wrong labels among 371 photos, four were among the first 30 in 83 % of the draws; with one
# repeat in 58 %, and with penalties of 0.1 and 1e-3 in fewer.
FOLDS, REPEATS, FOLD_PENALTY = 5, 3, 1e-2
RIDGE_PENALTIES = [10.0**power for power in range(-2, 5)]  # tried in `ridge`, for pixels in [0, 1]
THUMBNAIL = (8, 8)  # pixels
HELD_OUT = 0.1  # share of the labelled images that serve to choose a setting
RATES, EPOCHS = (3e-3, 1e-2, 3e-2), (10, 40)  # tried in `choose_attentive`
PROBE_BATCH = 128  # images per step of `fit_attentive`, at most an eighth of all
MOST_HELD, HALF_FROM = 4 * 2**30, 2**30  # bytes of patches: the most held, and the most held in float32


def evaluate_images(
    extractor: FeatureExtractor,
    train: str | Path | DataLoader,
    val: str | Path | DataLoader,
    method: str = 'knn',
    layer: int | None = None,
    kind: str = 'mean',
    k: int = 20,
    workers: int = 0,
    queries: int = 1,
    seed: int = 0,
) -> dict[str, Any]:
    """Measures top-1 accuracy on labelled images: folders of class folders, or loaders of ImageFolders.

    `method` is 'knn' (see `knn_predict`), 'linear' (`choose_penalty`) or, in a single process, 'attentive'
    (`choose_attentive`). Returns dict(top1=%, images=[training, validation], classes=number, right=[1 or 0 for each
    validation image]) with what the method chose.
    """
    check_choice('method', method, ('knn', 'linear', 'attentive'))
    loaders = [labelled_loader(extractor, source, workers) for source in (train, val)]
    num_classes = check_same_classes(loaders[0].dataset, loaders[1].dataset)
    settings: dict[str, Any]
    if method == 'attentive':
        patches = [labelled_features(extractor, loader, layer, 'patches') for loader in loaders]
        held = hold_patches(patches[0], len(loaders[0].dataset))
        labels = held[1]
        classify, settings = choose_attentive(held, num_classes, queries, seed)
        batches = [(classify(features), truth) for features, truth in patches[1]]
        predicted, truth = map(torch.cat, zip(*batches, strict=True))
    else:
        (bank, labels), (features, truth) = (image_features(extractor, loader, layer, kind) for loader in loaders)
        if method == 'knn':
            predicted, settings = knn_predict(features, bank, labels, num_classes, k), dict(k=k)
        else:
            predicted, settings = linear_predict(features, bank, labels, num_classes)
    right = (predicted == truth).int()
    settings |= dict(images=[len(labels), len(truth)], classes=num_classes, right=right.tolist())
    return dict(top1=100 * float(right.double().mean()), **settings)


def labelled_loader(extractor: FeatureExtractor, source: str | Path | DataLoader, workers: int) -> DataLoader:
    """A loader of a folder of class folders, whose images the extractor prepares; a loader stays as it is."""
    if isinstance(source, DataLoader):
        return source
    with building('mmpretrain'):
        dataset = ImageFolder(data_root=str(source), pipeline=extractor.pipeline, test_mode=True)
    sampler = SeededSampler(dataset, shuffle=False, seed=0)
    return DataLoader(dataset, 64, sampler=sampler, num_workers=workers, collate_fn=default_collate)


def image_features(
    extractor: FeatureExtractor, loader: DataLoader, layer: int | None, kind: str
) -> tuple[Tensor, Tensor]:
    """Features (N, C) and classes (N,) from all processes, in the order of the loader's sampler."""
    batches = labelled_features(extractor, loader, layer, kind)
    features, classes = map(torch.cat, zip(*batches, strict=True))
    if len(loader.sampler) < len(loader.dataset):  # it deals images to the processes
        features, classes = (gather_in_order(part, len(loader.dataset)) for part in (features, classes))
    return features, classes


def gather_in_order(part: Tensor, number: int) -> Tensor:
    """Collects `number` rows that a sampler has dealt to the processes, in their order; drops those it repeated."""
    return torch.stack(all_gather(part), dim=1).flatten(0, 1)[:number]


def labelled_features(
    extractor: FeatureExtractor, loader: DataLoader, layer: int | None, kind: str
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features, (n, C) or of patches (n, P, C), and classes (n,) of the images of each batch."""
    for batch in loader:
        features = extractor.features(batch['inputs'], [layer])[kind][:, 0]
        classes = torch.cat([sample.gt_label for sample in batch['data_samples']]).to(features.device)
        yield features.flatten(1, 2) if kind == 'patches' else features, classes


def evaluate_patches(
    extractor: FeatureExtractor,
    train: SegmentationFolder | dict,
    val: SegmentationFolder | dict,
    method: str = 'knn',
    layer: int | None = None,
    workers: int = 0,
    **options: int,
) -> dict[str, Any]:
    """Measures mean intersection over union, with pixels classified by the features of their patches.

    `train` and `val` are each a `patch_dataset`, or its options. Returns dict(miou=%, iou=[% of each class, None if it
    is neither present nor predicted], classes=names, images=[training, validation]) with the classifier's settings.

    Source: facebookresearch/capi `eval_segmentation.py`.
    """
    datasets = [
        each if isinstance(each, SegmentationFolder) else patch_dataset(extractor, **each) for each in (train, val)
    ]
    num_classes = check_same_classes(*datasets)
    scores_of, settings = patch_classifier(extractor, datasets[0], method, layer, workers, **options)
    counts = torch.zeros(num_classes, num_classes, dtype=torch.float64)
    for patches, labels in labelled_patches(extractor, datasets[1], layer, workers):
        predicted = pixel_scores(scores_of(patches), labels.shape).argmax(dim=0)  # H, W
        counts += confusion(predicted, labels.to(predicted.device), num_classes)
    ious = class_ious(*hits_and_unions(counts))
    iou = [None if math.isnan(value) else 100 * value for value in ious.tolist()]
    classes, images = list(datasets[0].metainfo['classes']), [len(dataset) for dataset in datasets]
    return dict(miou=100 * float(ious.nanmean()), iou=iou, classes=classes, images=images, **settings)


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
    """Makes a classifier from standardised features of at most `max_patches` patches of a `patch_dataset`.

    `method` is 'knn' (see `knn_shares`) or 'linear' (`choose_penalty`). Returns a function, features (h, w, C) ->
    scores (h, w, K), and dict(patches=number in the bank, k), for 'linear' dict(patches, penalty, held_out).
    """
    check_choice('method', method, ('knn', 'linear'))
    num_classes, maps = len(dataset.metainfo['classes']), labelled_patches(extractor, dataset, layer, workers)
    bank, targets, images = sample_patches(maps, num_classes, len(dataset), max_patches, seed)
    standardise = standardiser(bank)
    bank = standardise(bank)
    classify: Callable[[Tensor], Tensor]
    if method == 'knn':
        classify, settings = partial(knn_shares, bank=bank, targets=targets, k=k), dict(k=k)
    else:
        classify, settings = choose_penalty(bank, targets, num_classes, images, by_class=True, seed=seed)

    def scores_of(patches: Tensor) -> Tensor:
        return classify(standardise(patches.flatten(0, 1))).view(*patches.shape[:2], num_classes)

    return scores_of, dict(patches=len(bank), **settings)


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
    """Features of patches, float32 (h, w, C), and label map, uint8 (H, W), of each image that can be read."""
    generator = torch.Generator()  # a loader draws its seed here, not from a training's generator
    unreadable = 0
    for sample in DataLoader(Readable(dataset), batch_size=None, num_workers=workers, generator=generator):
        if sample is None:
            unreadable += 1
            continue
        features = extractor.features(sample['img'].permute(2, 0, 1)[None], [layer])
        yield features['patches'][0, 0], sample['gt_seg_map']
    if unreadable:
        warn(f'{unreadable} of {len(dataset)} images cannot be read; their patches are left out.')


def class_shares(labels: Tensor, grid: Grid, num_classes: int) -> Tensor:
    """The share of each patch's pixels that each class has, (h, w, K), by a label map, uint8 (H, W)."""
    axes = zip(labels.shape, grid, strict=True)
    rows, columns = ((torch.arange(side) * 2 + 1) * cells // (2 * side) for side, cells in axes)
    patch = rows[:, None] * grid[1] + columns  # H, W
    pixels = patch.flatten().bincount(minlength=grid[0] * grid[1])  # h*w
    known = labels < num_classes
    cells = (patch[known] * num_classes + labels[known]).bincount(minlength=len(pixels) * num_classes)
    shares = cells.view(-1, num_classes) / pixels.clamp(min=1).unsqueeze(1)
    return shares.view(*grid, num_classes)


def sample_patches(
    maps: Iterable[tuple[Tensor, Tensor]], num_classes: int, num_images: int, max_patches: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """Draws patches that have a class for at least half of their pixels, evenly from `num_images` images.

    Returns features (M, C), shares of the classes (M, K), which add up to 1, and the number of each one's image (M,).
    """
    generator = torch.Generator().manual_seed(seed)
    per_image = -(-max_patches // num_images)  # rounded up
    features, targets, images = [], [], []
    for number, (patches, labels) in enumerate(maps):
        drawn, shares = draw_patches(patches, labels, num_classes, per_image, generator)
        features.append(drawn)
        targets.append(shares)
        images.append(torch.full((len(drawn),), number, device=patches.device))
    if not sum(map(len, images)):
        raise UserError('no patch of the training images has a class; if 0 is unlabelled there, set reduce_zero_label')
    kept = torch.randperm(sum(map(len, images)), generator=generator)[:max_patches].sort().values
    kept = kept.to(features[0].device)
    return torch.cat(features)[kept], torch.cat(targets)[kept], torch.cat(images)[kept]


def draw_patches(
    patches: Tensor, labels: Tensor, num_classes: int, most: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Features (n, C) and class shares (n, K) of at most so many of an image's patches; see `sample_patches`."""
    shares = class_shares(labels, patches.shape[:2], num_classes).flatten(0, 1)  # h*w, K
    usable = (shares.sum(dim=1) >= 0.5).nonzero().squeeze(1)
    chosen = usable[torch.randperm(len(usable), generator=generator)[:most]]
    targets = F.normalize(shares[chosen], p=1, dim=1).to(patches.device)
    return patches.flatten(0, 1)[chosen.to(patches.device)], targets


def neighbours(features: Tensor, bank: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields cosines (n, k), highest first, and rows (n, k) of the nearest in a bank, for n features at a time."""
    bank = F.normalize(bank, dim=1)
    for chunk in F.normalize(features, dim=1).split(CHUNK):
        yield (chunk @ bank.T).topk(min(k, len(bank)), dim=1)


def knn_votes(
    features: Tensor, bank: Tensor, labels: Tensor, num_classes: int, k: int = 20, temperature: float = 0.07
) -> Iterator[Tensor]:
    """Yields votes (n, K) of the k nearest by `labels` (M,), weighted by exp(cosine / temperature), for n at a time.

    Source: facebookresearch/dino `eval_knn.py`.
    """
    for cosine, nearest in neighbours(features, bank, k):
        votes = cosine.new_zeros(len(cosine), num_classes)
        yield votes.scatter_add_(1, labels[nearest], ((cosine - 1) / temperature).exp())


def knn_predict(*arguments: Any, **options: Any) -> Tensor:
    """Classes (N,) with the most `knn_votes`; takes the same arguments."""
    return torch.cat([votes.argmax(dim=1) for votes in knn_votes(*arguments, **options)])


def thumbnail(image: np.ndarray) -> np.ndarray:
    """Pixels, float64 (192,) in [0, 1], of an image, uint8 (H, W, 3), resized to 8 x 8 pixels."""
    return resize_bicubic(image, THUMBNAIL).ravel() / 255.0


def ridge(x: Tensor, y: Tensor, held_out: Tensor) -> Tensor:
    """Classes of `held_out`, float64 (N, P), by ridge regression on x (M, P) with the best leave-one-out accuracy."""
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


def linear_predict(features: Tensor, bank: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, dict[str, Any]]:
    """Classes (N,) of features by `choose_penalty` on a standardised bank, and what that chose."""
    standardise, rows = standardiser(bank), torch.arange(len(labels), device=labels.device)
    layer, settings = choose_penalty(standardise(bank), labels, num_classes, rows, by_class=False)
    return layer(standardise(features)).argmax(dim=1), settings


def cross_fit(features: Tensor, labels: Tensor, num_classes: int) -> Tensor:
    """Probabilities (N, K) of features (N, C), by linear layers fitted to the other folds: a mean of REPEATS."""
    shares, numbers = torch.zeros(len(features), num_classes), torch.arange(len(features))
    for seed in range(REPEATS):
        for fold in torch.randperm(len(features), generator=torch.Generator().manual_seed(seed)).tensor_split(FOLDS):
            others = numbers[~torch.isin(numbers, fold)]
            standardise = standardiser(features[others])
            layer = fit_linear(standardise(features[others]), labels[others], num_classes, FOLD_PENALTY)
            shares[fold] += layer(standardise(features[fold])).softmax(dim=1) / REPEATS
    return shares


def knn_shares(features: Tensor, bank: Tensor, targets: Tensor, k: int = 30) -> Tensor:
    """Scores (N, K): the mean over the k nearest neighbours of their class shares, `targets` (M, K)."""
    return torch.cat([targets[nearest].mean(dim=1) for _, nearest in neighbours(features, bank, k)])


def mean_and_std(bank: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of each channel of features (M, C)."""
    return bank.mean(dim=0), bank.std(dim=0, correction=0).clamp(min=1e-6)  # a channel may be constant


def standardiser(bank: Tensor) -> Callable[[Tensor], Tensor]:
    """Returns a function that standardises each channel of features by the bank's mean and deviation."""
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
    numbers, image = images.unique(return_inverse=True)
    held_out = torch.isin(image, draw_held_out(len(numbers), seed)[0].to(images.device))
    scores: dict[float, float] = {}
    layers: dict[float, nn.Linear] = {}
    layer = None
    for penalty in PENALTIES:  # the largest first: each fit starts from the previous result
        layer = layers[penalty] = fit_linear(features[~held_out], targets[~held_out], num_classes, penalty, start=layer)
        counts = confusion(layer(features[held_out]).argmax(dim=1), targets[held_out], num_classes)
        score = float(class_ious(*hits_and_unions(counts)).nanmean()) if by_class else accuracy(counts)
        scores[penalty] = 100 * score
    best = max(scores, key=scores.__getitem__)
    return fit_linear(features, targets, num_classes, best, start=layers[best]), dict(penalty=best, held_out=scores)


def draw_held_out(number: int, seed: int) -> Sequence[Tensor]:
    """Draws the tenth of `number` images that serves to choose a setting; returns its indices, and the rest."""
    order = torch.randperm(number, generator=torch.Generator().manual_seed(seed))
    return order.tensor_split([max(1, round(HELD_OUT * number))])


def hold_patches(batches: Iterable[tuple[Tensor, Tensor]], number: int) -> tuple[Tensor, Tensor]:
    """Features (M, P, C) and classes (M,) of `number` images in batches, or of as many as fit, evenly spread.

    Batches are features (n, P, C) and classes (n,). If they are large, patches are held in half precision.
    """
    held = torch.empty(0)
    labels: list[Tensor] = []
    seen = filled = capacity = 0
    for patches, classes in batches:
        if not seen:
            dtype = torch.float16 if number * patches[0].nbytes > HALF_FROM else torch.float32
            capacity = min(number, MOST_HELD // (patches[0].numel() * dtype.itemsize))
            held = patches.new_empty(capacity, *patches.shape[1:], dtype=dtype)
            if capacity < number:
                warn(f'Attentive probe: patches of {number:,} images take too much memory; it learns from {capacity:,}')
        position = torch.arange(seen, seen + len(patches))
        chosen = (position + 1) * capacity // number > position * capacity // number
        labels.append(classes[chosen.to(classes.device)])
        held[filled : filled + len(labels[-1])] = patches[chosen.to(patches.device)]
        seen, filled = seen + len(patches), filled + len(labels[-1])
    return held[:filled], torch.cat(labels)


def choose_attentive(
    held: tuple[Tensor, Tensor], num_classes: int, queries: int = 1, seed: int = 0
) -> tuple[Callable[[Tensor], Tensor], dict[str, Any]]:
    """`fit_attentive` on held patches and classes, with the setting that is best on a tenth when fitted on the rest.

    Standardises the patches in place. Returns a function, features (n, P, C) -> classes (n,), and dict(queries, rate,
    epochs, held_out={setting: % on the tenth}).
    """
    bank, labels = held
    sample = bank[:: -(-len(bank) // 256)]  # enough for mean and deviation
    standardise = standardiser(sample.flatten(0, 1).float())
    for part in bank.split(PROBE_BATCH):
        part.copy_(standardise(part.float()))
    held_out, rest = (rows.to(bank.device) for rows in draw_held_out(len(bank), seed))
    scores = {}
    for epochs in EPOCHS:
        probes = fit_attentive(held, rest, num_classes, queries, RATES, epochs, seed)
        for rate, probe in zip(RATES, probes, strict=True):
            hits = [probe(bank[rows].float()).argmax(dim=1) == labels[rows] for rows in held_out.split(PROBE_BATCH)]
            scores[rate, epochs] = 100 * float(torch.cat(hits).double().mean())
    rate, epochs = max(scores, key=scores.__getitem__)
    (probe,) = fit_attentive(held, torch.cat([held_out, rest]), num_classes, queries, [rate], epochs, seed)
    held_out_scores = {f'rate {rate:g}, {epochs} epochs': score for (rate, epochs), score in scores.items()}
    settings = dict(queries=queries, rate=rate, epochs=epochs, held_out=held_out_scores)
    return lambda patches: probe(standardise(patches)).argmax(dim=1), settings


def fit_attentive(
    held: tuple[Tensor, Tensor],
    rows: Tensor,
    num_classes: int,
    queries: int,
    rates: Sequence[float],
    epochs: int,
    seed: int = 0,
) -> list[nn.Module]:
    """Trains an `attentive_classifier` at each rate with AdamW and half a cosine, all on the same batches.

    They learn from these rows, int64 (m,), of the held patches (M, P, C) and classes (M,).
    """
    (bank, labels), generator = held, torch.Generator().manual_seed(seed)
    dims, size = bank.shape[2], min(len(rows), max(16, min(PROBE_BATCH, len(rows) // 8)))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probes = [attentive_classifier(dims, queries, num_classes).to(rows.device) for _ in rates]
    groups = [dict(params=probe.parameters(), lr=rate) for probe, rate in zip(probes, rates, strict=True)]
    optimizer = torch.optim.AdamW(groups)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, epochs * (len(rows) // size)))
    with torch.enable_grad():
        for _ in range(epochs):
            order = rows[torch.randperm(len(rows), generator=generator).to(rows.device)]
            for first in range(0, len(rows) - size + 1, size):
                batch = order[first : first + size]
                patches = bank[batch].float()
                loss = torch.stack([F.cross_entropy(probe(patches), labels[batch]) for probe in probes]).sum()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                schedule.step()
    return [probe.eval().requires_grad_(False) for probe in probes]


def confusion(predicted: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """Counts, float64 (K, K) on the CPU, by true class and by `predicted`, int64 of any shape.

    Targets are integers, ignored if they are not below `num_classes`, or shares of classes (*shape, K).
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


def hits_and_unions(counts: Tensor) -> tuple[Tensor, Tensor]:
    """For each class, by the counts of `confusion`: right pixels, and pixels that are of it or predicted as it."""
    hits = counts.diagonal()
    return hits, counts.sum(dim=0) + counts.sum(dim=1) - hits


def class_ious(hits: Tensor, unions: Tensor) -> Tensor:
    """Intersection over union of each class (..., K); NaN if it is neither present nor predicted."""
    return hits / unions


def average_precisions(scores: Tensor, truth: Tensor) -> Tensor:
    """Average precision of each class in %, of scores (N, K) and of a random order (2, K); nan without images of it.

    A random order has more than the frequency of a class, because some of the few images may come early by chance.
    """
    number, harmonic = len(truth), float((1 / torch.arange(1, len(truth) + 1)).sum())
    share_of_others = (truth.sum(dim=0) - 1) / (number - 1)
    chance = 100 * (share_of_others * (number - harmonic) + harmonic) / number
    found = torch.stack([AveragePrecision.calculate(scores, truth, average=None), chance])
    return found.where(truth.any(dim=0), torch.nan)


def accuracy(counts: Tensor) -> float:
    return float(counts.diagonal().sum() / counts.sum())


def check_same_classes(train: BaseDataset, val: BaseDataset) -> int:
    """Returns the number of classes; UserError if the two datasets differ in them."""
    classes, others = train.metainfo['classes'], val.metainfo['classes']
    if classes != others:
        raise UserError(
            f'the training images have {len(classes)} classes, the validation images {len(others)}, '
            'or their names differ; expected the same'
        )
    return len(classes)
