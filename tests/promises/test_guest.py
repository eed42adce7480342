"""Other models in the same process find everything as it was: looking our types up changes only how files are read."""

import json
import subprocess
import sys

from helpers import ROOT

# In a process of its own, in which nothing of ours is loaded. Each line of its output is one difference.
GUEST = r'''
import collections, json, pickle, sys
import mmengine.fileio, mmengine.registry, mmcv, torch, torchvision
import mmpretrain.registry, mmpretrain.utils, mmseg.registry, mmseg.utils
from mmengine.fileio.backends import registry_utils
from mmengine.logging import HistoryBuffer, MMLogger
from mmengine.registry import DefaultScope, Registry
from mmengine.runner import CheckpointLoader, checkpoint, load_checkpoint

folder = sys.argv[1]
for library in (mmpretrain, mmseg):
    library.utils.register_all_modules(init_default_scope=False)
MMLogger.get_instance('guest', log_level='ERROR')
torch.hub.set_dir(folder)
torch.manual_seed(0)


def state():
    """What plugins can change."""
    registries = {f'{package.__name__}.{name}': dict(registry.module_dict)
                  for package in (mmengine.registry, mmpretrain.registry, mmseg.registry)
                  for name, registry in vars(package).items() if isinstance(registry, Registry)}
    functions = {f'{module.__name__}.{name}': value for module in (
        torch, torch.serialization, torch.hub, torch.nn.Module, mmengine.fileio, mmengine.fileio.io, checkpoint,
        HistoryBuffer)
        for name, value in vars(module).items() if callable(value) and not name.startswith('__')}
    return dict(registries=registries, functions=functions, schemes=dict(CheckpointLoader._schemes),
                backends={name: backend for name, backend in registry_utils.backends.items() if name != 'beit_mm'},
                prefixes=dict(registry_utils.prefix_to_backends), safe=set(torch.serialization.get_safe_globals()),
                statistics=dict(HistoryBuffer._statistics_methods), scope=DefaultScope.get_current_instance(),
                default_dtype=torch.get_default_dtype(), threads=torch.get_num_threads())


def classifier():
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        return mmpretrain.registry.MODELS.build(dict(
            type='ImageClassifier', backbone=dict(type='ResNet', depth=18),
            head=dict(type='LinearClsHead', num_classes=3, in_channels=512)))


def segmentor():
    with DefaultScope.overwrite_default_scope('mmseg'):
        return mmseg.registry.MODELS.build(dict(
            type='EncoderDecoder', test_cfg=dict(mode='whole'),
            backbone=dict(type='ResNet', depth=18, norm_cfg=dict(type='BN')),
            decode_head=dict(type='FCNHead', in_channels=512, in_index=3, channels=8, num_classes=3,
                             norm_cfg=dict(type='BN'))))


def resnet18(checkpoint):
    """A backbone whose init_cfg names a file, as configs do."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = mmpretrain.registry.MODELS.build(dict(
            type='ResNet', depth=18, init_cfg=dict(type='Pretrained', checkpoint=checkpoint)))
    model.init_weights()
    return model


weights = torchvision.models.resnet18().state_dict()
url = torchvision.models.ResNet18_Weights.IMAGENET1K_V1.url
torch.save(weights, f"{folder}/checkpoints/{url.split('/')[-1]}")
models = dict(classifier=classifier(), segmentor=segmentor())
history = HistoryBuffer([1.0, 2.0], [1, 1])
torch.save(dict(history=history), f'{folder}/history.pth')
try:
    CheckpointLoader.load_checkpoint(f'{folder}/history.pth')
except pickle.UnpicklingError:  # mmengine 0.10.7 cannot read its own history with torch >= 2.6
    history = torch.tensor([1.0, 2.0])
files = {}
for name in ('classifier', 'segmentor'):
    content = dict(state_dict=models[name].state_dict(), meta=dict(epoch=3, cfg='a = 1'), optimizer=dict(state={}),
                   message_hub=dict(log_scalars=dict(loss=history)), extra=[1, (2, 3)])
    torch.save(content, f'{folder}/{name}.pth')
    files[name] = f'{folder}/{name}.pth'
SCHEMES = ['torchvision://resnet18', 'modelzoo://resnet18', 'open-mmlab://x', 'openmmlab://x', 'mmcls://x', 'pavi://x',
           's3://x', 'petrel://x', 'cluster:s3://x', 'http://x/y', 'https://x/y', '', './x.pth', '/x.pth']
OURS = {'http://x/y', 'https://x/y', '', './x.pth', '/x.pth'}
found = []


def load_everything():
    """What a guest reads: names, types and numbers."""
    results = {}
    for name, file in files.items():
        content = CheckpointLoader.load_checkpoint(file)
        tensors = content.pop('state_dict')
        metadata = {key: {inner: value for inner, value in entry.items() if inner != 'beit_mm'}
                    for key, entry in tensors._metadata.items()}
        loss = content['message_hub']['log_scalars'].pop('loss')
        results[name] = (repr(content), list(tensors), [t.sum().item() for t in tensors.values()],
                         {key: entry for key, entry in metadata.items() if entry}, type(loss).__name__, loss.mean())
        model = dict(classifier=classifier, segmentor=segmentor)[name]()
        load_checkpoint(model, file, strict=True)
        results[name + ' loaded'] = [torch.equal(a, b) for a, b in zip(model.state_dict().values(), tensors.values())]
    for source in ('torchvision://resnet18', f"{folder}/checkpoints/{url.split('/')[-1]}"):
        model = resnet18(source)
        results[source] = [torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items()]
    for scheme in SCHEMES[2:9]:  # as if each scheme's loader had fetched the file
        loader = CheckpointLoader._get_checkpoint_loader(scheme)
        CheckpointLoader._schemes = collections.OrderedDict(
            (prefix, (lambda filename, map_location: dict(state_dict=dict(weights))) if value is loader else value)
            for prefix, value in CheckpointLoader._schemes.items())
        results[scheme] = [torch.equal(tensor, weights[name]) for name, tensor in resnet18(scheme).state_dict().items()]
        CheckpointLoader._schemes = collections.OrderedDict(
            (prefix, loader if value.__name__ == '<lambda>' else value)
            for prefix, value in CheckpointLoader._schemes.items())
    return results


before_loading = load_everything()
loaders = {scheme: CheckpointLoader._get_checkpoint_loader(scheme) for scheme in SCHEMES}
before = state()

import beit_mm
from beit_mm.registry import MODELS
for name in ('DATASETS', 'TRANSFORMS', 'HOOKS', 'METRICS', 'OPTIM_WRAPPERS', 'DATA_SAMPLERS'):
    getattr(beit_mm.registry, name).get('beit_mm.Nothing')
assert MODELS.get('beit_mm.BEiTBackbone') is not None
MODELS.build(dict(type='beit_mm.BEiTBackbone', arch=dict(embed_dims=8, num_layers=1, num_heads=2)))

after = state()
after_loading = load_everything()
for part in before:
    if isinstance(before[part], dict):
        found += [f'{part}: {key}' for key in {**before[part], **after[part]}
                  if before[part].get(key) != after[part].get(key)]
    elif before[part] != after[part]:
        found.append(part)
for scheme in SCHEMES:
    if (CheckpointLoader._get_checkpoint_loader(scheme) is loaders[scheme]) == (scheme in OURS):
        found.append(f'scheme {scheme}')
for name, result in before_loading.items():
    if result != after_loading[name]:
        found.append(f'{name} is read as {after_loading[name]}, before as {result}')
    if isinstance(result, list) and not all(result):
        found.append(f'{name} does not load')
print(json.dumps(found))
'''


def test_a_process_is_left_as_it_was_found(tmp_path):
    (tmp_path / 'checkpoints').mkdir()
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', GUEST, str(tmp_path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # the exception: who reads local paths and addresses
    assert sorted(json.loads(done.stdout.splitlines()[-1])) == [
        'schemes: ',
        'schemes: hf://',
        'schemes: http://',
        'schemes: https://',
    ]
