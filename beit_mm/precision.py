"""Which floating-point type a device computes in."""

import torch


def usable_dtype(dtype: str, device_type: str) -> str:
    """The type that the device computes in when the user asks for `dtype`."""
    if device_type == 'cuda':  # V100 and T4 only emulate bfloat16
        emulated = dtype == 'bfloat16' and not torch.cuda.is_bf16_supported(including_emulation=False)
        return 'float16' if emulated else dtype
    if device_type != 'cpu' or (dtype == 'bfloat16' and _cpu_computes_bfloat16()):
        return dtype
    return 'float32'


def _cpu_computes_bfloat16() -> bool:
    """Whether oneDNN computes in bfloat16 on this CPU; torch 2.6 to 2.13 have no public function for it."""
    known = getattr(torch.ops.mkldnn, '_is_mkldnn_bf16_supported', None)
    if not torch.backends.mkldnn.is_available():
        return False
    return known() if known else torch.backends.cpu.get_cpu_capability().startswith('AVX512')


def inference_autocast(device: torch.device) -> torch.autocast:
    """Half precision on a GPU; elsewhere only if the caller has switched it on."""
    dtype = getattr(torch, usable_dtype('bfloat16', device.type))
    return torch.autocast(device.type, dtype, enabled=device.type == 'cuda' or torch.is_autocast_enabled(device.type))
