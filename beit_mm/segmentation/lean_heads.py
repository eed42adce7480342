"""mmseg's decode heads with the same parameters and the same result, in less arithmetic and memory.

Bilinear resizing and a convolution are both linear, so their order may be changed. Mixing channels before the resizing,
at the lower resolution, is cheaper.
"""
import torch
import torch.nn.functional as F
from mmseg.models.decode_heads import SETRUPHead, UPerHead
from torch import Tensor

from beit_mm.functional.bilinear import bilinear_matrix
from beit_mm.registry import MODELS


@MODELS.register_module()
class EfficientUPerHead(UPerHead):
    """UPerHead whose inference never makes the concatenation of all levels at the finest resolution.

    The 3x3 convolution over that concatenation is more than half of the arithmetic of a base model with this head
    (1087 of 1924 GFLOP for 640 x 640 pixels). Here every coarse level goes through the nine
    taps of the convolution at its own resolution and is resized and shifted afterwards: a third of the arithmetic.

    Args: as UPerHead; state dicts are the same. Training is mmseg's own.
    """

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Logits (B, num_classes, h, w) at the resolution of the finest level."""
        if self.training or torch.is_grad_enabled():
            return super().forward(inputs)
        return self.cls_seg(self._fuse(self._levels(inputs)))

    def _levels(self, inputs: list[Tensor]) -> list[Tensor]:
        """What the fusion takes, finest level first; each (B, channels, h_i, w_i)."""
        inputs = self._transform_inputs(inputs)
        level = self.psp_forward(inputs)
        levels = [level]
        for feature, lateral, conv in zip(inputs[-2::-1], self.lateral_convs[::-1], self.fpn_convs[::-1], strict=True):
            finer = lateral(feature)
            level = finer.add_(F.interpolate(level, finer.shape[2:], mode='bilinear', align_corners=self.align_corners))
            levels.append(conv(level))
        return levels[::-1]

    def _fuse(self, levels: list[Tensor]) -> Tensor:
        """`fpn_bottleneck` of all levels at the finest resolution, (B, channels, h, w)."""
        bottleneck = self.fpn_bottleneck
        weights = bottleneck.conv.weight.split(self.channels, dim=1)
        height, width = levels[0].shape[2:]
        fused = F.conv2d(levels[0], weights[0], bottleneck.conv.bias, padding=1)
        dtype = fused.dtype
        fused = fused.float()  # the levels are summed in float32
        for level, weight in zip(levels[1:], weights[1:], strict=True):
            rows = _shifted(level.shape[2], height, self.align_corners).to(level)
            columns = _shifted(level.shape[3], width, self.align_corners).to(level)
            for row_taps, row_shift in zip(weight.unbind(2), rows, strict=True):
                line = sum(F.conv2d(level, tap[:, :, None, None]) @ column_shift.T
                           for tap, column_shift in zip(row_taps.unbind(2), columns, strict=True))
                fused += row_shift @ line
        fused = fused.to(dtype)
        fused = bottleneck.norm(fused) if bottleneck.with_norm else fused
        return bottleneck.activate(fused) if bottleneck.with_activation else fused


def _shifted(source: int, target: int, align_corners: bool) -> Tensor:
    """Resizing an axis, then looking one pixel back, at it, and ahead, zero outside: (3, target, source)."""
    matrix = F.pad(bilinear_matrix(source, target, align_corners), (0, 0, 1, 1))
    return matrix.unfold(0, target, 1).transpose(1, 2).contiguous()


@MODELS.register_module()
class EfficientSETRUPHead(SETRUPHead):
    """SETRUPHead that classifies before the last resizing instead of after it, in training too.

    Its logits have the resolution before the last resizing; whoever compares them with an image or a label resizes
    them, bilinearly, as mmseg does for every head. Where the last resizing comes to the image's size, as in training
    and in SlidingSegmentor, that is the same as SETRUPHead; elsewhere that one resizes twice.

    Args: as SETRUPHead; state dicts are the same.

    Source: SETR's own VisionTransformerUpHead has this order.
    """

    def forward(self, inputs: list[Tensor]) -> Tensor:
        """Logits (B, num_classes, h, w)."""
        x = self._transform_inputs(inputs)
        x = self.norm(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
        *stages, last = self.up_convs
        for stage in stages:
            x = stage(x)
        return self.cls_seg(last[0](x))
