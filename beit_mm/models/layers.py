"""Parts of a vision Transformer other than attention: patch embedding, MLPs and drop path."""

from collections import OrderedDict
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import StochasticDepth

from beit_mm.positions import Grid

# The attributes where a layer keeps its hooks: torch 2.6 to 2.13 has no public way to list them.
HOOKS = ('_forward_pre_hooks', '_forward_hooks', '_backward_pre_hooks', '_backward_hooks')


def is_plain(layer: nn.Module) -> bool:
    """Whether a product with the layer's weight may replace a call of the layer.

    LoRA, quantisation, pruning, weight norm and hooks take effect only in a call.
    """
    is_hooked = any(getattr(layer, name, True) for name in HOOKS)
    return type(layer) in (nn.Linear, nn.Conv2d) and type(layer.weight) is nn.Parameter and not is_hooked


class PatchEmbed(nn.Module):
    """Linear projection of patches of `patch_size` pixels, as a strided convolution (paper section 2.1.1)."""

    def __init__(self, patch_size: int, in_channels: int, embed_dims: int):
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(in_channels, embed_dims, patch_size, patch_size)

    def forward(self, images: Tensor) -> tuple[Tensor, Grid]:
        """Images (B, 3, H, W), padded with zeros to whole patches, to tokens (B, h*w, C) and their grid (h, w)."""
        # not -side % patch_size, which torch.compile cannot trace for an open size
        bottom, right = ((self.patch_size - side % self.patch_size) % self.patch_size for side in images.shape[2:])
        if bottom or right:
            images = F.pad(images, (0, right, 0, bottom))
        if images.is_cuda and is_plain(self.proj):  # cuDNN takes several times as long for three channels
            return self.as_product(images)
        x = self.proj(images)  # B, C, h, w
        return x.flatten(2).transpose(1, 2), (x.shape[2], x.shape[3])

    def as_product(self, images: Tensor) -> tuple[Tensor, Grid]:
        """The same as a matrix product, for images of whole patches."""
        side = self.patch_size
        patches = images.unfold(2, side, side).unfold(3, side, side)  # B, 3, h, w, side, side
        patches = patches.permute(0, 2, 3, 1, 4, 5).flatten(3)  # B, h, w, 3 * side**2
        x = F.linear(patches.flatten(1, 2), self.proj.weight.flatten(1), self.proj.bias)  # B, h*w, C
        return x, (patches.shape[1], patches.shape[2])


class MLP(nn.Sequential):
    """Two linear layers with an exact GELU between them, without dropout."""

    def __init__(self, dims: int, hidden_dims: int):
        fc1, fc2 = nn.Linear(dims, hidden_dims), nn.Linear(hidden_dims, dims)
        super().__init__(OrderedDict(fc1=fc1, act=nn.GELU(), fc2=fc2))


class SwiGLU(nn.Module):
    """Gated MLP: two linear layers in one, of which the first, through SiLU, scales the second, and a third.

    Source: facebookresearch/dinov3 `layers/ffn_layers.py`.
    """

    def __init__(self, dims: int, hidden_dims: int):
        super().__init__()
        self.fc1 = nn.Linear(dims, 2 * hidden_dims)
        self.fc2 = nn.Linear(hidden_dims, dims)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * value)


FEEDFORWARD: dict[str, Callable[[int, int], nn.Module]] = dict(mlp=MLP, swiglu=SwiGLU)


class DropPath(StochasticDepth):
    """Sets the branch of a sample to zero with probability p, and divides the other branches by 1 - p."""

    def __init__(self, p: float):
        super().__init__(p, mode='row')

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training or self.p == 0:
            return branch
        # The factor is float32: torchvision's has the branch's type, and in bfloat16 1 / 0.9 becomes 1.109.
        ones = torch.ones(branch.shape[0], 1, 1, device=branch.device)
        return (branch * super().forward(ones)).to(branch.dtype)
