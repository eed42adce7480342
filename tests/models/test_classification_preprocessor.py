"""Normalise, erase, mix: in this order, and only in training."""

import numpy as np
import pytest
import torch
from mmengine.dataset import default_collate, pseudo_collate
from mmengine.registry import TRANSFORMS
from mmpretrain.models import ClsDataPreprocessor

from beit_mm.registry import MODELS

MEAN, STD = [120.0, 110.0, 100.0], [50.0, 60.0, 70.0]
BOX = TOP, LEFT, HEIGHT, WIDTH = (4, 8, 40, 30)
INSIDE = (slice(None), slice(TOP, TOP + HEIGHT), slice(LEFT, LEFT + WIDTH))


def batch(collate=default_collate, boxes=(BOX, None, None, None)) -> dict:
    pack = TRANSFORMS.build(dict(type='mmpretrain.PackInputs', meta_keys=('erase_box',)))
    rng = np.random.default_rng(0)
    samples = [dict(img=rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), gt_label=i) for i in range(len(boxes))]
    pairs = zip(samples, boxes, strict=True)
    return collate([pack(dict(sample, **({} if box is None else dict(erase_box=box)))) for sample, box in pairs])


def build(**kwargs):
    cfg = dict(type='beit_mm.ClassificationDataPreprocessor', mean=MEAN, std=STD, num_classes=4)
    return MODELS.build(dict(cfg, **kwargs))


def normalised() -> torch.Tensor:
    return ClsDataPreprocessor(mean=MEAN, std=STD)(batch())['inputs']


@pytest.mark.parametrize('collate', [default_collate, pseudo_collate])
def test_box_holds_noise_of_unit_variance_and_all_else_stays(collate):
    inputs = build()(batch(collate), training=True)['inputs']
    plain, noise = normalised(), inputs[0][INSIDE].clone()
    assert noise.numel() == 3600 and abs(noise.mean()) < 0.07 and abs(noise.std() - 1) < 0.05  # 4 deviations
    assert all(abs(noise[c].mean()) < 0.12 for c in range(3)) and noise.flatten().unique().numel() > 3500
    inputs[0][INSIDE] = plain[0][INSIDE]
    assert torch.equal(inputs, plain)


def test_evaluation_and_images_without_labels_are_only_normalised():
    augments = dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)])
    data = build(batch_augments=augments)(batch(), training=False)
    assert torch.equal(data['inputs'], normalised())
    assert [sample.gt_label.item() for sample in data['data_samples']] == [0, 1, 2, 3]
    data = build()(dict(inputs=batch()['inputs']), training=True)
    assert torch.equal(data['inputs'], normalised()) and data['data_samples'] is None


def test_mixing_comes_after_erasing(monkeypatch):
    monkeypatch.setattr('numpy.random.beta', lambda *_: 0.75)
    monkeypatch.setattr('torch.randperm', lambda n: torch.arange(n).flip(0))
    torch.manual_seed(3)
    erased = build()(batch(), training=True)['inputs']
    torch.manual_seed(3)
    data = build(batch_augments=dict(augments=dict(type='Mixup', alpha=0.8)))(batch(), training=True)
    torch.testing.assert_close(data['inputs'], 0.75 * erased + 0.25 * erased.flip(0))
    scores = torch.stack([sample.gt_score for sample in data['data_samples']])
    torch.testing.assert_close(scores, 0.75 * torch.eye(4) + 0.25 * torch.eye(4).flip(0))
