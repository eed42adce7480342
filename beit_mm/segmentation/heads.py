"""mmseg's decode heads with the same parameters and results, and a SyncBN that also works on CPUs.

Bilinear resizing and a convolution are linear, so the efficient heads mix channels first, at the lower resolution.
"""

from functools import lru_cache

import torch
import torch.nn.functional as F
from mmengine.device import get_device
from mmseg.models import decode_heads
from mmseg.models.decode_heads.decode_head import BaseDecodeHead
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from beit_mm.models.layers import is_plain
from beit_mm.registry import MODELS

from .segmentor import bilinear_matrix


class CountsOnDevice(BaseDecodeHead):
    """Mixin before a decode head of mmseg: the same losses and accuracy, without waiting for the device.

    mmseg's accuracy selects pixels by a mask, and the host waits for their number. Here all pixels are compared, and a
    mask decides which of them count. Some losses of mmseg still wait: CrossEntropyLoss with `class_weight`,
    `avg_non_ignore=True` or `use_sigmoid=True`, and OHEMPixelSampler.
    """

    def loss_by_feat(self, seg_logits: Tensor, batch_data_samples: list[SegDataSample]) -> dict[str, Tensor]:
        """Losses by name, and `acc_seg`, float32 (1,), % of the pixels that count, from logits (B, C, h, w)."""
        label = torch.stack([sample.gt_sem_seg.data for sample in batch_data_samples])  # B, 1, H, W
        logits = F.interpolate(seg_logits, label.shape[2:], mode='bilinear', align_corners=self.align_corners)
        weight = None if self.sampler is None else self.sampler.sample(logits, label)  # B, H, W
        label = label.squeeze(1)
        losses: dict[str, Tensor] = {}
        for loss in self.loss_decode if isinstance(self.loss_decode, nn.ModuleList) else [self.loss_decode]:
            value = loss(logits, label, weight=weight, ignore_index=self.ignore_index)
            losses[loss.loss_name] = losses.get(loss.loss_name, 0) + value
        correct = logits.argmax(dim=1) == label  # B, H, W
        valid = torch.ones_like(correct) if self.ignore_index is None else label != self.ignore_index
        eps = torch.finfo(torch.float32).eps  # prevents 0 / 0, as in mmseg
        accuracy = 100 * ((correct & valid).sum() + eps) / (valid.sum() + eps)
        return dict(losses, acc_seg=accuracy.reshape(1))


@MODELS.register_module()
class FCNHead(CountsOnDevice, decode_heads.FCNHead):
    """mmseg's FCNHead with the losses of CountsOnDevice. Args: as in mmseg."""


@MODELS.register_module()
class SETRUPHead(CountsOnDevice, decode_heads.SETRUPHead):
    """mmseg's SETRUPHead with the losses of CountsOnDevice. Args: as in mmseg."""


@MODELS.register_module()
class EfficientUPerHead(CountsOnDevice, decode_heads.UPerHead):
    """UPerHead whose inference never concatenates all levels at the finest resolution.

    The 3 x 3 convolution over that concatenation is more than half of the arithmetic of a base model. Here each coarse
    level is multiplied by the nine positions of the kernel at its own resolution, then resized and shifted.

    Args: as in UPerHead; state dicts are the same. Training is mmseg's, with the losses of CountsOnDevice.
    """

    def forward(self, inputs: list[Tensor]) -> Tensor:
        if self.training or torch.is_grad_enabled() or not is_plain(self.fpn_bottleneck.conv):
            return super().forward(inputs)
        return self.cls_seg(self._fuse(self._levels(inputs)))  # B, num_classes, h, w of the finest level

    def _levels(self, inputs: list[Tensor]) -> list[Tensor]:
        """The feature pyramid, finest level first; each (B, channels, h_i, w_i)."""
        inputs = [inputs[index] for index in self.in_index]
        level = self.psp_forward(inputs)
        levels = [level]
        for feature, lateral, conv in zip(inputs[-2::-1], self.lateral_convs[::-1], self.fpn_convs[::-1], strict=True):
            finer = lateral(feature)
            level = finer.add_(F.interpolate(level, finer.shape[2:], mode='bilinear', align_corners=self.align_corners))
            levels.append(conv(level))
        return levels[::-1]

    def _fuse(self, levels: list[Tensor]) -> Tensor:
        """Result of `fpn_bottleneck` for all levels at the finest resolution, (B, channels, h, w)."""
        bottleneck = self.fpn_bottleneck
        weights = bottleneck.conv.weight.split(self.channels, dim=1)  # for each level: out, in, 3, 3
        height, width = levels[0].shape[2:]
        fused = F.conv2d(levels[0], weights[0], bottleneck.conv.bias, padding=1)  # B, out, h, w
        dtype = fused.dtype
        fused = fused.float()  # the levels are summed in float32
        for level, weight in zip(levels[1:], weights[1:], strict=True):
            options = self.align_corners, level.device, level.dtype
            row_matrices = resize_and_shift(level.shape[2], height, *options)  # 3, h, h_i
            column_matrices = resize_and_shift(level.shape[3], width, *options)  # 3, w, w_i
            for kernel_row, row_matrix in zip(weight.unbind(2), row_matrices, strict=True):
                wide = sum(
                    F.conv2d(level, kernel[:, :, None, None]) @ column_matrix.T
                    for kernel, column_matrix in zip(kernel_row.unbind(2), column_matrices, strict=True)
                )
                fused += row_matrix @ wide  # wide: B, out, h_i, w
        fused = fused.to(dtype)
        fused = bottleneck.norm(fused) if bottleneck.with_norm else fused
        return bottleneck.activate(fused) if bottleneck.with_activation else fused


@lru_cache(maxsize=32)
def resize_and_shift(source: int, target: int, align_corners: bool, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Matrices (3, target, source) along one axis: resize, pad with zeros, read the pixel before, at and after each."""
    matrix = F.pad(bilinear_matrix(source, target, align_corners), (0, 0, 1, 1))  # target + 2, source
    return matrix.unfold(0, target, 1).transpose(1, 2).to(device, dtype).contiguous()


@MODELS.register_module()
class EfficientSETRUPHead(SETRUPHead):
    """SETRUPHead that classifies before the last resizing instead of after it, in training too.

    mmseg resizes its logits bilinearly to the image or the label map. If that is the size after the last resizing, as
    in training and in SlidingSegmentor, the result is SETRUPHead's.

    Args: as in SETRUPHead; state dicts are the same. Source: the order of SETR's own VisionTransformerUpHead.
    """

    def forward(self, inputs: list[Tensor]) -> Tensor:
        if self.input_transform is not None:  # several maps, resized and concatenated
            return super().forward(inputs)
        x = inputs[self.in_index]  # B, C, h, w
        x = self.norm(x.flatten(2).transpose(1, 2)).transpose(1, 2).unflatten(2, x.shape[2:])
        *stages, last = self.up_convs
        for stage in stages:
            x = stage(x)  # doubles h and w
        return self.cls_seg(last[0](x))  # B, num_classes, h, w


@MODELS.register_module()
class SyncBN(nn.SyncBatchNorm):
    """torch's SyncBatchNorm; on a machine without an accelerator a BatchNorm2d is built instead.

    On a CPU each process uses the statistics of its own batches, and those of process 0 are saved. Args and checkpoints
    are as in torch, whose own layer fails on a CPU with several processes.
    """

    def __new__(cls, *args, **kwargs) -> nn.Module:
        # Python does not call __init__ on an instance of another class.
        return nn.BatchNorm2d(*args, **kwargs) if get_device() == 'cpu' else super().__new__(cls)
