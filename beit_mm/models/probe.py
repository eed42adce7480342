"""The linear and the attentive probe, and random erasing for classification."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModel, normal_init
from mmpretrain.models import ClsDataPreprocessor
from mmpretrain.structures import DataSample
from torch import Tensor

from beit_mm.errors import check_choice
from beit_mm.models.vit import INIT_STD, sizes_of
from beit_mm.registry import MODELS


@MODELS.register_module()
class LinearProbe(BaseModel):
    """A frozen backbone and one linear classifier for each block, all trained in one run on the same images.

    The classifiers share nothing, so the sum of their losses trains each as if it were alone.

    Args:
        backbone: config of a BEiTBackbone; `init_cfg=dict(type='Pretrained', checkpoint=..., prefix='backbone.')`
            loads the weights to probe. `out_type`, `out_indices` and `drop_path_rate` are set here.
        num_classes: classes of the dataset.
        layers: blocks to probe, 0-based, negative from the end; None for all.
        feature: 'mean' of the patch tokens (paper, C numbers), or 'cls_mean', the class token followed by this mean
            (released code, 2 C numbers); both from the output of the block, without a norm.
        data_preprocessor: config of mmpretrain's ClsDataPreprocessor.

    Source: paper appendix "linear probes"; microsoft/unilm `beit/run_linear_eval.py`.
    """

    def __init__(
        self,
        backbone: dict,
        num_classes: int,
        layers: int | Sequence[int] | None = None,
        feature: str = 'mean',
        data_preprocessor: dict | None = None,
        init_cfg: dict | None = None,
    ):
        super().__init__(data_preprocessor, init_cfg)
        check_choice('feature', feature, ('mean', 'cls_mean'))
        self.feature, self.num_classes = feature, num_classes
        if layers is None:
            layers = range(sizes_of(backbone.get('arch', 'base'))['num_layers'])
        self.backbone = MODELS.build(dict(backbone, out_type='raw', out_indices=layers, drop_path_rate=0.0))
        self.backbone.norm = None  # otherwise it would normalise the last block's output
        self.backbone.requires_grad_(False).eval()
        self.layers = self.backbone.out_indices = [*dict.fromkeys(self.backbone.out_indices)]  # -1 may be one of them
        dims = self.backbone.embed_dims * (1 if feature == 'mean' else 2)
        self.heads = nn.ModuleDict({str(layer): nn.Linear(dims, num_classes) for layer in self.layers})
        for head in self.heads.values():
            normal_init(head, std=0.01)

    def forward(self, inputs: Tensor, data_samples: list[DataSample] | None = None, mode: str = 'tensor') -> object:
        """Takes normalised images (B, C, H, W); 'tensor' gives logits (B, num_classes) of each block."""
        features = self.features(inputs)
        with torch.autocast(inputs.device.type, enabled=False):  # float32, as in the released code
            logits = [head(feature.float()) for head, feature in zip(self.heads.values(), features, strict=True)]
        if mode == 'loss':
            labels = torch.cat([sample.gt_label for sample in data_samples]).to(inputs.device)
            return dict(loss=sum(F.cross_entropy(scores, labels) for scores in logits))
        if mode == 'predict':
            return self.predict(logits, data_samples)
        return tuple(logits)

    @torch.no_grad()
    def features(self, images: Tensor) -> list[Tensor]:
        """Features (B, C) or (B, 2 C) of each probed block."""
        tokens = self.backbone(images)  # B, N, C of each block
        first = self.backbone.num_prefix_tokens
        if self.feature == 'mean':
            return [x[:, first:].mean(dim=1) for x in tokens]
        return [torch.cat([x[:, 0], x[:, first:].mean(dim=1)], dim=1) for x in tokens]

    def predict(self, logits: list[Tensor], data_samples: list[DataSample] | None) -> list[DataSample]:
        """Adds `layer_labels`, layer -> most likely class; for a single layer also `pred_score` and `pred_label`."""
        labels = torch.stack([scores.argmax(dim=1) for scores in logits], dim=1).tolist()
        data_samples = data_samples or [DataSample() for _ in labels]
        for sample, row in zip(data_samples, labels, strict=True):
            sample.set_field(dict(zip(self.layers, row, strict=True)), 'layer_labels')
        if len(self.layers) == 1:
            for sample, score in zip(data_samples, logits[0].softmax(dim=1), strict=True):
                sample.set_pred_score(score).set_pred_label(score.argmax(dim=0, keepdim=True))
        return data_samples

    def train(self, mode: bool = True) -> 'LinearProbe':
        super().train(mode)
        self.backbone.eval()  # frozen
        return self


class AttentivePooling(nn.Module):
    """Pools patches (B, N, C) to (B, C) by cross-attention from learned queries; projects only the values.

    Each query has its own C / num_queries channels of the values. Source: billpsomas/efficient-probing, and
    arXiv 2506.10178, section 3.
    """

    def __init__(self, dims: int, num_queries: int):
        super().__init__()
        self.queries = nn.Parameter(INIT_STD * torch.randn(num_queries, dims))
        self.value = nn.Linear(dims, dims, bias=False)

    def forward(self, patches: Tensor) -> Tensor:
        number, dims = self.queries.shape
        attention = (self.queries @ patches.transpose(1, 2) * dims**-0.5).softmax(dim=2)  # B, Q, N
        # The sum is projected, not each patch: the projection is linear, and there are fewer queries than patches.
        value = self.value.weight.unflatten(0, (number, -1))  # Q, C / Q, C
        return torch.einsum('bqc,qdc->bqd', attention @ patches, value).flatten(1)  # B, C


def attentive_classifier(dims: int, num_queries: int, num_classes: int) -> nn.Sequential:
    """Classifies patches (B, N, C) by AttentivePooling, batch normalisation and a linear layer."""
    classifier = nn.Linear(dims, num_classes)
    normal_init(classifier, std=0.01)
    return nn.Sequential(AttentivePooling(dims, num_queries), nn.BatchNorm1d(dims, eps=1e-6, affine=False), classifier)


@MODELS.register_module()
class AttentiveProbe(LinearProbe):
    """A LinearProbe whose classifiers read the patches by cross-attention instead of their mean.

    Masked image modeling does not train a summary of the image, and a mean of patches can only partly replace one.
    The pooled features are batch-normalised.

    Args:
        num_queries: learned queries of each classifier.
        others: as in LinearProbe, except `feature`.

    Source: billpsomas/efficient-probing, whose benchmark uses 32 queries.
    """

    def __init__(self, backbone: dict, num_classes: int, num_queries: int = 1, **others: Any):
        super().__init__(backbone, num_classes, feature='mean', **others)
        for layer in self.heads:
            self.heads[layer] = attentive_classifier(self.backbone.embed_dims, num_queries, num_classes)

    @torch.no_grad()
    def features(self, images: Tensor) -> list[Tensor]:
        """Patches (B, N, C) of each probed block."""
        return [x[:, self.backbone.num_prefix_tokens :] for x in self.backbone(images)]


@MODELS.register_module()
class ClassificationDataPreprocessor(ClsDataPreprocessor):
    """mmpretrain's ClsDataPreprocessor, with random erasing between normalisation and mixup or cutmix.

    In training it fills the `erase_box` of `beit_mm.RandomErasing` (top, left, height, width) with standard normal
    noise for each pixel and channel. Source: timm `data/loader.py`, which erases on the device too.
    """

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        # The host does not wait for copies. mmpretrain 1.2.0 and onedl's 1.3.6 have no argument for it; else it waits.
        self._non_blocking = True

    def forward(self, data: dict, training: bool = False) -> dict:
        samples = data.get('data_samples')
        if samples and 'gt_label' in samples[0]:  # mmpretrain waits for its copy, cast_data makes one of each label
            numbers = [len(sample.gt_label) for sample in samples]
            labels = torch.cat([sample.gt_label for sample in samples]).to(self.device, non_blocking=True)
            for sample, label in zip(samples, labels.split(numbers), strict=True):
                sample.set_gt_label(label)
        data = super().forward(data, training=False)  # normalises, makes one-hot labels, does not mix yet
        inputs, samples = data['inputs'], data['data_samples']
        if not training or samples is None:
            return data
        for image, sample in zip(inputs, samples, strict=True):
            if 'erase_box' in sample:
                top, left, height, width = sample.erase_box
                image[:, top : top + height, left : left + width].normal_()
        if 'gt_score' in samples[0]:
            scores = torch.stack([sample.gt_score for sample in samples]).float()  # as CrossEntropyLoss needs them
            if self.batch_augments is not None:
                with torch.device(inputs.device):  # indexing by an order on the host would make the host wait
                    data['inputs'], scores = self.batch_augments(inputs, scores)
            for sample, score in zip(samples, scores, strict=True):
                sample.set_gt_score(score)
        return data
