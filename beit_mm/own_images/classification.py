"""Fine-tuning a classifier on class folders: its recipe, and the report with its baselines."""

import math
import shlex
import time
from collections.abc import Mapping, Sequence
from os.path import relpath
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from torch import Tensor

from beit_mm.apis.configs import bundled_config, pipeline_for_size, warmup_and_cosine
from beit_mm.apis.inference import classify_images
from beit_mm.apis.inferencers import ClassificationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import DEMO
from beit_mm.checkpoint.names import preview
from beit_mm.engine.fit_head import FEATURES
from beit_mm.engine.unreadable import LIST
from beit_mm.errors import UserError
from beit_mm.features import evaluation
from beit_mm.features.evaluation import average_precisions
from beit_mm.features.extractor import ExistingPath, FeatureExtractor
from beit_mm.files import quoted
from beit_mm.own_images import mistakes, report
from beit_mm.own_images.annotations import FORMATS
from beit_mm.own_images.images import JOINT, Images, TaggedImages, evenly, find_images, merge_classes, not_understood
from beit_mm.own_images.record import ALL, Record, words_of
from beit_mm.own_images.report import Metric, Metrics, Report
from beit_mm.own_images.task import FEATURES_SHARE, HEAD, NARROW, FineTuning, Settings, fitted_in

RECIPE = 'demo/finetune_folder.py'  # for any width: in a short run mixup and RandAugment cost more than they gain
WIDE_RECIPE = 'beit/finetune_in1k_100e.py'
RANDOM_RATE = 1e-3  # learning rate of a classifier that starts from random weights
BASELINES = dict(thumbnails='thumbnails', most_frequent='the most frequent class')  # which need no network
MIN_THUMBNAILS, MAX_THUMBNAILS = 100, 20_000  # for ridge regression to learn from; MIN_ even if time is short
MIN_ANSWERS = 100  # held-out images to classify even if time is short
MAX_CLASSES = 30  # in the table of a classifier
FITTED_PER_SECOND = 3_000_000  # images times features times classes, in `cross_fit` on a core
SUSPECTS = (
    'The images with the least probable labels come first. If those labels are wrong, move the images and give the '
    'same `finetune` command again, which prints the command to go on with. The probabilities come from a linear '
    'layer on frozen features, which was fitted to other images:'
)
RESAMPLED = 200  # bootstrap samples, for the standard errors of average precisions
FOR_MAPS = ('reduce_zero_label', 'bands', 'head', 'maps', 'short_side', 'full_size')  # options


class Classification(FineTuning):
    """A classifier, trained on class folders."""

    model = 'classifier'

    @classmethod
    def find(cls, record: Record, table: Images | None = None) -> 'Classification':
        """Finds class folders, unless a table has the classes; refuses options for label maps."""
        given = words_of({name: record.options[name] for name in FOR_MAPS})
        if given:
            raise UserError(f'{record.images} has no label maps; leave out {shlex.join(given)}')
        if table and record.options['classes']:
            raise UserError(
                f'{record.images}: {table.notes[0]}; --classes names folders: leave it out, or move the table away'
            )
        fits_head = record.options['freeze'] == ALL
        images = table or find_images(record.images, record.options['classes'], fits_head=fits_head)
        if isinstance(images, TaggedImages):
            if record.options['merge'] or fits_head:
                raise UserError(f'{record.images}: images have several labels; leave out --merge and --freeze {ALL}')
            return MultiLabelClassification(record, images)
        if images.classes and record.options['merge']:
            old = images.classes
            images.classes, merged = merge_classes(old, old, record.options['merge'])
            new_of = {name: images.classes[index] for name, index in zip(old, merged, strict=True)}
            for part in (images.train, images.held_out):
                part.names.update({path: new_of[name] for path, name in part.names.items()})
        if not images.classes:
            learned = {*images.train.names.values()} - {''}  # '': images in no folder
            held_out = {*images.held_out.names.values()} - {''}
            beside = next((path for path, name in images.train.names.items() if not name), None)
            if len(learned) > 1 and beside:
                raise UserError(
                    f'{record.images} has class folders, {preview(sorted(learned))}, and images beside them, such as '
                    f'{quoted(beside)}; move these into a folder or away'
                )
            raise UserError(
                f'{record.images} has class folders: {preview(sorted(learned))}; only among held-out images: '
                f'{preview(sorted(held_out - learned))}; expected <class>/<image>, at least two classes, each with '
                f'images that are not held out; or images/ and annotations/, or files of {", ".join(FORMATS)}'
                f'{not_understood(record.images)}'
            )
        return cls(record, images)

    trains_fitted = True

    @property
    def fits_head(self) -> bool:
        return self.call.freeze == ALL

    def choose_parts(self, checkpoint: Checkpoint | None) -> None:
        super().choose_parts(checkpoint)
        self.plan.base = RECIPE

    def described(self) -> list[tuple[str, str]]:
        images, imbalance = self.images, self.images.imbalance_advice(bool(self.call.balance))
        tested = {label for labels in images.held_out.names.values() for label in (labels, *labels.split(JOINT))}
        untested = [name for name in images.classes if name not in tested]
        never = f'no image is held out of {preview(map(quoted, untested))}' if untested else ''
        return [*super().described(), ('balance', imbalance), ('untested', never)]

    @property
    def validation_cost(self) -> int:
        return len(self.images.held_out.names)  # all of them

    def settings(self, stage: str, lists: Path, steps: int, earlier: Mapping[str, Path]) -> Settings:
        plan, base = self.plan, bundled_config(self.plan.base)
        num_classes = dict(num_classes=len(self.images.classes))
        recipe = bundled_config(RECIPE if plan.width <= NARROW else WIDE_RECIPE)
        rate = recipe.optim_wrapper.optimizer.lr if plan.init else RANDOM_RATE
        head = dict(in_channels=plan.width, **num_classes)
        if HEAD in earlier:
            head['init_cfg'] = dict(fitted_in(earlier[HEAD], 'head.'), _delete_=True)
        length = warmup_and_cosine(steps, steps // 6, plan.batch, base.param_scheduler[-1].eta_min_ratio)
        return plan.base, dict(
            model=dict(
                backbone=self.backbone(out_type='avg_featmap'),
                head=head,
                data_preprocessor=dict(plan.preprocessing, **num_classes),
            ),
            **self.data(base, lists, self.fits(stage)),
            optim_wrapper=self.optimizer(recipe, rate),
            **length,
        )

    def data(self, base: Config, lists: Path, fits: bool) -> dict[str, Any]:
        """Settings of the data loaders."""
        train_pipeline, test_pipeline = (
            pipeline_for_size(base[f'{name}_pipeline'], self.plan.size) for name in ('train', 'test')
        )
        if fits:
            pack = dict(type='PackInputs', meta_keys=('sample_idx', 'img_path', 'unreadable'))
            train_pipeline = [*test_pipeline[:-1], pack]
        pipelines, classes = [train_pipeline, test_pipeline], str(lists / 'classes.txt')
        # a table or --merge may give images other classes than the ones that their folders are called
        data = self.loaders(lists, pipelines, 'held_out', fits, classes=classes, check_folders=False)
        train = data['train_dataloader']
        if fits:
            data['val_dataloader'].update(persistent_workers=False)  # for the only validation
        if self.call.balance:
            learned = self.images.learned
            dataset = dict(type=base.train_dataloader.dataset.type) | train['dataset']
            largest = max(learned.values()) / learned.total()  # the share of a class whose images are shown once
            balanced = dict(_delete_=True, type='ClassBalancedDataset', oversample_thr=largest, dataset=dataset)
            train['dataset'] = balanced
        return data

    def make_report(self, weights: Path, metrics: Metrics, seconds: float, images_in_time: float) -> Report:
        begin, images, folder = time.monotonic(), self.images, weights.parent
        # half of the time; without a backward pass, as a head is fitted too, an image costs a third
        asked = max(MIN_ANSWERS, int((1 if self.fits_head else 3) / 2 * images_in_time))
        answers = answers_of(weights, images, asked)
        found, gains, num_learned = compare_classifier(images, answers, seconds / 2)
        truth, predicted = (torch.tensor([answer[key] for answer in answers]) for key in ('truth', 'label'))
        counts = evaluation.confusion(predicted, truth, len(images.classes))
        metrics = metrics | found | {'class_mean': class_mean(counts)}
        validated = self.record.stages[self.record.verb].get('validated', len(images.held_out.names))
        metrics['accuracy/top1'] = Metric.share(metrics['accuracy/top1'].value, validated)
        balanced = 'It was trained with --balance: images of small classes were shown more often.'
        gained = ', '.join(f'{each.value:+.1f} +- {each.error:.1f} over {of}' for of, each in gains['images'].items())
        parts: list[report.Part] = [
            balanced if self.call.balance else '',
            f'The baselines (thumbnails, most frequent class) need no network: they learned from {num_learned:,} of '
            f'the {len(images.train.names):,} images. On the same {found["thumbnails"].number:,} held-out images the '
            f'classifier gains {gained}, in %. These standard errors, of paired differences, decide the verdict. '
            'This is one training with one seed. To see what pretraining gains, run it again with --init none.',
            f'At most {MAX_CLASSES} classes, worst first, on {len(answers):,} held-out images:',
            table_of_classes(counts, images),
            mistakes.confused(counts, images.classes, of_images=True),
            *self.list_suspects(weights, answers, seconds - (time.monotonic() - begin)),
            mistakes.draw_confusion(counts, images.classes, folder / 'confusion.png'),
            *mistakes.draw_mistakes(answers, images.classes, folder / 'mistakes.png'),
            report.draw_curves(folder / 'finetune'),
        ]
        toy = self.plan.init in (None, DEMO)
        unequal = images.unequal and not self.call.balance
        verdict, following = judge(gains, weights, unequal, toy)
        return Report(metrics, verdict, parts, following)

    def list_suspects(self, weights: Path, answers: Sequence[Mapping[str, Any]], seconds: float) -> list[report.Part]:
        """Writes mistakes.csv of all images, or of as many as there is time for."""
        begin, classes, root = time.monotonic(), self.images.classes, Path(self.record.images)
        parts = self.images.train, self.images.held_out
        labels = {str(part.root / path): classes.index(name) for part in parts for path, name in part.names.items()}
        # checked first, in the order of the answers
        wrong = dict.fromkeys(answer['path'] for answer in answers if answer['label'] != answer['truth'])
        saved = weights.parent / self.record.verb / FEATURES
        if saved.is_file():  # they took most of the run's time
            known = torch.load(saved, weights_only=True)
            features = dict(zip(known['files'], known['features'], strict=True))
            features |= {answer['path']: answer['features'] for answer in answers}
            features = {path: values for path, values in features.items() if path in labels}  # others are gone
            unread = saved.with_name(LIST)
            skipped = len(unread.read_text('utf-8').splitlines()) if unread.is_file() else 0
        else:  # those of the start, because the trained ones have learned the labels
            extract = FeatureExtractor(self.plan.init or str(weights), **self.mean_std)
            groups, until = (wrong, [path for path in labels if path not in wrong]), begin + FEATURES_SHARE * seconds
            drawn = (path for group in groups for path in report.drawn_until(group, until, mistakes.MIN_CHECKED))
            found = [*extract(map(ExistingPath, drawn), ['mean'], batch_size=16, on_error='skip')]
            skipped = sum('error' in each for each in found)
            features = {each['path']: torch.from_numpy(each['mean']) for each in found if 'error' not in each}
        left = begin + seconds - time.monotonic()
        size = len(classes) * len(next(iter(features.values())))
        order = sorted(features, key=lambda path: path not in wrong)
        paths = order[: max(mistakes.MIN_CHECKED, int(left * FITTED_PER_SECOND / size))]
        given = torch.tensor([labels[path] for path in paths])
        shares = evaluation.cross_fit(torch.stack([features[path] for path in paths]), given, len(classes))
        predicted, probability = shares.argmax(dim=1), shares.gather(1, given[:, None])[:, 0]
        rows = []
        for row in probability.argsort().tolist():
            names = classes[given[row]], classes[predicted[row]]
            rows.append((relpath(paths[row], root), *names, f'{probability[row]:.4f}'))
        head = ['file', 'label', 'predicted', 'probability of the label']
        learned = not {*paths}.isdisjoint(str(parts[0].root / path) for path in parts[0].names)
        checked = mistakes.Checked(len(labels), learned, skipped)
        return mistakes.list_first(SUSPECTS, head, rows, checked, weights.parent)


class MultiLabelClassification(Classification):
    """A classifier that gives each class a probability of its own."""

    begins_with_head = False  # it is fitted to one label of each image

    def usual_start(self, device: str) -> tuple[str, str]:
        return super().usual_start(device) if device == 'cuda' else (DEMO, '')  # its head is not fitted to features

    def settings(self, stage: str, lists: Path, steps: int, earlier: Mapping[str, Path]) -> Settings:
        base, settings = super().settings(stage, lists, steps, earlier)
        settings['model']['head'].update(_delete_=True, type='MultiLabelLinearClsHead')
        settings['model']['data_preprocessor']['to_onehot'] = False  # the dataset's labels are
        metrics = [dict(type='AveragePrecision'), dict(type='MultiLabelMetric', thr=0.5)]
        return base, dict(settings, val_evaluator=metrics, test_evaluator=metrics)

    def make_report(self, weights: Path, metrics: Metrics, seconds: float, images_in_time: float) -> Report:
        held_out, number = self.images.held_out, max(MIN_ANSWERS, int(1.5 * images_in_time))
        asked = {str(held_out.root / path): labels for path, labels in evenly(held_out.names.items(), number)}
        found = classify_images(ClassificationInferencer(weights), [*asked])
        answers = [answer for answer in found if 'error' not in answer]
        scores = torch.tensor([[*answer['probabilities'].values()] for answer in answers])
        truth = torch.tensor([self.images.digits(asked[answer['path']]) for answer in answers])
        measured, gain = compare_precisions(scores, truth)
        parts: list[report.Part] = [
            f'At most {MAX_CLASSES} classes, worst first, on {len(answers):,} held-out images; the more '
            'frequent a class is, the better is the average precision of a random order:',
            table_of_precisions(scores, truth, self.images),
            'mistakes.csv is not written: only images with a single label are checked for wrong ones.',
            report.draw_curves(weights.parent / 'finetune'),
        ]
        following, run = 'give it more images or more time', shlex.quote(str(weights.parent))
        if gain.sign == report.BETTER:
            following = f'beit-mm classify {run} new_images/ --out classes.csv; beit-mm export {run} page.html'
        verdict = f'the classifier is {report.verdict({"a random order": gain})}'
        return Report(metrics | measured, verdict, parts, following)


def answers_of(weights: Path, images: Images, number: int) -> list[dict[str, Any]]:
    """What a classifier answers on `number` held-out images, as `classify` gives it, with `truth` and `features`."""
    _, truths = report.labels_of(images, 2 * number)
    classifier, features = ClassificationInferencer(weights), list[Tensor]()
    linear = classifier.model.head.fc
    linear.register_forward_pre_hook(lambda _, inputs: features.extend(inputs[0].float().cpu()))
    answers = zip(classify_images(classifier, [*truths]), truths.values(), strict=True)
    read = [dict(answer, truth=label) for answer, label in answers if 'error' not in answer]
    return [dict(answer, features=values) for answer, values in zip(read, features, strict=True)]


def compare_classifier(
    images: Images, answers: Sequence[Mapping[str, Any]], seconds: float
) -> tuple[Metrics, dict[str, Metrics], int]:
    """Compares `answers_of` a classifier with ridge regression on thumbnails and with the most frequent class.

    Returns metrics of these baselines, the gains over them on the same `images`, also averaged over the `classes`, and
    the number of images that they learned from.
    """
    begin, (known, _) = time.monotonic(), report.labels_of(images, MAX_THUMBNAILS)
    x, y = report.read_thumbnails(report.drawn_until(known.items(), begin + 0.8 * seconds, MIN_THUMBNAILS))
    asked = ((answer['path'], row) for row, answer in enumerate(answers))
    pixels, rows = report.read_thumbnails(report.drawn_until(asked, begin + seconds, MIN_THUMBNAILS))
    truth, own = (torch.tensor([answers[row][key] for row in rows]) for key in ('truth', 'label'))
    number = truth.bincount()
    weights = 1 / (number[truth].double() * (number > 0).sum())  # of an image, in the mean of the classes
    metrics: Metrics = {}
    gains: dict[str, Metrics] = dict(images={}, classes={})
    baselines = dict(thumbnails=evaluation.ridge(x, y, pixels), most_frequent=y.bincount().argmax().expand_as(truth))
    for name, predicted in baselines.items():
        counts = evaluation.confusion(predicted, truth, len(images.classes))
        metrics[name] = Metric.share(100 * evaluation.accuracy(counts), len(truth))
        metrics[f'{name}_class_mean'] = class_mean(counts)
        gained = (own == truth).double() - (predicted == truth).double()
        gains['images'][BASELINES[name]] = Metric.of_pairs(gained)
        gains['classes'][BASELINES[name]] = Metric.of_pairs(gained, weights)
    # exact: one class is always right and the others never, whichever images are drawn
    metrics['most_frequent_class_mean'] = Metric(metrics['most_frequent_class_mean'].value, 0.0)
    return metrics, gains, len(y)


def judge(gains: Mapping[str, Metrics], weights: Path, unequal: bool, toy: bool = True) -> tuple[str, str]:
    """A verdict from the gains of `compare_classifier`, and what to do next.

    The next step is to use the classifier if it is better than its baselines. `toy`: it began with random weights, or
    with the packaged ones.
    """
    on_images, on_classes = report.verdict(gains['images']), report.verdict(gains['classes'])
    verdict = f'the classifier is {on_images}'
    if on_classes != on_images:
        verdict = f'over all images the classifier is {on_images}; averaged over the classes it is {on_classes}'
    better = all(gain.sign == report.BETTER for gain in gains['classes'].values())
    if better and not any(gain.sign == report.WORSE for gain in gains['images'].values()):
        run = shlex.quote(str(weights.parent))
        return verdict, f'beit-mm classify {run} new_images/ --out classes.csv; beit-mm export {run} page.html'
    balance = 'show images of small classes more often (--balance), ' if unequal else ''
    released = ', or a released model to start from (--init): beit-mm models' if toy else '.'
    return verdict, f'{balance}give it more images or more time{released}'


def class_mean(counts: Tensor) -> Metric:
    """Share of correct answers in %, averaged over the classes, from a `confusion` (K, K)."""
    number = counts.sum(dim=1)
    right, number = counts.diagonal()[number > 0], number[number > 0]
    likely = (right + 1) / (number + 2)  # as in Metric.share
    variance = (likely * (1 - likely) / number).mean() / len(number)
    return Metric(float(100 * (right / number).mean()), float(100 * variance.sqrt()))


def table_of_classes(counts: Tensor, images: Images) -> list[list[str]]:
    """A row for each class, worst first, at most MAX_CLASSES; from a `confusion` (K, K)."""
    right, number, learned = counts.diagonal(), counts.sum(dim=1), images.learned
    recall, precision = 100 * right / number, 100 * right / counts.sum(dim=0)  # nan without images
    table = [['class', 'images to learn from', 'held-out images', 'recall, %', 'precision, %']]
    for label in recall.nan_to_num(101).argsort(stable=True).tolist()[:MAX_CLASSES]:
        name, shares = images.classes[label], (float(recall[label]), float(precision[label]))
        table.append([name, f'{learned[name]:,}', f'{number[label]:,.0f}', *map(report.percentage, shares)])
    return table


def compare_precisions(scores: Tensor, truth: Tensor) -> tuple[Metrics, Metric]:
    """The mAP of probabilities (N, K) and of a random order, and the gain, with errors by bootstrap."""
    drawn = torch.randint(len(truth), (RESAMPLED, len(truth)), generator=torch.Generator().manual_seed(0))
    means = torch.stack([average_precisions(scores[rows], truth[rows]).nanmean(dim=1) for rows in drawn])
    means = means[means.isfinite().all(dim=1)]  # a sample of few images may have no label
    samples = means[:, 0], means[:, 0] - means[:, 1]
    error, error_of_gain = (float(each.std()) if len(means) > 1 else math.inf for each in samples)
    value, chance = average_precisions(scores, truth).nanmean(dim=1).tolist()
    measured = dict(mAP=Metric(value, error, len(truth)), random_order=Metric(chance))
    return measured, Metric(value - chance, error_of_gain)


def table_of_precisions(scores: Tensor, truth: Tensor, images: Images) -> list[list[str]]:
    """A row for each class, worst first."""
    found, numbers = average_precisions(scores, truth), truth.sum(dim=0).tolist()
    table = [['class', 'images to learn from', 'held-out images', 'average precision, %', 'of a random order, %']]
    for label in found[0].nan_to_num(101).argsort(stable=True).tolist()[:MAX_CLASSES]:
        name, shares = images.classes[label], found[:, label].tolist()
        table.append([name, f'{images.learned[name]:,}', f'{numbers[label]:,}', *map(report.percentage, shares)])
    return table
