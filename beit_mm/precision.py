"""Chooses the floating-point type for a device."""

import torch


def usable_dtype(dtype: str, device_type: str) -> str:
    """The type to use on a device in place of `dtype`: `dtype` itself, or another where it would be slow."""
    if device_type == 'cuda':  # V100 and T4 only emulate bfloat16
        emulated = dtype == 'bfloat16' and not torch.cuda.is_bf16_supported(including_emulation=False)
        return 'float16' if emulated else dtype
    if device_type != 'cpu' or dtype == 'float32':
        return dtype
    if dtype == 'bfloat16' and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return 'float32'


def inference_autocast(device: torch.device) -> torch.autocast:
    """Autocast to half precision: always on a GPU, on other devices only if the caller has switched autocast on."""
    dtype = getattr(torch, usable_dtype('bfloat16', device.type))
    return torch.autocast(device.type, dtype, enabled=device.type == 'cuda' or torch.is_autocast_enabled(device.type))
