"""The model index has every config, with its true size and recipe, and claims no result as ours."""
import ast
import re
from pathlib import Path

import pytest
import torch
import yaml
from helpers import ROOT
from mmengine.config import Config
from mmengine.registry import init_default_scope

from beit_mm.registry import MODELS

CONFIGS = ROOT / 'configs'
LEAVES = sorted(
    p.relative_to(ROOT).as_posix() for p in CONFIGS.rglob('*.py') if not {'_base_', 'demo'} & set(p.parts))
METAFILES = sorted(CONFIGS.glob('*/metafile.yml'))
ENTRIES = [entry for path in METAFILES for entry in yaml.safe_load(path.read_text())['Models']]


def entry_of(leaf: str) -> dict:
    (entry, ) = [entry for entry in ENTRIES if entry['Config'] == leaf]
    return entry


def test_every_config_has_one_entry_in_its_folders_metafile():
    assert sorted(entry['Config'] for entry in ENTRIES) == LEAVES
    for path in METAFILES:
        for entry in yaml.safe_load(path.read_text())['Models']:
            folder, name = Path(entry['Config']).parent, Path(entry['Config']).stem
            assert ROOT / folder == path.parent
            assert entry['Name'] == f'{folder.name}_{name}'
            assert entry['In Collection'] == 'BEiT'


def test_no_two_configs_write_to_one_folder():
    folders = [Config.fromfile(ROOT / leaf).get('work_dir', f'work_dirs/{Path(leaf).stem}') for leaf in LEAVES]
    assert len(set(folders)) == len(folders)


def test_every_process_draws_its_own_noise_in_every_recipe():
    for leaf in LEAVES:
        hooks = [hook.type for hook in Config.fromfile(ROOT / leaf).custom_hooks]
        assert 'beit_mm.RankSeedHook' in hooks, leaf


@pytest.mark.parametrize('path', sorted((CONFIGS / 'demo').glob('*.py')), ids=lambda path: path.stem)
def test_schedules_of_the_demo_end_where_training_ends(path):
    cfg = Config.fromfile(path)
    length = cfg.train_cfg.get('max_epochs') or cfg.train_cfg.max_iters
    last = cfg.param_scheduler[-1]
    assert last.end == length + (last.type == 'PolyLR')  # which arrives one step before its `end`
    assert last.get('T_max', length - last.begin) == length - last.begin


@pytest.mark.parametrize('leaf', LEAVES)
def test_metadata_are_those_of_the_config(leaf):
    cfg, metadata = Config.fromfile(ROOT / leaf), entry_of(leaf)['Metadata']
    init_default_scope(cfg.default_scope)  # as a runner does
    cfg.model.pop('target_generator', None)  # a fixed part of the task, not of the model
    with torch.device('meta'):
        model = MODELS.build(cfg.model)
    assert metadata['Parameters'] == sum(p.numel() for p in model.parameters())
    if 'max_epochs' in cfg.train_cfg:
        assert metadata['Epochs'] == cfg.train_cfg.max_epochs
    else:
        assert metadata['Iterations'] == cfg.train_cfg.max_iters
    assert metadata['Batch Size'] == cfg.auto_scale_lr.base_batch_size
    folder = cfg.train_dataloader.dataset.data_root
    names = {'imagenet': 'ImageNet-1K', 'imagenet22k': 'ImageNet-22K', 'cifar100': 'CIFAR-100', 'ade20k': 'ADE20K'}
    assert metadata['Training Data'] == names[folder.removeprefix('data/').removesuffix('/train')]
    backbone = cfg.model.get('module', cfg.model).get('backbone')  # of what is tested at all scales, too
    if backbone:
        words = metadata['Architecture']
        assert f"ViT-{backbone.arch.capitalize()}, " in words
        assert ('absolute position embedding' in words) == backbone.get('abs_pos_embed', True)
        assert ('shared relative position bias' in words) == (backbone.get('rel_pos_bias') == 'shared')
        assert ('bias in every block' in words) == (backbone.get('rel_pos_bias') == 'per_layer')
        assert ('LayerScale' in words) == (backbone.get('layer_scale_init') is not None)


@pytest.mark.parametrize('leaf', LEAVES)
def test_published_figures_are_those_of_the_configs_header(leaf):
    """Both were typed from the papers' tables; the header rounds some of them."""
    header = ast.get_docstring(ast.parse((ROOT / leaf).read_text()))
    result = re.search(r'^Result:(.*?)^(?:Shorter|Differs):', header, re.M | re.S)[1].split('(baseline')[0]
    figures = re.findall(r'(?<![\d.])\d+\.\d+(?![\d.])', result)
    assert figures or result.strip().startswith("none of BEiT's own")
    published = [row['Value'] for row in entry_of(leaf)['Published Results']]
    for figure in figures:
        digits = len(figure.split('.')[1])
        assert figure in [f'{value:.{digits}f}' for value in published]


@pytest.mark.parametrize('entry', ENTRIES, ids=lambda entry: entry['Name'])
def test_what_others_measured_is_marked_as_theirs(entry):
    assert set(entry) <= {'Name', 'In Collection', 'Config', 'Metadata', 'Published Results', 'Released Weights'}
    for row in entry['Published Results']:
        assert list(row) == ['Task', 'Value', 'Source']
        assert row['Source'].startswith(('paper, ', 'microsoft/unilm', 'mmpretrain', 'mmsegmentation', 'log of a user'))
        assert isinstance(row['Value'], float) and 0 < row['Value'] < 100
    rows = [tuple(row.values()) for row in entry['Published Results']]
    assert len(set(rows)) == len(rows)
    for weights in entry.get('Released Weights', ()):
        assert list(weights) == ['URL', 'Holds', 'Fits', 'Source']
        assert re.fullmatch(r'https://\S+\.(pth|pkl)', weights['URL'])
    urls = [weights['URL'] for weights in entry.get('Released Weights', ())]
    assert len(set(urls)) == len(urls)


def test_model_index_is_read_without_an_error():
    load = pytest.importorskip('modelindex.load_model_index').load
    index = load(str(ROOT / 'model-index.yml'))
    assert not index.check(silent=True)
    assert sorted(model.name for model in index.models) == sorted(entry['Name'] for entry in ENTRIES)
    assert all(model.results is None and model.weights is None for model in index.models)


def test_mim_makes_its_table_of_it():
    load = pytest.importorskip('modelindex.load_model_index').load
    search = pytest.importorskip('mim.commands.search')
    table = search.convert2df(load(str(ROOT / 'model-index.yml')))
    assert table.loc['beit_pretrain_800e', 'parameters'] == 92_089_856
    assert list(search.filter_by_conditions(table, 'epochs>500').index) == [
        'beit_pretrain_800e', 'beit_pretrain_large_800e']
    assert not [column for column in table.columns if '/' in column]  # where mim shows measured results
