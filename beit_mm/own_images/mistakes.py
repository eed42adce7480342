"""Which labels may be wrong, and which classes are confused: mistakes.csv and pictures beside a report."""

import time
from collections.abc import Iterable, Mapping, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from beit_mm.apis.inference import write_table
from beit_mm.features.evaluation import cross_fit
from beit_mm.features.extractor import ExistingPath, FeatureExtractor
from beit_mm.files import atomic_file, quoted
from beit_mm.own_images.report import Link, Part, Picture, drawn_until, percentage
from beit_mm.pictures import center_tile, sheet, shortened

TABLE = 'mistakes.csv'
SHOWN = 10  # of its rows are in the report
LEAST = 50  # images to check even if time is short
FITTED_PER_SECOND = 3_000_000  # images times features times classes that a core fits, in all folds
MAX_CELLS = 30  # classes whose confusion is drawn
NUM_PAIRS, MANY_PAIRS = 5, 20  # pairs of confused classes in the report, and without a picture
TILES, COLUMNS, TILE_SIDE = 24, 4, 240  # mistakes that are drawn, columns, side of a tile in pixels
SHORT = ' There was no time for the others: give more minutes.'


class Suspect(NamedTuple):
    """An image, and what a layer that did not learn from it answers."""

    path: str
    label: int
    predicted: int
    probability: float  # of the label


def features_in_time(source: str, files: Iterable[str], seconds: float, **mean_std: Any) -> dict[str, Tensor]:
    """Default features (C,) of the files that can be read, in random order, as many as there is time for."""
    extract = FeatureExtractor(source, **mean_std)
    drawn = map(ExistingPath, drawn_until(files, time.monotonic() + seconds, LEAST))
    found = extract(drawn, ['mean'], batch_size=16, on_error='skip')
    return {result['path']: torch.from_numpy(result['mean']) for result in found if 'error' not in result}


def find_suspects(
    features: Mapping[str, Tensor], labels: Mapping[str, int], num_classes: int, seconds: float
) -> list[Suspect]:
    """Images by the probability of their label in `cross_fit`, lowest first; the last are left out if time is short."""
    paths = [*features]
    cost = num_classes * len(features[paths[0]])
    paths = paths[: max(LEAST, int(seconds * FITTED_PER_SECOND / cost))]
    given = torch.tensor([labels[path] for path in paths])
    shares = cross_fit(torch.stack([features[path] for path in paths]), given, num_classes)
    probabilities, predicted = shares.gather(1, given[:, None])[:, 0].tolist(), shares.argmax(dim=1).tolist()
    suspects = map(Suspect, paths, given.tolist(), predicted, probabilities)
    return sorted(suspects, key=lambda suspect: suspect.probability)


def list_suspects(suspects: Sequence[Suspect], classes: Sequence[str], root: Path, out: Path, total: int) -> list[Part]:
    """Writes mistakes.csv beside a report of so many images in all; returns what the report says of it."""
    rows = []
    for rank, (path, label, predicted, probability) in enumerate(suspects, start=1):
        rows.append((relpath(path, root), classes[label], classes[predicted], f'{probability:.4f}', str(rank)))
    write_table(out / TABLE, ['file', 'label', 'predicted', 'probability of the label', 'rank'], rows)
    text = (
        f'lists {len(rows):,} of {total:,} images, those to learn from too: the less probable its label, the earlier an '
        'image. The probabilities are those of a linear layer on frozen features, fitted to other images than it is '
        f'asked about.{SHORT if len(rows) < total else ""} If the first labels are wrong, correct them and train again:'
    )
    return [
        Link(TABLE, text),
        [('file', 'label', 'predicted', 'probability of the label'), *(row[:4] for row in rows[:SHOWN])],
    ]


def list_contradicted(
    found: Mapping[str, tuple[Tensor, Tensor]], classes: Sequence[str], root: Path, out: Path, total: int
) -> list[Part]:
    """The same for label maps, by the share of pixels that a segmentor contradicts.

    Args:
        found: file -> pixels (K,) of each class in the label map that the segmentor contradicts, and all of them.
    """
    shares = {path: float(100 * wrong.sum() / pixels.sum()) for path, (wrong, pixels) in found.items()}
    rows = []
    for rank, path in enumerate(sorted(shares, key=lambda path: -shares[path]), start=1):
        wrong, pixels = found[path]
        of_classes = map(percentage, (100 * wrong / pixels).tolist())
        mostly = classes[int(wrong.argmax())]
        rows.append((relpath(path, root), percentage(shares[path]), mostly, str(rank), *of_classes))
    head = ['file', 'contradicted, %', 'mostly where labelled', 'rank']
    write_table(out / TABLE, [*head, *(f'contradicted of {name}, %' for name in classes)], rows)
    text = (
        f'lists {len(rows):,} of {total:,} images: the more of the labelled pixels the segmentor contradicts, the earlier '
        'an image. Of those that it learned from, it may have learned wrong labels too.'
        f'{SHORT if len(rows) < total else ""} If the first label maps are wrong, correct them and train again:'
    )
    return [Link(TABLE, text), [head[:3], *(row[:3] for row in rows[:SHOWN])]]


def confused(counts: Tensor, classes: Sequence[str]) -> str:
    """The pairs of classes most often confused, with the share of images or pixels, from a `confusion` (K, K)."""
    shares = counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    shares.fill_diagonal_(0)
    shown, number = [], NUM_PAIRS if len(classes) <= MAX_CELLS else MANY_PAIRS
    for index in shares.flatten().topk(min(number, shares.numel())).indices.tolist():
        truth, label = divmod(index, len(classes))
        if shares[truth, label] > 0:
            shown.append(f'{100 * shares[truth, label]:.0f} % of {classes[truth]} as {classes[label]}')
    return f'Confused: {"; ".join(shown)}.' if shown else ''


def draw_confusion(counts: Tensor, classes: Sequence[str], out: Path) -> Part:
    """Draws a `confusion` (K, K) as shares of each class in %; '' for more than MAX_CELLS classes."""
    if len(classes) > MAX_CELLS:
        return ''
    shares = 100 * counts / counts.sum(dim=1, keepdim=True).clamp(min=1)
    side = 2.5 + 0.32 * len(classes)  # inches
    figure = Figure(figsize=(side, side), layout='constrained')
    axes = figure.subplots()
    axes.imshow(shares, cmap='Blues', vmin=0, vmax=100)
    ticks, names = range(len(classes)), [shortened(quoted(name).replace('$', r'\$'), 25) for name in classes]
    axes.set_xticks(ticks, names, rotation=90, fontsize=7)
    axes.set_yticks(ticks, names, fontsize=7)
    axes.set(xlabel='predicted', ylabel='label')
    for truth, label in (shares >= 0.5).nonzero().tolist():
        colour = 'white' if shares[truth, label] > 60 else 'black'
        axes.text(label, truth, f'{shares[truth, label]:.0f}', color=colour, ha='center', va='center', fontsize=7)
    with atomic_file(out) as file:
        figure.savefig(file, dpi=120)
    return Picture(out.name, 'Which classes are confused on held-out images, in % of those with a label')


def draw_mistakes(answers: Sequence[Mapping[str, Any]], classes: Sequence[str], out: Path) -> list[Picture]:
    """Draws the images that a classifier gets wrong, most confident first; `answers` are `classify`'s, with `truth`."""
    wrong = [answer for answer in answers if answer['label'] != answer['truth']]
    wrong.sort(key=lambda answer: -answer['scores'][0][1])
    if not wrong:
        return []
    tiles = []
    for answer in wrong[:TILES]:
        truth, predicted = (quoted(classes[answer[key]]) for key in ('truth', 'label'))
        title = (
            f'{quoted(Path(answer["path"]).name)}\nlabel: {truth}\npredicted: {predicted} {answer["scores"][0][1]:.2f}'
        )
        tiles.append((title, center_tile(answer['path'], TILE_SIDE)))
    rows = [tiles[first : first + COLUMNS] for first in range(0, len(tiles), COLUMNS)]
    sheet(rows, TILE_SIDE).save(out)
    which = f'The {len(tiles)} most confident of {len(wrong):,} mistakes on {len(answers):,} held-out images'
    return [Picture(out.name, which)]
