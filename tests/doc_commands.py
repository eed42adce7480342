"""What the pages of the docs tell a reader to type: their fenced blocks and the commands in them."""

import argparse
import re
import runpy
import shlex
import sys
from dataclasses import dataclass

import pytest
from helpers import ROOT, header_of, load_config
from mmengine.config import Config

PAGES = ['README.md', 'CONTRIBUTING.md']
PAGES += [f'docs/{path.name}' for path in sorted((ROOT / 'docs').glob('*.md'))]
PAGES += [f'configs/{path.parent.name}/README.md' for path in sorted((ROOT / 'configs').glob('*/README.md'))]
OPERATORS = set('<>|&;()')
FENCED = re.compile(r'^```(\w+)\n(.*?)^```$', re.M | re.S)
CONFIG_OF = {  # what CONFIG may stand for, by the heading that it stands below
    'Classification': 'configs/demo/finetune_folder.py',
    'Segmentation': 'configs/demo/segment_upernet.py',
    'Checkpoints in and out': 'configs/demo/finetune_folder.py',
    'Inferencers and tools of the libraries': 'configs/demo/finetune_folder.py',
}


@dataclass
class Block:
    """A fenced block of a page, with the nearest heading and the paragraph above it."""

    page: str
    heading: str
    before: str
    language: str
    text: str


@dataclass
class Command:
    """A line of a shell block, continuations joined; its comment may stand in lines of its own above."""

    block: Block
    comment: str
    words: list[str]  # as a shell splits them; `VAR=value` before a command are among them, redirections too

    @property
    def text(self) -> str:
        """The command as one types it."""
        return joined(self.words)


def blocks(page: str) -> list[Block]:
    """All fenced blocks of a page that name a language."""
    text = (ROOT / page).read_text()
    found = []
    for fence in FENCED.finditer(text):
        above = text[: fence.start()].rstrip()
        heading = re.findall(r'^#+ (.*)$', FENCED.sub('', above), re.M)[-1:]
        found.append(Block(page, ''.join(heading), above.split('\n\n')[-1], fence[1], fence[2]))
    return found


def commands(block: Block) -> list[Command]:
    """All commands of a shell block."""
    found, above = [], ''
    for line in block.text.replace('\\\n', ' ').splitlines() if block.language == 'shell' else ():
        words, comment = split(line)
        if words:
            found.append(Command(block, f'{above} {comment}', words))
        above = '' if words else f'{above} {comment}'
    return found


def inline_commands(page: str) -> list[Command]:
    """Commands in the text of a page that name a script or a verb and more."""
    text = FENCED.sub('', (ROOT / page).read_text())
    found = re.findall(r'`((?:python |tools/\w+\.sh |mim )[^`]+ [^`]+)`', text)
    only_named = re.compile(r'VERB|\.\.\.|^mim \w+ \w+$|^python -m \w+( \w+)?$')
    lines = [' '.join(line.split()) for line in found if not only_named.search(line)]
    return [Command(Block(page, '', '', 'shell', line), '', split(line)[0]) for line in lines]


def header_commands(config: str) -> list[Command]:
    """The lines of `Command:` and `Test:` in the header of a config."""
    parts = re.findall(r'^(?:Command|Test): +(.*(?:\n .*)*)', header_of(config), re.M)
    lines = [line.strip().replace('[--tta]', '--tta') for part in parts for line in part.splitlines()]
    lines = [line for line in lines if line.startswith(('python ', 'tools/')) and not line.endswith('--cfg-options')]
    return [Command(Block(config, '', '', 'shell', line), '', split(line)[0]) for line in lines]


def split(line: str) -> tuple[list[str], str]:
    """Words and comment of a line, operators of the shell as words of their own."""
    command, _, comment = re.sub(r'(^|\s)#', '\\1\n', line, count=1).partition('\n')
    lexer = shlex.shlex(command, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, ''
    return list(lexer), comment.strip()


def joined(words: list[str]) -> str:
    """A command line of words, operators of the shell among them."""
    return ' '.join(word if set(word) <= OPERATORS else shlex.quote(word) for word in words)


class Parsed(BaseException):
    """Ends a tool as soon as it has understood its command line."""


def parse_tool(script: str, *words: str) -> argparse.Namespace:
    """What the tool's own parser makes of its arguments; nothing is run. ValueError is what argparse says."""
    parse_args = argparse.ArgumentParser.parse_args

    def parse(parser: argparse.ArgumentParser, *args: object) -> None:
        raise Parsed(parse_args(parser, *args))

    def fail(parser: argparse.ArgumentParser, message: str) -> None:
        raise Parsed(ValueError(message))

    path = ROOT / script
    assert path.is_file(), f'{script} is not there'
    if path.name == 'doctor.py':
        assert not words, f'{script} takes no arguments'
        return argparse.Namespace()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, 'parse_args', parse)
        patch.setattr(argparse.ArgumentParser, 'error', fail)
        patch.setattr(sys, 'argv', [script, *words])
        patch.syspath_prepend(path.parent)
        try:
            runpy.run_path(str(path), run_name='__main__')
        except Parsed as parsed:
            if isinstance(parsed.args[0], ValueError):
                raise parsed.args[0] from None
            return parsed.args[0]
    raise AssertionError(f'{script} does not parse its arguments')


def config(path: str) -> Config:
    return load_config(path.removeprefix('configs/'))


def config_of(block: Block | None, name: str) -> str:
    """The config that a word names: itself, or what CONFIG stands for in this place."""
    return CONFIG_OF.get(block.heading if block else '', 'configs/demo/pretrain.py') if name == 'CONFIG' else name
