"""docs/released.md: every released BEiT with a command that loads it, whatever its names, and its source's figures."""

import re

import pytest
import torch
import yaml
from helpers import ROOT, load_config
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import load_checkpoint

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.registry import MODELS

PAGE = (ROOT / 'docs/released.md').read_text()
FILES = {  # name of the file -> config and what its source says of it
    weights['URL'].rsplit('/', 1)[1]: (entry['Config'].removeprefix('configs/'), weights)
    for path in sorted((ROOT / 'configs').glob('*/metafile.yml'))
    for entry in yaml.load(path.read_text(), yaml.BaseLoader)['Models']
    for weights in entry.get('Released Weights', ())
    if path.parent.name != 'dvae' and not weights['Fits'].startswith('target_generator')
}
FIGURES = {  # top-1 and top-5, or mIoU at a single scale and at all with flip, as the sources print them
    'beit_base_patch16_224_pt22k_ft1k.pth': '83.7 96.6',
    'beit_base_patch16_224_pt22k_ft22kto1k.pth': '85.2 97.6',
    'beit_base_patch16_384_pt22k_ft22kto1k.pth': '86.820 98.124',
    'beit_large_patch16_224_pt22k_ft1k.pth': '86.0 97.6',
    'beit_large_patch16_224_pt22k_ft22kto1k.pth': '87.396 98.282',
    'beit_large_patch16_384_pt22k_ft22kto1k.pth': '88.408 98.602',
    'beit_large_patch16_512_pt22k_ft22kto1k.pth': '88.600 98.658',
    'beit_base_patch16_640_pt22k_ft22ktoade20k.pth': '53.61 54.26',
    'beit_large_patch16_640_pt22k_ft22ktoade20k.pth': '56.7 57.0',
    'beit-base_3rdparty_in1k_20221114-c0a4df23.pth': '85.28 97.59',
    'vit-base-p16_ft-8xb128-coslr-100e_in1k_20221128-0ca393e9.pth': '83.1',
    'upernet_beit-base_8x2_640x640_160k_ade20k-eead221d.pth': '53.08 53.84',
    'upernet_beit-large_fp16_8x1_640x640_160k_ade20k-8fc0dd5d.pth': '56.33 56.84',
}
UNTESTED = {  # no held-out images
    f'{name}_patch16_224_{data}.pth'
    for size in ('base', 'large')
    for name, data in ((f'beit_{size}', 'pt22k_ft22k'), (f'beitv2_{size}', 'pt1k_ft21k'))
}


def block_of(file: str) -> str:
    (block,) = re.findall(rf'^# {re.escape(file)}: .*\n(?:.+\n)+', PAGE, re.M)
    return block


def test_all_files_have_their_command_and_figures():
    assert sum(config.startswith(('beit/', 'beit_plus/')) for config, _ in FILES.values()) == 19
    assert set(FIGURES) < set(FILES)
    for file, (config, weights) in FILES.items():
        commands = re.findall(r'^python tools/test.py (\S+) (\S+)(.*)$', block_of(file), re.M)
        assert (not commands) == (file in UNTESTED), file
        assert {command[:2] for command in commands} <= {(f'configs/{config}', weights['URL'])}
        if file in FIGURES:
            figures = re.findall(r'(?:^# |, )(\d+\.\d+) (?:ImageNet|ADE20K)', block_of(file), re.M)
            assert ' '.join(figures) == FIGURES[file], file
        if 'mIoU' in block_of(file) and 'upernet' in config:
            assert ['--tta' in options for *_, options in commands] == [False, True][: len(commands)]
            assert all('model.test_cfg.precision=float32' in options for *_, options in commands)


def test_rows_on_private_data_are_named():
    assert re.findall(r'\| (\d\d\.\d) (?:top-1|mIoU) \|', PAGE) == ['89.3', '89.5', '57.9', '58.4']


# tests/models/test_beit_v2.py has the files of its pretraining
@pytest.mark.parametrize('file', [file for file, (config, _) in FILES.items() if not config.startswith('beit_v2/pre')])
def test_names_load_strictly_into_the_config(file, tmp_path):
    """The model of the command, narrow, from a file with the names of its source."""
    config, weights = FILES[file]
    cfg, is_large = load_config(config), 'large' in config
    source = dict(mmpretrain='mmpretrain', mmsegmentation='mmseg').get(weights['Source'], 'unilm')
    model = cfg.model.to_dict()
    arch = dict(embed_dims=16, num_layers=24 if is_large else 12, num_heads=2)
    model['backbone'].update(init_cfg=None, arch=arch, img_size=64)
    if 'neck' in model:
        model['neck'].update(embed_dim=16)
        model['decode_head'].update(in_channels=[16] * 4, channels=16)
        model['auxiliary_head'].update(in_channels=16)
    elif 'target_generator' in model:
        model['target_generator'] = dict(type='beit_mm.DALLETokenizer', random_weights=True, hidden=8)
        model['head'].update(embed_dims=16)
    else:
        model['head'].update(in_channels=16)
    init_default_scope(cfg.default_scope)
    model, other = (MODELS.build(Config(model)) for _ in range(2))
    state = {name: tensor for name, tensor in other.state_dict().items() if not name.startswith('target_generator.')}
    names = convert_state_dict(state, 'beit_mm', source).state_dict
    content = dict(model=names) if source == 'unilm' and 'toade20k' not in file else dict(state_dict=names, meta={})
    torch.save(content, tmp_path / file)
    load_checkpoint(model, str(tmp_path / file), strict=True)
    assert not model.backbone.load_report.resized
    loaded = model.state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in state.items())
