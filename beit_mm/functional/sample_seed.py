"""Randomness per sample: what is drawn for a image depends on (seed, epoch, index) and on nothing
else.

Workers, ranks, batch size and the order of loading then change nothing, and a resumed run draws
what the uninterrupted one would have drawn.
"""
import hashlib
import random
import struct
from typing import NamedTuple

import numpy as np


class SampleKey(NamedTuple):
    """Names one appearance of one sample.

    Args:
        seed: Seed of the run.
        epoch: Epoch, from 0; stays 0 in validation, so that masks there are fixed.
        index: Position in the dataset.
    """
    seed: int
    epoch: int
    index: int


def sample_seed(key: SampleKey, attempt: int = 0) -> int:
    """64 well mixed bits of a key; neighbouring keys give unrelated numbers.

    Args:
        key: The sample.
        attempt: A further number to tell draws for the same key apart.
    """
    numbers = struct.pack('<4q', *key, attempt)
    return int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), 'little')


def seed_generators(key: SampleKey) -> None:
    """Seed `random` and `numpy.random`, which our transforms and those of the libraries draw from.

    torch's generator is left alone: without workers it is the model's own (drop path).
    """
    seed = sample_seed(key)
    random.seed(seed)
    np.random.seed(seed >> 32)
