"""Tensors computed from a parameter, remembered while the parameter stands still."""
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

# Multi-scale testing meets a handful of window shapes; a folder of odd photos must not fill memory.
MAX_REMEMBERED = 8


class DerivedTensor:
    """Computes a tensor from a parameter, once for each key unless gradients are wanted.

    Resampling a bias table or a position embedding for a new image size costs more than using it.
    In evaluation the result is kept until the parameter is changed in place, replaced or moved.

    Args:
        compute: (parameter, key) -> tensor.
    """

    def __init__(self, compute: Callable[[Tensor, Hashable], Tensor]):
        self.compute = compute
        self.remembered: dict[Hashable, Tensor] = {}
        self.stamp: tuple = ()

    def __call__(self, parameter: Tensor, key: Hashable) -> Tensor:
        if torch.is_grad_enabled() and parameter.requires_grad:
            return self.compute(parameter, key)
        stamp = (parameter.data_ptr(), parameter._version, parameter.dtype, parameter.device)
        if stamp != self.stamp:
            self.remembered.clear()
            self.stamp = stamp
        if key not in self.remembered:
            if len(self.remembered) == MAX_REMEMBERED:
                self.remembered.pop(next(iter(self.remembered)))  # the oldest
            self.remembered[key] = self.compute(parameter, key)
        return self.remembered[key]

    def __deepcopy__(self, memo: dict) -> 'DerivedTensor':
        return DerivedTensor(self.compute)  # a copied model starts with nothing remembered
