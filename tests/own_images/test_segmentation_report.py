"""Of segmentors: what position and colour give away, mIoU and its standard error."""

import numpy as np
import pytest
import torch
from mmseg.evaluation import IoUMetric

from beit_mm.features.evaluation import class_ious, confusion, hits_and_unions
from beit_mm.own_images import segmentation


def test_halves_are_known_by_their_position_and_a_ball_by_its_colour():
    """Left and right half, on which lies a blue ball; a row without a label."""
    (rows, columns), colours = np.indices((60, 80)), np.array([[90] * 3, [90] * 3, [90, 90, 250]], np.uint8)
    baseline, counts = segmentation.PositionAndColour(3), torch.zeros(3, 3)
    for index in range(9):
        top, left = np.random.default_rng(index).integers(15, 45, 2)
        labels = np.where((rows - top) ** 2 + (columns - left) ** 2 < 100, 2, columns // 40)
        image = colours[labels]
        labels[0] = 255
        if index < 6:
            baseline.learn(image, labels)
            continue
        found = baseline.answer(image, labels.shape)
        counts = counts + confusion(torch.from_numpy(found), torch.from_numpy(labels), 3)
    assert class_ious(*hits_and_unions(counts)).nanmean() > 0.9 and baseline.images == 6


def test_a_class_that_was_never_seen_is_never_the_answer():
    random = np.random.default_rng(0)
    three, four = (segmentation.PositionAndColour(number) for number in (3, 4))
    for _ in range(4):
        image = random.integers(0, 256, (30, 40, 3)).astype(np.uint8)
        for baseline in (three, four):
            baseline.learn(image, image[..., 0] // 86)
    image = random.integers(0, 256, (30, 40, 3)).astype(np.uint8)  # with colours that were never seen either
    assert np.array_equal(three.answer(image, (30, 40)), four.answer(image, (30, 40)))


def test_miou_is_mmsegs_and_its_error_that_of_the_delta_method():
    random, areas = np.random.default_rng(0), []
    for share in np.arange(30) / 30:
        labels, truth = random.integers(3, size=(2, 8, 9))
        labels = torch.from_numpy(np.where(random.random((8, 9)) < share, truth, labels))
        areas.append(IoUMetric.intersect_and_union(labels, torch.from_numpy(truth), 4, 255)[:2])
    hits, unions = (torch.stack(each).double() for each in zip(*areas, strict=True))  # class 3 is nowhere
    tested = segmentation.Tested(None, [*range(30)], dict(mIoU=hits), dict(mIoU=unions), {}, None)
    iou = hits.sum(0) / unions.sum(0)
    assert tested.ious('mIoU').nanmean().item() == pytest.approx(100 * iou[:3].mean().item())
    drawn = torch.from_numpy(random.multinomial(30, [1 / 30] * 30, size=500)).double()
    parts = ((hits - iou * unions) / unions.mean(0))[:, :3].mean(1)  # a ratio of sums over images
    assert tested.ious('mIoU', drawn).nanmean(1).std().item() == pytest.approx(
        100 * parts.std().item() / 30**0.5, rel=0.2
    )
    tested.hits['other'], tested.unions['other'] = hits / 2, unions
    gain = tested.metric('mIoU', 'other')
    assert gain.value == pytest.approx(50 * iou[:3].mean().item())
    assert gain.error == pytest.approx(tested.metric('mIoU').error / 2)  # both fall and rise together


def test_overlays_of_large_images_are_small_before_they_are_floats(tmp_path, monkeypatch):
    """Four megapixels, of which a picture shows 160 pixels: all of it, in the colours of each half's class."""
    truth = np.zeros((1000, 4000), np.uint8)
    truth[:, 2000:], truth[:250] = 1, 255
    sample = dict(img=np.full((*truth.shape, 3), 100, np.uint8), gt_seg_map=truth, img_path='a.png')

    def segmentor(path: str) -> list[dict]:
        return [dict(labels=1 - (truth == 1).astype(np.uint8))]

    segmentor.num_classes, segmentor.classes, segmentor.palette = 2, 'ab', [[255, 0, 0], [0, 0, 255]]
    drawn, draw = [], segmentation.sheet
    monkeypatch.setattr(segmentation, 'sheet', lambda rows, side: draw(drawn.extend(rows) or rows, side))
    ones = dict(mIoU=torch.ones(1, 2))
    tested = segmentation.Tested([sample], [0], ones, ones, {}, None)
    segmentation.draw_overlays(segmentor, tested, tmp_path / 'a.png')
    ((_, image), (_, right), (_, predicted)) = drawn[0]
    height, width = image.shape[1:]
    assert 160 <= width <= 640 and width == 4 * height
    left, middle, right_half = width // 4, height // 2, 3 * width // 4
    # the row at the top has no label; red and blue lie over gray
    assert torch.allclose(right[:, height // 8, left], image[:, height // 8, left], atol=0.02)
    assert right[:, middle, left].argmax() == predicted[:, middle, right_half].argmax() == 0
    assert right[:, middle, right_half].argmax() == predicted[:, middle, left].argmax() == 2
