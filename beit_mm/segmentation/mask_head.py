"""Segmentation by classifying masks, with plain Transformer blocks and no compiled operators.

Learned queries precede the patches of an image, and blocks mix both. Then each query gives a mask, and a class or "no
object". In training, Hungarian matching decides which query stands for which class of the label map.

Shapes: B images, Q queries, N tokens (queries, other prefix tokens, h*w patches), C channels, K classes, M objects (the
classes of an image, with padding), P points, R pairs of a query and an object.

Sources: MaskFormer and Mask2Former (arXiv 2107.06278, 2112.01527): scores and losses. EoMT (arXiv 2503.19108): masks,
queries in the backbone, annealing. PMT (github.com/tue-mps/pmt): a decoder of plain blocks.
"""

import math
from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.dist import all_reduce
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.structures import SegDataSample
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchvision.models.convnext import LayerNorm2d

from beit_mm.engine.progress import progress_of
from beit_mm.errors import UserError, check_choice
from beit_mm.models.vit import NORM_EPS, BEiTBackbone, Block
from beit_mm.positions import Grid, take_tokens
from beit_mm.registry import MODELS

WEIGHTS = dict(loss_class=2.0, loss_mask=5.0, loss_dice=5.0)
OVERSAMPLE, IMPORTANCE = 3, 0.75  # three quarters of the points are the least certain of three times as many
NO_OBJECT = 0.1  # weight of this class in the cross-entropy
QUERIES_AT_ONCE = 16  # whose masks are resized together: 70 MB for each 1024 x 1024 pixels
IGNORED = -1  # label of pixels that do not count

Prediction = tuple[Tensor, Tensor]  # logits of masks (B, Q, 4h, 4w) and of classes (B, Q, K + 1)


@MODELS.register_module()
class MaskClassificationHead(BaseDecodeHead):
    """Predicts a mask and a class for each of a number of learned queries.

    In training, a query attends in each block only to the patches inside its latest mask. As training goes on, this
    masking ends in one block after another, the first block first (`masking_probability`). Inference never masks, so a
    validation before the end of a training underrates the weights.

    Args:
        in_channels: width C of the features.
        num_classes: K.
        num_queries: Q; if an image has more classes, its Q most frequent ones are learned.
        num_blocks: blocks that mix queries and patches.
        where: 'decoder': the head has these blocks itself, and takes feature maps of any backbone, which may be frozen;
            'backbone': they are the last blocks of a SlidingSegmentor's BEiTBackbone, in which the queries are further
            prefix tokens, with the position bias of the class token; its final norm precedes the predictions.
        in_index: feature maps of a decoder; each gets a norm and a linear layer, then all are added.
        num_points: P, number of points at which the loss reads a mask.
        ignore_index: as in mmseg.
    """

    gives_probabilities = True  # its result needs no softmax

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        num_queries: int = 100,
        num_blocks: int = 4,
        where: str = 'decoder',
        in_index: int | Sequence[int] = -1,
        num_points: int = 12544,
        ignore_index: int | None = 255,
    ):
        in_index = [in_index] if isinstance(in_index, int) else list(in_index)
        super().__init__(
            [in_channels] * len(in_index),
            in_channels,
            num_classes=num_classes,
            out_channels=num_classes,
            threshold=math.inf if num_classes == 1 else None,  # never exceeded: the only class is everywhere
            dropout_ratio=0,
            in_index=in_index,
            input_transform='multiple_select',
            loss_decode=(),
            ignore_index=ignore_index,
            init_cfg=None,
        )
        check_choice('where', where, ('decoder', 'backbone'))
        self.where, self.num_blocks, self.num_queries, self.num_points = where, num_blocks, num_queries, num_points
        self.conv_seg = None  # not used: mmseg's classifier of pixels
        self.joined: list[nn.Module] = []  # blocks of the backbone, in a list: the head does not own their parameters
        self.with_cp, dims = False, in_channels
        if where == 'decoder':
            laterals = (nn.Sequential(nn.LayerNorm(dims, eps=NORM_EPS), nn.Linear(dims, dims)) for _ in in_index)
            self.laterals = nn.ModuleList(laterals)
            heads = dims // math.gcd(dims, 64)
            self.blocks = nn.ModuleList(Block(dims, heads, 4 * dims, 0.0, None, None) for _ in range(num_blocks))
        self.queries = nn.Parameter(torch.randn(1, num_queries, dims))
        self.norm = nn.LayerNorm(dims, eps=NORM_EPS)
        self.class_predictor = nn.Linear(dims, num_classes + 1)
        hidden = nn.Linear(dims, dims), nn.GELU(), nn.Linear(dims, dims), nn.GELU()
        self.mask_mlp = nn.Sequential(*hidden, nn.Linear(dims, dims))
        self.upscale = nn.Sequential(*upscaling(dims), *upscaling(dims))

    def join(self, backbone: BEiTBackbone) -> None:
        """Takes the backbone's last blocks for the queries, and the place of its final norm."""
        check_choice('decode_head.num_blocks', self.num_blocks, range(1, backbone.num_layers + 1))
        self.joined = [*backbone.blocks[-self.num_blocks :]]
        self.with_cp = backbone.with_cp
        self.norm.eps, backbone.norm = backbone.norm_eps, None

    def forward(self, inputs: Sequence[Tensor], size: Grid | None = None) -> Tensor:
        """Probabilities (B, K, H, W), which do not add up to 1, at a size (H, W), by default that of the masks."""
        masks, classes = self.predictions(inputs)[-1]
        with torch.autocast(masks.device.type, enabled=False):
            return class_scores(masks, classes, size)

    def predict(self, inputs: Sequence[Tensor], batch_img_metas: list[dict], test_cfg: dict) -> Tensor:
        """Probabilities (B, K, H, W) at the size of the images or windows, for mmseg's EncoderDecoder."""
        meta = batch_img_metas[0]
        is_window = isinstance(meta['img_shape'], torch.Size)  # see mmseg's BaseDecodeHead.predict_by_feat
        return self.forward(inputs, meta['pad_shape' if 'pad_shape' in meta and not is_window else 'img_shape'][:2])

    def predictions(self, inputs: Sequence[Tensor]) -> list[Prediction]:
        """The prediction after all blocks; in training, those before each block precede it."""
        x, grid, bias = self.sequence(inputs)  # B, N, C
        found = []
        for index, block in enumerate(self.joined or self.blocks):
            hidden = None
            if self.training:
                found.append(self.predict_masks(x, grid))
                probability = masking_probability(index, self.num_blocks, progress_of(), self.where)
                hidden = hidden_tokens(found[-1][0], grid, x.shape[1], probability)  # B, Q, N
            if self.with_cp and self.training:
                x = checkpoint(block, x, grid, bias, None, hidden, use_reentrant=False)
            else:
                x = block(x, grid, bias, None, hidden)
        return [*found, self.predict_masks(x, grid)]

    def sequence(self, inputs: Sequence[Tensor]) -> tuple[Tensor, Grid, Tensor | None]:
        """Queries, other prefix tokens and patches (B, N, C), the patch grid, and the bias that the blocks share."""
        bias = None
        if self.where == 'backbone':
            x, grid, bias = inputs  # of SlidingSegmentor.extract_feat
        else:
            features = [inputs[index] for index in self.in_index]  # each B, C, h, w
            grid = features[0].shape[2], features[0].shape[3]
            layers = zip(self.laterals, features, strict=True)
            x = sum(lateral(feature.flatten(2).transpose(1, 2)) for lateral, feature in layers)  # B, h*w, C
        queries = self.queries.expand(x.shape[0], -1, -1).to(x.dtype)
        return torch.cat([queries, x], dim=1), grid, bias

    def predict_masks(self, x: Tensor, grid: Grid) -> Prediction:
        x = self.norm(x)  # B, N, C
        queries, patches = x[:, : self.num_queries], x[:, x.shape[1] - grid[0] * grid[1] :]
        fine = self.upscale(patches.transpose(1, 2).unflatten(2, grid))  # B, C, 4h, 4w
        masks = torch.einsum('bqc,bchw->bqhw', self.mask_mlp(queries), fine)
        return masks.float(), self.class_predictor(queries).float()

    def loss(self, inputs: Sequence[Tensor], batch_data_samples: list[SegDataSample], train_cfg: dict) -> dict:
        """Cross-entropy of the classes, and binary cross-entropy and dice loss of the masks, over all predictions.

        The host waits for the device once, in `assign`.
        """
        predictions = self.predictions(inputs)
        labels = torch.stack([sample.gt_sem_seg.data[0] for sample in batch_data_samples])  # B, H, W
        with torch.autocast(labels.device.type, enabled=False):
            return self.mask_losses(predictions, labels)

    def mask_losses(self, predictions: list[Prediction], labels: Tensor) -> dict[str, Tensor]:
        """The losses for label maps int64 (B, H, W)."""
        batch, num_queries = predictions[0][1].shape[:2]
        if self.ignore_index is not None:
            labels = labels.masked_fill(labels == self.ignore_index, IGNORED)
        images = torch.arange(batch, device=labels.device)
        objects, number = objects_of(labels, self.num_classes, num_queries)  # B, M; B
        # Divisors are means over the processes, so that two learn what one learns on the joint batch.
        num_pairs = number.sum().float()
        all_reduce(num_pairs, op='mean')
        divisor, class_divisor = num_pairs.clamp(min=1), num_pairs + NO_OBJECT * (batch * num_queries - num_pairs)
        with torch.no_grad():
            points = torch.rand(batch, self.num_points, 2, device=labels.device)
            truth = targets_at(labels, images, objects, points)
            costs = [matching_costs(found, objects, points, *truth) for found in predictions]
            pairs = assign(torch.stack(costs), number)  # predictions, 3, R
        terms = []
        for (masks, classes), (image, query, place) in zip(predictions, pairs, strict=True):
            matched = objects[image, place]  # R
            target = torch.full((batch, num_queries), self.num_classes, device=labels.device)
            target[image, query] = matched
            nats = F.cross_entropy(classes.flatten(0, 1), target.flatten(), reduction='none')  # B * Q
            nats = nats * torch.where(target.flatten() == self.num_classes, NO_OBJECT, 1.0)
            bce, dice = point_losses(masks[image, query], labels, image, matched, self.num_points)  # R
            terms.append(torch.stack([nats.sum() / class_divisor, bce.sum() / divisor, dice.sum() / divisor]))
        sums = torch.stack(terms).sum(dim=0)
        return {name: weight * value for (name, weight), value in zip(WEIGHTS.items(), sums, strict=True)}


def upscaling(dims: int) -> list[nn.Module]:
    """Layers that double height and width."""
    depthwise = nn.Conv2d(dims, dims, 3, padding=1, groups=dims, bias=False)
    return [nn.ConvTranspose2d(dims, dims, 2, stride=2), nn.GELU(), depthwise, LayerNorm2d(dims, eps=NORM_EPS)]


def class_scores(masks: Tensor, classes: Tensor, size: Grid | None = None) -> Tensor:
    """Probabilities (B, K, H, W): the sum over the queries of P(class) * P(pixel in the mask).

    The logits of the masks are resized to `size` (H, W) before, because resizing the sum would blur its edges.
    """
    size = masks.shape[2:] if size is None else size
    shares = classes.softmax(dim=-1)[..., :-1].transpose(1, 2)  # B, K, Q
    scores = masks.new_zeros(*shares.shape[:2], size[0] * size[1])
    for share, logits in zip(shares.split(QUERIES_AT_ONCE, dim=2), masks.split(QUERIES_AT_ONCE, dim=1), strict=True):
        inside = F.interpolate(logits, size, mode='bilinear').sigmoid_()  # B, a few queries, H, W
        scores = scores.baddbmm_(share, inside.flatten(2))
    return scores.unflatten(2, size)


# Masked attention


def hidden_tokens(masks: Tensor, grid: Grid, num_tokens: int, probability: float) -> Tensor | None:
    """True at patches outside each query's mask, bool (B, Q, N); each query is masked with this probability."""
    if probability == 0:
        return None
    with torch.no_grad():
        hidden = F.interpolate(masks, grid, mode='bilinear').flatten(2) <= 0  # B, Q, h*w
        if probability < 1:
            hidden &= torch.rand(*hidden.shape[:2], 1, device=hidden.device) < probability
        return F.pad(hidden, (num_tokens - hidden.shape[2], 0))


def masking_probability(block: int, num_blocks: int, progress: float, where: str) -> float:
    """Probability that a query is masked in a block, after this share of the training.

    It is 1 at first, falls during a sixth of the training as a polynomial of degree 0.9, and is 0 afterwards. The falls
    begin at even distances, from 1/6 of the training for the first block to 4/6 for the last; in a decoder, the first
    block's is from 0 to 0.15. Sources: the configs of EoMT; of PMT, `image/configs/ade20k/semantic/pmt_l_512.yaml`.
    """
    begin, length = 1 / 6 + block / max(num_blocks - 1, 1) / 2, 1 / 6
    if where == 'decoder' and block == 0:
        begin, length = 0.0, 0.15
    return (1 - min(max((progress - begin) / length, 0.0), 1.0)) ** 0.9


# Objects, points and matching


def objects_of(labels: Tensor, num_classes: int, most: int) -> tuple[Tensor, Tensor]:
    """Classes in each image, int64 (B, M), the most frequent first, and how many of them occur, int64 (B,).

    The number is -1 for an image with a label that is not a class; `assign` refuses it, where the host waits anyway.
    """
    batch, rows = len(labels), num_classes + 1  # the last row counts what is ignored
    labels = labels.flatten(1)
    is_class = (labels >= 0) & (labels < num_classes)
    wrong = (~is_class & (labels != IGNORED)).any(dim=1)
    labels = labels.masked_fill(~is_class, num_classes)
    index = (labels + rows * torch.arange(batch, device=labels.device)[:, None]).flatten()
    pixels = torch.zeros(batch * rows, dtype=torch.int64, device=labels.device)
    pixels = pixels.scatter_add_(0, index, torch.ones_like(index)).view(batch, rows)[:, :-1]
    pixels, classes = pixels.topk(min(most, num_classes), dim=1)
    return classes, (pixels > 0).sum(dim=1).masked_fill(wrong, -1)


def targets_at(labels: Tensor, images: Tensor, objects: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
    """Reads the masks of the labels `objects`, int64 (R, M), in `images`, int64 (R,), of label maps (B, H, W).

    They are read bilinearly at points (R, P, 2), x and y from 0 to 1. Returns the values (R, P, M), and whether each
    point counts, 1 or 0 (R, P): it does not if one of the pixels read is ignored.
    """
    height, width = labels.shape[1:]
    column, row = points[..., 0] * width - 0.5, points[..., 1] * height - 0.5  # R, P: from the first pixel's centre
    left, top = column.floor().long(), row.floor().long()
    x_share, y_share = column - left, row - top
    targets = points.new_zeros(*points.shape[:2], objects.shape[1])
    counts = torch.ones_like(x_share, dtype=torch.bool)
    for right, down in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, y = left + right, top + down
        inside = (x >= 0) & (x < width) & (y >= 0) & (y < height)  # outside the image every mask is 0
        weight = inside * (x_share if right else 1 - x_share) * (y_share if down else 1 - y_share)
        place = (images[:, None] * height + y.clamp(0, height - 1)) * width + x.clamp(0, width - 1)
        label = labels.flatten()[place]  # R, P
        targets += weight[..., None] * (label[..., None] == objects[:, None])
        counts &= (label != IGNORED) | (weight == 0)
    return targets * counts[..., None], counts.float()


def logits_at(masks: Tensor, points: Tensor) -> Tensor:
    """Mask logits (R, Q, h, w) at points (R, P, 2), bilinearly: (R, Q, P)."""
    grid = (2 * points - 1)[:, None]  # R, 1, P, 2
    return F.grid_sample(masks, grid, align_corners=False)[:, :, 0]


def matching_costs(prediction: Prediction, objects: Tensor, points: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
    """What it costs to match each query with each object, (B, Q, M): the losses, with -p in place of -log p.

    `targets` (B, P, M) and `counts` (B, P) are from `targets_at`, at the points (B, P, 2).
    """
    masks, classes = prediction
    logits = logits_at(masks, points)  # B, Q, P
    counts = counts[:, None]  # B, 1, P
    probabilities = logits.sigmoid() * counts
    by_object = objects[:, None].expand(-1, logits.shape[1], -1)  # B, Q, M
    of_class = -classes.softmax(dim=-1).gather(2, by_object)
    # -log sigmoid(x) = softplus(x) - x
    bce = (F.softplus(logits) * counts).sum(dim=2, keepdim=True) - logits @ targets
    bce = bce / counts.sum(dim=2, keepdim=True).clamp(min=1)
    areas = probabilities.sum(dim=2, keepdim=True) + targets.sum(dim=1, keepdim=True)  # B, Q, M
    dice = 1 - (2 * probabilities @ targets + 1) / (areas + 1)
    return WEIGHTS['loss_class'] * of_class + WEIGHTS['loss_mask'] * bce + WEIGHTS['loss_dice'] * dice


def assign(costs: Tensor, number: Tensor) -> Tensor:
    """Pairs queries with objects at the least sum of costs, by the Hungarian algorithm on the host.

    Takes the costs (L, B, Q, M) of L predictions, and the `number` of objects, int64 (B,), after which columns are
    padding. Returns int64 (L, 3, R): image, query and object of each pair. The host waits for one transfer.
    """
    from scipy.optimize import linear_sum_assignment  # takes a third of a second

    most = torch.finfo(torch.float32).max  # scipy refuses NaN
    together = torch.cat([costs.nan_to_num(most, most, most).flatten(), number.float()]).cpu().numpy()
    table, counts = np.split(together, [costs.numel()])
    if (counts < 0).any():
        raise UserError(
            f'label map {int(counts.argmin())} of the batch has a label that is not a class; expected 0 to '
            'num_classes - 1 or ignore_index; set num_classes, or reduce_zero_label'
        )
    found = []
    for costs_of_images in table.reshape(costs.shape):
        pairs = [linear_sum_assignment(c[:, : int(n)]) for c, n in zip(costs_of_images, counts, strict=True)]
        images = np.arange(len(counts)).repeat([len(matched) for matched, _ in pairs])
        queries, places = (np.concatenate(part) for part in zip(*pairs, strict=True))
        found.append(np.stack([images, queries, places]))
    return torch.from_numpy(np.stack(found)).to(costs.device, non_blocking=True)


def point_losses(masks: Tensor, labels: Tensor, images: Tensor, objects: Tensor, num_points: int) -> tuple[Tensor, ...]:
    """Binary cross-entropy and dice loss (R,) of mask logits (R, h, w) of objects (R,), at points drawn for each."""
    masks = masks[:, None]  # R, 1, h, w
    with torch.no_grad():
        uncertain = int(IMPORTANCE * num_points)
        candidates = torch.rand(len(masks), OVERSAMPLE * num_points, 2, device=masks.device)
        index = logits_at(masks, candidates)[:, 0].abs().topk(uncertain, dim=1, largest=False).indices
        others = torch.rand(len(masks), num_points - uncertain, 2, device=masks.device)
        points = torch.cat([take_tokens(candidates, index), others], dim=1)  # R, P, 2
        targets, counts = targets_at(labels, images, objects[:, None], points)
        targets = targets[..., 0]  # R, P, as the counts
    logits = logits_at(masks, points)[:, 0]  # R, P
    bce = F.binary_cross_entropy_with_logits(logits, targets, reduction='none') * counts
    probabilities = logits.sigmoid() * counts
    areas = probabilities.sum(dim=1) + targets.sum(dim=1)
    dice = 1 - (2 * (probabilities * targets).sum(dim=1) + 1) / (areas + 1)
    return bce.sum(dim=1) / counts.sum(dim=1).clamp(min=1), dice
