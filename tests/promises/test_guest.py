"""Other models in the same process find everything as it was: looking our types up changes only how files are read."""

import json
import subprocess
import sys

import pytest
from helpers import ROOT

pytestmark = pytest.mark.long

# In a process of its own, in which nothing of ours is loaded. Its last line lists the differences.
GUEST = r'''
import json, sys
import mmengine.fileio, mmengine.registry, mmcv, torch
import mmpretrain.registry, mmpretrain.utils, mmseg.registry, mmseg.utils
from mmengine.fileio.backends import registry_utils
from mmengine.logging import HistoryBuffer
from mmengine.registry import DefaultScope, Registry
from mmengine.runner import CheckpointLoader, checkpoint

for library in (mmpretrain, mmseg):
    library.utils.register_all_modules(init_default_scope=False)
SOURCES = 'torchvision modelzoo open-mmlab openmmlab mmcls pavi s3 petrel cluster:s3'.split()
MODULES = (torch, torch.serialization, torch._weights_only_unpickler, torch.hub, torch.nn.Module, mmengine.fileio,
           mmengine.fileio.io, checkpoint, HistoryBuffer)
PACKAGES = mmengine.registry, mmpretrain.registry, mmseg.registry


def state():
    """What plugins can change."""
    parts = {f'{package.__name__}.{name}': registry.module_dict for package in PACKAGES
             for name, registry in vars(package).items() if isinstance(registry, Registry)}
    for module in MODULES:
        functions = {name: value for name, value in vars(module).items() if callable(value)}
        parts[str(module)] = {name: value for name, value in functions.items() if not name.startswith('__')}
    parts['loaders'] = {source: CheckpointLoader._get_checkpoint_loader(f'{source}://x') for source in SOURCES}
    parts['backends'] = {name: kind for name, kind in registry_utils.backends.items() if name != 'beit_mm'}
    parts |= dict(schemes=CheckpointLoader._schemes, prefixes=registry_utils.prefix_to_backends)
    parts['others'] = dict(safe=set(torch.serialization.get_safe_globals()), scope=DefaultScope.get_current_instance(),
                           statistics=dict(HistoryBuffer._statistics_methods), threads=torch.get_num_threads(),
                           dtype=torch.get_default_dtype())
    return {f'{part}: {name}': value for part, values in parts.items() for name, value in values.items()}


before = state()

import beit_mm
from beit_mm.registry import MODELS
for registry in ('DATASETS', 'TRANSFORMS', 'HOOKS', 'METRICS', 'OPTIM_WRAPPERS', 'DATA_SAMPLERS'):
    getattr(beit_mm.registry, registry).get('beit_mm.Nothing')
MODELS.build(dict(type='beit_mm.BEiTBackbone', arch=dict(embed_dims=8, num_layers=1, num_heads=2)))
content = dict(state_dict=dict(w=1.0), meta=dict(epoch=3, cfg='a = 1'), optimizer=dict(state={}), extra=[1, (2, 3)])
torch.save(content, sys.argv[1])
assert CheckpointLoader.load_checkpoint(sys.argv[1]) == content

after = state()
print(json.dumps(sorted(key for key in {**before, **after} if before.get(key) != after.get(key))))
'''


def test_a_process_is_left_as_it_was_found(tmp_path):
    command = [sys.executable, '-W', 'ignore', '-c', GUEST, tmp_path / 'own.pth']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # the exception: who reads local paths and addresses
    readers = ['schemes: ', 'schemes: hf://', 'schemes: http://', 'schemes: https://']
    assert json.loads(done.stdout.splitlines()[-1]) == readers
