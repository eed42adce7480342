"""Writes the report of the demo from the results of its runs."""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from beit_mm.apis.reports import Picture, rows_of, standard_error, verdict, verdict_of_pretraining, write_report
from beit_mm.apis.split import Images, list_folder
from beit_mm.engine.metrics import entropy
from beit_mm.pictures import read_scalars

MAX_LOSS_SHARE = 0.9  # of the loss of guessing: a training that ends above this has learned nothing
REFERENCES = dict(  # baselines without a network, for classifiers and segmentors
    thumbnails='thumbnails',
    most_frequent='the most frequent class',
    position_colour='naive Bayes of position and colour',
)
LIMITS = (
    'These numbers do not show how much trainings vary: each ran once, with one seed, and the +- are standard errors '
    'over the held-out images only. They do not show what more time gives either: the models have 1.2 million '
    "parameters and learned for minutes, the paper's have 86 million and learned for days."
)


def results_of(run: Path, verb: str) -> dict[str, float]:
    """Reads the results of a finished run, and its minutes."""
    record = json.loads((run / 'plan.json').read_text())
    return dict(record['stages'][verb], minutes=record['seconds'] / 60)


def compare(out: Path, starts: Mapping[str, str]) -> tuple[str, list[tuple[str, str, str]]]:
    """Compares the classifiers in the folders of `starts`, the last from random weights: a sentence and a table.

    The training from random weights is compared only if it has learned: the mean of the last fifth of its losses must
    be clearly below the loss of guessing.
    """
    results = {name: results_of(out / folder, 'finetune') for folder, name in starts.items()}
    (first, *_, control), (*_, folder) = results, starts
    labels = [*list_folder(out / 'few_labels/train').names.values()]
    losses = [row['loss'] for row in read_scalars(out / folder / 'finetune')[0].values() if 'loss' in row]
    last, guessed = float(np.mean(losses[-max(1, len(losses) // 5) :])), entropy(np.array(labels))
    accuracies = {name: (each['accuracy/top1'], each['held_out']) for name, each in results.items()}
    for key in ('thumbnails', 'most_frequent'):  # from the longest run, which has the most images for it
        accuracies[REFERENCES[key]] = results[control][key], results[control]['compared']
    found = {name: (percent, standard_error(percent, number)) for name, (percent, number) in accuracies.items()}
    before = {first: f'{results_of(out / "pretrain", "pretrain")["minutes"]:.1f} + ', 'the packaged weights': '60 + '}
    minutes = {name: f'{before.get(name, "")}{each["minutes"]:.1f}' for name, each in results.items()}
    rows = [('classifier', 'minutes', 'classified right, % +- one standard error')]
    rows += [(name, minutes.get(name, ''), '{:.1f} +- {:.1f}'.format(*value)) for name, value in found.items()]

    peers = [control] * (last < MAX_LOSS_SHARE * guessed) + ['thumbnails']
    clauses = []
    for name in [*results][:-1]:
        gains = {peer: (found[name][0] - found[peer][0], math.hypot(found[name][1], found[peer][1])) for peer in peers}
        clauses.append(f'the classifier that started from {name} is {verdict(gains)}')
    if control not in peers:
        text = 'the training from random weights has not left chance, so nothing is compared with it: its loss '
        clauses.append(f'{text}ended at {last:.2f} nats, guessing gives {guessed:.2f}')
    return f'With {len(labels)} labelled images {"; ".join(clauses)}.', rows


def write(out: Path, images: Images, starts: Mapping[str, str], drawn: bool) -> list[object]:
    """Writes report.html and report.md into the folder of the demo; returns the lines to print."""
    pretrained = results_of(out / 'pretrain', 'pretrain')
    sentences = [verdict_of_pretraining(pretrained)]
    steps = f'The pretraining had {pretrained["steps"]:,} steps here; a faster machine does more in the same minutes.'
    drawing = 'A program has drawn the images: results on them say little about natural images. ' if drawn else ''
    parts: list = []
    if starts:
        sentence, table = compare(out, starts)
        sentences.append(sentence)
        parts += [
            table,
            'All classifiers learned from the same labels. Random weights got their own learning rate, no layer decay, '
            'and as much time as the pretraining of this demo and its fine-tuning together. The packaged weights had '
            'learned for an hour from 4,084 images. Thumbnails are 8 x 8 pixels, classified by ridge regression.',
        ]
    parts += [
        [('pretraining, on held-out images', 'value +- one standard error'), *rows_of(pretrained)],
        Picture('pretrain/reconstruction.png', 'Predictions for the masked patches; last the best case, true tokens'),
        Picture('pretrain/loss.png', 'Loss of the pretraining'),
        Picture('pretrain/neighbours.png', 'Held-out images on the left, beside each those with the nearest features'),
    ]
    if drawn:
        found = results_of(out / 'segmentor', 'finetune')
        gains = {
            REFERENCES[name]: (found['mIoU'] - found[name], math.hypot(found['mIoU_error'], found[f'{name}_error']))
            for name in ('position_colour', 'most_frequent')
        }
        sentences.append(f'The segmentor is {verdict(gains)}.')
        parts += [
            [('segmentation, on held-out images', 'value +- one standard error'), *rows_of(found)],
            Picture('segmentor/overlays.png', 'Held-out images with the highest, the median and the lowest mIoU'),
        ]
    marked = 'Attention of the marked patch in the packaged weights: dark least, white most, each tile on its own scale'
    parts += [
        Picture('packaged_reconstruct.png', 'Predictions of the packaged weights for masked patches'),
        Picture('packaged_attention.png', f'{marked}; the outlines hold 60 %'),
    ]
    path = write_report(out, 'Demo of beit_mm', [' '.join(sentences), f'{images}. {steps}', drawing + LIMITS, *parts])
    return [*sentences, f'Report: {path.with_suffix(".html")} and {path}']
