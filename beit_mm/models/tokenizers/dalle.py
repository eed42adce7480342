"""DALL-E's tokenizer, which the paper uses (section 2.1.2), and its networks.

Between four groups of residual blocks, the encoder halves the resolution three times, and the decoder doubles it.
"""

import math
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beit_mm.errors import check_choice
from beit_mm.models.tokenizers import base
from beit_mm.registry import MODELS

ENCODER_URL = 'https://download.openmmlab.com/mmselfsup/1.x/target_generator_ckpt/dalle_encoder.pth'
DECODER_URL = 'https://cdn.openai.com/dall-e/decoder.pkl'
GET_ENCODER = f'Get {ENCODER_URL} (or https://cdn.openai.com/dall-e/encoder.pkl)'
ENCODER_ADVICE = (
    f'{GET_ENCODER} and name the file in model.target_generator.checkpoint; '
    'for a smoke run set model.target_generator.random_weights=True.'
)
DECODER_ADVICE = f'Get {DECODER_URL} and name the file in target_generator.decoder_checkpoint, or leave that key out.'
GROUP_WIDTHS = (1, 2, 4, 8)  # multiples of `hidden`, from the image to the tokens
BLOCKS_PER_GROUP = 2
STRIDE = 8  # pixels of a token along a side: three poolings between four groups
MIN_CHANNELS = 32  # a convolution on a GPU multiplies at least this many channels at once


@MODELS.register_module()
class DALLETokenizer(base.CodebookTokenizer):
    """The encoder of DALL-E's discrete VAE, which gives visual tokens, and its decoder for pictures.

    Args:
        checkpoint: encoder weights, a path or a URL: a state dict or OpenAI's encoder.pkl.
        decoder_checkpoint: decoder weights, such as OpenAI's decoder.pkl; None: no `decode`.
        precision: 'fp16' (fp32 on a CPU, as in the original), 'bf16' or 'fp32', for all convolutions except the
            encoder's output and the decoder's input, which are fp32. fp16 changes 0.2 % of the tokens, bf16 2 %.
        random_weights: use seeded random weights for both networks instead of files, only for smoke runs.
        sha256: expected hash of the encoder's file.
        hidden: width of the first group.
        vocab_size: number of visual tokens.

    Source: openai/DALL-E; tokens as microsoft/unilm `beit/modeling_discrete_vae.py` `Dalle_VAE`.
    """

    def __init__(
        self,
        checkpoint: str = ENCODER_URL,
        decoder_checkpoint: str | None = None,
        precision: str = 'fp16',
        random_weights: bool = False,
        sha256: str | None = None,
        hidden: int = 256,
        vocab_size: int = 8192,
    ) -> None:
        super().__init__()
        check_choice('precision', precision, base.PRECISIONS)
        self.vocab_size, self.stride, self.precision = vocab_size, STRIDE, precision
        self.provenance = dict(type='DALLETokenizer', precision=precision, path='random weights', sha256='')
        with base.initialisation(random_weights):
            self.encoder, decoder = DALLEEncoder(hidden, vocab_size), DALLEDecoder(hidden, vocab_size)
        if not random_weights:
            base.load_exactly(self.encoder, self.read(checkpoint, sha256, ENCODER_ADVICE), checkpoint)
        if not random_weights and decoder_checkpoint is not None:
            weights = self.read(decoder_checkpoint, None, DECODER_ADVICE, 'decoder_')
            base.load_exactly(decoder, weights, decoder_checkpoint)
        self.decoder = decoder if random_weights or decoder_checkpoint is not None else None
        self.requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def to_input(self, images: Tensor) -> Tensor:
        return super().to_input(images).contiguous(memory_format=torch.channels_last)

    def prepare(self, device: torch.device) -> None:
        dtype = base.dtype_on(self.precision, device)
        if self.encoder.blocks.input.w.dtype != dtype:
            self.encoder.blocks[:-1].to(dtype)  # the logits stay float32
        if self.decoder is not None and self.decoder.blocks.output.conv.w.dtype != dtype:
            self.decoder.blocks[1:].to(dtype)


class DALLEConv2d(nn.Module):
    """Same-size convolution with parameters `w` and `b`; computes in the type of its weights."""

    def __init__(self, in_channels: int, out_channels: int, kernel_size: int) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.empty(out_channels, in_channels, kernel_size, kernel_size))
        self.b = nn.Parameter(torch.zeros(out_channels))
        nn.init.normal_(self.w, std=1 / math.sqrt(in_channels * kernel_size**2))

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.w.dtype)
        kernel_size = self.w.shape[-1]
        if x.is_cuda and kernel_size == 1 and x.dtype is not torch.float32:
            # Faster, because it also adds the bias. Not in float32: torch uses TF32 for convolutions, not for products.
            return multiply_pixels(x, self.w, self.b)
        if x.is_cuda and x.shape[1] < MIN_CHANNELS:
            return convolve_few_channels(x, self.w, self.b)
        return F.conv2d(x, self.w, self.b, padding=kernel_size // 2)


def multiply_pixels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A 1 x 1 convolution of (B, C, H, W) as a matrix product; it copies nothing in channels_last memory."""
    return F.linear(x.permute(0, 2, 3, 1), weight[:, :, 0, 0], bias).permute(0, 3, 1, 2)


def convolve_few_channels(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """A same-size convolution of (B, C, H, W), C small, with fewer products on GPUs.

    The C * k values of a pixel's neighbours in the row become its channels, and the kernel becomes k x 1.
    """
    kernel_size = weight.shape[-1]
    half = kernel_size // 2
    rows = F.pad(x, (half, half)).unfold(3, kernel_size, 1)  # B, C, H, W, k
    rows = rows.permute(0, 2, 3, 1, 4).flatten(3)  # B, H, W, C * k
    kernel = weight.permute(0, 2, 1, 3).flatten(2)  # out, k, C * k
    missing = -rows.shape[-1] % MIN_CHANNELS
    rows, kernel = F.pad(rows, (0, missing)), F.pad(kernel, (0, missing))
    return F.conv2d(rows.permute(0, 3, 1, 2), kernel.permute(0, 2, 1).unsqueeze(-1), bias, padding=(half, 0))


class DALLEBlock(nn.Module):
    """Residual block: four convolutions at a quarter of the width, added with a small gain."""

    def __init__(self, in_channels: int, out_channels: int, kernel_sizes: tuple[int, ...], gain: float) -> None:
        super().__init__()
        self.gain = gain
        self.id_path = nn.Identity() if in_channels == out_channels else DALLEConv2d(in_channels, out_channels, 1)
        quarter = out_channels // 4
        widths = (in_channels, quarter, quarter, quarter, out_channels)
        self.res_path = nn.Sequential()
        for i, kernel_size in enumerate(kernel_sizes, start=1):
            # The first ReLU must not change the block's input, because the shortcut reads it too.
            self.res_path.add_module(f'relu_{i}', nn.ReLU(inplace=i > 1))
            self.res_path.add_module(f'conv_{i}', DALLEConv2d(widths[i - 1], widths[i], kernel_size))

    def forward(self, x: Tensor) -> Tensor:
        return torch.add(self.id_path(x), self.res_path(x), alpha=self.gain)


def _blocks(
    first: DALLEConv2d, widths: list[int], kernel_sizes: tuple[int, ...], between: tuple[str, nn.Module], outputs: int
) -> nn.Sequential:
    """`input`, `group_1` ... `group_n` of residual blocks with a resampling layer between them, and `output`."""
    gain = 1 / (len(widths) * BLOCKS_PER_GROUP) ** 2  # keeps the variance of a deep stack at 1
    blocks, channels = nn.Sequential(OrderedDict(input=first)), len(first.b)
    for g, width in enumerate(widths, start=1):
        group = nn.Sequential()
        for b in range(1, BLOCKS_PER_GROUP + 1):
            group.add_module(f'block_{b}', DALLEBlock(channels, width, kernel_sizes, gain))
            channels = width
        if g < len(widths):
            group.add_module(*between)
        blocks.add_module(f'group_{g}', group)
    output = OrderedDict(relu=nn.ReLU(), conv=DALLEConv2d(channels, outputs, 1))
    blocks.add_module('output', nn.Sequential(output))
    return blocks


class DALLEEncoder(nn.Module):
    """Images to token logits; its widths are `hidden` to 8 * `hidden`. Source: openai/DALL-E `dall_e/encoder.py`."""

    def __init__(self, hidden: int = 256, vocab_size: int = 8192, in_channels: int = 3) -> None:
        super().__init__()
        widths = [factor * hidden for factor in GROUP_WIDTHS]
        first, pool = DALLEConv2d(in_channels, hidden, 7), ('pool', nn.MaxPool2d(2))
        self.blocks = _blocks(first, widths, (3, 3, 3, 1), pool, vocab_size)

    def features(self, x: Tensor) -> Tensor:
        """Mapped pixels (B, in_channels, H, W) to the input of `output`, (B, 8 * hidden, H/8, W/8)."""
        for layer in self.blocks[:-1]:
            x = layer(x)
        return x

    def output(self, x: Tensor) -> Tensor:
        return self.blocks.output(x)  # B, V, h, w

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.features(x))


class DALLEDecoder(nn.Module):
    """Tokens to logit-Laplace distributions of the colours: all locations, then the logarithms of all scales.

    The input convolution is the codebook. Source: openai/DALL-E `dall_e/decoder.py`.
    """

    def __init__(self, hidden: int = 256, vocab_size: int = 8192, embed_dims: int = 128, out_channels: int = 6) -> None:
        super().__init__()
        widths = [factor * hidden for factor in reversed(GROUP_WIDTHS)]
        first, upsample = DALLEConv2d(vocab_size, embed_dims, 1), ('upsample', nn.Upsample(scale_factor=2))
        self.blocks = _blocks(first, widths, (1, 3, 3, 3), upsample, out_channels)

    def forward(self, z: Tensor) -> Tensor:
        """Tokens (B, h, w), or their weights (B, V, h, w), which sum to 1 over V, to (B, out_channels, 8h, 8w)."""
        if z.is_floating_point():
            return self.blocks(z)
        codebook = self.blocks.input
        x = F.embedding(z, codebook.w[:, :, 0, 0].t()) + codebook.b  # B, h, w, embed_dims
        return self.blocks[1:](x.permute(0, 3, 1, 2))
