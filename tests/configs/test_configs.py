"""Every config is put together alike, builds what it names, and stands beside the papers' figures or says why not."""

import copy
import fnmatch
import re
import runpy
from contextlib import nullcontext
from itertools import chain
from pathlib import Path

import pytest
import torch
import yaml
from facts import FROM_PAPER, start_of
from helpers import ROOT, build_on_meta, check_all, header_of, list_configs, load_config, model_on_meta, with_options
from mmengine.config import Config
from mmengine.registry import init_default_scope

from beit_mm.checkpoint.find import list_models
from beit_mm.registry import HOOKS, METRICS, TRANSFORMS

LEAVES, ALL = list_configs(), list_configs(demo=True)
TABLES = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())


def test_no_two_configs_share_a_work_dir():
    folders = [load_config(name).get('work_dir', f'work_dirs/{Path(name).stem}') for name in ALL]
    assert len(set(folders)) == len(folders)


def build(cfg: Config) -> None:
    model_on_meta(cfg)  # each distinct one once
    init_default_scope(cfg.default_scope)
    for loader in filter(None, (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader)):
        for transform in loader.dataset.pipeline:
            TRANSFORMS.build(transform)
    for hook in (*cfg.custom_hooks, *filter(None, [cfg.default_hooks.get('ema')])):
        HOOKS.build(hook)
    if cfg.val_evaluator:  # ImageNet-22K has no validation images
        METRICS.build(cfg.val_evaluator)


@pytest.mark.long
def test_models_pipelines_and_the_options_of_headers_build():
    def check(name: str) -> None:
        behind = re.findall(r'--cfg-options((?:\s+[\w.]+=[^\s,;)]+)+)', header_of(name))
        for options in ['', *behind]:
            build(cfg := with_options(name, options.split()))
            loop, last = cfg.train_cfg, cfg.param_scheduler[-1]
            if name.startswith('demo/') or ' train_cfg.' in options:  # PolyLR arrives one step before its `end`
                assert last.end == (loop.get('max_epochs') or loop.max_iters + (last.type == 'PolyLR'))

    check_all(ALL, check)


def test_the_lowest_rate_of_each_schedule_is_a_share_of_its_rate():
    """With a smaller batch and --auto-scale-lr it falls with it."""

    def check(name: str) -> None:
        for scheduler in load_config(name).param_scheduler:
            if scheduler.type.endswith('LR'):
                assert not scheduler.get('eta_min') and 0 <= scheduler.get('eta_min_ratio', 0) < 0.1

    check_all(ALL, check)


@pytest.mark.slow
def test_every_trained_parameter_gets_a_gradient(monkeypatch):
    """DistributedDataParallel waits for the gradient of each, and is not asked to look for unused ones."""
    views = runpy.run_path(str(ROOT / 'tools/dev/flops.py'))['views']
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kwargs: nullcontext())  # knows no meta device
    shown = set()

    def check(name: str) -> None:
        cfg, model = load_config(name), build_on_meta(name)
        if 'large' in name or hasattr(model, 'stride') or id(model) in shown:
            return
        shown.add(id(model))
        model = copy.deepcopy(model).train()  # other tests share the model
        with torch.device('meta'):
            images = torch.zeros(2, 3, 224, 224)
            if hasattr(model, 'decode_head'):
                heads = [child for part, child in model.named_children() if part.endswith('_head')]  # one or several
                features = model.extract_feat(images)
                found = [head(features) for entry in heads for head in (entry if hasattr(entry, 'append') else [entry])]
            elif hasattr(model, 'target_generator'):
                losses = model(views(model, cfg, images[:1]), mode='loss')
                found = [value for part, value in losses.items() if 'loss' in part]
            else:
                found = model(images)
            sum(value.sum() for value in found).backward()
        assert not [part for part, value in model.named_parameters() if value.requires_grad and value.grad is None]
        assert not cfg.model_wrapper_cfg.get('find_unused_parameters')

    check_all(LEAVES, check)
    assert len(shown) > 10


def test_tables_hold_what_the_paper_prints_and_a_config_or_a_reason_for_each_row():
    used = set(TABLES['others'])
    for name, table in TABLES['tables'].items():
        found = ' '.join(row.get('paper', {}).get(key, '-') for row in table['rows'] for key in table['columns'])
        assert found == FROM_PAPER[name], name
        for row in table['rows']:
            configs, start = row.get('configs', {}), row.get('start', {})
            assert set(row) <= {*'name paper configs start options weights quoted demo demo_stages why'.split()}, name
            measured = {column for column in row.get('paper', {}) if 'metric' in table['columns'][column]}
            assert bool(measured - set(configs)) == ('why' in row) and set(start) <= set(configs), row['name']
            used |= {*configs.values(), *(value for value in start.values() if '://' not in value)}
    while more := {*filter(None, map(start_of, used))} - used:
        used |= more
    extra = {name for pattern in TABLES['extra'] for name in fnmatch.filter(LEAVES, pattern)}
    assert used | extra == set(LEAVES)


def test_mim_makes_its_table_of_the_model_index():
    index = pytest.importorskip('modelindex.load_model_index').load(str(ROOT / 'model-index.yml'))
    assert not index.check(silent=True) and len(index.models) == len(LEAVES)
    assert all(model.results is None and model.weights is None for model in index.models)  # none are ours
    table = pytest.importorskip('mim.commands.search').convert2df(index)
    assert table.loc['beit_pretrain_800e', 'parameters'] == 92_089_856


def test_released_files_stand_with_the_configs_that_their_names_describe():
    says = re.compile(r'beit(v2)?_(\w+)_patch16_(\d+)_pt(1k|22k)(?:_(\d+)ep?)?(?:_ft(\d+k)?(to)?(1k|ade20k)?)?\.pth')
    entries = chain(*(yaml.safe_load(path.read_text())['Models'] for path in ROOT.glob('configs/*/metafile.yml')))
    released = {
        weights['URL'].rsplit('/', 1)[1]: entry['Config'].removeprefix('configs/')
        for entry in entries
        for weights in entry.get('Released Weights', ())
        if weights['Fits'] == 'this config' and weights['Source'] == 'microsoft/unilm'
    }

    def check(file: str) -> None:
        name = first = released[file]
        v2, arch, side, data, epochs, between, after, end = says.fullmatch(file).groups()
        backbone = load_config(name).model.backbone
        assert (name.startswith('beit_v2/'), backbone.arch) == (bool(v2), arch)
        task = 'upernet' if end == 'ade20k' else 'finetune' if between or end else 'pretrain'
        assert task in name and ('after_in22k' in name) == bool(after)
        if not (v2 and task == 'upernet'):  # named by the pixels of the training before
            assert backbone.get('img_size', 224) == int(side)
        while before := start_of(first):
            first = before
        assert ('in22k' in first) == (data == '22k')
        assert load_config(first).train_cfg.max_epochs == int(epochs or (1600 if v2 else 150))

    check_all(released, check)
    assert len(released) > 20


def test_headers_start_from_released_weights_by_names_that_commands_take():
    named = [re.findall(r'init_cfg\.checkpoint=(beit\S+)', header_of(name)) for name in LEAVES]
    assert len([*chain(*named)]) > 40 and not {*chain(*named)} - {*list_models()}
