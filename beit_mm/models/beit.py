"""Masked image modeling on visual tokens, from a batch to its loss (paper section 2.3).

An image has two views. The first is split into patches, and a learned mask token replaces about 40 % of them
(datasets/masking.py chooses which). The backbone computes a hidden state for each patch (models/vit.py). The tokenizer
turns the second view into one visual token for each patch (models/tokenizers). A linear head predicts the tokens of the
masked patches from their hidden states; the loss is the cross entropy.

Shapes: B images, K patches to predict, C channels.
"""

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
from beit_mm.models.tokenizers.base import Tokenizer
from beit_mm.models.vit import BEiTBackbone, truncated_normal_
from beit_mm.positions import take_tokens
from beit_mm.registry import MODELS

TOKENIZER_PREFIX = 'target_generator.'


@MODELS.register_module()
class BEiTPretrainer(BaseModel):
    """Masked image modeling on visual tokens; its options give the variants of the paper's ablation table.

    The tokenizer is frozen. Checkpoints do not hold it, but record where its weights came from. To save work, the
    backbone's last block and the tokenizer's output layer run only at the patches to predict.

    Args:
        backbone: config of a BEiTBackbone with out_type 'raw'.
        head: config of a BEiTMIMHead or PixelRegressionHead; None in a subclass with another task.
        target_generator: config of a Tokenizer (see `beit_mm.models.tokenizers`); None to predict pixels. The key is
            mmpretrain's name for it.
        data_preprocessor: config of a TwoViewDataPreprocessor.
        recover: 'masked' predicts the masked patches only, 'all' every patch.

    Source: paper section 2.3; microsoft/unilm `beit/engine_for_pretraining.py`.
    """

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
        self.backbone = _build('backbone', backbone, BEiTBackbone)
        self.head = None if head is None else MODELS.build(head)
        self.target_generator: Tokenizer | None = None
        if target_generator is not None:
            tokenizer = _build('target_generator', target_generator, Tokenizer)
            self.target_generator = tokenizer.requires_grad_(False).eval()
        if self.head is not None:
            _check_head(self.head, self.target_generator, self.backbone.embed_dims)
        self.register_state_dict_post_hook(_drop_tokenizer)
        self.register_load_state_dict_pre_hook(_rename_mmpretrain)
        self.register_load_state_dict_post_hook(_expect_no_tokenizer)

    def forward(self, inputs: dict, data_samples: None = None, mode: str = 'tensor') -> object:
        """mmengine's entry point; takes what TwoViewDataPreprocessor returns. Mode 'tensor' gives (B, 1+h*w, C)."""
        if not isinstance(inputs, dict):
            raise UserError(f'the inputs are a {type(inputs).__name__}; use PackViews and TwoViewDataPreprocessor')
        if mode == 'loss':
            return self.loss(inputs)
        if mode == 'predict':
            return self.predict(inputs)
        return self.backbone(inputs['images'], inputs['mask'])[0]

    def loss(self, inputs: dict) -> dict[str, Tensor]:
        """Loss of a batch: the negative mean of equation 1 of the paper; for tokens `mim_acc` too."""
        positions = self._positions_to_predict(inputs)  # B, K
        targets = self._targets(inputs, positions)  # B, K tokens, or B, K, P pixels
        hidden = self._hidden(inputs, positions)  # B, K, C
        return self.head.loss(hidden, targets, positions)

    def _positions_to_predict(self, inputs: dict) -> Tensor | None:
        """Patches to predict, int64 (B, K), -1 = padding; None for all."""
        if self.recover == 'masked' and inputs['positions'] is None:
            raise UserError("the images have no mask; add BlockwiseMask to the pipeline, or set recover='all'")
        return inputs['positions'] if self.recover == 'masked' else None

    def _targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Visual tokens (B, K) or pixels (B, K, P) at the positions; for all patches if positions is None."""
        if self.target_generator is None:
            if not isinstance(self.head, PixelRegressionHead):
                raise UserError(f'{type(self.head).__name__} predicts visual tokens; set target_generator')
            pixels = F.pixel_unshuffle(inputs['images'], self.head.patch_size).flatten(2).mT  # B, h*w, P
            return pixels if positions is None else take_tokens(pixels, positions.clamp(min=0))
        if inputs['tokenizer_images'] is None:
            raise UserError('the images have no second view for the tokenizer; set second_size or tokenizer_scale')
        if positions is None:
            return self.target_generator.encode(inputs['tokenizer_images']).flatten(1)
        return self.target_generator.encode_at(inputs['tokenizer_images'], positions)

    def _hidden(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Hidden states (B, K, C) of the patches to predict."""
        if positions is not None:
            return self.backbone(inputs['images'], inputs['mask'], positions)[0]
        return self.backbone(inputs['images'], inputs['mask'])[0][:, self.backbone.num_prefix_tokens :]  # B, h*w, C

    @torch.no_grad()
    def predict(self, inputs: dict) -> list[dict]:
        """For each image loss and count, summed over its predicted patches; for tokens also correct and all tokens."""
        positions = self._positions_to_predict(inputs)  # B, K
        targets = self._targets(inputs, None)  # B, h*w, all tokens for MIMMetric's token entropy; or B, h*w, P pixels
        chosen = targets if positions is None else take_tokens(targets, positions.clamp(min=0))
        sums = self.head.predict(self._hidden(inputs, positions), chosen, positions)  # B each
        rows = torch.stack([values.float() for values in sums.values()], dim=1).tolist()  # waits for the device once
        results = [dict(zip(sums, row, strict=True)) for row in rows]
        if self.target_generator is not None:
            for result, tokens in zip(results, targets.cpu(), strict=True):
                result['tokens'] = tokens
        return results

    @torch.no_grad()
    def pictures(self, inputs: dict) -> dict[str, Tensor]:
        """Pictures of what the model saw, predicted and should have predicted: title -> float (B, C, H, W) in [0, 1].

        The prediction needs a tokenizer that can decode, and fills the masked patches of the image. It is decoded from
        the probabilities of all tokens, because the likeliest token of an uncertain patch is often black or white.
        """
        mask = inputs['mask']
        image = self.data_preprocessor.denormalize(inputs['images'])
        columns = dict(image=image)
        if mask is not None:
            masked = F.interpolate(mask[:, None].float(), scale_factor=self.backbone.patch_size) > 0  # B, 1, H, W
            # The slice removes the part of the last patches that lies outside the image.
            masked = masked[:, :, : image.shape[2], : image.shape[3]]
            columns['masked'] = torch.where(masked, 0.5, image)
        tokenizer = self.target_generator
        if tokenizer is not None and tokenizer.can_decode:
            tokens = tokenizer.encode(inputs['tokenizer_images'])  # B, h, w
            hidden = self.backbone(inputs['images'], mask)[0][:, self.backbone.num_prefix_tokens :]  # B, h*w, C
            weights = self.head(hidden).float().softmax(dim=-1).unflatten(1, tokens.shape[1:])  # B, h, w, vocab_size
            if mask is not None:
                weights[~mask] = F.one_hot(tokens[~mask], tokenizer.vocab_size).float()
            predicted = tokenizer.decode(weights.permute(0, 3, 1, 2))
            if mask is not None:
                size = [side * self.backbone.patch_size for side in mask.shape[1:]]
                predicted = F.interpolate(predicted, size, mode='bilinear')[:, :, : image.shape[2], : image.shape[3]]
                predicted = torch.where(masked, predicted, image)
            columns['prediction'] = predicted
            columns['tokens, decoded'] = tokenizer.decode(tokens)
        return columns

    def train(self, mode: bool = True) -> 'BEiTPretrainer':
        super().train(mode)
        if self.target_generator is not None:
            self.target_generator.eval()
        return self


def _check_head(head: nn.Module, tokenizer: Tokenizer | None, width: int) -> None:
    """Raises UserError unless the head predicts what the tokenizer gives, or pixels, from `width` channels."""
    if tokenizer is None:
        if not isinstance(head, PixelRegressionHead | BEiTMIMHead):  # get_model leaves a BEiTMIMHead's tokenizer out
            raise UserError(f'the head is a {type(head).__name__}; pixels need a beit_mm.PixelRegressionHead')
    elif not isinstance(head, BEiTMIMHead) or head.vocab_size != tokenizer.vocab_size:
        number = tokenizer.vocab_size
        raise UserError(f'the head is a {type(head).__name__}; the tokenizer needs a BEiTMIMHead, vocab_size={number}')
    in_features = (head.lm_head if isinstance(head, BEiTMIMHead) else head.pixel_head).in_features
    if in_features != width:
        found = f'the head takes {in_features} channels, the backbone gives {width}'
        raise UserError(f'{found}; set model.head.embed_dims={width}')


def _build(name: str, config: dict, kind: type) -> Any:
    """Builds a part of the model and checks its type."""
    part = MODELS.build(config)
    if not isinstance(part, kind):
        raise UserError(f'{name} is a {type(part).__name__}; expected a beit_mm {kind.__name__}')
    return part


def _drop_tokenizer(model: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    for key in [k for k in state_dict if k.startswith(prefix + TOKENIZER_PREFIX)]:
        del state_dict[key]


def _rename_mmpretrain(model: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Gives the weights of mmpretrain's pretraining our names, and drops the weights of its tokenizer."""
    weights = {name.removeprefix(prefix): state_dict[name] for name in state_dict if name.startswith(prefix)}
    if detect_format(weights) == 'mmpretrain':
        for name in weights:
            del state_dict[prefix + name]
        renamed = convert_state_dict(weights, 'mmpretrain').state_dict
        state_dict.update((prefix + name, tensor) for name, tensor in renamed.items())


def _expect_no_tokenizer(model: nn.Module, incompatible_keys: Any) -> None:
    """Removes the tokenizer's keys from the missing keys, at any depth, because the model may be in a wrapper."""
    missing = incompatible_keys.missing_keys
    missing[:] = [key for key in missing if f'.{TOKENIZER_PREFIX}' not in f'.{key}']


@MODELS.register_module()
class BEiTMIMHead(BaseModule):
    """Predicts the visual tokens of patches from their hidden states.

    Args:
        embed_dims: width of the hidden states.
        vocab_size: number of visual tokens.

    Source: paper section 2.3; microsoft/unilm `beit/modeling_pretrain.py` (`lm_head`) and
    `beit/engine_for_pretraining.py` (loss and accuracy over all masked patches of a batch, not image by image).
    """

    def __init__(self, embed_dims: int, vocab_size: int = 8192, init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.vocab_size = vocab_size
        self.lm_head = nn.Linear(embed_dims, vocab_size)
        truncated_normal_(self.lm_head.weight)
        nn.init.zeros_(self.lm_head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(hidden)  # ..., vocab_size

    def loss(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor] | Tensor:
        """Mean cross entropy `loss` and accuracy `mim_acc`; both are 0 if no patch counts.

        Args:
            hidden: (B, K, embed_dims).
            targets: int64 (B, K) visual tokens.
            positions: int64 (B, K) of the patches, -1 = padding, which does not count; None: all count.

        mmpretrain's BEiT passes hidden states with the class token first, (B, 1+h*w, embed_dims), one-hot targets
        (B, vocab_size, h, w) and the mask (B, h, w); then only the loss is returned.
        """
        if targets.dim() == 4:
            counted = positions.flatten(1).bool().long() - 1  # 0 where the mask is set, else -1
            return self.loss(hidden[:, 1:], targets.argmax(dim=1).flatten(1), counted)['loss']
        losses, correct = self._compare(hidden, targets)
        return dict(loss=_mean(losses, positions), mim_acc=_mean(correct, positions))

    def predict(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """Sums (B,) over each image: loss, correct predictions, and patches that count."""
        losses, correct = self._compare(hidden, targets)
        counts = torch.ones_like(correct) if positions is None else (positions >= 0).float()
        return dict(loss=(losses * counts).sum(1), correct=(correct * counts).sum(1), count=counts.sum(1))

    def _compare(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and correctness (B, K) of each prediction, also at padding."""
        logits = self(hidden)  # B, K, vocab_size
        targets = targets.clamp(min=0)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='none').view_as(targets)
        return losses, (logits.detach().max(dim=-1).indices == targets).float()


@MODELS.register_module()
class PixelRegressionHead(BaseModule):
    """Predicts the pixels of patches, as the backbone sees them (the ablation "without visual tokens").

    The loss is the mean squared error; the paper states neither loss nor normalisation.

    Args:
        embed_dims: width of the hidden states.
        patch_size: side of a patch in pixels.
        in_channels: channels of the images: 3 for RGB, or any number of bands.

    Source: paper section 3.3 (no code was released).
    """

    def __init__(self, embed_dims: int, patch_size: int = 16, in_channels: int = 3, init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.patch_size, self.in_channels = patch_size, in_channels
        self.pixel_head = nn.Linear(embed_dims, in_channels * patch_size**2)
        truncated_normal_(self.pixel_head.weight)
        nn.init.zeros_(self.pixel_head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.pixel_head(hidden)  # ..., in_channels * patch_size**2

    def loss(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """Mean squared error; targets (B, K, in_channels * patch_size**2), the rest as in BEiTMIMHead."""
        return dict(loss=_mean(self._errors(hidden, targets), positions))

    def predict(self, hidden: Tensor, targets: Tensor, positions: Tensor | None) -> dict[str, Tensor]:
        """Sums (B,) over each image: squared error, and patches that count."""
        errors = self._errors(hidden, targets)
        counts = torch.ones_like(errors) if positions is None else (positions >= 0).float()
        return dict(loss=(errors * counts).sum(1), count=counts.sum(1))

    def _errors(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return (self(hidden).float() - targets).square().mean(dim=-1)  # B, K


def _mean(values: Tensor, positions: Tensor | None) -> Tensor:
    """Mean of values (B, K) over the positions that are not padding."""
    if positions is None:
        return values.mean()
    counts = positions >= 0
    return torch.where(counts, values, 0).sum() / counts.sum().clamp(min=1)  # a value at padding may be NaN


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
        if tokenizer_scale is not None and not 0 < tokenizer_scale <= 1:
            raise UserError(f'tokenizer_scale is {tokenizer_scale}; expected a fraction above 0, at most 1')
        self.tokenizer_scale = tokenizer_scale
        if len(mean) != len(std):
            raise UserError(f'mean has {len(mean)} numbers, std {len(std)}; expected one of each for each channel')
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, data: dict, training: bool = False) -> dict:
        """Prepares one batch.

        Args:
            data: `inputs` holds images (B, H, W, C), uint8 or float, 0-255, and, if the pipeline makes them,
                tokenizer_images (B, h, w, C), mask bool (B, gh, gw), positions int64 (B, K) and jitter float (B, 7).

        Returns:
            dict(inputs=dict(images=float (B, C, H, W) normalised, tokenizer_images=float (B, C, h, w) in [0, 1],
            mask, positions=int64 (B, K))); absent inputs are None.
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
            size = self.tokenizer_size(*images.shape[2:])
            resized = F.interpolate(images, size=size, mode='bicubic', antialias=True)
            prepared['tokenizer_images'] = resized.clamp(0, 255) / 255
        return dict(inputs=prepared)

    @staticmethod
    def channels_first(images: Tensor, jitter: Tensor | None = None) -> Tensor:
        """(B, H, W, C) to float (B, C, H, W), 0-255; applies `jitter` if the pipeline has left that to the device."""
        images = images.permute(0, 3, 1, 2).float()
        return images if jitter is None else jitter_images(images, jitter)

    def tokenizer_size(self, height: int, width: int) -> tuple[int, int]:
        """Size of the tokenizer's view that is made from a first view of `height` x `width` pixels."""
        scale = self.tokenizer_scale or 1
        return round(scale * height), round(scale * width)

    def denormalize(self, images: Tensor) -> Tensor:
        """Returns images of the first view to [0, 1], for drawing."""
        return ((images * self.std + self.mean) / 255).clamp(0, 1)
