"""Tensors computed from a parameter, remembered while the model is only used, not trained."""
from collections.abc import Callable, Hashable

import torch
from torch import Tensor, nn

MAX_REMEMBERED = 2
# A bias at 640 x 640 pixels is 12 heads x 1601 x 1601 x 4 bytes = 123 MB, 1.5 GB for the 12 layers of a base model:
# more than all else at inference. To compute it again costs some 3 % of the forward pass there, less in batches.
MAX_BYTES = 2**25


class DerivedTensor(nn.Module):
    """Computes a tensor from a parameter, once for each key in evaluation.

    Resampling a bias table or a position embedding for a new image size costs more than using it. The result, unless
    it is large, is kept in evaluation mode without gradients. Optimizers and loaders change weights without a trace
    that could be asked for (a fused AdamW leaves the tensor's version as it is), so everything is forgotten whenever
    the mode is set or weights are loaded, and when the parameter is moved.

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
        if key in self.remembered:
            return self.remembered[key]
        computed = self.compute(parameter, key[0])
        if computed.nbytes <= MAX_BYTES:
            if len(self.remembered) == MAX_REMEMBERED:
                self.remembered.pop(next(iter(self.remembered)))  # the oldest
            self.remembered[key] = computed
        return computed

    def train(self, mode: bool = True) -> 'DerivedTensor':
        """Forgets; `eval()` comes here too."""
        self.remembered.clear()
        return super().train(mode)

    def _load_from_state_dict(self, *args, **kwargs) -> None:
        self.remembered.clear()
        super()._load_from_state_dict(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> 'DerivedTensor':
        return DerivedTensor(self.compute)  # a copied model starts with nothing remembered
