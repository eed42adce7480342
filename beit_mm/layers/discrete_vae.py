"""The small convolutional encoder and decoder of the DALLE-pytorch style discrete VAE.

Residual blocks stand behind every level, as in the released BEiT code (at 3 levels, hidden 256,
8192 tokens and a codebook of width 512: 7,953,408 and 12,128,003 parameters), or only at the
bottleneck, as in DALLE-pytorch (2 blocks: 6,707,456 and 9,964,803 parameters), which is five times
cheaper because no block works at the images' resolution.
"""
import torch
from torch import Tensor, nn


class ConvResBlock(nn.Module):
    """x + [3x3, ReLU, 3x3, ReLU, 1x1](x) at constant width."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1), nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class ConvEncoder(nn.Module):
    """Images to token logits: 4x4 convolutions of stride 2 with ReLU, residual blocks, a 1x1 layer.

    Args:
        hidden: width of every level.
        vocab_size: number of visual tokens.
        num_levels: halvings; a token stands for 2^num_levels pixels a side.
        bottleneck_blocks: residual blocks behind the last level; None puts one behind every level.
        in_channels: channels of the images.

    Source: microsoft/unilm `beit/modeling_discrete_vae.py` (None), lucidrains/DALLE-pytorch (2).
    """

    def __init__(self, hidden: int = 256, vocab_size: int = 8192, num_levels: int = 3,
                 bottleneck_blocks: int | None = None, in_channels: int = 3) -> None:
        super().__init__()
        self.levels = nn.Sequential()
        for _ in range(num_levels):
            self.levels.append(nn.Sequential(
                nn.Conv2d(in_channels, hidden, 4, stride=2, padding=1), nn.ReLU()))
            if bottleneck_blocks is None:
                self.levels.append(ConvResBlock(hidden))
            in_channels = hidden
        self.levels.extend(ConvResBlock(hidden) for _ in range(bottleneck_blocks or 0))
        self.output = nn.Conv2d(hidden, vocab_size, 1)

    def features(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) to (B, hidden, H/2^levels, W/2^levels), the input of `output`."""
        return self.levels(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.features(x))


class ConvDecoder(nn.Module):
    """(Relaxed) one-hot tokens to pixels, the encoder mirrored behind a codebook.

    Args:
        hidden: width of every level.
        vocab_size: number of visual tokens.
        embed_dims: width of the codebook.
        num_levels: doublings.
        bottleneck_blocks: as `ConvEncoder`; a number adds a 1x1 layer from the codebook's width.
        out_channels: 3 for pixels, 6 for the logit-Laplace's location and ln scale.

    Source: as `ConvEncoder`.
    """

    def __init__(self, hidden: int = 256, vocab_size: int = 8192, embed_dims: int = 512,
                 num_levels: int = 3, bottleneck_blocks: int | None = None,
                 out_channels: int = 3) -> None:
        super().__init__()
        self.codebook = nn.Embedding(vocab_size, embed_dims)
        self.levels = nn.Sequential()
        channels = embed_dims
        if bottleneck_blocks is not None:
            self.levels.append(nn.Conv2d(embed_dims, hidden, 1))
            self.levels.extend(ConvResBlock(hidden) for _ in range(bottleneck_blocks))
            channels = hidden
        for _ in range(num_levels):
            self.levels.append(nn.Sequential(
                nn.ConvTranspose2d(channels, hidden, 4, stride=2, padding=1), nn.ReLU()))
            if bottleneck_blocks is None:
                self.levels.append(ConvResBlock(hidden))
            channels = hidden
        self.output = nn.Conv2d(hidden, out_channels, 1)

    def forward(self, z: Tensor) -> Tensor:
        """(B, V, h, w) weights of the tokens, summing to 1 over V, to (B, out_channels, H, W)."""
        x = torch.einsum('bvhw,vd->bdhw', z, self.codebook.weight)
        return self.output(self.levels(x))

    def from_tokens(self, tokens: Tensor) -> Tensor:
        """(B, h, w) int64 tokens to (B, out_channels, H, W)."""
        return self.output(self.levels(self.codebook(tokens).permute(0, 3, 1, 2)))
