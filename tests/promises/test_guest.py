"""Other models in the same process find everything as it was: looking our types up changes only how files are read."""

import json
import subprocess
import sys

from helpers import ROOT

# In a process of its own, in which nothing of ours is loaded. Its last line lists the differences.
GUEST = r'''
import json, sys
import mmengine.fileio, mmengine.registry, mmcv, torch, torchvision
import mmpretrain.registry, mmpretrain.utils, mmseg.registry, mmseg.utils
from mmengine.fileio.backends import registry_utils
from mmengine.logging import HistoryBuffer
from mmengine.registry import DefaultScope, Registry
from mmengine.runner import CheckpointLoader, checkpoint

folder = sys.argv[1]
for library in (mmpretrain, mmseg):
    library.utils.register_all_modules(init_default_scope=False)
torch.hub.set_dir(folder)


def state():
    """What plugins can change."""
    registries = {f'{package.__name__}.{name}': dict(registry.module_dict)
                  for package in (mmengine.registry, mmpretrain.registry, mmseg.registry)
                  for name, registry in vars(package).items() if isinstance(registry, Registry)}
    functions = {f'{module.__name__}.{name}': value for module in (
        torch, torch.serialization, torch._weights_only_unpickler, torch.hub, torch.nn.Module, mmengine.fileio,
        mmengine.fileio.io, checkpoint, HistoryBuffer)
        for name, value in vars(module).items() if callable(value) and not name.startswith('__')}
    return dict(registries=registries, functions=functions, schemes=dict(CheckpointLoader._schemes),
                backends={name: backend for name, backend in registry_utils.backends.items() if name != 'beit_mm'},
                prefixes=dict(registry_utils.prefix_to_backends), safe=set(torch.serialization.get_safe_globals()),
                statistics=dict(HistoryBuffer._statistics_methods), scope=DefaultScope.get_current_instance(),
                default_dtype=torch.get_default_dtype(), threads=torch.get_num_threads())


weights = torchvision.models.resnet18().state_dict()
name = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.url.split('/')[-1]
torch.save(weights, f'{folder}/checkpoints/{name}')
content = dict(state_dict=weights, meta=dict(epoch=3, cfg='a = 1'), optimizer=dict(state={}), extra=[1, (2, 3)])
torch.save(content, f'{folder}/own.pth')
SOURCES = 'torchvision modelzoo open-mmlab openmmlab mmcls pavi s3 petrel cluster:s3'.split()


def load_everything():
    """What a guest reads: a backbone whose init_cfg names a file, as configs do, and a file of its own."""
    found = {}
    for source in ('torchvision://resnet18', f'{folder}/checkpoints/{name}'):
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            model = mmpretrain.registry.MODELS.build(dict(
                type='ResNet', depth=18, init_cfg=dict(type='Pretrained', checkpoint=source)))
        model.init_weights()
        found[source] = all(torch.equal(tensor, weights[key]) for key, tensor in model.state_dict().items())
        assert found[source]
    own = CheckpointLoader.load_checkpoint(f'{folder}/own.pth')
    tensors = own.pop('state_dict')
    found['own'] = repr(own), [(key, tensor.sum().item()) for key, tensor in tensors.items()]
    return found, {source: CheckpointLoader._get_checkpoint_loader(f'{source}://x') for source in SOURCES}


before_loading, before = load_everything(), state()

import beit_mm
from beit_mm.registry import MODELS
for registry in ('DATASETS', 'TRANSFORMS', 'HOOKS', 'METRICS', 'OPTIM_WRAPPERS', 'DATA_SAMPLERS'):
    getattr(beit_mm.registry, registry).get('beit_mm.Nothing')
MODELS.build(dict(type='beit_mm.BEiTBackbone', arch=dict(embed_dims=8, num_layers=1, num_heads=2)))

after = state()
changed = [] if load_everything() == before_loading else ['what is loaded']
for part in before:
    if isinstance(before[part], dict):
        changed += [f'{part}: {key}' for key in {**before[part], **after[part]}
                    if before[part].get(key) != after[part].get(key)]
    elif before[part] != after[part]:
        changed.append(part)
print(json.dumps(sorted(changed)))
'''


def test_a_process_is_left_as_it_was_found(tmp_path):
    (tmp_path / 'checkpoints').mkdir()
    command = [sys.executable, '-W', 'ignore', '-c', GUEST, tmp_path]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    # the exception: who reads local paths and addresses
    readers = ['schemes: ', 'schemes: hf://', 'schemes: http://', 'schemes: https://']
    assert json.loads(done.stdout.splitlines()[-1]) == readers
