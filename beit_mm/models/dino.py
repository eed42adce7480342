"""DINO, and BEiT + DINO: a student learns from its own moving average.

Shapes: B images, V crops of each image for the student, L of them local, P prototypes, C channels.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.dist import all_reduce
from mmengine.model import BaseModule
from torch import Tensor
from torch.nn.utils.parametrizations import weight_norm

from beit_mm.errors import UserError
from beit_mm.models.beit import BEiTPretrainer, TwoViewDataPreprocessor
from beit_mm.models.tokenizers.base import without_autocast
from beit_mm.models.vit import INIT_STD, BEiTBackbone
from beit_mm.registry import MODELS

CROPS = ('second_images', 'local_images')
# Constants in DINOLoss of facebookresearch/dino `main_dino.py`, too.
STUDENT_TEMPERATURE = 0.1  # divides the student's logits
CENTER_MOMENTUM = 0.9  # for the moving average of the teacher's outputs


@MODELS.register_module()
class DINOPretrainer(BEiTPretrainer):
    """Self-distillation between crops of an image, alone or together with masked image modeling.

    The student's output for any crop learns to match the teacher's output for another, global crop of the same image.
    The teacher is a moving average of the student, without gradient, drop path or mask; its outputs are centred and
    sharpened. DINOHook in `custom_hooks` schedules its momentum and temperature, and freezes the last layer at first.
    A loop without a Runner sets `teacher_temperature`, and calls `update_teacher(momentum)` after each step.

    With a `head`, the backbone learns BEiT's task on the first global crop too; the paper states neither the weight nor
    the crops.

    Args:
        backbone: config of a BEiTBackbone with out_type 'raw'; it gets a mask token if there is a head.
        dino_head: config of a DINOHead.
        head, target_generator, init_cfg: as in BEiTPretrainer; None for DINO alone.
        data_preprocessor: config of a MultiCropDataPreprocessor.
        dino_weight: factor of DINO's loss.
        dino_on_masked: take the student's class token of the first global crop from the masked pass instead of a
            second, unmasked pass.

    Source: paper, appendix "Multi-Task Pre-Training with DINO"; arXiv 2104.14294; facebookresearch/dino `main_dino.py`.
    """

    averages = (*BEiTPretrainer.averages, 'teacher.')
    center: Tensor

    def __init__(
        self,
        backbone: dict,
        dino_head: dict,
        head: dict | None = None,
        target_generator: dict | None = None,
        data_preprocessor: dict | None = None,
        dino_weight: float = 1.0,
        dino_on_masked: bool = False,
        init_cfg: dict | None = None,
    ):
        if head is None and (dino_on_masked or target_generator is not None):
            raise UserError('dino_on_masked and target_generator need masked image modeling: set head')
        backbone = dict(backbone, masked_input=head is not None)
        super().__init__(backbone, head, target_generator, data_preprocessor, init_cfg=init_cfg)
        self.dino_weight, self.dino_on_masked = dino_weight, dino_on_masked
        self.teacher_temperature: float | Tensor | None = None
        self.dino_head = MODELS.build(dino_head)
        teacher = dict(backbone, drop_path_rate=0.0, masked_input=False, init_cfg=None)
        self.teacher = nn.ModuleDict(dict(backbone=MODELS.build(teacher), dino_head=MODELS.build(dino_head)))
        self.teacher.requires_grad_(False)
        self.update_teacher(0.0)
        self.register_buffer('center', torch.zeros(self.dino_head.num_prototypes))

    def loss(self, inputs: dict) -> dict[str, Tensor]:
        if inputs['second_images'] is None or self.teacher_temperature is None:
            raise UserError("DINO needs MultiCrop in the pipeline and dict(type='beit_mm.DINOHook') in custom_hooks")
        first, second = inputs['images'], inputs['second_images']  # B, 3, H, W
        unmasked = [first, second]
        tokens: list[Tensor] = []  # class tokens of the student
        losses = {}
        if self.head is not None:
            positions = self._positions_to_predict(inputs)  # B, K
            with_class = F.pad(positions, (0, 1), value=-self.backbone.num_prefix_tokens)
            hidden = self.hidden_states(inputs, with_class)  # B, K + 1, C
            mim = self.head.loss(hidden[:, :-1], self._targets(inputs, positions), positions)
            losses = dict(loss_mim=mim.pop('loss'), **mim)
            if self.dino_on_masked:
                tokens.append(hidden[:, -1])
                unmasked = [second]
        tokens.append(class_tokens(self.backbone, torch.cat(unmasked)))
        if inputs['local_images'] is not None:
            tokens.append(class_tokens(self.backbone, inputs['local_images']))
        student = self.dino_head(torch.cat(tokens)).unflatten(0, (-1, len(first)))  # V, B, P
        targets = self._teach(torch.cat([first, second])).unflatten(0, (2, len(first)))  # 2, B, P
        loss = dino_loss(student, targets)
        return {**losses, 'loss_dino': self.dino_weight * loss, **entropies(targets)}

    @torch.no_grad()
    def _teach(self, images: Tensor) -> Tensor:
        """The teacher's distributions (2B, P), centred and sharpened, for the global crops (2B, 3, H, W)."""
        outputs = self.teacher['dino_head'](class_tokens(self.teacher['backbone'], images))  # 2B, P
        targets = ((outputs - self.center) / self.teacher_temperature).softmax(dim=-1)
        if self.training:
            mean = outputs.mean(dim=0)
            all_reduce(mean, op='mean')
            self.center.lerp_(mean, 1 - CENTER_MOMENTUM)
        return targets


def class_tokens(backbone: BEiTBackbone, images: Tensor) -> Tensor:
    """Final hidden states (B, C) of the class tokens; the last block computes only these."""
    # Positions count from the first patch, before which registers may lie.
    positions = torch.full((len(images), 1), -backbone.num_prefix_tokens, device=images.device)
    return backbone(images, positions=positions)[0][:, 0]


def dino_loss(student: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy between the teacher's distributions (2, B, P) and the student's logits (V, B, P).

    The first two crops of the student are the teacher's; a crop is not compared with itself.
    """
    with without_autocast(student):
        log_probs = (student.float() / STUDENT_TEMPERATURE).log_softmax(dim=-1)
        pairs = -targets.flatten(1) @ log_probs.flatten(1).T / student.shape[1]  # 2, V
    same = pairs.diagonal().sum()  # teacher and student on the same crop
    return (pairs.sum() - same) / (pairs.numel() - 2)


def entropies(targets: Tensor) -> dict[str, Tensor]:
    """Mean entropy of the teacher's distributions (2, B, P), and entropy of their mean, in nats.

    They are equal after a collapse to one distribution for all images: one prototype (0) or a uniform one (ln P).
    """
    targets = targets.flatten(0, 1)
    entropy, mean_entropy = (torch.special.entr(p).sum(dim=-1).mean() for p in (targets, targets.mean(dim=0)))
    return dict(teacher_entropy=entropy, teacher_mean_entropy=mean_entropy)


@MODELS.register_module()
class DINOHead(BaseModule):
    """Projects class tokens onto prototypes: an MLP of three layers, normalisation, a linear layer with unit rows.

    Args:
        embed_dims: width of the class tokens.
        num_prototypes: number of outputs.
        hidden_dims, bottleneck_dims: widths of the MLP's two hidden layers and of its output.

    Source: facebookresearch/dino `vision_transformer.py`, DINOHead.
    """

    def __init__(
        self,
        embed_dims: int,
        num_prototypes: int = 65536,
        hidden_dims: int = 2048,
        bottleneck_dims: int = 256,
        init_cfg: dict | None = None,
    ):
        super().__init__(init_cfg)
        self.num_prototypes = num_prototypes
        self.mlp = nn.Sequential(
            nn.Linear(embed_dims, hidden_dims),
            nn.GELU(),
            nn.Linear(hidden_dims, hidden_dims),
            nn.GELU(),
            nn.Linear(hidden_dims, bottleneck_dims),
        )
        for layer in self.mlp[::2]:
            nn.init.trunc_normal_(layer.weight, std=INIT_STD)
            nn.init.zeros_(layer.bias)
        self.last_layer = weight_norm(nn.Linear(bottleneck_dims, num_prototypes, bias=False))
        lengths = self.last_layer.parametrizations.weight.original0  # num_prototypes, 1
        nn.init.ones_(lengths).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.mlp(x)  # B, bottleneck_dims
        with without_autocast(x):  # the temperatures would multiply rounding errors
            return self.last_layer(F.normalize(x.float(), dim=-1))  # B, num_prototypes


@MODELS.register_module()
class MultiCropDataPreprocessor(TwoViewDataPreprocessor):
    """TwoViewDataPreprocessor that also takes the crops of MultiCrop; the same Args."""

    def forward(self, data: dict, training: bool = False) -> dict:
        """Adds second_images (B, H, W, 3) as (B, 3, H, W), and local_images (B, L, h, w, 3) as (L*B, 3, h, w)."""
        inputs = dict(data['inputs'])
        crops = self.cast_data({name: inputs.pop(name) for name in CROPS if name in inputs})
        prepared = super().forward(dict(inputs=inputs), training)['inputs']
        if 'local_images' in crops:
            # L*B, h, w, 3: the first crop of each image, then the second of each, ...
            crops['local_images'] = crops['local_images'].transpose(0, 1).flatten(0, 1)
        for name in CROPS:
            prepared[name] = (self.channels_first(crops[name]) - self.mean) / self.std if name in crops else None
        return dict(inputs=prepared)
