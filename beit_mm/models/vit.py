"""The vision Transformer of BEiT (paper 2.1, 2.2): patches, attention, its relative position bias, BEiTBackbone.

Shapes: B images, N tokens (class token, registers, h*w patches), C channels, d channels of a head, K selected tokens,
P >= N columns of a bias (see bias_from_table).
"""

import logging
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from beit_mm.checkpoint.checkpoint import ORIGIN, Checkpoint, CheckpointInput, LoadReport, drop_task_parts, fit_weights
from beit_mm.checkpoint.names import ARCHITECTURES, is_part
from beit_mm.checkpoint.read import CheckpointError, as_checkpoint_error
from beit_mm.errors import UserError, check_choice, log
from beit_mm.models.layers import FEEDFORWARD, DropPath, PatchEmbed, is_plain
from beit_mm.positions import (
    POSITION_MODES,
    Grid,
    bias_from_table,
    num_relative_positions,
    resize_position_embedding,
    rotary_table,
    take_tokens,
)
from beit_mm.registry import MODELS

INIT_STD = 0.02
NORM_EPS = 1e-6
MAX_ROTARY_BASE = 60_000  # what half precision can hold
ROTARY_NORM_EPS = 1e-5  # of all published ViTs with rotary positions of DINOv3's kind
EMBEDDINGS = ('cls_token', 'mask_token', 'register_tokens', 'pos_embed', 'patch_embed')


def truncated_normal_(tensor: Tensor, bound: float = INIT_STD) -> None:
    """Draws from N(0, 0.02^2), by default cut at one sigma. Source: microsoft/unilm `beit/modeling_pretrain.py`."""
    # unilm's fine-tuning code and mmpretrain cut at an absolute +-2, which is 100 sigma.
    nn.init.trunc_normal_(tensor, std=INIT_STD, a=-bound, b=bound)


class SharedRelativePositionBias(nn.Module):
    """Bias table that all blocks share; starts at zero. Source: microsoft/unilm `beit/modeling_pretrain.py`."""

    def __init__(self, grid: Grid, num_heads: int):
        super().__init__()
        self.relative_position_bias_table = nn.Parameter(torch.zeros(num_relative_positions(grid), num_heads))
        self.table_grid = grid
        self.resample = bias_from_table  # an export replaces it

    def forward(self, grid: Grid, dtype: torch.dtype, num_prefix: int = 1) -> Tensor:
        table = self.relative_position_bias_table
        return self.resample(table, self.table_grid, grid, dtype, num_prefix)  # 1, heads, N, P


class Attention(nn.Module):
    """Self-attention over class token and patches; query and value have a bias, the key has none.

    With a `table_grid`, a patch grid (h, w), the layer has its own relative position bias table. With a `rotary_base`,
    queries and keys of patches are rotated by their position.
    Source: microsoft/unilm `beit/modeling_finetune.py`.
    """

    def __init__(self, dims: int, num_heads: int, table_grid: Grid | None = None, rotary_base: float | None = None):
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(dims, 3 * dims, bias=False)
        self.q_bias = nn.Parameter(torch.zeros(dims))
        self.v_bias = nn.Parameter(torch.zeros(dims))
        self.proj = nn.Linear(dims, dims)
        self.table_grid = table_grid
        self.rotary_base = rotary_base
        self.resample, self.rotation = bias_from_table, rotary_table  # an export replaces them
        self.relative_position_bias_table = None
        if table_grid is not None:
            self.relative_position_bias_table = nn.Parameter(torch.zeros(num_relative_positions(table_grid), num_heads))

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        shared_bias: Tensor | None = None,
        queries: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Attends from the queries to all tokens.

        Args:
            x: (B, N, C) normalised tokens, patches last.
            grid: patch grid (h, w).
            shared_bias: (1, heads, N, P) bias that all blocks share, in the type of their computation.
            queries: int64 (B, K) indices of the tokens to compute; None for all.
            hidden: bool (B, Q, N), True where the first Q tokens do not attend; not together with `queries`.

        Returns:
            (B, K, C), where K = N without queries.
        """
        q, k, v = self._qkv(x, grid, queries)  # B, heads, K, d; B, heads, N, d twice
        bias = self._bias(grid, x.shape[1], shared_bias, queries, q.dtype)  # 1 or B, heads, K, N
        if hidden is None:
            x = _attend(q, k, v, bias)
        else:  # a bias for each image is large: only the first rows have one
            sizes = [hidden.shape[1], x.shape[1] - hidden.shape[1]]
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -math.inf)[:, None]  # B, 1, Q, N
            top, bottom = (None, None) if bias is None else bias.split(sizes, dim=2)
            first, others = q.split(sizes, dim=2)
            first = _attend(first, k, v, mask if top is None else top + mask)
            x = torch.cat([first, _attend(others, k, v, bottom)], dim=2)
        return self.proj(x.transpose(1, 2).flatten(2))  # B, K, C

    def attention_scores(self, x: Tensor, grid: Grid, shared_bias: Tensor | None, queries: Tensor | None) -> Tensor:
        """Input of the softmax, (B, heads, K, N); Args as in forward."""
        q, k, _ = self._qkv(x, grid, queries)
        return _attention_scores(q, k, self._bias(grid, x.shape[1], shared_bias, queries, q.dtype))

    def _qkv(self, x: Tensor, grid: Grid, queries: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, heads, K, d), keys and values (B, heads, N, d)."""
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])  # 3C
        if not is_plain(self.qkv):
            mixed = self.qkv(x)  # B, N, 3C
            q, k, v = (mixed + bias.to(mixed.dtype)).chunk(3, dim=-1)
            q = q if queries is None else take_tokens(q, queries)
        elif queries is None:
            q, k, v = F.linear(x, self.qkv.weight, bias).chunk(3, dim=-1)
        else:  # queries only at the selected tokens
            sizes = [x.shape[-1], 2 * x.shape[-1]]
            (q_weight, kv_weight), (q_bias, kv_bias) = self.qkv.weight.split(sizes), bias.split(sizes)
            q = F.linear(take_tokens(x, queries), q_weight, q_bias)
            k, v = F.linear(x, kv_weight, kv_bias).chunk(2, dim=-1)
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))
        if self.rotary_base is None:
            return q, k, v
        num_prefix = x.shape[1] - grid[0] * grid[1]
        table = self.rotation(grid, num_prefix, q.shape[-1], self.rotary_base, x.device)  # 2, N, d
        of_queries = table if queries is None else table[:, queries].unsqueeze(2)  # 2, B, 1, K, d
        return _rotate(q, of_queries), _rotate(k, table), v

    def _bias(
        self, grid: Grid, num_tokens: int, bias: Tensor | None, queries: Tensor | None, dtype: torch.dtype
    ) -> Tensor | None:
        """Bias (1 or B, heads, K, N) for the queries, from the layer's own table or the shared `bias`."""
        if self.relative_position_bias_table is not None and self.table_grid is not None:
            num_prefix = num_tokens - grid[0] * grid[1]
            bias = self.resample(self.relative_position_bias_table, self.table_grid, grid, dtype, num_prefix)
        if bias is None:
            return None
        if queries is not None:
            bias = bias[0][:, queries].transpose(0, 1)  # heads, B, K, P -> B, heads, K, P
        return bias[..., :num_tokens]


def _rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates queries or keys (B, heads, N, d) by cosines and sines, float32 (2, N, d) or (2, B, 1, N, d)."""
    cos, sin = table
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)  # in float32


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    """Attention of queries (B, heads, K, d), with a bias (1 or B, heads, K, N)."""
    learns_bias = bias is not None and bias.requires_grad
    if q.device.type == 'cpu' and (q.dtype is torch.bfloat16 or learns_bias):
        # On CPUs the fused kernel is slow in bfloat16 (backward five times), and has no gradient for a bias.
        return _attention_scores(q, k, bias).softmax(dim=-1) @ v
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def _attention_scores(q: Tensor, k: Tensor, bias: Tensor | None) -> Tensor:
    scores = q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)  # B, heads, K, N
    return scores if bias is None else scores + bias


class Block(nn.Module):
    """x + DropPath(gamma_1 * Attention(norm(x))), then the same with the MLP and gamma_2.

    `drop_path` is the probability that a sample skips a branch, `gamma` the initial value of both gammas (None: no
    LayerScale), `feedforward` a key of FEEDFORWARD; for the others see Attention.
    Source: microsoft/unilm `beit/modeling_finetune.py`.
    """

    def __init__(
        self,
        dims: int,
        num_heads: int,
        hidden_dims: int,
        drop_path: float,
        gamma: float | None,
        grid: Grid | None,
        rotary_base: float | None = None,
        feedforward: str = 'mlp',
    ):
        super().__init__()
        eps = norm_eps(rotary_base)
        self.norm1 = nn.LayerNorm(dims, eps=eps)
        self.attn = Attention(dims, num_heads, grid, rotary_base)
        self.norm2 = nn.LayerNorm(dims, eps=eps)
        self.mlp = FEEDFORWARD[feedforward](dims, hidden_dims)
        self.drop_path = DropPath(drop_path)
        self.gamma_1 = None if gamma is None else nn.Parameter(torch.full((dims,), float(gamma)))
        self.gamma_2 = None if gamma is None else nn.Parameter(torch.full((dims,), float(gamma)))

    def forward(
        self,
        x: Tensor,
        grid: Grid,
        shared_bias: Tensor | None = None,
        queries: Tensor | None = None,
        hidden: Tensor | None = None,
    ) -> Tensor:
        """Tokens (B, N, C) to (B, N, C), or (B, K, C) at `queries`; see Attention.forward."""
        attended = self.attn(self.norm1(x), grid, shared_bias, queries, hidden)  # B, N or K, C
        x = x if queries is None else take_tokens(x, queries)
        x = x + self.drop_path(attended if self.gamma_1 is None else attended * self.gamma_1)
        mixed = self.mlp(self.norm2(x))  # B, N or K, C
        return x + self.drop_path(mixed if self.gamma_2 is None else mixed * self.gamma_2)


@MODELS.register_module()
class BEiTBackbone(BaseModule):
    """Vision Transformer of the paper (the defaults) and of the released checkpoints.

    The paper's model has an absolute position embedding; the released models have a relative position bias and
    LayerScale ("BEiT+" in our configs). Weights of any BEiT or plain ViT can be loaded, from a file or a state dict,
    and are resized to fit; `load_report` lists what happened to each tensor. The output of the last block is
    normalised: by `norm` for 'raw' and 'cls_token', by `fc_norm` after the mean for 'avg_featmap', not at all for
    'featmap'.

    Args:
        arch: 'tiny', 'small', 'base', 'large', 'huge', or a dict of `embed_dims`, `num_layers`, `num_heads` and
            optionally `feedforward_channels` (default 4 * embed_dims).
        img_size: image side in pixels, or (height, width); for other sizes the position parameters are resized.
        patch_size: side of a patch in pixels.
        in_channels: channels of the image.
        out_indices: blocks whose output is returned, in this order; 0-based, negative from the end.
        out_type: 'raw' (B, N, C), 'cls_token' (B, C), 'avg_featmap' (B, C), the mean of the patches, or 'featmap'
            (B, C, h, w).
        masked_input: add a mask token, for pretraining.
        abs_pos_embed: add an absolute position embedding.
        rel_pos_bias: None, 'shared' by all blocks (pretraining) or 'per_layer' (fine-tuning). With one, torch.compile
            needs dynamic=False for images of several sizes: it compiles again for each.
        rotary_base: base of the periods of rotary positions, 100 in DINOv3; None for none. They are computed for any
            image size, and need abs_pos_embed=False.
        feedforward: 'mlp', or 'swiglu', a gated MLP.
        num_registers: tokens between the class token and the patches, as in DINOv2 with registers.
        layer_scale_init: initial value of LayerScale (released: 0.1 base, 1e-5 large); None or 0 for no LayerScale.
        drop_path_rate: drop path rate of the last block; rises linearly from 0 in the first block.
        frozen_stages: -1 freezes nothing, 0 the embeddings, n the first n blocks too.
        with_cp: recompute each block in the backward pass to save memory.
        interpolate_mode: how the position embedding is resized: see POSITION_MODES and `resize_position_embedding`.
        init_cfg: as in mmengine, for example dict(type='Pretrained', checkpoint=..., prefix='backbone.').
        pretrained: path of a checkpoint; mmseg's segmentors pass their own `pretrained` here.

    Source: paper section 2.2 and appendix A; microsoft/unilm `beit/modeling_{pretrain,finetune}.py`.
    """

    fits_on_load = True  # converts weights of any layout; False: loads as other modules do

    def __init__(
        self,
        arch: str | dict = 'base',
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_channels: int = 3,
        out_indices: int | Sequence[int] = -1,
        out_type: str = 'raw',
        masked_input: bool = False,
        abs_pos_embed: bool = True,
        rel_pos_bias: str | None = None,
        rotary_base: float | None = None,
        feedforward: str = 'mlp',
        num_registers: int = 0,
        layer_scale_init: float | None = None,
        drop_path_rate: float = 0.0,
        frozen_stages: int = -1,
        with_cp: bool = False,
        interpolate_mode: str = 'bicubic',
        init_cfg: dict | None = None,
        pretrained: str | None = None,
    ):
        if pretrained is not None:
            if init_cfg is not None:
                raise UserError(f'pretrained is {pretrained!r}, but init_cfg is set too; set one of them to None')
            init_cfg = dict(type='Pretrained', checkpoint=pretrained)
        super().__init__(init_cfg)
        check_choice('out_type', out_type, ('raw', 'cls_token', 'avg_featmap', 'featmap'))
        check_choice('rel_pos_bias', rel_pos_bias, (None, 'shared', 'per_layer'))
        check_choice('feedforward', feedforward, FEEDFORWARD)
        check_choice('interpolate_mode', interpolate_mode, POSITION_MODES)
        if rotary_base is not None and (abs_pos_embed or rel_pos_bias):
            raise UserError('rotary_base excludes other positions; set abs_pos_embed=False and rel_pos_bias=None')
        sizes = sizes_of(arch)
        self.embed_dims = dims = sizes['embed_dims']
        self.num_layers = depth = sizes['num_layers']
        self.num_heads = heads = sizes['num_heads']
        self.patch_size = patch_size
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        self.grid = -(-height // patch_size), -(-width // patch_size)  # rounded up, because the input is padded
        self.out_type = out_type
        self.out_indices = block_indices(out_indices, depth)
        self.frozen_stages, self.with_cp, self.interpolate_mode = frozen_stages, with_cp, interpolate_mode
        self.resample = resize_position_embedding  # an export replaces it
        self.load_report: LoadReport | None = None

        self.patch_embed = PatchEmbed(patch_size, in_channels, dims)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dims)) if masked_input else None
        self.register_tokens = nn.Parameter(torch.zeros(1, num_registers, dims)) if num_registers else None
        self.num_prefix_tokens = 1 + num_registers  # where the patches begin
        num_positions = 1 + self.grid[0] * self.grid[1]  # registers have none
        self.pos_embed = nn.Parameter(torch.zeros(1, num_positions, dims)) if abs_pos_embed else None
        self.rel_pos_bias = SharedRelativePositionBias(self.grid, heads) if rel_pos_bias == 'shared' else None
        hidden = sizes.get('feedforward_channels', 4 * dims)
        drop_paths = [drop_path_rate * index / max(depth - 1, 1) for index in range(depth)]
        own_grid = self.grid if rel_pos_bias == 'per_layer' else None
        self.blocks = nn.ModuleList(
            Block(dims, heads, hidden, drop_path, layer_scale_init or None, own_grid, rotary_base, feedforward)
            for drop_path in drop_paths
        )
        if rotary_base is not None:
            if dims % (4 * heads) or not 1 < rotary_base <= MAX_ROTARY_BASE:
                raise UserError(
                    f'rotary_base={rotary_base}, heads of {dims}/{heads} channels; expected a base above 1, at most '
                    f'{MAX_ROTARY_BASE}, and heads of a multiple of 4 channels'
                )
            self.register_buffer('rotary_base', torch.tensor(float(rotary_base)))  # for readers of its weights
        self.norm_eps = norm_eps(rotary_base)
        self.norm = self.fc_norm = None
        if depth - 1 in self.out_indices:
            self.norm = nn.LayerNorm(dims, eps=self.norm_eps) if out_type in ('raw', 'cls_token') else None
            self.fc_norm = nn.LayerNorm(dims, eps=self.norm_eps) if out_type == 'avg_featmap' else None

        self.init_transformer()
        for name, parameter in self.named_parameters():
            layer, _ = self.get_layer_depth(name)  # 0: embeddings, 1: first block
            # torch 2.11 fails on GPUs if only the shared table is trained
            is_shared_table = frozen_stages > 0 and name.startswith('rel_pos_bias.')
            if layer <= min(frozen_stages, depth) or is_shared_table:
                parameter.requires_grad_(False)
        self.register_load_state_dict_pre_hook(_fit_on_load)

    def init_transformer(self, bound: float = INIT_STD) -> None:
        """Draws small weights for linear layers, patch embedding and tokens (paper section 2.5).

        The output matrices of attention and MLP in block l (from 1) are divided by sqrt(2 l), so that the residual
        stream does not grow with depth.
        """
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                truncated_normal_(module.weight, bound)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
        for tokens in (self.cls_token, self.mask_token, self.pos_embed, self.register_tokens):
            if tokens is not None:
                truncated_normal_(tokens, bound)
        for depth, block in enumerate(self.blocks, start=1):
            for linear in (block.attn.proj, block.mlp.fc2):
                linear.weight.data.div_(math.sqrt(2 * depth))

    def forward(
        self, images: Tensor, mask: Tensor | None = None, positions: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Returns a tensor for each of `out_indices`, with the shape of `out_type`.

        Args:
            images: (B, 3, H, W) normalised.
            mask: bool (B, h, w), True (or 1) = replaced by the mask token; needs `masked_input=True`.
            positions: int64 (B, K) patches, -1 = padding. Then the outputs are (B, K, C), with a class token or
                register at padding, and the last block that runs computes only these. Needs out_type 'raw'.
        """
        if mask is not None and self.mask_token is None:
            raise UserError('BEiTBackbone got a mask but has no mask token; set masked_input=True')
        if positions is not None:  # of a pooled output they would choose nothing
            check_choice('out_type with positions', self.out_type, ('raw',))
        x, grid, shared_bias = self.embed(images, mask)  # B, N, C
        outputs: dict[int, Tensor] = {}
        done = 0  # blocks that have run
        # Padding (-1) becomes the token before the patches.
        chosen = None if positions is None else positions + self.num_prefix_tokens
        for index in sorted(set(self.out_indices)):
            final = index == max(self.out_indices)
            x = self.run_blocks(self.blocks[done : index + 1], x, grid, shared_bias, chosen if final else None)
            output = self._format(x, grid, index == self.num_layers - 1)  # B, N or K, C
            outputs[index] = output if final or chosen is None else take_tokens(output, chosen)
            done = index + 1
        return tuple(outputs[index] for index in self.out_indices)

    def embed(self, images: Tensor, mask: Tensor | None) -> tuple[Tensor, Grid, Tensor | None]:
        """H_0 of the paper: class token, registers and embedded or masked patches, with their positions.

        Returns tokens (B, N, C), the patch grid (h, w), and the bias (1, heads, N, P) that all blocks share, or None.
        """
        x, grid = self.patch_embed(images)  # B, h*w, C
        compute_dtype = x.dtype  # autocast's, if it is on; adding pos_embed below gives the parameters' type
        if mask is not None:
            if mask.shape[1:] not in (grid, (grid[0] * grid[1],)):
                raise UserError(f'masks are {[*mask.shape]}; expected [B, {grid[0]}, {grid[1]}], a cell for each patch')
            mask = mask.flatten(1).unsqueeze(-1).bool()  # mmpretrain makes masks of integers
            x = torch.where(mask, self.mask_token.to(x.dtype), x)  # B, h*w, C
        # x.shape[0] and not len(x), which would make the batch size a constant of an exported graph.
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)  # B, 1+h*w, C
        if self.pos_embed is not None:
            x = x + self.resample(self.pos_embed, self.grid, grid, self.interpolate_mode)  # 1, 1+h*w, C
        if self.register_tokens is not None:
            registers = self.register_tokens.expand(x.shape[0], -1, -1).to(x.dtype)
            x = torch.cat([x[:, :1], registers, x[:, 1:]], dim=1)
        if self.rel_pos_bias is None:
            return x, grid, None
        return x, grid, self.rel_pos_bias(grid, compute_dtype, self.num_prefix_tokens)

    def run_blocks(
        self, blocks: nn.ModuleList, x: Tensor, grid: Grid, shared_bias: Tensor | None, queries: Tensor | None = None
    ) -> Tensor:
        """Runs blocks on what `embed` returns; gives tokens (B, N, C), or (B, K, C) at `queries`, int64 (B, K)."""
        for index, block in enumerate(blocks, start=1):
            block_queries = queries if index == len(blocks) else None
            if self.with_cp and self.training:
                x = checkpoint(block, x, grid, shared_bias, block_queries, use_reentrant=False)
            else:
                x = block(x, grid, shared_bias, block_queries)
        return x

    def _format(self, x: Tensor, grid: Grid, last: bool) -> Tensor:
        if last and self.norm is not None:
            x = self.norm(x)  # B, N, C
        if self.out_type == 'raw':
            return x
        if self.out_type == 'cls_token':
            return x[:, 0]
        if self.out_type == 'avg_featmap':
            x = x[:, self.num_prefix_tokens :].mean(dim=1)
            return self.fc_norm(x) if last else x
        return x[:, self.num_prefix_tokens :].transpose(1, 2).unflatten(2, grid)  # B, C, h, w

    def attention_maps(self, images: Tensor, layer: int = -1, queries: Tensor | None = None) -> tuple[Tensor, Grid]:
        """Attention of one block, (B, heads, K, N), patches last, and the patch grid (h, w).

        Args:
            images: (B, 3, H, W) normalised.
            layer: block, 0-based, negative from the end.
            queries: int64 (B, K) tokens that attend, 0 is the class token; None for all (K = N).
        """
        (layer,) = block_indices(layer, self.num_layers)
        x, grid, shared_bias = self.embed(images, None)
        x = self.run_blocks(self.blocks[:layer], x, grid, shared_bias)  # B, N, C
        block = self.blocks[layer]
        scores = block.attn.attention_scores(block.norm1(x), grid, shared_bias, queries)  # B, heads, K, N
        return scores.softmax(dim=-1), grid

    @classmethod
    def from_checkpoint(cls, checkpoint: CheckpointInput) -> 'BEiTBackbone':
        """Builds the backbone of a checkpoint of any format, in evaluation mode."""
        checkpoint = Checkpoint.open(checkpoint)
        with as_checkpoint_error(checkpoint.path):
            backbone = cls(**checkpoint.backbone_arguments())
            backbone.load_state_dict(checkpoint.state_dict)
        return backbone.eval()

    def init_weights(self) -> None:
        if isinstance(self.init_cfg, dict) and self.init_cfg.get('prefix') in ('backbone', 'backbone.'):
            self.init_cfg.pop('prefix')  # else mmengine drops the metadata, which describe the images
        super().init_weights()

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """The layer of a parameter, for layer decay, and the number of layers, num_layers + 2.

        The layer is 0 for the embeddings, i + 1 for block i, and num_layers + 1 for all else, inside and outside the
        backbone. `prefix` is what the names of the backbone's parameters begin with in the model.
        """
        name = param_name.removeprefix(prefix) if param_name.startswith(prefix) else ''
        part, _, rest = name.partition('.')
        layer = 0 if part in EMBEDDINGS else self.num_layers + 1
        return (int(rest.partition('.')[0]) + 1 if part == 'blocks' else layer), self.num_layers + 2

    def train(self, mode: bool = True) -> 'BEiTBackbone':
        super().train(mode)
        for block in self.blocks[: max(self.frozen_stages, 0)]:
            block.eval()  # no drop path in frozen blocks
        return self


def _fit_on_load(
    backbone: BEiTBackbone, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict, *rest: Any
) -> None:
    """Load hook: converts and resizes the weights of any BEiT before torch copies them."""
    if not backbone.fits_on_load:
        return
    _strict, _missing_keys, unexpected_keys, _error_msgs = rest
    origin, expected = local_metadata.get(ORIGIN), backbone.state_dict()
    if 'rotary_base' in expected:  # as it was given: the buffer of a model that was built without memory holds anything
        expected['rotary_base'] = torch.tensor(backbone.blocks[0].attn.rotary_base)
    given = [name.removeprefix(prefix) for name in state_dict if name.startswith(prefix)]
    if expected.keys() >= {*given} and not all(map(is_part, given)):
        return  # layers are wrapped, for example by LoRA, and the state dict is the backbone's own, whole or in part
    weights = {name: state_dict.pop(prefix + name) for name in given}
    if not weights:
        held = f'; {origin["path"]} holds {origin["names"]}' if origin else ''
        if prefix.endswith('.module.'):
            raise CheckpointError(
                f'No BEiT weights: no tensor is named {prefix}*{held}. A config with LoRA takes checkpoints of its own '
                'runs, not a merged result. Nothing was loaded.'
            )
        raise CheckpointError(f'No BEiT weights: no tensor is named {prefix}*{held}. Nothing was loaded.')
    with as_checkpoint_error(origin['path'] if origin else 'the state dict'):
        fitted, report = fit_weights(
            weights, expected, backbone.grid, backbone.num_heads, backbone.interpolate_mode, origin
        )
    backbone.load_report = report
    state_dict.update((prefix + name, tensor) for name, tensor in fitted.items())
    unexpected = drop_task_parts(report.unexpected_keys)
    unexpected_keys += [prefix + name for name in unexpected]
    incomplete = unexpected or drop_task_parts(report.missing_keys)
    log(str(report), logging.WARNING if incomplete else logging.INFO)
    theirs, ours = ((origin or {}).get('architecture') or {}).get('interpolate_mode'), backbone.interpolate_mode
    if theirs not in (None, ours) and 'pos_embed' in expected:
        log(f"Positions for other image sizes: interpolate_mode={ours!r} here, {theirs!r} in the authors' code.")


def sizes_of(arch: str | dict) -> dict:
    """Width, depth and number of heads of an architecture, given by name or as a dict."""
    if isinstance(arch, str):
        check_choice('arch', arch, ARCHITECTURES)
        return ARCHITECTURES[arch]
    for key in arch:  # an unknown one would have no effect
        check_choice('a key of arch', key, (*ARCHITECTURES['base'], 'feedforward_channels'))
    return arch


def norm_eps(rotary_base: float | None) -> float:
    """Epsilon of the layer norms, which belongs to the kind of positions."""
    return NORM_EPS if rotary_base is None else ROTARY_NORM_EPS


def block_indices(indices: int | Sequence[int], depth: int) -> list[int]:
    numbers = np.atleast_1d(indices).tolist()  # also of arrays
    if bad := [i for i in numbers if not -depth <= i < depth]:
        raise UserError(f'there is no block {bad[0]}; expected {-depth} to {depth - 1}')
    return [i % depth for i in numbers]
