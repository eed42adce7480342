"""What frozen features are worth: nearest neighbours and linear classifiers, of images and of patches.

Shapes: N images or patches to be classified, M with labels (the bank), C channels, K classes, h x w patches.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import all_gather
from torch import Tensor, nn
from torch.utils.data import DataLoader

from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.models.vit import BEiTBackbone, block_indices
from beit_mm.positions import Grid
from beit_mm.precision import inference_autocast
from beit_mm.terminal import UserError

CHUNK = 1024  # rows compared with the whole bank at a time
ROWS = 65536  # rows of which a linear layer's gradient is computed at a time
PENALTIES = (1e-1, 1e-2, 1e-3, 1e-4, 1e-5, 1e-6)  # of `fit_linear`, which are tried
HELD_OUT = 0.1  # part of the images with labels by which the penalty is chosen
MAX_PATCHES = 50_000  # of the training images, in the bank


# --- features -------------------------------------------------------------------------------------


def usual_layer(depth: int) -> int:
    """The last of the first two thirds of the blocks, 0-based: the last ones turn towards the tokens they predict."""
    return (2 * depth // 3 - 1) % depth


def hidden_states(backbone: BEiTBackbone, images: Tensor, layers: int | Sequence[int]) -> tuple[list[Tensor], Grid]:
    """Outputs of blocks for unmasked images, without the final norm.

    Args:
        backbone: in evaluation mode.
        images: (B, C, H, W) normalised.
        layers: blocks, 0-based, negative from the end. Those after the last of them are not computed.

    Returns:
        (B, 1 + h*w, C) for each, the class token first; and the patch grid (h, w).

    Raises:
        ValueError: there is no such block.
    """
    indices = block_indices(layers, backbone.num_layers)
    x, grid, shared_bias = backbone.embed(images, None)  # B, N, C
    states: dict[int, Tensor] = {}
    done = 0
    for index in sorted(set(indices)):
        x = states[index] = backbone.run_blocks(backbone.blocks[done : index + 1], x, grid, shared_bias)
        done = index + 1
    return [states[index] for index in indices], grid


@torch.no_grad()
def image_features(
    backbone: BEiTBackbone, mean: Tensor, std: Tensor, loader: DataLoader, layer: int | None = None, kind: str = 'mean'
) -> tuple[Tensor, Tensor]:
    """One feature for each image of a labelled dataset.

    Args:
        backbone: in evaluation mode.
        mean, std: (C, 1, 1) of pixels 0-255, on the backbone's device.
        loader: of an ImageFolder whose pipeline ends with PackInputs.
        layer: block, 0-based, negative from the end; None for `usual_layer`.
        kind: 'mean' of the patches, or 'class_token'.

    Returns:
        Features float32 (N, C) and classes int64 (N,), in the dataset's order, on the backbone's device; of all
        processes together.

    Raises:
        ValueError: samples lack `sample_idx`, by which images that a sampler repeats are known.
    """
    layer = usual_layer(backbone.num_layers) if layer is None else layer
    pooled, rows = [], []
    for batch in loader:
        if 'sample_idx' not in batch['data_samples'][0]:
            raise UserError("no 'sample_idx' among the meta_keys of PackInputs, where it is by default")
        images = (batch['inputs'].to(mean.device).float() - mean) / std  # B, C, H, W
        with inference_autocast(mean.device):
            (x,), _ = hidden_states(backbone, images, layer)  # B, 1 + h*w, C
        pooled.append(x[:, 1:].mean(dim=1) if kind == 'mean' else x[:, 0])
        rows += [(sample.sample_idx, int(sample.gt_label)) for sample in batch['data_samples']]
    features = torch.cat(all_gather(torch.cat(pooled).float()))
    index, labels = torch.cat(all_gather(torch.tensor(rows, device=mean.device))).unbind(1)
    _, once = np.unique(index.cpu(), return_index=True)  # samplers repeat images to give each process as many
    return features[once], labels[once]


@torch.no_grad()
def patch_features(
    backbone: BEiTBackbone, mean: Tensor, std: Tensor, samples: Iterable[dict], layer: int | None = None
) -> Iterator[tuple[Tensor, Tensor]]:
    """Features of the patches of each image, beside its label map.

    Args:
        backbone, mean, std, layer: as `image_features`.
        samples: of a `patch_dataset`.

    Yields:
        Features float32 (h, w, C) on the backbone's device; labels uint8 (H, W), of the annotation's own size.
    """
    layer = usual_layer(backbone.num_layers) if layer is None else layer
    for sample in samples:
        image = torch.from_numpy(sample['img']).permute(2, 0, 1)[None].to(mean.device).float()  # 1, C, H, W
        with inference_autocast(mean.device):
            (x,), grid = hidden_states(backbone, (image - mean) / std, layer)
        yield x[0, 1:].float().unflatten(0, grid), torch.from_numpy(sample['gt_seg_map'])


def patch_dataset(backbone: BEiTBackbone, short_side: int | None, **options: Any) -> SegmentationFolder:
    """Images for `patch_features`, shown whole, with their label maps.

    Args:
        backbone: its patches and, without a `short_side` in pixels, its image size are taken.
        options: of the SegmentationFolder.

    Raises:
        ValueError: no annotations are named, or the backbone takes other images than RGB.
    """
    if (bands := backbone.patch_embed.proj.in_channels) != 3:
        raise UserError(f'a model of images with {bands} bands; features of patches with labels need RGB images')
    side = min(backbone.grid) * backbone.patch_size if short_side is None else short_side
    resize = dict(type='beit_mm.ResizeToPatches', short_side=side, patch_size=backbone.patch_size)
    steps = [dict(type='beit_mm.LoadImage'), resize, dict(type='beit_mm.LoadAnnotation')]
    # mmengine's way to keep a list compactly collects all garbage first, which takes most of a second
    dataset = SegmentationFolder(**dict(options, pipeline=steps, test_mode=True, serialize_data=False))
    if not dataset.data_prefix.get('seg_map_path'):
        raise UserError('the images have no annotations; expected data_prefix=dict(img_path=..., seg_map_path=...)')
    return dataset


def class_shares(labels: Tensor, grid: Grid, num_classes: int) -> Tensor:
    """The part of each patch's pixels that each class has.

    Args:
        labels: uint8 (H, W); what is no class, from `num_classes` on, is nobody's.
        grid: patch grid (h, w) that the whole map is cut into. A pixel belongs to the patch that its centre is in.

    Returns:
        float32 (h, w, K); a patch's sum is the part of its pixels that have a class.
    """
    rows, columns = (
        ((torch.arange(side) * 2 + 1) * cells).div(2 * side, rounding_mode='floor')
        for side, cells in zip(labels.shape, grid, strict=True)
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
    """Patches with labels, drawn at random, as many of each image: the bank.

    Patches of which less than half has a class are left out.

    Args:
        maps: of `patch_features`.
        num_classes: K.
        num_images: how many there are.
        max_patches: of all images together.
        seed: of the drawing.

    Returns:
        Features (M, C); the classes' shares of their pixels (M, K), each row adding up to 1; the number of the image
        int64 (M,); on the features' device.

    Raises:
        ValueError: no patch has a class.
    """
    generator = torch.Generator().manual_seed(seed)
    per_image = -(-max_patches // num_images)  # rounded up
    features, targets, images = [], [], []
    for number, (patches, labels) in zip(count(), maps):
        shares = class_shares(labels, patches.shape[:2], num_classes).flatten(0, 1)  # h*w, K
        usable = (shares.sum(dim=1) >= 0.5).nonzero().squeeze(1)
        chosen = usable[torch.randperm(len(usable), generator=generator)[:per_image]]
        features.append(patches.flatten(0, 1)[chosen.to(patches.device)])
        targets.append(F.normalize(shares[chosen], p=1, dim=1).to(patches.device))
        images.append(torch.full((len(chosen),), number, device=patches.device))
    if not sum(map(len, images)):
        raise UserError('no patch of the training images has a class; are 0 unlabelled and classes from 1 on meant?')
    kept = torch.randperm(sum(map(len, images)), generator=generator)[:max_patches].sort().values
    bank, answers, numbers = (torch.cat(parts)[kept.to(parts[0].device)] for parts in (features, targets, images))
    return bank, answers, numbers


# --- nearest neighbours ---------------------------------------------------------------------------


def neighbours(features: Tensor, bank: Tensor, k: int) -> Iterator[tuple[Tensor, Tensor]]:
    """The k nearest of a bank (M, C), of `CHUNK` features of (N, C) after another.

    Yields:
        Cosines (n, k), highest first, and int64 (n, k) rows of the bank; k is at most M.
    """
    bank = F.normalize(bank, dim=1)
    for chunk in F.normalize(features, dim=1).split(CHUNK):
        yield (chunk @ bank.T).topk(min(k, len(bank)), dim=1)


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
    predicted = []
    for cosine, nearest in neighbours(features, bank, k):
        votes = cosine.new_zeros(len(cosine), num_classes)
        votes.scatter_add_(1, labels[nearest], ((cosine - 1) / temperature).exp())
        predicted.append(votes.argmax(dim=1))
    return torch.cat(predicted)


def knn_shares(features: Tensor, bank: Tensor, targets: Tensor, k: int = 30) -> Tensor:
    """Scores (N, K): the mean over the k nearest neighbours of their classes' shares, `targets` (M, K)."""
    return torch.cat([targets[nearest].mean(dim=1) for _, nearest in neighbours(features, bank, k)])


# --- a linear layer -------------------------------------------------------------------------------


class Standardise:
    """Features with mean 0 and variance 1 in each channel, by those of a bank (M, C)."""

    def __init__(self, bank: Tensor):
        self.mean = bank.mean(dim=0)
        self.std = bank.std(dim=0, correction=0).clamp(min=1e-6)  # a channel may be the same everywhere

    def __call__(self, features: Tensor) -> Tensor:
        return (features - self.mean) / self.std


def fit_linear(
    features: Tensor,
    targets: Tensor,
    num_classes: int,
    penalty: float,
    steps: int = 100,
    start: nn.Linear | None = None,
) -> nn.Linear:
    """Multinomial logistic regression by L-BFGS: minimises mean cross entropy + penalty / 2 * sum of squared weights.

    Args:
        features: (M, C), standardised.
        targets: classes int64 (M,), or their shares (M, K).
        num_classes: K.
        penalty: the intercept has none.
        steps: iterations at most.
        start: what to begin with; zeros without it.

    Returns:
        The layer, C to K.
    """
    layer = nn.Linear(features.shape[1], num_classes, device=features.device)
    with torch.no_grad():
        layer.weight.copy_(start.weight) if start else layer.weight.zero_()
        layer.bias.copy_(start.bias) if start else layer.bias.zero_()
    optimizer = torch.optim.LBFGS(layer.parameters(), max_iter=steps, line_search_fn='strong_wolfe')

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
    features: Tensor,
    targets: Tensor,
    num_classes: int,
    images: Tensor,
    by_class: bool,
    penalties: Sequence[float] = PENALTIES,
    seed: int = 0,
) -> tuple[nn.Linear, float, dict[float, float]]:
    """A linear layer on all features, with the penalty that is best on a tenth of the images when fitted on the rest.

    Args:
        features, targets, num_classes: as `fit_linear`.
        images: int64 (M,), the image that each feature is of: those of one image stay together.
        by_class: the best by mean intersection over union, else by the part of right answers.
        penalties: from the largest to the smallest; each fit begins with the last one's result.
        seed: of the choice of images.

    Returns:
        The layer, its penalty, and the figure of each penalty in %.

    Raises:
        ValueError: fewer than two images.
    """
    names, image = images.unique(return_inverse=True)
    if len(names) < 2:
        raise UserError(f'{len(names)} image with labels; expected at least 2, one of them to choose the penalty by')
    order = torch.randperm(len(names), generator=torch.Generator().manual_seed(seed)).to(images.device)
    held_out = torch.isin(image, order[: max(1, round(HELD_OUT * len(names)))])
    figures: dict[float, float] = {}
    layers: dict[float, nn.Linear] = {}
    layer = None
    for penalty in penalties:
        layer = layers[penalty] = fit_linear(features[~held_out], targets[~held_out], num_classes, penalty, start=layer)
        counts = confusion(layer(features[held_out]).argmax(dim=1), targets[held_out], num_classes)
        figures[penalty] = 100 * (mean_iou(counts) if by_class else accuracy(counts))
    best = max(figures, key=figures.__getitem__)
    return fit_linear(features, targets, num_classes, best, start=layers[best]), best, figures


# --- figures --------------------------------------------------------------------------------------


def confusion(predicted: Tensor, targets: Tensor, num_classes: int) -> Tensor:
    """Counts float64 (K, K), the right class by the predicted one, on the CPU.

    Args:
        predicted: int64, any shape, classes.
        targets: integers of that shape, where what is no class is passed over; or shares of classes, (*shape, K).
        num_classes: K.
    """
    if targets.is_floating_point():
        counts = targets.new_zeros(num_classes, num_classes, dtype=torch.float64)
        return counts.index_add_(0, predicted.flatten(), targets.flatten(0, -2).double()).T.cpu()
    known = targets < num_classes
    pairs = targets[known].long() * num_classes + predicted[known]
    return pairs.bincount(minlength=num_classes**2).view(num_classes, num_classes).double().cpu()


def pixel_scores(scores: Tensor, size: tuple[int, int]) -> Tensor:
    """Scores of the classes at patches (h, w, K), brought to the pixels of an image (K, H, W) bilinearly."""
    return F.interpolate(scores.permute(2, 0, 1)[None], size, mode='bilinear')[0]


def pixel_confusion(scores: Tensor, labels: Tensor) -> Tensor:
    """Counts float64 (K, K) of the pixels of a label map.

    Args:
        scores: of the classes at the patches, (h, w, K).
        labels: uint8 (H, W); what is no class is passed over.
    """
    predicted = pixel_scores(scores, labels.shape).argmax(dim=0)
    return confusion(predicted, labels.to(scores.device), scores.shape[2])


def class_ious(counts: Tensor) -> Tensor:
    """Intersection over union of each class (K,), nan of one that is neither there nor predicted."""
    hit = counts.diagonal()
    return hit / (counts.sum(dim=0) + counts.sum(dim=1) - hit)


def mean_iou(counts: Tensor) -> float:
    """Mean over the classes of intersection over union; a class neither there nor predicted does not count."""
    return float(class_ious(counts).nanmean())


def accuracy(counts: Tensor) -> float:
    """The part of right answers."""
    return float(counts.diagonal().sum() / counts.sum())
