"""`python -m beit_mm VERB ...`: pretraining, fine-tuning and looking at images, each in one line.

Nothing heavy is imported before the arguments are parsed.
"""

import os
import sys

if __name__ == '__main__':  # with -m Python looks for modules where the user is, perhaps in somebody's folder of images
    kept = {
        os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
        *os.environ.get('PYTHONPATH', '').split(os.pathsep),
    }
    sys.path[:] = [path for path in sys.path if path not in ('', os.getcwd()) or path in kept - {''}]
    os.environ.setdefault('PYTHONSAFEPATH', '1')  # for processes that read images

import argparse
import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

from beit_mm import __version__, terminal

MAX_LINES = 20  # of results on the terminal


def main() -> None:
    """Parses the command line and does what it says."""
    words = sys.argv[1:]
    if words[:1] == ['train']:  # tools/train.py has its own options
        train(words[1:])
        return
    args, unknown = parser().parse_known_args(words)
    if unknown:
        refuse(args.verb, unknown[0])
    arguments = {key: value for key, value in vars(args).items() if key not in ('verb', 'call')}
    args.call(**arguments)


def parser() -> argparse.ArgumentParser:
    """The parser of all verbs."""
    top = terminal.Parser(prog='python -m beit_mm', description='BEiT on your own images.')
    top.add_argument('--version', action='version', version=f'beit_mm {__version__}')
    verbs = top.add_subparsers(dest='verb', required=True, metavar='VERB')

    verb = add(verbs, 'pretrain', pretrain, 'learn from images without labels', 'images/ --out run --minutes 15')
    add_training(verb, 'folder of images, searched to any depth', required=False)
    length = verb.add_mutually_exclusive_group()
    length.add_argument('--minutes', type=float, help='wall clock for all of it (default: 15)')
    length.add_argument('--steps', type=int, help='of the pretraining, and at most as many of the tokenizer, instead')

    verb = add(verbs, 'finetune', finetune, 'train a classifier', 'images/ --init run --out run_ft --minutes 5')
    add_training(verb, 'folder with one folder a class, or with such folders train and val', required=True)
    length = verb.add_mutually_exclusive_group()
    length.add_argument('--minutes', type=float, help='wall clock for all of it (default: 15)')
    length.add_argument('--epochs', type=float, help='times through the images, instead')

    verb = add(verbs, 'classify', classify, 'name the class of images', 'run_ft new_images/ --out classes.csv')
    add_inputs(verb)
    verb.add_argument(
        '--labelled', metavar='FOLDER', help='with one folder a class: the nearest of these images decide'
    )
    verb.add_argument('--out', metavar='FILE', help='.csv or .json')

    verb = add(verbs, 'segment', segment, 'name the class of each pixel', 'segmentor.pth images/ --out maps')
    add_inputs(verb)
    verb.add_argument(
        '--labelled',
        metavar='FOLDER',
        help='with images/, annotations/ and classes.txt: the nearest of these patches decide',
    )
    verb.add_argument(
        '--size', type=int, metavar='PIXELS', help="with --labelled: short side of images (default: the checkpoint's)"
    )
    verb.add_argument(
        '--keep-zero-label', action='store_true', help='with --labelled: 0 is a class (default: unlabelled)'
    )
    verb.add_argument('--out', required=True, metavar='FOLDER', help='for label maps and overlays')

    verb = add(verbs, 'reconstruct', reconstruct, 'draw what is predicted', 'run images/ --out picture.png')
    add_inputs(verb)
    verb.add_argument('--out', required=True, metavar='PICTURE')

    example = 'run image.jpg --points "210,140;0.5,0.2" --out attention.png'
    verb = add(verbs, 'attention', attention, 'draw what points attend to', example)
    verb.add_argument('checkpoint', help='file, folder of a run, or name of a released model')
    verb.add_argument('image')
    verb.add_argument(
        '--points',
        default='0.5,0.5',
        metavar='X,Y[;X,Y]',
        help='pixels, or shares of width and height (default: 0.5,0.5)',
    )
    verb.add_argument('--layer', type=int, default=-1, help='block, 0-based, negative from the end (default: -1)')
    verb.add_argument('--out', required=True, metavar='PICTURE')

    verb = add(verbs, 'embed', embed, 'write the features of images', 'run images/ --out features.npz')
    add_inputs(verb)
    verb.add_argument('--out', required=True, metavar='FILE', help='.npz with `features` and `paths`')

    options = 'train a config, with the options of tools/train.py'
    add(verbs, 'train', train, options, 'beit/pretrain_300e --work-dir run')
    verb = add(verbs, 'config', config, 'print a config, to be changed', 'demo/pretrain > mine.py')
    verb.add_argument('name', help='end of the path of a config')
    return top


def refuse(verb: str, word: str) -> None:
    """Ends the command for a word that a verb does not know, with the nearest option."""
    from difflib import get_close_matches

    (verbs,) = (action for action in parser()._actions if isinstance(action, argparse._SubParsersAction))
    own = verbs.choices[verb]
    near = get_close_matches(word, own._option_string_actions, n=1)
    own.error(f'unrecognized argument: {word}' + (f'; did you mean {near[0]}?' if near else ''))


def add(
    verbs: argparse._SubParsersAction, name: str, call: Callable, help: str, example: str
) -> argparse.ArgumentParser:
    """A verb, with an example at the end of its help."""
    verb = verbs.add_parser(name, help=help, description=help, epilog=f'Example: python -m beit_mm {name} {example}')
    verb.set_defaults(call=call)
    return verb


def add_training(verb: argparse.ArgumentParser, images: str, required: bool) -> None:
    """Arguments of a training on somebody's images."""
    verb.add_argument('images', help=images)
    verb.add_argument('--out', required=True, metavar='FOLDER', help='of the run; the same command goes on with it')
    verb.add_argument(
        '--init', required=required, metavar='CKPT', help='weights to begin with: any BEiT, by file, run folder or name'
    )
    verb.add_argument('--batch', type=int, help='images of a step (default: by memory and number of images)')
    verb.add_argument('--workers', type=int, help='processes that read images (default: by the cores)')


def add_inputs(verb: argparse.ArgumentParser) -> None:
    """A checkpoint and images."""
    verb.add_argument('checkpoint', help='file, folder of a run, or name of a released model')
    verb.add_argument('images', nargs='+', help='files and folders')


def pretrain(**arguments: Any) -> None:
    """See apis.training."""
    terminal.folder_of_images(arguments['images'])  # before anything heavy is imported
    load('apis.training').pretrain(**arguments)


def finetune(**arguments: Any) -> None:
    """See apis.training."""
    terminal.folder_of_images(arguments['images'])
    load('apis.training').finetune(**arguments)


def classify(**arguments: Any) -> None:
    """Prints what apis.inference.classify finds."""
    verbs, readable = load('apis.inference'), load('datasets.reading').readable
    results = verbs.classify(**arguments)
    for result in results[:MAX_LINES]:
        name, probability = verbs.summary_of(result)
        name = name if 'error' in result else readable(name)
        terminal.say(f'{readable(result["path"])}  {name}  {probability}'.rstrip())
    if len(results) > MAX_LINES:
        terminal.say(f'... and {len(results) - MAX_LINES} more{"" if arguments["out"] else "; --out FILE writes all"}')
    if arguments['out']:
        terminal.say(arguments['out'])
    fail_if_nothing_was_read(results)


def segment(**arguments: Any) -> None:
    """Prints what apis.inference.segment wrote."""
    results = load('apis.inference').segment(**arguments)
    for result in results:
        if 'error' in result:
            terminal.say(f'unreadable: {result["error"]}')
    done = sum('error' not in result for result in results)
    terminal.say(f'{done} images: labels and overlays in {arguments["out"]}')
    fail_if_nothing_was_read(results)


def fail_if_nothing_was_read(results: list[dict]) -> None:
    """Ends the command with code 1 where no image could be read."""
    if all('error' in result for result in results):
        sys.exit(1)


def reconstruct(**arguments: Any) -> None:
    """See apis.inference."""
    terminal.say(load('apis.inference').reconstruct(**arguments))


def attention(**arguments: Any) -> None:
    """See apis.inference."""
    terminal.say(load('apis.inference').attention(**arguments))


def embed(**arguments: Any) -> None:
    """See features.extractor."""
    features = load('features.extractor')
    with terminal.quiet():
        found = features.embed(**arguments, on_error='skip')
    for skipped in found['skipped']:
        terminal.say(f'unreadable: {skipped["error"]}')
    terminal.say(f'{arguments["out"]}: {" x ".join(map(str, found["features"].shape))}')


def config(name: str) -> None:
    """Prints a config with all that it inherits."""
    configs = load('apis.configs')
    from mmengine.config import Config

    print(Config.fromfile(str(configs.find_config(name))).pretty_text)


def train(words: list[str]) -> None:
    """Runs tools/train.py, with the config found by its name."""
    package = Path(__file__).resolve().parent
    places = [package.parent / 'tools/train.py', package / '.mim/tools/train.py']
    tool = next((path for path in places if path.is_file()), None)
    if tool is None:
        raise FileNotFoundError(
            f'no tools/train.py: looked for {" and ".join(map(str, places))}; install beit_mm again'
        )
    if words and not words[0].startswith('-'):
        words[0] = str(load('apis.configs').find_config(words[0]))
    sys.argv = [str(tool), *words]
    sys.path.insert(0, str(tool.parent))
    runpy.run_path(str(tool), run_name='__main__')


def load(name: str):
    """A module of the package, imported without what the libraries print."""
    import importlib

    with terminal.quiet():
        return importlib.import_module(f'beit_mm.{name}')


if __name__ == '__main__':
    terminal.run(main)
