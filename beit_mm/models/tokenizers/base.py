"""What a visual tokenizer is: the abstract class, and what all those with a codebook share (paper section 2.1)."""

import math
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from beit_mm.checkpoint.find import DEMO, locate_weights, path_of_checkpoint
from beit_mm.checkpoint.names import weights_of
from beit_mm.checkpoint.read import CheckpointError, read_checkpoint
from beit_mm.errors import UserError
from beit_mm.files import file_sha256
from beit_mm.positions import take_tokens

PADDING = -1  # position, and token, of a slot that holds nothing
EPS = 0.1  # pixels in [0, 1] are squeezed into [EPS, 1 - EPS]: the logit-Laplace distribution lives on (0, 1)
SMOKE_SEED = 0  # random weights are the same on all ranks, whatever the run's seed
PRECISIONS = dict(fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32)


class Tokenizer(nn.Module, ABC):
    """Images, RGB (C = 3) but for a tokenizer of other bands, to visual tokens."""

    vocab_size: int  # number of visual tokens
    stride: int  # pixels per token along a side
    can_decode: bool = False  # whether `decode` turns tokens into images
    provenance: dict[str, Any]  # type, precision, path and SHA-256 of the weights; kept in a run's checkpoints

    def prepare(self, device: torch.device) -> None:
        """Gives the networks the types that they compute in on `device`; before they are compiled, and in each call."""

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Visual tokens int64 (B, H / stride, W / stride) of images float (B, C, H, W) in [0, 1]."""

    def encode_at(self, images: Tensor, positions: Tensor) -> Tensor:
        """Visual tokens int64 (B, K) at `positions` only, int64 (B, K) row-major in the token grid; -1 stays -1."""
        tokens = take_tokens(self.encode(images).flatten(1), positions.clamp(min=0))
        return tokens.masked_fill(positions < 0, PADDING)

    def decode(self, tokens: Tensor) -> Tensor:
        """Images float32 (B, C, h * stride, w * stride) in [0, 1], given a decoder.

        Args:
            tokens: int64 (B, h, w); or of all tokens their weights, float (B, vocab_size, h, w), adding up to 1.
        """
        raise UserError(f'this {type(self).__name__} has no decoder, so its tokens cannot be drawn')

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """What mmpretrain's BEiT and CAE, which take the argmax, expect of DALL-E.

        Of images float (B, 3, H, W) after `map_pixels` uint8 (B, vocab_size, h, w), 1 at each visual token.
        """
        tokens = self.encode(unmap_pixels(images)).unsqueeze(1)  # B, 1, h, w
        shape = (len(tokens), self.vocab_size, *tokens.shape[2:])
        return torch.zeros(shape, dtype=torch.uint8, device=tokens.device).scatter_(1, tokens, 1)

    def grid_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens of an image in pixels."""
        if height % self.stride or width % self.stride:
            raise UserError(f'{type(self).__name__} takes sides of n * {self.stride} pixels, got {height} x {width}')
        return height // self.stride, width // self.stride


class CodebookTokenizer(Tokenizer):
    """A tokenizer made of an `encoder` with `features` and `output`, and a `decoder` with `from_tokens`, or None."""

    encoder: nn.Module
    decoder: nn.Module | None

    @property
    def can_decode(self) -> bool:
        return self.decoder is not None

    @abstractmethod
    def to_input(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] on the encoder's scale."""

    @abstractmethod
    def to_images(self, output: Tensor) -> Tensor:
        """The decoder's output as pixels in [0, 1]."""

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        with without_autocast(images):
            return self.encoder.output(self._features(images)).argmax(dim=1)

    @torch.no_grad()
    def encode_at(self, images: Tensor, positions: Tensor) -> Tensor:
        # The output layer runs at the positions only: with DALL-E's, 75 of 196, this saves 4.1 of 52.1 GFLOP an image.
        with without_autocast(images):
            sequence = self._features(images).flatten(2).transpose(1, 2)  # B, N, C
            picked = take_tokens(sequence, positions.clamp(min=0))  # B, K, C
            # A 1x1 convolution over K "pixels", so that it computes as it does over the whole map.
            logits = self.encoder.output(picked.transpose(1, 2).unsqueeze(-1))  # B, V, K, 1
            return logits.argmax(dim=1).squeeze(-1).masked_fill(positions < 0, PADDING)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        if self.decoder is None:
            return super().decode(tokens)  # says so
        self.prepare(tokens.device)
        with without_autocast(tokens):
            output = self.decoder(tokens) if tokens.is_floating_point() else self.decoder.from_tokens(tokens)
            return self.to_images(output.float())

    def _features(self, images: Tensor) -> Tensor:
        """What the encoder's output layer takes, (B, C, h, w)."""
        self.grid_size(*images.shape[-2:])
        self.prepare(images.device)
        return self.encoder.features(self.to_input(images.float()))


class TrainableTokenizer(Tokenizer):
    """A tokenizer that is a model of mmengine's too."""

    def forward(self, inputs: dict[str, Tensor], data_samples: list | None = None, mode: str = 'loss') -> dict | list:
        """mmengine's entry, for `images` float (B, C, H, W) in [0, 1], mode 'loss' or 'predict'."""
        if isinstance(inputs, Tensor):  # as mmpretrain's BEiT calls its target generator
            return super().forward(inputs)
        if mode == 'loss':
            return self._losses(inputs['images'])
        values = self._predict(inputs['images']) | dict(vocab_size=[self.vocab_size] * len(inputs['images']))
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    @abstractmethod
    def _losses(self, images: Tensor) -> dict[str, Tensor]:
        """The losses and, for the log, what `usage_of` this batch's tokens returns."""

    @abstractmethod
    def _predict(self, images: Tensor) -> dict[str, Tensor]:
        """What TokenizerMetric takes of the images, each (B, ...)."""

    def pictures(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        images = inputs['images']
        return {'image': images, 'tokens, decoded': self.decode(self.encode(images))}


def usage_of(tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """How many different tokens occur in int64 (N,), and exp of the entropy of how often, for a log."""
    counts = torch.zeros(vocab_size, device=tokens.device)
    counts.scatter_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))  # does not wait for the device
    perplexity = torch.special.entr(counts / counts.sum()).sum().exp()
    return dict(codes_used=(counts > 0).float().sum(), perplexity=perplexity)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Tokens are an argmax: autocast's rounding of the logits would silently change targets."""
    return torch.autocast(tensor.device.type, enabled=False)


def dtype_on(precision: str, device: torch.device) -> torch.dtype:
    """The type that a precision means on a device: as in the released code, fp16 is float32 on a CPU."""
    return PRECISIONS['fp32' if precision == 'fp16' and device.type == 'cpu' else precision]


def map_pixels(images: Tensor) -> Tensor:
    """Squeezes pixels of any shape from [0, 1] into [0.1, 0.9]. Source: openai/DALL-E `dall_e/utils.py`."""
    return (1 - 2 * EPS) * images + EPS


def unmap_pixels(images: Tensor) -> Tensor:
    """Inverse of `map_pixels`, clamped to [0, 1]."""
    return ((images - EPS) / (1 - 2 * EPS)).clamp(0, 1)


def logit_laplace_nll(mapped: Tensor, mu: Tensor, log_b: Tensor) -> Tensor:
    """Negative log likelihood of pixels under the logit-Laplace distribution, elementwise, in nats.

    f(x | mu, b) = exp(-|logit(x) - mu| / b) / (2 b x (1 - x)), hence
    -ln f = |logit(x) - mu| / b + ln b + ln(2 x (1 - x)), with x in (0, 1), after `map_pixels`.

    Source: DALL-E paper (arXiv 2102.12092), appendix A.3.
    """
    distance = (torch.logit(mapped) - mu).abs()
    return distance * torch.exp(-log_b) + log_b + (mapped * (1 - mapped)).log() + math.log(2)


def read_weights(source: str, sha256: str | None, advice: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Weights of a file (path or URL, of this hash), and its provenance; `advice` is for when it is missing."""
    path = path_of_checkpoint(DEMO, 'tokenizer') if source == DEMO else locate_weights(source, advice)
    return weights_of(read_checkpoint(path, sha256)), dict(path=str(path), sha256=sha256 or file_sha256(path))


def load_exactly(module: nn.Module, state: dict[str, Tensor], path: str) -> None:
    """Loads a state dict that must be the module's, or says which names or shapes are not.

    Parts on the meta device get memory where all shapes are the file's.
    """
    own, given = ({name: tensor.shape for name, tensor in each.items()} for each in (module.state_dict(), state))
    for part in module.modules() if own == given else ():
        if any(parameter.is_meta for parameter in part.parameters(recurse=False)):
            part.to_empty(device='cpu', recurse=False)
    try:
        module.load_state_dict(state)
    except (CheckpointError, RuntimeError) as error:
        reason = ' '.join(str(error).split())
        raise UserError(f'{path} does not hold the weights of this {type(module).__name__}: {reason:.400}') from None
