"""Image to patch tokens."""
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from beit_mm.functional.relative_position import Grid


class PatchEmbed(nn.Module):
    """Linear projection of non-overlapping patches, as a strided convolution.

    Args:
        patch_size: side of a patch in pixels.
        in_channels: channels of the image.
        embed_dims: width of a token.

    Source: paper section 2.1.1.
    Differs from the released code in: any image size; sides that are no multiple of the patch are
    padded with zeros at the bottom and the right.
    """

    def __init__(self, patch_size: int, in_channels: int, embed_dims: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, embed_dims, patch_size, patch_size)

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Images (B, C, H, W) to tokens (B, h*w, embed_dims) and their grid (h, w)."""
        pad_bottom = -images.shape[2] % self.patch_size
        pad_right = -images.shape[3] % self.patch_size
        if pad_bottom or pad_right:
            images = F.pad(images, (0, pad_right, 0, pad_bottom))
        x = self.proj(images)  # B, D, h, w
        return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])
