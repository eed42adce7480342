"""Heads of masked image modeling: visual tokens (the paper) and pixels (its ablation)."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModule
from torch import Tensor

from beit_mm.layers.init import truncated_normal_
from beit_mm.registry import MODELS


@MODELS.register_module()
class BEiTMIMHead(BaseModule):
    """Predicts the visual tokens of patches from their hidden states.

    Args:
        embed_dims: width of the hidden states.
        vocab_size: number of visual tokens.

    Source: paper section 2.4; microsoft/unilm `beit/modeling_pretrain.py` (`lm_head`) and
    `beit/engine_for_pretraining.py` (loss and accuracy over all masked patches of the batch, not image
    by image).
    """

    def __init__(self, embed_dims: int, vocab_size: int = 8192, init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.vocab_size = vocab_size
        self.lm_head = nn.Linear(embed_dims, vocab_size)
        truncated_normal_(self.lm_head.weight)
        nn.init.zeros_(self.lm_head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., embed_dims) to logits (..., vocab_size)."""
        return self.lm_head(hidden)

    def loss(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Cross entropy and accuracy.

        Args:
            hidden: (B, K, embed_dims).
            targets: int64 (B, K) visual tokens.
            valid: bool (B, K), False = padding; None = all count.

        Returns:
            loss: mean over the valid places, 0 when there are none. mim_acc: share predicted right.
        """
        losses, correct = self._compare(hidden, targets)
        return dict(loss=_masked_mean(losses, valid), mim_acc=_masked_mean(correct, valid))

    def predict(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Sums (B,) over each image of the loss, the right predictions and the places that count."""
        losses, correct = self._compare(hidden, targets)
        valid = torch.ones_like(correct) if valid is None else valid.float()
        return dict(
            loss=(losses * valid).sum(1), correct=(correct * valid).sum(1), count=valid.sum(1))

    def _compare(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and rightness (B, K) of every place; what stands at padding is for the caller to drop."""
        logits = self(hidden)
        targets = targets.clamp(min=0)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='none')
        correct = (logits.detach().argmax(dim=-1) == targets).float()
        return losses.view_as(correct), correct


@MODELS.register_module()
class PixelRegressionHead(BaseModule):
    """Predicts the normalised pixels of patches ("- visual tokens" of the ablation table).

    The paper states neither the loss nor the normalisation; this is the mean squared error on the
    image as the backbone sees it.

    Args:
        embed_dims: width of the hidden states.
        patch_size: side of a patch in pixels.

    Source: paper section 3.3 (no code was released).
    """

    def __init__(self,
                 embed_dims: int,
                 patch_size: int = 16,
                 init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.patch_size = patch_size
        self.pixel_head = nn.Linear(embed_dims, 3 * patch_size**2)
        truncated_normal_(self.pixel_head.weight)
        nn.init.zeros_(self.pixel_head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., embed_dims) to RGB pixels (..., 3 * patch_size**2)."""
        return self.pixel_head(hidden)

    def loss(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Mean squared error; targets (B, K, 3 * patch_size**2), valid as in BEiTMIMHead."""
        return dict(loss=_masked_mean(self._errors(hidden, targets), valid))

    def predict(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Sums (B,) over each image of the squared error and of the places that count."""
        errors = self._errors(hidden, targets)
        valid = torch.ones_like(errors) if valid is None else valid.float()
        return dict(loss=(errors * valid).sum(1), count=valid.sum(1))

    def _errors(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return (self(hidden).float() - targets).square().mean(dim=-1)


def _masked_mean(values: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return values.mean()
    # torch.where, not a product: what stands at padding may be anything.
    total = torch.where(valid, values, 0).sum()
    return total / valid.sum().clamp(min=1)
