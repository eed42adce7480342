"""Pixel maps of the DALL-E tokenizer and the likelihood it was trained with.

The logit-Laplace distribution lives on the open interval (0, 1), so pixels in [0, 1] are first
squeezed into [0.1, 0.9].
"""
import math

import torch
from torch import Tensor

EPS = 0.1


def map_pixels(images: Tensor) -> Tensor:
    """Squeeze pixels from [0, 1] into [0.1, 0.9].

    Args:
        images: any shape, values in [0, 1].

    Returns:
        Same shape and dtype.

    Source: openai/DALL-E `dall_e/utils.py`. Differs from it in taking any number of dimensions.
    """
    return (1 - 2 * EPS) * images + EPS


def unmap_pixels(images: Tensor) -> Tensor:
    """Inverse of `map_pixels`, clamped to [0, 1]."""
    return ((images - EPS) / (1 - 2 * EPS)).clamp(0, 1)


def logit_laplace_nll(mapped: Tensor, mu: Tensor, log_b: Tensor) -> Tensor:
    """Negative log likelihood of pixels under the logit-Laplace distribution, elementwise.

    f(x | mu, b) = exp(-|logit(x) - mu| / b) / (2 b x (1 - x)), hence
    -ln f = |logit(x) - mu| / b + ln b + ln(2 x (1 - x)).

    Args:
        mapped: pixels after `map_pixels`, in (0, 1).
        mu: location, on the logit scale, same shape.
        log_b: ln of the scale b, same shape.

    Returns:
        Nats per value, same shape. It is a density: negative values are normal.

    Source: DALL-E paper (arXiv 2102.12092), appendix A.3.
    """
    distance = (torch.logit(mapped) - mu).abs()
    return distance * torch.exp(-log_b) + log_b + (mapped * (1 - mapped)).log() + math.log(2)
