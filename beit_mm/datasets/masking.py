"""Blockwise masks (the released code's, or the paper's Algorithm 1, section 2.3) and uniformly random ones.

While a mask is drawn, it is a Python integer with one bit for each patch, row by row: ten times as fast as an array.
"""

import math
import operator
import random
from collections.abc import Callable

import numpy as np
from mmcv.transforms import BaseTransform

from beit_mm.errors import UserError, check_choice
from beit_mm.registry import TRANSFORMS

MIN_ASPECT = 0.3  # smallest height / width of a block; the largest is its inverse
LOG_ASPECT = -math.log(MIN_ASPECT)  # log aspects lie within +- LOG_ASPECT
ATTEMPTS = 10  # tries to place one block; if all fail, the mask is finished


@TRANSFORMS.register_module()
class BlockwiseMask(BaseTransform):
    """Adds `mask`, bool array (rows, columns), True = masked, made of rectangular blocks, and its limit `num_slots`.

    `released` draws like the released code: log-uniform aspect, whole patches, blocks smaller than the grid in both
    directions. A block must add at least one patch and no more than remain; after 10 failed tries the mask stays as it
    is (74.47 of 75 patches on average at 14 x 14). `exact` then adds single random patches. `paper` is Algorithm 1 to
    the letter: uniform aspect, real-valued corners, no limit, so it overshoots (82.5 patches on average). It also ends
    after 10 blocks without a new patch.

    Args:
        grid: (rows, columns) in patches.
        num_masked: patches to mask: an upper bound for `released`, the exact number for `exact`, exceeded by `paper`
            (a float there: 0.4 * 196 = 78.4 in Algorithm 1).
        min_block: smallest area of a block in patches, before rounding.
        variant: 'released', 'exact' or 'paper'.

    Source: Algorithm 1 of the paper; microsoft/unilm `beit/masking_generator.py`.
    """

    def __init__(self, grid: tuple[int, int], num_masked: float, min_block: int = 16, variant: str = 'released'):
        check_choice('variant', variant, ('released', 'exact', 'paper'))
        check_number(num_masked, grid, whole=variant != 'paper')
        self.grid = self.height, self.width = tuple(map(operator.index, grid))  # not NumPy's, which overflow
        self.num_masked, self.min_block, self.variant = num_masked, min_block, variant
        rows = [(1 << w) - 1 for w in range(self.width + 1)]  # the first w patches of the first row
        columns = [sum(1 << i * self.width for i in range(h)) for h in range(self.height + 1)]  # of the first column
        self.blocks = [[column * row for row in rows] for column in columns]  # [h][w]: in the upper left corner
        draw = random.Random(0).random  # its own generator, so that the samples' generator does not advance
        if variant != 'paper' and not any(self._place_block(0, int(num_masked), draw) for _ in range(100)):
            raise UserError(f'no block of {min_block} to {num_masked} patches fits in grid={grid}; lower min_block')

    def transform(self, results: dict) -> dict:
        results['mask'] = self.draw()
        results['num_slots'] = None if self.variant == 'paper' else int(self.num_masked)  # 'paper' has no limit
        return results

    def draw(self) -> np.ndarray:
        """Draws a mask: bool (rows, columns), True = masked."""
        mask = self._draw_paper() if self.variant == 'paper' else self._draw_released()
        cells = self.height * self.width
        octets = np.frombuffer(mask.to_bytes((cells + 7) // 8, 'little'), np.uint8)
        bits = np.unpackbits(octets, count=cells, bitorder='little')
        return bits.view(np.bool_).reshape(self.grid)

    def _draw_released(self) -> int:
        mask, total = 0, int(self.num_masked)
        while mask.bit_count() < total:
            grown = self._place_block(mask, total - mask.bit_count())
            if grown == mask:
                break
            mask = grown
        if self.variant == 'exact' and mask.bit_count() < total:
            free = [i for i in range(self.height * self.width) if not mask >> i & 1]
            for i in random.sample(free, total - mask.bit_count()):
                mask |= 1 << i
        return mask

    def _place_block(self, mask: int, limit: int, draw: Callable[[], float] = random.random) -> int:
        """Returns the mask with a block that adds 1 to `limit` patches, or the same mask if all tries fail."""
        for _ in range(ATTEMPTS):
            area = self.min_block + (limit - self.min_block) * draw()
            aspect = math.exp(LOG_ASPECT * (2 * draw() - 1))
            h = round(math.sqrt(area * aspect))
            w = round(math.sqrt(area / aspect))
            if h < self.height and w < self.width:
                top = int(draw() * (self.height - h + 1))
                left = int(draw() * (self.width - w + 1))
                grown = mask | self.blocks[h][w] << top * self.width + left
                if 0 < (grown ^ mask).bit_count() <= limit:
                    return grown
        return mask

    def _draw_paper(self) -> int:
        mask, failures = 0, 0
        while mask.bit_count() <= self.num_masked and failures < ATTEMPTS:
            area = random.uniform(self.min_block, self.num_masked - mask.bit_count())
            aspect = random.uniform(MIN_ASPECT, 1 / MIN_ASPECT)
            rows = self._covered_cells(math.sqrt(area * aspect), self.height)
            columns = self._covered_cells(math.sqrt(area / aspect), self.width)
            block = self.blocks[len(rows)][len(columns)] << rows.start * self.width + columns.start
            failures = failures + 1 if mask | block == mask else 0
            mask |= block
        return mask

    @staticmethod
    def _covered_cells(extent: float, size: int) -> range:
        """Cells i of the grid with t <= i < t + extent, for a random real t."""
        start = random.uniform(0, size - extent)
        first = min(max(0, math.ceil(start)), size)
        return range(first, max(first, min(size, math.ceil(start + extent))))


@TRANSFORMS.register_module()
class RandomMask(BaseTransform):
    """Adds `mask` like BlockwiseMask, but every set of `num_masked` patches of the `grid` is equally likely.

    Source: ablation "- blockwise masking" of the paper.
    """

    def __init__(self, grid: tuple[int, int], num_masked: int) -> None:
        check_number(num_masked, grid)
        self.grid = tuple(grid)
        self.num_masked = int(num_masked)

    def transform(self, results: dict) -> dict:
        mask = np.zeros(self.grid, np.bool_)
        mask.flat[random.sample(range(mask.size), self.num_masked)] = True
        results['mask'] = mask
        results['num_slots'] = self.num_masked
        return results


def masked_positions(mask: np.ndarray, num_slots: int) -> np.ndarray:
    """Row-major indices of the masked patches, padded with -1 to one length for compiled code: int64 (num_slots,)."""
    positions = np.full(num_slots, -1)
    masked = np.flatnonzero(mask)
    positions[: len(masked)] = masked
    return positions


def check_number(num_masked: float, grid: tuple[int, int], whole: bool = True) -> None:
    if not 1 <= num_masked <= math.prod(grid) or (whole and num_masked != int(num_masked)):
        kind = 'a whole number' if whole else 'a number'
        raise UserError(f'num_masked is {num_masked}; expected {kind} from 1 to {math.prod(grid)}, the patches')
