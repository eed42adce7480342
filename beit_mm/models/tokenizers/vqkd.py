"""BEiT v2's tokenizer (VQ-KD): 8192 visual tokens learned from the features of CLIP or DINO, frozen.

A vision Transformer encodes the image, two linear layers bring its patches to 32 numbers, and the nearest of 8192 such
vectors, the codebook, is the token. At the true size they have 86,666,784 parameters. Their names are those of the
released files, but for `codebook`.
"""

import logging
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from mmengine.logging import print_log
from torch import Tensor, nn

from beit_mm.checkpoint.names import Weights, convert_state_dict
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.models.tokenizers.base import Tokenizer, load_exactly, read_weights, without_autocast
from beit_mm.models.tokenizers.dalle import SMOKE_SEED
from beit_mm.models.vit import NORM_EPS, Block, PatchEmbed, PositionEmbeddingReader, sizes_of
from beit_mm.registry import MODELS
from beit_mm.terminal import UserError

VQKD_URL = (
    'https://github.com/addf400/files/releases/download/BEiT-v2/vqkd_encoder_base_decoder_3x768x12_clip-d5036aa7.pth'
)
VQKD_ADVICE = (
    f'Get {VQKD_URL} and name the file in target_generator.checkpoint; '
    'for a smoke run set target_generator.random_weights=True.'
)
# In the released files, and of no use for encoding: what decodes the teacher's features, and statistics of training.
UNUSED = (
    'decoder.',
    'decode_task_layer.',
    'teacher_model.',
    'scaling_layer.',
    'loss',
    'quantize.cluster_size',
    'quantize.embedding.cluster_size',
    'quantize.embedding.embed_avg',
    'quantize.embedding.initted',
)
CODEBOOK = 'quantize.embedding.weight'
PRECISIONS = dict(fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32)


@MODELS.register_module()
class VQKDTokenizer(Tokenizer):
    """The encoder and the codebook of BEiT v2's VQ-KD as the source of visual tokens.

    Tokens are 16 x 16 pixels, so the tokenizer sees the backbone's own view. There is no `decode`: VQ-KD's decoder
    gives features, not pixels.

    Args:
        checkpoint: a path or a URL: a released file (any of the three), or mmpretrain's vqkd_encoder.pth.
        precision: of the encoder. 'fp16': as the original, that is fp16 on a GPU and fp32 on a CPU; 'bf16'; 'fp32'. The
            layers after it are fp32.
        random_weights: no file, seeded random weights: for smoke runs only.
        sha256: expected hash of the file.
        arch: of the encoder, a name or a dict as of BEiTBackbone.
        img_size: side in pixels that the position embedding is made for; it is resampled for other images.
        patch_size: pixels per token along a side.
        code_dims: width of the codebook.
        vocab_size: number of visual tokens.

    `provenance` says type, precision, path and sha256, for the run's checkpoints.

    Raises:
        ValueError: unknown precision, or weights of another network.
        FileNotFoundError: no weights; says where it looked and where to get them.

    Source: microsoft/unilm `beit2/modeling_vqkd.py`, `beit2/norm_ema_quantizer.py`.
    """

    def __init__(
        self,
        checkpoint: str = VQKD_URL,
        precision: str = 'fp16',
        random_weights: bool = False,
        sha256: str | None = None,
        arch: str | dict = 'base',
        img_size: int = 224,
        patch_size: int = 16,
        code_dims: int = 32,
        vocab_size: int = 8192,
    ) -> None:
        super().__init__()
        if precision not in PRECISIONS:
            raise UserError(f"precision must be 'fp16', 'bf16' or 'fp32', got {precision!r}.")
        self.vocab_size = vocab_size
        self.stride = patch_size
        self.precision = precision
        self.provenance = dict(type='VQKDTokenizer', precision=precision, path='random weights', sha256='')
        sizes = sizes_of(arch)
        with torch.random.fork_rng(devices=[]), nullcontext() if random_weights else torch.device('meta'):
            torch.default_generator.manual_seed(SMOKE_SEED)
            self.encoder = VQKDEncoder(**sizes, img_size=img_size, patch_size=patch_size)
            self.encode_task_layer = nn.Sequential(
                nn.Linear(sizes['embed_dims'], sizes['embed_dims']),
                nn.Tanh(),
                nn.Linear(sizes['embed_dims'], code_dims),
            )
            self.codebook = nn.Parameter(F.normalize(torch.randn(vocab_size, code_dims), dim=-1))
        if not random_weights:
            self.to_empty(device='cpu')  # never initialised in vain
            state, file = read_weights(checkpoint, sha256, VQKD_ADVICE)
            load_exactly(self, _own_weights(state, checkpoint), checkpoint)
            self.provenance.update(file)
        self.requires_grad_(False)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Visual tokens of images.

        Args:
            images: float (B, 3, H, W), RGB in [0, 1].

        Returns:
            int64 (B, H / patch_size, W / patch_size).
        """
        grid = self.grid_size(*images.shape[-2:])
        dtype = PRECISIONS[self.precision]
        reduced = dtype == torch.bfloat16 or dtype == torch.float16 and images.device.type != 'cpu'
        with torch.autocast(images.device.type, dtype if reduced else None, enabled=reduced):
            x = self.encoder(2 * images.float() - 1)  # B, h*w, C
        with without_autocast(images):
            x = F.normalize(self.encode_task_layer(x.float()), dim=-1)  # B, h*w, D
            # The nearest vector: |x - c|^2 is 1 + |c|^2 - 2 x.c. Released ones have unit length.
            scores = x @ self.codebook.T - self.codebook.square().sum(dim=-1) / 2  # B, h*w, V
        return scores.argmax(dim=-1).unflatten(1, grid)

    def forward(self, images: Tensor) -> Tensor:
        """What mmpretrain's BEiT v2 takes from a target generator, in the place of its VQKD.

        Args:
            images: float (B, 3, H, W), RGB as its recipe prepares it, in [-1, 1].

        Returns:
            int64 (B, N) visual tokens.
        """
        return self.encode((images + 1) / 2).flatten(1)


class VQKDEncoder(nn.Module):
    """A vision Transformer with absolute positions whose patches are normalised at the end.

    Source: microsoft/unilm `beit2/modeling_finetune.py`, `VisionTransformer` with `return_patch_tokens`.
    """

    def __init__(
        self,
        embed_dims: int,
        num_layers: int,
        num_heads: int,
        feedforward_channels: int | None = None,
        img_size: int = 224,
        patch_size: int = 16,
    ) -> None:
        super().__init__()
        side = img_size // patch_size
        self.patch_embed = PatchEmbed(patch_size, 3, embed_dims)
        self.cls_token = nn.Parameter(torch.randn(1, 1, embed_dims))
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + side * side, embed_dims))
        self.read_pos_embed = PositionEmbeddingReader((side, side), 'bicubic')
        self.blocks = nn.ModuleList(
            Block(embed_dims, num_heads, feedforward_channels or 4 * embed_dims) for _ in range(num_layers)
        )
        self.fc_norm = nn.LayerNorm(embed_dims, eps=NORM_EPS)

    def forward(self, images: Tensor) -> Tensor:
        """Images (B, 3, H, W), pixels in [-1, 1], to their patches' features (B, h*w, C)."""
        x, grid = self.patch_embed(images)  # B, h*w, C
        x = torch.cat([self.cls_token.expand(len(x), -1, -1).to(x.dtype), x], dim=1)  # B, N, C
        x = x + self.read_pos_embed(self.pos_embed, grid)
        for block in self.blocks:
            x = block(x, grid)
        return self.fc_norm(x[:, 1:])


def _own_weights(weights: Weights, source: str) -> Weights:
    """The tokenizer's weights under its names; names that it does not know stay, for `load_exactly` to refuse."""
    unused = [name for name in weights if name.startswith(UNUSED)]
    parts = ', '.join(part.strip('.') for part in UNUSED if any(name.startswith(part) for name in unused)) or 'none'
    message = f'VQ-KD from {source}: {len(weights) - len(unused)} tensors used, {len(unused)} not needed ({parts})'
    print_log(message, logger='current', level=logging.INFO)
    own = {name: tensor for name, tensor in weights.items() if name not in unused}
    if CODEBOOK in own:
        own['codebook'] = own.pop(CODEBOOK)
    if 'encoder.layers.0.attn.qkv.weight' in own:  # mmpretrain's names
        encoder = {name.removeprefix('encoder.'): own.pop(name) for name in [*own] if name.startswith('encoder.')}
        try:
            ours, unknown, _ = convert_state_dict(encoder, 'mmpretrain')
        except CheckpointError as error:
            raise CheckpointError(f'{source} {error}') from None
        own |= {f'encoder.{name}': encoder[name.removeprefix('backbone.')] for name in unknown}
        for name, tensor in ours.items():
            own[name.replace('backbone.norm.', 'encoder.fc_norm.').replace('backbone.', 'encoder.')] = tensor
    return own
