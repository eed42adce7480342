"""Tensors computed from a parameter, remembered while the model is only used, not trained."""
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

# A bias at 640 x 640 pixels is 12 heads x 1601 x 1601 x 4 bytes = 123 MB for each of the 12 layers of a base
# model, so two sizes are 3 GB. Sliding windows have one size.
MAX_REMEMBERED = 2


class DerivedTensor(nn.Module):
    """Computes a tensor from a parameter, once for each key in evaluation.

    Resampling a bias table or a position embedding for a new image size costs more than using it. The result is
    kept in evaluation mode without gradients. Optimizers and loaders change weights without a trace that could be
    asked for (a fused AdamW leaves the tensor's version as it is), so everything is forgotten whenever the
    mode is set or weights are loaded, and when the parameter is moved.

    Args:
        compute: (parameter, key) -> tensor.
    """

    def __init__(self, compute: Callable[[Tensor, Hashable], Tensor]):
        super().__init__()
        self.compute = compute
        self.remembered: dict[Hashable, Tensor] = {}

    def forward(self, parameter: Tensor, key: Hashable) -> Tensor:
        """The tensor for a key; the caller always gives the same parameter."""
        if self.training or torch.is_grad_enabled():
            return self.compute(parameter, key)
        key = (key, parameter.data_ptr(), parameter._version, parameter.dtype, parameter.device)
        if key not in self.remembered:
            if len(self.remembered) == MAX_REMEMBERED:
                self.remembered.pop(next(iter(self.remembered)))  # the oldest
            self.remembered[key] = self.compute(parameter, key[0])
        return self.remembered[key]

    def train(self, mode: bool = True) -> 'DerivedTensor':
        """Forgets; `eval()` comes here too."""
        self.remembered.clear()
        return super().train(mode)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.remembered.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> 'DerivedTensor':
        return DerivedTensor(self.compute)  # a copied model starts with nothing remembered
