"""The method: masked image modeling on visual tokens (paper section 2), from a batch to its loss.

BEiTPretrainer is the algorithm, BEiTMIMHead (the paper) and PixelRegressionHead (its ablation) give the loss,
TwoViewDataPreprocessor brings a batch to the device. Shapes: B images, K patches to predict, C channels.
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
from beit_mm.models.interop import as_pretraining_backbone, as_tokenizer
from beit_mm.models.tokenizers.base import Tokenizer
from beit_mm.models.vit import BEiTBackbone, take_tokens, truncated_normal_
from beit_mm.registry import MODELS
from beit_mm.terminal import UserError

TOKENIZER_PREFIX = 'target_generator.'


@MODELS.register_module()
class BEiTPretrainer(BaseModel):
    """Masked image modeling on visual tokens, with the rows of the paper's ablation table.

    The tokenizer is a fixed part of the task: frozen, in evaluation mode, outside autocast, and not stored in
    checkpoints, which record where it came from instead. For the loss, the backbone's last block and the tokenizer's
    output layer run only at the patches to predict. The loss is the same, with less work.

    Args:
        backbone: config of a BEiTBackbone with out_type 'raw', or of mmpretrain's BEiTPretrainViT.
        head: config of a BEiTMIMHead or PixelRegressionHead; None in a subclass that learns something else.
        target_generator: config of a Tokenizer (see `beit_mm.models.tokenizers`), or of mmpretrain's DALL-E or VQKD;
            None for pixels.
        data_preprocessor: config of a TwoViewDataPreprocessor.
        recover: 'masked' predicts the masked patches only, 'all' every patch.
        init_cfg: mmengine's.

    Raises:
        ValueError: the head's vocabulary is not the tokenizer's, `recover` is unknown, or a part has another
            interface; when called, a mask or second view that is needed is not there.

    Source: paper section 2.4; microsoft/unilm `beit/engine_for_pretraining.py`.
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
        if recover not in ('masked', 'all'):
            raise UserError(f"recover is {recover!r}; choose 'masked' or 'all'")
        self.recover = recover
        self.backbone = as_pretraining_backbone(MODELS.build(backbone))
        self.head = None if head is None else MODELS.build(head)
        self.target_generator: Tokenizer | None = None
        if target_generator is not None:
            self.target_generator = as_tokenizer(MODELS.build(target_generator)).requires_grad_(False).eval()
        if self.head is not None:
            _check_head(self.head, self.target_generator)
        self.register_state_dict_post_hook(_drop_tokenizer)
        self.register_load_state_dict_pre_hook(_translate)
        self.register_load_state_dict_post_hook(_expect_no_tokenizer)

    def forward(self, inputs: dict, data_samples: None = None, mode: str = 'tensor') -> object:
        """mmengine's entry, for what TwoViewDataPreprocessor returns.

        Returns:
            mode 'loss': dict of tensors. 'predict': one dict an image, see `predict`. 'tensor': (B, 1+h*w, C).
        """
        if not isinstance(inputs, dict):
            raise UserError(
                f'the inputs are a {type(inputs).__name__}; BEiTPretrainer needs a beit_mm.TwoViewDataPreprocessor and '
                'a pipeline with beit_mm.TwoViewRandomResizedCrop that ends with beit_mm.PackViews'
            )
        if mode == 'loss':
            return self.loss(inputs)
        if mode == 'predict':
            return self.predict(inputs)
        return self.backbone(inputs['images'], inputs['mask'])[0]

    def loss(self, inputs: dict) -> dict[str, Tensor]:
        """Loss of one batch, and `mim_acc` where tokens are predicted."""
        positions = self._predicted_positions(inputs)  # B, K
        targets = self._targets(inputs, positions)  # B, K tokens, or B, K, P pixels
        hidden = self._hidden(inputs, positions)  # B, K, C
        return self.head.loss(hidden, targets, valid_slots(positions))

    @torch.no_grad()
    def predict(self, inputs: dict) -> list[dict]:
        """Evaluates held-out images one by one.

        Returns:
            For each image the sums `loss`, `count` and, for tokens, `correct` (floats), and its `tokens`, int64
            (h*w,) on the CPU.
        """
        positions = self._predicted_positions(inputs)
        targets = self._targets(inputs, None)
        chosen = targets if positions is None else take_tokens(targets, positions.clamp(min=0))
        sums = self.head.predict(self._hidden(inputs, positions), chosen, valid_slots(positions))
        rows = torch.stack([values.float() for values in sums.values()], dim=1).tolist()  # one wait for all
        results = [dict(zip(sums, row, strict=True)) for row in rows]
        if self.target_generator is not None:
            for result, tokens in zip(results, targets.cpu(), strict=True):
                result['tokens'] = tokens
        return results

    @torch.no_grad()
    def predict_tokens(self, inputs: dict) -> tuple[Tensor, Tensor]:
        """The tokenizer's tokens, and the same with the predicted ones in the masked places.

        Returns:
            Two int64 tensors (B, h, w).
        """
        tokens = self.target_generator.encode(inputs['tokenizer_images'])  # B, h, w
        hidden = self.backbone(inputs['images'], inputs['mask'])[0][:, 1:]  # B, h*w, C
        predicted = self.head(hidden).argmax(dim=-1).view_as(tokens)
        mask = inputs['mask']
        return tokens, predicted if mask is None else torch.where(mask, predicted, tokens)

    @torch.no_grad()
    def pictures(self, inputs: dict) -> dict[str, Tensor]:
        """What the model saw, what it was to predict and what it predicted.

        Predicted tokens rarely equal the right ones (5 % after 300 epochs on ImageNet); decoded, they show whether the
        colours and edges of the masked part were guessed.

        Returns:
            Title -> float (B, C, H, W) in [0, 1]: the image, the masked image and, where the tokenizer can decode,
            the image of its tokens and the same with the predicted tokens in the masked patches.
        """
        image = self.data_preprocessor.denormalize(inputs['images'])
        columns = dict(image=image)
        mask = inputs['mask']
        if mask is not None:
            masked = F.interpolate(mask[:, None].float(), scale_factor=self.backbone.patch_size) > 0  # B, 1, H, W
            masked = masked[:, :, : image.shape[2], : image.shape[3]]
            columns['masked'] = torch.where(masked, 0.5, image)
        if self.target_generator is not None and self.target_generator.can_decode:
            tokens, predicted = self.predict_tokens(inputs)
            columns['tokens, decoded'] = self.target_generator.decode(tokens)
            columns['prediction, decoded'] = self.target_generator.decode(predicted)
        return columns

    def train(self, mode: bool = True) -> 'BEiTPretrainer':
        """Sets the training mode of everything but the tokenizer."""
        super().train(mode)
        if self.target_generator is not None:
            self.target_generator.eval()
        return self

    def _predicted_positions(self, inputs: dict) -> Tensor | None:
        """int64 (B, K) patches to predict, -1 = padding; None for all."""
        if self.recover == 'all':
            return None
        if inputs['positions'] is None:
            raise UserError("the images have no mask; add BlockwiseMask to the pipeline, or set recover='all'")
        return inputs['positions']

    def _hidden(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Hidden states (B, K, C) of the patches to predict."""
        if not isinstance(self.backbone, BEiTBackbone):  # mmpretrain's computes the last block everywhere
            hidden = self.backbone(inputs['images'], inputs['mask'])[0][:, 1:]  # B, h*w, C
            return hidden if positions is None else take_tokens(hidden, positions.clamp(min=0))
        hidden = self.backbone(inputs['images'], inputs['mask'], positions)[0]
        return hidden[:, 1:] if positions is None else hidden

    def _targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Tokens (B, K) or pixels (B, K, P) at the positions; of all patches where they are None."""
        if self.target_generator is None:
            if not isinstance(self.head, PixelRegressionHead):
                raise UserError(f'{type(self.head).__name__} learns visual tokens; set target_generator')
            pixels = patchify(inputs['images'], self.head.patch_size)
            return pixels if positions is None else take_tokens(pixels, positions.clamp(min=0))
        if inputs['tokenizer_images'] is None:
            raise UserError(
                'the images have no second view for the tokenizer; set second_size in the pipeline, or '
                'data_preprocessor.tokenizer_scale'
            )
        if positions is None:
            return self.target_generator.encode(inputs['tokenizer_images']).flatten(1)
        return self.target_generator.encode_at(inputs['tokenizer_images'], positions)


def _check_head(head: nn.Module, tokenizer: Tokenizer | None) -> None:
    """Raises ValueError where a head does not predict what the tokenizer, or without one the image, gives."""
    if tokenizer is None:
        if not isinstance(head, PixelRegressionHead | BEiTMIMHead):
            raise UserError(
                f'{type(head).__name__} needs a target_generator; pixels take a beit_mm.PixelRegressionHead'
            )
    elif not isinstance(head, BEiTMIMHead):
        raise UserError(
            f'the head is a {type(head).__name__}; {tokenizer.vocab_size} visual tokens take a beit_mm.BEiTMIMHead '
            f'with vocab_size={tokenizer.vocab_size}'
        )
    elif head.vocab_size != tokenizer.vocab_size:
        raise UserError(
            f'BEiTMIMHead predicts {head.vocab_size} visual tokens, the tokenizer has {tokenizer.vocab_size}; '
            f'set head.vocab_size={tokenizer.vocab_size}'
        )


def valid_slots(positions: Tensor | None) -> Tensor | None:
    return None if positions is None else positions >= 0


def _drop_tokenizer(model: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    for key in [k for k in state_dict if k.startswith(prefix + TOKENIZER_PREFIX)]:
        del state_dict[key]


def _translate(model: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Renames weights that have mmpretrain's names to ours. Tokenizer weights in such files are left out."""
    names = [name for name in state_dict if name.startswith(prefix)]
    weights = {name.removeprefix(prefix): state_dict[name] for name in names}
    if not isinstance(model.backbone, BEiTBackbone) or detect_format(weights) != 'mmpretrain':
        return
    for name in names:
        del state_dict[name]
    weights = convert_state_dict(weights, 'mmpretrain').state_dict
    state_dict.update((prefix + name, tensor) for name, tensor in weights.items())


def _expect_no_tokenizer(model: nn.Module, incompatible_keys: Any) -> None:
    missing = incompatible_keys.missing_keys
    # Below any prefix: the model may be inside a wrapper.
    missing[:] = [key for key in missing if f'.{TOKENIZER_PREFIX}' not in f'.{key}']


@MODELS.register_module()
class BEiTMIMHead(BaseModule):
    """Predicts the visual tokens of patches from their hidden states.

    Args:
        embed_dims: width of the hidden states.
        vocab_size: number of visual tokens.

    Source: paper section 2.4; microsoft/unilm `beit/modeling_pretrain.py` (`lm_head`) and
    `beit/engine_for_pretraining.py` (loss and accuracy over all masked patches of the batch, not image by image).
    """

    def __init__(self, embed_dims: int, vocab_size: int = 8192, init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.vocab_size = vocab_size
        self.lm_head = nn.Linear(embed_dims, vocab_size)
        truncated_normal_(self.lm_head.weight)
        nn.init.zeros_(self.lm_head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., embed_dims) to logits (..., vocab_size)."""
        return self.lm_head(hidden)

    def loss(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor] | Tensor:
        """Cross entropy and accuracy.

        Args:
            hidden: (B, K, embed_dims).
            targets: int64 (B, K) visual tokens.
            valid: bool (B, K), False = padding; None = all count.

        Returns:
            loss: mean over the valid places, 0 when there are none. mim_acc: share predicted right.

        mmpretrain's BEiT calls its head with the class token before the patches (B, 1+h*w, embed_dims), targets
        (B, vocab_size, h, w) of which the argmax is the visual token, and the mask (B, h, w); it gets the loss alone.
        """
        if targets.dim() == 4:
            return self.loss(hidden[:, 1:], targets.argmax(dim=1).flatten(1), valid.flatten(1).bool())['loss']
        losses, correct = self._compare(hidden, targets)
        return dict(loss=_mean_of_valid(losses, valid), mim_acc=_mean_of_valid(correct, valid))

    def predict(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Sums (B,) over each image of the loss, the right predictions and the places that count."""
        losses, correct = self._compare(hidden, targets)
        valid = torch.ones_like(correct) if valid is None else valid.float()
        return dict(loss=(losses * valid).sum(1), correct=(correct * valid).sum(1), count=valid.sum(1))

    def _compare(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and rightness (B, K) of every place; what stands at padding is for the caller to drop."""
        logits = self(hidden)
        targets = targets.clamp(min=0)
        losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction='none')
        correct = (logits.detach().argmax(dim=-1) == targets).float()
        return losses.view_as(correct), correct


@MODELS.register_module()
class PixelRegressionHead(BaseModule):
    """Predicts the normalised pixels of patches ("- visual tokens" of the ablation table).

    The paper states neither the loss nor the normalisation; this is the mean squared error on the image as the backbone
    sees it.

    Args:
        embed_dims: width of the hidden states.
        patch_size: side of a patch in pixels.
        in_channels: of the images: 3 for RGB, or any number of bands.

    Source: paper section 3.3 (no code was released).
    """

    def __init__(self, embed_dims: int, patch_size: int = 16, in_channels: int = 3, init_cfg: dict | None = None):
        super().__init__(init_cfg)
        self.patch_size = patch_size
        self.in_channels = in_channels
        self.pixel_head = nn.Linear(embed_dims, in_channels * patch_size**2)
        truncated_normal_(self.pixel_head.weight)
        nn.init.zeros_(self.pixel_head.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Hidden states (..., embed_dims) to pixels (..., in_channels * patch_size**2)."""
        return self.pixel_head(hidden)

    def loss(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Mean squared error; targets (B, K, in_channels * patch_size**2), valid as in BEiTMIMHead."""
        return dict(loss=_mean_of_valid(self._errors(hidden, targets), valid))

    def predict(self, hidden: Tensor, targets: Tensor, valid: Tensor | None) -> dict[str, Tensor]:
        """Sums (B,) over each image of the squared error and of the places that count."""
        errors = self._errors(hidden, targets)
        valid = torch.ones_like(errors) if valid is None else valid.float()
        return dict(loss=(errors * valid).sum(1), count=valid.sum(1))

    def _errors(self, hidden: Tensor, targets: Tensor) -> Tensor:
        return (self(hidden).float() - targets).square().mean(dim=-1)


def _mean_of_valid(values: Tensor, valid: Tensor | None) -> Tensor:
    if valid is None:
        return values.mean()
    # torch.where, not a product: what stands at padding may be anything.
    total = torch.where(valid, values, 0).sum()
    return total / valid.sum().clamp(min=1)


@MODELS.register_module()
class TwoViewDataPreprocessor(BaseDataPreprocessor):
    """Moves a batch of two views to the device and scales each view for its network.

    Args:
        mean, std: of the first view, a number for each channel, 0-255; RGB, or the bands of LoadBands.
        tokenizer_scale: side of the tokenizer's view as a part of the first view's, from which it is made here, on the
            device, where the pipeline makes none (`second_size=None`): bicubic, antialiased. None: not made.

    Raises:
        ValueError: another number of means than of deviations, or no such part of a side.

    Source: microsoft/unilm `beit/datasets.py`; `beit2/PRETRAINING.md` for one view of both networks
    (`tokenizer_scale=1`).
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float], tokenizer_scale: float | None = None):
        super().__init__(non_blocking=True)  # pinned memory is copied while the host goes on
        if tokenizer_scale is not None and not 0 < tokenizer_scale <= 1:
            raise UserError(f'tokenizer_scale is {tokenizer_scale}; expected a part of a side, above 0 and at most 1')
        self.tokenizer_scale = tokenizer_scale
        if len(mean) != len(std):
            raise UserError(f'mean has {len(mean)} channels, std {len(std)}; expected one of each for each channel')
        self.register_buffer('mean', torch.tensor(mean).view(-1, 1, 1), persistent=False)
        self.register_buffer('std', torch.tensor(std).view(-1, 1, 1), persistent=False)

    def forward(self, data: dict, training: bool = False) -> dict:
        """Prepares one batch, in training and evaluation alike.

        Args:
            data: `inputs` holds images (B, H, W, C), uint8 or float, 0-255, and, where the pipeline makes them,
                tokenizer_images (B, h, w, C), mask bool (B, gh, gw), its positions int64 (B, K) and jitter float
                (B, 7).

        Returns:
            dict(inputs=dict(images=float (B, C, H, W) normalised, tokenizer_images=float (B, C, h, w) in [0, 1],
            mask, positions=int64 (B, K))); absent inputs are None.
        """
        inputs = dict(data['inputs'])
        if 'mask' in inputs and 'positions' not in inputs:  # of a mask that has no largest size
            # On the CPU, where counting the masked patches makes nobody wait.
            masks = inputs['mask'].flatten(1).numpy()
            num_slots = max(int(masks.sum(axis=1).max()), 1)
            inputs['positions'] = torch.from_numpy(np.stack([masked_positions(mask, num_slots) for mask in masks]))
        inputs = self.cast_data(inputs)
        jitter = inputs.get('jitter')
        images = planar(inputs['images'], jitter)
        if 'tokenizer_images' in inputs:
            tokenizer_images = planar(inputs['tokenizer_images'], jitter)
        else:
            tokenizer_images = self._tokenizer_view(images)
        return dict(
            inputs=dict(
                images=(images - self.mean) / self.std,
                tokenizer_images=None if tokenizer_images is None else tokenizer_images / 255,
                mask=inputs.get('mask'),
                positions=inputs.get('positions'),
            )
        )

    def tokenizer_size(self, height: int, width: int) -> tuple[int, int]:
        """Size in pixels of the view that is made of a first view; its own where the tokenizer sees that."""
        scale = self.tokenizer_scale or 1
        return round(scale * height), round(scale * width)

    def _tokenizer_view(self, images: Tensor) -> Tensor | None:
        """(B, C, H, W) in 0-255 to (B, C, h, w)."""
        if self.tokenizer_scale in (None, 1):
            return images if self.tokenizer_scale else None
        size = self.tokenizer_size(*images.shape[2:])
        return F.interpolate(images, size=size, mode='bicubic', antialias=True).clamp(0, 255)

    def denormalize(self, images: Tensor) -> Tensor:
        """First-view images back to [0, 1], for drawing."""
        return ((images * self.std + self.mean) / 255).clamp(0, 1)


def planar(images: Tensor, jitter: Tensor | None) -> Tensor:
    """(B, H, W, C) to float (B, C, H, W) in 0-255, jittered where that is left to the device."""
    images = images.permute(0, 3, 1, 2).float()
    return images if jitter is None else jitter_images(images, jitter)


def patchify(images: Tensor, patch_size: int) -> Tensor:
    """Cuts images (B, C, H, W) into patches (B, N, C*patch_size**2), channels slowest.

    The order of the values is that of the patch embedding's convolution weight.
    """
    patches = images.unfold(2, patch_size, patch_size).unfold(3, patch_size, patch_size)
    return patches.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)
