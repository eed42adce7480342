"""The pages of docs/ fit the code and each other."""

import argparse
import ast
import importlib.util
import inspect
import json
import re
import shutil
from pathlib import Path

import pytest
from doc_commands import (
    OPERATORS,
    PAGES,
    Command,
    blocks,
    commands,
    config_of,
    header_commands,
    inline_commands,
    parse_tool,
)
from helpers import ROOT, library_tools, list_configs, run_tool, with_options
from mkdocs.commands import build
from mkdocs.config import load_config
from mmengine.config import Config
from mmengine.registry import Registry

import beit_mm
from beit_mm import registry
from beit_mm.__main__ import parser
from beit_mm.apis.configs import find_config

OTHER_PROGRAMS = ['tensorboard', 'tools/run_tests.sh', '.venv/bin/python', 'sbatch']


def test_messages_of_the_troubleshooting_page_are_printed_by_the_code():
    quoted = re.findall(r'^\| `([^`]+)` \|', (ROOT / 'docs/troubleshooting.md').read_text(), flags=re.M)
    sources = [*(ROOT / 'beit_mm').rglob('*.py'), *(ROOT / 'tools').rglob('*.py'), *(ROOT / 'tools').glob('*.sh')]
    text = ' '.join(file.read_text() for file in sources if '.mim' not in file.parts)
    joined = re.sub(r"['\"]\s+f?['\"]", '', text)  # literals that go on in the next line
    joined = re.sub(r'\$?\{[^{}]*\}|\$\w+', '', joined)  # what is put into them
    own = [message for message in quoted if not message.startswith(('torch.', 'DataLoader'))]
    assert len(own) > 10
    squeezed = ' '.join(joined.split())
    assert not [message for message in own if message not in squeezed]


def test_the_site_builds_and_all_its_links_lead_somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    build.build(load_config(str(ROOT / 'mkdocs.yml'), site_dir=str(tmp_path / 'site'), strict=True))
    start = (tmp_path / 'site/index.html').read_text()
    assert 'href="reliability/"' in start and 'href="docs/' not in start


def test_files_that_the_page_on_the_architecture_names_exist():
    """Relative to the package or the repository; a name by itself follows one of its folder."""
    last, missing = Path(), []
    for name in re.findall(r'`([\w/]+\.py)', (ROOT / 'docs/architecture.md').read_text()):
        is_whole = '/' in name or (ROOT / 'beit_mm' / name).is_file()
        last = Path(name) if is_whole else last.parent / name
        if not any((folder / last).is_file() for folder in (ROOT / 'beit_mm', ROOT)):
            missing.append(str(last))
    assert not missing


@pytest.mark.parametrize('page', [*PAGES, 'the headers of configs'])
def test_documented_commands_have_the_options_that_the_tools_have(page):
    """Scripts, options, configs and the keys of --cfg-options, without running anything."""
    if page in PAGES:
        found = [*(each for block in blocks(page) for each in commands(block)), *inline_commands(page)]
    else:
        found = [each for name in list_configs(demo=True) for each in header_commands(name)]
        assert len(found) > 100
    problems = []
    for command in found:
        try:
            check_command(command)
        except (AssertionError, ValueError, OSError, SystemExit) as error:
            problems.append(f'{command.block.page}: {command.text}: {error}')
    assert not problems, '\n'.join(problems)


def check_command(command: Command) -> None:
    """Fails where the command names what is not there."""
    words = [word for word in command.words if not re.match(r'[A-Z_]+=', word)]
    words = words[: next((place for place, word in enumerate(words) if set(word) <= OPERATORS), len(words))]
    if command.words[0] == '(':  # of the shell alone
        return
    words = ['python', '-m', 'beit_mm', *words[1:]] if words[0] == 'beit-mm' else words
    script, *rest = words[1:] if words[0] == 'bash' else words
    if script == 'python' and rest[:2] == ['-m', 'beit_mm']:
        args = parser().parse_args(rest[2:])
        if args.verb in ('train', 'test', 'config'):
            check_config(command, args)
    elif script == 'python' and rest[0] == '-m':
        assert importlib.util.find_spec(rest[1]), f'no module {rest[1]}'
    elif script == 'python' and rest[1:] == ['--help']:
        assert (ROOT / rest[0]).is_file()
    elif script == 'python':
        args = parse_tool(*rest)
        if '--cfg-options' in rest or getattr(args, 'config', None):
            check_config(command, args)
    elif script.startswith('tools/dist_'):
        tool = script.removeprefix('tools/dist_').replace('.sh', '.py')
        places = 1 if tool == 'train.py' else 2
        assert re.fullmatch(r'\d+|N', rest[places])
        check_config(command, parse_tool(f'tools/{tool}', *rest[:places], *rest[places + 1 :]))
    elif script == 'tools/slurm_train.sh':
        check_config(command, parse_tool('tools/train.py', *rest[2:]))
    elif script == 'tools/run_demo.sh':
        parse_tool('tools/demo/run_demo.py', *rest)
    elif script == 'mim' and rest[0] in ('train', 'test'):
        path = config_of(command.block, rest[2])
        assert rest[1] in ('mmpretrain', 'mmsegmentation') and (path == 'mine.py' or (ROOT / path).is_file())
    elif script == 'mim' and rest[0] == 'run':
        tools = library_tools(rest[1]) if rest[1] != 'beit_mm' else ROOT / 'tools'
        assert [*tools.rglob(f'{rest[2]}.py')] and (ROOT / config_of(command.block, rest[3])).is_file()
    elif script == 'pip':
        extras = re.findall(r'\.\[(\w+)\]', command.text)
        assert all(f"'{extra}': [" in (ROOT / 'setup.py').read_text() for extra in extras)
    else:
        assert script in OTHER_PROGRAMS, f'{script} is not known'


def check_config(command: Command, args: argparse.Namespace) -> None:
    """The config is there, and so is each key of --cfg-options, as tools/train.py checks them."""
    path = config_of(command.block, getattr(args, 'config', getattr(args, 'name', 'CONFIG')))
    if path.startswith(('work_dirs/', 'run/')) or path == 'mine.py':  # written by a run, or by the reader
        return
    path = str(find_config(str(ROOT / path) if path.endswith('.py') else path).relative_to(ROOT / 'configs'))
    with_options(path, getattr(args, 'cfg_options', []))


@pytest.mark.parametrize('page', PAGES)
def test_python_of_a_page_names_what_is_there(page, tmp_path):
    """It compiles; its imports, the types of its dicts and their arguments exist; a config on another one is read."""
    for block in blocks(page):
        if block.language != 'python':
            continue
        tree = ast.parse(block.text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == 'beit_mm':
                assert hasattr(beit_mm, node.attr), node.attr
            elif isinstance(node, ast.Call) and getattr(node.func, 'id', None) == 'dict':
                check_dict({word.arg: word.value for word in node.keywords})
        if block.text.startswith('_base_ ='):
            folder = tmp_path if "'configs/" in block.text else tmp_path / Path(page).parent
            shutil.copytree(ROOT / 'configs', tmp_path / 'configs', dirs_exist_ok=True)
            (folder / 'snippet.py').write_text(block.text)
            Config.fromfile(folder / 'snippet.py')


def check_dict(arguments: dict) -> None:
    """The keywords of a `dict(type='beit_mm.X', ...)` are arguments of X."""
    name = getattr(arguments.pop('type', None), 'value', '')
    if not name.startswith('beit_mm.'):
        return
    registries = [child for child in vars(registry).values() if isinstance(child, Registry)]
    found = next((each for child in registries if (each := child.get(name))), None)
    assert found, f'no {name}'
    known: set[str] = set()
    for base in inspect.getmro(found):
        parameters = inspect.signature(base).parameters
        known |= set(parameters)
        if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
            break
    wrong = {word for word in arguments if word} - known - {'init_cfg'}
    assert not wrong, f'{name} takes no {wrong}'


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_notebook_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_tool('demo/draw_images.py', 'images', '--num-train', '300', '--num-val', '60', '--size', '64')
    monkeypatch.setenv('IMAGES', 'images')
    monkeypatch.setenv('MINUTES', '1')
    cells = json.loads((ROOT / 'docs/tutorial.ipynb').read_text())['cells']
    names: dict = {}
    for cell in cells:
        if cell['cell_type'] == 'code':
            exec(''.join(cell['source']), names)
    assert names['features'].shape[0] == 60 and len(names['nearest']) == 5
    for file in ('run/report.md', 'run/reconstruction.png', 'attention.png', 'run_ft/finetuned.pth'):
        assert Path(file).stat().st_size > 500
