"""`beit-mm VERB ...`, or `python -m beit_mm`. The options of a verb are the arguments of its function.

Nothing heavy is imported before they are parsed: signatures and docstrings are read from the source.
"""

import os
import sys

# Python would import modules from the current folder, perhaps of downloads. A program that imports this keeps its path.
if __name__ == '__main__' or os.path.basename(sys.argv[0]).startswith('beit-mm'):
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    named = filter(None, os.environ.get('PYTHONPATH', '').split(os.pathsep))  # an empty part: the current folder
    kept = {package, *map(os.path.abspath, named)}
    sys.path[:] = [path for path in sys.path if path not in ('', os.getcwd()) or path in kept]

import argparse
import ast
import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import beit_mm
from beit_mm import terminal
from beit_mm.apis import commands
from beit_mm.errors import UserError

MAX_LINES = 20  # of results on the terminal
EXAMPLES = dict(  # of the verbs that are functions
    look='images/ --out look.html',
    pretrain='images/ --out run --minutes 15',
    finetune='images/ --init run --out run_ft --minutes 5',
    classify='run_ft new_images/ --out classes.csv',
    segment='segmentor.pth images/ --out maps',
    reconstruct='run images/ --out picture.png',
    attention='run image.jpg --points "210,140;0.5,0.2"',
    embed='run images/ --out features.npz',
    export='run_ft model.onnx',
)
POSITIONAL = ('checkpoint', 'images', 'image')  # and `out` of export; the other arguments are options
PYTHON_ONLY = ('batch_size', 'device', 'progress', 'on_error')  # arguments without an option
DEFAULTS = {('embed', 'out'): ast.Constant('features.npz')}  # where the command differs from the function
ALIASES = dict(short_side=['--size'])
FLAGS = dict(  # of arguments that are True, False or None
    reduce_zero_label={
        '--reduce-zero-label': (True, '0 in label maps marks unlabelled pixels (default: as classes.txt shows)'),
        '--keep-zero-label': (False, '0 in label maps is a class (default: as classes.txt shows)'),
    }
)


def main(words: Sequence[str] | None = None) -> None:
    """Runs a command line, from the verb on; by default that of this process."""
    words = sys.argv[1:] if words is None else words
    arguments = vars(parser().parse_args(words))
    verb = arguments.pop('verb')
    if verb in ('train', 'test'):
        getattr(commands, verb)(words[1:])
    elif verb == 'config':
        print(terminal.quiet_import('beit_mm.apis.configs').config_text(**arguments))
    elif verb == 'models':
        show_models(**arguments)
    else:
        with terminal.quiet():
            result = getattr(beit_mm, verb)(**arguments)  # imported only now
        if verb in SHOW:
            SHOW[verb](result, arguments)


def parser() -> argparse.ArgumentParser:
    program = terminal.program()
    description = f'BEiT on your own images. To begin: {program} reconstruct demo'
    top = terminal.Parser(prog=program, description=description)
    top.add_argument('--version', action='version', version=f'beit_mm {beit_mm.__version__}')
    verbs: Any = top.add_subparsers(dest='verb', required=True, metavar='VERB')
    for name, example in EXAMPLES.items():
        add_verb(verbs, name, f'Example: {program} {name} {example}')
    for name, of_config, help, example in (
        ('train', commands.train_parser(), 'train a config', 'beit/pretrain_300e --work-dir run'),
        ('test', commands.test_parser(), 'test a checkpoint of a config', 'beit/pretrain_300e run/epoch_300.pth'),
    ):
        as_given = dict(description=of_config.description, formatter_class=of_config.formatter_class)
        example = f'Example: {program} {name} {example}'
        verbs.add_parser(name, help=help, epilog=example, parents=[of_config], add_help=False, **as_given)
    example = f'Example: {program} config demo/pretrain > mine.py'
    verb = verbs.add_parser('config', help='print a config for you to change', epilog=example)
    verb.add_argument('name', help='end of the path of a config')
    example = f'Example: {program} models dinov2'
    verb = verbs.add_parser('models', help='list the released models that can be given as a checkpoint', epilog=example)
    verb.add_argument('pattern', nargs='?', default='*', help='part of the names, or a pattern such as "*ade20k"')
    return top


# Options from signatures


def count_or_all(text: str) -> str | int:
    return text if text == 'all' else int(text)


def list_or_all(text: str) -> str | list[int]:
    return text if text == 'all' else [int(number) for number in text.split(',')]


KINDS: dict[str, dict[str, Any]] = {  # how argparse reads an argument with this annotation; others are texts
    'bool': dict(action='store_true'),
    'int': dict(type=int),
    'int | None': dict(type=int),
    'float | None': dict(type=float),
    'int | str | None': dict(type=count_or_all, metavar='all|N'),
    'str | Sequence[int] | None': dict(type=list_or_all, metavar='all|N,N,...'),
    'Sequence[str] | None': dict(type=lambda text: text.split(','), metavar='NAME,NAME,...'),
    'PerChannel': dict(type=commands.numbers, metavar='R,G,B'),
}


def add_verb(verbs: Any, name: str, example: str) -> None:
    """Adds a verb with the arguments of its function."""
    function, (title, texts) = source_of(name), texts_of(name)
    verb = verbs.add_parser(name, help=title, description=title, epilog=example)
    missing = [None] * (len(function.args.args) - len(function.args.defaults))
    positional = (*POSITIONAL, 'out') if name == 'export' else POSITIONAL
    for argument, default in zip(function.args.args, [*missing, *function.args.defaults], strict=True):
        if argument.arg not in PYTHON_ONLY:
            default = DEFAULTS.get((name, argument.arg), default)
            add_argument(verb, argument, default, texts[argument.arg], argument.arg in positional)
    if name == 'embed':
        verb.set_defaults(on_error='skip')


def add_argument(verb: Any, argument: Any, default: Any, help: str, positional: bool) -> None:
    """Adds an argument of a function to its verb; the function's own default holds unless it is a plain value."""
    key, kind = argument.arg, KINDS.get(ast.unparse(argument.annotation), {})
    value = argparse.SUPPRESS
    with contextlib.suppress(TypeError, ValueError):  # no default, or a name
        value = ast.literal_eval(default)
    if key in FLAGS:
        group = verb.add_mutually_exclusive_group()
        for flag, (meaning, text) in FLAGS[key].items():
            group.add_argument(flag, dest=key, action='store_const', const=meaning, help=text)
    elif positional:
        several = '*' if key == 'images' else '?'
        verb.add_argument(key, help=help, **({} if default is None else dict(nargs=several, default=value)))
    else:
        if value not in (None, False, argparse.SUPPRESS):
            help += f' (default: {value!s})'
        options = [f'--{key.replace("_", "-")}', *ALIASES.get(key, ())]
        verb.add_argument(*options, dest=key, required=default is None, default=value, help=help, **kind)


def source_of(name: str) -> Any:
    """The syntax tree of a public function."""
    file = Path(__file__).parent / f'{beit_mm.PUBLIC[name].replace(".", "/")}.py'
    return next(node for node in ast.parse(file.read_bytes()).body if getattr(node, 'name', '') == name)


def texts_of(name: str) -> tuple[str, dict[str, str]]:
    """The first sentence of a function's docstring, and its text on each argument, for argparse.

    `see pretrain` stands for what that function's docstring says.
    """
    docstring = ast.get_docstring(source_of(name))
    title, _, arguments = docstring.partition('Args:\n')
    texts: dict[str, str] = {}
    for keys, text in re.findall(r'(?m)^    (\w[\w, ]*): ((?:.+\n?)(?:^        .+\n?)*)', arguments):
        for key in keys.split(', '):
            other = re.match(r'see `(\w+)`', text)
            texts[key] = texts_of(other[1])[1][key] if other else ' '.join(text.split()).rstrip('.').replace('%', '%%')
    return re.split(r'\.\s|\.$', title)[0], texts


# What a verb returned, for the terminal


def show_models(pattern: str) -> None:
    find = terminal.quiet_import('beit_mm.checkpoint.find')
    found = find.list_models(pattern if '*' in pattern else f'*{pattern}*', details=True)
    if not found:
        raise UserError(f'no released model has {pattern!r} in its name{find.nearest(pattern)}')
    rows = [['name', 'model', 'licence', 'at hand', 'reported']]
    for name, entry in found.items():
        at_hand = 'yes' if find.is_at_hand(entry['url']) else ''
        rows.append([name, entry['model'], entry['licence'], at_hand, entry['figures']])
    for line in terminal.quiet_import('beit_mm.own_images.report').aligned(rows):
        terminal.say(line)


def show_path(path: Path, arguments: dict[str, Any]) -> None:
    terminal.say(path)


def show_classes(result: list[dict[str, Any]], arguments: dict[str, Any]) -> None:
    from beit_mm.apis.inference import summary_of

    readable = [image for image in result if 'error' not in image]
    for image in readable[:MAX_LINES]:
        terminal.say('  '.join([image['path'], *summary_of(image)]))
    if len(readable) > MAX_LINES:
        terminal.say(f'... and {len(readable) - MAX_LINES} more')
    say_unreadable(result)
    if (least := arguments['min_confidence']) is not None:
        kept = [image['name'] for image in readable if image['scores'][0][1] >= least]
        terminal.say(f'{len(kept)} of {len(result)} images, of {len({*kept})} classes: {arguments["out"]}')
    if not readable:
        sys.exit(1)


def show_maps(result: list[dict[str, Any]], arguments: dict[str, Any]) -> None:
    unreadable = say_unreadable(result)
    terminal.say(f'{len(result) - unreadable} images: labels and overlays in {arguments["out"]}')
    shares = [image['labelled'] for image in result if 'labelled' in image]
    if shares:
        share = 100 * sum(shares) / len(shares)
        terminal.say(f'{share:.0f} % of the pixels of an image are labelled, on average')
    if all('error' in image for image in result):
        sys.exit(1)


def show_features(result: dict[str, Any], arguments: dict[str, Any]) -> None:
    say_unreadable(result['skipped'])
    features = result['features']  # of 'patches' a list
    shape = f'{len(features)} images' if isinstance(features, list) else ' x '.join(map(str, features.shape))
    terminal.say(f'{arguments["out"]}: {shape}')


def say_unreadable(images: Sequence[dict[str, Any]]) -> int:
    """Says which images could not be read, and their number, which it returns."""
    errors = [image['error'] for image in images if 'error' in image]
    for error in errors[:MAX_LINES]:
        terminal.say(f'unreadable: {error}')
    if errors:
        terminal.say(f'images that could not be read: {len(errors):,}')
    return len(errors)


SHOW: dict[str, Callable] = dict(
    look=show_path,
    reconstruct=show_path,
    attention=show_path,
    classify=show_classes,
    segment=show_maps,
    embed=show_features,
)


def script() -> None:
    os.environ.setdefault('PYTHONSAFEPATH', '1')  # for processes that read images
    terminal.run(main)


if __name__ == '__main__':
    script()
