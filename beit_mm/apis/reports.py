"""Reports on runs: metrics, baselines that need no training, a verdict, the next command, pictures."""

import html
import math
import random
import re
import shlex
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

from beit_mm.apis.inference import classify, draw_predictions
from beit_mm.apis.split import Images, evenly
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import DEMO
from beit_mm.datasets.reading import UnreadableImageError, read_image
from beit_mm.features import evaluation
from beit_mm.features.evaluation import confusion, knn_predict, linear_predict, mean_and_error, standardiser, thumbnail
from beit_mm.features.extractor import ExistingPath, FeatureExtractor
from beit_mm.files import atomic_file, quoted
from beit_mm.pictures import center_tile, draw_neighbours, draw_runs, read_scalars, sheet, shortened

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
    'thumbnails': 'ridge regression on thumbnails of 8 x 8 pixels, %',
    'thumbnails_class_mean': 'the same, averaged over the classes, %',
    'most_frequent': 'always the most frequent class, %',
    'most_frequent_class_mean': 'the same, averaged over the classes, %',
    'patches': 'nearest frozen patches of the initial weights, %',
    'position_colour': 'naive Bayes of position and colour, %',
}
BASELINES = dict(thumbnails='thumbnails', most_frequent='the most frequent class')  # which need no network
OTHER_FEATURES = dict(start='the initial weights', random='random weights', thumbnails='thumbnails')
METHODS = dict(knn='nearest neighbours', linear='linear layer')  # that test features
BETTER, WORSE, TOO_CLOSE = 'better than', 'worse than', 'too close to tell from'
MIN_LOSS_GAIN = 0.05  # nats, or for features a share of variance; smaller differences of losses do not count
NUM_QUERIES = 6  # in the picture of neighbours
MIN_THUMBNAILS, MOST_THUMBNAILS = 100, 20_000  # for ridge regression to learn from; MIN_ even if time is short
MIN_ANSWERS = 100  # held-out images to classify even if time is short
MOST_CLASSES = 30  # in the table of a classifier
MISTAKES, MISTAKES_COLUMNS, MISTAKES_SIDE = 24, 4, 240  # how many are drawn, columns, side of a tile in pixels

DECODED = 'predicted, the correct tokens decoded'
FILLED = 'each masked patch drawn as the masked patch of these images with the nearest features'


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

    def __sub__(self, other: 'Metric') -> 'Metric':
        """The difference of two independent measurements."""
        return Metric(self.value - other.value, math.hypot(self.error or 0, other.error or 0))

    @property
    def sign(self) -> str:
        """What a difference means: BETTER, WORSE, or TOO_CLOSE within two standard errors."""
        if abs(self.value) <= 2 * (self.error or 0):
            return TOO_CLOSE
        return BETTER if self.value > 0 else WORSE


Metrics: TypeAlias = dict[str, Metric]  # by the names in ROWS; gains by the name of what a run is compared with


class Picture(NamedTuple):
    file: str  # relative to the report
    caption: str


Part: TypeAlias = str | Picture | Sequence[Sequence[str]]  # of a report: a text, a picture, or rows of a table


@dataclass
class Report:
    """How good a trained model is."""

    metrics: Metrics
    verdict: str
    parts: list[Part]
    following: str  # what to run next
    comparison: Sequence[Sequence[str]] = ()  # table of features before and after a pretraining


def write_report(folder: str | Path, title: str, parts: Iterable[Part]) -> Path:
    """Writes report.html for a browser, then the same as report.md for GitHub; returns the latter.

    `parts` are plain texts, pictures in the folder, and tables with a header row; empty parts are left out.
    """
    shown: list[tuple[str, str]] = [(f'# {markdown(title)}', f'<h1>{hypertext(title)}</h1>')]
    for part in filter(None, parts):
        if isinstance(part, str):
            shown.append((markdown(part), f'<p>{hypertext(part)}</p>'))
        elif isinstance(part, Picture):
            source, caption = hypertext(part.file), hypertext(part.caption)
            image = f'<figure><img src="{source}" alt="{caption}"><figcaption>{caption}</figcaption></figure>'
            shown.append((f'![{markdown(part.caption)}]({part.file})', image))
        else:
            lines = [f'| {" | ".join(map(markdown, row))} |' for row in part]
            lines.insert(1, '| --- ' * len(part[0]) + '|')
            rows = [''.join(f'<td>{hypertext(cell)}</td>' for cell in row) for row in part]
            shown.append(('\n'.join(lines), f'<table><tr>{"</tr><tr>".join(rows)}</tr></table>'))
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{hypertext(title)}</title>'
    style = 'body{max-width:60em;margin:2em auto;font-family:sans-serif}td{padding:.2em 1em}img{max-width:100%}'
    texts = {
        'html': '\n'.join([f'{head}<style>{style}</style>', *(page for _, page in shown)]),
        'md': '\n\n'.join(text for text, _ in shown),
    }
    for ending, text in texts.items():
        with atomic_file(Path(folder, f'report.{ending}')) as file:
            file.write((text + '\n').encode())
    return Path(folder, 'report.md')


def markdown(text: str) -> str:
    return re.sub(r'[\\`*\[\]|#]', r'\\\g<0>', hypertext(text, quote=False))


def hypertext(text: str, quote: bool = True) -> str:
    return html.escape(quoted(text), quote)


def rows_of(metrics: Mapping[str, Metric]) -> list[tuple[str, str]]:
    """A description and a value with its standard error for each metric of a run."""
    rows = []
    for name, text in ROWS.items():
        metric = metrics.get(name)
        if metric is not None and not math.isnan(metric.value):
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


def gains_over(name: str, metrics: Mapping[str, Metric], ending: str = '') -> Metrics:
    """A metric's gain over each baseline, by the words for the baseline; `ending` completes the baselines' names."""
    return {
        words: metrics[name] - metrics[baseline + ending]
        for baseline, words in BASELINES.items()
        if baseline + ending in metrics
    }


def drawn_until(items: Iterable[Any], deadline: float, least: int) -> Iterator[Any]:
    """Yields items in random order until the `deadline` (time.monotonic), but at least `least` of them."""
    items = [*items]
    for number, item in enumerate(random.Random(0).sample(items, len(items))):
        if number >= least and time.monotonic() > deadline:
            return
        yield item


def describe_pretraining(
    weights: Path, images: Images, metrics: Metrics, compared: int, start: str | None, teacher: str | None = None
) -> Report:
    """Reports on a pretraining that began with `start`: its validation, and its features on `compared` images.

    The pretraining predicted features of `teacher`, or tokens if that is None. The pictures go beside the weights.
    """
    folder, trained = weights.parent, Checkpoint.open(weights)
    chosen = [images.held_out.root / path for path in evenly(images.held_out.names, 8)]
    draw_predictions(trained, chosen, folder / 'reconstruction.png')
    answers, neighbours_drawn = compare_features(trained, images, compared, start)
    neighbours_drawn.save(folder / 'neighbours.png')
    predicted = f'Predicted on masked patches: features of {teacher}.' if teacher else ''
    parts: list[Part] = [predicted, 'This is one training with one seed.']
    if answers:
        parts.append(
            'Features of one block: the 20 nearest images vote, or a linear layer learns. The training used no labels. '
            'The verdict on features comes from the linear layer.'
        )
    found = {
        f'{method}_accuracy{f"_{name}" * (name != "end")}': Metric(*mean_and_error(right), len(right))
        for method, of_method in answers.items()
        for name, right in of_method.items()
    }
    gains = gains_by_pairs(answers.get('linear', {}))
    parts += [
        Picture('reconstruction.png', f'Held-out images: masked, {FILLED if teacher else DECODED}'),
        Picture('neighbours.png', 'Held-out images (left), each beside the training images with the closest features'),
        draw_curves(folder / 'pretrain'),
    ]
    sentence, following = judge_pretraining(metrics, gains, folder, images, start)
    return Report(metrics | found, sentence, parts, following, did_it_help(answers))


def gains_by_pairs(right: Mapping[str, Tensor]) -> Metrics:
    """How much better the features at the end are than each of the others, from paired answers."""
    return {name: Metric(*mean_and_error(right['end'] - other)) for name, other in right.items() if name != 'end'}


def did_it_help(answers: Mapping[str, Mapping[str, Tensor]]) -> list[list[str]]:
    """Tabulates the answers from `compare_features`, and how much better the end is than the start."""
    if not answers:
        return []
    names = dict(OTHER_FEATURES, end='this pretraining')
    table = [['Did it help? Held-out images classified correctly, %', *(METHODS[method] for method in answers)]]
    for name in answers['knn']:
        shares = [Metric.share(mean_and_error(right[name])[0], len(right[name])) for right in answers.values()]
        table.append([names[name], *(f'{share.value:.1f} +- {share.error:.1f}' for share in shares)])
    baseline = 'start' if 'start' in answers['knn'] else 'random'
    gains = [gains_by_pairs(right)[baseline] for right in answers.values()]
    cells = (f'{gain.value:+.1f} +- {gain.error:.1f}' for gain in gains)
    return [*table, [f'this pretraining - {names[baseline]}, by pairs', *cells]]


def judge_pretraining(
    metrics: Mapping[str, Metric], gains: Mapping[str, Metric], folder: Path, images: Images, start: str | None
) -> tuple[str, str]:
    """A verdict from the metrics of a validation and the `gains_by_pairs` of features, and what to run next.

    The next command starts from the pretrained weights only if they are better than the initial ones: by their
    features or, where these are too close, by the loss.
    """
    loss = metrics['mim_loss'].value
    if 'explained' in metrics:
        gained, at_position = dict(guess=metrics['explained'].value), metrics['explained_at_position'].value
    else:
        guesses = dict(mim_loss_start='mim_loss_start', guess='token_entropy')
        gained = {name: metrics[guess].value - loss for name, guess in guesses.items() if guess in metrics}
        at_position = metrics['position_entropy'].value - loss
    loss_gains = {name: Metric(gain, MIN_LOSS_GAIN / 2) for name, gain in gained.items()}
    if loss_gains['guess'].sign != BETTER:
        guess = 'the mean feature' if 'explained' in metrics else 'token frequency'
        sentence = f'nothing learned yet: masked patches are not clearly better predicted than by {guess} alone'
    elif at_position <= 0:
        sentence = 'the model learned, but shows no more than where things usually are'
    else:
        sentence = 'masked patches are predicted from what surrounds them'
    if 'mim_loss_start' in loss_gains:
        of_start = {'that of the initial weights': loss_gains['mim_loss_start']}
        sentence += f'; the loss is {verdict(of_start)}'
    if gains:
        of_features = {OTHER_FEATURES[name]: gain for name, gain in gains.items()}
        sentence += f'; the learned features are {verdict(of_features)}'

    baseline, loss_baseline = ('start', 'mim_loss_start') if start else ('random', 'guess')
    signs = [group[name].sign for group, name in ((gains, baseline), (loss_gains, loss_baseline)) if name in group]
    is_better = next((sign for sign in signs if sign != TOO_CLOSE), TOO_CLOSE) == BETTER
    labelled = str(images.train.root) if images.classes else 'LABELLED_IMAGES'
    init = str(folder) if is_better else start or DEMO
    following = shlex.join(['beit-mm', 'finetune', labelled, '--init', init, '--out', f'{folder}_ft'])
    if not is_better:
        advice = 'skip this pretraining, which did not clearly help, or give it more images and minutes'
        if not signs:
            advice = f'without classes nothing shows whether it helped; compare with --init {shlex.quote(str(folder))}'
        following = f'{advice}: {following}'
    return f'Verdict: {sentence}.', f'Next: {following}'


def describe_finetuning(
    weights: Path, images: Images, metrics: Metrics, seconds: float, asked: int, balance: bool
) -> Report:
    """Reports on a classifier: its validation, its answers on `asked` held-out images, and `seconds` of baselines.

    The pictures go beside the weights.
    """
    folder = weights.parent
    found, num_learned = compare_classifier(images, seconds)
    _, truths = labels_of(images, 2 * asked)
    results = zip(classify(weights, [*truths]), truths.values(), strict=True)
    answers = [dict(result, truth=label) for result, label in results if 'error' not in result]
    truth, predicted = (torch.tensor([answer[key] for answer in answers]) for key in ('truth', 'label'))
    counts = confusion(predicted, truth, len(images.classes))
    metrics = metrics | found | {'class_mean': class_mean(counts)}
    metrics['accuracy/top1'] = Metric.share(metrics['accuracy/top1'].value, len(images.held_out.names))
    parts: list[Part] = [
        'It was trained with --balance: images of small classes were shown more often.' if balance else '',
        f'The baselines (thumbnails, most frequent class) need no network: they learned from {num_learned:,} of the '
        f'{len(images.train.names):,} images and were tested on {found["thumbnails"].number:,} held-out ones. This is '
        'one training with one seed. To see what pretraining gains, run it again with --init none.',
        f'At most {MOST_CLASSES} classes, worst first, on {len(answers):,} held-out images:',
        table_of_classes(counts, images),
        *draw_mistakes(answers, images.classes, folder / 'mistakes.png'),
        draw_curves(folder / 'finetune'),
    ]
    sentence, following = judge_finetuning(metrics, weights, images.unequal and not balance)
    return Report(metrics, sentence, parts, following)


def judge_finetuning(metrics: Mapping[str, Metric], weights: Path, unequal: bool) -> tuple[str, str]:
    """A verdict from the metrics of a classifier and of its baselines, and what to do next.

    The next step is to use the classifier if it is better than its baselines.
    """
    of_images = gains_over('accuracy/top1', metrics)
    of_classes = gains_over('class_mean', metrics, '_class_mean')
    sentence = f'Verdict: the classifier is {verdict(of_images)}.'
    if verdict(of_classes) != verdict(of_images):
        sentence = f'Verdict: over all images the classifier is {verdict(of_images)}; averaged over the classes it is '
        sentence += f'{verdict(of_classes)}.'
    better = all(gain.sign == BETTER for gain in of_classes.values())
    if better and not any(gain.sign == WORSE for gain in of_images.values()):
        run = shlex.quote(str(weights.parent))
        return sentence, f'Next: beit-mm classify {run} new_images/ --out classes.csv; beit-mm export {run} model.onnx'
    balance = 'show images of small classes more often (--balance), ' if unequal else ''
    others = 'give it more images, more time, or a released model to start from (--init NAME of beit_mm.list_models())'
    return sentence, f'Next: {balance}{others}.'


def class_mean(counts: Tensor) -> Metric:
    """Share of correct answers in %, averaged over the classes, from a `confusion` (K, K)."""
    number = counts.sum(dim=1)
    right, number = counts.diagonal()[number > 0], number[number > 0]
    likely = (right + 1) / (number + 2)  # as in Metric.share
    variance = (likely * (1 - likely) / number).mean() / len(number)
    return Metric(float(100 * (right / number).mean()), float(100 * variance.sqrt()))


def percentage(share: float) -> str:
    """A share in % for a table; '-' for nan."""
    return '-' if math.isnan(share) else f'{share:.1f}'


def table_of_classes(counts: Tensor, images: Images) -> list[list[str]]:
    """A row for each class, worst first, at most MOST_CLASSES; from a `confusion` (K, K)."""
    right, number, learned = counts.diagonal(), counts.sum(dim=1), images.learned
    recall, precision = 100 * right / number, 100 * right / counts.sum(dim=0)  # nan without images
    table = [['class', 'images to learn from', 'held-out images', 'recall, %', 'precision, %']]
    for label in recall.nan_to_num(101).argsort(stable=True).tolist()[:MOST_CLASSES]:
        name, shares = images.classes[label], (float(recall[label]), float(precision[label]))
        table.append([name, f'{learned[name]:,}', f'{number[label]:,.0f}', *map(percentage, shares)])
    return table


def draw_mistakes(answers: Sequence[Mapping[str, Any]], classes: Sequence[str], out: Path) -> list[Picture]:
    """Draws the images that a classifier gets wrong, most confident first; `answers` are `classify`'s, with `truth`."""
    wrong = [answer for answer in answers if answer['label'] != answer['truth']]
    wrong.sort(key=lambda answer: -answer['scores'][0][1])
    if not wrong:
        return []
    tiles = []
    for answer in wrong[:MISTAKES]:
        truth, predicted = (shortened(classes[answer[key]], 13) for key in ('truth', 'label'))
        title = f'{truth} as {predicted} {answer["scores"][0][1]:.2f}'
        tiles.append((title, center_tile(answer['path'], MISTAKES_SIDE)))
    rows = [tiles[first : first + MISTAKES_COLUMNS] for first in range(0, len(tiles), MISTAKES_COLUMNS)]
    sheet(rows, MISTAKES_SIDE).save(out)
    which = f'The {len(tiles)} most confident of {len(wrong):,} mistakes on {len(answers):,} held-out images'
    return [Picture(out.name, f'{which}: correct class as predicted class')]


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


def compare_features(
    trained: Checkpoint, images: Images, size: int, start: str | None = None
) -> tuple[dict[str, dict[str, Tensor]], Image.Image]:
    """Classifies held-out images by the features at the `end`, by those at the `start`, and by baselines.

    Each learns from `size` images. Returns method of METHODS -> features -> `right_answers`, empty without classes, and
    a picture of neighbours.
    """
    parts, extract, number = labels_of(images, size), FeatureExtractor(trained), len(images.classes)
    features = dict(end=read_features(extract, parts))
    bank, held_out = features['end']
    chosen = evenly(range(len(held_out['paths'])), NUM_QUERIES)
    queries = dict(paths=[held_out['paths'][row] for row in chosen], features=held_out['features'][chosen])
    names = {path: images.classes[label] for part in parts for path, label in part.items()} if number else {}
    picture = draw_neighbours(queries, bank, names)
    if not number:
        return {}, picture
    if start:
        features['start'] = read_features(FeatureExtractor(start, mean=extract.mean, std=extract.std), parts)
    features['random'] = read_features(extract.with_random_weights(), parts)
    # Pixels are compared without their brightness.
    pixels = (read_thumbnails(part.items()) for part in parts)
    features['thumbnails'] = [dict(features=(x - x.mean(dim=1, keepdim=True)).float(), labels=y) for x, y in pixels]
    answers: dict[str, dict[str, Tensor]] = {method: {} for method in METHODS}
    for name, (known, asked) in features.items():
        for method, right in answers.items():
            right[name] = right_answers(method, known, asked, number)
    return answers, picture


def right_answers(method: str, bank: Mapping[str, Any], held_out: Mapping[str, Any], number: int) -> Tensor:
    """1 or 0 for each held-out image, float64: whether a method of METHODS that learned from a bank is right."""
    asked, known, labels = held_out['features'], bank['features'], bank['labels']
    if method == 'linear':
        predicted, _ = linear_predict(asked, known, labels, number)
    else:
        predicted = knn_predict(asked, known, labels, number)
    return (predicted == held_out['labels']).double().cpu()


def read_features(extract: FeatureExtractor, parts: Sequence[Mapping[str, int]]) -> list[dict[str, Any]]:
    """Paths, standardised features and labels of each part's readable files."""
    found = []
    for part in parts:
        samples = extract([*map(ExistingPath, part)], ['mean'], on_error='skip')
        read = [sample for sample in samples if 'error' not in sample]
        features = torch.from_numpy(np.stack([sample['mean'] for sample in read]))
        labels = torch.tensor([part[sample['path']] for sample in read])
        found.append(dict(paths=[sample['path'] for sample in read], features=features, labels=labels))
    standardise = standardiser(found[0]['features'])
    return [dict(part, features=standardise(part['features'])) for part in found]


def compare_classifier(images: Images, seconds: float) -> tuple[Metrics, int]:
    """Metrics of ridge regression on `thumbnails` and of the `most_frequent` class; number of images to learn from."""
    begin, (known, held_out) = time.monotonic(), labels_of(images, MOST_THUMBNAILS)
    x, y = read_thumbnails(drawn_until(known.items(), begin + 0.8 * seconds, MIN_THUMBNAILS))
    pixels, truth = read_thumbnails(drawn_until(held_out.items(), begin + seconds, MIN_THUMBNAILS))
    metrics = {}
    answers = dict(thumbnails=evaluation.ridge(x, y, pixels), most_frequent=y.bincount().argmax().expand_as(truth))
    for name, predicted in answers.items():
        counts = confusion(predicted, truth, len(images.classes))
        metrics[name] = Metric.share(100 * evaluation.accuracy(counts), len(truth))
        metrics[f'{name}_class_mean'] = class_mean(counts)
    # exact: one class is always right and the others never, whichever images are drawn
    metrics['most_frequent_class_mean'] = Metric(metrics['most_frequent_class_mean'].value, 0.0)
    return metrics, len(y)


def draw_curves(work_dir: Path) -> Picture:
    """Draws loss.png beside a work directory: a run's losses and its accuracy on held-out images, if it has one."""
    training, validation = read_scalars(work_dir)
    for row in validation.values():
        if 'mim_loss' in row:
            row['loss'] = row['mim_loss']
    of_features = any('explained' in row for row in validation.values())
    labels = {'loss': 'loss' if of_features else 'loss, nats', 'explained': 'explained share of variance'}
    labels |= {'accuracy/top1': 'classified correctly, %', 'mIoU': 'mIoU, %'}
    shown = [key for key in labels if key == 'loss' or any(key in row for row in validation.values())]
    figure = draw_runs({work_dir.name: (training, validation)}, shown)
    for name, guess in dict(token_entropy='token frequency', position_entropy='frequency at each position').items():
        if reached := [row[name] for row in validation.values() if name in row]:
            style = '--' if name == 'token_entropy' else ':'
            figure.axes[0].axhline(reached[-1], color='black', linestyle=style, label=f'guessing by {guess}')
            figure.axes[0].legend(fontsize=7)
    for axes in figure.axes:
        axes.set_ylabel(labels[axes.get_ylabel()])
    with atomic_file(work_dir.parent / 'loss.png') as file:
        figure.savefig(file, dpi=120)
    return Picture('loss.png', 'Loss in training, and results on held-out images')
