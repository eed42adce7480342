"""The report on a segmentor: IoU of each class, what needs no training, a verdict, overlays."""

import math
import shlex
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from beit_mm.apis import reports
from beit_mm.apis.inference import PatchSegmentor, Segmentor, overlay
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.apis.reports import Metric, Metrics, Part, Picture, Report
from beit_mm.apis.split import LabelMaps
from beit_mm.datasets.reading import LoadBands, UnreadableImageError
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.datasets.transforms import resize_bicubic
from beit_mm.features.evaluation import confusion, patch_dataset
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.pictures import SIDE, sheet, with_legend

GRID = (120, 160)  # height and width in pixels at which the baseline sees images
LEVELS = 8  # of each colour channel
MIN_TESTED = 20  # images, even if time is short
RESAMPLED = 500  # bootstrap samples, for standard errors
NUM_PAIRS = 5  # pairs of confused classes in the report
OF_PATCHES = 'The nearest frozen patches are found by the features of the initial weights, without training, in'
OTHERS = dict(patches='the nearest frozen patches', position_colour='naive Bayes')


class PositionAndColour:
    """Naive Bayes of position and colour: P(class | position) P(colour | class), without a network.

    Labels from `num_classes` on mark unlabelled pixels.
    """

    def __init__(self, num_classes: int):
        self.num_classes, self.images = num_classes, 0
        self.at_position = np.zeros((*GRID, num_classes))
        self.of_colour = np.zeros((LEVELS**3, num_classes))

    def learn(self, image: np.ndarray, labels: np.ndarray) -> None:
        """Counts the pixels of an image uint8 (H, W, 3) with labels (H, W)."""
        self.images += 1
        colours, labels = colours_of(image), resize_nearest(labels, GRID).astype(int)
        rows, columns = np.indices(GRID)
        kept = labels < self.num_classes
        np.add.at(self.at_position, (rows[kept], columns[kept], labels[kept]), 1)
        np.add.at(self.of_colour, (colours[kept], labels[kept]), 1)

    def answer(self, image: np.ndarray, size: tuple[int, int]) -> np.ndarray:
        """Labels uint8 (H, W) of an image uint8 (h, w, 3)."""
        log_position, log_colour = self.tables
        return resize_nearest((log_position + log_colour[colours_of(image)]).argmax(axis=2).astype(np.uint8), size)

    @cached_property
    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """log P(class | position) and log P(colour | class), once all images are counted."""
        # each count is raised by one: what was never seen is unlikely rather than impossible
        positions, colours = self.at_position + 1, self.of_colour + 1
        log_position = np.log(positions / positions.sum(axis=2, keepdims=True))
        unseen = self.at_position.sum(axis=(0, 1)) == 0  # to such a class every colour would be equally likely
        log_position[..., unseen] = -np.inf
        return log_position, np.log(colours / colours.sum(axis=0))


def colours_of(image: np.ndarray) -> np.ndarray:
    """Colour bins of an image at the size GRID, int64."""
    red, green, blue = np.moveaxis(resize_bicubic(image, GRID).astype(np.int64) * LEVELS // 256, 2, 0)
    return (red * LEVELS + green) * LEVELS + blue


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

    def ious(self, name: str, times: Tensor | None = None) -> Tensor:
        """IoU in % (1, K), or (R, K) for R samples with each image `times` (R, N); nan for absent classes."""
        times = torch.ones(1, len(self.indices), dtype=torch.float64) if times is None else times
        return 100 * (times @ self.hits[name]) / (times @ self.unions[name])

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


def describe_segmentation(
    weights: Path,
    images: LabelMaps,
    metrics: Metrics,
    seconds: float,
    start: str | None,
    known: int,
    mean_std: Mapping[str, Any],
) -> Report:
    """Reports on a segmentor: its validation and `seconds` of tests; draws pictures beside the weights.

    On RGB images it is compared with its initial weights `start`: by their frozen features, each patch gets the class
    of the nearest patches in `known` labelled images, without training. `mean_std` are the mean and std that the call
    gave, pixels 0-255, or empty.
    """
    begin = time.monotonic()
    folder, segmentor = weights.parent, SegmentationInferencer(weights)
    segmentors: dict[str, Segmentor] = dict(mIoU=segmentor)
    labelled: SegmentationFolder | None = None
    if start and images.bands is None:
        extract = FeatureExtractor(start, whole=True, **mean_std)
        labelled = patch_dataset(extract, known, **images.dataset(folder / 'lists', 'train'))
        segmentors['patches'] = PatchSegmentor(extract, labelled)
    tested = compare_segmentors(segmentors, images, folder / 'lists', seconds - (time.monotonic() - begin))
    draw_overlays(segmentor, tested, folder / 'overlays.png')
    found = {name: tested.metric(name) for name in tested.hits}
    gains = {words: tested.metric('mIoU', name) for name, words in OTHERS.items() if name in found}
    counts = tested.counts['mIoU']
    table = [['class', 'IoU, %', 'by position and colour, %', 'pixels']]
    columns = tested.ious('mIoU')[0], tested.ious('position_colour')[0], counts.sum(dim=1)
    for name, *ious, pixels in zip(images.classes, *columns, strict=True):
        table.append([name, *map(reports.percentage, ious), f'{pixels:,.0f}'])
    colours = 'colours' if images.bands is None else 'colours (bands 1 to 3)'
    parts: list[Part] = [
        f'On {len(tested.indices):,} of {len(images.held_out.names):,} held-out images, in sliding windows at one '
        'scale. Standard errors cover the choice of images only; this is one training with one seed. Naive Bayes '
        f'learned from {tested.baseline.images:,} images how frequent each class is at each position and in 512 '
        f'{colours}.',
        f'{OF_PATCHES} {len(labelled):,} labelled images.' if labelled else '',
        table,
        confused(counts, images.classes),
        Picture('overlays.png', 'Held-out images with the highest, the median and the lowest mIoU'),
        reports.draw_curves(folder / 'finetune'),
    ]
    following = 'give it more label maps and minutes'
    if all(gain.sign == reports.BETTER for gain in gains.values()):
        quoted = shlex.quote(str(weights))
        following = f'beit-mm segment {quoted} new_images/ --out maps; beit-mm export {quoted} model.onnx'
    sentence = f'Verdict: the segmentor is {reports.verdict(gains)}.'
    return Report(metrics | found, sentence, parts, f'Next: {following}.')


def compare_segmentors(segmentors: Mapping[str, Segmentor], images: LabelMaps, lists: Path, seconds: float) -> Tested:
    """Tests segmentors, by name, and PositionAndColour on held-out images of a run's lists."""
    number = len(images.classes)
    baseline, begin = PositionAndColour(number), time.monotonic()
    load = images.bands['load'] if images.bands else dict(type='beit_mm.LoadImage')
    options: dict[str, Any] = dict(pipeline=[load, dict(type='beit_mm.LoadAnnotation')], test_mode=True)
    train, held_out = (SegmentationFolder(**images.dataset(lists, name), **options) for name in ('train', 'held_out'))
    for _, sample in samples(train, begin + seconds / 4):
        baseline.learn(sample['img'], sample['gt_seg_map'])
    tested = Tested(held_out, [], {}, {}, {}, baseline)
    found = defaultdict(list)
    for index, sample in samples(held_out, begin + seconds):
        truth = sample['gt_seg_map']  # H, W
        if not (truth < number).any():  # nothing to be right or wrong about
            continue
        tested.indices.append(index)
        answers = dict(position_colour=baseline.answer(sample['img'], truth.shape))
        for name, segmentor in segmentors.items():
            (result,) = segmentor(sample['img_path'])
            answers[name] = result['labels']
        for name, labels in answers.items():
            counts = confusion(torch.from_numpy(labels.astype(np.int64)), torch.from_numpy(truth), number)
            tested.counts[name] = tested.counts.get(name, 0) + counts
            found[name].append((counts.diagonal(), counts.sum(dim=0) + counts.sum(dim=1) - counts.diagonal()))
    if not tested.indices:
        raise UnreadableImageError('no held-out image both has labels and can be read')
    for name, of_images in found.items():
        tested.hits[name], tested.unions[name] = map(torch.stack, zip(*of_images, strict=True))
    return tested


def samples(dataset: SegmentationFolder, until: float) -> Iterator[tuple[int, dict]]:
    """Yields indices and samples in random order until the time `until`, but tries at least MIN_TESTED."""
    for index in reports.drawn_until(range(len(dataset)), until, MIN_TESTED):
        with suppress(UnreadableImageError):
            sample = dataset[index]
            yield index, dict(sample, img=LoadBands.as_rgb(sample['img']))


def confused(counts: Tensor, classes: Sequence[str]) -> str:
    """The pairs of classes most often confused, with the share of pixels."""
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    shares.fill_diagonal_(0)
    shown = []
    for index in shares.flatten().topk(min(NUM_PAIRS, shares.numel())).indices.tolist():
        truth, label = divmod(index, len(classes))
        if shares[truth, label] > 0:
            shown.append(f'{100 * shares[truth, label]:.0f} % of {classes[truth]} as {classes[label]}')
    return f'Confused: {"; ".join(shown)}.' if shown else ''


def draw_overlays(segmentor: SegmentationInferencer, tested: Tested, out: Path) -> None:
    """Draws the images with the highest, median and lowest mIoU: plain, with the label map, with the prediction."""
    scores = 100 * (tested.hits['mIoU'] / tested.unions['mIoU']).nanmean(dim=1)  # N
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
    with_legend(sheet(rows), legend).save(out)
