"""Processes draw different noise; the first draws what a single process draws."""

import random
from types import SimpleNamespace

import numpy as np
import torch
from mmengine.runner import set_random_seed

from beit_mm.engine.hooks import RankSeedHook


def draws_of(rank: int, monkeypatch) -> tuple:
    """What a process draws after mmengine has seeded it and the hook has run."""
    set_random_seed(5)  # as mmengine does in every process
    monkeypatch.setattr('beit_mm.engine.hooks.get_rank', lambda: rank)
    RankSeedHook().before_train(SimpleNamespace(seed=5))
    return random.random(), np.random.beta(0.8, 0.8), torch.rand(()).item()


def test_every_rank_draws_its_own_and_the_first_is_undisturbed(monkeypatch):
    ranks = [draws_of(rank, monkeypatch) for rank in range(4)]
    for generator in zip(*ranks, strict=True):
        assert len(set(generator)) == 4
    assert ranks == [draws_of(rank, monkeypatch) for rank in range(4)]
    set_random_seed(5)
    assert ranks[0] == (random.random(), np.random.beta(0.8, 0.8), torch.rand(()).item())
