"""Transforms that draw which patches of a sample are masked."""
from mmcv.transforms import BaseTransform

from beit_mm.functional.blockwise_mask import BlockwiseMaskGenerator, check_grid, random_mask
from beit_mm.registry import TRANSFORMS


@TRANSFORMS.register_module()
class BlockwiseMask(BaseTransform):
    """Adds `mask`: bool array (rows, columns), True = masked, made of blocks.

    Args:
        grid: (rows, columns) in patches, image size / patch size.
        num_masked: Patches to mask; see the generator for what it means in each variant.
        min_block: Smallest target area of a block in patches.
        max_block: Largest area of a block in patches; None: `num_masked`.
        min_aspect: Smallest height / width of a block; the largest is its inverse.
        variant: `released` (default), `exact` or `paper`.

    Raises:
        ValueError: The settings can never be met.

    Source: Algorithm 1 of the paper; unilm `beit/masking_generator.py`.
    Differs from mmpretrain's BEiTMaskGenerator in: the last row and column can be masked, it always
    ends.
    """

    def __init__(self, grid: tuple[int, int], num_masked: float, min_block: int = 16,
                 max_block: int | None = None, min_aspect: float = 0.3,
                 variant: str = 'released') -> None:
        self.grid = tuple(grid)
        self.generate = BlockwiseMaskGenerator(
            grid, num_masked, min_block, max_block, min_aspect, variant)

    def transform(self, results: dict) -> dict:
        results['mask'] = self.generate()
        return results


@TRANSFORMS.register_module()
class RandomMask(BaseTransform):
    """Adds `mask`: bool array (rows, columns), True = masked, exactly `num_masked` patches chosen
    uniformly.

    Args:
        grid: (rows, columns) in patches.
        num_masked: Number of masked patches.

    Raises:
        ValueError: The grid has fewer patches.

    Source: ablation "- blockwise masking" of the paper.
    """

    def __init__(self, grid: tuple[int, int], num_masked: int) -> None:
        check_grid(grid, num_masked)
        self.grid = tuple(grid)
        self.num_masked = num_masked

    def transform(self, results: dict) -> dict:
        results['mask'] = random_mask(self.grid, self.num_masked)
        return results
