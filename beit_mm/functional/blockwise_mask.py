"""Which patches to mask: blockwise masks (Section 2.3 of the paper) and uniformly random ones.

A mask under construction is one Python integer with a bit per patch, row by row: placing a block is
a shift and an `or`, counting its new patches is one `bit_count`. That takes a few microseconds; an
array per block takes ten times as long.
"""
import math
import random

import numpy as np

ATTEMPTS = 10  # tries to place one block; when all fail the mask is finished


class BlockwiseMaskGenerator:
    """Draws masks made of rectangular blocks; calling it returns one bool array (rows, columns),
    True = masked.

    Args:
        grid: (rows, columns) in patches.
        num_masked: Patches to mask: an upper bound for `released`, the exact number for `exact`;
            for `paper` the threshold which the mask is the first to exceed (0.4 * 196 = 78.4 in
            Algorithm 1), an int or float.
        min_block: Smallest target area of a block in patches. While fewer patches remain, the
            bounds change places, so areas between the remainder and `min_block` are drawn, as in
            the released code.
        max_block: Largest area of a block in patches; None: `num_masked`. Not used by `paper`.
        min_aspect: Smallest height / width of a block; the largest is its inverse.
        variant: `released`, `exact` or `paper`, see "Differs".

    Raises:
        ValueError: The settings can never be met, or a number is out of its range.

    Source: Algorithm 1 of the paper; unilm `beit/masking_generator.py`.

    Differs: `released` has the law of the released code, which made the paper's numbers:
    log-uniform aspect, whole patches, blocks smaller than the grid in both directions, a block
    counts only if it brings between 1 and the remaining number of new patches, 10 tries a block,
    then stop (74.47 of 75 patches on average at 14x14). `exact` fills what an early stop left over
    with single random patches. `paper` is Algorithm 1 to the letter: uniform aspect, real-valued
    corners, no test, so it overshoots (82.5 patches on average) and hardly ever masks the first row
    and column; only it stops after 10 blocks in a row without a new patch, so that it always ends.
    """

    def __init__(self, grid: tuple[int, int], num_masked: float, min_block: int = 16,
                 max_block: int | None = None, min_aspect: float = 0.3,
                 variant: str = 'released') -> None:
        check_grid(grid, num_masked)
        if variant not in ('released', 'exact', 'paper'):
            raise ValueError(f"variant is {variant!r}; choose 'released', 'exact' or 'paper'")
        if variant != 'paper' and num_masked != int(num_masked):
            raise ValueError(f"num_masked is {num_masked}; only variant='paper' takes a fraction")
        if min_block < 1 or (max_block is not None and max_block < 1):
            raise ValueError(
                f'min_block is {min_block}, max_block {max_block}; a block has at least 1 patch')
        if not 0 < min_aspect <= 1:
            raise ValueError(f'min_aspect is {min_aspect}; it must be above 0 and at most 1')
        self.height, self.width = grid
        self.num_masked = num_masked
        self.min_block = min_block
        self.max_block = num_masked if max_block is None else min(max_block, num_masked)
        self.min_aspect = min_aspect
        self.log_aspect = -math.log(min_aspect)  # log aspects lie within +- log_aspect
        self.variant = variant
        row = [(1 << w) - 1 for w in range(self.width + 1)]
        # blocks[h][w]: the block of h x w patches in the upper left corner
        self.blocks = [[sum(bits << i * self.width for i in range(h)) for bits in row]
                       for h in range(self.height + 1)]
        if variant != 'paper' and not self._some_block_fits():
            raise ValueError(
                f'no block of {min_block} to {self.max_block} patches, {min_aspect:.3g} to '
                f'{1 / min_aspect:.3g} times as high as wide, is smaller than the {self.height}x'
                f'{self.width} grid in both directions; choose another min_block or grid')

    def __call__(self) -> np.ndarray:
        if self.variant == 'paper':
            mask = self._draw_paper()
        else:
            mask = self._draw_released()
            if self.variant == 'exact':
                mask = self._top_up(mask)
        cells = self.height * self.width
        octets = np.frombuffer(mask.to_bytes((cells + 7) // 8, 'little'), np.uint8)
        bits = np.unpackbits(octets, count=cells, bitorder='little')
        return bits.view(np.bool_).reshape(self.height, self.width)

    def _draw_released(self) -> int:
        mask, remaining = 0, int(self.num_masked)
        while remaining > 0:
            limit = min(remaining, self.max_block)
            grown = self._place_block(mask, limit)
            if grown == mask:
                break
            remaining -= (grown ^ mask).bit_count()
            mask = grown
        return mask

    def _place_block(self, mask: int, limit: int) -> int:
        """The mask with one more block of 1 to `limit` new patches, or the same mask when 10 tries
        fail."""
        draw = random.random
        for _ in range(ATTEMPTS):
            area = self.min_block + (limit - self.min_block) * draw()
            aspect = math.exp(self.log_aspect * (2 * draw() - 1))
            h = round(math.sqrt(area * aspect))
            w = round(math.sqrt(area / aspect))
            if h < self.height and w < self.width:
                top = int(draw() * (self.height - h + 1))
                left = int(draw() * (self.width - w + 1))
                grown = mask | self.blocks[h][w] << top * self.width + left
                if 0 < (grown ^ mask).bit_count() <= limit:
                    return grown
        return mask

    def _top_up(self, mask: int) -> int:
        missing = int(self.num_masked) - mask.bit_count()
        if missing:
            free = [i for i in range(self.height * self.width) if not mask >> i & 1]
            for i in random.sample(free, missing):
                mask |= 1 << i
        return mask

    def _draw_paper(self) -> int:
        mask, in_vain = 0, 0
        while mask.bit_count() <= self.num_masked and in_vain < ATTEMPTS:
            area = random.uniform(self.min_block, self.num_masked - mask.bit_count())
            aspect = random.uniform(self.min_aspect, 1 / self.min_aspect)
            rows = self._cells(math.sqrt(area * aspect), self.height)
            columns = self._cells(math.sqrt(area / aspect), self.width)
            block = self.blocks[len(rows)][len(columns)] << rows.start * self.width + columns.start
            in_vain = in_vain + 1 if mask | block == mask else 0
            mask |= block
        return mask

    @staticmethod
    def _cells(extent: float, size: int) -> range:
        """The whole numbers i of the grid with t <= i < t + extent for a random real t."""
        start = random.uniform(0, size - extent)
        first = min(max(0, math.ceil(start)), size)
        return range(first, max(first, min(size, math.ceil(start + extent))))

    def _some_block_fits(self) -> bool:
        """Whether the first block can be placed at all.

        With x and y the unrounded height and width, h x w patches come out of x in h +- 1/2, y in w
        +- 1/2, and can be drawn if that square meets low <= xy <= high, 1/a <= x/y <= a. In
        logarithms both are convex with sides along x, y, x + y and x - y only: they meet if their
        extents along these four do.
        """
        low, high = sorted((math.log(self.min_block), math.log(self.max_block)))
        a = self.log_aspect
        for h in range(1, self.height):
            for w in range(1, min(self.width, int(self.max_block // h) + 1)):
                x0, x1 = math.log(h - 0.5), math.log(h + 0.5)
                y0, y1 = math.log(w - 0.5), math.log(w + 0.5)
                if (x0 + y0 < high and low < x1 + y1 and x0 - y1 < a and -a < x1 - y0
                        and max(x0, y0) < (high + a) / 2 and (low - a) / 2 < min(x1, y1)):
                    return True
        return False


def random_mask(grid: tuple[int, int], num_masked: int) -> np.ndarray:
    """A mask of exactly `num_masked` patches, every set of patches equally likely.

    Args:
        grid: (rows, columns) in patches.
        num_masked: Number of masked patches.

    Returns:
        Bool array (rows, columns), True = masked.

    Source: ablation "- blockwise masking" of the paper.
    """
    height, width = grid
    mask = np.zeros(height * width, np.bool_)
    mask[random.sample(range(height * width), num_masked)] = True
    return mask.reshape(height, width)


def check_grid(grid: tuple[int, int], num_masked: float) -> None:
    """Refuse grids and numbers of masked patches that no mask can have."""
    if len(grid) != 2 or any(n != int(n) or n < 1 for n in grid):
        raise ValueError(f'grid is {grid}; expected (rows, columns) in patches, as in (14, 14)')
    cells = grid[0] * grid[1]
    if not 0 < num_masked <= cells:
        raise ValueError(
            f'num_masked is {num_masked}; a {grid[0]}x{grid[1]} grid can mask 1 to {cells} patches')
