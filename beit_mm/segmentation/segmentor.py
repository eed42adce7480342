"""Segmentation of images of any size: sliding windows, at one scale or at several with flip.

Resizing and averaging are linear, and windows form rows and columns. So for each class c two small matrix products give
what one window adds to the logits of its image:

    logits_image[c] += row_matrix @ logits_window[c] @ column_matrix.T

`row_matrix`, (H, h), upsamples h rows of logits to the pixels of the window, divides each pixel by the number of
windows that cover it, and resizes to H rows. `column_matrix`, (W, w), does the same for columns, and mirrors them back
if the image was flipped. Logits as large as the window or the scaled image are never made.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import groupby, islice, product
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from mmcv.transforms import Resize
from mmengine.model import BaseTTAModel
from mmengine.structures import PixelData
from mmseg.datasets.transforms import PackSegInputs
from mmseg.models.data_preprocessor import SegDataPreProcessor
from mmseg.models.necks import Feature2Pyramid
from mmseg.models.segmentors import EncoderDecoder
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from beit_mm.datasets.transforms import ResizeToScale
from beit_mm.engine.optim import DTYPES
from beit_mm.errors import UserError, check_choice, warn
from beit_mm.features.evaluation import draw_patches
from beit_mm.models.provenance import backbone_of
from beit_mm.precision import inference_autocast, usable_dtype
from beit_mm.registry import MODELS, TRANSFORMS

MAX_LOGITS = 2**27  # numbers, 0.5 GB: larger images (150 classes: above 0.9 MP) get no full logits
RATIOS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)  # as in the released code
ROWS = 256  # rows of an image whose class probabilities are computed together
FLIPS = (False, True)
MAX_WINDOWS = 16  # of an image, whose features serve to fit a head


class View(NamedTuple):
    """An image as the network sees it, and the size of its logits."""

    image: Tensor  # 3, h, w normalised
    size: tuple[int, int]  # H, W of the logits
    flip: bool = False  # segment the mirror image, and mirror its logits back


@MODELS.register_module()
class BandsDataPreprocessor(SegDataPreProcessor):
    """mmseg's SegDataPreProcessor for images of any number of bands; `mean` and `std` have a number for each, 0-255."""

    def __init__(self, mean: Sequence[float], std: Sequence[float], **kwargs) -> None:
        super().__init__(**kwargs)
        for name, values in dict(mean=mean, std=std).items():
            self.register_buffer(name, torch.tensor(values, dtype=torch.float32).view(-1, 1, 1), persistent=False)

    def forward(self, data: dict, training: bool = False) -> dict:
        data = self.cast_data(data)
        inputs = [(image.float() - self.mean) / self.std for image in data['inputs']]  # each C, H, W
        return super().forward(dict(data, inputs=inputs), training)


@MODELS.register_module()
class SlidingSegmentor(EncoderDecoder):
    """mmseg's EncoderDecoder with its own inference, which takes images of any size in little memory.

    The windows of all images of a batch, if these have one size, go through the network together, padded with zeros to
    whole patches (with a pyramid, to whole cells of its coarsest level). A `data_preprocessor` whose `mean` has neither
    one nor three numbers becomes a BandsDataPreprocessor.

    Args: as in EncoderDecoder. `test_cfg` has, besides mmseg's mode='slide',
        crop_size, stride: size and distance of the windows in pixels (height, width); a smaller image is one window.
        precision: of the network at inference, 'bfloat16' (default), 'float16' or 'float32'; sums are always float32.
        windows_per_batch: windows that go through the network together; default 8, 1 on a CPU.
    """

    with_confidence = False  # whether large images get one too, for `confidence_of`; tests do not need it
    with_probabilities = False  # whether images of any size get those of all classes, for `probabilities_of`

    def __init__(self, *args, data_preprocessor: dict | None = None, **kwargs):
        if isinstance(data_preprocessor, dict) and len(data_preprocessor.get('mean') or ()) not in (0, 1, 3):
            data_preprocessor = dict(data_preprocessor, type='beit_mm.BandsDataPreprocessor')
        super().__init__(*args, data_preprocessor=data_preprocessor, **kwargs)
        # whether the head's results, here called logits, need no softmax
        self.gives_probabilities = getattr(self.decode_head, 'gives_probabilities', False)
        self.queries_join_backbone = getattr(self.decode_head, 'where', None) == 'backbone'
        if self.queries_join_backbone:
            backbone = backbone_of(self.backbone)  # perhaps inside a LoRAModel
            if self.with_neck or self.with_auxiliary_head or backbone is None:
                raise UserError("decode_head.where='backbone' needs a BEiTBackbone, no neck and no auxiliary_head")
            self.decode_head.join(backbone)
        # The host does not wait for copies. mmseg 1.2.2 and onedl's 1.4.2 have no argument for it; else it waits.
        self.data_preprocessor._non_blocking = True
        check_test_cfg(self.test_cfg or {})
        self.takes_rgb = not (data_preprocessor or {}).get('bgr_to_rgb', False)

    def init_weights(self) -> None:
        """As in mmengine; a head that joins the backbone also gets the final norm of the backbone's checkpoint."""
        if self.queries_join_backbone:
            backbone_of(self.backbone).norm = self.decode_head.norm
        super().init_weights()
        if self.queries_join_backbone:
            backbone_of(self.backbone).norm = None

    def extract_feat(self, inputs: Tensor) -> Sequence:
        """Feature maps; for a head that joins the backbone: tokens before its blocks, patch grid and shared bias."""
        if not self.queries_join_backbone:
            return super().extract_feat(inputs)
        backbone, head = backbone_of(self.backbone), self.decode_head
        x, grid, bias = backbone.embed(inputs, None)
        x = backbone.run_blocks(backbone.blocks[: -head.num_blocks], x, grid, bias)  # B, N, C
        if bias is not None:  # for all blocks, and for the queries too
            bias = backbone.rel_pos_bias(grid, bias.dtype, head.num_queries + backbone.num_prefix_tokens)
        return x, grid, bias

    def loss(self, inputs: Tensor, data_samples: list[SegDataSample]) -> dict[str, Tensor]:
        """As in mmseg, with label maps padded as the backbone pads images, so that their pixels stay where they are."""
        backbone, ignored = backbone_of(self.backbone), self.decode_head.ignore_index
        bottom, right = (-side % (backbone.patch_size if backbone else 1) for side in inputs.shape[2:])
        if (bottom or right) and ignored is not None:  # else the heads would stretch the padding over the labels
            data_samples = [sample.new() for sample in data_samples]  # the given ones stay as they are
            for sample in data_samples:
                labels = F.pad(sample.gt_sem_seg.data, (0, right, 0, bottom), value=ignored)
                sample.gt_sem_seg = PixelData(data=labels)
        return super().loss(inputs, data_samples)

    def test_step(self, data: dict) -> list[SegDataSample]:
        pairs = list(zip(data['inputs'], data['data_samples'], strict=True))
        if len({image.shape for image, _ in pairs}) > 1:  # mmseg stacks a batch
            singles = [dict(inputs=[image], data_samples=[sample]) for image, sample in pairs]
            return [found for single in singles for found in self.test_step(single)]
        # For an array, mmseg's `inference_model` replaces LoadImage with a loader of BGR that sets img_path=None.
        if self.takes_rgb:
            images = [image.flip(0) if sample.get('img_path', '') is None else image for image, sample in pairs]
            data = dict(data, inputs=images)  # each 3, h, w
        return super().test_step(data)

    val_step = test_step

    def inference(self, inputs: Tensor, batch_img_metas: list[dict] | None = None) -> Tensor:
        logits = list(self.slide([View(image, tuple(inputs.shape[2:])) for image in inputs]))
        return logits[0].unsqueeze(0) if len(logits) == 1 else torch.stack(logits)  # a single image is not copied

    def slide(self, views: Sequence[View]) -> Iterator[Tensor]:
        """Yields the logits of each view, float32 (C, H, W): at each pixel the mean of the windows over it, resized.

        A view that is smaller than a window is a window of its own size.
        Source: mmseg `EncoderDecoder.slide_inference` and `postprocess_result`.
        """
        cfg, device, divisor = self.test_cfg, views[0].image.device, self.divisor
        # On a CPU larger batches gain nothing and cost memory. Masks have scores as large as the windows: at most 1 GB.
        fitting = 2 * MAX_LOGITS // (self.num_classes * math.prod(cfg['crop_size'])) if self.gives_probabilities else 8
        windows_per_batch = cfg.get('windows_per_batch', 1 if device.type == 'cpu' else max(1, min(8, fitting)))
        windows = (window for view in views for window in _windows(view, cfg['crop_size'], cfg['stride']))
        options = self.align_corners, device
        logits_image: Tensor | None = None
        for batch in _batches(windows, windows_per_batch):
            images = torch.stack([window.image for window in batch])  # B, 3, h, w
            bottom, right = (-side % divisor for side in images.shape[2:])
            images = F.pad(images, (0, right, 0, bottom))
            logits = self.logits(images).float()  # B, C, h', w'
            for (_, view, rows, row, columns, column), logits_window in zip(batch, logits, strict=True):
                classes, height, width = logits_window.shape
                if logits_image is None:
                    logits_image = logits.new_zeros(classes, *view.size)  # C, H, W
                y, row_matrix = window_matrix(rows, row, view.size[0], False, height, bottom, *options)
                x, column_matrix = window_matrix(columns, column, view.size[1], view.flip, width, right, *options)
                part = logits_image[:, y, x]
                # the window and the view's logits have the sizes that the network sees: diagonal matrices
                if ((height, width), view.size, view.flip) == (images.shape[2:], view.image.shape[1:], False):
                    coverage = row_matrix.diagonal()[:, None] * column_matrix.diagonal()
                    part.addcmul_(logits_window[:, : len(row_matrix), : len(column_matrix)], coverage)
                else:
                    part += row_matrix @ logits_window @ column_matrix.T
                if (row + 1, column + 1) == (len(rows), len(columns)):  # the view's last window
                    yield logits_image
                    logits_image = None

    def logits(self, images: Tensor) -> Tensor:
        """Logits (B, C, h', w') of images (B, 3, h, w), in the precision of `test_cfg`; masks' are resized to h, w."""
        device, precision = images.device.type, self.test_cfg.get('precision')
        used = usable_dtype(precision or 'bfloat16', device)
        if precision and used != precision:  # mmengine logs a repeated line only once
            warn(f'Segmenting on {device} in {used}, because test_cfg.precision={precision} is slow there.')
        dtype = getattr(torch, used)
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            features = self.extract_feat(images)
            if self.gives_probabilities:
                return self.decode_head(features, images.shape[2:])
            return self.decode_head(features)

    def labelled_patches(
        self, batch: Mapping[str, Any], per_image: int, generator: torch.Generator
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Features (n, C), class shares (n, K) and `sample_idx` (n,) of about `per_image` patches of a batch's images.

        An image is seen in windows side by side, at most MAX_WINDOWS of them; see `draw_patches`.
        """
        patch, crop = self.divisor, self.test_cfg['crop_size']
        for image, sample in zip(batch['inputs'], batch['data_samples'], strict=True):
            size = image.shape[1:]
            labels = F.interpolate(sample.gt_sem_seg.data[None].byte(), size, mode='nearest-exact')[0, 0]
            windows = [*product(*map(window_intervals, size, crop, crop))]
            seen = torch.randperm(len(windows), generator=generator)[:MAX_WINDOWS].tolist()
            for (top, bottom), (left, right) in (windows[place] for place in seen):
                padding = 0, (left - right) % patch, 0, (top - bottom) % patch
                inputs = self.data_preprocessor(dict(inputs=[image[:, top:bottom, left:right]]))['inputs']
                with inference_autocast(inputs.device):
                    (features,) = self.extract_feat(F.pad(inputs, padding))  # 1, C, h, w
                inside = F.pad(labels[top:bottom, left:right], padding, value=self.decode_head.ignore_index)
                options = self.num_classes, math.ceil(per_image / len(seen)), generator
                drawn, shares = draw_patches(features[0].float().permute(1, 2, 0), inside, *options)
                yield drawn, shares, torch.full((len(drawn),), sample.sample_idx, device=drawn.device)

    def postprocess_result(self, seg_logits: Tensor, data_samples: list[SegDataSample] | None = None) -> list:
        """As in mmseg, but very large images get only labels, computed in strips of rows."""
        samples = data_samples or []
        sizes = {sample.ori_shape for sample in samples}
        classes = seg_logits.shape[1]
        changed = any(  # mmseg handles padded and mirrored images; its SegTTAModel needs the logits of each view
            'flip' in sample or any(sample.get('img_padding_size', sample.get('padding_size', ())))
            for sample in samples
        )
        large = classes > 1 and len(sizes) == 1 and classes * math.prod(*sizes) > MAX_LOGITS
        if changed or self.with_probabilities or not large:
            samples = super().postprocess_result(seg_logits, data_samples)
            if self.gives_probabilities:  # `confidence_of` would treat them as logits
                for sample in samples:
                    scores = sample.seg_logits.data
                    if classes == 1:  # mmseg has taken its sigmoid
                        scores = scores.logit()
                    sample.confidence = PixelData(data=share_of_highest(scores)[None])
                    if self.with_probabilities:
                        sample.probabilities = PixelData(data=shares_of_classes(scores))
            return samples
        confidence_of_strip = share_of_highest if self.gives_probabilities else highest_probability
        (size,) = sizes
        axes = zip(seg_logits.shape[2:], size, strict=True)  # h and H, w and W
        rows, columns = (bilinear_matrix(source, target, self.align_corners).to(seg_logits) for source, target in axes)
        strips = rows.split(strip_height(classes, size[1]))
        for sample, logits in zip(samples, seg_logits, strict=True):  # C, h, w
            labels, confidence = [], []
            for strip in strips:
                scores = strip @ logits @ columns.T  # C, rows, W
                labels.append(scores.argmax(dim=0, keepdim=True))
                if self.with_confidence:
                    confidence.append(confidence_of_strip(scores))
            sample.pred_sem_seg = PixelData(data=torch.cat(labels, dim=1))  # 1, H, W
            if self.with_confidence:
                sample.confidence = PixelData(data=torch.cat(confidence)[None])
        return samples

    @property
    def divisor(self) -> int:
        """Side of the coarsest cell in pixels; windows are padded to multiples of it."""
        backbone = backbone_of(self.backbone)  # perhaps inside a LoRAModel
        patch_size = backbone.patch_size if backbone else 1
        pyramid = self.with_neck and isinstance(self.neck, Feature2Pyramid)
        return max(patch_size, round(patch_size / min(self.neck.rescales))) if pyramid else patch_size


def strip_height(classes: int, width: int) -> int:
    """Rows of an image whose logits take an eighth of what MAX_LOGITS allows."""
    return max(1, MAX_LOGITS // (8 * classes * width))


def highest_probability(logits: Tensor) -> Tensor:
    """The probability (H, W) of the most likely class, from logits (C, H, W)."""
    strips = logits.split(strip_height(len(logits), logits.shape[2]), dim=1)
    return torch.cat([(strip.amax(dim=0) - strip.logsumexp(dim=0)).exp() for strip in strips])


def share_of_highest(probabilities: Tensor) -> Tensor:
    """The probability (H, W) of the most likely class, from (C, H, W), whose sum can exceed 1 with mask queries."""
    return probabilities.amax(dim=0) / probabilities.sum(dim=0).clamp(min=1)


def shares_of_classes(probabilities: Tensor) -> Tensor:
    """All probabilities (C, H, W), of which `share_of_highest` gives the highest."""
    return probabilities / probabilities.sum(dim=0).clamp(min=1)


def two_classes(probability: Tensor) -> Tensor:
    """The probabilities (2, H, W) of labels 0 and 1, from that of 1 (1, H, W)."""
    return torch.cat([1 - probability, probability])


def confidence_of(sample: SegDataSample) -> Tensor:
    """The probability (H, W) of each pixel's label in a prediction of a segmentor of this package or of mmseg."""
    if 'confidence' in sample:
        return sample.confidence.data[0]
    scores = sample.seg_logits.data  # C, H, W
    if len(scores) == 1:  # the probability of label 1
        return torch.where(sample.pred_sem_seg.data > 0, scores, 1 - scores)[0]
    return highest_probability(scores)


def probabilities_of(sample: SegDataSample) -> Tensor:
    """The probabilities (C, H, W) of all classes, whose highest is `confidence_of`; see `with_probabilities`."""
    if 'probabilities' in sample:
        return sample.probabilities.data
    scores = sample.seg_logits.data
    return two_classes(scores) if len(scores) == 1 else scores.softmax(dim=0)


def check_test_cfg(cfg: dict) -> None:
    if (mode := cfg.get('mode', 'slide')) != 'slide':
        raise UserError(f"test_cfg.mode is {mode!r}; expected 'slide': for whole images set a large crop_size")
    check_choice('test_cfg.precision', cfg.get('precision', 'bfloat16'), DTYPES)
    sides = [cfg.get('crop_size'), cfg.get('stride')]
    if any(np.shape(pair) != (2,) or not all(type(side) is int and side > 0 for side in pair) for pair in sides):
        raise UserError(
            'test_cfg needs crop_size and stride, (height, width) in pixels; it has {} and {}'.format(*sides)
        )
    if type(number := cfg.get('windows_per_batch', 1)) is not int or number < 1:
        raise UserError(f'test_cfg.windows_per_batch is {number!r}; expected a number from 1')
    if any(step > side for step, side in zip(cfg['stride'], cfg['crop_size'], strict=True)):
        raise UserError(f'test_cfg.stride is {cfg["stride"]}; above crop_size, {cfg["crop_size"]}, it would leave gaps')


# Sliding windows


class _Window(NamedTuple):
    """A crop of a view, with the intervals of all windows along each axis and this window's indices."""

    image: Tensor  # 3, h, w
    view: View
    rows: tuple[tuple[int, int], ...]
    row: int
    columns: tuple[tuple[int, int], ...]
    column: int


def _windows(view: View, crop_size: tuple[int, int], stride: tuple[int, int]) -> Iterator[_Window]:
    image = view.image.flip(2) if view.flip else view.image  # 3, h, w
    rows, columns = map(window_intervals, image.shape[1:], crop_size, stride)
    for row, (top, bottom) in enumerate(rows):
        for column, (left, right) in enumerate(columns):
            yield _Window(image[:, top:bottom, left:right], view, rows, row, columns, column)


def _batches(windows: Iterator[_Window], size: int) -> Iterator[list[_Window]]:
    """Groups consecutive windows of the same shape, at most `size` in a batch."""
    for _, same_shape in groupby(windows, key=lambda window: window.image.shape):
        while batch := list(islice(same_shape, size)):
            yield batch


def window_intervals(length: int, crop: int, stride: int) -> tuple[tuple[int, int], ...]:
    """(start, stop) of the windows along an axis; the last is moved back to fit."""
    count = max(length - crop + stride - 1, 0) // stride + 1
    stops = (min(index * stride + crop, length) for index in range(count))
    return tuple((max(stop - crop, 0), stop) for stop in stops)


@lru_cache(maxsize=128)  # up to 0.4 MB each; windows of a row or column, and images of one size, share a matrix
def window_matrix(
    intervals: tuple[tuple[int, int], ...],
    index: int,
    size: int,
    flip: bool,
    resolution: int,
    padding: int,
    align_corners: bool,
    device: torch.device,
) -> tuple[slice, Tensor]:
    """What window `index`, padded at its end, adds along one axis: which pixels, and a matrix (pixels, resolution)."""
    start, stop = intervals[index]
    length = intervals[-1][1]
    coverage = torch.zeros(length)
    for first, last in intervals:
        coverage[first:last] += 1
    to_pixels = bilinear_matrix(resolution, stop - start + padding, align_corners)[: stop - start]  # window, resolution
    to_size = bilinear_matrix(length, size, align_corners, start, stop) / coverage[start:stop]  # size, window
    to_size = to_size.flip(0) if flip else to_size
    rows = to_size.any(dim=1).nonzero().flatten().tolist() or [0]
    reached = slice(rows[0], rows[-1] + 1)
    return reached, (to_size[reached] @ to_pixels).to(device)


def bilinear_matrix(
    source: int, target: int, align_corners: bool = False, start: int = 0, stop: int | None = None
) -> Tensor:
    """F.interpolate(mode='bilinear') along one axis as a matrix (target, source), columns `start` to `stop`."""
    position = torch.arange(target, dtype=torch.float32)
    if align_corners:
        position = position * ((source - 1) / max(target - 1, 1))
    else:
        position = (position + 0.5) * (source / target) - 0.5
    pixels = torch.arange(start, source if stop is None else stop)
    # the weight of a pixel is 1 at its own position and 0 at its neighbours; edges are repeated outside
    return (1 - (position.clamp(0, source - 1)[:, None] - pixels).abs()).clamp(min=0)


# Multi-scale inference


@TRANSFORMS.register_module()
class MultiScaleViews:
    """Packs an image at several sizes: the short side is a ratio of that at one scale, at least `crop_size`.

    If several ratios give the same size, they share one view, whose weight is their number.

    Args:
        crop_size: (height, width) of the window in pixels.
        ratios: sizes relative to that at one scale.
        short_side, factor, within: of that scale, see ResizeToScale; without `factor` each image gets `short_side`.

    Returns:
        dict(inputs=[uint8 (3, h, w) for each view], data_samples=SegDataSample with `view_weights`).

    Source: microsoft/unilm `beit/semantic_segmentation/mmcv_custom/resize_transform.py`, SETR_Resize.
    """

    def __init__(
        self,
        short_side: int,
        crop_size: tuple[int, int],
        ratios: Sequence[float] = RATIOS,
        factor: float | None = None,
        within: float = 2.0,
    ):
        self.scale, self.crop_size, self.ratios = ResizeToScale(short_side, factor, within), crop_size, ratios
        self.pack = PackSegInputs()

    def short_sides(self, height: int, width: int) -> Counter[int]:
        """The short sides of the views of an image, in pixels, each with its weight."""
        seen = min(self.scale.size_of(height, width))
        # The longer side of the window is safe for wide and for tall images.
        return Counter(max(int(seen * ratio), *self.crop_size) for ratio in self.ratios)

    def __call__(self, results: dict) -> dict:
        image = results.pop('img')  # H, W, 3
        height, width = image.shape[:2]
        views = []
        short_sides = self.short_sides(height, width)
        for short in short_sides:
            long = short * max(height, width) / min(height, width)
            resize = Resize(scale=(long, short), keep_ratio=True)
            views.append(self.pack(resize(dict(img=image)))['inputs'])  # 3, h, w
        sample = self.pack(results)['data_samples']
        sample.set_metainfo(dict(view_weights=tuple(short_sides.values())))
        return dict(inputs=views, data_samples=sample)


@MODELS.register_module()
class MultiScaleTTA(BaseTTAModel):
    """Mean of the class probabilities over the views of MultiScaleViews and their mirror images.

    The windows of all views of all images share batches. `module` is a SlidingSegmentor or its config.

    Source: mmseg 0.11 `EncoderDecoder.aug_test`, `inference`.
    """

    with_probabilities = False  # see SlidingSegmentor

    def __init__(self, module: dict | nn.Module):
        super().__init__(module)
        if not isinstance(self.module, SlidingSegmentor):
            raise UserError(f'the model is a {type(self.module).__name__}; --tta needs a beit_mm.SlidingSegmentor')

    def test_step(self, data: dict) -> list[SegDataSample]:
        """Predicts dict(inputs=[[view 1 of each image], [view 2 of each image], ...], data_samples)."""
        samples = data['data_samples']
        views = []
        for number, sample in enumerate(samples):
            for images in data['inputs']:
                image = self.module.data_preprocessor(dict(inputs=[images[number]]))['inputs'][0]  # 3, h, w
                views += [View(image, tuple(sample.ori_shape[:2]), flip) for flip in FLIPS]
        weights = [sample.view_weights for sample in samples]
        for sample, mean in zip(samples, self.probabilities(views, weights), strict=True):
            is_binary = len(mean) == 1 and not self.module.gives_probabilities
            if is_binary:  # one logit for two classes
                label = (mean > self.module.decode_head.threshold).long()
                confidence = torch.where(label > 0, mean, 1 - mean)[0]
            else:
                label = mean.argmax(dim=0, keepdim=True)
                confidence = share_of_highest(mean) if self.module.gives_probabilities else mean.amax(dim=0)
            sample.pred_sem_seg = PixelData(data=label)  # 1, H, W
            sample.confidence = PixelData(data=confidence[None])
            if self.with_probabilities:
                sample.probabilities = PixelData(data=two_classes(mean) if is_binary else shares_of_classes(mean))
        return samples

    def probabilities(self, views: Sequence[View], weights: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Yields the class probabilities (C, H, W) of each image; `views` holds its sizes, each also flipped."""
        logits = self.module.slide(views)
        for weights_of_image in weights:
            mean: Any = 0.0
            for weight in (weight for weight in weights_of_image for _ in FLIPS):
                view = next(logits)  # C, H, W: with 150 classes it takes gigabytes, so all is done in place
                if not self.module.gives_probabilities:
                    for rows in view.split(ROWS, dim=1):
                        rows.copy_(rows.sigmoid() if len(view) == 1 else rows.softmax(dim=0))
                mean = view.mul_(weight / (len(FLIPS) * sum(weights_of_image))).add_(mean)
                del view
            yield mean

    def merge_preds(self, data_samples_list: list) -> list:  # abstract in the base class; test_step merges
        raise NotImplementedError
