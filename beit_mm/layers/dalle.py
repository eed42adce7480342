"""The convolutional encoder and decoder of the DALL-E dVAE, with the parameter names of OpenAI's
files.

Both halve (double) the resolution three times between four groups of residual blocks, so a token
stands for 8 x 8 pixels. At the true size they have 53,786,240 and 43,829,766 parameters.
"""
import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

GROUP_WIDTHS = (1, 2, 4, 8)  # of the hidden size, from the image to the tokens
STRIDE = 8                   # pixels per token: three poolings between the four groups


class DALLEConv2d(nn.Module):
    """Same-size convolution with parameters `w` and `b`; computes in the dtype of its weights."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(out_channels, in_channels, kernel_size, kernel_size))
        self.b = nn.Parameter(torch.zeros(out_channels))
        nn.init.normal_(self.w, std=1 / math.sqrt(in_channels * kernel_size ** 2))

    def forward(self, x: Tensor) -> Tensor:
        return F.conv2d(x.to(self.w.dtype), self.w, self.b, padding=self.w.shape[-1] // 2)


class DALLEBlock(nn.Module):
    """Residual block: four convolutions at a quarter of the width, added with a small gain.

    Args:
        in_channels: channels of the input; another number than `out_channels` gets a 1x1 shortcut.
        out_channels: channels of the output, a multiple of 4.
        kernel_sizes: of the four convolutions; (3, 3, 3, 1) in the encoder, (1, 3, 3, 3) in the
            decoder.
        gain: factor of the residual path; 1 / (number of blocks)^2 keeps a deep stack's variance
            at 1.
    """

    def __init__(self, in_channels: int, out_channels: int, kernel_sizes: tuple[int, ...],
                 gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.id_path = (nn.Identity() if in_channels == out_channels
                        else DALLEConv2d(in_channels, out_channels, 1))
        quarter = out_channels // 4
        widths = (in_channels, quarter, quarter, quarter, out_channels)
        self.res_path = nn.Sequential()
        for i, kernel_size in enumerate(kernel_sizes, start=1):
            # The first ReLU must leave the block's input alone: the shortcut reads it too.
            self.res_path.add_module(f'relu_{i}', nn.ReLU(inplace=i > 1))
            self.res_path.add_module(
                f'conv_{i}', DALLEConv2d(widths[i - 1], widths[i], kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.id_path(x), self.res_path(x), alpha=self.gain)


def _groups(in_channels: int, widths: list[int], blocks_per_group: int,
            kernel_sizes: tuple[int, ...], between: tuple[str, nn.Module]) -> OrderedDict:
    """`group_1` ... `group_n` of residual blocks, with a resampling layer between the groups."""
    gain = 1 / (len(widths) * blocks_per_group) ** 2
    groups: OrderedDict[str, nn.Module] = OrderedDict()
    for g, width in enumerate(widths, start=1):
        group = groups[f'group_{g}'] = nn.Sequential()
        for b in range(1, blocks_per_group + 1):
            group.add_module(f'block_{b}', DALLEBlock(in_channels, width, kernel_sizes, gain))
            in_channels = width
        if g < len(widths):
            group.add_module(*between)
    return groups


class DALLEEncoder(nn.Module):
    """Images to token logits.

    Args:
        hidden: width of the first group; the last has eight times as much.
        vocab_size: number of visual tokens.
        blocks_per_group: residual blocks in each of the four groups.
        in_channels: channels of the images.

    Source: openai/DALL-E `dall_e/encoder.py`. Differs from it in taking the precision from the
        weights
    (`cast_inner`), and in `features`, which stops before the output layer.
    """

    def __init__(self, hidden: int = 256, vocab_size: int = 8192, blocks_per_group: int = 2,
                 in_channels: int = 3) -> None:
        super().__init__()
        widths = [factor * hidden for factor in GROUP_WIDTHS]
        self.blocks = nn.Sequential(OrderedDict(
            input=DALLEConv2d(in_channels, hidden, 7),
            **_groups(hidden, widths, blocks_per_group, (3, 3, 3, 1), ('pool', nn.MaxPool2d(2))),
            output=nn.Sequential(OrderedDict(
                relu=nn.ReLU(), conv=DALLEConv2d(widths[-1], vocab_size, 1)))))

    def features(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) mapped pixels to (B, 8 hidden, H/8, W/8), the input of `output`."""
        for layer in self.blocks[:-1]:
            x = layer(x)
        return x

    def output(self, x: Tensor) -> Tensor:
        """(B, 8 hidden, h, w) features to (B, V, h, w) logits; a 1x1 layer, so any h and w."""
        return self.blocks.output(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.features(x))

    def cast_inner(self, dtype: torch.dtype) -> None:
        """Convert all convolutions to `dtype` but the output's, whose logits stay in its own."""
        if self.blocks.input.w.dtype != dtype:
            self.blocks[:-1].to(dtype)


class DALLEDecoder(nn.Module):
    """(Relaxed) one-hot tokens to the parameters of the pixels' distribution.

    The codebook is the input convolution: its columns are the tokens' embeddings.

    Args:
        hidden: width of the last group; the first has eight times as much.
        vocab_size: number of visual tokens.
        embed_dims: width of the codebook.
        blocks_per_group: residual blocks in each of the four groups.
        out_channels: 6 for the logit-Laplace's location and ln scale of three colours.

    Source: openai/DALL-E `dall_e/decoder.py`. Differs from it as the encoder does, and in
    `from_tokens`, which looks tokens up where the original multiplies one-hot maps.
    """

    def __init__(self, hidden: int = 256, vocab_size: int = 8192, embed_dims: int = 128,
                 blocks_per_group: int = 2, out_channels: int = 6) -> None:
        super().__init__()
        widths = [factor * hidden for factor in reversed(GROUP_WIDTHS)]
        upsample = ('upsample', nn.Upsample(scale_factor=2, mode='nearest'))
        self.blocks = nn.Sequential(OrderedDict(
            input=DALLEConv2d(vocab_size, embed_dims, 1),
            **_groups(embed_dims, widths, blocks_per_group, (1, 3, 3, 3), upsample),
            output=nn.Sequential(OrderedDict(
                relu=nn.ReLU(), conv=DALLEConv2d(hidden, out_channels, 1)))))

    def forward(self, z: Tensor) -> Tensor:
        """(B, V, h, w) weights of the tokens, summing to 1 over V, to (B, out_channels, 8h, 8w)."""
        return self.blocks(z)

    def from_tokens(self, tokens: Tensor) -> Tensor:
        """(B, h, w) int64 tokens to (B, out_channels, 8h, 8w)."""
        codebook = self.blocks.input
        x = F.embedding(tokens, codebook.w[:, :, 0, 0].t()) + codebook.b
        return self.blocks[1:](x.permute(0, 3, 1, 2))

    def cast_inner(self, dtype: torch.dtype) -> None:
        """Convert all convolutions to `dtype` but the input's."""
        if self.blocks.output.conv.w.dtype != dtype:
            self.blocks[1:].to(dtype)
