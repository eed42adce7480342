"""`beit-mm VERB ...`, or `python -m beit_mm VERB ...`: the options of each verb; calls the public function of its name.

Nothing heavy is imported before the arguments are parsed.
"""

import os
import sys

# With -m, Python looks for modules where the user is, perhaps in somebody's folder of images.
if __name__ == '__main__' or os.path.basename(sys.argv[0]).startswith('beit-mm'):
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kept = {package, *os.environ.get('PYTHONPATH', '').split(os.pathsep)}
    sys.path[:] = [path for path in sys.path if path not in ('', os.getcwd()) or path in kept - {''}]
    os.environ.setdefault('PYTHONSAFEPATH', '1')  # for processes that read images

import argparse
import runpy
from typing import Any

import beit_mm
from beit_mm import files, terminal

MAX_LINES = 20  # of results on the terminal
CHECKPOINT = 'demo (packaged weights), a file, the folder of a run, or the name of a released model'


def main() -> None:
    if sys.argv[1:2] == ['train']:  # tools/train.py has its own options
        train(sys.argv[2:])
        return
    arguments = vars(parser().parse_args())
    chosen = arguments.pop('verb')
    if chosen == 'config':
        print(terminal.quiet_import('beit_mm.apis.configs').config_text(**arguments))
        return
    with terminal.quiet():
        result = getattr(beit_mm, chosen)(**arguments)  # imported only now
    show(chosen, result, arguments.get('out'))


def parser() -> argparse.ArgumentParser:
    program = terminal.program()
    top = terminal.Parser(
        prog=program, description='BEiT on your own images.', epilog=f'To begin: {program} reconstruct demo'
    )
    top.add_argument('--version', action='version', version=f'beit_mm {beit_mm.__version__}')
    verbs = top.add_subparsers(dest='verb', required=True, metavar='VERB')

    def add(name: str, help: str, example: str) -> argparse.ArgumentParser:
        example = f'Example: {program} {name} {example}'
        return verbs.add_parser(name, help=help, description=help, epilog=example)

    verb = add('pretrain', 'learn from images without labels', 'images/ --out run --minutes 15')
    length = add_training(verb, 'folder of images, searched to any depth')
    what = 'demo, the packaged one, or new, one of these images (default: that of --init)'
    verb.add_argument('--tokenizer', choices=('demo', 'new'), help=what)
    length.add_argument('--steps', type=int, help='instead of minutes; the tokenizer gets at most as many')

    verb = add('finetune', 'train a classifier', 'images/ --init run --out run_ft --minutes 5')
    length = add_training(verb, 'folder with one folder a class, or with such folders train and val')
    length.add_argument('--epochs', type=float, help='instead of minutes; times through the images')

    verb = add('classify', 'name the class of images', 'run_ft new_images/ --out classes.csv')
    add_inputs(verb)
    labelled = 'with one folder a class: the nearest of these images decide'
    verb.add_argument('--labelled', metavar='FOLDER', help=labelled)
    verb.add_argument('--out', metavar='FILE', help='.csv or .json')

    verb = add('segment', 'name the class of each pixel', 'segmentor.pth images/ --out maps')
    add_inputs(verb, 'three drawn scenes')
    labelled = 'with images/, annotations/ and classes.txt: the nearest of these patches decide'
    verb.add_argument('--labelled', metavar='FOLDER', help=labelled)
    side = "with --labelled: short side of images (default: the checkpoint's)"
    verb.add_argument('--short-side', '--size', type=int, metavar='PIXELS', help=side)
    zero = 'with --labelled: 0 is a class (default: unlabelled)'
    verb.add_argument('--keep-zero-label', dest='reduce_zero_label', action='store_false', help=zero)
    add_out(verb, 'FOLDER', 'segmentation', 'for label maps and overlays')

    verb = add('reconstruct', 'draw what is predicted', 'run images/ --out picture.png')
    add_inputs(verb)
    add_out(verb, 'PICTURE', 'reconstruction.png')

    example = 'run image.jpg --points "210,140;0.5,0.2" --out attention.png'
    verb = add('attention', 'draw what points attend to', example)
    verb.add_argument('checkpoint', help=CHECKPOINT)
    verb.add_argument('image', nargs='?', default=argparse.SUPPRESS, help='a file (default: a packaged photo)')
    points = 'pixels, or shares of width and height (default: 0.5,0.5)'
    verb.add_argument('--points', default='0.5,0.5', metavar='X,Y[;X,Y]', help=points)
    verb.add_argument('--layer', type=int, default=-1, help='block, 0-based, negative from the end (default: -1)')
    add_out(verb, 'PICTURE', 'attention.png')

    verb = add('embed', 'write the features of images', 'run images/ --out features.npz')
    add_inputs(verb)
    add_out(verb, 'FILE', 'features.npz', 'with `features` and `paths`')
    verb.set_defaults(on_error='skip')

    add('train', 'train a config, with the options of tools/train.py', 'beit/pretrain_300e --work-dir run')
    verb = add('config', 'print a config, to be changed', 'demo/pretrain > mine.py')
    verb.add_argument('name', help='end of the path of a config')
    return top


def add_training(verb: argparse.ArgumentParser, images: str) -> Any:
    """Adds what trainings have in common; returns the group of options that say how long."""
    verb.add_argument('images', help=images)
    verb.add_argument('--out', required=True, metavar='FOLDER', help='of the run; the same command resumes it')
    init = 'weights to begin with: any BEiT, by file, run folder or name; none: random ones (default on a CPU: demo)'
    verb.add_argument('--init', metavar='CKPT', help=init)
    verb.add_argument('--batch', type=int, help='images of a step (default: by memory and number of images)')
    verb.add_argument('--workers', type=int, help='processes that read images (default: by the cores)')
    length = verb.add_mutually_exclusive_group()
    length.add_argument('--minutes', type=float, help='wall clock for all of it (default: 15)')
    return length


def add_inputs(verb: argparse.ArgumentParser, default: str = 'five photos') -> None:
    verb.add_argument('checkpoint', help=CHECKPOINT)
    what = f'files and folders (default: {default} that come with the package)'
    verb.add_argument('images', nargs='*', default=argparse.SUPPRESS, help=what)


def add_out(verb: argparse.ArgumentParser, kind: str, default: str, what: str = '') -> None:
    verb.add_argument('--out', metavar=kind, default=default, help=f'{what} (default: %(default)s)'.strip())


def show(verb: str, result: Any, out: str | None) -> None:
    """Prints what a verb returned; exits with code 1 where none of its images could be read."""
    if verb in ('reconstruct', 'attention'):
        terminal.say(result)
    elif verb == 'embed':
        show_unreadable(result['skipped'])
        terminal.say(f'{out}: {" x ".join(map(str, result["features"].shape))}')
    elif verb == 'segment':
        show_unreadable(result)
        terminal.say(f'{sum("error" not in image for image in result)} images: labels and overlays in {out}')
    elif verb == 'classify':
        from beit_mm.apis.inference import summary_of

        for image in result[:MAX_LINES]:
            name, probability = summary_of(image)
            name = name if 'error' in image else files.readable(name)  # errors are readable
            terminal.say(f'{files.readable(image["path"])}  {name}  {probability}'.rstrip())
        if len(result) > MAX_LINES:
            terminal.say(f'... and {len(result) - MAX_LINES} more{"" if out else "; --out FILE writes all"}')
        if out:
            terminal.say(out)
    if verb in ('segment', 'classify') and all('error' in image for image in result):
        sys.exit(1)


def show_unreadable(images: list[dict[str, Any]]) -> None:
    for image in images:
        if 'error' in image:
            terminal.say(f'unreadable: {image["error"]}')


def train(words: list[str]) -> None:
    places = [folder.parent / 'tools/train.py' for folder in files.config_folders()]
    tool = next((path for path in places if path.is_file()), None)
    if tool is None:
        raise FileNotFoundError('tools/train.py is not beside the configs; install beit_mm again')
    if words and not words[0].startswith('-'):
        words[0] = str(terminal.quiet_import('beit_mm.apis.configs').find_config(words[0]))
    sys.argv = [str(tool), *words]
    sys.path.insert(0, str(tool.parent))
    runpy.run_path(str(tool), run_name='__main__')


def script() -> None:
    terminal.run(main)


if __name__ == '__main__':
    script()
