"""Which labels may be wrong, and which classes are confused: mistakes.csv and pictures beside a report."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from os.path import relpath
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from torch import Tensor

from beit_mm.apis.inference import write_table
from beit_mm.datasets.reading import LoadBands, UnreadableImageError
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.files import atomic_file, quoted
from beit_mm.own_images.report import Link, Part, Picture, drawn_until
from beit_mm.pictures import center_tile, sheet, shortened
from beit_mm.terminal import say

TABLE = 'mistakes.csv'
SHOWN, SHOWN_COLUMNS = 10, 4  # of its rows and columns, in the report
MIN_CHECKED = 50  # images that a classifier's report checks even if time is short
MAX_CELLS = 30  # classes whose confusion is drawn
NUM_PAIRS, MANY_PAIRS = 5, 20  # pairs of confused classes in the report, and without a picture
TILES, COLUMNS, TILE_SIDE = 24, 4, 240  # mistakes that are drawn, columns, side of a tile in pixels
CONTRADICTED = (
    'The images in which the segmentor contradicts most of the labelled pixels come first. If their label maps are '
    'wrong, correct them and give the same `finetune` command again, which prints the command to go on with. The '
    'segmentor may have learned wrong labels too:'
)


class Checked(NamedTuple):
    """Which images mistakes.csv is about."""

    total: int  # images of the run
    learned: bool  # it has some to learn from
    skipped: int  # that were tried, but cannot be read or have no label


def list_first(
    text: str, head: Sequence[str], rows: Sequence[Sequence[str]], checked: Checked, out: Path
) -> list[Part]:
    """Writes mistakes.csv beside a report, and shows its first rows in the report after a text."""
    write_table(out / TABLE, [*head, 'rank'], [(*row, str(rank)) for rank, row in enumerate(rows, start=1)])
    learned = ', including those to learn from' if checked.learned else ''
    skipped = f' ({checked.skipped:,} cannot be read or have no label)' if checked.skipped else ''
    said = f'lists {len(rows):,} of {checked.total:,} images{learned}{skipped}.'
    if len(rows) + checked.skipped < checked.total:
        said += ' There was no time for the others: give more minutes.'
        say(f'{TABLE} {said}')
    return [Link(TABLE, f'{said} {text}'), [row[:SHOWN_COLUMNS] for row in (head, *rows[:SHOWN])]]


def list_contradicted(
    found: Iterable[tuple[str, Tensor, Tensor]], classes: Sequence[str], root: Path, checked: Checked, out: Path
) -> list[Part]:
    """Writes mistakes.csv of images: path, and for each class the labelled pixels and the contradicted ones, (K,)."""
    rows = []
    for path, pixels, wrong in found:
        share, mostly = 100 * float(wrong.sum() / pixels.sum()), classes[wrong.argmax()] if wrong.any() else ''
        of_classes = ('' if math.isnan(each) else f'{each:.1f}' for each in (100 * wrong / pixels).tolist())
        rows.append((share, [relpath(path, root), f'{share:.1f}', mostly, f'{pixels.sum():.0f}', *of_classes]))
    rows.sort(key=lambda row: -row[0])
    head = ['file', 'contradicted, %', 'mostly of', 'labelled pixels', *(f'of {name}, %' for name in classes)]
    return list_first(CONTRADICTED, head, [cells for _, cells in rows], checked, out)


def confused(counts: Tensor, classes: Sequence[str], of_images: bool = False) -> str:
    """The pairs of classes most often confused, from a `confusion` (K, K), with the share of pixels, or the images."""
    total = counts.sum(dim=1)
    shares = counts / total[:, None].clamp(min=1)
    shares.fill_diagonal_(0)
    shown, number = [], NUM_PAIRS if len(classes) <= MAX_CELLS else MANY_PAIRS
    for index in shares.flatten().topk(min(number, shares.numel())).indices.tolist():
        truth, label = divmod(index, len(classes))
        if shares[truth, label] > 0:
            share = f'{100 * shares[truth, label]:.0f} % of'
            share = f'{counts[truth, label]:.0f} of {total[truth]:.0f}' if of_images else share
            shown.append(f'{share} {quoted(classes[truth])} as {quoted(classes[label])}')
    return f'Confused: {"; ".join(shown)}.' if shown else ''


def draw_confusion(counts: Tensor, classes: Sequence[str], out: Path) -> Part:
    """Draws a `confusion` (K, K) as shares of each class in %; '' for more than MAX_CELLS classes."""
    if len(classes) > MAX_CELLS:
        return ''
    shares, side = 100 * counts / counts.sum(dim=1, keepdim=True).clamp(min=1), 2.5 + 0.32 * len(classes)  # inches
    figure = Figure(figsize=(side, side), layout='constrained')
    axes = figure.subplots()
    axes.imshow(shares.numpy(), cmap='Blues', vmin=0, vmax=100)
    short = [shortened(quoted(name), 25) for name in classes]
    names = [f'{number} {name}' if short.count(name) > 1 else name for number, name in enumerate(short, start=1)]
    names = [name.replace('$', r'\$') for name in names]  # $ would begin a formula
    axes.set_xticks(range(len(names)), names, rotation=90, fontsize=7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set(xlabel='predicted', ylabel='label')
    for row, column in (shares >= 0.5).nonzero().tolist():
        colour = 'white' if shares[row, column] > 60 else 'black'
        text = axes.text(column, row, f'{shares[row, column]:.0f}', color=colour, fontsize=7)
        text.set(ha='center', va='center')
    with atomic_file(out) as file:
        figure.savefig(file, dpi=120)
    return Picture(out.name, 'Which classes are confused on held-out images, in % of each label')


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


def samples(dataset: SegmentationFolder, until: float, least: int, tried: set[int]) -> Iterator[tuple[int, dict]]:
    """Yields indices and samples, except those `tried`, in random order until a time, but tries at least so many."""
    for index in drawn_until(sorted({*range(len(dataset))} - tried), until, least):
        tried.add(index)
        with suppress(UnreadableImageError):
            sample = dataset[index]
            yield index, dict(sample, img=LoadBands.as_rgb(sample['img']))
