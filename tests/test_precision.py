"""The type that a device computes in is known without torch's private function, which may get another name."""

from types import SimpleNamespace

import pytest
import torch

from beit_mm.precision import usable_dtype


@pytest.mark.parametrize(('cpu', 'dtype'), [('AVX512', 'bfloat16'), ('AVX2', 'float32'), ('DEFAULT', 'float32')])
def test_the_kind_of_the_cpu_decides_where_torch_does_not_say(monkeypatch, cpu, dtype):
    monkeypatch.setattr(torch.ops, 'mkldnn', SimpleNamespace())
    monkeypatch.setattr(torch.backends.cpu, 'get_cpu_capability', lambda: cpu)
    assert usable_dtype('bfloat16', 'cpu') == dtype and usable_dtype('float32', 'cpu') == 'float32'
