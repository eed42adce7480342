"""Masked image modeling on visual tokens, from a batch to its loss (paper section 2.3).

The backbone sees one view of an image, with about 40 % of its patches masked. The tokenizer turns the other view into
a visual token for each patch. A linear head predicts the tokens of the masked patches from their hidden states.

Shapes: B images, K patches to predict, C channels.
"""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseDataPreprocessor, BaseModel, BaseModule
from torch import Tensor

from beit_mm.checkpoint.names import convert_state_dict, detect_format
from beit_mm.datasets.masking import masked_positions
from beit_mm.datasets.transforms import jitter_images
from beit_mm.errors import UserError, check_choice
from beit_mm.models.tokenizers.base import TargetGenerator
from beit_mm.models.vit import truncated_normal_
from beit_mm.positions import take_tokens
from beit_mm.registry import MODELS

TARGETS_PREFIX = 'target_generator.'
AVERAGE_PREFIX = 'target_generator.ema.'  # the only part that checkpoints hold: a moving average of the model


@MODELS.register_module()
class BEiTPretrainer(BaseModel):
    """Masked image modeling on visual tokens; its options give the variants of the paper's ablation table.

    The tokenizer is frozen, and checkpoints do not hold it. The backbone's last block and the tokenizer's output layer
    run only at the patches to predict.

    Args:
        backbone: config of a BEiTBackbone with out_type 'raw'.
        head: config of a BEiTMIMHead, FeatureRegressionHead or PixelRegressionHead; None in some subclasses.
        target_generator: config of a Tokenizer or FeatureTargets; None means PixelTargets.
        data_preprocessor: config of a TwoViewDataPreprocessor.
        recover: 'masked' predicts the masked patches only, 'all' every patch.

    Source: paper section 2.3; microsoft/unilm `beit/engine_for_pretraining.py`.
    """

    averages: tuple[str, ...] = (AVERAGE_PREFIX,)  # prefixes of parameters that are moving averages of others

    def __init__(
        self,
        backbone: dict,
        head: dict | None,
        target_generator: dict | None = None,
        data_preprocessor: dict | None = None,
        recover: str = 'masked',
        init_cfg: dict | None = None,
    ):
        super().__init__(data_preprocessor, init_cfg)
        check_choice('recover', recover, ('masked', 'all'))
        self.recover = recover
        self.backbone = MODELS.build(backbone)
        self.head = None if head is None else MODELS.build(head)
        self.target_generator: Any = MODELS.build(target_generator) if target_generator else PixelTargets()
        self.target_generator.attach(self.backbone, self.data_preprocessor)
        self.target_generator.requires_grad_(False).eval()
        if target_generator is not None:  # a model of tokens may do without a tokenizer until its loss is asked for
            _check_head(self.head, self.target_generator)
        if self.head is not None:
            check_choice('model.head.embed_dims', self.head.embed_dims, [self.backbone.embed_dims])
        if isinstance(self.head, PixelRegressionHead):
            check_choice('model.head.patch_size', self.head.patch_size, [self.backbone.patch_size])
        self.register_state_dict_post_hook(_drop_tokenizer)
        self.register_load_state_dict_pre_hook(_rename_mmpretrain)
        self.register_load_state_dict_pre_hook(_start_average)
        self.register_load_state_dict_post_hook(_expect_no_tokenizer)

    def init_weights(self) -> None:
        super().init_weights()
        self.update_teacher(0.0)

    def to(self, *args: Any, **kwargs: Any) -> 'BEiTPretrainer':
        """torch's; converts the tokenizer too, before a hook copies the model or a graph is compiled."""
        moved = super().to(*args, **kwargs)
        if isinstance(self.target_generator, TargetGenerator):
            self.target_generator.prepare(next(self.parameters()).device)
        return moved

    @torch.no_grad()
    def update_teacher(self, momentum: float, taken: Tensor | None = None) -> None:
        """Sets averages to momentum * average + (1 - momentum) * weight, unless `taken`, bool (), is False."""
        step = 1 - momentum if taken is None else (1 - momentum) * taken
        for prefix in self.averages:
            for name, average in self.named_parameters():
                if name.startswith(prefix):
                    average.lerp_(self.get_parameter(name.removeprefix(prefix)), step)

    def forward(self, inputs: dict, data_samples: None = None, mode: str = 'tensor') -> object:
        """Takes what TwoViewDataPreprocessor returns. Mode 'tensor' gives hidden states (B, 1+h*w, C)."""
        if mode == 'loss':
            return self.loss(inputs)
        if mode == 'predict':
            return self.predict(inputs)
        return self.backbone(inputs['images'], inputs['mask'])[0]

    def loss(self, inputs: dict) -> dict[str, Tensor]:
        """The head's mean over the patches of a batch; for tokens, equation 1 of the paper, negated, and `mim_acc`."""
        positions = self._positions_to_predict(inputs)  # B, K
        targets = self._targets(inputs, positions)  # B, K tokens, or B, K, P pixels or features
        return self.head.loss(self.hidden_states(inputs, positions), targets, positions)

    def _positions_to_predict(self, inputs: dict) -> Tensor | None:
        """Patches to predict, int64 (B, K), -1 = padding; None for all."""
        if self.recover == 'masked' and inputs['positions'] is None:
            raise UserError("the images have no mask; add BlockwiseMask to the pipeline, or set recover='all'")
        return inputs['positions'] if self.recover == 'masked' else None

    def _targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Visual tokens (B, K), or features or pixels (B, K, P), at the positions; None: of all patches."""
        if getattr(self.head, 'predicts', None) != self.target_generator.gives:
            raise UserError(f'{type(self.head).__name__} does not predict pixels; set target_generator')
        return self.target_generator.targets(inputs, positions)

    def hidden_states(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Hidden states (B, K, C) of the patches at positions; None: of all patches (B, h*w, C)."""
        hidden = self.backbone(inputs['images'], inputs['mask'], positions)[0]
        return hidden[:, self.backbone.num_prefix_tokens :] if positions is None else hidden

    @torch.no_grad()
    def predict(self, inputs: dict) -> list[dict]:
        """Returns for each image sums over its predicted patches, such as loss and count, its targets and positions."""
        positions = self._positions_to_predict(inputs)  # B, K
        targets = self._targets(inputs, None)  # B, h*w, all tokens for MIMMetric's token entropy; or B, h*w, P
        chosen = targets if positions is None else take_tokens(targets, positions.clamp(min=0))
        sums = self.head.predict(self.hidden_states(inputs, positions), chosen, positions)  # B each
        values: dict[str, Any] = {name: part.tolist() for name, part in sums.items()}
        if self.target_generator.gives != 'pixels':  # which no metric asks for
            values[self.target_generator.gives] = targets.cpu()
        if positions is not None:
            values['positions'] = positions.cpu()
        return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]

    def train(self, mode: bool = True) -> 'BEiTPretrainer':
        super().train(mode)
        self.target_generator.eval()
        return self


def _check_head(head: nn.Module, generator: TargetGenerator) -> None:
    """Raises UserError unless the head predicts these targets."""
    given, size = (getattr(part, 'vocab_size', None) for part in (head, generator))
    if getattr(head, 'predicts', None) != generator.gives or given != size:
        raise UserError(
            f'the head is a {type(head).__name__}; {type(generator).__name__} needs one that predicts '
            f'{generator.gives}, with vocab_size={size}'
        )


def _drop_tokenizer(model: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    for key in [k for k in state_dict if k.startswith(prefix + TARGETS_PREFIX)]:
        if not key.startswith(prefix + AVERAGE_PREFIX):
            del state_dict[key]


def _rename_mmpretrain(model: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Gives the weights of mmpretrain's pretraining our names, and drops the weights of its tokenizer."""
    weights = {name.removeprefix(prefix): state_dict[name] for name in state_dict if name.startswith(prefix)}
    if detect_format(weights) == 'mmpretrain':
        for name in weights:
            del state_dict[prefix + name]
        renamed = convert_state_dict(weights, 'mmpretrain', grid=model.backbone.grid).state_dict
        state_dict.update((prefix + name, tensor) for name, tensor in renamed.items())


def _start_average(model: BEiTPretrainer, state_dict: dict, prefix: str, *_: object) -> None:
    """Starts moving averages at the weights in a file that does not have them."""
    for average in model.averages:
        if any(name.startswith(prefix + average) for name in state_dict):
            continue
        averaged = [name.removeprefix(average) for name, _ in model.named_parameters() if name.startswith(average)]
        parts = tuple({f'{prefix}{name.partition(".")[0]}.' for name in averaged})  # 'backbone.', 'dino_head.'
        given = [name for name in state_dict if name.startswith(parts) and not name.endswith('.mask_token')]
        state_dict.update({prefix + average + name.removeprefix(prefix): state_dict[name] for name in given})


def _expect_no_tokenizer(model: nn.Module, incompatible_keys: Any) -> None:
    """Removes the tokenizer's keys from the missing keys, at any depth, because the model may be in a wrapper."""
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if f'.{TARGETS_PREFIX}' not in f'.{key}']


class PatchHead(BaseModule):
    """A linear layer, which the attribute `layer` names, on the hidden states (..., embed_dims) of patches."""

    layer: str
    predicts: str  # as TargetGenerator.gives

    def __init__(self, embed_dims: int, outputs: int, init_cfg: dict | None):
        super().__init__(init_cfg)
        self.embed_dims = embed_dims
        linear = nn.Linear(embed_dims, outputs)
        truncated_normal_(linear.weight)
        nn.init.zeros_(linear.bias)
        self.add_module(self.layer, linear)

    def forward(self, hidden: Tensor) -> Tensor:
        return getattr(self, self.layer)(hidden)  # ..., outputs

    @abstractmethod
    def compare(self, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Values (B, K) for each prediction, also at padding."""

    def loss(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """Means over a batch.

        Args:
            hidden: (B, K, embed_dims).
            targets: (B, K, ...).
            positions: int64 (B, K) of the patches, -1 = padding, which does not count; None: all count.
        """
        compared = self.compare(hidden, targets)
        if positions is None:
            return {name: values.mean() for name, values in compared.items()}
        counts = positions >= 0
        number = counts.sum().clamp(min=1)
        # a value at padding may be NaN
        return {name: torch.where(counts, values, 0).sum() / number for name, values in compared.items()}

    def predict(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """Sums (B,) over the patches of each image, and the `count` of these; Args as in `loss`."""
        counts = torch.ones(hidden.shape[:2], device=hidden.device) if positions is None else (positions >= 0).float()
        sums = {name: (values * counts).sum(1) for name, values in self.compare(hidden, targets).items()}
        return dict(sums, count=counts.sum(1))


@MODELS.register_module()
class BEiTMIMHead(PatchHead):
    """Predicts the visual tokens of patches from their hidden states.

    Args:
        embed_dims: width of the hidden states.
        vocab_size: number of visual tokens.

    Source: paper section 2.3; microsoft/unilm `beit/modeling_pretrain.py` (`lm_head`) and
    `beit/engine_for_pretraining.py` (loss and accuracy over all masked patches of a batch, not image by image).
    """

    layer, predicts = 'lm_head', 'tokens'

    def __init__(self, embed_dims: int, vocab_size: int = 8192, init_cfg: dict | None = None):
        super().__init__(embed_dims, vocab_size, init_cfg)
        self.vocab_size = vocab_size

    def loss(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor] | Tensor:
        """Mean cross entropy `loss` and accuracy `mim_acc`, both 0 if no patch counts; targets are int64 (B, K).

        mmpretrain's BEiT passes hidden states of all tokens, patches last, (B, N, embed_dims), one-hot targets
        (B, vocab_size, h, w) and the mask (B, h, w); then only the loss is returned.
        """
        if targets.dim() == 4:
            counted = positions.flatten(1).bool().long() - 1  # 0 where the mask is set, else -1
            patches = hidden[:, -targets[0, 0].numel() :]
            return self.loss(patches, targets.argmax(dim=1).flatten(1), counted)['loss']
        means = super().loss(hidden, targets, positions)
        return dict(loss=means['loss'], mim_acc=means['correct'])

    def compare(self, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
        logits = self(hidden)  # B, K, vocab_size
        targets = targets.clamp(min=0)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='none').view_as(targets)
        return dict(loss=losses, correct=(logits.detach().max(dim=-1).indices == targets).float())


@MODELS.register_module()
class PixelRegressionHead(PatchHead):
    """Predicts the pixels of patches, as the backbone sees them (the ablation "without visual tokens").

    The loss is the mean squared error; the paper states neither loss nor normalisation.

    Args:
        embed_dims: width of the hidden states.
        patch_size: side of a patch in pixels.
        in_channels: channels of the images: 3 for RGB, or any number of bands.

    Source: paper section 3.3 (no code was released).
    """

    layer, predicts = 'pixel_head', 'pixels'

    def __init__(self, embed_dims: int, patch_size: int = 16, in_channels: int = 3, init_cfg: dict | None = None):
        super().__init__(embed_dims, in_channels * patch_size**2, init_cfg)
        self.patch_size = patch_size

    def compare(self, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return dict(loss=(self(hidden).float() - targets).square().mean(dim=-1))  # B, K


@MODELS.register_module()
class PixelTargets(TargetGenerator):
    """The pixels of each patch as the backbone sees them, normalised, (B, K, channels * patch_size**2)."""

    gives = 'pixels'

    def __init__(self) -> None:
        super().__init__()
        self.provenance = {}  # neither a tokenizer nor a teacher

    def attach(self, backbone: nn.Module, preprocessor: nn.Module) -> None:
        self.patch_size = backbone.patch_size

    def targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        images, side = inputs['images'], self.patch_size
        height, width = images.shape[2:]
        padded = F.pad(images, (0, -width % side, 0, -height % side))  # as PatchEmbed does
        pixels = F.pixel_unshuffle(padded, side).flatten(2).mT  # B, h*w, P
        return pixels if positions is None else take_tokens(pixels, positions.clamp(min=0))


@MODELS.register_module()
class TwoViewDataPreprocessor(BaseDataPreprocessor):
    """Moves a batch of two views to the device and scales each view for its network.

    Args:
        mean, std: a number for each channel of the first view, RGB or bands, 0-255.
        tokenizer_scale: if the pipeline makes no second view (`second_size=None`), the device resizes the first view to
            this fraction for the tokenizer, bicubic and antialiased. None: the tokenizer gets no view.

    Source: microsoft/unilm `beit/datasets.py`; `beit2/PRETRAINING.md` for `tokenizer_scale=1`.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], tokenizer_scale: float | None = None):
        super().__init__(non_blocking=True)  # the host does not wait while pinned memory is copied
        self.tokenizer_scale = tokenizer_scale
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, data: dict, training: bool = False) -> dict:
        """Prepares the `inputs` of one batch.

        images (B, H, W, C), 0-255, become float (B, C, H, W), normalised; tokenizer_images (B, h, w, C) become float
        (B, C, h, w) in [0, 1]. mask, bool (B, gh, gw), and positions, int64 (B, K), stay. Absent ones are None.
        """
        inputs = dict(data['inputs'])
        if 'mask' in inputs and 'positions' not in inputs:  # masks without num_slots, e.g. of variant 'paper'
            # Counted on the CPU, so that nothing waits for the device.
            masks = inputs['mask'].flatten(1).numpy()
            num_slots = max(int(masks.sum(axis=1).max()), 1)
            inputs['positions'] = torch.from_numpy(np.stack([masked_positions(mask, num_slots) for mask in masks]))
        inputs = self.cast_data(inputs)
        jitter = inputs.get('jitter')
        images = self.channels_first(inputs['images'], jitter)
        prepared = dict(images=(images - self.mean) / self.std, tokenizer_images=None)
        prepared.update(mask=inputs.get('mask'), positions=inputs.get('positions'))
        if 'tokenizer_images' in inputs:
            prepared['tokenizer_images'] = self.channels_first(inputs['tokenizer_images'], jitter) / 255
        elif self.tokenizer_scale == 1:
            prepared['tokenizer_images'] = images / 255
        elif self.tokenizer_scale is not None:
            size = [round(self.tokenizer_scale * side) for side in images.shape[2:]]
            resized = F.interpolate(images, size=size, mode='bicubic', antialias=True)
            prepared['tokenizer_images'] = resized.clamp(0, 255) / 255
        return dict(inputs=prepared)

    @staticmethod
    def channels_first(images: Tensor, jitter: Tensor | None = None) -> Tensor:
        """(B, H, W, C) to float (B, C, H, W); applies `jitter`, (B, 7), if the pipeline has left that to the device."""
        images = images.permute(0, 3, 1, 2).float()
        return images if jitter is None else jitter_images(images, jitter)

    def denormalize(self, images: Tensor) -> Tensor:
        """Maps normalised images of the first view back to [0, 1]."""
        return ((images * self.std + self.mean) / 255).clamp(0, 1)
