"""BEiT pretraining: predict the visual tokens of masked patches."""
import torch
import torch.nn as nn
import torch.nn.functional as F
from mmengine.model import BaseModel
from torch import Tensor

from beit_mm.checkpoint.names import convert_state_dict, detect_format
from beit_mm.functional.tokens import patchify, take_tokens
from beit_mm.registry import MODELS

from .fit import check_mask_grid, check_second_view, check_vocabulary

TOKENIZER_PREFIX = 'target_generator.'


@MODELS.register_module()
class BEiTPretrainer(BaseModel):
    """Masked image modeling on visual tokens (paper section 2.4), with the rows of its ablation table.

    The tokenizer is a fixed part of the task: frozen, in evaluation mode, outside autocast, and not stored
    in checkpoints, which record where it came from instead.

    Args:
        backbone: config of a BEiTBackbone with out_type 'raw'.
        head: config of a BEiTMIMHead or PixelRegressionHead.
        target_generator: config of a tokenizer (see `beit_mm.models.tokenizers`); None for pixels.
        data_preprocessor: config of a TwoViewDataPreprocessor.
        recover: 'masked' predicts the masked patches only, 'all' every patch.
        init_cfg: mmengine's.

    Raises:
        ValueError: the head's vocabulary is not the tokenizer's, or `recover` is unknown; in training, views or
            masks that do not fit (see `fit`).

    Source: microsoft/unilm `beit/engine_for_pretraining.py`.
    Differs from it in: the last block computes only the tokens that are predicted, and the tokenizer's
    output layer runs only there: the same loss with less work.
    """

    def __init__(self,
                 backbone: dict,
                 head: dict,
                 target_generator: dict | None = None,
                 data_preprocessor: dict | None = None,
                 recover: str = 'masked',
                 init_cfg: dict | None = None):
        super().__init__(data_preprocessor, init_cfg)
        if recover not in ('masked', 'all'):
            raise ValueError(f"recover is {recover!r}; choose 'masked' or 'all'")
        self.recover = recover
        self.backbone = MODELS.build(backbone)
        self.head = MODELS.build(head)
        self.target_generator = None
        if target_generator is not None:
            self.target_generator = MODELS.build(target_generator).requires_grad_(False).eval()
            check_vocabulary(self.head, self.target_generator)
        self.register_state_dict_post_hook(_drop_tokenizer)
        self.register_load_state_dict_pre_hook(_translate)
        self.register_load_state_dict_post_hook(_expect_no_tokenizer)

    def forward(self, inputs: dict, data_samples: None = None, mode: str = 'tensor') -> object:
        """Runs the model.

        Args:
            inputs: what TwoViewDataPreprocessor returns.
            data_samples: unused, part of mmengine's interface.
            mode: 'loss' for training, 'predict' for evaluation, 'tensor' for hidden states.

        Returns:
            'loss': dict of tensors. 'predict': one dict an image, see `predict`. 'tensor': (B, 1+N, C).
        """
        if mode == 'loss':
            return self.loss(inputs)
        if mode == 'predict':
            return self.predict(inputs)
        return self.backbone(inputs['images'], inputs['mask'])[0]

    def loss(self, inputs: dict) -> dict[str, Tensor]:
        """Loss of one batch, and `mim_acc` where tokens are predicted."""
        positions = self._predicted_positions(inputs)
        targets = self._targets(inputs, positions)
        return self.head.loss(self._hidden(inputs, positions), targets, _valid(positions))

    @torch.no_grad()
    def predict(self, inputs: dict) -> list[dict]:
        """Evaluates held-out images one by one.

        Returns:
            For each image the sums `loss`, `count` and, for tokens, `correct` (floats), and its `tokens`,
            int64 (N,) on the CPU.
        """
        positions = self._predicted_positions(inputs)
        targets = self._targets(inputs, None)
        chosen = targets if positions is None else take_tokens(targets, positions.clamp(min=0))
        sums = self.head.predict(self._hidden(inputs, positions), chosen, _valid(positions))
        results = [dict(zip(sums, map(float, row), strict=True)) for row in zip(*sums.values(), strict=True)]
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
        tokens = self.target_generator.encode(inputs['tokenizer_images'])
        hidden = self.backbone(inputs['images'], inputs['mask'])[0][:, 1:]
        predicted = self.head(hidden).argmax(dim=-1).view_as(tokens)
        mask = inputs['mask']
        return tokens, predicted if mask is None else torch.where(mask, predicted, tokens)

    @torch.no_grad()
    def pictures(self, inputs: dict) -> dict[str, Tensor]:
        """What the model saw, what it was to predict and what it predicted.

        Predicted tokens rarely equal the right ones (5 % after 300 epochs on ImageNet); decoded, they show
        whether the colours and edges of the hidden part were guessed.

        Returns:
            Title -> float (B, 3, H, W) in [0, 1]: the image, the masked image and, where the tokenizer can
            decode, the image of its tokens and the same with the predicted tokens in the masked patches.
        """
        image = self.data_preprocessor.denormalize(inputs['images'])
        columns = dict(image=image)
        mask = inputs['mask']
        if mask is not None:
            hidden = F.interpolate(mask[:, None].float(), scale_factor=self.backbone.patch_size) > 0
            hidden = hidden[:, :, :image.shape[2], :image.shape[3]]
            columns['masked'] = torch.where(hidden, 0.5, image)
        if getattr(self.target_generator, 'decoder', None) is not None:
            tokens, predicted = self.predict_tokens(inputs)
            columns['tokens, decoded'] = self.target_generator.decode(tokens)
            columns['prediction, decoded'] = self.target_generator.decode(predicted)
        return columns

    def check_data(self, transforms: list) -> None:
        """Raises ValueError when a pipeline's mask or second view does not fit the backbone's patches."""
        views = next((t for t in transforms if hasattr(t, 'second_size')), None)
        if views is None:
            return
        grid = self._patch_grid(views.size)
        if views.second_size is not None and self.target_generator is not None:
            check_second_view(self.target_generator, views.second_size, grid)
        for transform in transforms:
            if hasattr(transform, 'grid'):
                check_mask_grid(transform.grid, grid)

    def train(self, mode: bool = True) -> 'BEiTPretrainer':
        """Sets the training mode of everything but the tokenizer."""
        super().train(mode)
        if self.target_generator is not None:
            self.target_generator.eval()
        return self

    def _predicted_positions(self, inputs: dict) -> Tensor | None:
        """int64 (B, K) patches to predict, -1 = padding; None for all."""
        if inputs['mask'] is not None:
            check_mask_grid(inputs['mask'].shape[1:], self._patch_grid(inputs['images'].shape[2:]))
        if self.recover == 'all':
            return None
        if inputs['positions'] is None:
            raise ValueError("the images have no mask; add BlockwiseMask to the pipeline, or set recover='all'")
        return inputs['positions']

    def _hidden(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Hidden states (B, K, C) of the patches to predict."""
        hidden = self.backbone(inputs['images'], inputs['mask'], positions)[0]
        return hidden[:, 1:] if positions is None else hidden

    def _targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        """Tokens (B, K) or pixels (B, K, P) at the positions; at all N patches where they are None."""
        if self.target_generator is None:
            targets = patchify(inputs['images'], self.head.patch_size)
        else:
            self._check_second_view(inputs)
            if positions is not None and hasattr(self.target_generator, 'encode_at'):
                return self.target_generator.encode_at(inputs['tokenizer_images'], positions)
            targets = self.target_generator.encode(inputs['tokenizer_images']).flatten(1)
        return targets if positions is None else take_tokens(targets, positions.clamp(min=0))

    def _check_second_view(self, inputs: dict) -> None:
        if inputs['tokenizer_images'] is None:
            raise ValueError('the images have no second view for the tokenizer; set second_size in the pipeline')
        grid = self._patch_grid(inputs['images'].shape[2:])
        check_second_view(self.target_generator, tuple(inputs['tokenizer_images'].shape[2:]), grid)

    def _patch_grid(self, size: tuple[int, int]) -> tuple[int, int]:
        """Patch grid (h, w) of an image of size (height, width) pixels."""
        return tuple(-(-side // self.backbone.patch_size) for side in size)


def _valid(positions: Tensor | None) -> Tensor | None:
    return None if positions is None else positions >= 0


def _drop_tokenizer(model: nn.Module, state_dict: dict, prefix: str, local_metadata: dict) -> None:
    for key in [k for k in state_dict if k.startswith(prefix + TOKENIZER_PREFIX)]:
        del state_dict[key]


def _translate(model: nn.Module, state_dict: dict, prefix: str, *_: object) -> None:
    """Takes mmpretrain's names for backbone and head, and leaves the tokenizer in its files alone."""
    names = [name for name in state_dict if name.startswith(prefix)]
    weights = {name.removeprefix(prefix): state_dict[name] for name in names}
    if detect_format(weights) != 'mmpretrain':
        return
    for name in names:
        del state_dict[name]
    weights = convert_state_dict(weights, 'mmpretrain').state_dict
    state_dict.update((prefix + name, tensor) for name, tensor in weights.items())


def _expect_no_tokenizer(model: nn.Module, incompatible_keys: tuple) -> None:
    missing = incompatible_keys.missing_keys
    # Below any prefix: the model may be inside a wrapper.
    missing[:] = [key for key in missing if f'.{TOKENIZER_PREFIX}' not in f'.{key}']
