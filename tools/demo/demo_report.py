"""Writes the report of the demo from the results of its runs."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from beit_mm.apis.plans import Record
from beit_mm.apis.reports import BASELINES, Metric, Metrics, Picture, rows_of, verdict, write_report
from beit_mm.apis.split import Images, list_folder
from beit_mm.engine.metrics import entropy
from beit_mm.errors import UserError
from beit_mm.pictures import read_scalars

MAX_LOSS_SHARE = 0.9  # of the loss of guessing: a training that ends above it has not left chance
LIMITS = (
    'These numbers do not show how much trainings vary: each ran once, with one seed, and the +- are standard errors '
    'over the held-out images only. They do not show what more time gives either: the models have 1.2 million '
    "parameters and learned for minutes, the paper's have 86 million and learned for days."
)


def record_of(run: Path) -> Record:
    record = Record.read(run / 'plan.json')
    if not record.metrics:
        raise UserError(f'{run} was made by an earlier version of beit_mm; delete it and repeat the command')
    return record


def metrics_of(record: Record) -> Metrics:
    return {name: Metric(*numbers) for name, numbers in record.metrics.items()}


def compare(out: Path, starts: Mapping[str, str]) -> tuple[str, list[tuple[str, str, str]]]:
    """Compares the classifiers in the folders of `starts`, the last from random weights: a sentence and a table.

    The training from random weights is compared only if it has learned: the mean of the last fifth of its losses must
    be clearly below the loss of guessing.
    """
    records = {name: record_of(out / folder) for folder, name in starts.items()}
    (first, *_, control), (*_, folder) = records, starts
    labels = [*list_folder(out / 'few_labels/train').names.values()]
    losses = [row['loss'] for row in read_scalars(out / folder / 'finetune')[0].values() if 'loss' in row]
    last, guessed = float(np.mean(losses[-max(1, len(losses) // 5) :])), entropy(np.array(labels))
    found = {name: metrics_of(record)['accuracy/top1'] for name, record in records.items()}
    for key in ('thumbnails', 'most_frequent'):  # of the longest run, which has the most images for it
        found[BASELINES[key]] = metrics_of(records[control])[key]
    before = {first: f'{record_of(out / "pretrain").seconds / 60:.1f} + ', 'the packaged weights': '60 + '}
    minutes = {name: f'{before.get(name, "")}{record.seconds / 60:.1f}' for name, record in records.items()}
    rows = [('classifier', 'minutes', 'classified correctly, % +- one standard error')]
    rows += [(name, minutes.get(name, ''), f'{share.value:.1f} +- {share.error:.1f}') for name, share in found.items()]

    peers = [control] * (last < MAX_LOSS_SHARE * guessed) + ['thumbnails']
    clauses = []
    for name in [*records][:-1]:
        gains = {peer: found[name] - found[peer] for peer in peers}
        clauses.append(f'the classifier that began with {name} is {verdict(gains)}')
    if control not in peers:
        text = 'the training from random weights has not left chance, so nothing is compared with it: its loss '
        clauses.append(f'{text}ended at {last:.2f} nats, guessing gives {guessed:.2f}')
    return f'With {len(labels)} labelled images {"; ".join(clauses)}.', rows


def write(out: Path, images: Images, starts: Mapping[str, str], drawn: bool) -> list[object]:
    """Writes report.html and report.md into the folder of the demo; returns what to print."""
    pretrained = record_of(out / 'pretrain')
    sentences = [pretrained.verdict]
    number = pretrained.stages['pretrain']['steps']
    steps = f'The pretraining had {number:,} steps here; a faster machine makes more in its minutes.'
    drawing = 'The images are drawn by a program: what is reached on them says little of photos. ' if drawn else ''
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
        [('pretraining, on held-out images', 'value +- one standard error'), *rows_of(metrics_of(pretrained))],
        Picture('pretrain/reconstruction.png', 'Predicted of the masked patches; last, the best: the right tokens'),
        Picture('pretrain/loss.png', 'Loss of the pretraining'),
        Picture('pretrain/neighbours.png', 'Held-out images on the left, beside each those with the nearest features'),
    ]
    if drawn:
        segmentor = record_of(out / 'segmentor')
        sentences.append(segmentor.verdict)
        parts += [
            [('segmentation, on held-out images', 'value +- one standard error'), *rows_of(metrics_of(segmentor))],
            Picture('segmentor/overlays.png', 'Held-out images of the highest, the median and the lowest mIoU'),
        ]
    marked = 'Attention of the marked patch in the packaged weights: dark least, white most, each tile on its own scale'
    parts += [
        Picture('packaged_reconstruct.png', 'Predictions of the packaged weights for masked patches'),
        Picture('packaged_attention.png', f'{marked}; the outlines hold 60 %'),
    ]
    path = write_report(out, 'Demo of beit_mm', [' '.join(sentences), f'{images}. {steps}', drawing + LIMITS, *parts])
    return [*sentences, f'Report: {path.with_suffix(".html")} and {path}']
