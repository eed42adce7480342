"""The pretraining metric, against sums and entropies written out."""

import math

import numpy as np
import pytest

from beit_mm.engine.metrics import MIMMetric, entropy, position_entropy


def test_means_run_over_patches_not_images():
    metric = MIMMetric()
    metric.process({}, [dict(loss=10.0, correct=1.0, count=4.0, tokens=np.array([0, 1]))])
    metric.process({}, [dict(loss=2.0, correct=1.0, count=1.0, tokens=np.array([0, 2]))])
    result = metric.evaluate(2)
    assert result['mim_loss'] == pytest.approx(12 / 5)
    assert result['mim_acc'] == pytest.approx(2 / 5)
    assert result['token_entropy'] == pytest.approx(-(0.5 * math.log(0.5) + 2 * 0.25 * math.log(0.25)))
    # two images say nothing of positions: what one shows at a position the other does not
    assert result['position_entropy'] <= result['token_entropy']


def test_a_token_is_guessed_by_the_other_images():
    tokens = np.random.default_rng(0).integers(0, 5, size=(12, 3))
    losses = []
    for weight in (1, 4, 16, 64, 256, 1024, 4096, 16384):
        loss = 0.0
        for image, position in np.ndindex(12, 3):
            token = tokens[image, position]
            others = np.delete(tokens[:, position], image)
            guess = ((others == token).sum() + weight * (tokens == token).mean()) / (11 + weight)
            loss -= math.log(guess) / 36
        losses.append(loss)
    assert position_entropy(tokens) == pytest.approx(min(*losses, entropy(tokens.ravel())))


def test_pixel_regression_has_a_loss_alone():
    metric = MIMMetric()
    metric.process({}, [dict(loss=3.0, count=2.0)])
    assert metric.evaluate(1) == dict(mim_loss=1.5)
