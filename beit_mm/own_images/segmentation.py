"""Fine-tuning a segmentor on label maps: its heads, its recipes, and the report with IoU, baselines and overlays."""

import math
import shlex
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from mmengine.config import Config
from PIL import Image
from torch import Tensor

from beit_mm.apis.configs import bundled_config, pipeline_for_size, warmup_and_cosine
from beit_mm.apis.inference import Segmentor, overlay
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint, normalisation_of
from beit_mm.checkpoint.names import released_out_indices
from beit_mm.datasets.reading import LoadBands, UnreadableImageError
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.datasets.transforms import ResizeToScale, as_size, resize_bicubic
from beit_mm.errors import UserError, check_choice
from beit_mm.features.evaluation import class_ious, confusion, hits_and_unions, patch_dataset
from beit_mm.features.extractor import FeatureExtractor, default_layer
from beit_mm.models.vit import sizes_of
from beit_mm.own_images import mistakes, report
from beit_mm.own_images.label_maps import LabelMaps, find_label_maps
from beit_mm.own_images.prediction import NearestPatches
from beit_mm.own_images.record import ALL, Record, words_of
from beit_mm.own_images.report import Metric, Metrics, Report
from beit_mm.own_images.scale import Scale, choose_scale, measure, plain_dataset
from beit_mm.own_images.task import HEAD, MAX_BATCH, NARROW, USUAL_SIDE, FineTuning, Plan, Settings, fitted_in
from beit_mm.pictures import SIDE, sheet, with_legend

NARROW_UPERNET, NARROW_MASKS = 'demo/segment_upernet.py', 'demo/segment_masks.py'
NARROW_HEAD, WIDE_HEAD = 'linear', 'upernet'  # the best heads, for calls that name none; see docs/results.md
LINEAR_RATE = 4.0  # times the recipe's rate, for a narrow segmentor with a linear head, trained as a whole
GIB_OF_BLOCKS = 0.68  # of BEiT-Base, per image of 1,024 patches on a GPU; see HEADS
HEAD_PARAMETERS = 100_000_000  # each takes 16 bytes: weight, gradient and two moments
MIN_KNOWN, MAX_KNOWN = 10, 100  # images with label maps whose patches are compared
MIN_PATCHES, MOST_COMPARED = 2000, 200_000_000  # patches of those, and pairs of patches that are compared for an image
GRID = (120, 160)  # rows and columns of positions that the baseline knows
STRIP = 256  # rows that it answers at a time
LEVELS = 8  # of each colour channel
GROWTH = 2.2  # the time for an image's features grows with this power of its side
MAX_VALIDATED, MOST_WINDOWS = 32, 2000  # images of a validation, and windows over all of them
MIN_TESTED, TESTED_WINDOWS = 20, 500  # images to test even if time is short, and the most windows over them
TESTED_SHARE = 0.7  # of the time of a report, for held-out images; the rest: for those to learn from
RESAMPLED = 500  # bootstrap samples, for standard errors
FEW_PASSES, FEW_MAPS = 20, 100  # with fewer passes over the images, or fewer label maps, more of these are advised
OF_PATCHES = 'The nearest frozen patches are found by the features of the initial weights, without training, in'
OTHERS = dict(patches='the nearest frozen patches', position_colour='naive Bayes')


@dataclass(kw_only=True)
class SegmentationPlan(Plan):
    head: str = ''  # a key of HEADS
    scale: Scale | None = None  # at which images are seen

    @property
    def has_small_patches(self) -> bool:
        return self.backbone['patch_size'] <= 8


class Segmentation(FineTuning):
    """A segmentor, trained on label maps."""

    model, plan_type = 'segmentor', SegmentationPlan

    @staticmethod
    def check(call: Record) -> None:
        """Refuses options of a fine-tuning that do not fit each other, and an unknown head."""
        FineTuning.check(call)
        if call.options['short_side'] is not None and call.options['full_size']:
            raise UserError('--short-side and --full-size are both given; leave one out')
        if call.options['head'] is not None:
            check_choice('head', call.options['head'], HEADS)

    @classmethod
    def find(cls, record: Record) -> 'Segmentation | None':
        """Finds label maps, None without them; refuses options for classifiers."""
        options = record.options
        if options['classes']:
            return None
        chosen = {name: options[name] for name in ('bands', 'maps', 'merge')}
        maps = find_label_maps(record.images, options['reduce_zero_label'], **chosen)
        if maps and options['balance']:
            raise UserError(f'{record.images} has label maps; leave out --balance')
        return cls(record, maps) if maps else None

    # Planning

    def largest_released(self, sizes: Mapping[str, int]) -> float:
        head = self.call.head or WIDE_HEAD
        side = bundled_config(HEADS[head].wide).model.test_cfg.crop_size[0]
        return largest_batch_of_head(sizes, (side // 14) ** 2, head)

    @property
    def channels(self) -> int:
        return len(self.images.bands['mean']) if self.images.bands else 3

    def normalisation(self, checkpoint: Checkpoint | None) -> tuple[dict[str, Any], str]:
        if bands := self.images.bands:  # measured, whatever the checkpoint records for its RGB images
            return normalisation_of('the new model', bands, (), self.channels, **self.mean_std)
        return super().normalisation(checkpoint)

    def choose_parts(self, checkpoint: Checkpoint | None) -> None:
        super().choose_parts(checkpoint)
        plan, is_wide = self.plan, self.plan.width > NARROW
        plan.head = self.call.head or (WIDE_HEAD if is_wide and not self.fits_head else NARROW_HEAD)
        plan.base = HEADS[plan.head].wide if is_wide else HEADS[plan.head].narrow
        recipe, patch = bundled_config(plan.base), plan.backbone['patch_size']
        side = recipe.model.test_cfg.crop_size[0]
        plan.backbone['img_size'] = as_size(side - side % patch)
        usual = recipe.tta_pipeline[-1].short_side
        is_open = self.call.short_side is None and not self.call.full_size and self.seconds_for_features < math.inf
        if self.fits_head and is_open and plan.device == 'cpu' and not self.images.bands:
            times = self.seconds_for_features / self.seconds_of_features(plan.init)
            usual = int(min(usual, max(USUAL_SIDE, USUAL_SIDE * times ** (1 / GROWTH)))) // patch * patch
            # A linear layer learns from shares of patches too, and more from all images than from large ones.
            patch //= 2
        plan.scale = choose_scale(measure(self.images), usual, patch, self.call.short_side, bool(self.call.full_size))

    @property
    def fits_head(self) -> bool:
        return self.call.freeze == ALL and self.call.head in (None, NARROW_HEAD)

    @property
    def begins_with_head(self) -> bool:
        return super().begins_with_head and self.plan.head == NARROW_HEAD and self.plan.width > NARROW

    def largest_batch(self) -> float:
        plan, (rows, columns) = self.plan, self.plan.grid
        if plan.device == 'cuda':
            most = largest_batch_of_head(sizes_of(plan.backbone['arch']), rows * columns, plan.head)
        else:  # a wide model takes seconds for an image of 512 x 512 pixels
            most = 2 if plan.width > NARROW else super().largest_batch()
        return min(most, bundled_config(plan.base).auto_scale_lr.base_batch_size)

    def decided(self) -> dict[str, Any]:
        decided, scale = dict(super().decided(), head=self.plan.head), self.plan.scale
        return decided | (dict(full_size=True) if scale.within == 1 else dict(short_side=scale.short_side))

    def described(self) -> list[tuple[str, str]]:
        bands, scaled = self.images.bands, ''
        if bands:
            which = bands['load']['bands'] or f'all {len(bands["mean"])}'
            scaled = f'{which}: scaled so that percentiles 1 and 99 of each become 0 and 255'
        crops = '' if self.fits_head else f'crops of {self.plan.size[0]} in training, windows later'
        seen = '; '.join(filter(None, (self.plan.scale.text, crops)))
        return [*super().described(), ('scale', seen), ('head', self.plan.head), ('bands', scaled)]

    # Stages

    def settings(self, stage: str, lists: Path, steps: int, earlier: Mapping[str, Path]) -> Settings:
        plan, base, head = self.plan, bundled_config(self.plan.base), HEADS[self.plan.head]
        out_indices = -1 if head.reads_last_block else released_out_indices(plan.depth)
        if self.fits_head:
            out_indices = default_layer(plan.depth)
        common: dict[str, Any] = dict(in_channels=plan.width, num_classes=len(self.images.classes))
        model: dict[str, Any] = dict(
            backbone=self.backbone(out_type='featmap', out_indices=out_indices),
            **head.parts(plan, common),
            data_preprocessor=dict(plan.preprocessing, size=plan.size),
            test_cfg=dict(crop_size=plan.size, stride=self.stride),
        )
        if HEAD in earlier:
            model['decode_head']['init_cfg'] = fitted_in(earlier[HEAD], 'decode_head.')
        rate = base.optim_wrapper.optimizer.lr
        if plan.head == 'linear' and plan.width <= NARROW and self.tunes_all:
            rate *= LINEAR_RATE
        return plan.base, dict(
            model=model,
            **self.data(base, lists, self.fits(stage)),
            optim_wrapper=self.optimizer(base, rate),
            **warmup_and_cosine(steps, steps // 10, plan.batch),
        )

    def data(self, base: Config, lists: Path, fits: bool) -> dict[str, Any]:
        """Settings of the data loaders, and the pipeline of a test at all scales."""
        pipelines = [self.at_scale(base[f'{name}_pipeline']) for name in ('train', 'test', 'tta')]
        if bands := self.images.bands:  # no distortion of colours
            pipelines = [[bands['load'], *steps[1:]] for steps in pipelines]
            pipelines[0] = [step for step in pipelines[0] if step['type'] != 'PhotoMetricDistortion']
        if fits:
            pack = dict(pipelines[1][-1], meta_keys=('sample_idx', 'img_path', 'unreadable', 'ori_shape', 'img_shape'))
            pipelines[0] = [*pipelines[1][:-1], pack]
        data = self.loaders(lists, pipelines[:2], fits=fits)
        data['val_dataloader'].update(batch_size=1)  # images differ in size
        return dict(data, tta_pipeline=pipelines[2])

    def at_scale(self, pipeline: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """A recipe's pipeline for crops and images at the plan's scale."""
        size, scale = self.plan.size, self.plan.scale.arguments
        steps = []
        for step in pipeline_for_size(pipeline, size):
            if step['type'] == 'RandomResize':
                crop = dict(type='beit_mm.RandomCropAtScale', crop_size=size, **scale, ratio_range=step['ratio_range'])
            elif step['type'] == 'RandomCrop':
                steps.append(dict(crop, cat_max_ratio=step['cat_max_ratio']))
            elif step['type'] == 'Resize':
                steps.append(dict(type='beit_mm.ResizeToScale', **scale))
            else:
                steps.append(step | scale if step['type'] == 'beit_mm.MultiScaleViews' else step)
        return steps

    @property
    def stride(self) -> list[int]:
        """Distance of the windows, (rows, columns) in pixels."""
        return [side * 2 // 3 for side in self.plan.size]

    @property
    def resize(self) -> ResizeToScale:
        return ResizeToScale(**self.plan.scale.arguments)

    @property
    def num_windows(self) -> int:
        """Windows over an image of the usual size."""
        seen = self.resize.size_of(*self.plan.scale.image_size)
        return math.prod(math.ceil(side / step) for side, step in zip(seen, self.stride, strict=True))

    def at_least(self, number: int) -> int:
        """Images to look at even if time is short: so many, or fewer large ones."""
        return min(number, max(2, TESTED_WINDOWS // self.num_windows))

    @property
    def num_validated(self) -> int:
        return max(1, min(MAX_VALIDATED, MOST_WINDOWS // self.num_windows))

    @property
    def validation_cost(self) -> int:
        return super().validation_cost * self.num_windows * 3 // 2  # with the logits of whole images

    def make_report(self, weights: Path, metrics: Metrics, seconds: float, images_in_time: float) -> Report:
        begin, images = time.monotonic(), self.images
        folder, segmentor = weights.parent, SegmentationInferencer(weights)
        segmentors: dict[str, Segmentor] = dict(mIoU=segmentor)
        least = self.at_least(MIN_TESTED)
        known = min(MAX_KNOWN, max(min(MIN_KNOWN, least), int(images_in_time / self.num_windows)))
        if nearest := self.nearest_patches(folder / 'lists', known):
            segmentors['patches'] = nearest
        tested_from = time.monotonic()
        left = TESTED_SHARE * (begin + seconds - tested_from)
        tested = compare_segmentors(segmentors, images, folder / 'lists', left, least, self.resize)
        took = time.monotonic() - tested_from
        draw_overlays(segmentor, tested, folder / 'overlays.png')
        found = {name: tested.metric(name) for name in tested.hits}
        gains = {words: tested.metric('mIoU', name) for name, words in OTHERS.items() if name in found}
        colours = 'colours' if images.bands is None else 'colours (bands 1 to 3)'
        parts: list[report.Part] = [
            f'On {len(tested.indices):,} of {len(images.held_out.names):,} held-out images, in sliding windows at one '
            'scale. Standard errors cover the choice of images only; this is one training with one seed. Naive Bayes '
            f'learned from {tested.baseline.images:,} images how frequent each class is at each position and in 512 '
            f'{colours}.',
            f'{OF_PATCHES} {nearest.num_images:,} labelled images.' if nearest else '',
            table_of_classes(tested, images.classes),
            mistakes.confused(tested.counts['mIoU'], images.classes),
            mistakes.draw_confusion(tested.counts['mIoU'], images.classes, folder / 'confusion.png'),
            report.Picture('overlays.png', 'Held-out images with the highest, the median and the lowest mIoU'),
            report.draw_curves(folder / 'finetune'),
            # images to learn from may take as long as the tested ones, even if time is short
            *self.list_contradicted(segmentor, tested, folder, max(begin + seconds, time.monotonic() + took)),
        ]
        passes = math.inf if self.fits_head else self.passes  # each image was seen once, which is enough
        exported = 'model.onnx' if images.bands else 'page.html'  # a page reads photos
        patches = ['beit-mm', 'segment', str(self.plan.init), 'new_images/', '--labelled', self.record.images]
        options = dict(short_side=self.plan.scale.short_side, reduce_zero_label=self.call.reduce_zero_label, out='maps')
        command = shlex.join([*patches, *words_of(options)]) if nearest else ''
        sentence, following = judge(gains, weights, len(images.train.names), passes, exported, command)
        return Report(metrics | found, sentence, parts, following)

    def list_contradicted(self, segmentor: Segmentor, tested: 'Tested', out: Path, until: float) -> list[report.Part]:
        """Writes mistakes.csv of the tested images, some to learn from, and as many others as there is time for."""
        train, tried, found = plain_dataset(self.images, out / 'lists', 'train'), set[int](), [*tested.contradicted()]
        learned = mistakes.samples(train, until, 0, tried)
        for _, sample in chain(learned, mistakes.samples(tested.dataset, until, 0, tested.tried)):
            truth = torch.from_numpy(sample['gt_seg_map'])
            (result,) = segmentor(sample['img_path'])
            counts = confusion(as_classes(result['labels']), truth, len(self.images.classes))
            pixels = counts.sum(dim=1)
            found.append((sample['img_path'], pixels, pixels - counts.diagonal()))
        found = [each for each in found if each[1].any()]
        skipped = len(tried) + len(tested.tried) - len(found)
        checked = mistakes.Checked(len(train) + len(tested.dataset), bool(tried), skipped)
        return mistakes.list_contradicted(found, self.images.classes, Path(self.record.images), checked, out)

    def nearest_patches(self, lists: Path, number: int) -> NearestPatches | None:
        """What needs no training: each patch gets the class of the most similar patches in `number` labelled images.

        They are compared by the frozen features of the initial weights. None without these, and for bands.
        """
        if not self.plan.init or self.images.bands:
            return None
        extract = FeatureExtractor(self.plan.init, size=self.plan.scale.short_side, whole=True, **self.mean_std)
        of_image = math.prod(self.resize.size_of(*self.plan.scale.image_size)) // self.plan.backbone['patch_size'] ** 2
        most = min(50_000, max(MIN_PATCHES, MOST_COMPARED // of_image))
        dataset = patch_dataset(extract, number, **self.images.dataset(lists, 'train'), on_error='skip')
        return NearestPatches(extract, dataset, max_patches=most)


def judge(
    gains: Metrics, weights: Path, maps: int, passes: float, exported: str = 'page.html', nearest: str = ''
) -> tuple[str, str]:
    """A verdict from the gains over methods without training, and what to do next; `nearest`: a command for patches."""
    minutes = f'more minutes (it saw each image only {passes:.1f} times)' if passes < FEW_PASSES else ''
    labels = f'more label maps ({maps} are few)' if maps < FEW_MAPS else ''
    following = f'give the run {" and ".join(filter(None, (minutes, labels))) or "more label maps, or another --init"}.'
    if nearest and gains[OTHERS['patches']].sign == report.WORSE:
        following = f'{nearest} (by the nearest patches); or {following}'
    if all(gain.sign == report.BETTER for gain in gains.values()):
        quoted = shlex.quote(str(weights))
        following = f'beit-mm segment {quoted} new_images/ --out maps; beit-mm export {quoted} {exported}'
    return f'the segmentor is {report.verdict(gains)}', following


def table_of_classes(tested: 'Tested', classes: Sequence[str]) -> list[list[str]]:
    table = [['class', 'IoU, %', 'by position and colour, %', 'pixels']]
    columns = tested.ious('mIoU')[0], tested.ious('position_colour')[0], tested.counts['mIoU'].sum(dim=1)
    for name, *ious, pixels in zip(classes, *columns, strict=True):
        table.append([name, *map(report.percentage, ious), f'{pixels:,.0f}'])
    return table


# Heads: the parts behind the backbone, from the plan and the arguments that all heads have.
# On a narrow model an auxiliary head costs a sixth of the time, which is better spent on more steps.


def linear_parts(plan: SegmentationPlan, common: dict[str, Any]) -> dict[str, Any]:
    linear = bundled_config(HEADS['linear'].wide).model.decode_head.to_dict()  # the narrow recipe has another head
    head = dict(linear | common, _delete_=True, channels=plan.width)
    return dict(neck=None, decode_head=head, auxiliary_head=None)


def upernet_parts(plan: SegmentationPlan, common: dict[str, Any]) -> dict[str, Any]:
    rescales = [2, 1, 0.5, 0.25] if plan.has_small_patches else [4, 2, 1, 0.5]
    return dict(
        neck=dict(embed_dim=plan.width, rescales=rescales),
        decode_head=dict(common, in_channels=[plan.width] * 4),
        auxiliary_head=None if plan.width <= NARROW else common,
    )


def setr_pup_parts(plan: SegmentationPlan, common: dict[str, Any]) -> dict[str, Any]:
    num_convs = 3 if plan.has_small_patches else 4
    auxiliary = None
    if plan.width > NARROW:
        auxiliary = [dict(each, **common) for each in bundled_config(plan.base).model.auxiliary_head]
    return dict(decode_head=dict(common, num_convs=num_convs), auxiliary_head=auxiliary)


def masks_parts(plan: SegmentationPlan, common: dict[str, Any]) -> dict[str, Any]:
    num_blocks = min(4, math.ceil(plan.depth / 4))
    return dict(decode_head=dict(common, where='backbone', in_index=-1, num_blocks=num_blocks))


def decoder_parts(plan: SegmentationPlan, common: dict[str, Any]) -> dict[str, Any]:
    return dict(decode_head=common)


class Head(NamedTuple):
    parts: Callable[[SegmentationPlan, dict[str, Any]], dict[str, Any]]  # what differs from the recipe's model
    narrow: str  # config to build on for a narrow model
    wide: str
    # GiB at 768 channels, per image of 1,024 patches on a GPU: what autograd keeps in bfloat16, and a tenth more. For
    # UperNet it was counted at sizes small, base and large (on an H100 base took 1.2 of its 1.26 GiB with its blocks),
    # for the others at base.
    gib: float
    reads_last_block: bool = False  # else four blocks


HEADS = dict(
    linear=Head(linear_parts, NARROW_UPERNET, 'beit_plus/linear_512_ade20k_39k_after_in22k.py', 0.38, True),
    upernet=Head(upernet_parts, NARROW_UPERNET, 'beit/upernet_512_ade20k_160k.py', 0.58),
    setr_pup=Head(setr_pup_parts, 'demo/segment_setr_pup.py', 'beit/setr_pup_512_ade20k_160k.py', 1.2),
    masks=Head(masks_parts, NARROW_MASKS, 'beit_plus/masks_512_ade20k_39k_after_in22k.py', 0.82, True),
    masks_decoder=Head(decoder_parts, NARROW_MASKS, 'beit_plus/masks_decoder_512_ade20k_39k_after_in22k.py', 1.25),
)


def largest_batch_of_head(sizes: Mapping[str, int], patches: float, head: str) -> float:
    """The most images per step of a segmentor on a GPU."""
    width, depth = sizes['embed_dims'], sizes['num_layers']
    gib_per_image = (HEADS[head].gib + GIB_OF_BLOCKS * (width / 768) * (depth / 12)) * patches / 1024
    free = (torch.cuda.mem_get_info()[0] - 16 * (12 * width**2 * depth + HEAD_PARAMETERS)) / 2**30
    return min(free / gib_per_image, MAX_BATCH)


class PositionAndColour:
    """Naive Bayes of position and colour: P(class | position) P(colour | class), without a network.

    Labels from `num_classes` on mark unlabelled pixels. It sees images at a `scale`, else as they are.
    """

    def __init__(self, num_classes: int, scale: ResizeToScale | None = None):
        self.num_classes, self.scale, self.images = num_classes, scale, 0
        self.at_position = np.zeros((*GRID, num_classes))
        self.of_colour = np.zeros((LEVELS**3, num_classes))

    def learn(self, image: np.ndarray, labels: np.ndarray) -> None:
        """Counts the pixels of an image uint8 (H, W, 3) with labels (H, W)."""
        self.images += 1
        colours, labels = (resize_nearest(values, GRID).astype(int) for values in (self.colours_of(image), labels))
        rows, columns = np.indices(GRID)
        kept = labels < self.num_classes
        np.add.at(self.at_position, (rows[kept], columns[kept], labels[kept]), 1)
        np.add.at(self.of_colour, (colours[kept], labels[kept]), 1)

    def answer(self, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Labels uint8 (H, W) of an image uint8 (h, w, 3)."""
        log_position, log_colour = self.tables
        colours = self.colours_of(image)
        rows, columns = (np.arange(side) * cells // side for side, cells in zip(colours.shape, GRID, strict=True))
        labels = np.empty(colours.shape, np.uint8)
        for first in range(0, len(labels), STRIP):
            strip = slice(first, first + STRIP)
            labels[strip] = (log_position[rows[strip, None], columns] + log_colour[colours[strip]]).argmax(axis=2)
        return resize_nearest(labels, size)

    def colours_of(self, image: np.ndarray) -> np.ndarray:
        """The colour bins of an image uint8 (h, w, 3) at its scale, int16."""
        size = self.scale.size_of(*image.shape[:2]) if self.scale else image.shape[:2]
        if size != image.shape[:2]:
            image = resize_bicubic(np.ascontiguousarray(image), size)
        red, green, blue = np.moveaxis(image.astype(np.int16) * LEVELS // 256, 2, 0)
        return (red * LEVELS + green) * LEVELS + blue

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """log P(class | position) and log P(colour | class), once all images are counted."""
        # each count is raised by one: what was never seen is unlikely rather than impossible
        positions, colours = self.at_position + 1, self.of_colour + 1
        log_position = np.log(positions / positions.sum(axis=2, keepdims=True))
        unseen = self.at_position.sum(axis=(0, 1)) == 0  # to such a class every colour would be equally likely
        log_position[..., unseen] = -np.inf
        return log_position, np.log(colours / colours.sum(axis=0))


def resize_nearest(labels: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Labels (h, w) at another size, each taken from the nearest pixel."""
    rows, columns = ((np.arange(new) * 2 + 1) * old // (2 * new) for new, old in zip(size, labels.shape, strict=True))
    return labels[rows[:, None], columns]


@dataclass
class Tested:
    """Held-out images, with each method's hits and unions (N, K): pixels of each class in each image."""

    dataset: SegmentationFolder
    indices: list[int]  # of the images in it
    hits: dict[str, Tensor]
    unions: dict[str, Tensor]
    counts: dict[str, Tensor]  # (K, K) of pixels, by the right class and the predicted one
    baseline: PositionAndColour
    tried: set[int] = field(default_factory=set)  # `indices`, and images that cannot be read or have no label
    pixels: list[Tensor] = field(default_factory=list)  # labelled ones of each class (K,), in each image

    def contradicted(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Path of each image, and for each class the labelled pixels and the ones that the segmentor contradicts."""
        for index, pixels, hits in zip(self.indices, self.pixels, self.hits['mIoU'], strict=True):
            yield self.dataset.get_data_info(index)['img_path'], pixels, pixels - hits

    def ious(self, name: str, times: Tensor | None = None) -> Tensor:
        """IoU in % (1, K), or (R, K) for R samples with each image `times` (R, N); nan for absent classes."""
        times = torch.ones(1, len(self.indices), dtype=torch.float64) if times is None else times
        return class_ious(100 * times @ self.hits[name], times @ self.unions[name])

    def metric(self, name: str, other: str | None = None) -> Metric:
        """The mIoU of a method, or its gain over another one.

        The standard error comes from a bootstrap over images, the same for all methods; for a single image it is inf.
        """
        number = len(self.indices)
        drawn = torch.randint(number, (RESAMPLED, number), generator=torch.Generator().manual_seed(0))
        samples = torch.stack([row.bincount(minlength=number) for row in drawn]).double()

        def means(times: Tensor | None = None) -> Tensor:
            own = self.ious(name, times).nanmean(dim=1)
            return own if other is None else own - self.ious(other, times).nanmean(dim=1)

        return Metric(means().item(), math.inf if number == 1 else means(samples).std().item(), number)


def compare_segmentors(
    segmentors: Mapping[str, Segmentor],
    images: LabelMaps,
    lists: Path,
    seconds: float,
    least: int = MIN_TESTED,
    scale: ResizeToScale | None = None,
) -> Tested:
    """Tests segmentors, by name, and PositionAndColour at a `scale` on held-out images, at least `least` of them."""
    number = len(images.classes)
    baseline, begin = PositionAndColour(number, scale), time.monotonic()
    train, held_out = (plain_dataset(images, lists, name) for name in ('train', 'held_out'))
    for _, sample in mistakes.samples(train, begin + seconds / 4, least, set()):
        baseline.learn(sample['img'], sample['gt_seg_map'])
    tested = Tested(held_out, [], {}, {}, {}, baseline)
    found = defaultdict(list)
    for index, sample in mistakes.samples(held_out, begin + seconds, least, tested.tried):
        truth = sample['gt_seg_map']  # H, W
        if not (truth < number).any():  # nothing to be right or wrong about
            continue
        tested.indices.append(index)
        answers = dict(position_colour=baseline.answer(sample['img'], truth.shape))
        for name, segmentor in segmentors.items():
            (result,) = segmentor(sample['img_path'])
            answers[name] = result['labels']
        for name, labels in answers.items():
            counts = confusion(as_classes(labels), torch.from_numpy(truth), number)
            tested.counts[name] = tested.counts.get(name, 0) + counts
            found[name].append(hits_and_unions(counts))
        tested.pixels.append(counts.sum(dim=1))
    if not tested.indices:
        raise UnreadableImageError('no held-out image both has labels and can be read')
    for name, of_images in found.items():
        tested.hits[name], tested.unions[name] = map(torch.stack, zip(*of_images, strict=True))
    return tested


def as_classes(labels: np.ndarray) -> Tensor:
    return torch.from_numpy(labels.astype(np.int64))


def draw_overlays(segmentor: SegmentationInferencer, tested: Tested, out: Path) -> None:
    """Draws the images with the highest, median and lowest mIoU: plain, with the label map, with the prediction."""
    scores = 100 * class_ious(tested.hits['mIoU'], tested.unions['mIoU']).nanmean(dim=1)  # N
    order = scores.argsort(descending=True).tolist()
    rows, present = [], set()
    for place in dict.fromkeys((order[0], order[len(order) // 2], order[-1])):
        sample = tested.dataset[tested.indices[place]]
        (result,) = segmentor(sample['img_path'])
        truth, predicted = sample['gt_seg_map'].astype(np.int16), result['labels']
        truth[truth >= segmentor.num_classes] = -1
        present |= {*np.unique(truth).tolist(), *np.unique(predicted).tolist()} - {-1}
        image = LoadBands.as_rgb(sample['img'])
        tiles = [Image.fromarray(image), *(overlay(image, labels, segmentor.palette) for labels in (truth, predicted))]
        for tile in tiles:  # as floats, nine of 24 megapixels would take 2.6 GB
            tile.thumbnail((2 * SIDE, 2 * SIDE))
        title = f'{Path(sample["img_path"]).name}: {scores[place]:.0f} %'
        pictures = [torch.from_numpy(np.array(tile)).permute(2, 0, 1) / 255 for tile in tiles]
        rows.append([*zip((title, 'label map', 'predicted'), pictures, strict=True)])
    legend = [(segmentor.classes[label], segmentor.palette[label]) for label in sorted(present)]
    with_legend(sheet(rows, 2 * SIDE), legend).save(out)
