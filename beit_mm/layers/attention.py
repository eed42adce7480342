"""Multi-head self-attention with an additive relative position bias."""
from functools import partial

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from beit_mm.functional.relative_position import (
    Grid,
    bias_from_table,
    num_relative_positions,
)
from beit_mm.functional.tokens import take_tokens

from .derived import DerivedTensor


def _read_table(table_grid: Grid, table: Tensor, grid: Grid) -> Tensor:
    return bias_from_table(table, table_grid, grid)


class RelativePositionBias(nn.Module):
    """A bias table that all blocks share, read at the grid of the input.

    Args:
        grid: patch grid (h, w) that the table is made for.
        num_heads: attention heads.

    Source: paper appendix A; microsoft/unilm `beit/modeling_pretrain.py`. Starts at zero.
    """

    def __init__(self, grid: Grid, num_heads: int):
        super().__init__()
        rows = num_relative_positions(grid)
        self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, num_heads))
        self.read = DerivedTensor(partial(_read_table, grid))

    def forward(self, grid: Grid) -> Tensor:
        """Bias (1, heads, 1+h*w, 1+h*w) of a patch grid (h, w)."""
        return self.read(self.relative_position_bias_table, grid)


class Attention(nn.Module):
    """Self-attention over class token and patches; bias for query and value, none for key.

    Args:
        dims: width of a token.
        num_heads: attention heads.
        table_grid: patch grid (h, w) of a bias table of this layer's own; None for no table.

    Source: microsoft/unilm `beit/modeling_finetune.py`.
    Differs from it in: scaled_dot_product_attention takes the bias as an additive mask, and queries
    can be restricted to the tokens whose output is wanted.
    """

    def __init__(self, dims: int, num_heads: int, table_grid: Grid | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dims, 3 * dims, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dims))
        self.v_bias = nn.Parameter(torch.zeros(dims))
        self.proj = nn.Linear(dims, dims)
        self.relative_position_bias_table = None
        if table_grid is not None:
            rows = num_relative_positions(table_grid)
            self.relative_position_bias_table = nn.Parameter(torch.zeros(rows, num_heads))
            self.read = DerivedTensor(partial(_read_table, table_grid))

    def forward(self,
                x: Tensor,
                grid: Grid,
                shared_bias: Tensor | None = None,
                queries: Tensor | None = None) -> Tensor:
        """Attends from the queries to all tokens.

        Args:
            x: (B, N, C) normalised tokens, class token first.
            grid: patch grid (h, w), N = 1 + h*w.
            shared_bias: (1, heads, N, N) bias that all blocks share.
            queries: int64 (B, K) indices of the tokens whose output is wanted; None for all.

        Returns:
            (B, K, C), K = N without queries.
        """
        q, k, v = self._qkv(x, queries)
        bias = self._bias(grid, shared_bias, queries, q.dtype)
        if bias is not None and bias.requires_grad and bias.device.type == 'cpu':
            # The CPU's fused kernel gives no gradient of the bias, and what torch takes instead computes in float32.
            x = _attention_weights(q, k, bias) @ v
        else:
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        return self.proj(x.transpose(1, 2).flatten(2))

    def attention_map(self, x: Tensor, grid: Grid, shared_bias: Tensor | None = None) -> Tensor:
        """Attention weights (B, heads, N, N) after the softmax; arguments as in forward."""
        q, k, _ = self._qkv(x, None)
        return _attention_weights(q, k, self._bias(grid, shared_bias, None, q.dtype))

    def _qkv(self, x: Tensor, queries: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, K, d), keys and values (B, heads, N, d)."""
        no_bias = torch.zeros_like(self.v_bias)
        if queries is None:
            bias = torch.cat([self.q_bias, no_bias, self.v_bias])
            q, k, v = F.linear(x, self.qkv.weight, bias).chunk(3, dim=-1)
        else:
            q_weight, kv_weight = self.qkv.weight.split([x.shape[-1], 2 * x.shape[-1]])
            q = F.linear(take_tokens(x, queries), q_weight, self.q_bias)
            kv_bias = torch.cat([no_bias, self.v_bias])
            k, v = F.linear(x, kv_weight, kv_bias).chunk(2, dim=-1)
        return tuple(t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))

    def _bias(self, grid: Grid, shared: Tensor | None, queries: Tensor | None,
              dtype: torch.dtype) -> Tensor | None:
        """Bias (1 or B, heads, K, N) of the queries' rows."""
        bias = shared
        if self.relative_position_bias_table is not None:
            bias = self.read(self.relative_position_bias_table, grid)
        if bias is None:
            return None
        bias = bias.to(dtype)  # before the rows are picked: (heads, B, K, N) is the largest tensor of a step
        if queries is None:
            return bias
        return bias[0][:, queries].transpose(0, 1)  # heads, B, K, N -> B, heads, K, N


def _attention_weights(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = q * q.shape[-1]**-0.5 @ k.transpose(-2, -1)
    return (scores if bias is None else scores + bias).softmax(dim=-1)
