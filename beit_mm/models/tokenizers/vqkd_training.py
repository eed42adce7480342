"""Training of VQ-KD: a decoder predicts a teacher's patch features from visual tokens.

Shapes: B images, h x w patches, C channels of the encoder, D numbers of a code, V visual tokens, T teacher features.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch
import torch.nn.functional as F
from mmengine.dist import all_gather, all_reduce, broadcast
from mmengine.model import BaseModel
from torch import Tensor, nn

from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, PerChannel
from beit_mm.errors import check_choice
from beit_mm.files import file_sha256
from beit_mm.models.tokenizers import base
from beit_mm.models.tokenizers.vqkd import VQKDTokenizer
from beit_mm.models.vit import INIT_STD, BEiTBackbone, block_indices, sizes_of
from beit_mm.positions import Grid, take_tokens
from beit_mm.registry import MODELS

KMEANS_STEPS = 10


@MODELS.register_module()
class VQKD(base.TrainableTokenizer, VQKDTokenizer, BaseModel):
    """VQ-KD: an algorithm to train, whose checkpoints VQKDTokenizer reads (BEiT v2, arXiv 2208.06366, section 2.2).

    The decoder gets the code that is nearest to the vector of a patch, with a straight-through gradient. A code is the
    moving average, at unit length, of the vectors nearest to it in all batches of all processes. The losses:

        loss_feature   1 - cosine of the decoder's and the teacher's features, mean over patches
        loss_commit    mean squared difference between vector and code, both of unit length
        loss_pixels    mean squared error of the pixel decoder on [-1, 1], without a gradient to the tokens

    Args:
        teacher: config of a BEiTTeacher or CLIPTeacher; `init_weights` or the first loss builds it.
        teacher_dims: features of a patch in the teacher (CLIP ViT-B/16: 512; BEiT: its width).
        decoder_layers: blocks of the decoder, which is as wide as the encoder (released: 3 or 1).
        decay: factor of the moving average.
        kmeans_init: start with 10 steps of k-means on the first batch of all processes; otherwise with random codes.
        restart_below: a code that fewer patches than this choose, averaged over batches of all processes, is replaced
            by a vector of the batch; the log counts `codes_restarted`. None: never, as released.
        init_bound: where the initial weights, normal with sigma 0.02, are cut: 2, as released, cuts nothing; 0.02 is
            BEiT's pretraining.
        data_preprocessor: must give `images` in [0, 1].
        options: as in VQKDTokenizer; `precision` applies only to testing.

    Source: microsoft/unilm `beit2/modeling_vqkd.py`, `beit2/norm_ema_quantizer.py`.
    """

    trains = True

    def __init__(
        self,
        teacher: dict,
        teacher_dims: int,
        decoder_layers: int = 3,
        decay: float = 0.99,
        kmeans_init: bool = True,
        restart_below: float | None = None,
        init_bound: float = 2.0,
        data_preprocessor: dict | None = None,
        **options,
    ) -> None:
        super().__init__(checkpoint='', sha256=None, random_weights=True, **options)
        if data_preprocessor is not None:
            self.data_preprocessor = MODELS.build(data_preprocessor)
        self.decay, self.restart_below = decay, restart_below
        self.teacher_config, self.teacher_dims = teacher, teacher_dims
        code_dims = self.codebook.shape[1]
        sizes = dict(sizes_of(self.arch), num_layers=decoder_layers)
        self.decoder = BEiTBackbone(sizes, self.encoder.grid, patch_size=1, in_channels=code_dims)
        self.decoder.fits_on_load = False
        dims = self.encoder.embed_dims
        self.decode_task_layer = nn.Sequential(nn.Linear(dims, dims), nn.Tanh(), nn.Linear(dims, teacher_dims))
        for network in (self.encoder, self.decoder):
            if init_bound != INIT_STD:  # the constructor has already drawn the default
                network.init_transformer(init_bound)
            network.patch_embed.proj.reset_parameters()
        for layer in (*self.encode_task_layer, *self.decode_task_layer):
            if isinstance(layer, nn.Linear):
                nn.init.trunc_normal_(layer.weight, std=INIT_STD)
                nn.init.zeros_(layer.bias)
        self.requires_grad_(True)
        self.codebook.requires_grad_(False)
        self.register_buffer('usage', torch.ones(self.vocab_size))  # patches nearest to each code, moving average
        self.register_buffer('started', torch.tensor(not kmeans_init))
        self.has_started = False  # copy of `started`, so that the host does not wait for the device
        self.register_load_state_dict_pre_hook(_has_started)

    def init_weights(self) -> None:
        super().init_weights()
        _ = self.teacher  # so that a missing file fails before the first step

    def _losses(self, images: Tensor) -> dict[str, Tensor]:
        grid = self.grid_size(*images.shape[-2:])
        vectors = self.vectors(self.encoder(2 * images - 1)[0][:, 1:])  # B, h*w, D
        flat = vectors.detach().flatten(0, 1)  # B*h*w, D
        self.has_started = self.has_started or bool(self.started)  # stays False if the first step is undone
        if not self.has_started:
            self._start_codes(flat)
        tokens = self.nearest_codes(vectors.detach())  # B, h*w
        codes = F.embedding(tokens, self.codebook)  # B, h*w, D, a copy
        predicted = self._predict_features(vectors + (codes - vectors).detach(), grid)  # B, h*w, T
        results = dict(
            loss_feature=(1 - F.cosine_similarity(predicted, self._target(images, grid), dim=-1)).mean(),
            loss_commit=F.mse_loss(vectors, codes),
        )
        if self.pixel_decoder is not None:
            pixels = self.pixel_decoder(tokens.unflatten(1, grid)).float()
            results['loss_pixels'] = F.mse_loss(pixels, 2 * images - 1)
        if self.training:
            results |= self._update_codes(flat, tokens.flatten())
        return results | base.usage_of(tokens.flatten(), self.vocab_size)

    def _predict_features(self, codes: Tensor, grid: tuple[int, int]) -> Tensor:
        """From codes (B, h*w, D) to the teacher's features (B, h*w, T)."""
        hidden = self.decoder(codes.transpose(1, 2).unflatten(2, grid))[0][:, 1:]  # B, h*w, C
        return self.decode_task_layer(hidden).float()

    @cached_property
    def teacher(self) -> 'tuple[Teacher]':
        """The teacher, in a tuple so that it is not a submodule: neither trained nor in checkpoints."""
        with torch.random.fork_rng(devices=[]):  # a resumed run builds it at another step, but draws the same numbers
            return (MODELS.build(self.teacher_config).to(self.codebook.device),)

    def _target(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        (features,) = self.teacher[0](images, grid)
        check_choice('teacher_dims', self.teacher_dims, [features.shape[2]])
        return features.float()

    @torch.no_grad()
    def _predict(self, images: Tensor) -> dict[str, Tensor]:
        grid = self.grid_size(*images.shape[-2:])
        tokens = self.encode(images)  # B, h, w
        predicted = self._predict_features(F.embedding(tokens.flatten(1), self.codebook), grid)
        distance = 1 - F.cosine_similarity(predicted, self._target(images, grid), dim=-1)  # B, h*w
        values = dict(feature_distance=distance.mean(dim=1), tokens=tokens.int())
        if self.can_decode:
            values['recon_mae_01'] = (self.decode(tokens) - images).abs().mean(dim=(1, 2, 3))
        return values

    @torch.no_grad()
    def _start_codes(self, vectors: Tensor) -> None:
        """Sets the codes by k-means, with cosines, on the vectors (N, D) of all processes."""
        vectors = torch.cat(all_gather(vectors))
        codes = self._sample(vectors)
        with base.without_autocast(vectors):
            for _ in range(KMEANS_STEPS):
                counts, sums = self._sum_by_token((vectors @ codes.T).argmax(dim=1), vectors)
                codes = torch.where(counts > 0, F.normalize(sums, dim=-1), codes)
        broadcast(codes)  # they can differ between processes, because a GPU adds in any order
        self.codebook.copy_(codes)
        self.started.fill_(True)

    def _sample(self, vectors: Tensor) -> Tensor:
        """A vector of process 0 for each code, from (N, D); without repeats if N is large enough."""
        chosen = torch.randperm(max(len(vectors), self.vocab_size), device=vectors.device) % len(vectors)
        sample = vectors[chosen[: self.vocab_size]]
        broadcast(sample)
        return sample

    @torch.no_grad()
    def _update_codes(self, vectors: Tensor, tokens: Tensor) -> dict[str, Tensor]:
        """Moves each code towards the mean of its vectors, (N, D) with tokens (N,)."""
        counts, sums = self._sum_by_token(tokens, vectors, all_processes=True)
        means = torch.where(counts > 0, F.normalize(sums, dim=-1), self.codebook)
        self.codebook.copy_(F.normalize(self.codebook.lerp(means, 1 - self.decay), dim=-1))
        self.usage.lerp_(counts[:, 0], 1 - self.decay)
        if self.restart_below is None:
            return {}
        dead = self.usage < self.restart_below  # V
        self.codebook.copy_(torch.where(dead[:, None], self._sample(vectors), self.codebook))
        self.usage.masked_fill_(dead, 1.0)
        return dict(codes_restarted=dead.float().sum())

    def _sum_by_token(self, tokens: Tensor, vectors: Tensor, all_processes: bool = False) -> tuple[Tensor, Tensor]:
        """Counts (V, 1) and sums (V, D), for each token, of the vectors (N, D) that have it."""
        sums = torch.zeros(self.vocab_size, 1 + vectors.shape[1], device=vectors.device)
        sums.index_add_(0, tokens, F.pad(vectors, (1, 0), value=1.0))
        if all_processes:
            all_reduce(sums)
        return sums[:, :1], sums[:, 1:]


def _has_started(model: VQKD, state_dict: dict[str, Tensor], prefix: str, *_: object) -> None:
    """Load hook: a file without `started`, such as a released one, has trained codes."""
    if f'{prefix}codebook' in state_dict:
        state_dict.setdefault(f'{prefix}started', torch.tensor(True))


class Teacher(nn.Module, ABC):
    """A frozen network whose features of the patches are the targets; `mean` and `std` are those of pixels 0-255."""

    def __init__(self, network: nn.Module, patch_size: int, mean: Sequence[float], std: Sequence[float]) -> None:
        super().__init__()
        self.network, self.patch_size = network, patch_size
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1))
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1))
        self.provenance = dict(teacher=type(self).__name__)
        self.requires_grad_(False).eval()

    @torch.no_grad()
    def forward(self, images: Tensor, grid: Grid, positions: Tensor | None = None) -> list[Tensor]:
        """Features of each layer, (B, K, T) at `positions`, int64 (B, K), -1 = padding; None: (B, h*w, T).

        The images (B, C, H, W) in [0, 1] are resized to give the patch `grid`.
        """
        size = [side * self.patch_size for side in grid]
        if size != [*images.shape[2:]]:
            images = F.interpolate(images, size, mode='bicubic', antialias=True).clamp(0, 1)
        return self.patches((255 * images - self.mean) / self.std, positions)

    @abstractmethod
    def patches(self, images: Tensor, positions: Tensor | None) -> list[Tensor]:
        """As `forward`, for normalised images."""


@MODELS.register_module()
class BEiTTeacher(Teacher):
    """A BEiT or plain ViT of any format.

    Args:
        checkpoint: a file, the folder of a run or a name, as in `Checkpoint.open`.
        layer: block or blocks, 0-based, negative from the end; the last block is followed by the norm, if there is one.
        mean, std: a number for each channel of its images, 0-255; None: see `checkpoint.normalisation_of`.
    """

    def __init__(
        self,
        checkpoint: CheckpointInput,
        layer: int | Sequence[int] = -1,
        mean: PerChannel = None,
        std: PerChannel = None,
    ) -> None:
        opened = Checkpoint.open(checkpoint, mean=mean, std=std)
        backbone = BEiTBackbone.from_checkpoint(opened)
        backbone.out_type, backbone.out_indices = 'raw', block_indices(layer, backbone.num_layers)
        mean_std, _ = opened.normalisation
        super().__init__(backbone, backbone.patch_size, **mean_std)
        self.provenance.update(path=str(opened.path), sha256=file_sha256(opened.path))

    def patches(self, images: Tensor, positions: Tensor | None) -> list[Tensor]:
        return patches_of(self.network, images, positions)


def patches_of(backbone: BEiTBackbone, images: Tensor, positions: Tensor | None) -> list[Tensor]:
    """The outputs of a backbone with out_type 'raw', at `positions` (B, K, C) or of all patches (B, h*w, C)."""
    first = 0 if positions is not None else backbone.num_prefix_tokens
    return [output[:, first:] for output in backbone(images, positions=positions)]


@MODELS.register_module()
class CLIPTeacher(Teacher):
    """The image encoder of a transformers CLIP model; each patch is projected to the common space of images and texts.

    Args:
        name: a folder, or a model such as 'openai/clip-vit-base-patch16', BEiT v2's teacher; weights in safetensors.

    Source: microsoft/unilm `beit2/modeling_vqkd.py`, `get_regress_target`.
    """

    def __init__(self, name: str) -> None:
        from transformers import CLIPVisionModelWithProjection

        network = CLIPVisionModelWithProjection.from_pretrained(name, use_safetensors=True).float()
        mean = [255 * level for level in (0.48145466, 0.4578275, 0.40821073)]
        std = [255 * level for level in (0.26862954, 0.26130258, 0.27577711)]
        super().__init__(network, network.config.patch_size, mean, std)
        self.provenance.update(path=name)

    def patches(self, images: Tensor, positions: Tensor | None) -> list[Tensor]:
        vision = self.network.vision_model
        hidden = vision(images, interpolate_pos_encoding=True).last_hidden_state
        hidden = hidden[:, 1:] if positions is None else take_tokens(hidden, positions + 1)
        return [self.network.visual_projection(vision.post_layernorm(hidden))]
