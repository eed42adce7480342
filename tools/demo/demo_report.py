"""Measures frozen features for the demo, and draws and writes its report."""

import json
import math
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from textwrap import fill

import numpy as np
import torch
from matplotlib.figure import Figure
from mmengine.config import Config
from mmengine.dataset import default_collate

from beit_mm.apis.inference import masked_samples
from beit_mm.apis.rebuild import rebuild_pretrainer
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.features.evaluation import patch_dataset
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.own_images.images import Images, evenly, list_folder, write_lists
from beit_mm.own_images.label_maps import find_label_maps
from beit_mm.own_images.prediction import NearestPatches, classify
from beit_mm.own_images.record import Record
from beit_mm.own_images.report import BETTER, Metric, Metrics, Picture, write_report
from beit_mm.own_images.segmentation import compare_segmentors
from beit_mm.pictures import center_tile, read_scalars, reconstructed, sheet, sheet_of_columns, with_legend
from beit_mm.registry import MODELS

PACKAGED, RANDOM, POSITION = 'packaged weights', 'random weights', 'position and colour'
METHODS = dict(
    knn='scenes, mIoU by the nearest frozen patches', linear='scenes, mIoU by a linear layer on frozen patches'
)
SCENES = 'the scenes, of which 100 are labelled and 100 held out'
SHORT_SIDE = 128  # pixels of a scene whose patches are classified
NUM_SCENES, NUM_ANSWERS, NUM_COLUMNS, NUM_PREDICTED = 5, 24, 6, 5  # in the pictures
MAX_LOSS_SHARE = 0.9  # of the loss of guessing: a training that ends above it has not left chance
LIMITS = (
    'Each training ran once, with one seed, and the +- are standard errors over the held-out images only. The models '
    'have 1.2 million parameters; those of the paper have 86 million and learned from 1.2 million images, on GPUs for '
    'days.'
)
WORDS = f'{PACKAGED.capitalize()}: pretrained without labels on 4,084 photos of Caltech-101.'
OF_CLASSES = ' Thumbnails: ridge regression on 8 x 8 pixels.'
OF_SCENES = (
    f' {POSITION.capitalize()}: naive Bayes. mIoU: per class the pixels that label map and answer both give it, '
    'divided by the pixels that either gives it; averaged over the classes. Frozen patches: each patch takes the class '
    'of the most similar labelled patches, or of a linear layer; the network is not trained further.'
)
NEXT = (
    'Next: beit-mm finetune YOUR_IMAGES --out run --minutes 15 (one folder per class, or images/, annotations/ and '
    "classes.txt); docs/own_images.md has all verbs, README.md the paper's recipes."
)


def segment_frozen(folder: Path, out: Path) -> None:
    """Segments held-out scenes by the frozen patches of labelled ones: the mIoU as JSON, and a picture beside it."""
    maps, lists = find_label_maps(folder), folder / 'lists'
    write_lists(maps, lists)
    extract, number = FeatureExtractor('demo', whole=True, size=SHORT_SIDE), len(maps.classes)
    known = patch_dataset(extract, **maps.dataset(lists, 'train'))
    networks = {PACKAGED: extract, RANDOM: extract.with_random_weights()}
    segmentors = {
        f'{name}, {method}': NearestPatches(network, known, method)
        for method in METHODS
        for name, network in networks.items()
    }
    tested, found = compare_segmentors(segmentors, maps, lists, math.inf), {}
    for method, title in METHODS.items():
        found[title] = {name: tested.metric(f'{name}, {method}') for name in networks}
        found[title][POSITION] = tested.metric('position_colour')
    rows, palette = [], known.metainfo['palette']
    colours = np.array([*palette, [255] * 3], np.uint8)  # white without a label, -1
    for index in evenly(range(len(tested.dataset)), NUM_SCENES):
        sample = tested.dataset[index]
        truth = sample['gt_seg_map'].astype(int)
        shown = {'label map': np.where(truth < number, truth, -1)}
        shown |= {name: next(segmentors[f'{name}, linear'](sample['img_path']))['labels'] for name in networks}
        shown[POSITION] = tested.baseline.answer(sample['img'], truth.shape)
        tiles = {'scene': sample['img']} | {name: colours[labels] for name, labels in shown.items()}
        rows.append([(name, torch.from_numpy(tile).permute(2, 0, 1) / 255) for name, tile in tiles.items()])
    legend = [*zip(maps.classes, palette, strict=True)]
    with_legend(sheet(rows), legend).save(out.with_suffix('.png'))
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
    """Whether the packaged weights are better than all else, as independent measurements, and the figures."""
    best, *others = found.values()
    gains = [Metric(best.value - other.value, math.hypot(best.error or 0, other.error or 0)) for other in others]
    figures = [f'{name} {other.value:.1f}' for name, other in found.items()]
    figures[0] += f' +- {best.error:.1f} %'
    won = all(gain.sign == BETTER for gain in gains)
    return won, f'{what[0].upper()}{what[1:]}: {", ".join(figures)}.'


def table_of(groups: Mapping[str, Metrics]) -> list[list[str]]:
    rows = [['held-out images, %', PACKAGED, RANDOM, 'without a network']]
    for title, found in groups.items():
        cells = {name: f'{each.value:.1f} +- {each.error:.1f}' for name, each in found.items()}
        network = [cells.pop(name, '-') for name in (PACKAGED, RANDOM)]
        rows.append([title, *network, *(f'{name}: {cell}' for name, cell in cells.items())])
    return rows


def draw_answers(classifier: Path, images: Images, out: Path) -> None:
    """Draws evenly chosen held-out images with the answers of a classifier, the correct ones first."""
    truths = dict(evenly(images.held_out.names.items(), NUM_ANSWERS))
    answers = zip(classify(classifier, [images.held_out.root / path for path in truths]), truths.values(), strict=True)
    read = [(answer, truth) for answer, truth in answers if 'error' not in answer]
    read.sort(key=lambda pair: pair[0]['name'] != pair[1])
    tiles = [(f'{answer["name"]} ({truth})', center_tile(answer['path'])) for answer, truth in read]
    sheet([tiles[first : first + NUM_COLUMNS] for first in range(0, len(tiles), NUM_COLUMNS)]).save(out)


def draw_bars(groups: Mapping[str, Metrics], out: Path, unit: str) -> None:
    """Draws groups of bars with their standard errors; a name has one colour in all groups."""
    figure = Figure(figsize=(3.2 * len(groups), 3.5), layout='constrained')
    axes, names = figure.subplots(), [*dict.fromkeys(name for bars in groups.values() for name in bars)]
    for group, bars in enumerate(groups.values()):
        for place, (name, each) in enumerate(bars.items()):
            at, colour = group + 0.28 * place, f'C{names.index(name)}'
            bar = axes.bar(at, each.value, 0.27, yerr=each.error, capsize=4, color=colour, alpha=0.7)
            label = '\n'.join([*name.split(' ', 1), f'{each.value:.1f}'])
            axes.bar_label(bar, [label], label_type='center', fontsize=8)
    axes.set(xticks=[group + 0.28 for group in range(len(groups))], ylabel=unit)
    axes.set_xticklabels([fill(title, 24) for title in groups])
    figure.savefig(out, dpi=120)


def draw_predictions(run: Path, images: Images) -> None:
    """Draws what a pretraining predicts of masked patches before and after, and what the packaged weights predict."""
    torch.manual_seed(0)
    begun = MODELS.build(Config.fromfile(run / 'pretrain/config.py').model)
    after, packaged = (rebuild_pretrainer(Checkpoint.open(weights)) for weights in (run, 'demo'))
    chosen = [images.held_out.root / path for path in evenly(images.held_out.names, NUM_PREDICTED)]
    samples, columns = masked_samples(after, chosen), {}
    for title, model in {'before': begun.eval(), 'after': after, PACKAGED: packaged}.items():
        drawn = reconstructed(model, model.data_preprocessor(default_collate(samples))['inputs'])
        columns |= {'image': drawn['image'], 'masked': drawn['masked'], title: drawn['prediction']}
    sheet_of_columns(columns).save(run / 'before_and_after.png')


def write(out: Path, images: Images, drawn: bool) -> list[object]:
    """Writes report.html and report.md into the folder of the demo; returns what to print."""
    groups, limits = {}, [LIMITS]
    caption = f'What the {PACKAGED} predict of masked patches. Visible patches are pasted back; the last column is the '
    shown = [Picture('packaged_reconstruct.png', f'{caption}best that its visual tokens can show')]
    if drawn:
        frozen = json.loads((out / 'frozen_scenes.json').read_text())
        groups |= {title: metrics_of(found) for title, found in frozen.items()}
        caption = 'Held-out scenes: the truth (white: none), then answers of a linear layer on frozen patches, of '
        caption += f'packaged and of random weights, and of {POSITION}'
        shown.append(Picture('frozen_scenes.png', caption))
        limits.append(f'A program drew the images, and {SCENES}: what is reached on them says little of photos.')
    if images.classes:
        number = len(list_folder(out / 'few_labels/train').names)
        groups[f'images classified correctly, {number} labels'], said = compare(out, len(images.classes))
        limits.append(said)
        draw_answers(out / 'finetune_packaged', images, out / 'answers.png')
        caption = f'Held-out images, evenly chosen: answer (truth) of the classifier from the {PACKAGED}, correct first'
        shown.append(Picture('answers.png', caption))
    if groups:
        draw_bars(groups, out / 'bars.png', '%')
        shown.insert(1, Picture('bars.png', 'The figures of the table with one standard error; higher is better'))
    judged = [judge(*group) for group in groups.items()]
    result = [f'Pretraining helps here. {sentence}' for won, sentence in judged if won][-1:]
    limits += [f'Not clearly better than all else: {sentence}' for won, sentence in judged if not won]
    pretrained = Record.read(out / 'pretrain/plan.json')
    loss, *guesses = (pretrained.metrics[name][0] for name in ('mim_loss', 'token_entropy', 'position_entropy'))
    own = (
        f'This demo also pretrains from random weights: in {pretrained.seconds / 60:.1f} minutes the loss on held-out '
        f'images reaches {loss:.2f} nats (lower is better; guessing by token frequency gives {guesses[0]:.2f}, at each '
        f'position {guesses[1]:.2f}). {pretrained.verdict} This run is far too short to be a start for fine-tuning.'
    )
    draw_predictions(out / 'pretrain', images)
    caption = f'Masked patches, predicted before this pretraining, after it, and by the {PACKAGED}'
    learned = [
        Picture(
            'pretrain/loss.png',
            'Training and held-out loss of this pretraining, which ends with its minutes, and of guessing',
        ),
        Picture('pretrain/before_and_after.png', caption),
    ]
    limited = f'Limits: {" ".join(limits)}'
    table = table_of(groups) if groups else ''
    words = WORDS + OF_CLASSES * bool(images.classes) + OF_SCENES * drawn
    parts = [*result, table, words, f'{images}.', *shown, own, *learned, limited, NEXT]
    path = write_report(out, 'Demo of beit_mm', parts)
    return [*result, own, limited, NEXT, f'Report: {path.with_suffix(".html")} and {path}']
