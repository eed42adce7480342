"""The BEiT backbone: a vision Transformer that takes masked images of any size."""
import logging
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn as nn
from mmengine.logging import print_log
from mmengine.model import BaseModule
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from beit_mm.checkpoint.fit import SOURCE_KEY, LoadReport, fit_state_dict, of_every_task
from beit_mm.checkpoint.io import CheckpointError
from beit_mm.functional.position_embedding import resize_position_embedding
from beit_mm.functional.relative_position import Grid
from beit_mm.layers.attention import RelativePositionBias
from beit_mm.layers.block import NORM_EPS, Block
from beit_mm.layers.derived import DerivedTensor
from beit_mm.layers.init import init_transformer_
from beit_mm.layers.patch_embed import PatchEmbed
from beit_mm.registry import MODELS

ARCHITECTURES = {
    'tiny': dict(embed_dims=192, num_layers=12, num_heads=3),
    'small': dict(embed_dims=384, num_layers=12, num_heads=6),
    'base': dict(embed_dims=768, num_layers=12, num_heads=12),
    'large': dict(embed_dims=1024, num_layers=24, num_heads=16),
}
OUT_TYPES = ('raw', 'cls_token', 'avg_featmap', 'featmap')
BIAS_KINDS = (None, 'shared', 'per_layer')
INTERPOLATE_MODES = ('bicubic', 'bilinear')
EMBEDDINGS = ('cls_token', 'mask_token', 'pos_embed', 'patch_embed')


@MODELS.register_module()
class BEiTBackbone(BaseModule):
    """Vision Transformer of the paper and of the released checkpoints, in one class.

    The paper's model has an absolute position embedding and nothing else (the defaults). The released
    checkpoints have a relative position bias and LayerScale instead ("BEiT+" in our configs).

    Args:
        arch: 'tiny', 'small', 'base', 'large', or a dict of `embed_dims`, `num_layers`, `num_heads` and
            optionally `feedforward_channels` (default 4 * embed_dims).
        img_size: image side in pixels, or (height, width), for which the position parameters are
            made. Other sizes work at run time: the position parameters are resampled.
        patch_size: side of a patch in pixels.
        in_channels: channels of the image.
        out_indices: blocks whose output is returned, first block first; 0-based, negative from the end.
        out_type: 'raw' for tokens (B, 1+h*w, C), 'cls_token' (B, C), 'avg_featmap' for the mean of the
            patch tokens (B, C), 'featmap' for (B, C, h, w).
        masked_input: own a mask token, for pretraining.
        abs_pos_embed: own an absolute position embedding.
        rel_pos_bias: None, 'shared' by all blocks (pretraining) or 'per_layer' (fine-tuning).
        layer_scale_init: start value of LayerScale (released: 0.1 base, 1e-5 large); None for none.
        drop_path_rate: stochastic depth of the last block; rises linearly from 0 at the first.
        frozen_stages: -1 trains everything, 0 freezes the embeddings, n also the first n blocks.
        with_cp: recompute each block in the backward pass to save memory.
        interpolate_mode: how the position embedding is resampled, 'bicubic' or 'bilinear'.
        init_cfg: mmengine's, for example dict(type='Pretrained', checkpoint=..., prefix='backbone.').

    Weights of any BEiT can be loaded, by name of the file or as a state dict, and are made to fit; `load_report` says
    what became of each tensor.

    Raises:
        ValueError: an unknown name, an image smaller than a patch, or a block that does not exist.
        CheckpointError: on loading, weights of another model; nothing is loaded then.

    Source: paper section 2.3 and appendix A; microsoft/unilm `beit/modeling_{pretrain,finetune}.py`.
    Differs from it in: one class for pretraining, classification and dense prediction; any image
    size; the last block can be restricted to chosen tokens. The final norm follows `out_type`:
    'raw' and 'cls_token' own `norm`, 'avg_featmap' owns `fc_norm` (after the mean), 'featmap' owns none;
    it is applied to the last block's output only.
    """

    def __init__(self,
                 arch: str | dict = 'base',
                 img_size: int | tuple[int, int] = 224,
                 patch_size: int = 16,
                 in_channels: int = 3,
                 out_indices: int | Sequence[int] = -1,
                 out_type: str = 'raw',
                 masked_input: bool = False,
                 abs_pos_embed: bool = True,
                 rel_pos_bias: str | None = None,
                 layer_scale_init: float | None = None,
                 drop_path_rate: float = 0.0,
                 frozen_stages: int = -1,
                 with_cp: bool = False,
                 interpolate_mode: str = 'bicubic',
                 init_cfg: dict | None = None):
        super().__init__(init_cfg)
        sizes = _architecture(arch)
        _check_choice('out_type', out_type, OUT_TYPES)
        _check_choice('rel_pos_bias', rel_pos_bias, BIAS_KINDS)
        _check_choice('interpolate_mode', interpolate_mode, INTERPOLATE_MODES)
        dims, depth, heads = sizes['embed_dims'], sizes['num_layers'], sizes['num_heads']
        self.embed_dims = dims
        self.num_layers = depth
        self.patch_size = patch_size
        self.grid = _patch_grid(img_size, patch_size)
        self.out_type = out_type
        self.out_indices = _block_indices(out_indices, depth)
        if frozen_stages > depth:
            raise ValueError(f'frozen_stages is {frozen_stages}, the model has {depth} blocks')
        self.frozen_stages = frozen_stages
        self.with_cp = with_cp
        self.interpolate_mode = interpolate_mode
        self.load_report: LoadReport | None = None

        self.patch_embed = PatchEmbed(patch_size, in_channels, dims)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dims))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dims)) if masked_input else None
        self.pos_embed = None
        if abs_pos_embed:
            num_tokens = 1 + self.grid[0] * self.grid[1]
            self.pos_embed = nn.Parameter(torch.zeros(1, num_tokens, dims))
            self._read_pos_embed = DerivedTensor(partial(_resize_pos_embed, self.grid, interpolate_mode))
        self.rel_pos_bias = RelativePositionBias(self.grid, heads) if rel_pos_bias == 'shared' else None
        self.blocks = nn.ModuleList(
            Block(dims,
                  heads,
                  sizes.get('feedforward_channels', 4 * dims),
                  drop_path=drop_path_rate * index / max(depth - 1, 1),
                  layer_scale_init=layer_scale_init,
                  table_grid=self.grid if rel_pos_bias == 'per_layer' else None)
            for index in range(depth))
        self.norm = nn.LayerNorm(dims, eps=NORM_EPS) if out_type in ('raw', 'cls_token') else None
        self.fc_norm = nn.LayerNorm(dims, eps=NORM_EPS) if out_type == 'avg_featmap' else None

        init_transformer_(self)
        for parameter in self._frozen_parameters():
            parameter.requires_grad_(False)
        self.register_load_state_dict_pre_hook(_fit_weights)

    def forward(self,
                images: Tensor,
                mask: Tensor | None = None,
                positions: Tensor | None = None) -> tuple[Tensor, ...]:
        """Features of an image batch.

        Args:
            images: (B, C, H, W) normalised.
            mask: bool (B, h, w), True = replaced by the mask token; needs `masked_input=True`.
            positions: int64 (B, K) patch indices, -1 = padding. The last block then computes these
                tokens only, and the result is their hidden states (B, K, C); padded places hold
                the class token's. Needs out_type 'raw' and the last block as the only output.

        Returns:
            One tensor for each of `out_indices`, shaped as `out_type` says.
        """
        self._check_call(mask, positions)
        x, grid, shared_bias = self._embed(images, mask)
        outputs = []
        for index, block in enumerate(self.blocks):
            last = index == self.num_layers - 1
            # The class token stands before the patches, so padding (-1) turns into the class token.
            queries = positions + 1 if last and positions is not None else None
            if self.with_cp and self.training:
                x = checkpoint(block, x, grid, shared_bias, queries, use_reentrant=False)
            else:
                x = block(x, grid, shared_bias, queries)
            if index in self.out_indices:
                outputs.append(self._format(x, grid, last))
            if index == self.out_indices[-1]:
                break
        return tuple(outputs)

    def attention_maps(self, images: Tensor, layer: int = -1) -> tuple[Tensor, Grid]:
        """Attention weights of one block.

        Args:
            images: (B, C, H, W) normalised.
            layer: block, negative from the end.

        Returns:
            (B, heads, 1+h*w, 1+h*w) after the softmax, rows are queries, class token first; and the
            patch grid (h, w).
        """
        x, grid, shared_bias = self._embed(images, None)
        (layer, ) = _block_indices(layer, self.num_layers)
        for block in self.blocks[:layer]:
            x = block(x, grid, shared_bias)
        block = self.blocks[layer]
        return block.attn.attention_map(block.norm1(x), grid, shared_bias), grid

    def init_weights(self) -> None:
        """Initialises as `init_cfg` says.

        Of type 'Pretrained' it reads any BEiT's file, with and without `prefix='backbone.'`: cutting a prefix off is
        mmengine's, and would lose what the file says of its images.
        """
        if isinstance(self.init_cfg, dict) and self.init_cfg.get('prefix') in ('backbone', 'backbone.'):
            self.init_cfg.pop('prefix')
        super().init_weights()

    def no_weight_decay(self) -> set[str]:
        """Parameters of more than one dimension that weight decay leaves alone."""
        return {'cls_token', 'pos_embed'}

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """A parameter's layer, for layer-wise learning rates, and the number of layers: 0 are the embeddings, i + 1 is
        block i, the last one all else, in the model around it too. `prefix` is what its names have before ours."""
        name = param_name.removeprefix(prefix) if param_name.startswith(prefix) else ''
        part, _, rest = name.partition('.')
        layer = 0 if part in EMBEDDINGS else self.num_layers + 1
        return (int(rest.partition('.')[0]) + 1 if part == 'blocks' else layer), self.num_layers + 2

    def train(self, mode: bool = True) -> 'BEiTBackbone':
        """Sets the training mode; frozen blocks stay in evaluation mode (no stochastic depth)."""
        super().train(mode)
        for block in self.blocks[:max(self.frozen_stages, 0)]:
            block.eval()
        return self

    def _embed(self, images: Tensor, mask: Tensor | None) -> tuple[Tensor, Grid, Tensor | None]:
        """Tokens (B, 1+h*w, C) with positions, the grid (h, w) and the shared bias, if any."""
        x, grid = self.patch_embed(images)
        if mask is not None:
            x = torch.where(mask.flatten(1).unsqueeze(-1), self.mask_token.to(x.dtype), x)
        # x.shape[0], not len(x), which would fix the batch of an exported graph.
        x = torch.cat([self.cls_token.expand(x.shape[0], -1, -1).to(x.dtype), x], dim=1)
        if self.pos_embed is not None:
            x = x + self._read_pos_embed(self.pos_embed, grid)
        return x, grid, None if self.rel_pos_bias is None else self.rel_pos_bias(grid)

    def _format(self, x: Tensor, grid: Grid, last: bool) -> Tensor:
        """A block's output (B, N, C) in the form that `out_type` asks for."""
        if last and self.norm is not None:
            x = self.norm(x)
        if self.out_type == 'raw':
            return x
        if self.out_type == 'cls_token':
            return x[:, 0]
        if self.out_type == 'avg_featmap':
            x = x[:, 1:].mean(dim=1)
            return self.fc_norm(x) if last else x
        return x[:, 1:].transpose(1, 2).unflatten(2, grid)

    def _frozen_parameters(self) -> list[nn.Parameter]:
        if self.frozen_stages < 0:
            return []
        embeddings = [self.cls_token, self.mask_token, self.pos_embed]
        modules = [self.patch_embed, *self.blocks[:self.frozen_stages]]
        return [p for p in embeddings if p is not None] + [p for m in modules for p in m.parameters()]

    def _check_call(self, mask: Tensor | None, positions: Tensor | None) -> None:
        if mask is not None and self.mask_token is None:
            raise ValueError('a mask was given to a BEiTBackbone without a mask token; '
                             'build it with masked_input=True')
        if positions is not None and (self.out_type != 'raw'
                                      or self.out_indices != [self.num_layers - 1]):
            raise ValueError("positions need out_type='raw' and the last block as the only output, got "
                             f'out_type={self.out_type!r}, out_indices={self.out_indices}')


def _fit_weights(backbone: BEiTBackbone, state_dict: dict[str, Tensor], prefix: str, local_metadata: dict, strict: bool,
                 missing_keys: list[str], unexpected_keys: list[str], error_msgs: list[str]) -> None:
    """Makes any BEiT's weights fit before torch copies them; runs with and without a prefix before our names."""
    source = local_metadata.get(SOURCE_KEY)
    weights = {name.removeprefix(prefix): state_dict.pop(name) for name in [*state_dict] if name.startswith(prefix)}
    if not weights:
        hint = f' The file, {source["path"]}, holds {source["names"]}.' if source else ''
        raise CheckpointError(f'No weights of a BEiT: no tensor is named {prefix}*.{hint} Nothing was loaded.')
    fitted, report = fit_state_dict(weights, backbone.state_dict(), backbone.grid, backbone.blocks[0].attn.num_heads,
                                    backbone.interpolate_mode, source)
    backbone.load_report = report
    state_dict.update((prefix + name, tensor) for name, tensor in fitted.items())
    unexpected = of_every_task(report.unexpected_keys)
    unexpected_keys += [prefix + name for name in unexpected]
    surprising = unexpected or of_every_task(report.missing_keys)
    print_log(str(report), logger='current', level=logging.WARNING if surprising else logging.INFO)


def _resize_pos_embed(trained_grid: Grid, mode: str, pos_embed: Tensor, grid: Grid) -> Tensor:
    return resize_position_embedding(pos_embed, trained_grid, grid, mode)


def _architecture(arch: str | dict) -> dict:
    if isinstance(arch, str):
        _check_choice('arch', arch, tuple(ARCHITECTURES))
        return ARCHITECTURES[arch]
    needed = {'embed_dims', 'num_layers', 'num_heads'}
    if missing := needed - set(arch):
        raise ValueError(f'arch lacks {sorted(missing)}; a dict needs {sorted(needed)}')
    if arch['embed_dims'] % arch['num_heads']:
        raise ValueError(f"embed_dims {arch['embed_dims']} is no multiple of num_heads "
                         f"{arch['num_heads']}")
    return arch


def _check_choice(name: str, value: object, choices: tuple) -> None:
    if value not in choices:
        raise ValueError(f'{name} is {value!r}; choose one of {choices}')


def _patch_grid(img_size: int | tuple[int, int], patch_size: int) -> Grid:
    height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
    if min(height, width) < patch_size:
        raise ValueError(f'img_size {height} x {width} is smaller than a patch of {patch_size} pixels')
    return -(-height // patch_size), -(-width // patch_size)  # rounded up, as the input is padded


def _block_indices(indices: int | Sequence[int], depth: int) -> list[int]:
    indices = [indices] if isinstance(indices, int) else list(indices)
    if bad := [i for i in indices if not -depth <= i < depth]:
        raise ValueError(f'block {bad[0]} does not exist in a model of {depth} blocks')
    return sorted(i % depth for i in indices)
