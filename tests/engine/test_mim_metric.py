"""The pretraining metric, against sums and entropies written out."""

import math

import numpy as np
import pytest

from beit_mm.engine.metrics import MIMMetric, entropy, position_entropy


def test_entropy_of_known_frequencies():
    assert entropy(np.array([3] * 7)) == 0
    assert entropy(np.arange(8)) == pytest.approx(math.log(8))
    assert entropy(np.array([0, 0, 0, 1])) == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)))


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


def drawn(number: int, positions: int, vocab_size: int, peak: float) -> tuple[np.ndarray, float]:
    """Tokens (number, positions), of which each position prefers another, and the entropy at a position."""
    random = np.random.default_rng(0)
    shares = np.full((positions, vocab_size), (1 - peak) / (vocab_size - 1))
    shares[np.arange(positions), random.permutation(vocab_size)[:positions]] = peak
    tokens = np.stack([random.choice(vocab_size, number, p=each) for each in shares], axis=1)
    return tokens, -(shares[0] * np.log(shares[0])).sum()


def test_many_images_have_the_entropy_of_their_positions():
    tokens, truth = drawn(4000, positions=20, vocab_size=50, peak=0.6)
    assert position_entropy(tokens) == pytest.approx(truth, abs=0.03)
    assert entropy(tokens.ravel()) > truth + 1  # position says much here


def test_few_images_do_not_make_positions_seem_to_say_more_than_they_do():
    tokens, truth = drawn(100, positions=100, vocab_size=1000, peak=0.2)
    counted = np.mean([entropy(column) for column in tokens.T])  # at most ln 100
    assert counted < truth - 1
    assert truth - 0.1 < position_entropy(tokens) < entropy(tokens.ravel())


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
