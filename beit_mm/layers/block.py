"""Transformer block: pre-norm attention and MLP, stochastic depth, optional LayerScale."""
import torch
import torch.nn as nn
from torch import Tensor
from torchvision.ops import StochasticDepth

from beit_mm.functional.relative_position import Grid
from beit_mm.functional.tokens import take_tokens

from .attention import Attention

NORM_EPS = 1e-6


class MLP(nn.Module):
    """Two linear layers with an exact GELU between them, no dropout."""

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.fc1 = nn.Linear(dims, hidden_dims)
        self.act = nn.GELU()
        self.fc2 = nn.Linear(hidden_dims, dims)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(self.act(self.fc1(x)))


class Block(nn.Module):
    """x + DropPath(gamma_1 * Attention(norm(x))), then the same with the MLP and gamma_2.

    Args:
        dims, num_heads, hidden_dims: width of a token, heads, width inside the MLP.
        drop_path: probability that a sample skips a branch.
        layer_scale_init: start value of gamma_1 and gamma_2; None for no LayerScale.
        table_grid: patch grid (h, w) of the layer's own relative position bias; None for none.

    Source: microsoft/unilm `beit/modeling_finetune.py`.
    """

    def __init__(self,
                 dims: int,
                 num_heads: int,
                 hidden_dims: int,
                 drop_path: float = 0.0,
                 layer_scale_init: float | None = None,
                 table_grid: Grid | None = None):
        super().__init__()
        self.norm1 = nn.LayerNorm(dims, eps=NORM_EPS)
        self.attn = Attention(dims, num_heads, table_grid)
        self.norm2 = nn.LayerNorm(dims, eps=NORM_EPS)
        self.mlp = MLP(dims, hidden_dims)
        self.drop_path = StochasticDepth(drop_path, mode='row')
        self.gamma_1 = self.gamma_2 = None
        if layer_scale_init is not None:
            self.gamma_1 = nn.Parameter(torch.full((dims, ), layer_scale_init))
            self.gamma_2 = nn.Parameter(torch.full((dims, ), layer_scale_init))

    def forward(self,
                x: Tensor,
                grid: Grid,
                shared_bias: Tensor | None = None,
                queries: Tensor | None = None) -> Tensor:
        """Tokens (B, N, C) to (B, N, C), or (B, K, C) at `queries`; see Attention.forward."""
        attended = self.attn(self.norm1(x), grid, shared_bias, queries)
        if queries is not None:
            x = take_tokens(x, queries)
        x = x + self.drop_path(_scale(attended, self.gamma_1))
        return x + self.drop_path(_scale(self.mlp(self.norm2(x)), self.gamma_2))


def _scale(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else x * gamma
