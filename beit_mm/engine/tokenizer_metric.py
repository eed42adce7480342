"""How well a tokenizer's codes carry the images, and how much of its vocabulary is alive."""
from collections.abc import Sequence

import numpy as np
from mmengine.evaluator import BaseMetric

from beit_mm.registry import METRICS

from .mim_metric import entropy


@METRICS.register_module()
class TokenizerMetric(BaseMetric):
    """Reconstruction error and codebook usage over the whole evaluation set.

    `recon_mae_01`  mean absolute error of the images decoded from hard tokens, pixels in [0, 1]
    `recon_mae_pm1` the same for pixels in [-1, 1], twice as large; probably the paper's unit
    `codes_used`    different tokens that occur
    `perplexity`    exp of the entropy of the token frequencies: how many tokens would be in use
                    if all were used equally often

    Takes what `DiscreteVAE` predicts: per image `recon_mae_01`, a scalar, and `tokens`, int (h, w).
    """

    default_prefix = 'tokenizer'

    def process(self, data_batch: dict, data_samples: Sequence[dict]) -> None:
        for sample in data_samples:
            tokens = sample['tokens'].cpu().numpy().ravel()
            self.results.append((float(sample['recon_mae_01']), tokens))

    def compute_metrics(self, results: list[tuple[float, np.ndarray]]) -> dict[str, float]:
        errors, tokens = zip(*results, strict=True)
        tokens = np.concatenate(tokens)
        mae = float(np.mean(errors))
        return dict(recon_mae_01=mae, recon_mae_pm1=2 * mae, codes_used=len(np.unique(tokens)),
                    perplexity=float(np.exp(entropy(tokens))))
