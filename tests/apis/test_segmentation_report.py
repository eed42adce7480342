"""Of segmentors: what position and colour give away, mIoU and its standard error."""

import numpy as np
import pytest
import torch
from mmseg.evaluation import IoUMetric

from beit_mm.apis import segmentation_report
from beit_mm.features.evaluation import confusion, mean_iou


def test_halves_are_known_by_their_position_and_a_ball_by_its_colour():
    """Left and right half, on which lies a blue ball; a row without a label."""
    (rows, columns), colours = np.indices((60, 80)), np.array([[90] * 3, [90] * 3, [90, 90, 250]], np.uint8)
    baseline, counts = segmentation_report.PositionAndColour(3), dict[str, torch.Tensor]()
    for index in range(9):
        top, left = np.random.default_rng(index).integers(15, 45, 2)
        labels = np.where((rows - top) ** 2 + (columns - left) ** 2 < 100, 2, columns // 40)
        image = colours[labels]
        labels[0] = 255
        if index < 6:
            baseline.learn(image, labels)
            continue
        for name, found in baseline.answers(image, labels.shape).items():
            counts[name] = counts.get(name, 0) + confusion(torch.from_numpy(found), torch.from_numpy(labels), 3)
    figures = {name: 100 * mean_iou(count) for name, count in counts.items()}
    # right is half of what is labelled, and nothing else is predicted
    assert figures['most_frequent'] == pytest.approx(100 / 3 / 2, abs=1)
    assert figures['position_colour'] > 90


def test_a_class_that_was_never_seen_is_never_the_answer():
    random = np.random.default_rng(0)
    three, four = (segmentation_report.PositionAndColour(number) for number in (3, 4))
    for _ in range(4):
        image = random.integers(0, 256, (30, 40, 3)).astype(np.uint8)
        for baseline in (three, four):
            baseline.learn(image, image[..., 0] // 86)
    image = random.integers(0, 256, (30, 40, 3)).astype(np.uint8)  # with colours that were never seen either
    for name, labels in three.answers(image, (30, 40)).items():
        assert np.array_equal(labels, four.answers(image, (30, 40))[name])


def test_miou_is_mmsegs_and_its_error_that_of_the_delta_method():
    random, areas = np.random.default_rng(0), []
    for share in np.arange(30) / 30:
        labels, truth = random.integers(3, size=(2, 8, 9))
        labels = torch.from_numpy(np.where(random.random((8, 9)) < share, truth, labels))
        areas.append(IoUMetric.intersect_and_union(labels, torch.from_numpy(truth), 4, 255)[:2])
    hits, unions = (torch.stack(each).double() for each in zip(*areas, strict=True))  # class 3 is nowhere
    tested = segmentation_report.Tested(None, [*range(30)], dict(mIoU=hits), dict(mIoU=unions), hits.sum(0))
    iou = hits.sum(0) / unions.sum(0)
    assert tested.ious('mIoU').nanmean().item() == pytest.approx(100 * iou[:3].mean().item())
    drawn = torch.from_numpy(random.multinomial(30, [1 / 30] * 30, size=500)).double()
    parts = ((hits - iou * unions) / unions.mean(0))[:, :3].mean(1)  # a ratio of sums over images
    assert tested.ious('mIoU', drawn).nanmean(1).std().item() == pytest.approx(
        100 * parts.std().item() / 30**0.5, rel=0.2
    )
