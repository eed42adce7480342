"""What a classifier says of each image, gathered over all processes."""
from collections.abc import Sequence

from mmengine.evaluator import BaseMetric
from torch import Tensor

from beit_mm.registry import METRICS

TOP = 5


@METRICS.register_module()
class Predictions(BaseMetric):
    """Collects predictions and adds no number; the process that writes files finds them in `found`.

    Args:
        classes: names of the classes.
    """

    def __init__(self, classes: Sequence[str], **kwargs):
        super().__init__(**kwargs)
        self.classes = classes
        self.found: list[dict] = []

    def process(self, data_batch: object, data_samples: Sequence[dict]) -> None:
        """Keeps each image's best classes."""
        for sample in data_samples:
            if 'pred_score' in sample:  # a probe of several layers has none
                self.results.append(describe(sample['pred_score'], self.classes, sample.get('img_path')))

    def compute_metrics(self, results: list[dict]) -> dict:
        """Keeps the images of all ranks."""
        self.found = results
        return {}


def describe(scores: Tensor, classes: Sequence[str], path: str | None, top: int = TOP) -> dict:
    """One prediction.

    Args:
        scores: probabilities (num_classes,).
        classes: names of the classes.
        path: the image's.
        top: how many classes to keep.

    Returns:
        dict(path, label=most likely class, name=its name, scores=[[label, probability], ...] of the `top` most
        likely, best first), plain values.
    """
    values, labels = scores.float().cpu().topk(min(top, len(scores)))
    best = int(labels[0])
    return dict(path=path, label=best, name=classes[best],
                scores=[list(pair) for pair in zip(labels.tolist(), values.tolist(), strict=True)])
