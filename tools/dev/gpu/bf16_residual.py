"""Runs a script with the residual stream of all blocks in bfloat16; autocast has it in float32.

    python tools/dev/gpu/bf16_residual.py tools/dev/benchmarks/step.py pretrain --batch 256 --compile --only beit_mm

Half as much is kept for the backward pass and read by each normalisation; sums of small and large numbers are rounded.
"""

import runpy
import sys
from pathlib import Path

import torch
from torch import Tensor

from beit_mm.models.vit import Block
from beit_mm.positions import Grid, take_tokens


def forward(
    self: Block,
    x: Tensor,
    grid: Grid,
    shared_bias: Tensor | None = None,
    queries: Tensor | None = None,
    hidden: Tensor | None = None,
) -> Tensor:
    """As Block.forward; both sums are rounded."""
    attended = self.attn(self.norm1(x), grid, shared_bias, queries, hidden)  # B, N or K, C
    x = x if queries is None else take_tokens(x, queries)
    x = rounded(x + self.drop_path(attended if self.gamma_1 is None else attended * self.gamma_1))
    mixed = self.mlp(self.norm2(x))  # B, N or K, C
    return rounded(x + self.drop_path(mixed if self.gamma_2 is None else mixed * self.gamma_2))


def rounded(x: Tensor) -> Tensor:
    return x.bfloat16() if torch.is_autocast_enabled(x.device.type) else x


if __name__ == '__main__':
    import bf16_residual  # torch.compile looks names up in a function's module, and `__main__` becomes the script

    Block.forward = bf16_residual.forward
    script, sys.argv = sys.argv[1], sys.argv[1:]
    sys.path.insert(0, str(Path(script).resolve().parent))
    runpy.run_path(script, run_name='__main__')
