"""Every config is put together alike, builds, and makes a published figure or says why not."""

import ast
import fnmatch
import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import yaml
from facts import FROM_OTHERS, FROM_PAPER, start_of
from helpers import ROOT, build_on_meta, check_all, header_of, list_configs, load_config, model_on_meta, with_options
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import load_checkpoint

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.registry import HOOKS, METRICS, MODELS, TRANSFORMS

LEAVES, ALL = list_configs(), list_configs(demo=True)
TABLES = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())
ROWS = [(name, table, row) for name, table in TABLES['tables'].items() for row in table['rows']]
RELEASED = {  # name of the file -> config and what its source says of it
    weights['URL'].rsplit('/', 1)[1]: (entry['Config'].removeprefix('configs/'), weights)
    for path in sorted((ROOT / 'configs').glob('*/metafile.yml'))
    for entry in yaml.safe_load(path.read_text())['Models']
    for weights in entry.get('Released Weights', ())
    if weights['Fits'].startswith(('this config', 'the backbone'))
}
SECTIONS = ['Result', 'Model', 'Command', 'Then', 'Test', 'Batch', 'Steps', 'Data', 'Cost', 'Differs']


def bases_of(path: Path) -> list[Path]:
    """What a config names in `_base_`."""
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and statement.targets[0].id == '_base_':
            names = ast.literal_eval(statement.value)
            return [(path.parent / name).resolve() for name in ([names] if isinstance(names, str) else names)]
    return []


def test_a_leaf_stands_on_at_most_four_bases_two_deep_and_changes_nothing_by_position():
    def check(name: str) -> None:
        direct = bases_of(ROOT / 'configs' / name)
        second = [base for path in direct for base in bases_of(path)]
        behind = {*direct, *second}
        assert 1 <= len(behind) <= 4 and {path.parts[-3] for path in behind} <= {'_base_', 'configs'}, behind
        assert not any(bases_of(base) for base in second)
        _, header, code = (ROOT / 'configs' / name).read_text().split('"""', 2)
        assert not re.search(r'(pipeline|scheduler|hooks)\)?\[[-:\d]', code)
        for path in re.findall(
            r'(?<![\w/])((?:\.\./)?(?:[a-z_]+/)?(?:pretrain|finetune|setr|upernet(?!_beit))\w*\.py)', header
        ):
            assert (ROOT / 'configs' / name).parent.joinpath(path).exists() or (ROOT / 'configs' / path).exists(), path
        if name in LEAVES:
            keys = re.findall(r'^(\w+): ', header, re.M)
            assert [key for key in keys if key in SECTIONS] == [key for key in SECTIONS if key in keys]
            assert {*SECTIONS} - {*keys} <= {'Then', 'Test', 'Cost'} and len(header.splitlines()[0]) > 20

    check_all(ALL, check)
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


def options_in(text: str) -> list[list[str]]:
    """What stands behind each --cfg-options, continued on the lines below it."""
    return [match.split() for match in re.findall(r'--cfg-options((?:\s+[\w.]+=[^\s,;)]+)+)', text)]


def test_models_pipelines_and_the_options_of_headers_build():
    def check(name: str) -> None:
        for options in [[], *options_in(header_of(name))]:
            build(cfg := with_options(name, options))
            loop, last = cfg.train_cfg, cfg.param_scheduler[-1]
            if name.startswith('demo/') or any(option.startswith('train_cfg.') for option in options):
                # PolyLR arrives one step before its `end`
                assert last.end == (loop.get('max_epochs') or loop.max_iters + (last.type == 'PolyLR'))

    check_all(ALL, check)


def documented_options() -> Iterator[tuple[str, str]]:
    """A config that each row of docs/options.md is meant for, and the row's options."""
    of_key = {
        'model.layers': 'beit/linear_probe_in1k_50e.py',
        'model.test_cfg': 'beit/setr_pup_512_ade20k_160k.py',
        'model.': 'beit/finetune_in1k_100e.py',
    }
    for row in re.findall(r'^\| .* \| `(\w+\..*)`.*\|$', (ROOT / 'docs/options.md').read_text(), re.M):
        yield next((of_key[key] for key in of_key if row.startswith(key)), 'beit/pretrain_300e.py'), row


def test_documented_options_build():
    rows = list(documented_options())
    assert len(rows) > 10
    for name, row in rows:
        for options in map(str.split, re.split('`, `', row)):
            build(with_options(name, [re.sub(r'[`(].*', '', option) for option in options if '=' in option]))


def losses_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """What depends on all that a model on the meta device trains: its losses, or without labels its logits."""
    images = torch.zeros(2, 3, 224, 224)
    if hasattr(model, 'decode_head'):
        features = model.extract_feat(images)
        auxiliary = getattr(model, 'auxiliary_head', [])  # none, one or several
        heads = auxiliary if isinstance(auxiliary, (list, torch.nn.ModuleList)) else [auxiliary]
        return [head(features).sum() for head in (model.decode_head, *heads)]
    if not hasattr(model, 'target_generator'):
        logits = model(images)
        return [scores.sum() for scores in (logits if isinstance(logits, tuple) else [logits])]
    model.teacher_temperature = 0.04  # as DINOHook does
    second = images if hasattr(model, 'early_layers') else torch.zeros(2, 3, 112, 112)
    inputs = dict(images=images, second_images=images, local_images=torch.zeros(4, 3, 96, 96), tokenizer_images=second)
    mask = None if model.backbone.mask_token is None else torch.zeros(2, 14, 14, dtype=torch.bool)
    inputs |= dict(mask=mask, positions=torch.zeros(2, 75, dtype=torch.int64))
    return [value for name, value in model.loss(inputs).items() if 'loss' in name]


@pytest.mark.slow
def test_every_trained_parameter_gets_a_gradient(monkeypatch):
    """DistributedDataParallel waits for the gradient of each, and is not asked to look for unused ones."""
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kwargs: nullcontext())  # knows no meta device
    shown = set()

    def check(name: str) -> None:
        cfg, model = load_config(name), build_on_meta(name)
        if 'large' in name or cfg.model.type == 'beit_mm.DiscreteVAE' or id(model) in shown:
            return
        shown.add(id(model.train()))
        with torch.device('meta'):
            sum(losses_of(model)).backward()
        assert not [part for part, value in model.named_parameters() if value.requires_grad and value.grad is None]
        assert not cfg.model_wrapper_cfg.get('find_unused_parameters')
        model.zero_grad()

    check_all(LEAVES, check)
    assert len(shown) > 10


def test_tables_hold_what_the_papers_and_the_others_print():
    for name, table in TABLES['tables'].items():
        found = ' '.join(row.get('paper', {}).get(key, '-') for row in table['rows'] for key in table['columns'])
        assert found == FROM_PAPER[name], name
    expected = {f'{config}.py': figures for config, *figures in map(str.split, FROM_OTHERS.strip().splitlines())}
    assert {config: [row['value'] for row in rows] for config, rows in TABLES['others'].items()} == expected


def test_a_row_has_a_config_for_each_figure_or_a_reason_and_every_config_a_row():
    used = set(TABLES['others'])
    for name, table, row in ROWS:
        configs, start = row.get('configs', {}), row.get('start', {})
        assert set(row) <= set('name paper configs start options weights quoted demo demo_stages why'.split()), name
        measured = {column for column in row.get('paper', {}) if 'metric' in table['columns'][column]}
        assert bool(measured - set(configs)) == ('why' in row) and set(start) <= set(configs), row['name']
        used |= {*configs.values(), *(value for value in start.values() if '://' not in value)}
    while more := {*filter(None, map(start_of, used))} - used:
        used |= more
    extra = {name for pattern in TABLES['extra'] for name in fnmatch.filter(LEAVES, pattern)}
    assert used | extra == set(LEAVES)


def test_mim_makes_its_table_of_the_model_index():
    index = pytest.importorskip('modelindex.load_model_index').load(str(ROOT / 'model-index.yml'))
    search = pytest.importorskip('mim.commands.search')
    assert not index.check(silent=True) and len(index.models) == len(LEAVES)
    assert all(model.results is None and model.weights is None for model in index.models)  # none are ours
    table = search.convert2df(index)
    assert table.loc['beit_pretrain_800e', 'parameters'] == 92_089_856
    assert {name[-5:] for name in search.filter_by_conditions(table, 'epochs>500').index} == {'_800e', '1600e'}


# tests/models/test_beit_v2.py has the files of its pretraining
@pytest.mark.parametrize('file', [file for file, (name, _) in RELEASED.items() if not name.startswith('beit_v2/pre')])
def test_names_of_a_released_file_load_strictly_into_its_config(file, tmp_path):
    """The model of the command, narrow, from a file with the names of its source."""
    config, weights = RELEASED[file]
    cfg, depth = load_config(config), 24 if 'large' in config else 12
    source = dict(mmpretrain='mmpretrain', mmsegmentation='mmseg').get(weights['Source'], 'unilm')
    model = cfg.model.to_dict()
    model['backbone'].update(init_cfg=None, arch=dict(embed_dims=16, num_layers=depth, num_heads=2), img_size=64)
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


def test_update_configs_names_what_is_stale_and_follows_a_change(monkeypatch, tmp_path, capsys):
    """tools/run_tests.sh asks it for the repository."""
    monkeypatch.syspath_prepend(ROOT / 'tools/dev')
    for module in ('config_facts', 'update_configs'):
        monkeypatch.delitem(sys.modules, module, raising=False)
    import config_facts
    import update_configs as tool

    shutil.copytree(ROOT / 'configs', tmp_path / 'configs', ignore=shutil.ignore_patterns('__pycache__'))
    for module in (config_facts, tool):
        monkeypatch.setattr(module, 'ROOT', tmp_path)
    for page, update in dict(MAP='file_map', RELEASED='released', PACKAGE_MAP='package_map').items():
        (tmp_path / page).write_text('')
        monkeypatch.setattr(tool, page, page)
        monkeypatch.setattr(tool, f'update_{update}', (tmp_path / page).read_text)
    monkeypatch.setattr(tool, 'FOLDERS', ('configs/dvae',))  # whose models are small
    monkeypatch.setattr(tool, 'list_configs', lambda *_: config_facts.list_configs('configs/dvae'))
    changes = {
        'discrete_vae_8k_in1k.py': ('= 512 images', '= 256 images'),
        'metafile.yml': ('Parameters: 20081411', 'Parameters: 20081412'),
        'README.md': ('50,000 batches', '60,000 batches'),
    }
    texts = {file: (tmp_path / 'configs/dvae' / file).read_text() for file in changes}
    for file, (right, wrong) in changes.items():
        assert right in texts[file]
        (tmp_path / 'configs/dvae' / file).write_text(texts[file].replace(right, wrong, 1))
    assert tool.main(['--check']) == 1
    named = {line.split()[0] for line in capsys.readouterr().out.splitlines() if 'out of date' in line}
    assert named == {f'configs/dvae/{file}' for file in changes}
    assert tool.main([]) == 0
    assert {file: (tmp_path / 'configs/dvae' / file).read_text() for file in changes} == texts

    path = tmp_path / 'configs/beit/pretrain_300e.py'
    text = path.read_text()
    path.write_text(
        f'{text}train_dataloader = dict(batch_size=64)\n'
        'optim_wrapper = dict(accumulative_counts=2, optimizer=dict(lr=2e-3))\n'
    )
    config_facts.load.cache_clear()
    header = tool.update_header('configs/beit/pretrain_300e.py').split('"""')[1]
    assert 'Batch:   16 GPUs x 64, an update every 2 batches = 2048 images, lr 2e-3\n' in header
    assert 'Steps:   300 epochs x 625 = 187,500 updates, 6,250 of them warm-up\n' in header
    flops = 3 * 2 * 17.60e9 + 2 * 24.03e9  # of ViT-B with its head on 75 patches, and once of DALL-E's encoder
    hours = flops * 300 * 625 * 2048 / (0.4 * 312e12) / 3600
    found = re.search(r'Cost:    (\d+) GFLOP an image forward and backward; (\d+) GPU hours', header)
    assert [*map(int, found.groups())] == pytest.approx([flops / 1e9, hours], rel=0.02)
    assert header.split('\n\n')[2] == text.split('"""')[1].split('\n\n')[2]
    path.write_text(f'{text}train_cfg = dict(max_epochs=40)\n')
    config_facts.load.cache_clear()
    with pytest.raises(
        SystemExit, match='upernet_512_ade20k_160k.py starts from work_dirs/pretrain_300e/epoch_300.pth'
    ):
        config_facts.previous('configs/beit/upernet_512_ade20k_160k.py')
