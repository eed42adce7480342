"""What a step draws follows from the run's seed, the rank and the step's number, and from nothing else."""

import random
from types import SimpleNamespace

import numpy as np
import torch

from beit_mm.engine.steps import StepSeedHook


def draws_of(seed: int, rank: int, step: int, monkeypatch) -> tuple:
    """What each generator gives in a step, whatever was drawn before."""
    random.random(), np.random.rand(step + 1), torch.rand(rank + 1)
    monkeypatch.setattr('beit_mm.engine.steps.get_rank', lambda: rank)
    StepSeedHook().before_train_iter(SimpleNamespace(seed=seed, iter=step), 0)
    return random.random(), np.random.rand(), torch.rand((), dtype=torch.float64).item()


def test_all_steps_of_all_ranks_and_runs_draw_their_own(monkeypatch):
    places = [(seed, rank, step) for seed in (0, 1) for rank in range(4) for step in range(50)]
    drawn = [draws_of(*place, monkeypatch) for place in places]
    for numbers in zip(*drawn, strict=True):
        assert len(set(numbers)) == len(places)
        # first draws of near places are as far from each other as any: uniform
        counts = np.histogram(numbers, bins=10, range=(0, 1))[0]
        assert ((counts - 40) ** 2 / 40).sum() < 30  # chi square of 9 degrees of freedom: 1 of 2000 is above
    assert drawn == [draws_of(*place, monkeypatch) for place in places]
