"""The interface of visual tokenizers, and what they share (paper section 2.1)."""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from beit_mm.checkpoint.find import DEMO, locate_weights, path_of_checkpoint
from beit_mm.checkpoint.names import weights_of
from beit_mm.checkpoint.read import CheckpointError, read_checkpoint
from beit_mm.errors import UserError
from beit_mm.files import file_sha256
from beit_mm.positions import take_tokens

PADDING = -1  # position, and token, of an empty slot
EPS = 0.1  # pixels in [0, 1] are mapped to [EPS, 1 - EPS], because the logit-Laplace distribution is defined on (0, 1)
SMOKE_SEED = 0
PRECISIONS = dict(fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32)


class TargetGenerator(nn.Module, ABC):
    """Computes what pretraining predicts at each patch."""

    gives: str  # 'tokens', 'features' or 'pixels'
    can_decode: bool = False
    stride: int | None = None  # pixels of a token along a side; None: it needs no view of its own

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        # stored in a run's checkpoints; with weights from a file also its path, SHA-256 and settings
        self.provenance: dict[str, Any] = dict(type=type(self).__name__)

    @abstractmethod
    def targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Targets of a prepared batch, (B, K, ...) at `positions`, int64 (B, K), -1 = padding; None: (B, h*w, ...)."""

    def attach(self, backbone: nn.Module, preprocessor: nn.Module) -> None:
        """Called with the parts of the pretrainer that the targets are for."""

    def prepare(self, device: torch.device) -> None:
        """Converts the networks to their types on `device`; called before they are compiled, and in each call."""


class Tokenizer(TargetGenerator):
    """Turns images into visual tokens. C = 3 (RGB), unless the tokenizer was trained on other bands."""

    gives = 'tokens'
    vocab_size: int  # number of visual tokens
    stride: int

    def targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        if (images := inputs['tokenizer_images']) is None:
            raise UserError('the images have no second view for the tokenizer; set second_size or tokenizer_scale')
        rows, columns = self.grid_size(*images.shape[-2:])
        mask = inputs['mask']
        if mask is not None and mask.shape[1:] not in ((rows, columns), (rows * columns,)):
            cells = ' x '.join(map(str, mask.shape[1:]))
            raise UserError(
                f"the tokenizer's view has {rows} x {columns} visual tokens, the mask {cells} cells; expected one for "
                f"each patch: set the mask's grid, or second_size, {self.stride} pixels for a patch"
            )
        return self.encode(images).flatten(1) if positions is None else self.encode_at(images, positions)

    @abstractmethod
    def encode(self, images: Tensor) -> Tensor:
        """Visual tokens, int64 (B, H / stride, W / stride), of images, float (B, C, H, W) in [0, 1]."""

    def encode_at(self, images: Tensor, positions: Tensor) -> Tensor:
        """Visual tokens (B, K) only at `positions`, int64 (B, K), row-major in the token grid; -1 stays -1."""
        tokens = take_tokens(self.encode(images).flatten(1), positions.clamp(min=0))
        return tokens.masked_fill(positions < 0, PADDING)

    @torch.no_grad()
    def decode(self, tokens: Tensor) -> Tensor:
        """Images, float32 (B, C, h * stride, w * stride) in [0, 1]; needs a decoder.

        Tokens are int64 (B, h, w), or weights of all tokens, float (B, vocab_size, h, w), which sum to 1.
        """
        if not self.can_decode:
            raise UserError(f'the {type(self).__name__} has no decoder; give it decoder_checkpoint or pixel_decoder')
        self.prepare(tokens.device)
        with without_autocast(tokens):
            return self._decode(tokens)

    @torch.no_grad()
    def forward(self, images: Tensor) -> Tensor:
        """Entry point for mmpretrain's BEiT and CAE, which take the argmax of DALL-E's output.

        Takes images, float (B, 3, H, W), after `map_pixels`; returns uint8 (B, vocab_size, h, w), one-hot.
        """
        tokens = self.encode(unmap_pixels(images)).unsqueeze(1)  # B, 1, h, w
        shape = (len(tokens), self.vocab_size, *tokens.shape[2:])
        return torch.zeros(shape, dtype=torch.uint8, device=tokens.device).scatter_(1, tokens, 1)

    def grid_size(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of tokens for an image size in pixels."""
        if height % self.stride or width % self.stride:
            raise UserError(f'{height} x {width} pixels; {type(self).__name__} needs multiples of {self.stride}')
        return height // self.stride, width // self.stride

    def read(self, source: str, sha256: str | None, advice: str, prefix: str = '') -> dict[str, Tensor]:
        """Reads weights of a path, URL or 'demo' and notes the file in provenance; `advice` says where to get it."""
        path = path_of_checkpoint(DEMO, 'tokenizer') if source == DEMO else locate_weights(source, advice)
        weights = weights_of(read_checkpoint(path, sha256))
        self.provenance.update({f'{prefix}path': str(path), f'{prefix}sha256': sha256 or file_sha256(path)})
        return weights


class CodebookTokenizer(Tokenizer):
    """A tokenizer with an `encoder` (`features`, `output`) and, unless None, a `decoder` of tokens or their weights."""

    encoder: nn.Module
    decoder: nn.Module | None
    loss = 'laplace'  # or 'mse': the loss of the training decides how the networks scale pixels

    @property
    def can_decode(self) -> bool:
        return self.decoder is not None

    def to_input(self, images: Tensor) -> Tensor:
        """Scales pixels in [0, 1] for the encoder."""
        return map_pixels(images) if self.loss == 'laplace' else 2 * images - 1

    def to_images(self, output: Tensor) -> Tensor:
        """Turns the decoder's output into pixels in [0, 1]."""
        if self.loss == 'laplace':
            return unmap_pixels(output.chunk(2, dim=1)[0].sigmoid())  # the location; the scale is not needed
        return (0.5 * output + 0.5).clamp(0, 1)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        with without_autocast(images):
            return self.encoder.output(self._features(images)).argmax(dim=1)

    @torch.no_grad()
    def encode_at(self, images: Tensor, positions: Tensor) -> Tensor:
        # The output layer runs only at the positions: for DALL-E and 75 of 196, this saves 4.1 of 52.1 GFLOP per image.
        with without_autocast(images):
            sequence = self._features(images).flatten(2).transpose(1, 2)  # B, N, C
            picked = take_tokens(sequence, positions.clamp(min=0))  # B, K, C
            # A 1x1 convolution over K "pixels" gives the same numbers as over the whole map.
            logits = self.encoder.output(picked.transpose(1, 2).unsqueeze(-1))  # B, V, K, 1
            return logits.argmax(dim=1).squeeze(-1).masked_fill(positions < 0, PADDING)

    def _decode(self, tokens: Tensor) -> Tensor:
        return self.to_images(self.decoder(tokens).float())

    def _features(self, images: Tensor) -> Tensor:
        """Input of the encoder's output layer, (B, C, h, w)."""
        self.grid_size(*images.shape[-2:])
        self.prepare(images.device)
        return self.encoder.features(self.to_input(images.float()))


class TrainableTokenizer(Tokenizer):
    """A tokenizer that mmengine can train."""

    def forward(self, inputs: dict[str, Tensor], data_samples: list | None = None, mode: str = 'loss') -> dict | list:
        """mmengine's entry point for `images`, float (B, C, H, W) in [0, 1]; mode 'loss' or 'predict'."""
        if isinstance(inputs, Tensor):  # how mmpretrain's BEiT calls its target generator
            return super().forward(inputs)
        if mode == 'loss':
            return self._losses(inputs['images'])
        values = self._predict(inputs['images']) | dict(vocab_size=[self.vocab_size] * len(inputs['images']))
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    @abstractmethod
    def _losses(self, images: Tensor) -> dict[str, Tensor]:
        """The losses and, for the log, `usage_of` the tokens of the batch."""

    @abstractmethod
    def _predict(self, images: Tensor) -> dict[str, Tensor]:
        """What TokenizerMetric needs, each (B, ...)."""


def usage_of(tokens: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Number of different tokens in int64 (N,), and their perplexity (exp of the entropy), for the log."""
    counts = torch.zeros(vocab_size, device=tokens.device)
    counts.scatter_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))  # does not wait for the device
    perplexity = torch.special.entr(counts / counts.sum()).sum().exp()
    return dict(codes_used=(counts > 0).float().sum(), perplexity=perplexity)


def without_autocast(tensor: Tensor) -> AbstractContextManager:
    """Switches autocast off: rounded logits would change the tokens, which are their argmax."""
    return torch.autocast(tensor.device.type, enabled=False)


def dtype_on(precision: str, device: torch.device) -> torch.dtype:
    """The type that a precision means on a device; as in the released code, fp16 is float32 on a CPU."""
    return PRECISIONS['fp32' if precision == 'fp16' and device.type == 'cpu' else precision]


def map_pixels(images: Tensor) -> Tensor:
    """Maps pixels from [0, 1] to [0.1, 0.9]. Source: openai/DALL-E `dall_e/utils.py`."""
    return (1 - 2 * EPS) * images + EPS


def unmap_pixels(images: Tensor) -> Tensor:
    """Inverse of `map_pixels`, clamped to [0, 1]."""
    return ((images - EPS) / (1 - 2 * EPS)).clamp(0, 1)


def logit_laplace_nll(mapped: Tensor, mu: Tensor, log_b: Tensor) -> Tensor:
    """-ln f of pixels in (0, 1), elementwise, where f(x | mu, b) = exp(-|logit(x) - mu| / b) / (2 b x (1 - x)).

    Source: DALL-E paper (arXiv 2102.12092), appendix A.3.
    """
    distance = (torch.logit(mapped) - mu).abs()
    return distance * torch.exp(-log_b) + log_b + (mapped * (1 - mapped)).log() + math.log(2)


@contextmanager
def initialisation(random_weights: bool) -> Iterator[None]:
    """Inside, networks get random weights, the same on all ranks, or no memory, if a file will fill them."""
    if random_weights:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(SMOKE_SEED)
            yield
    else:
        with torch.device('meta'):
            yield


def load_exactly(module: nn.Module, state: dict[str, Tensor], path: str) -> None:
    """Loads a state dict into a module, which may be on the meta device; UserError if names or shapes differ."""
    expected = {name: tensor.shape for name, tensor in module.state_dict().items()}
    if expected == {name: tensor.shape for name, tensor in state.items()}:  # memory is allocated only then
        module.to_empty(device='cpu')
    try:
        module.load_state_dict(state)
    except (CheckpointError, RuntimeError) as error:
        reason = ' '.join(str(error).split())
        raise UserError(f'{path} does not hold the weights of this {type(module).__name__}: {reason:.400}') from None
