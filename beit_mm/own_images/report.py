"""What every report is made of: metrics, verdicts, texts, tables and pictures, as report.md and report.html."""

import base64
import html
import io
import math
import random
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from beit_mm.datasets.reading import UnreadableImageError, read_image
from beit_mm.features.evaluation import thumbnail
from beit_mm.files import atomic_file, quoted
from beit_mm.own_images.images import Images, evenly
from beit_mm.pictures import draw_runs, read_scalars

ROWS = {  # of the report: a metric's name and its description
    'mim_loss': 'loss on masked patches (mim_loss)',
    'mim_loss_start': 'the same with the initial weights, nats',
    'token_entropy': 'loss of guessing by token frequency alone (token_entropy)',
    'position_entropy': 'loss of guessing by token frequency at each position (position_entropy)',
    'explained': 'share of variance explained, against the mean feature (explained)',
    'explained_at_position': 'the same, against the mean at each position (explained_at_position)',
    'tokenizer/codes_used': 'different visual tokens in use',
    'mim_acc': 'masked tokens predicted correctly (mim_acc)',
    'accuracy/top1': 'classified correctly, %',
    'class_mean': 'the same, averaged over the classes, %',
    'mIoU': 'mIoU on held-out images, %',
    'mAP': 'mAP on held-out images, %',
    'random_order': 'mAP of a random order, by class frequencies alone, %',
    'multi-label/f1-score': 'F1 of the labels with a probability of 0.5 or more, %',
    'thumbnails': 'ridge regression on thumbnails of 8 x 8 pixels, %',
    'thumbnails_class_mean': 'the same, averaged over the classes, %',
    'most_frequent': 'always the most frequent class, %',
    'most_frequent_class_mean': 'the same, averaged over the classes, %',
    'patches': 'nearest frozen patches of the initial weights, %',
    'position_colour': 'naive Bayes of position and colour, %',
}
PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><title>{0}</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>body{{max-width:60em;margin:2em auto;padding:0 1em;font-family:sans-serif;line-height:1.4}} img{{width:100%}}
h1,p,figcaption,td{{overflow-wrap:anywhere}} tr,figure{{break-inside:avoid}} td{{min-width:min(4em,12vw)}}
td:first-child{{min-width:min(8em,25vw)}} td:last-child{{min-width:5em}}
div{{overflow-x:auto;margin-bottom:1em}} td,th{{padding:.2em 1em .2em 0;text-align:left;vertical-align:top}}
figure{{display:inline-block;vertical-align:top;max-width:100%;margin:0 .5em 1em 0}} h1+p{{font-weight:bold}}
@media print{{body{{margin:0;max-width:none}} div{{overflow:visible}} img{{max-height:90vh;object-fit:contain}}}}
</style><h1>{0}</h1>"""
BETTER, WORSE, TOO_CLOSE = 'better than', 'worse than', 'too close to tell from'


@dataclass(frozen=True)
class Metric:
    """A measured number, with its standard error and number of images where known."""

    value: float
    error: float | None = None
    number: int | None = None

    @classmethod
    def share(cls, percent: float, number: int) -> 'Metric':
        """A share of `number` images, in %."""
        share = min(percent / 100, 1.0)  # mmpretrain's, in float32, may exceed 100 %
        likely = (share * number + 1) / (number + 2)  # a few images, all correct, do not prove 100 %
        return cls(100 * share, 100 * math.sqrt(likely * (1 - likely) / number), number)

    @classmethod
    def of_pairs(cls, gained: Tensor, weights: Tensor | None = None) -> 'Metric':
        """The mean in % of what one method gains over another one on the same N images: -1, 0 or 1 for each, float64.

        Its standard error is that of the differences, as if two more images had been asked, on which each method is
        right once: a few images do not prove a gain, as by McNemar's test. `weights` (N,) add up to 1.
        """
        weights = torch.full_like(gained, 1 / len(gained)) if weights is None else weights
        squares = weights.square()
        number = 1 / squares.sum()  # of images of equal weight that would be as uncertain
        mean, mean_square = (weights * gained).sum(), (squares * gained.square()).sum() * number
        spread = (number * mean_square + 2) / (number + 2) - (number * mean / (number + 2)).square()
        error = (spread / (number - 1)).sqrt()  # inf for a single image
        return cls(100 * float(mean), 100 * float(error), len(gained))

    @property
    def sign(self) -> str:
        """What a difference means: BETTER, WORSE, or TOO_CLOSE within two standard errors."""
        if not abs(self.value) > 2 * (self.error or 0):  # nan too, which no image decides
            return TOO_CLOSE
        return BETTER if self.value > 0 else WORSE


Metrics: TypeAlias = dict[str, Metric]  # by the names in ROWS; gains by the name of what a run is compared with


class Picture(NamedTuple):
    file: str | Image.Image  # relative to the report; or drawn, for a page alone
    caption: str


class Link(NamedTuple):
    file: str  # relative to the report
    text: str  # what follows its name


class Heading(str):
    """The title of a section."""


Part: TypeAlias = str | Picture | Link | Sequence[Sequence[str]]  # of a report: a text, a picture, or rows of a table


@dataclass
class Report:
    """How good a trained model is."""

    metrics: Metrics
    verdict: str  # without a full stop
    parts: list[Part]
    following: str  # what to do next, such as a command to run
    comparison: Sequence[Sequence[str]] = ()  # table of features before and after a pretraining


def write_report(folder: str | Path, title: str, parts: Iterable[Part]) -> Path:
    """Writes report.html for a browser, then the same as report.md for GitHub; returns the latter.

    `parts` are headings, plain texts, pictures in the folder, and tables with a header row; empty parts are left out.
    """
    parts = [part for part in parts if part]
    write_page(Path(folder, 'report.html'), title, parts)
    shown = [f'# {markdown(title)}']
    for part in parts:
        if isinstance(part, str):
            shown.append('## ' * isinstance(part, Heading) + markdown(part))
        elif isinstance(part, Picture):
            shown.append(f'![{markdown(part.caption)}]({part.file})')
        elif isinstance(part, Link):
            shown.append(f'[{part.file}]({part.file}) {markdown(part.text)}')
        else:
            lines = [f'| {" | ".join(map(markdown, row))} |' for row in part]
            lines.insert(1, '| --- ' * len(part[0]) + '|')
            shown.append('\n'.join(lines))
    with atomic_file(Path(folder, 'report.md')) as file:
        file.write(('\n\n'.join(shown) + '\n').encode())
    return Path(folder, 'report.md')


def write_page(path: Path, title: str, parts: Iterable[Part]) -> None:
    """Writes a report as one file for a browser, which holds its pictures and fetches nothing; see `write_report`."""
    shown = []
    for part in filter(None, parts):
        if isinstance(part, str):
            tag = 'h2' if isinstance(part, Heading) else 'p'
            shown.append(f'<{tag}>{hypertext(part)}</{tag}>')
        elif isinstance(part, Picture):
            shown.append(figure(part, path.parent))
        elif isinstance(part, Link):
            shown.append(f'<p><a href="{part.file}">{part.file}</a> {hypertext(part.text)}</p>')
        else:
            header, *rows = ([hypertext(cell) for cell in row] for row in part)
            lines = [f'<th>{"</th><th>".join(header)}</th>', *(f'<td>{"</td><td>".join(row)}</td>' for row in rows)]
            shown.append(f'<div><table><tr>{"</tr><tr>".join(lines)}</tr></table></div>')
    with atomic_file(path) as file:
        file.write('\n'.join([PAGE.format(hypertext(title)), *shown, '']).encode())


def figure(picture: Picture, folder: Path) -> str:
    """A picture with its caption, as HTML that holds its bytes."""
    image, kind, content = picture.file, 'jpeg', io.BytesIO()
    if isinstance(image, str):
        image, kind = Image.open(folder / image), 'png'
    image.save(content, kind, quality=85)
    source, caption = base64.b64encode(content.getvalue()).decode(), hypertext(picture.caption)
    shown = f'<img src="data:image/{kind};base64,{source}" alt="{caption}"><figcaption>{caption}</figcaption>'
    return f'<figure style="width:{image.width}px">{shown}</figure>'


def markdown(text: str) -> str:
    return re.sub(r'[\\`*\[\]|#]', r'\\\g<0>', hypertext(text, quote=False))


def hypertext(text: str, quote: bool = True) -> str:
    return html.escape(quoted(text), quote)


def rows_of(metrics: Mapping[str, Metric]) -> list[tuple[str, str]]:
    """A description and a value with its standard error for each metric of a run."""
    rows = []
    for name, text in ROWS.items():
        metric = metrics.get(name)
        if metric and not math.isnan(metric.value):
            value = f'{metric.value:.1f}' if text.endswith('%') else f'{metric.value:.4g}'
            rows.append((text, value if metric.error is None else f'{value} +- {metric.error:.1f}'))
    return rows


def aligned(table: Sequence[Sequence[str]]) -> list[str]:
    """The rows of a table for the terminal."""
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ('  '.join(f'{cell:<{width}}' for cell, width in zip(row, widths, strict=True)) for row in table)
    return [line.rstrip() for line in lines]


def verdict(gains: Mapping[str, Metric]) -> str:
    """Puts gains over other methods into words: 'better than A and B, worse than C'."""
    groups: dict[str, list[str]] = {BETTER: [], WORSE: [], TOO_CLOSE: []}
    for name, gain in gains.items():
        groups[gain.sign].append(name)
    return ', '.join(f'{words} {" and ".join(names)}' for words, names in groups.items() if names)


def drawn_until(items: Iterable[Any], deadline: float, least: int) -> Iterator[Any]:
    """Yields items in random order until the `deadline` (time.monotonic), but at least `least` of them."""
    items = [*items]
    for number, item in enumerate(random.Random(0).sample(items, len(items))):
        if number >= least and time.monotonic() > deadline:
            return
        yield item


def percentage(share: float) -> str:
    """A share in % for a table; '-' for nan."""
    return '-' if math.isnan(share) else f'{share:.1f}'


def labels_of(images: Images, size: int) -> list[dict[str, int]]:
    """File -> class, of at most `size` images to learn from, and of half as many held-out ones, evenly spread."""
    number = {name: label for label, name in enumerate(images.classes)}
    return [
        {str(part.root / path): number.get(name, 0) for path, name in evenly(part.names.items(), most)}
        for part, most in ((images.train, size), (images.held_out, max(1, size // 2)))
    ]


def read_thumbnails(labelled: Iterable[tuple[str, int]]) -> tuple[Tensor, Tensor]:
    """Thumbnails (N, 192) and classes (N,) of the files that can be read."""
    pixels, labels = [], []
    for path, label in labelled:
        with suppress(UnreadableImageError):
            pixels.append(thumbnail(read_image(path)))
            labels.append(label)
    return torch.from_numpy(np.stack(pixels)), torch.tensor(labels)


def draw_curves(work_dir: Path) -> Part:
    """Draws loss.png beside a work directory: a run's losses and its accuracy on held-out images, if it has one."""
    training, validation = read_scalars(work_dir)
    if not any(training):  # step 0 alone, of a head that was fitted
        return ''
    last: dict[str, float] = {}  # of each value
    measured = [key for row in validation.values() for key in row]
    for row in validation.values():
        last |= row
        row |= {'loss': row['mim_loss']} if 'mim_loss' in row else {}
    labels = {'loss': 'loss' if 'explained' in last else 'loss, nats', 'explained': 'explained share of variance'}
    labels |= {'accuracy/top1': 'classified correctly, %', 'mIoU': 'mIoU, %', 'multi-label/mAP': 'mAP, %'}
    shown = [key for key in labels if key == 'loss' or measured.count(key) > 1]  # one result stands in the table
    figure = draw_runs({work_dir.name: (training, validation)}, shown, columns=1)
    guesses = ('token_entropy', '--', 'token frequency'), ('position_entropy', ':', 'frequency at each position')
    for name, style, guess in guesses:
        if name in last:
            figure.axes[0].axhline(last[name], color='black', linestyle=style, label=f'guessing by {guess}')
            figure.axes[0].legend(fontsize=7)
    for axes in figure.axes:
        axes.set_ylabel(labels[axes.get_ylabel()])
    with atomic_file(work_dir.parent / 'loss.png') as file:
        figure.savefig(file, dpi=120)
    return Picture('loss.png', 'Loss in training' + ', and results on held-out images' * (len(shown) > 1))
