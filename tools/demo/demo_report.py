"""Measures frozen features for the demo, and draws and writes its report."""

import json
import math
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import default_collate
from PIL import Image

from beit_mm.apis import reports, split
from beit_mm.apis.inference import PatchSegmentor, classify, masked_samples, overlay
from beit_mm.apis.plans import Record
from beit_mm.apis.rebuild import rebuild_pretrainer
from beit_mm.apis.reports import Metric, Metrics, Picture
from beit_mm.apis.segmentation_report import PositionAndColour, compare_segmentor
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.features.evaluation import patch_dataset
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.pictures import center_tile, draw_bars, pixels_of, read_scalars, sheet, sheet_of_columns, with_legend
from beit_mm.registry import MODELS

PACKAGED, RANDOM, POSITION = 'packaged weights', 'random weights', 'position and colour'
METHODS = dict(knn='mIoU by the nearest frozen patches', linear='mIoU by a linear layer on frozen patches')
SHORT_SIDE = 128  # pixels of a scene whose patches are classified
NUM_SCENES, NUM_ANSWERS, NUM_COLUMNS, NUM_PREDICTED = 5, 24, 6, 5  # in the pictures
MAX_LOSS_SHARE = 0.9  # of the loss of guessing: a training that ends above it has not left chance
LIMITS = (
    'Each training ran once, with one seed, and the +- are standard errors over the held-out images only. The models '
    'have 1.2 million parameters and learned from thousands of images; those of the paper have 86 million and learned '
    'from 1.2 million images, on GPUs for days.'
)


def segment_frozen(folder: Path, out: Path) -> None:
    """Segments held-out scenes by the frozen patches of labelled ones: the mIoU as JSON, and a picture beside it."""
    maps, lists = split.find_label_maps(folder), folder / 'lists'
    split.write_lists(maps, lists)
    extract, number = FeatureExtractor('demo', whole=True, size=SHORT_SIDE), len(maps.classes)
    known = patch_dataset(extract, **maps.dataset(lists, 'train'))
    networks, found, drawn = {PACKAGED: extract, RANDOM: extract.with_random_weights()}, {}, {}
    for method, title in METHODS.items():
        found[title] = {}
        for name, network in networks.items():
            drawn[name] = PatchSegmentor(network, known, method)
            tested = compare_segmentor(drawn[name], maps, lists, math.inf)
            metrics, _ = tested.metrics()
            found[title] |= {name: metrics['mIoU'], POSITION: metrics['position_colour']}
    bayes = PositionAndColour(number)
    for sample in map(known.__getitem__, range(len(known))):
        bayes.learn(sample['img'], sample['gt_seg_map'])
    rows, palette = [], known.metainfo['palette']
    for index in split.evenly(range(len(tested.dataset)), NUM_SCENES):
        sample = tested.dataset[index]
        truth = sample['gt_seg_map'].astype(int)
        shown = {'scene': np.full_like(truth, -1), 'label map': np.where(truth < number, truth, -1)}
        shown |= {name: next(segmentor(sample['img_path']))['labels'] for name, segmentor in drawn.items()}
        shown[POSITION] = bayes.answers(sample['img'], truth.shape)['position_colour']
        tiles = {name: np.array(overlay(sample['img'], labels, palette)) for name, labels in shown.items()}
        rows.append([(name, torch.from_numpy(tile).permute(2, 0, 1) / 255) for name, tile in tiles.items()])
    legend = [*zip(maps.classes, palette, strict=True)]
    with_legend(Image.fromarray(pixels_of(sheet(rows))), legend).save(out.with_suffix('.png'))
    out.write_text(json.dumps(found, default=astuple))


def metrics_of(found: Mapping[str, tuple]) -> Metrics:
    return {name: Metric(*numbers) for name, numbers in found.items()}


def compare(out: Path, num_classes: int) -> tuple[Metrics, str]:
    """How many images each fine-tuning and thumbnails classify correctly, and a sentence on the fine-tunings.

    Random weights are compared only if they have learned: the last fifth of their losses is clearly below guessing.
    """
    packaged, random = (Record.read(out / f'finetune_{name}/plan.json') for name in ('packaged', 'random'))
    measured = metrics_of(random.metrics)
    found = {PACKAGED: metrics_of(packaged.metrics)['accuracy/top1'], RANDOM: measured['accuracy/top1']}
    minutes = f'{packaged.seconds / 60:.1f} minutes from the {PACKAGED}, {random.seconds / 60:.1f} from {RANDOM}'
    said = f'The fine-tunings took {minutes}, which got a learning rate of their own and no layer decay.'
    losses = [row['loss'] for row in read_scalars(out / 'finetune_random/finetune')[0].values() if 'loss' in row]
    last, guessed = float(np.mean(losses[-max(1, len(losses) // 5) :])), math.log(num_classes)
    if last > MAX_LOSS_SHARE * guessed:
        del found[RANDOM]
        said += (
            f' The latter has not left chance (loss {last:.2f}, guessing {guessed:.2f}): nothing is compared with it.'
        )
    return found | {'thumbnails': measured['thumbnails']}, said


def judge(what: str, found: Metrics) -> tuple[bool, str]:
    """Whether the packaged weights are better than all else, and a clause with the figures."""
    best = found[PACKAGED]
    others = {name: other for name, other in found.items() if name != PACKAGED}
    figures = ', '.join(f'{name} {other.value:.1f}' for name, other in others.items())
    won = all((best - other).sign == reports.BETTER for other in others.values())
    return won, f'{best.value:.1f} +- {best.error:.1f} % {what} ({figures})'


def draw_answers(classifier: Path, images: split.Images, out: Path) -> None:
    """Draws evenly chosen held-out images with the answers of a classifier, the correct ones first."""
    truths = dict(split.evenly(images.held_out.names.items(), NUM_ANSWERS))
    answers = zip(classify(classifier, [images.held_out.root / path for path in truths]), truths.values(), strict=True)
    read = [(answer, truth) for answer, truth in answers if 'error' not in answer]
    read.sort(key=lambda pair: pair[0]['name'] != pair[1])
    tiles = [(f'{answer["name"]} ({truth})', center_tile(answer['path'])) for answer, truth in read]
    sheet([tiles[first : first + NUM_COLUMNS] for first in range(0, len(tiles), NUM_COLUMNS)]).savefig(out)


def draw_predictions(run: Path, images: split.Images) -> None:
    """Draws what a pretraining predicts of masked patches before and after, and what the packaged weights predict."""
    torch.manual_seed(0)
    begun = MODELS.build(Config.fromfile(run / 'pretrain/config.py').model)
    after, packaged = (rebuild_pretrainer(Checkpoint.open(weights)) for weights in (run, 'demo'))
    chosen = [images.held_out.root / path for path in split.evenly(images.held_out.names, NUM_PREDICTED)]
    samples, columns = [*masked_samples(after, chosen).values()], {}
    for title, model in {'before': begun.eval(), 'after': after, PACKAGED: packaged}.items():
        drawn = model.pictures(model.data_preprocessor(default_collate(samples))['inputs'])
        columns |= {'image': drawn['image'], 'masked': drawn['masked'], title: drawn['prediction']}
    sheet_of_columns(columns).savefig(run / 'before_and_after.png')


def write(out: Path, images: split.Images, drawn: bool) -> list[object]:
    """Writes report.html and report.md into the folder of the demo; returns what to print."""
    groups, limits = {}, [LIMITS]
    pictures = [Picture('packaged_reconstruct.png', f'Masked patches as the {PACKAGED} predict them')]
    if drawn:
        frozen = json.loads((out / 'frozen_scenes.json').read_text())
        groups |= {title: metrics_of(found) for title, found in frozen.items()}
        caption = 'Held-out scenes by linear layers on frozen patches of labelled scenes, and by naive Bayes'
        pictures.append(Picture('frozen_scenes.png', caption))
        limits.append('A program drew the scenes: what is reached on them says little of photos.')
    if images.classes:
        number = len(split.list_folder(out / 'few_labels/train').names)
        groups[f'right after fine-tuning with {number} labels'], said = compare(out, len(images.classes))
        limits.append(said)
        draw_answers(out / 'finetune_packaged', images, out / 'answers.png')
        caption = f'Held-out images: answer (truth) of the classifier that began with the {PACKAGED}, right ones first'
        pictures.append(Picture('answers.png', caption))
    if groups:
        draw_bars(groups, out / 'bars.png', '%')
        pictures.insert(1, Picture('bars.png', 'Same labels and held-out images in a group; +- one standard error'))
    judged = [judge(*group) for group in groups.items()]
    won, others = ('; '.join(clause for better, clause in judged if better is wanted) for wanted in (True, False))
    result = f'Pretraining helps: with the {PACKAGED}, which learned from 4,084 other photos without labels, {won}.'
    pretrained = Record.read(out / 'pretrain/plan.json')
    loss, *guesses = (pretrained.metrics[name][0] for name in ('mim_loss', 'token_entropy', 'position_entropy'))
    learned = f'A pretraining from random weights reaches a loss of {loss:.2f} nats in {pretrained.seconds / 60:.1f} '
    learned += 'minutes; guessing by token frequency gives {:.2f}, by that at each position {:.2f}.'.format(*guesses)
    first = [result] if won else []
    limits += [f'Not clearly better than all else: {others}.'] if others else []
    (first if loss < min(guesses) - reports.MIN_LOSS_GAIN else limits).append(learned)
    limits.append(f'The pretraining of this demo is far too short to begin with. {pretrained.verdict}')
    draw_predictions(out / 'pretrain', images)
    pictures.append(Picture('pretrain/loss.png', 'Loss of the pretraining from random weights, and of guessing'))
    caption = f'Predictions before this pretraining, after it, and by the {PACKAGED}'
    pictures.append(Picture('pretrain/before_and_after.png', caption))
    limited = f'Limits: {" ".join(limits)}'
    path = reports.write_report(out, 'Demo of beit_mm', [*first, f'{images}.', *pictures, limited])
    return [*first, limited, f'Report: {path.with_suffix(".html")} and {path}']
