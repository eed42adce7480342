"""How well masked patches of held-out images are predicted, beside what knowing nothing would give."""
from collections.abc import Sequence

import numpy as np
from mmengine.evaluator import BaseMetric

from beit_mm.registry import METRICS


@METRICS.register_module()
class MIMMetric(BaseMetric):
    """Loss and accuracy on masked patches, and the entropies that they compete with.

    A model that ignores the image and knows how frequent each visual token is has a loss of
    `token_entropy`; one that also knows the position has `position_entropy`. Only a `mim_loss` below
    both shows that the surroundings are read. With few images `position_entropy` is too low
    (n images cannot show more than ln n nats), which makes the comparison harder, never easier.

    Returns (nats, except the accuracy):
        mim_loss: mean loss over all predicted patches (squared error for pixel regression).
        mim_acc: share of the predicted patches whose most likely token is right.
        token_entropy: entropy of the token frequencies over all images and positions.
        position_entropy: mean over positions of the entropy of the frequencies there.
    """

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        """Keeps the sums and tokens of each image."""
        for sample in data_samples:
            tokens = sample.get('tokens')
            kept = {key: sample[key] for key in ('loss', 'correct', 'count') if key in sample}
            if tokens is not None:
                kept['tokens'] = np.asarray(tokens, dtype=np.int32).ravel()
            self.results.append(kept)

    def compute_metrics(self, results: list[dict]) -> dict[str, float]:
        """Joins the images of all ranks."""
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
    share = counts / counts.sum()
    return float(-(share * np.log(share)).sum())
