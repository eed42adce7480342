"""Runs a script with the residual stream of all blocks in bfloat16; autocast has it in float32.

    python tools/dev/gpu/bf16_residual.py tools/dev/benchmarks/step.py pretrain --batch 256 --compile --only beit_mm

Half as much is kept for the backward pass and read by each normalisation; sums of small and large numbers are rounded.
"""

import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from beit_mm.models.layers import DropPath
from beit_mm.models.vit import Block

block, drop_path = Block.forward, DropPath.forward


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16() if torch.is_autocast_enabled(x.device.type) else x


def block_of_rounded(self: Block, x: Tensor, *args: Any, **options: Any) -> Tensor:
    """Block.forward, whose two sums are of bfloat16 because x and the branches, which all pass a DropPath, are."""
    return block(self, rounded(x), *args, **options)


def rounded_branch(self: DropPath, branch: Tensor) -> Tensor:
    return drop_path(self, rounded(branch))


if __name__ == '__main__':
    import bf16_residual  # torch.compile looks names up in a function's module, and `__main__` becomes the script

    Block.forward, DropPath.forward = bf16_residual.block_of_rounded, bf16_residual.rounded_branch
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name='__main__')
