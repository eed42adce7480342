"""Metrics of pretraining, of a tokenizer and of linear probes, and the predictions of a classifier."""

from collections.abc import Sequence

import numpy as np
from mmengine.evaluator import BaseMetric
from mmengine.logging import print_log
from torch import Tensor

from beit_mm.registry import METRICS

TOP = 5  # classes of a prediction that are kept


@METRICS.register_module()
class MIMMetric(BaseMetric):
    """Loss and accuracy on masked patches, and the entropies that they compete with.

    A model that ignores the image and knows how frequent each visual token is has a loss of `token_entropy`; one that
    also knows the position has `position_entropy`. Only a `mim_loss` below both shows that the surroundings are read.
    With few images `position_entropy` is too low: n images cannot show more than ln n nats.

    Returns (nats, except the accuracy):
        mim_loss: mean loss over all predicted patches (squared error for pixel regression).
        mim_acc: part of the predicted patches whose most likely token is right.
        token_entropy: entropy of the token frequencies over all images and positions.
        position_entropy: mean over positions of the entropy of the frequencies there.
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
            metrics['position_entropy'] = float(np.mean([entropy(column) for column in tokens.T]))
        return metrics


def entropy(tokens: np.ndarray) -> float:
    """Entropy in nats of the frequencies of integers in a 1-D array."""
    _, counts = np.unique(tokens, return_counts=True)
    frequencies = counts / counts.sum()
    return float(-(frequencies * np.log(frequencies)).sum())


@METRICS.register_module()
class TokenizerMetric(BaseMetric):
    """Reconstruction error and codebook usage of a DiscreteVAE over the evaluation set.

    A hard code is the most likely token of a position, as BEiT predicts; a soft code has the probabilities of all.

    Returns (all under `tokenizer/`):
        recon_mae_01: mean absolute error of the images decoded from hard codes, pixels in [0, 1].
        recon_mae_pm1: the same for pixels in [-1, 1], twice as large; probably the paper's unit.
        recon_mae_01_soft, recon_mae_pm1_soft: both of the images decoded from soft codes.
        codes_used: different tokens that occur.
        codes_share: part of the vocabulary that they are.
        perplexity: exp of the entropy of the token frequencies; the vocabulary's size if all are equally frequent.
        posterior_entropy: mean over positions of the entropy of the tokens' probabilities there, nats.
    """

    default_prefix = 'tokenizer'
    means = ('recon_mae_01', 'recon_mae_01_soft', 'posterior_entropy')

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            result = {name: float(sample[name]) for name in self.means}
            result.update(tokens=sample['tokens'].cpu().numpy().ravel(), vocab_size=sample['vocab_size'])
            self.results.append(result)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        means = {name: float(np.mean([result[name] for result in results])) for name in self.means}
        tokens = np.concatenate([result['tokens'] for result in results])
        codes_used = len(np.unique(tokens))
        return dict(
            means,
            recon_mae_pm1=2 * means['recon_mae_01'],
            recon_mae_pm1_soft=2 * means['recon_mae_01_soft'],
            codes_used=codes_used,
            codes_share=codes_used / results[0]['vocab_size'],
            perplexity=float(np.exp(entropy(tokens))),
        )


@METRICS.register_module()
class LayerAccuracy(BaseMetric):
    """Accuracy of each layer that a LinearProbe trains a classifier for, logged as a table.

    Returns (percent, except best_layer; all under `accuracy/`):
        layer_<i>: right predictions from block i, counted from 0.
        best: the highest of them. Choosing the layer on the images that are reported flatters a little.
        best_layer: whose it is.
    """

    default_prefix = 'accuracy'

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            label = int(sample['gt_label'])
            self.results.append({layer: predicted == label for layer, predicted in sample['layer_labels'].items()})

    def compute_metrics(self, results: list[dict[int, bool]]) -> dict[str, float]:
        accuracy = {layer: 100 * sum(result[layer] for result in results) / len(results) for layer in results[0]}
        best = max(accuracy, key=lambda layer: accuracy[layer])
        rows = [f'{layer:5} {value:9.2f}{" *" if layer == best else ""}' for layer, value in accuracy.items()]
        title = f'Linear probes on {len(results)} images (layers from 0, best *)'
        print_log('\n'.join([title, 'layer  accuracy', *rows]), logger='current')
        layers = {f'layer_{layer}': value for layer, value in accuracy.items()}
        return dict(layers, best=accuracy[best], best_layer=best)


@METRICS.register_module()
class Predictions(BaseMetric):
    """Collects predictions and adds no number; the process that writes files finds them in `predicted`."""

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


def describe(scores: Tensor, classes: Sequence[str], path: str | None, top: int = TOP) -> dict:
    """One prediction, probabilities (num_classes,), as plain values.

    Returns:
        dict(path, label=most likely class, name=its name, scores=[[label, probability], ...], best first).
    """
    values, labels = scores.float().cpu().topk(min(top, len(scores)))
    best = int(labels[0])
    pairs = zip(labels.tolist(), values.tolist(), strict=True)
    return dict(path=path, label=best, name=classes[best], scores=[list(pair) for pair in pairs])
