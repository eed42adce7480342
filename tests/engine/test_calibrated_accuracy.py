"""Accuracy and calibration of a classifier: against plain loops, with all of its classes and with some."""

import pytest
import torch
from mmengine.evaluator import Evaluator
from mmpretrain.structures import DataSample
from torch import Tensor

from beit_mm.registry import METRICS

pytest.importorskip('torchmetrics')
IMAGES, CLASSES, BINS = 400, 10, 15


def calibration_error(probabilities: Tensor, labels: Tensor) -> float:
    """In %, in float64: the mean over images of |accuracy - confidence| of their bin."""
    rows: dict[int, list[tuple[float, bool]]] = {}
    for row, label in zip(probabilities.double(), labels.tolist(), strict=True):
        confidence = row.max().item()
        rows.setdefault(min(int(confidence * BINS), BINS - 1), []).append((confidence, row.argmax().item() == label))
    gaps = [abs(sum(confidence for confidence, _ in row) - sum(hit for _, hit in row)) for row in rows.values()]
    return 100 * sum(gaps) / len(labels)


@pytest.mark.parametrize('present', [range(CLASSES), (1, 4, 5, 8)])
def test_some_classes_are_scored_as_a_classifier_of_these_alone(present):
    torch.manual_seed(0)
    logits = 2 * torch.randn(IMAGES, CLASSES)
    labels = torch.tensor(present)[torch.randint(len(present), (IMAGES,))]
    logits[torch.arange(IMAGES // 2), labels[: IMAGES // 2]] += 3  # half are nearly always right
    samples = [
        DataSample().set_gt_label(label).set_pred_score(row)
        for label, row in zip(labels.tolist(), logits.softmax(dim=1), strict=True)
    ]
    metric = dict(type='beit_mm.CalibratedAccuracy', topk=(1, 2), present_only=True)
    evaluator = Evaluator(METRICS.build(metric))
    evaluator.process(samples)
    found = evaluator.evaluate(IMAGES)
    own = logits[:, list(present)]
    ranked = torch.tensor(present)[own.argsort(dim=1, descending=True)]
    assert found['accuracy/top1'] == pytest.approx(100 * (ranked[:, 0] == labels).double().mean().item(), abs=1e-4)
    assert found['accuracy/top2'] == pytest.approx(
        100 * (ranked[:, :2] == labels[:, None]).any(dim=1).double().mean().item(), abs=1e-4
    )
    relabelled = (torch.tensor(present) == labels[:, None]).int().argmax(dim=1)
    expected = calibration_error(own.softmax(dim=1), relabelled)
    assert found['accuracy/calibration_error'] == pytest.approx(expected, abs=1e-3) and expected > 1


def test_certain_answers_share_the_last_bin_with_nearly_certain_ones():
    """20 answers of one bin: half of them right at 0.95, half wrong at 1."""
    rows = [(1, [0.05, 0.95])] * 10 + [(1, [1.0, 0.0])] * 10
    metric = METRICS.build(dict(type='beit_mm.CalibratedAccuracy'))
    metric.process({}, [DataSample().set_gt_label(y).set_pred_score(torch.tensor(row)).to_dict() for y, row in rows])
    assert metric.evaluate(20)['accuracy/calibration_error'] == pytest.approx(47.5, abs=1e-3)
