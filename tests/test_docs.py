"""The pages of docs/ fit the code and each other."""

import argparse
import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from helpers import ROOT, check_all, header_of, library_tools, list_configs, run_tool, train, with_options
from mkdocs.commands import build
from mkdocs.config import load_config
from mmengine.config import Config
from mmengine.registry import Registry

import beit_mm
from beit_mm import registry
from beit_mm.__main__ import parser
from beit_mm.apis.commands import arguments_of, merge_options
from beit_mm.apis.configs import find_config

PAGES = ['README.md', 'CONTRIBUTING.md', *(f'docs/{path.name}' for path in sorted((ROOT / 'docs').glob('*.md')))]
PAGES += [f'configs/{path.parent.name}/README.md' for path in sorted((ROOT / 'configs').glob('*/README.md'))]
EXAMPLES = [f'docs/examples/{path.name}' for path in sorted((ROOT / 'docs/examples').glob('*.py'))]
FENCED = re.compile(r'^```(\w+)\n(.*?)^```$', re.M | re.S)
OTHER_PROGRAMS = ['tensorboard', 'tools/run_tests.sh', 'tools/dev/check_style.sh', '.venv/bin/python', 'sbatch']
OTHER_PROGRAMS += ['tools/dev/gpu/check.sh', 'tools/dev/gpu/collect.sh']
CONFIGS = 'demo/pretrain', 'demo/finetune_folder', 'demo/segment_upernet'  # what CONFIG may stand for
WRITTEN = re.compile(r'work_dirs/|run/|mine\.py$')  # configs of a run, or the reader's own


def test_messages_of_the_troubleshooting_page_are_printed_by_the_code():
    quoted = re.findall(r'^\| `([^`]+)` \|', (ROOT / 'docs/troubleshooting.md').read_text(), flags=re.M)
    sources = [*(ROOT / 'beit_mm').rglob('*.py'), *(ROOT / 'tools').rglob('*.py'), *(ROOT / 'tools').glob('*.sh')]
    text = ' '.join(file.read_text() for file in sources if '.mim' not in file.parts)
    joined = re.sub(r"['\"]\s+f?['\"]", '', text)  # literals that go on in the next line
    joined = ' '.join(re.sub(r'\$?\{[^{}]*\}|\$\w+', '', joined).split())  # without what is put into them
    own = [message for message in quoted if not message.startswith(('torch.', 'DataLoader'))]
    assert len(own) > 10 and not [message for message in own if message not in joined]


def test_the_site_builds_and_all_its_links_lead_somewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    build.build(load_config(str(ROOT / 'mkdocs.yml'), site_dir=str(tmp_path / 'site'), strict=True))
    start = (tmp_path / 'site/index.html').read_text()
    assert 'href="reliability/"' in start and 'href="docs/' not in start


def test_files_that_the_page_on_the_architecture_names_exist():
    for name in re.findall(r'`([\w/]+\.py)', (ROOT / 'docs/architecture.md').read_text()):
        assert (ROOT / name).is_file() or [*ROOT.glob(f'beit_mm/**/{name}')], name


def commands(page: str) -> list[str]:
    """Commands of a page's shell blocks, and those in its text that name a script or a verb and more."""
    text, found = (ROOT / page).read_text(), []
    for language, block in FENCED.findall(text):
        lines = block.replace('\\\n', ' ').splitlines() if language == 'shell' else []
        found += [command for line in lines if (command := re.sub(r'(^|\s)#.*', '', line).strip())]
    inline = re.findall(r'`((?:python |tools/\w+\.sh |mim |beit-mm )[^`]+ [^`]+)`', FENCED.sub('', text))
    only_named = re.compile(r'VERB|NAME|\.\.\.|^mim \w+ \w+$|^python -m \w+( \w+)?$')
    return found + [' '.join(line.split()) for line in inline if not only_named.search(line)]


def header_commands(config: str) -> list[str]:
    """The lines of `Command:` and `Test:` in the header of a config."""
    header = re.sub(r' \\\n +', ' ', header_of(config))
    parts = re.findall(r'^(?:Command|Then|Test): +(.*(?:\n .*)*)', header, re.M)
    lines = [line.strip().replace('[--tta]', '--tta') for part in parts for line in part.splitlines()]
    return [line for line in lines if re.match(r'(python|tools/)(?!.*--cfg-options$)', line)]


@pytest.mark.parametrize('page', [*PAGES, 'the headers of configs'])
def test_documented_commands_have_the_options_that_the_tools_have(page):
    """Scripts, options, configs and the keys of --cfg-options, without running anything."""
    if page in PAGES:
        found = commands(page)
    else:
        found = [each for name in list_configs(demo=True) for each in header_commands(name)]
        assert len(found) > 100
    check_all(found, check_command)


def check_command(command: str) -> None:
    """Fails where the command names what is not there."""
    lexer = shlex.shlex(re.sub(r'^([A-Z_]+=\S+ )+', '', command), posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ''
    words = list(lexer)
    words = words[: next((place for place, word in enumerate(words) if set(word) <= set('<>|&;()')), len(words))]
    if words[0] == 'beit-mm':
        words = ['python', '-m', 'beit_mm', *words[1:]]
    script, *rest = words[1:] if words[0] == 'bash' else words
    if script == 'python' and rest[:2] == ['-m', 'beit_mm']:
        args = parser().parse_args(rest[2:])
        if args.verb in ('train', 'test', 'config'):
            check_config(args)
    elif script == 'python' and rest[0] == '-m':
        assert importlib.util.find_spec(rest[1]), f'no module {rest[1]}'
    elif script == 'python' and rest[1:] == ['--help']:
        assert (ROOT / rest[0]).is_file()
    elif script == 'python':
        args = parse_tool(*rest)
        if '--cfg-options' in rest or getattr(args, 'config', None):
            check_config(args)
    elif script.startswith('tools/dist_'):
        tool = script.removeprefix('tools/dist_').replace('.sh', '.py')
        devices = rest.pop(1 if tool == 'train.py' else 2)
        assert re.fullmatch(r'\d+|N', devices)
        check_config(parse_tool(f'tools/{tool}', *rest))
    elif script == 'tools/slurm_train.sh':
        check_config(parse_tool('tools/train.py', *rest[2:]))
    elif script == 'tools/run_demo.sh':
        parse_tool('tools/demo/run_demo.py', *rest)
    elif script == 'mim' and rest[0] in ('train', 'test'):
        assert rest[1] in ('mmpretrain', 'mmsegmentation', 'beit_mm')
        assert rest[2] == 'CONFIG' or WRITTEN.match(rest[2]) or find_config(rest[2]).is_file()
    elif script == 'mim' and rest[0] == 'run':
        assert [*library_tools(rest[1]).rglob(f'{rest[2]}.py')]
    elif script == 'pip':
        extras = re.findall(r'\.\[(\w+)\]', command)
        assert all(f'\n{extra} = [' in (ROOT / 'pyproject.toml').read_text() for extra in extras)
    else:
        assert script in OTHER_PROGRAMS, f'{script} is not known'


def check_config(args: argparse.Namespace) -> None:
    """The config is there, and so is each key of --cfg-options, as tools/train.py checks them."""
    path, errors = getattr(args, 'config', getattr(args, 'name', 'CONFIG')), []
    for name in CONFIGS if path == 'CONFIG' else [path] * (not WRITTEN.match(path)):
        config = find_config(str(ROOT / name) if name.endswith('.py') else name)
        try:
            return with_options(str(config.relative_to(ROOT / 'configs')), getattr(args, 'cfg_options', []))
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]


def parse_tool(script: str, *words: str) -> argparse.Namespace:
    """What the tool's own parser makes of its arguments; nothing is run."""
    parse_args, found = argparse.ArgumentParser.parse_args, []

    def parse(parser: argparse.ArgumentParser, *args: object) -> None:
        found.append(parse_args(parser, *args))  # or ends with what is wrong on stderr
        raise SystemExit

    if script == 'tools/doctor.py' and not words:  # it takes none
        return argparse.Namespace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, 'parse_args', parse)
        with pytest.raises(SystemExit):
            run_tool(script, *words, folder=ROOT)
    assert found, f'{script} does not take {words}'
    return found[0]


@pytest.mark.parametrize('page', [*PAGES, *EXAMPLES])
def test_python_of_a_page_names_what_is_there(page, tmp_path):
    """It compiles; its imports, the types of its dicts and their arguments exist; a config on another one is read."""
    content = (ROOT / page).read_text()
    for language, text in FENCED.findall(content) if page in PAGES else [('python', content)]:
        if language != 'python':
            continue
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                assert not [alias.name for alias in node.names if not hasattr(module, alias.name)]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == 'beit_mm':
                assert hasattr(beit_mm, node.attr), node.attr
            elif isinstance(node, ast.Call) and getattr(node.func, 'id', None) == 'dict':
                check_dict({word.arg: word.value for word in node.keywords})
        if re.search('^_base_ =', text, re.M):
            folder = tmp_path if "'configs/" in text else tmp_path / Path(page).parent
            folder.mkdir(parents=True, exist_ok=True)
            shutil.copytree(ROOT / 'configs', tmp_path / 'configs', dirs_exist_ok=True)
            (folder / 'snippet.py').write_text(text)
            Config.fromfile(folder / 'snippet.py')


def check_dict(arguments: dict) -> None:
    """The keywords of a `dict(type='beit_mm.X', ...)` are arguments of X."""
    name = getattr(arguments.pop('type', None), 'value', '')
    if name.startswith('beit_mm.'):
        children = [child for child in vars(registry).values() if isinstance(child, Registry)]
        assert any(child.get(name) for child in children), f'no {name}'
        wrong = {word for word in arguments if word} - arguments_of(name, 'mmengine')[0]
        assert not wrong, f'{name} takes no {wrong}'


def test_the_command_for_weights_and_biases_sends_it_all_numbers_with_their_steps(pretrain_config, monkeypatch):
    """To a stand-in for the package, which tests do not install."""
    wandb, rows = MagicMock(), []
    wandb.log = lambda row, **_: rows.append(row)
    monkeypatch.setitem(sys.modules, 'wandb', wandb)
    (command,) = (command for command in commands('docs/options.md') if 'Wandb' in command)
    merge_options(pretrain_config, shlex.split(command)[-1:])
    train(pretrain_config)
    assert wandb.init.call_args.kwargs['project'] == 'beit'
    (axis,) = wandb.define_metric.call_args_list
    assert axis.kwargs == dict(name='*', step_metric='iter')
    assert [row['iter'] for row in rows if 'loss' in row] == [*range(1, 7)]
    assert sum('mim_loss' in row for row in rows) == 2  # wandb itself gives these the last step


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_by_copy_and_paste(tmp_path):
    """On fewer pictures, in fewer steps."""
    for name in ('beit_mm', 'configs', 'tools'):
        (tmp_path / name).symlink_to(ROOT / name)
    text = '\n'.join(text for _, text in FENCED.findall((ROOT / 'docs/tutorial.md').read_text()))
    text = re.sub(r'(--steps |iter_)\d+', r'\g<1>4', text).replace(
        'draw_images.py', 'draw_images.py --num-train 80 --num-val 20'
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    done = subprocess.run(['bash', '-ec', text], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    report = json.loads((tmp_path / 'predictions.json').read_text())
    assert len(report['predictions']) == 20 and [*(tmp_path / 'pictures').rglob('*.png')]


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
