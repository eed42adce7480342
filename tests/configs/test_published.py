"""What is published: the model index and configs/paper_tables.yml hold the papers' figures, each with its config or the
reason why not, and claim none as ours; every released file has a command, and loads whatever its names are."""

import fnmatch
import re
from collections.abc import Iterator

import pytest
import torch
import yaml
from facts import FROM_OTHERS, FROM_PAPER, OF_PRETRAINING, predecessors
from helpers import ROOT, list_configs, load_config
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.runner import load_checkpoint

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.registry import MODELS

ENTRIES = {
    entry['Config'].removeprefix('configs/'): entry
    for path in sorted((ROOT / 'configs').glob('*/metafile.yml'))
    for entry in yaml.load(path.read_text(), yaml.BaseLoader)['Models']
}
TABLES = yaml.safe_load((ROOT / 'configs/paper_tables.yml').read_text())
ROWS = [(name, table, row) for name, table in TABLES['tables'].items() for row in table['rows']]
PAGE = (ROOT / 'docs/released.md').read_text()
FROM_PRIVATE_DATA = ['89.3', '89.5', '57.9', '58.4']  # named, without a file
FILES = {  # name of the file -> config and what its source says of it
    weights['URL'].rsplit('/', 1)[1]: (config, weights)
    for config, entry in ENTRIES.items()
    for weights in entry.get('Released Weights', ())
}
CHECKPOINTS = {
    file: (config, weights)
    for file, (config, weights) in FILES.items()
    if not config.startswith('dvae/') and not weights['Fits'].startswith('target_generator')
}


def figures(config: str, of_paper: bool) -> list[str]:
    rows = ENTRIES[config]['Published Results']
    return [row['Value'] for row in rows if row['Source'].startswith('paper, ') == of_paper]


def test_every_config_has_one_entry_that_says_whose_its_figures_are():
    assert list(ENTRIES) == list_configs()
    known = {'Name', 'In Collection', 'Config', 'Metadata', 'Published Results', 'Released Weights'}
    sources = ('paper, ', 'microsoft/unilm', 'mmpretrain', 'mmsegmentation', "the authors' log")
    for config, entry in ENTRIES.items():
        rows = entry['Published Results']
        assert set(entry) <= known and len({tuple(row.values()) for row in rows}) == len(rows), config
        assert all(list(row) == ['Task', 'Value', 'Source'] for row in rows), config
        assert all(row['Source'].startswith(sources) for row in rows), config


def test_tables_hold_the_papers_figures():
    found = {
        name: ' '.join(row.get('paper', {}).get(key, '-') for row in table['rows'] for key in table['columns'])
        for name, table in TABLES['tables'].items()
    }
    assert found == FROM_PAPER


def linked() -> Iterator[tuple[str, str | None, str | None]]:
    """Config, the figure of the paper that it makes, and the weights it starts from where not its own."""
    for _, _, row in ROWS:
        for column, config in row.get('configs', {}).items():
            yield config, row.get('paper', {}).get(column), row.get('start', {}).get(column)


def test_figures_of_the_paper_are_those_of_their_configs():
    seen = {number for _, _, row in ROWS for number in row.get('paper', {}).values()}
    for config, number, start in linked():
        if number and not start and config != 'ablation/scratch_in1k_300e.py':  # the paper quotes another one's
            digits = len(number.partition('.')[2])
            assert number in [f'{float(value):.{digits}f}' for value in figures(config, of_paper=True)], config
    for config in ENTRIES:
        assert {*figures(config, of_paper=True)} <= seen | {'4.2'}, config


def test_figures_of_others_are_those_that_they_print():
    expected = {f'{config}.py': values for config, *values in map(str.split, FROM_OTHERS.strip().splitlines())}
    of_results = [config for config in ENTRIES if not re.search('/pretrain_|_in22k_90e', config)]
    assert {config: found for config in of_results if (found := figures(config, of_paper=False))} == expected


def test_figures_of_a_pretraining_are_those_of_what_starts_from_it():
    starts = predecessors(list_configs())
    for config in ENTRIES:
        if re.search('/pretrain_|_in22k_90e', config):
            found, behind = {row['Value'] for row in ENTRIES[config]['Published Results']}, {config}
            for _ in range(3):
                behind |= {later for later, start in starts.items() if start in behind}
            reached = {row['Value'] for later in behind - {config} for row in ENTRIES[later]['Published Results']}
            reached |= {number for _, number, start in linked() if start == config}
            assert found <= reached | OF_PRETRAINING.get(config, set()), config


def test_a_row_has_a_config_for_each_figure_or_the_reason_why_not():
    for name, table, row in ROWS:
        where = f'{name}: {row["name"]}'
        assert set(row) <= {'name', 'paper', 'configs', 'weights', 'demo', 'demo_stages', 'why', 'start', 'options'}, (
            where
        )
        assert set(row.get('paper', {})) | set(row.get('configs', {})) <= set(table['columns']), where
        measured = {column for column in row.get('paper', {}) if 'metric' in table['columns'][column]}
        assert bool(measured - set(row.get('configs', {}))) == ('why' in row), where


def test_every_config_belongs_to_a_row_or_is_said_to_be_extra():
    starts, found = predecessors(list_configs()), set()
    for config, _, start in linked():
        for name in (config, start):
            while name in ENTRIES and name not in found:
                found.add(name)
                name = starts.get(name)
    extra = {name for pattern in TABLES['extra'] for name in fnmatch.filter(ENTRIES, pattern)}
    assert found | extra == set(ENTRIES)
    assert not found & extra


def test_model_index_is_read_without_an_error_and_mim_makes_its_table_of_it():
    load = pytest.importorskip('modelindex.load_model_index').load
    index = load(str(ROOT / 'model-index.yml'))
    assert not index.check(silent=True)
    assert sorted(model.name for model in index.models) == sorted(entry['Name'] for entry in ENTRIES.values())
    assert all(model.results is None and model.weights is None for model in index.models)
    search = pytest.importorskip('mim.commands.search')
    table = search.convert2df(index)
    assert table.loc['beit_pretrain_800e', 'parameters'] == 92_089_856
    longest = list(search.filter_by_conditions(table, 'epochs>500').index)
    assert len(longest) == 4 and {name.rsplit('_', 1)[1] for name in longest} == {'800e', '1600e'}
    assert not [column for column in table.columns if '/' in column]  # where mim shows measured results


def test_every_file_of_the_released_code_stands_once():
    sizes, addresses = ('base', 'large'), {weights['URL'] for _, weights in FILES.values()}
    stated = [weights for entry in ENTRIES.values() for weights in entry.get('Released Weights', ())]
    assert len(stated) == len(addresses) and all(re.fullmatch(r'https://\S+\.(pth|pkl)', url) for url in addresses)
    tokenizer = 'vqkd_encoder_base_decoder_'
    assert {name for name, (_, weights) in FILES.items() if weights['Source'] == 'microsoft/unilm'} == {
        'beit_base_patch16_224_pt1k_800ep.pth',
        'beit_large_patch16_512_pt22k_ft22kto1k.pth',
        *(f'beit_{size}_patch16_384_pt22k_ft22kto1k.pth' for size in sizes),
        *(f'beit_{size}_patch16_640_pt22k_ft22ktoade20k.pth' for size in sizes),
        *(f'beit_{size}_patch16_224_pt22k{s}.pth' for size in sizes for s in ('', '_ft22k', '_ft1k', '_ft22kto1k')),
        *(f'beitv2_{size}_patch16_224_pt1k{s}.pth' for size in sizes for s in ('', '_300e', '_ft1k', '_300e_ft1k')),
        *(f'beitv2_{size}_patch16_224_pt1k_ft21k{s}.pth' for size in sizes for s in ('', 'to1k', 'toade20k')),
        *(f'beitv2_{size}_patch16_224_pt1k_ftade20k.pth' for size in sizes),
        *(
            f'{tokenizer}{s}.pth'
            for s in ('3x768x12_clip-d5036aa7', '1x768x12_clip-d93179da', '1x768x12_dino-663c55d7')
        ),
    }


def test_every_released_file_has_its_command():
    untested = re.compile(r'beit_\w+_pt22k_ft22k\.pth|beitv2_\w+_ft21k\.pth')  # no held-out images
    for file, (config, weights) in CHECKPOINTS.items():
        (block,) = re.findall(rf'^# {re.escape(file)}: .*\n(?:.+\n)+', PAGE, re.M)
        commands = re.findall(r'^python tools/test.py (\S+) (\S+)(.*)$', block, re.M)
        assert {command[:2] for command in commands} <= {(f'configs/{config}', weights['URL'])}, file
        assert (not commands) == bool(untested.fullmatch(file)), file
        if 'mIoU' in block and 'upernet' in config:
            assert ['--tta' in options for *_, options in commands] == [False, True][: len(commands)]
            assert all('model.test_cfg.precision=float32' in options for *_, options in commands)
    assert re.findall(r'\| (\d\d\.\d) (?:top-1|mIoU) \|', PAGE) == FROM_PRIVATE_DATA


# tests/models/test_beit_v2.py has the files of its pretraining
@pytest.mark.parametrize(
    'file', [file for file, (config, _) in CHECKPOINTS.items() if not config.startswith('beit_v2/pre')]
)
def test_names_of_a_released_file_load_strictly_into_its_config(file, tmp_path):
    """The model of the command, narrow, from a file with the names of its source."""
    config, weights = CHECKPOINTS[file]
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
