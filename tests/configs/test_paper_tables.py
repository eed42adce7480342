"""configs/paper_tables.yml: the paper's numbers are the paper's, and each row has its config, or the reason why not.

The tables below were typed from the paper, apart from the file.
"""

import copy
import fnmatch
import importlib.util
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import yaml
from helpers import ROOT, list_configs, load_config
from mmengine.config import Config
from mmengine.registry import init_default_scope

from beit_mm.registry import MODELS

# Table -> its figures from left to right and top to bottom; a dash where the paper has one
PAPER = {
    'cls': '77.9 76.5 81.8 83.1 84.0 85.2 66.5 79.9 83.2 84.1 82.8 83.2 84.6 85.2 86.3',
    'seg': '45.3 44.1 45.6 47.7',
    'ablation': '82.86 44.65 82.77 42.93 81.04 41.38 80.50 37.09 82.59 40.93 81.67 36.73 83.19 45.58',
    'arch_variants': '82.86 44.86 83.00 45.43 83.22 45.70',
    'supervised_cls': '84.0 - 85.2 85.30 85.1 - 84.2 - 87.1 87.76 88.0 88.55 86.6 - 88.5 - 86.8 - 88.4 88.6 89.3 89.5',
    'supervised_seg': '50.0 51.7 52.1 53.5 53.6 54.2 56.7 57.0 57.9 58.4',
    'tokenizer': '0.0856 82.86 0.0880 82.70',
    'linear_probe': '78.2 76.7 77.6 65.2 68.7 72.0 56.7 73.5',
    'multitask_dino': '82.8 44.08 - 82.9 44.65 4.2x 82.9 46.85 1.0x',
    'cifar100': '48.5 87.1 90.8 91.7 87.1 90.1 91.8',
    'convergence': '- -',  # a picture
}
QUOTED = {'ablation/scratch_in1k_300e.py'}  # trains what the paper quotes from another one
DATA = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())
ROWS = [(name, table, row) for name, table in DATA['tables'].items() for row in table['rows']]


@pytest.fixture(scope='module')
def tool() -> ModuleType:
    """tools/reproduce_table.py, with its folder on the path as when it is run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / 'tools')
        before = set(sys.modules)
        spec = importlib.util.spec_from_file_location('reproduce_table', ROOT / 'tools/reproduce_table.py')
        module = sys.modules['reproduce_table'] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
        for name in set(sys.modules) - before & {'_cli', '_steps', 'update_configs', 'reproduce_table'}:
            del sys.modules[name]


def linked() -> Iterator[tuple[dict, str, str]]:
    """Row, column and config."""
    for _, _, row in ROWS:
        for column, config in row.get('configs', {}).items():
            yield row, column, config


def test_the_numbers_are_the_papers(tool):
    assert tuple(DATA['tables']) == tool.TABLES
    found = {
        name: ' '.join(row.get('paper', {}).get(key, '-') for row in table['rows'] for key in table['columns'])
        for name, table in DATA['tables'].items()
    }
    assert found == PAPER


def test_a_row_has_what_it_needs():
    for name, table, row in ROWS:
        where = f'{name}: {row["name"]}'
        assert set(row) <= {'name', 'paper', 'configs', 'weights', 'demo', 'demo_stages', 'why'}, where
        assert set(row.get('paper', {})) | set(row.get('configs', {})) <= set(table['columns']), where
        assert all(isinstance(value, str) for value in row.get('paper', {}).values()), where  # as printed
        missing = [
            column
            for column in row.get('paper', {})
            if 'metric' in table['columns'][column] and column not in row.get('configs', {})
        ]
        assert bool(missing) == ('why' in row), where
    assert len({(name, row['name']) for name, _, row in ROWS}) == len(ROWS)


def test_numbers_are_those_of_the_configs():
    """Each number is published for its config, and each that the paper publishes for a config is in some table."""
    published = {}
    for path in (ROOT / 'configs').glob('*/metafile.yml'):
        for entry in yaml.load(path.read_text(), yaml.BaseLoader)['Models']:
            values = [row['Value'] for row in entry['Published Results'] if row['Source'].startswith('paper')]
            published[entry['Config'].removeprefix('configs/')] = values
    seen = {number for _, _, row in ROWS for number in row.get('paper', {}).values()}
    for row, column, config in linked():
        number = row.get('paper', {}).get(column)
        if number is None or config in QUOTED:
            continue
        digits = len(number.partition('.')[2])
        rounded = [f'{float(value):.{digits}f}' for value in published[config]]
        assert number in rounded, f'{config}: {number} is not one of {published[config]}'
    results = ('finetune', 'linear_probe', 'setr_pup', 'upernet')
    for config, values in published.items():
        if config.split('/')[1].startswith(results) and not config.endswith('_ms.py'):
            assert set(values) <= seen, config


def test_every_config_belongs_to_a_row_or_is_said_to_be_extra(tool, monkeypatch):
    import update_configs

    monkeypatch.setattr(update_configs, 'load', lambda config: load_config(config.removeprefix('configs/')))
    found = set()
    for _, _, config in linked():
        chain = f'configs/{config}'
        while chain:
            assert (ROOT / chain).is_file(), chain
            found.add(chain.removeprefix('configs/'))
            chain = update_configs.previous(chain)
    extra = {name for name in list_configs() for pattern in DATA['extra'] if fnmatch.fnmatch(name, pattern)}
    assert not found & extra
    left = {name for name in list_configs() if not name.endswith('_ms.py')} - found - extra
    assert not left, 'neither linked nor extra'
    # Patterns are for folders of other papers.
    assert all('*' in pattern or (ROOT / 'configs' / pattern).is_file() for pattern in DATA['extra'])


def test_recipes_are_used_and_known():
    stages, recipes = DATA['demo']['stages'], DATA['demo']['recipes']
    used = {row['demo'] for _, _, row in ROWS if 'demo' in row}
    used |= {recipe.get('base', 'baseline') for recipe in recipes.values()}
    assert used == set(recipes)
    for recipe in recipes.values():
        assert set(recipe) <= set(stages) | {'base'}
    for table in DATA['tables'].values():
        assert all('metric' in stages[stage] for stage in table.get('demo', ()))
    for settings in [*stages.values(), *(change for recipe in recipes.values() for change in recipe.values())]:
        if isinstance(settings, dict):
            assert set(settings) <= {
                *('config', 'work_dir', 'length', 'from', 'options', 'changes', 'labels', 'seeds', 'validate'),
                *('metric', 'title', 'seconds'),
            }


def merged(tool: ModuleType, recipe: str, stage: str) -> Config:
    """The config of a stage with the options of its command."""
    from _cli import parse_options

    plan = tool.DemoPlan(DATA['demo'], tool.Path('runs'), 1, [])
    plan.config = load_config
    step = plan.train(recipe, stage, 0)
    cfg = copy.deepcopy(plan.config(plan.settings(recipe, stage)['config']))
    cfg.merge_from_dict(parse_options(step.command[step.command.index('--cfg-options') + 1 :]))
    return cfg


@pytest.mark.parametrize('recipe', DATA['demo']['recipes'])
def test_every_stage_that_a_recipe_changes_is_a_config_that_builds(tool, recipe):
    """With schedules that end where the training ends."""
    stages = DATA['demo']['stages'] if recipe == 'baseline' else set(DATA['demo']['recipes'][recipe]) - {'base'}
    for stage in stages:
        cfg = merged(tool, recipe, stage)
        length = cfg.train_cfg.get('max_epochs') or cfg.train_cfg.max_iters
        last = cfg.param_scheduler[-1]
        late = last.type == 'PolyLR'  # which arrives one step before its end
        assert last.end == length + late
        for scheduler in cfg.param_scheduler:
            if scheduler.type == 'LinearLR' and not late:
                assert scheduler.end == last.begin
            if 'T_max' in scheduler:
                assert scheduler.begin + scheduler.T_max == scheduler.end == length
        init_default_scope(cfg.default_scope)
        model = cfg.model.to_dict()
        if 'backbone' in model:
            model['backbone']['init_cfg'] = None
        if model.get('target_generator'):
            model['target_generator']['checkpoint'] = None
        with torch.device('meta'):
            MODELS.build(Config(model))


def test_options_name_what_the_configs_have():
    def settings() -> Iterator[tuple[str, str]]:
        stages = DATA['demo']['stages']
        for setting in stages.values():
            yield from ((setting['config'], option) for option in setting.get('options', ()))
            yield from ((setting['config'], f'{key}=') for key in setting.get('from', {}).values())
        for recipe in DATA['demo']['recipes'].values():
            for stage, change in recipe.items():
                if stage != 'base':
                    config = change.get('config', stages[stage]['config'])
                    yield from ((config, option) for option in change.get('options', ()))

    # With defaults that the configs leave out
    new = (
        'model.recover',
        'model.backbone.init_cfg.prefix',
        'model.backbone.layer_scale_init',
        'model.backbone.abs_pos_embed',
        'model.backbone.rel_pos',
    )
    for config, option in settings():
        key = option.partition('=')[0]
        value = load_config(config)
        for part in () if key.startswith(new) else key.split('.'):
            assert isinstance(value, list) or part in value, f'{config}: {key}'
            value = value[int(part) if isinstance(value, list) else part]


@pytest.mark.parametrize(
    'recipe, full',
    [
        ('baseline', 'beit/pretrain_300e.py'),
        ('longer', 'beit/pretrain_800e.py'),
        ('layer_scale_rel_pos', 'beit_plus/pretrain_300e.py'),
        ('layer_scale', 'ablation/pretrain_layer_scale_300e.py'),
        *(
            (name, f'ablation/pretrain_{name}_300e.py')
            for name in ('random_mask', 'pixels', 'pixels_random_mask', 'recover_all', 'no_mask_recover_all')
        ),
    ],
)
def test_a_recipe_differs_from_the_baseline_as_the_full_config_does(tool, recipe, full):
    def traits(cfg: Config) -> dict:
        model, pipeline = cfg.model, cfg.train_dataloader.dataset.pipeline
        views = next(transform for transform in pipeline if transform['type'] == 'beit_mm.TwoViewRandomResizedCrop')
        return dict(
            transforms=[transform['type'] for transform in pipeline],
            tokenizer_view=views['second_size'] is not None,
            tokenizer=model.target_generator is not None,
            head=model.head.type,
            recover=model.get('recover', 'masked'),
            mask_token=model.backbone.masked_input,
            layer_scale=model.backbone.get('layer_scale_init'),
            abs_pos_embed=model.backbone.get('abs_pos_embed', True),
            rel_pos_bias=model.backbone.get('rel_pos_bias'),
        )

    demo, cfg = merged(tool, recipe, 'pretrain'), load_config(full)
    assert traits(demo) == traits(cfg)
    masks = [t for t in demo.train_dataloader.dataset.pipeline if t['type'].endswith('Mask')]
    baseline = merged(tool, 'baseline', 'pretrain').train_dataloader.dataset.pipeline[3]
    assert all((*m['grid'], m['num_masked']) == (*baseline['grid'], baseline['num_masked']) for m in masks)
    steps = demo.train_cfg.max_iters / merged(tool, 'baseline', 'pretrain').train_cfg.max_iters
    assert steps == pytest.approx(cfg.train_cfg.max_epochs / 300, rel=0.01)
