"""The report of a run: its figures beside what needs no training, a verdict in words, and pictures."""

import html
import math
import random
import re
import shlex
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from beit_mm.apis.inference import classify, reconstruct
from beit_mm.apis.split import Images, evenly
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import DEMO
from beit_mm.datasets.reading import UnreadableImageError, read_image
from beit_mm.datasets.transforms import TwoViewCenterCrop
from beit_mm.features import evaluation
from beit_mm.features.evaluation import knn_predict, mean_and_error, neighbours, ridge, standardiser, thumbnail
from beit_mm.features.extractor import ExistingPath, FeatureExtractor
from beit_mm.files import atomic_file, readable
from beit_mm.pictures import SIDE, draw_runs, read_scalars, sheet, shortened

ROWS = {  # of the report: a figure's name, what it is, how it is written
    'mim_loss': ('loss on masked patches (mim_loss), nats', '{:.3f}'),
    'mim_loss_start': ('the same with the weights that the training began with, nats', '{:.3f}'),
    'token_entropy': ('loss of guessing by token frequency alone (token_entropy)', '{:.3f}'),
    'position_entropy': ('loss of guessing by token frequency at each position (position_entropy)', '{:.3f}'),
    'tokenizer/codes_used': ('different visual tokens in use', '{:.0f}'),
    'mim_acc': ('masked tokens predicted right (mim_acc)', '{:.3f}'),
    'accuracy/top1': ('classified right, %', '{:.1f}'),
    'class_mean': ('the same, averaged over the classes, %', '{:.1f}'),
    'mIoU': ('mIoU on held-out images, %', '{:.1f}'),
    'thumbnails': ('ridge regression on thumbnails of 8 x 8 pixels, %', '{:.1f}'),
    'thumbnails_class_mean': ('the same, averaged over the classes, %', '{:.1f}'),
    'most_frequent': ('always the most frequent class, %', '{:.1f}'),
    'most_frequent_class_mean': ('the same, averaged over the classes, %', '{:.1f}'),
    'position_colour': ('naive Bayes of position and colour, %', '{:.1f}'),
    'knn_accuracy': ('classified right by nearest neighbours, %', '{:.1f}'),
    'knn_accuracy_start': ('the same with the weights that the training began with, %', '{:.1f}'),
    'knn_accuracy_random': ('the same with random weights, %', '{:.1f}'),
    'knn_accuracy_thumbnails': ('the same with thumbnails of 8 x 8 pixels, %', '{:.1f}'),
}
COMPARED = dict(start='those of its start', random='random weights', thumbnails='thumbnails')  # with features
BETTER, WORSE, TOO_CLOSE = 'better than', 'worse than', 'too close to tell from'
HARDLY = 0.05  # nats by which losses must differ to count
NUM_QUERIES, NUM_NEIGHBOURS = 6, 5  # of the picture of neighbours
MOST_THUMBNAILS = 20_000  # that a ridge regression learns from
MIN_ANSWERS = 200  # twice the held-out images that a classifier is asked for even if time is short
MOST_CLASSES = 30  # in the table of a classifier
MISTAKES, MISTAKES_COLUMNS, MISTAKES_SIDE = 24, 4, 240  # of their picture, and pixels of a tile

Paragraph: TypeAlias = 'str | Picture | Sequence[Sequence[str]]'
Described: TypeAlias = tuple[str, list[Paragraph]]  # verdict, and what follows the figures


class Picture(NamedTuple):
    """A picture of a report."""

    file: str  # relative to the report
    caption: str


def write_report(folder: str | Path, title: str, paragraphs: Iterable[Paragraph]) -> Path:
    """Writes report.html and then report.md, the same text for a browser and for GitHub; returns the latter.

    Args:
        folder: that the pictures lie in.
        paragraphs: texts, in which nothing is Markdown or HTML; pictures; tables, a list of rows, the first of them
            the head. Empty ones are left out.
    """
    shown: list[tuple[str, str]] = [(f'# {markdown(title)}', f'<h1>{hypertext(title)}</h1>')]
    for part in filter(None, paragraphs):
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
    return html.escape(readable(text), quote)


def verdict(differences: Mapping[str, tuple[float, float]]) -> str:
    """Whether something is better than others, by twice the standard error: 'better than A and B, worse than C'.

    Args:
        differences: name of the other -> how much better than it, and the standard error of that.
    """
    groups: dict[str, list[str]] = {BETTER: [], WORSE: [], TOO_CLOSE: []}
    for name, difference in differences.items():
        groups[outcome(*difference)].append(name)
    return ', '.join(f'{words} {" and ".join(names)}' for words, names in groups.items() if names)


def outcome(difference: float, error: float) -> str:
    """BETTER, WORSE or TOO_CLOSE, by twice the standard error."""
    return TOO_CLOSE if abs(difference) <= 2 * error else BETTER if difference > 0 else WORSE


def standard_error(percent: float, number: float) -> float:
    """Of a share in %, measured on so many images."""
    share = min(percent / 100, 1.0)  # mmpretrain's float32 may give more
    return 100 * math.sqrt(share * (1 - share) / number)


def describe_pretraining(
    weights: Path, images: Images, numbers: dict[str, float], compared: int, start: str | None
) -> Described:
    """The verdict and the rest of the report on a pretraining; draws its pictures beside the weights.

    Args:
        start: checkpoint that it began with; None for random weights.
        numbers: of the validation; gets those of `compare_features`.
        compared: images that held-out ones are compared with.
    """
    folder, trained = weights.parent, Checkpoint.open(weights)
    chosen = [images.held_out.root / path for path in evenly(images.held_out.names, 8)]
    reconstruct(trained, chosen, folder / 'reconstruction.png')
    found, neighbours_drawn = compare_features(trained, images, compared, start)
    numbers |= found
    names = dict(token_entropy='guessing by token frequency', position_entropy='the same at each position')
    lines = {text: numbers[name] for name, text in names.items() if name in numbers}
    draw_curves(folder / 'pretrain', folder / 'loss.png', lines)
    told: list[Paragraph] = [
        'A loss below that of guessing by token frequency shows that something is learned; one below that of guessing '
        'at each position, that the surroundings are read and not only where things usually are.'
    ]
    if images.classes and found:
        told.append(
            f'Nearest neighbours: the 20 most alike images of the training vote on the class of each of '
            f'{numbers["knn_images"]:,} held-out images; their labels had no part in the training. A difference counts '
            'from two standard errors on, of pairs of answers to one image. It is one training with one seed.'
        )
    told.append(Picture('reconstruction.png', 'Held-out images: masked, predicted, the right tokens decoded'))
    if neighbours_drawn is not None:
        neighbours_drawn.savefig(folder / 'neighbours.png')
        text = 'Left held-out images, beside each the images to learn from whose features are most alike'
        told.append(Picture('neighbours.png', text))
    told.append(Picture('loss.png', 'Loss in training and on held-out images'))
    if 'mim_loss' not in numbers:
        return '', told
    return f'{verdict_of_pretraining(numbers)} {next_after_pretraining(numbers, folder, images, start)}', told


def describe_finetuning(
    weights: Path, images: Images, numbers: dict[str, float], seconds: float, balance: bool, again: str
) -> Described:
    """The verdict and the rest of the report on a classifier; draws its pictures beside the weights.

    Args:
        numbers: of the validation; gets those of `compare_classifier` and the `class_mean`.
        seconds: for reading images.
        again: command of another fine-tuning.
    """
    folder, number, fast = weights.parent, len(images.classes), numbers.get('images_per_second', 0.0)
    found = compare_classifier(images, seconds / 2)
    numbers |= dict(found, held_out=len(images.held_out.names))
    names = dict(thumbnails='ridge regression on thumbnails', most_frequent='most frequent class')
    draw_curves(folder / 'finetune', folder / 'loss.png', {text: found[name] for name, text in names.items() if found})
    told: list[Paragraph] = ['Trained with --balance: images of small classes were shown more often.' * balance]
    if found:
        told.append(
            f'Thumbnails and the most frequent class need no network: learned from {found["compared_with"]:,} of the '
            f'{len(images.train.names):,} images, tested on {found["compared"]:,} held-out ones. A difference counts '
            'from two standard errors on, as of independent figures. Averaged over the classes, a class of one image '
            'counts as much as one of many.'
        )
    told.append(
        f'These are {numbers["held_out"]:,} held-out images and one training with one seed. What pretraining is worth '
        'they do not show: that takes the same training with --init none.'
    )
    # two for each that it classifies, which costs a third of a step
    _, held_out = labels_of(images, max(MIN_ANSWERS, int(3 * seconds * fast)))
    results = zip(classify(weights, [*held_out]), held_out.values(), strict=True)
    if answers := [dict(result, truth=label) for result, label in results if 'error' not in result]:
        truth, predicted = (torch.tensor([answer[key] for answer in answers]) for key in ('truth', 'label'))
        counts = evaluation.confusion(predicted, truth, number)
        numbers['class_mean'], numbers['class_mean_error'] = class_mean(counts)
        limit = f', {MOST_CLASSES} of {number:,}' if number > MOST_CLASSES else ''
        told.append(f'Classes, the worst first{limit}, on {len(answers):,} held-out images:')
        told += [table_of_classes(counts, images), draw_mistakes(answers, images.classes, folder / 'mistakes.png')]
    told.append(Picture('loss.png', 'Loss in training, and held-out images classified right'))
    if not found or not answers or 'accuracy/top1' not in numbers:
        return '', told
    told.append(next_after_finetuning(numbers, weights, images.unequal and not balance, again))
    return verdict_of_finetuning(numbers), told


def class_mean(counts: Tensor) -> tuple[float, float]:
    """Share of right answers in %, averaged over the classes, and its standard error; by a `confusion` (K, K)."""
    number = counts.sum(dim=1)
    right, number = counts.diagonal()[number > 0], number[number > 0]
    likely = (right + 1) / (number + 2)  # one image that is classified right does not prove that all would be
    variance = (likely * (1 - likely) / number).mean() / len(number)
    return float(100 * (right / number).mean()), float(100 * variance.sqrt())


def table_of_classes(counts: Tensor, images: Images) -> list[list[str]]:
    """A row for each class, the worst first, at most MOST_CLASSES; by a `confusion` (K, K)."""
    right, number, learned = counts.diagonal(), counts.sum(dim=1), images.learned
    recall, precision = 100 * right / number, 100 * right / counts.sum(dim=0)  # nan of none
    table = [['class', 'images to learn from', 'held-out images', 'of these right, %', 'of its answers right, %']]
    for label in recall.nan_to_num(101).argsort(stable=True).tolist()[:MOST_CLASSES]:
        name, shares = images.classes[label], (float(recall[label]), float(precision[label]))
        said = ['-' if math.isnan(share) else f'{share:.1f}' for share in shares]
        table.append([name, f'{learned[name]:,}', f'{number[label]:,.0f}', *said])
    return table


def draw_mistakes(answers: Sequence[Mapping[str, Any]], classes: Sequence[str], out: Path) -> Paragraph:
    """Draws the images that a classifier is wrong about, the surest first; answers of `classify` with their `truth`."""
    wrong = [answer for answer in answers if answer['label'] != answer['truth']]
    wrong.sort(key=lambda answer: -answer['scores'][0][1])
    if not wrong:
        return f'No mistake on {len(answers):,} held-out images.'
    tiles = []
    for answer in wrong[:MISTAKES]:
        truth, predicted = (shortened(classes[answer[key]], 13) for key in ('truth', 'label'))
        tiles.append((f'{truth} as {predicted} {answer["scores"][0][1]:.2f}', small(answer['path'], MISTAKES_SIDE)))
    rows = [tiles[first : first + MISTAKES_COLUMNS] for first in range(0, len(tiles), MISTAKES_COLUMNS)]
    sheet(rows, MISTAKES_SIDE).savefig(out)
    which = f'The {len(tiles)} surest of {len(wrong):,} mistakes' if len(tiles) < len(wrong) else 'All mistakes'
    return Picture(out.name, f'{which} on {len(answers):,} held-out images: the right class as the predicted one')


def verdict_of_pretraining(numbers: Mapping[str, float]) -> str:
    """One sentence from the figures of a validation and of `compare_features`, those of ROWS."""
    loss, entropy, position = (numbers[name] for name in ('mim_loss', 'token_entropy', 'position_entropy'))
    if loss > entropy - HARDLY:
        said = 'nothing learned yet: the loss on masked patches is not clearly below guessing by token frequency'
    elif loss >= position:
        said = 'learned, but no more is shown than where things usually are'
    else:
        said = 'masked patches are predicted from what surrounds them'
    if 'mim_loss_start' in numbers:
        start = {'that of the weights that the training began with': (numbers['mim_loss_start'] - loss, HARDLY / 2)}
        said += f'; the loss is {verdict(start)}'
    if 'knn_images' not in numbers:
        return f'Verdict: {said}.'
    gains = {
        what: (numbers['knn_accuracy'] - numbers[f'knn_accuracy_{name}'], numbers[f'knn_error_{name}'])
        for name, what in COMPARED.items()
        if f'knn_error_{name}' in numbers
    }
    return f'Verdict: {said}; the features that it learned are {verdict(gains)}.'


def next_after_pretraining(numbers: Mapping[str, float], folder: Path, images: Images, start: str | None) -> str:
    """What to run next; it begins with the pretraining's weights only where they are better than what they began with.

    The features decide and, where these are too close, the loss. Arguments as of `describe_pretraining`.
    """
    before, loss_before = ('start', 'mim_loss_start') if start else ('random', 'token_entropy')
    gains = []
    if f'knn_error_{before}' in numbers:
        gains.append((numbers['knn_accuracy'] - numbers[f'knn_accuracy_{before}'], numbers[f'knn_error_{before}']))
    if loss_before in numbers:
        gains.append((numbers[loss_before] - numbers['mim_loss'], HARDLY / 2))
    worth = next((found for gain in gains if (found := outcome(*gain)) != TOO_CLOSE), TOO_CLOSE)
    labelled = str(images.train.root) if images.classes else 'LABELLED_IMAGES'
    init = str(folder) if worth == BETTER else start or DEMO
    command = shlex.join(['beit-mm', 'finetune', labelled, '--init', init, '--out', f'{folder}_ft'])
    why = {BETTER: '', WORSE: 'it made the weights worse', TOO_CLOSE: 'nothing shows that it helps'}[worth]
    return f'Next: {why and f"skip this pretraining, {why}, or give it more images and minutes: "}{command}'


def verdict_of_finetuning(numbers: Mapping[str, float]) -> str:
    """One sentence from the figures of a validation and of `describe_finetuning`, those of ROWS."""
    of_images, of_classes = map(verdict, gains_of_finetuning(numbers))
    if of_images == of_classes:
        return f'Verdict: the classifier is {of_images}.'
    return f'Verdict: over all images the classifier is {of_images}; averaged over the classes it is {of_classes}.'


def gains_of_finetuning(numbers: Mapping[str, float]) -> list[dict[str, tuple[float, float]]]:
    """How much better a classifier is, for `verdict`: over all images, and averaged over the classes."""
    right, mean, error = (numbers[name] for name in ('accuracy/top1', 'class_mean', 'class_mean_error'))
    of_images, of_classes = {}, {}
    for name, what in dict(thumbnails='thumbnails', most_frequent='the most frequent class').items():
        errors = standard_error(right, numbers['held_out']), standard_error(numbers[name], numbers['compared'])
        of_images[what] = right - numbers[name], math.hypot(*errors)
        other = numbers[f'{name}_class_mean']
        of_classes[what] = mean - other, math.hypot(error, numbers[f'{name}_class_mean_error'])
    return [of_images, of_classes]


def next_after_finetuning(numbers: Mapping[str, float], weights: Path, unequal: bool, again: str) -> str:
    """What to run next: the classifier where it is better than its baselines, else `again`, another fine-tuning."""
    of_images, of_classes = ([outcome(*gain) for gain in gains.values()] for gains in gains_of_finetuning(numbers))
    if {*of_classes} == {BETTER} and WORSE not in of_images:
        run = shlex.quote(str(weights.parent))
        return f'Next: beit-mm classify {run} new_images/ --out classes.csv; beit-mm export {run} model.onnx'
    balance = 'show images of small classes more often (--balance), ' if unequal else ''
    others = 'give it more images, more time, or a released model to begin with (--init NAME of beit_mm.list_models())'
    return f'Next: {balance}{others}: {again}'


def rows_of(numbers: Mapping[str, float]) -> list[tuple[str, str]]:
    """What the figures of a run are and their values, those on a number of images with their standard errors."""
    tested = dict.fromkeys(('thumbnails', 'most_frequent'), numbers.get('compared'))
    tested |= {'accuracy/top1': numbers.get('held_out')}
    tested |= {name: numbers.get('knn_images') for name in ROWS if name.startswith('knn_')}
    rows = []
    for name, (text, form) in ROWS.items():
        if not math.isnan(numbers.get(name, math.nan)):
            number = tested.get(name)
            error = standard_error(numbers[name], number) if number else numbers.get(f'{name}_error')
            rows.append((text, form.format(numbers[name]) + ('' if error is None else f' +- {error:.1f}')))
    return rows


def labels_of(images: Images, size: int) -> list[dict[str, int]]:
    """File -> class of at most `size` images to learn from and half as many held-out ones, evenly spread."""
    number = {name: label for label, name in enumerate(images.classes)}
    return [
        {str(part.root / path): number.get(name, 0) for path, name in evenly(part.names.items(), most)}
        for part, most in ((images.train, size), (images.held_out, max(1, size // 2)))
    ]


def compare_features(
    trained: Checkpoint, images: Images, size: int, start: str | None = None
) -> tuple[dict[str, float], Figure | None]:
    """k-NN of held-out images by standardised features, of random weights too, and by thumbnails; and a picture.

    Args:
        size: images that they are compared with.
        start: checkpoint that the training began with, whose features are compared too.

    Returns:
        Of labelled images knn_accuracy of each, %, knn_images and, for pairs of answers to one image, knn_error of
        the difference to each of the others; and a `sheet`, None where no image can be read.
    """
    extract = FeatureExtractor(trained)
    networks = dict(pretrained=extract)
    if images.classes:
        networks['random'] = extract.with_random_weights()
        if start:
            networks['start'] = FeatureExtractor(start, mean=extract.mean, std=extract.std)

    def compute(samples: list[dict]) -> list[dict]:
        batch = torch.stack([sample['inputs'] for sample in samples])
        found = {name: network.features(batch, [None])['mean'][:, 0].cpu() for name, network in networks.items()}
        return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]

    parts: list[dict[str, Tensor]] = []
    paths: list[list[str]] = []
    for labels in labels_of(images, size):
        read = []
        files = [ExistingPath(path) for path in labels]
        for sample in extract.reader.results(files, compute, 32, on_error='skip', return_images=True):
            if 'error' not in sample:
                pixels = torch.from_numpy(thumbnail(sample.pop('image')))
                read.append(dict(sample, thumbnails=pixels - pixels.mean()))  # brightness alone makes none alike
        if not read:
            return {}, None
        paths.append([sample['path'] for sample in read])
        names = (*networks, 'thumbnails')
        parts.append({name: torch.stack([sample[name] for sample in read]) for name in names})
        parts[-1]['labels'] = torch.tensor([labels[path] for path in paths[-1]])
    bank, held_out = parts
    for name in networks:  # no channel counts more than another
        standardise = standardiser(bank[name])
        bank[name], held_out[name] = standardise(bank[name]), standardise(held_out[name])
    chosen = evenly(range(len(paths[1])), NUM_QUERIES)
    queries = dict(paths=[paths[1][row] for row in chosen], features=held_out['pretrained'][chosen])
    picture = draw_neighbours(queries, dict(paths=paths[0], features=bank['pretrained']), bool(images.classes))
    if not images.classes:
        return {}, picture
    right = {
        name: knn_predict(held_out[name], bank[name], bank['labels'], len(images.classes)) == held_out['labels']
        for name in (*networks, 'thumbnails')
    }
    numbers: dict[str, float] = dict(knn_images=len(held_out['labels']))
    numbers['knn_accuracy'], _ = mean_and_error(right['pretrained'])
    for name in [*networks, 'thumbnails'][1:]:
        numbers[f'knn_accuracy_{name}'], _ = mean_and_error(right[name])
        _, numbers[f'knn_error_{name}'] = mean_and_error(right['pretrained'].double() - right[name].double())
    return numbers, picture


def draw_neighbours(queries: Mapping[str, Any], bank: Mapping[str, Any], named: bool = True) -> Figure:
    """Images, each before the others of a bank whose features are most alike, with the cosine.

    Args:
        queries, bank: dict(paths=files, features=(N, C)), as `embed` returns them.
        named: whether the folders that images lie in are their classes.
    """
    rows = []
    features, known = (torch.as_tensor(each['features']) for each in (queries, bank))
    found = (pair for chunk in neighbours(features, known, NUM_NEIGHBOURS + 1) for pair in zip(*chunk, strict=True))
    for query, (cosines, others) in zip(queries['paths'], found, strict=True):
        files = [(bank['paths'][row], f' {cosine:.3f}') for cosine, row in zip(cosines, others, strict=True)]
        files = [each for each in files if Path(each[0]).resolve() != Path(query).resolve()]
        shown = [(query, ''), *files[:NUM_NEIGHBOURS]]
        rows.append([(named * Path(path).resolve().parent.name + text, small(path)) for path, text in shown])
    return sheet(rows)


def small(file: str, side: int = SIDE) -> Tensor:
    """The middle of an image, which the model sees, float (3, side, side) in [0, 1]."""
    middle = TwoViewCenterCrop(side, None)(dict(img=read_image(file)))['images']
    return torch.from_numpy(middle).permute(2, 0, 1) / 255


def compare_classifier(images: Images, seconds: float) -> dict[str, float]:
    """Accuracy in % of ridge regression on `thumbnails` and of the `most_frequent` class, and on how many images.

    Args:
        seconds: for reading images, of which MOST_THUMBNAILS are enough; 100 of each kind are read in any case.
    """
    number = {name: label for label, name in enumerate(images.classes)}
    pixels, answers = [], []
    begin = time.monotonic()
    for part, until in ((images.train, 0.8 * seconds), (images.held_out, seconds)):
        found = []
        for path, name in random.Random(0).sample([*part.names.items()], len(part.names))[:MOST_THUMBNAILS]:
            if len(found) >= 100 and time.monotonic() - begin > until:
                break
            with suppress(UnreadableImageError):
                found.append((thumbnail(read_image(str(part.root / path))), number[name]))
        if not found:
            return {}
        pixels.append(torch.from_numpy(np.stack([values for values, _ in found])))
        answers.append(torch.tensor([label for _, label in found]))
    (x, held_out), (y, truth) = pixels, answers
    numbers: dict[str, float] = dict(compared=len(truth), compared_with=len(y))
    for name, given in dict(thumbnails=ridge(x, y, held_out), most_frequent=y.bincount().argmax()).items():
        counts = evaluation.confusion(given.expand_as(truth), truth, len(images.classes))
        numbers[name] = float(100 * counts.diagonal().sum() / counts.sum())
        numbers[f'{name}_class_mean'], numbers[f'{name}_class_mean_error'] = class_mean(counts)
    numbers['most_frequent_class_mean_error'] = 0.0  # one class is right whatever is drawn
    return numbers


def draw_curves(work_dir: Path, out: Path, lines: Mapping[str, float]) -> None:
    """Draws a run's losses and, where there is one, its accuracy on held-out images.

    Args:
        lines: name -> what is reached without training, nats, or where there is an accuracy %.
    """
    training, validation = read_scalars(work_dir)
    accuracy = [name for name in ('accuracy/top1', 'mIoU') if any(name in row for row in validation.values())]
    losses = {step: dict(row, loss=row['mim_loss']) if 'mim_loss' in row else row for step, row in validation.items()}
    figure = draw_runs({'training': (training, {}), 'held-out images': ({}, losses)}, ['loss', *accuracy])
    for number, (name, level) in enumerate(lines.items()):
        style = ('--', ':')[number % 2]
        figure.axes[-1].axhline(level, color='gray', linestyle=style, label=f'{name}: {level:.3g}')
    labels = 'loss, nats', 'mIoU, %' if 'mIoU' in accuracy else 'classified right, %'
    for axes, label in zip(figure.axes, labels, strict=False):
        axes.set_ylabel(label)
        for line in axes.lines:
            line.set_label(str(line.get_label()).removesuffix(', validation'))
        axes.legend(fontsize=7)
    with atomic_file(out) as file:
        figure.savefig(file, dpi=120)
