"""BEiT v2's tokenizer (VQ-KD), frozen, learned from the features of CLIP or DINO.

A vision Transformer and two linear layers give each patch a vector; its token is the nearest vector of the codebook.
"""

from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beit_mm.errors import check_choice
from beit_mm.models.tokenizers import base
from beit_mm.models.tokenizers.discrete_vae import ConvDecoder
from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import MODELS

VQKD_URL = (
    'https://github.com/addf400/files/releases/download/BEiT-v2/vqkd_encoder_base_decoder_3x768x12_clip-d5036aa7.pth'
)
ADVICE = (
    f'Get {VQKD_URL}, or train one with configs/beit_v2/vqkd_base_in1k.py, and name the file in '
    'model.target_generator.checkpoint; for a smoke run set model.target_generator.random_weights=True.'
)
# Not needed for encoding: the decoder of the teacher's features, and statistics of the training.
UNUSED = tuple(
    'decoder. decode_task_layer. usage started teacher_model. scaling_layer. loss quantize.cluster_size '
    'quantize.embedding.cluster_size quantize.embedding.embed_avg quantize.embedding.initted'.split()
)
RENAMED = {f'{network}.fc_norm.': f'{network}.norm.' for network in ('encoder', 'decoder')}  # of the released files
RENAMED['quantize.embedding.weight'] = 'codebook'


@MODELS.register_module()
class VQKDTokenizer(base.Tokenizer):
    """The encoder and the codebook of BEiT v2's VQ-KD, which give visual tokens.

    A token covers 16 x 16 pixels, so the tokenizer sees the view of the backbone. `decode` needs a `pixel_decoder`,
    which the released files do not have.

    Args:
        checkpoint: a path or a URL: a released file, mmpretrain's vqkd_encoder.pth, or a checkpoint of a VQKD.
        precision: the encoder's: 'fp16' (fp32 on a CPU, as in the original), 'bf16' or 'fp32'. Later layers are fp32.
        random_weights: use seeded random weights instead of a file, only for smoke runs.
        sha256: expected hash of the file.
        arch, img_size, patch_size: the encoder's, as in BEiTBackbone.
        vocab_size, code_dims: number of visual tokens, and width of the codebook.
        pixel_decoder: `hidden`, `width` and `bottleneck_blocks` of a ConvDecoder, for pictures.

    Source: microsoft/unilm `beit2/modeling_vqkd.py`, `beit2/norm_ema_quantizer.py`.
    """

    trains = False  # True in VQKD, whose random weights follow the seed of the run

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
        pixel_decoder: dict | None = None,
    ) -> None:
        super().__init__()
        check_choice('precision', precision, base.PRECISIONS)
        self.arch, self.vocab_size, self.stride, self.precision = arch, vocab_size, patch_size, precision
        self.provenance = dict(type='VQKDTokenizer', precision=precision, path='random weights', sha256='')
        with nullcontext() if self.trains else base.initialisation(random_weights):
            self.encoder = BEiTBackbone(arch, img_size, patch_size)
            dims = self.encoder.embed_dims
            self.encode_task_layer = nn.Sequential(nn.Linear(dims, dims), nn.Tanh(), nn.Linear(dims, code_dims))
            self.codebook = nn.Parameter(F.normalize(torch.randn(vocab_size, code_dims), dim=-1))
            self.pixel_decoder = None
            if pixel_decoder is not None:
                sizes = dict(num_levels=patch_size.bit_length() - 1, channels=3, **pixel_decoder)
                self.pixel_decoder = ConvDecoder(vocab_size=vocab_size, **sizes)
        self.can_decode = self.pixel_decoder is not None
        self.register_load_state_dict_pre_hook(_rename_released)
        if not random_weights:
            self.to_empty(device='cpu')  # the encoder translates mmpretrain's names while it loads
            unused = UNUSED if self.can_decode else (*UNUSED, 'pixel_decoder.')
            weights = self.read(checkpoint, sha256, ADVICE).items()
            needed = {name: tensor for name, tensor in weights if not name.startswith(unused)}
            base.load_exactly(self, needed, checkpoint)
        self.encoder.fits_on_load = False  # a pretraining checkpoint has no weights for it
        self.requires_grad_(False)

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        grid = self.grid_size(*images.shape[-2:])
        dtype = base.dtype_on(self.precision, images.device)
        with torch.autocast(images.device.type, dtype, enabled=dtype is not torch.float32):
            hidden = self.encoder(2 * images.float() - 1)[0][:, 1:]  # B, h*w, C
        return self.nearest_codes(self.vectors(hidden)).unflatten(1, grid)

    def vectors(self, hidden: Tensor) -> Tensor:
        """Turns the encoder's patches (B, h*w, C) into unit vectors (B, h*w, D); their nearest codes are the tokens."""
        with base.without_autocast(hidden):
            return F.normalize(self.encode_task_layer(hidden.float()), dim=-1)

    def nearest_codes(self, vectors: Tensor) -> Tensor:
        """Index, int64 (...), of the code that is nearest to each unit vector (..., D)."""
        with base.without_autocast(vectors):
            # |x - c|^2 is 1 + |c|^2 - 2 x.c, and codes need not have unit length.
            scores = vectors @ self.codebook.T - self.codebook.square().sum(dim=-1) / 2  # ..., V
        return scores.argmax(dim=-1)

    def _decode(self, tokens: Tensor) -> Tensor:
        return (0.5 * self.pixel_decoder(tokens) + 0.5).clamp(0, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Entry point for mmpretrain's BEiT v2: RGB images (B, 3, H, W) in [-1, 1] to tokens, int64 (B, h*w)."""
        return self.encode((images + 1) / 2).flatten(1)


def _rename_released(model: VQKDTokenizer, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    for name in [name for name in state_dict if name.startswith(prefix)]:
        renamed = name
        for theirs, ours in RENAMED.items():
            renamed = renamed.replace(theirs, ours)
        state_dict[renamed] = state_dict.pop(name)
