"""The type that a device computes in."""

import torch


def usable_dtype(dtype: str, device_type: str) -> str:
    """The type that the device computes in, when `dtype` is asked for."""
    if device_type == 'cuda':  # V100 and T4 only emulate bfloat16
        emulated = dtype == 'bfloat16' and not torch.cuda.is_bf16_supported(including_emulation=False)
        return 'float16' if emulated else dtype
    if device_type != 'cpu' or dtype == 'float32':
        return dtype
    if dtype == 'bfloat16' and torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return dtype
    return 'float32'


def inference_autocast(device: torch.device) -> torch.autocast:
    """Half precision on a GPU; elsewhere where the caller has switched it on."""
    dtype = getattr(torch, usable_dtype('bfloat16', device.type))
    return torch.autocast(device.type, dtype, enabled=device.type == 'cuda' or torch.is_autocast_enabled(device.type))
