"""mmpretrain's mixup, cutmix and label smoothing are timm's, which the released fine-tuning uses."""

import pytest
import torch
from mmpretrain.models.losses import LabelSmoothLoss
from mmpretrain.registry import BATCH_AUGMENTS
from timm.data.mixup import Mixup
from timm.loss import SoftTargetCrossEntropy

CLASSES, BATCH = 7, 4
AUGMENTS = [dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]


@pytest.fixture
def fixed_draws(monkeypatch):
    """Lambda 0.75 (half the side of a 32 x 32 image is cut), the box around (row, column), partners in reverse."""

    def fix(row: int, column: int) -> None:
        places = iter([row, column] * 2)
        monkeypatch.setattr('numpy.random.beta', lambda *_, **__: 0.75)
        monkeypatch.setattr('numpy.random.randint', lambda *_, **__: next(places))
        monkeypatch.setattr('torch.randperm', lambda n: torch.arange(n).flip(0))

    return fix


@pytest.mark.parametrize('row, column', [(16, 16), (2, 30)])  # the box inside, and cut by two borders
@pytest.mark.parametrize('augment', AUGMENTS, ids=lambda cfg: cfg['type'])
def test_images_targets_and_loss_are_timms(fixed_draws, augment, row, column):
    images, labels = torch.randn(BATCH, 3, 32, 32), torch.tensor([0, 3, 3, 6])
    logits = torch.randn(BATCH, CLASSES, dtype=torch.float64)
    fixed_draws(row, column)
    alphas = dict(mixup_alpha=0.8) if augment['type'] == 'Mixup' else dict(mixup_alpha=0.0, cutmix_alpha=1.0)
    expected, targets = Mixup(**alphas, label_smoothing=0.1, num_classes=CLASSES)(images.clone(), labels)
    onehot = torch.nn.functional.one_hot(labels, CLASSES)
    mixed, scores = BATCH_AUGMENTS.build(augment)(images.clone(), onehot)
    torch.testing.assert_close(mixed, expected)
    loss = LabelSmoothLoss(0.1, CLASSES, mode='original')
    torch.testing.assert_close(loss.smooth_label(scores), targets)
    torch.testing.assert_close(loss(logits, scores), SoftTargetCrossEntropy()(logits, targets), atol=1e-6, rtol=1e-6)
