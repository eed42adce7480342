"""BEiT v2: a second loss makes the class token summarise the image.

Shapes: B images, N = 1 + h*w tokens with the class token first, K patches to predict, C channels.
"""

import copy
import math

import torch
import torch.nn as nn
from torch import Tensor

from beit_mm.errors import UserError
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.registry import MODELS


@MODELS.register_module()
class BEiTV2Pretrainer(BEiTPretrainer):
    """Masked image modeling with patch aggregation.

    A few additional blocks take the class token of the last block and the patches of an early block, and predict the
    same visual tokens through the same head. They are dropped after pretraining.

    Args:
        early_layers: number of blocks before the patches are taken (released: 9 of 12 base, 21 of 24 large).
        aggregation_layers: number of additional blocks.
        **options: as in BEiTPretrainer.

    Source: BEiT v2 (arXiv 2208.06366) section 2.3; microsoft/unilm `beit2/modeling_pretrain.py`,
    `VisionTransformerForMaskedImageModelingCLS` with a shared head.
    """

    def __init__(self, *, early_layers: int = 9, aggregation_layers: int = 2, **options):
        super().__init__(**options)
        self.early_layers = early_layers
        blocks = self.backbone.blocks
        if not 0 < early_layers <= len(blocks) - aggregation_layers < len(blocks):
            raise UserError(
                f'early_layers is {early_layers}, aggregation_layers {aggregation_layers}; expected a sum of at most '
                f'{len(blocks)}, both from 1'
            )
        # Like the backbone's blocks at this depth, except that linear layers start with torch's weights, as released.
        self.patch_aggregation = copy.deepcopy(blocks[early_layers : early_layers + aggregation_layers])
        for depth, block in enumerate(self.patch_aggregation, start=early_layers + 1):
            for module in block.modules():
                if isinstance(module, nn.Linear):
                    module.reset_parameters()
            for linear in (block.attn.proj, block.mlp.fc2):
                linear.weight.data.div_(math.sqrt(2 * depth))

    def loss(self, inputs: dict) -> dict[str, Tensor]:
        positions = self._positions_to_predict(inputs)  # B, K
        targets = self._targets(inputs, positions)  # B, K
        results = {}
        for name, hidden in zip(('mim', 'aggregation'), self._both_hidden(inputs, positions), strict=True):
            result = self.head.loss(hidden, targets, positions)
            results[f'loss_{name}'] = result.pop('loss')
            results.update({f'{name}_acc': accuracy for accuracy in result.values()})
        return results

    def _both_hidden(self, inputs: dict, positions: Tensor | None) -> tuple[Tensor, Tensor]:
        """Hidden states (B, K, C) of the patches to predict, from the last block and from the additional blocks."""
        backbone = self.backbone
        first = backbone.num_prefix_tokens
        queries = with_prefix = None
        if positions is not None:
            queries = positions + first  # padding (-1) becomes the token before the patches
            prefix = torch.arange(first, device=queries.device).expand(len(queries), -1)
            with_prefix = torch.cat([prefix, queries], dim=1)  # B, prefix + K
        x, grid, bias = backbone.embed(inputs['images'], inputs['mask'])
        early = backbone.run_blocks(backbone.blocks[: self.early_layers], x, grid, bias)  # B, N, C
        later_blocks = backbone.blocks[self.early_layers :]
        last = backbone.run_blocks(later_blocks, early, grid, bias, with_prefix)  # B, prefix + K, C
        mixed = torch.cat([last[:, :first], early[:, first:]], dim=1)  # B, N, C
        mixed = backbone.run_blocks(self.patch_aggregation, mixed, grid, bias, queries)  # B, K or N, C
        if positions is None:
            mixed = mixed[:, first:]
        return backbone.norm(last[:, first:]), backbone.norm(mixed)
