"""Initialisation of the Transformer."""
import math

import torch.nn as nn
from torch import Tensor

INIT_STD = 0.02


def truncated_normal_(tensor: Tensor) -> None:
    """Normal with sigma 0.02 cut at one sigma, BERT's rule: the values that remain have sigma 0.0108.

    Source: microsoft/unilm `beit/modeling_pretrain.py` (its fine-tuning code and mmpretrain cut at an
    absolute +-2, which is no cut).
    """
    nn.init.trunc_normal_(tensor, std=INIT_STD, a=-INIT_STD, b=INIT_STD)


def init_transformer_(model: nn.Module) -> None:
    """Initialises a backbone: linear layers, patch embedding and tokens small, output layers smaller.

    The last matrices of attention and MLP of block l (from 1) are divided by sqrt(2 l), so that the
    residual stream does not grow with depth. Biases start at 0, norms at (1, 0), bias tables at 0.

    Args:
        model: has `blocks`, and `cls_token`, `mask_token`, `pos_embed` that may be None.

    Source: paper section 2.5 and the released pretraining code.
    """
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            truncated_normal_(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    for tokens in (model.cls_token, model.mask_token, model.pos_embed):
        if tokens is not None:
            truncated_normal_(tokens)
    for depth, block in enumerate(model.blocks, start=1):
        for linear in (block.attn.proj, block.mlp.fc2):
            linear.weight.data.div_(math.sqrt(2 * depth))
