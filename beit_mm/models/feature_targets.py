"""Masked image modeling with a teacher's features as targets (EVA, dBOT).

Shapes: B images, K patches to predict, T features of a patch.
"""

import copy
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beit_mm.checkpoint.checkpoint import PerChannel
from beit_mm.errors import UserError, check_choice
from beit_mm.models.beit import PatchHead, TwoViewDataPreprocessor
from beit_mm.models.tokenizers.base import TargetGenerator
from beit_mm.models.tokenizers.vqkd_training import BEiTTeacher, patches_of
from beit_mm.models.vit import BEiTBackbone, block_indices
from beit_mm.registry import MODELS

EMA = 'ema'  # as teacher: the moving average of the backbone


@MODELS.register_module()
class FeatureTargets(TargetGenerator):
    """A teacher's features of the backbone's view; a plain ViT runs its last block only at the patches to predict.

    Args:
        teacher: a file or name of a plain ViT, as in BEiTTeacher; a config of a BEiTTeacher or CLIPTeacher; or 'ema',
            the backbone's moving average, which needs a TeacherMomentumHook (or `update_teacher` of the model after
            each step). Checkpoints hold only weights of 'ema'.
        layers: blocks whose features are averaged, 0-based, negative from the end; for CLIP only the last.
        normalize: mean 0 and variance 1 for each patch and layer, in place of a plain ViT's last norm.
        channels: channels of the images, counted from 0, that a frozen teacher sees; None: all.
        mean, std: of a frozen plain ViT's images, pixels 0-255, one number or one a channel; None: as its file says.

    Source: dBOT (arXiv 2209.03917); liuxingbin/dbot `models_mae.py`, forward_teacher and forward_loss.
    """

    gives = 'features'

    def __init__(
        self,
        teacher: str | dict,
        layers: int | Sequence[int] = -1,
        normalize: bool = True,
        channels: Sequence[int] | None = None,
        mean: PerChannel = None,
        std: PerChannel = None,
    ) -> None:
        super().__init__()
        self.layers, self.normalize, self.channels = layers, normalize, channels
        self.provenance = dict(type='FeatureTargets', teacher=EMA, layers=layers, normalize=normalize)
        self.ema: nn.ModuleDict | None = None
        # In a tuple, so that the teacher is not a submodule, whose weights checkpoints would hold; () for 'ema'
        self.frozen = () if teacher == EMA else (self._build(teacher, dict(mean=mean, std=std)),)
        if self.frozen:
            self.provenance.update(self.frozen[0].provenance)
        elif given := {k: v for k, v in dict(channels=channels, mean=mean, std=std).items() if v is not None}:
            raise UserError(f"{given}, but teacher='ema' sees what the backbone sees; leave out {' and '.join(given)}")

    def _build(self, teacher: str | dict, mean_std: dict[str, PerChannel]) -> nn.Module:
        config = dict(type='beit_mm.BEiTTeacher', checkpoint=teacher) if isinstance(teacher, str) else dict(teacher)
        config |= {name: value for name, value in mean_std.items() if value is not None}
        if self.layers != -1:
            config['layer'] = self.layers
        built = MODELS.build(config)
        if self.normalize and isinstance(built, BEiTTeacher):
            built.network.norm = None
        return built

    def attach(self, backbone: BEiTBackbone, preprocessor: TwoViewDataPreprocessor) -> None:
        self.patch_size, self.preprocessor = backbone.patch_size, (preprocessor,)
        if not self.frozen:
            average = copy.deepcopy(backbone)
            average.out_indices, average.mask_token = block_indices(self.layers, average.num_layers), None
            if self.normalize:
                average.norm = None
            self.ema = nn.ModuleDict(dict(backbone=average))  # `update_teacher` looks these names up in the model

    def prepare(self, device: torch.device) -> None:
        if self.frozen and self.frozen[0].mean.device != device:
            self.frozen[0].to(device)

    @torch.no_grad()
    def targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        images = inputs['images']
        self.prepare(images.device)
        if self.ema is not None:
            features = patches_of(self.ema['backbone'], images, positions)
        else:
            grid = tuple(-(-side // self.patch_size) for side in images.shape[2:])
            seen = self.preprocessor[0].denormalize(images)
            if self.channels is not None:  # indexing by a list copies it to the device, and the host waits
                seen = torch.stack([seen[:, channel] for channel in self.channels], dim=1)
            features = self.frozen[0](seen, grid, positions)
        layers = torch.stack(features).float()  # L, B, K, T
        if self.normalize:
            variance, mean = torch.var_mean(layers, dim=-1, keepdim=True)  # unbiased
            layers = (layers - mean) / (variance + 1e-6).sqrt()
        return layers.mean(dim=0)


@MODELS.register_module()
class FeatureRegressionHead(PatchHead):
    """Predicts features of patches from their hidden states.

    Args:
        embed_dims: width of the hidden states.
        target_dims: features of a patch in the teacher; CLIP ViT-B/16: 512, a plain ViT: its width.
        loss: 'smooth_l1', mean over the features, or 'cosine', 1 - cosine.

    Source: liuxingbin/dbot `models_mae.py`, forward_loss.
    """

    layer, predicts = 'feature_head', 'features'

    def __init__(self, embed_dims: int, target_dims: int, loss: str = 'smooth_l1', init_cfg: dict | None = None):
        super().__init__(embed_dims, target_dims, init_cfg)
        check_choice('loss', loss, ('smooth_l1', 'cosine'))
        self.target_dims, self.kind = target_dims, loss

    def loss(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        return dict(loss=super().loss(hidden, targets, positions)['loss'])

    def compare(self, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """The loss, and the squared distance, before which 'cosine' scales the prediction to the target's length."""
        predicted = self(hidden).float()  # B, K, T
        check_choice('head.target_dims', self.target_dims, [targets.shape[-1]])
        if self.kind == 'cosine':
            loss = 1 - F.cosine_similarity(predicted, targets, dim=-1)
            predicted = F.normalize(predicted, dim=-1) * targets.norm(dim=-1, keepdim=True)
        else:
            loss = F.smooth_l1_loss(predicted, targets, reduction='none', beta=2.0).mean(dim=-1)
        return dict(loss=loss, squared_error=(predicted - targets).square().sum(dim=-1))
