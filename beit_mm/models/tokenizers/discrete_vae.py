"""A tokenizer that this project trains: the discrete VAE, so that nobody depends on a download."""
import math

import torch
import torch.nn.functional as F
from mmengine.model import BaseModel
from torch import Tensor

from beit_mm.functional.pixels import logit_laplace_nll, map_pixels, unmap_pixels
from beit_mm.layers.dalle import STRIDE, DALLEDecoder, DALLEEncoder
from beit_mm.layers.discrete_vae import ConvDecoder, ConvEncoder
from beit_mm.models.tokenizers.codebook import CodebookTokenizer
from beit_mm.models.tokenizers.loading import load_exactly, read_weights
from beit_mm.registry import MODELS


def _cosine(start: float, end: float, progress: Tensor) -> Tensor:
    """From `start` to `end` along half a cosine while `progress` goes from 0 to 1."""
    return end + (start - end) * 0.5 * (1 + torch.cos(math.pi * progress.clamp(max=1)))


@MODELS.register_module()
class DiscreteVAE(CodebookTokenizer, BaseModel):
    """Discrete VAE with a Gumbel-softmax relaxation: an algorithm to train, then a tokenizer.

    The encoder gives every position of the token grid a distribution over the vocabulary. Training
    decodes a relaxed sample of it and minimises

        loss_recon   mean over pixels and colours of the reconstruction loss
        loss_kl      kl_weight * sum over positions KL(q || uniform) / (H * W * 3)

    so both are per pixel value, as in DALL-E, whose beta of 6.6 at 192 values a token (8 x 8 x 3)
    is a weight of 6.6 / 192 on the KL per position. As a tokenizer it takes the argmax.

    Args:
        arch: 'dalle' (DALL-E's networks) or 'conv' (DALLE-pytorch's, as in the released BEiT code).
        hidden: width; the widest group of 'dalle' has 8 times as much.
        vocab_size: number of visual tokens.
        embed_dims: width of the codebook.
        num_levels: halvings of the resolution; 'dalle' has 3.
        bottleneck_blocks: of 'conv': residual blocks at the bottleneck; None: one behind every
            level.
        loss: 'laplace' (logit-Laplace likelihood, DALL-E), 'mse' or 'smooth_l1' (on [-1, 1]).
        temperature: (start, end) of the Gumbel-softmax.
        temperature_steps: forward passes in training until `end` is reached, along a cosine.
        kl_weight: DALL-E's beta. It keeps the vocabulary in use: too little of it, and a few tokens
            do all the work. 6.6 suits 'laplace', whose values are larger, 0.5 suits 'mse'.
        kl_steps: forward passes in training over which the weight rises from 0, along a cosine.
        checkpoint: trained weights, a local path: a run's checkpoint or a plain state dict.
        sha256: expected hash of that file.
        data_preprocessor: must give `images` in [0, 1].
        init_cfg: as mmengine.

    Raises:
        ValueError: unknown `arch` or `loss`, or `num_levels` that 'dalle' cannot have.

    Source: DALL-E paper (arXiv 2102.12092) appendix A; lucidrains/DALLE-pytorch `dalle_pytorch.py`.
    Differs from the latter in the KL, which there is a sum over batch and positions whatever the
    image size (F.kl_div's 'batchmean' divides by the size of a one-element input): its weight w is
    ours divided by B * H * W * 3. Steps are counted in a buffer, so a resumed run continues its
    schedules.
    """

    def __init__(self, arch: str = 'conv', hidden: int = 256, vocab_size: int = 8192,
                 embed_dims: int = 512, num_levels: int = 3,
                 bottleneck_blocks: int | None = None, loss: str = 'mse',
                 temperature: tuple[float, float] = (1.0, 1 / 16), temperature_steps: int = 150_000,
                 kl_weight: float = 6.6, kl_steps: int = 5000, checkpoint: str | None = None,
                 sha256: str | None = None, data_preprocessor: dict | None = None,
                 init_cfg: dict | None = None) -> None:
        super().__init__(data_preprocessor=data_preprocessor, init_cfg=init_cfg)
        if loss not in ('laplace', 'mse', 'smooth_l1'):
            raise ValueError(f"loss must be 'laplace', 'mse' or 'smooth_l1', got {loss!r}.")
        out_channels = 6 if loss == 'laplace' else 3
        if arch == 'dalle':
            if 2 ** num_levels != STRIDE:
                raise ValueError(f"arch 'dalle' has 3 levels, got num_levels={num_levels}.")
            self.encoder = DALLEEncoder(hidden, vocab_size)
            self.decoder = DALLEDecoder(hidden, vocab_size, embed_dims, out_channels=out_channels)
        elif arch == 'conv':
            self.encoder = ConvEncoder(hidden, vocab_size, num_levels, bottleneck_blocks)
            self.decoder = ConvDecoder(hidden, vocab_size, embed_dims, num_levels,
                                       bottleneck_blocks, out_channels)
        else:
            raise ValueError(f"arch must be 'dalle' or 'conv', got {arch!r}.")
        self.vocab_size = vocab_size
        self.stride = 2 ** num_levels
        self.loss = loss
        self.temperature = temperature
        self.temperature_steps = temperature_steps
        self.kl_weight = kl_weight
        self.kl_steps = kl_steps
        self.register_buffer('steps', torch.zeros((), dtype=torch.int64))
        self.provenance = dict(type='DiscreteVAE', arch=arch, precision='fp32', path='random weights', sha256='')
        if checkpoint is not None:
            state, file = read_weights(
                checkpoint, sha256, advice='Train it with a config of configs/dvae and name the '
                "run's checkpoint in the tokenizer's `checkpoint`.")
            own = ('encoder.', 'decoder.', 'steps')  # a run may keep a preprocessor's buffers too
            load_exactly(self, {k: v for k, v in state.items() if k.startswith(own)}, checkpoint)
            self.provenance.update(file)

    def forward(self, inputs: dict[str, Tensor], data_samples: list | None = None,
                mode: str = 'loss') -> dict[str, Tensor] | list[dict[str, Tensor]]:
        """mmengine's entry.

        Args:
            inputs: `images`, float (B, 3, H, W), RGB in [0, 1].
            data_samples: not used.
            mode: 'loss' or 'predict'.

        Returns:
            'loss': `loss_recon` and `loss_kl`, and for the log `temperature` and, of this batch,
            `codes_used` and `perplexity`. 'predict': per image `recon_mae_01` and `tokens`, int32
            (h, w).
        """
        images = inputs['images']
        if mode == 'loss':
            return self._losses(images)
        if mode == 'predict':
            return self._predict(images)
        raise ValueError(f"DiscreteVAE has modes 'loss' and 'predict', got {mode!r}.")

    def pictures(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Title -> float (B, 3, H, W) in [0, 1]: the images and what is left of them in tokens."""
        images = inputs['images']
        return {'image': images, 'tokens, decoded': self.decode(self.encode(images))}

    def to_input(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] on the scale of the networks and of the loss."""
        return map_pixels(images) if self.loss == 'laplace' else 2 * images - 1

    def to_images(self, output: Tensor) -> Tensor:
        """The decoder's output as pixels in [0, 1]."""
        if self.loss == 'laplace':
            return unmap_pixels(output[:, :3].sigmoid())
        return (0.5 * output + 0.5).clamp(0, 1)

    def _losses(self, images: Tensor) -> dict[str, Tensor]:
        self.grid_size(*images.shape[-2:])
        target = self.to_input(images)
        logits = self.encoder(target).float()                                   # (B, V, h, w)
        tau = _cosine(*self.temperature, self.steps / self.temperature_steps)
        z = F.gumbel_softmax(logits, tau=tau, dim=1)
        log_q = logits.log_softmax(dim=1)
        # KL(q || uniform) = sum q ln q + ln V at each position
        kl = (log_q.exp() * log_q).sum(dim=1) + math.log(self.vocab_size)
        beta = _cosine(0.0, self.kl_weight, self.steps / self.kl_steps)
        losses = dict(
            loss_recon=self._reconstruction_loss(self.decoder(z).float(), target),
            loss_kl=beta * kl.sum() / target.numel(),
            temperature=tau, **self._usage(logits.argmax(dim=1)))
        if self.training:
            self.steps += 1
        return losses

    def _reconstruction_loss(self, output: Tensor, target: Tensor) -> Tensor:
        if self.loss == 'laplace':
            mu, log_b = output.chunk(2, dim=1)
            return logit_laplace_nll(target, mu, log_b).mean()
        function = F.mse_loss if self.loss == 'mse' else F.smooth_l1_loss
        return function(output, target)

    def _usage(self, tokens: Tensor) -> dict[str, Tensor]:
        """Number of different tokens and perplexity of a batch, without waiting for the device."""
        tokens = tokens.flatten()
        counts = torch.zeros(self.vocab_size, device=tokens.device)
        counts.scatter_add_(0, tokens, torch.ones_like(tokens, dtype=counts.dtype))
        frequencies = counts / counts.sum()
        return dict(codes_used=(counts > 0).float().sum(),
                    perplexity=torch.special.entr(frequencies).sum().exp())

    def _predict(self, images: Tensor) -> list[dict[str, Tensor]]:
        tokens = self.encode(images)
        errors = (self.decode(tokens) - images).abs().mean(dim=(1, 2, 3))
        return [dict(recon_mae_01=error, tokens=grid)
                for error, grid in zip(errors, tokens.int(), strict=True)]
