"""The discrete VAE, a tokenizer to train, and DALLE-pytorch's small networks."""

import math
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from torch import Tensor, nn

from beit_mm.errors import UserError, check_choice
from beit_mm.models.tokenizers import base
from beit_mm.models.tokenizers.dalle import DECODER_ADVICE, DALLEDecoder, DALLEEncoder
from beit_mm.registry import MODELS

ADVICE = "Train it with a config of configs/dvae and name the run's checkpoint in the tokenizer's `checkpoint`."


@MODELS.register_module()
class DiscreteVAE(base.TrainableTokenizer, base.CodebookTokenizer, BaseModel):
    """Discrete VAE with a Gumbel-softmax relaxation: an algorithm to train, then a tokenizer (paper section 2.1.2).

    The encoder gives each position of the token grid a distribution over the vocabulary. Training decodes a relaxed
    sample of it and minimises, per pixel value, the reconstruction loss + kl_weight * KL(q || uniform). So DALL-E's
    kl_weight of 6.6, with 192 values per token (8 x 8 x 3), puts 6.6 / 192 on the KL of a position.

    Args:
        arch: 'dalle' (DALL-E's networks) or 'conv' (DALLE-pytorch's, as in the released BEiT code).
        hidden: width; the widest group of 'dalle' is 8 times as wide.
        vocab_size, embed_dims: number of visual tokens, and width of the codebook.
        num_levels: how many times the resolution is halved; 'dalle' needs 3.
        in_channels: channels of the images.
        bottleneck_blocks: for 'conv': residual blocks at the bottleneck, as in DALLE-pytorch, five times cheaper; None:
            one after each level, as in the released BEiT code.
        loss: 'laplace' (logit-Laplace likelihood, DALL-E) or 'mse' (on [-1, 1]).
        straight_through: decode one-hot samples with the gradient of relaxed samples; DALL-E decodes relaxed samples.
        temperature, temperature_steps: start and end of the Gumbel-softmax temperature, and the steps between them.
        kl_weight: DALL-E's beta, which keeps the vocabulary in use. 6.6 suits 'laplace', 0.5 suits 'mse'.
        kl_steps: training steps over which the weight rises from 0.
        checkpoint: trained weights, a path or a URL.
        decoder_checkpoint: weights of the decoder if `checkpoint` holds only the encoder, as DALL-E's files do, which
            need arch 'dalle', loss 'laplace' and embed_dims 128.
        sha256: expected hash of `checkpoint`.
        data_preprocessor: must give `images` in [0, 1].

    Source: DALL-E paper (arXiv 2102.12092) appendix A; lucidrains/DALLE-pytorch `dalle_pytorch.py`.
    """

    def __init__(
        self,
        arch: str = 'conv',
        hidden: int = 256,
        vocab_size: int = 8192,
        embed_dims: int = 512,
        num_levels: int = 3,
        in_channels: int = 3,
        bottleneck_blocks: int | None = None,
        loss: str = 'mse',
        straight_through: bool = False,
        temperature: tuple[float, float] = (1.0, 1 / 16),
        temperature_steps: int = 150_000,
        kl_weight: float = 6.6,
        kl_steps: int = 5000,
        checkpoint: str | None = None,
        decoder_checkpoint: str | None = None,
        sha256: str | None = None,
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        check_choice('arch', arch, ('dalle', 'conv'))
        check_choice('loss', loss, ('laplace', 'mse'))
        out_channels = 2 * in_channels if loss == 'laplace' else in_channels
        with nullcontext() if checkpoint is None else torch.device('meta'):  # memory only once the shapes are checked
            if arch == 'dalle':
                check_choice("num_levels of arch 'dalle'", num_levels, [3])
                self.encoder = DALLEEncoder(hidden, vocab_size, in_channels)
                self.decoder = DALLEDecoder(hidden, vocab_size, embed_dims, out_channels)
            else:
                self.encoder = ConvEncoder(hidden, vocab_size, num_levels, bottleneck_blocks, in_channels)
                self.decoder = ConvDecoder(hidden, vocab_size, embed_dims, num_levels, bottleneck_blocks, out_channels)
        self.vocab_size, self.stride = vocab_size, 2**num_levels
        self.loss, self.straight_through = loss, straight_through
        self.temperature, self.temperature_steps = temperature, temperature_steps
        self.kl_weight, self.kl_steps = kl_weight, kl_steps
        self.register_buffer('steps', torch.zeros((), dtype=torch.int64))
        self.provenance = dict(type='DiscreteVAE', arch=arch, precision='fp32', path='random weights', sha256='')
        if checkpoint is not None:
            self._load(checkpoint, decoder_checkpoint, sha256)
        elif decoder_checkpoint is not None:
            raise UserError('decoder_checkpoint is set without checkpoint; set checkpoint to the file of the encoder')

    def _load(self, checkpoint: str, decoder_checkpoint: str | None, sha256: str | None) -> None:
        of_encoder = self.read(checkpoint, sha256, ADVICE)
        if decoder_checkpoint is not None:
            of_decoder = self.read(decoder_checkpoint, None, DECODER_ADVICE, 'decoder_')
        else:  # a file of a run, which may also hold buffers of the preprocessor
            self.steps.copy_(of_encoder.get('steps', self.steps))
            of_encoder, of_decoder = (_below(prefix, of_encoder) for prefix in ('encoder.', 'decoder.'))
        base.load_exactly(self.encoder, of_encoder, checkpoint)
        base.load_exactly(self.decoder, of_decoder, decoder_checkpoint or checkpoint)

    def _losses(self, images: Tensor) -> dict[str, Tensor]:
        self.grid_size(*images.shape[-2:])
        target = self.to_input(images)  # B, C, H, W
        logits = self.encoder(target).float()  # B, V, h, w
        tau = _cosine(*self.temperature, self.steps, self.temperature_steps)
        z = gumbel_softmax(logits, tau, self.straight_through)  # B, V, h, w
        output = self.decoder(z).float()  # B, C or 2 C, H, W
        if self.loss == 'laplace':
            loss_recon = base.logit_laplace_nll(target, *output.chunk(2, dim=1)).mean()
        else:
            loss_recon = F.mse_loss(output, target)
        log_q = logits.log_softmax(dim=1)
        # at each position KL(q || uniform) = sum q ln q + ln V
        kl = (log_q.exp() * log_q).sum(dim=1) + math.log(self.vocab_size)  # B, h, w
        beta = _cosine(0.0, self.kl_weight, self.steps, self.kl_steps)
        if self.training:
            self.steps += 1
        losses = dict(loss_recon=loss_recon, loss_kl=beta * kl.sum() / target.numel(), temperature=tau)
        return losses | base.usage_of(logits.argmax(dim=1).flatten(), self.vocab_size)

    @torch.no_grad()
    def _predict(self, images: Tensor) -> dict[str, Tensor]:
        """Errors of hard codes (the argmax) and soft codes (the probabilities), and `posterior_entropy` in nats."""
        with base.without_autocast(images):
            posterior = self.encoder.output(self._features(images)).softmax(dim=1)  # B, V, h, w
            soft = self.to_images(self.decoder(posterior).float())  # B, C, H, W
        tokens = posterior.argmax(dim=1)  # B, h, w
        return dict(
            recon_mae_01=(self.decode(tokens) - images).abs().mean(dim=(1, 2, 3)),  # B
            recon_mae_01_soft=(soft - images).abs().mean(dim=(1, 2, 3)),
            posterior_entropy=torch.special.entr(posterior).sum(dim=1).mean(dim=(1, 2)),
            tokens=tokens.int(),
        )


def _below(prefix: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in weights.items() if name.startswith(prefix)}


def gumbel_softmax(logits: Tensor, tau: Tensor | float, hard: bool) -> Tensor:
    """Draws samples (B, V, h, w) from the logits: relaxed, or one-hot with the gradient of relaxed samples."""
    # F.gumbel_softmax's exponential_ takes a fifth of the step of a small model on a CPU
    exponential = -torch.rand_like(logits).clamp(min=torch.finfo(logits.dtype).tiny).log()
    soft = ((logits - exponential.log()) / tau).softmax(dim=1)
    if not hard:
        return soft
    one_hot = torch.zeros_like(soft).scatter_(1, soft.argmax(dim=1, keepdim=True), 1)
    return one_hot - soft.detach() + soft


def _cosine(start: float, end: float, step: Tensor, steps: int) -> Tensor:
    """Goes from `start` to `end` along half a cosine while `step` goes from 0 to `steps`, which may be 0."""
    progress = (step / steps).clamp(max=1) if steps else torch.ones_like(step)
    return end + (start - end) * 0.5 * (1 + torch.cos(math.pi * progress))


class ConvResBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 3, padding=1),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, 1),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)


class ConvEncoder(nn.Module):
    """Images to token logits. Source: microsoft/unilm `beit/modeling_discrete_vae.py`, lucidrains/DALLE-pytorch."""

    def __init__(
        self, hidden: int, vocab_size: int, num_levels: int, bottleneck_blocks: int | None, in_channels: int = 3
    ) -> None:
        super().__init__()
        self.levels = nn.Sequential()
        for _ in range(num_levels):
            self.levels.append(nn.Sequential(nn.Conv2d(in_channels, hidden, 4, 2, padding=1), nn.ReLU(inplace=True)))
            if bottleneck_blocks is None:
                self.levels.append(ConvResBlock(hidden))
            in_channels = hidden
        self.levels.extend(ConvResBlock(hidden) for _ in range(bottleneck_blocks or 0))
        self.output = nn.Conv2d(hidden, vocab_size, 1)

    def features(self, x: Tensor) -> Tensor:
        return self.levels(x)  # B, hidden, H/2^levels, W/2^levels

    def forward(self, x: Tensor) -> Tensor:
        return self.output(self.features(x))


class ConvDecoder(nn.Module):
    """Tokens to pixels: a codebook of `width` numbers per token, then the mirrored encoder."""

    def __init__(
        self, hidden: int, vocab_size: int, width: int, num_levels: int, bottleneck_blocks: int | None, channels: int
    ) -> None:
        super().__init__()
        self.codebook = nn.Embedding(vocab_size, width)
        self.levels = nn.Sequential()
        if bottleneck_blocks is not None:
            self.levels.append(nn.Conv2d(width, hidden, 1))
            self.levels.extend(ConvResBlock(hidden) for _ in range(bottleneck_blocks))
            width = hidden
        for _ in range(num_levels):
            self.levels.append(nn.Sequential(nn.ConvTranspose2d(width, hidden, 4, 2, padding=1), nn.ReLU(inplace=True)))
            if bottleneck_blocks is None:
                self.levels.append(ConvResBlock(hidden))
            width = hidden
        self.output = nn.Conv2d(hidden, channels, 1)

    def forward(self, z: Tensor) -> Tensor:
        """Tokens (B, h, w), or their weights (B, V, h, w), which sum to 1 over V, to (B, channels, H, W)."""
        if z.is_floating_point():
            x = torch.einsum('bvhw,vd->bdhw', z, self.codebook.weight)
        else:
            x = self.codebook(z).permute(0, 3, 1, 2)
        return self.output(self.levels(x))
