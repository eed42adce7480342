"""Metrics of validations."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmengine.dist import get_rank, get_world_size
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.runner import Runner
from mmpretrain.evaluation import Accuracy
from torch import Tensor
from torch.utils.data import DataLoader

from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.engine.steps import unwrap
from beit_mm.errors import UserError
from beit_mm.features.evaluation import check_same_classes, evaluate_images, evaluate_patches, patch_dataset
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.provenance import backbone_of, preprocessing_of_model
from beit_mm.registry import HOOKS, METRICS

TOP = 5  # classes of a prediction that are kept
MAX_PATCHES = 20_000  # possible neighbours, drawn at random, the same at each validation


@METRICS.register_module()
class MIMMetric(BaseMetric):
    """Loss and accuracy on masked patches, and the entropies to compare the loss with.

    Only a `mim_loss` below both entropies shows that a model reads the surroundings of a patch.

    Returns (nats, except the accuracy):
        mim_loss: mean over all predicted patches (squared error for pixel regression).
        mim_acc: share of the predicted patches whose most likely token is right.
        token_entropy: the loss of predicting each token by its frequency.
        position_entropy: the loss of predicting each token by its frequency at its position in the other images.
    """

    default_prefix = ''

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            result = {key: sample[key] for key in ('loss', 'correct', 'count') if key in sample}
            if 'tokens' in sample:
                result['tokens'] = np.asarray(sample['tokens'], dtype=np.int32).ravel()
            self.results.append(result)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        count = max(sum(r['count'] for r in results), 1.0)
        metrics = dict(mim_loss=sum(r['loss'] for r in results) / count)
        if 'tokens' in results[0]:
            metrics['mim_acc'] = sum(r['correct'] for r in results) / count
            tokens = np.stack([r['tokens'] for r in results])  # images, positions
            metrics['token_entropy'] = entropy(tokens.ravel())
            metrics['position_entropy'] = position_entropy(tokens)
        return metrics


def entropy(tokens: np.ndarray) -> float:
    """Entropy in nats of the frequencies of integers, 1-D."""
    _, counts = np.unique(tokens, return_counts=True)
    frequencies = counts / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


def position_entropy(tokens: np.ndarray) -> float:
    """The loss of predicting tokens (images, positions) by their frequency at a position in the other images.

    With few images it is mixed with the frequency over all positions, at the weight that gives the lowest loss.
    """
    number, positions = tokens.shape
    here = frequency_of_each(tokens + (tokens.max() + 1) * np.arange(positions))  # different numbers at each position
    anywhere = frequency_of_each(tokens)
    losses = [
        -np.log((here - 1 + weight * anywhere / tokens.size) / (number - 1 + weight)).mean()
        for weight in 4.0 ** np.arange(8)
    ]
    return float(min(entropy(tokens), *losses))


def frequency_of_each(numbers: np.ndarray) -> np.ndarray:
    """For each entry of an array, flattened: how often its value occurs."""
    _, index, counts = np.unique(numbers, return_inverse=True, return_counts=True)
    return counts[index.ravel()]


@METRICS.register_module()
class FeatureMetric(BaseMetric):
    """How much of a teacher's features a pretraining with FeatureTargets predicts.

    Returns:
        mim_loss: mean over all predicted patches.
        explained: the share of the features' variance about their mean, over predicted patches, that is predicted.
        explained_at_position: the same, but about the mean at each position in the other images.
    """

    default_prefix = ''

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Adds up the sums of all images in one row, because their features would fill the memory."""
        for sample in data_samples:
            features = sample['features'].double().numpy()  # h*w, T
            positions = np.asarray(sample.get('positions', np.arange(len(features))))
            number = np.isin(np.arange(len(features)), positions).astype(float)  # h*w: 1 where it is predicted
            sums = dict(number=number, loss=sample['loss'], squared_error=sample['squared_error'])
            sums |= dict(features=number[:, None] * features, squares=number * np.square(features).sum(axis=1))
            so_far = self.results.pop() if self.results else dict.fromkeys(sums, 0.0)
            self.results.append({name: so_far[name] + sums[name] for name in sums})
            self.last = sums

    def evaluate(self, size: int) -> dict[str, float]:
        remainder = size % get_world_size()
        if remainder and get_rank() >= remainder:  # its last image repeats one of another process
            self.results[0] = {name: number - self.last[name] for name, number in self.results[0].items()}
        return super().evaluate(size)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        sums = {name: sum(result[name] for result in results) for name in results[0]}
        number, squares, features = sums['number'], sums['squares'], sums['features']
        mean = features.sum(axis=0) / number.sum()
        about_mean = squares - 2 * features @ mean + number * (mean @ mean)  # at each position
        about_own = squares - np.square(features).sum(axis=1) / np.maximum(number, 1)
        others = np.maximum(number - 1, 1)  # without its own image the mean is number / others times as far
        about_others = np.where(number > 1, about_own * np.square(number / others), about_mean)
        explained, at_position = (float(1 - sums['squared_error'] / each.sum()) for each in (about_mean, about_others))
        loss = sums['loss'] / number.sum()
        return dict(mim_loss=loss, explained=explained, explained_at_position=at_position)


@METRICS.register_module()
class TokenizerMetric(BaseMetric):
    """Errors and codebook usage of a tokenizer in training, DiscreteVAE or VQKD.

    A hard code is the most likely token of a position; a soft code has the probabilities of all.

    Returns (all under `tokenizer/`):
        recon_mae_01, recon_mae_pm1: mean absolute error of the images decoded from hard codes, pixels in [0, 1] and in
            [-1, 1], which is probably the paper's unit.
        recon_mae_01_soft, recon_mae_pm1_soft: both of the images decoded from soft codes.
        codes_used, codes_share: number of different tokens that occur, and their share of the vocabulary.
        perplexity: exp of the entropy of the token frequencies.
        posterior_entropy: mean entropy of the tokens' probabilities at a position, nats.
        feature_distance: for VQKD, 1 - cosine of the features decoded from tokens and the teacher's.
    """

    default_prefix = 'tokenizer'

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            numbers = {name: float(value) for name, value in sample.items() if name != 'tokens'}
            self.results.append(dict(numbers, tokens=sample['tokens'].cpu().numpy().ravel()))

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        names = [name for name in results[0] if name not in ('tokens', 'vocab_size')]
        means = {name: float(np.mean([result[name] for result in results])) for name in names}
        doubled = {name.replace('_01', '_pm1'): 2 * mean for name, mean in means.items() if '_01' in name}
        tokens = np.concatenate([result['tokens'] for result in results])
        codes_used = len(np.unique(tokens))
        return dict(
            means | doubled,
            codes_used=codes_used,
            codes_share=codes_used / results[0]['vocab_size'],
            perplexity=float(np.exp(entropy(tokens))),
        )


@METRICS.register_module()
class LayerAccuracy(BaseMetric):
    """Accuracy of each layer for which a LinearProbe trains a classifier.

    Returns (percent, except best_layer; all under `accuracy/`):
        layer_<i>: of block i, counted from 0.
        best, best_layer: the highest accuracy, slightly optimistic as it is chosen on the same images, and its block.
    """

    default_prefix = 'accuracy'

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            label = int(sample['gt_label'])
            self.results.append({layer: predicted == label for layer, predicted in sample['layer_labels'].items()})

    def compute_metrics(self, results: list[dict[int, bool]]) -> dict[str, float]:
        accuracy = {layer: 100 * sum(result[layer] for result in results) / len(results) for layer in results[0]}
        best = max(accuracy, key=lambda layer: accuracy[layer])
        layers = {f'layer_{layer}': value for layer, value in accuracy.items()}
        return dict(layers, best=accuracy[best], best_layer=best)


@METRICS.register_module()
class Predictions(BaseMetric):
    """Collects predictions in `predicted`, for the process that writes files; returns no number."""

    default_prefix = ''

    def __init__(self, classes: Sequence[str], **kwargs):
        super().__init__(**kwargs)
        self.classes = classes
        self.predicted: list[dict] = []

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            if 'pred_score' in sample:  # a probe of several layers has none
                self.results.append(describe(sample['pred_score'], self.classes, sample.get('img_path')))

    def compute_metrics(self, results: list[dict]) -> dict:
        self.predicted = results
        return {}


@METRICS.register_module()
class CalibratedAccuracy(Accuracy):
    """mmpretrain's Accuracy and the expected calibration error of a classifier, for tests of its robustness.

    The error is the mean distance between confidence and accuracy, over 15 equally wide bins of the confidence.
    Source: Guo et al. (arXiv 1706.04599), equation 3.

    Args:
        present_only: choose among the classes of the tested images alone, as ImageNet-A and ImageNet-R are scored;
            the probabilities then sum to 1 over these.
        kwargs: arguments of Accuracy, such as `topk`.

    Returns (%):
        top1 and the others that `topk` asks for, calibration_error.
    """

    def __init__(self, present_only: bool = False, **kwargs: Any) -> None:
        from torchmetrics.functional.classification import binary_calibration_error  # fails before a test if missing

        super().__init__(**kwargs)
        self.present_only, self.calibration_error = present_only, binary_calibration_error

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        scores = torch.stack([result['pred_score'] for result in results]).float()  # N, classes
        labels = torch.cat([result['gt_label'] for result in results])  # N
        if self.present_only:
            present, labels = labels.unique(return_inverse=True)
            scores = scores[:, present]
            scores = scores / scores.sum(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        rows = [dict(pred_score=score, gt_label=label[None]) for score, label in zip(scores, labels, strict=True)]
        confidence, answer = scores.max(dim=1)
        confidence = confidence.clamp(max=1 - 1e-7)  # 1 would have a bin of its own
        error = self.calibration_error(confidence, (answer == labels).long(), n_bins=15)
        return super().compute_metrics(rows) | dict(calibration_error=100 * error.item())


def describe(scores: Tensor, classes: Sequence[str], path: str | None, top: int = TOP) -> dict:
    """Probabilities (num_classes,) as dict(path, label, name, scores=[[label, probability], ...]), best first."""
    values, labels = (column.tolist() for column in scores.float().cpu().topk(min(top, len(scores))))
    pairs = [list(pair) for pair in zip(labels, values, strict=True)]
    return dict(path=path, label=labels[0], name=classes[labels[0]], scores=pairs)


@HOOKS.register_module()
class KNNHook(Hook):
    """Logs `knn_accuracy` (percent) after each validation: labelled images classified by their nearest neighbours.

    The features are the mean of the patch tokens after two thirds of the blocks, of unmasked images.

    Args:
        train_dataloader, val_dataloader: configs with an ImageFolder whose pipeline crops to one size and ends with
            PackInputs. They are read at every validation, so a subset of the images is enough.
        k: neighbours that vote.
    """

    priority = 'ABOVE_NORMAL'  # before an EMAHook takes the averaged weights, which were validated, out of the model

    def __init__(self, train_dataloader: dict, val_dataloader: dict, k: int = 20):
        self.configs = train_dataloader, val_dataloader
        self.loaders: list[DataLoader] = []
        self.k = k

    def before_train(self, runner: Runner) -> None:
        self.extractor = extractor_of(runner)
        self.loaders = [runner.build_dataloader(config, seed=0) for config in self.configs]
        check_same_classes(*(loader.dataset for loader in self.loaders))

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        if self.loaders:  # in a training
            accuracy = evaluate_images(self.extractor, *self.loaders, k=self.k)['top1']
            log_metric(runner, metrics, 'knn_accuracy', accuracy)


@HOOKS.register_module()
class DenseKNNHook(Hook):
    """Logs `dense_knn_miou` (percent) after each validation: pixels classified by the nearest patches of other images.

    The features are those of KNNHook, for each patch. Every process evaluates all images.

    Args:
        train, val: configs of SegmentationFolders without type and pipeline.
        short_side: of the images in pixels; None: the backbone's image size.
        k: neighbours that vote.
        max_images: images to use of each dataset, evenly spread.
    """

    priority = KNNHook.priority

    def __init__(self, train: dict, val: dict, short_side: int | None = None, k: int = 30, max_images: int = 200):
        self.configs = [dict(config, max_images=max_images) for config in (train, val)]
        self.datasets: list[SegmentationFolder] = []
        self.short_side, self.k = short_side, k

    def before_train(self, runner: Runner) -> None:
        self.extractor = extractor_of(runner, size=self.short_side, whole=True)
        self.datasets = [patch_dataset(self.extractor, **config) for config in self.configs]
        check_same_classes(*self.datasets)

    def after_val_epoch(self, runner: Runner, metrics: dict | None = None) -> None:
        if self.datasets:  # in a training
            miou = evaluate_patches(self.extractor, *self.datasets, k=self.k, max_patches=MAX_PATCHES)['miou']
            log_metric(runner, metrics, 'dense_knn_miou', miou)


def extractor_of(runner: Runner, **options: Any) -> FeatureExtractor:
    model = unwrap(runner)
    if (backbone := backbone_of(model)) is None:
        raise UserError(f'features of a BEiTBackbone cannot be measured: the {type(model).__name__} has none')
    mean_std = preprocessing_of_model(model)
    return FeatureExtractor(backbone, mean=mean_std.get('mean'), std=mean_std.get('std'), **options)


def log_metric(runner: Runner, metrics: dict | None, name: str, value: float) -> None:
    """Adds a number to a validation's metrics, and to its log, which is written later."""
    runner.message_hub.update_scalar(f'val/{name}', value)
    if metrics is not None:
        metrics[name] = value  # CheckpointHook's save_best can follow it
