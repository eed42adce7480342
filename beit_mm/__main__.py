"""`beit-mm VERB ...`, or `python -m beit_mm`: the options of each verb.

Nothing heavy is imported before the arguments are parsed.
"""

import os
import sys

# Python would import modules from the current folder, perhaps of downloads. A program that imports this keeps its path.
if __name__ == '__main__' or os.path.basename(sys.argv[0]).startswith('beit-mm'):
    package = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    kept = {package, *os.environ.get('PYTHONPATH', '').split(os.pathsep)}
    sys.path[:] = [path for path in sys.path if path not in ('', os.getcwd()) or path in kept - {''}]

import argparse
from collections.abc import Sequence
from typing import Any

import beit_mm
from beit_mm import terminal
from beit_mm.apis import commands

MAX_LINES = 20  # of results on the terminal
CHECKPOINT = 'demo (packaged weights), a file, the folder of a run, or the name of a released model'


def main(words: Sequence[str] | None = None) -> None:
    """Runs a command line, from the verb on; by default that of this process."""
    words = sys.argv[1:] if words is None else words
    arguments = vars(parser().parse_args(words))
    verb = arguments.pop('verb')
    if verb in ('train', 'test'):
        getattr(commands, verb)(words[1:])
    elif verb == 'config':
        print(terminal.quiet_import('beit_mm.apis.configs').config_text(**arguments))
    else:
        with terminal.quiet():
            result = getattr(beit_mm, verb)(**arguments)  # imported only now
        show(verb, result, arguments.get('out'), arguments.get('min_confidence'))


def parser() -> argparse.ArgumentParser:
    program = terminal.program()
    description = f'BEiT on your own images. To begin: {program} reconstruct demo'
    top = terminal.Parser(prog=program, description=description)
    top.add_argument('--version', action='version', version=f'beit_mm {beit_mm.__version__}')
    verbs = top.add_subparsers(dest='verb', required=True, metavar='VERB')

    def add(name: str, help: str, example: str, **more: Any) -> argparse.ArgumentParser:
        example = f'Example: {program} {name} {example}'
        return verbs.add_parser(name, help=help, epilog=example, **dict(dict(description=help), **more))

    verb = add('pretrain', 'learn from images without labels', 'images/ --out run --minutes 15')
    length = add_training(verb, 'folder of images, searched to any depth')
    verb.add_argument('--tokenizer', choices=('demo', 'new'), help="demo: packaged; new: train one (default: --init's)")
    what = "predict visual tokens, or a teacher's features (default: tokens)"
    verb.add_argument('--targets', choices=('tokens', 'features'), help=what)
    teacher = "any BEiT or plain ViT, or ema: the model's own moving average (default: demo, on a GPU DINOv2)"
    verb.add_argument('--teacher', metavar='CKPT', help=f'with --targets features: {teacher}')
    length.add_argument('--steps', type=int, help='steps instead of minutes; the tokenizer gets at most as many')

    verb = add('finetune', 'train a classifier or segmentor', 'images/ --init run --out run_ft --minutes 5')
    length = add_training(verb, 'folder with one folder per class; or with images/, annotations/ and classes.txt')
    add_zero_label(verb)
    verb.add_argument('--balance', action='store_true', help='show images of small classes more often')
    which = 'bands to read, from 0, of images with label maps (default: all if RGB would lose some)'
    verb.add_argument('--bands', type=bands, metavar='all|B,B,...', help=which)
    lora = 'train matrices of this rank beside the layers of the frozen backbone'
    verb.add_argument('--lora', type=int, metavar='RANK', help=lora)
    freeze = 'do not train the first N blocks, or all: then a classifier is fitted to features computed once'
    verb.add_argument('--freeze', type=blocks, metavar='all|N', help=freeze)
    heads = 'upernet', 'setr_pup', 'masks', 'masks_decoder', 'linear'
    verb.add_argument('--head', choices=heads, help='of a segmentor (default: linear; above width 192 upernet)')
    length.add_argument('--epochs', type=float, help='passes over the images, instead of minutes')

    verb = add('classify', 'name the class of images', 'run_ft new_images/ --out classes.csv')
    add_inputs(verb)
    verb.add_argument('--labelled', metavar='FOLDER', help='one folder per class; the nearest images decide')
    verb.add_argument('--out', metavar='FILE', help='.csv or .json; with --min-confidence a folder')
    add_confidence(verb, 'write a folder for finetune, of images whose class is at least this probable')

    verb = add('segment', 'name the class of each pixel', 'segmentor.pth images/ --out maps')
    add_inputs(verb, 'three drawn scenes')
    verb.add_argument('--labelled', metavar='FOLDER', help='images/ and annotations/; the nearest patches decide')
    side = "short side of images, with --labelled (default: the checkpoint's)"
    verb.add_argument('--short-side', '--size', type=int, metavar='PIXELS', help=side)
    add_zero_label(verb)
    verb.add_argument('--multi-scale', action='store_true', help='average over scales and flips, for a segmentor')
    verb.add_argument('--max-pixels', type=int, metavar='N', help='limit for images and maps (default: 178,956,970)')
    add_confidence(verb, 'label only pixels whose class is at least this probable; finetune reads the folder')
    add_out(verb, 'FOLDER', 'segmentation', 'for label maps and overlays')

    verb = add('reconstruct', 'draw what is predicted', 'run images/ --out picture.png')
    add_inputs(verb)
    add_out(verb, 'PICTURE', 'reconstruction.png')

    verb = add('attention', 'draw what points attend to', 'run image.jpg --points "210,140;0.5,0.2"')
    verb.add_argument('checkpoint', help=CHECKPOINT)
    verb.add_argument('image', nargs='?', default=argparse.SUPPRESS, help='a file (default: a packaged photo)')
    points = 'pixels, or shares of width and height (default: 0.5,0.5)'
    verb.add_argument('--points', default='0.5,0.5', metavar='X,Y[;X,Y]', help=points)
    verb.add_argument('--layer', type=int, default=-1, help='block from 0, or from the end if negative (default: -1)')
    side = "short side of the image (default: the checkpoint's, but at least 30 patches)"
    verb.add_argument('--short-side', '--size', type=int, metavar='PIXELS', help=side)
    commands.add_mean_std(verb)
    add_out(verb, 'PICTURE', 'attention.png')

    verb = add('embed', 'write the features of images', 'run images/ --out features.npz')
    add_inputs(verb)
    add_out(verb, 'FILE', 'features.npz', 'with `features` and `paths`')
    verb.set_defaults(on_error='skip')

    verb = add('export', 'write one ONNX file for images of any size', 'run_ft model.onnx')
    verb.add_argument('checkpoint', help='classifier or segmentor: a file, the folder of a run, or a released name')
    verb.add_argument('out', help='ONNX file')
    verb.add_argument('--config', help='path of its config (default: the one in the checkpoint)')
    verb.add_argument('--float16', action='store_true', help='weights and arithmetic in half precision')
    commands.add_mean_std(verb)

    for name, of_config, help, example in (
        ('train', commands.train_parser(), 'train a config', 'beit/pretrain_300e --work-dir run'),
        ('test', commands.test_parser(), 'test a checkpoint of a config', 'beit/pretrain_300e run/epoch_300.pth'),
    ):
        as_given = dict(description=of_config.description, formatter_class=of_config.formatter_class)
        add(name, help, example, parents=[of_config], add_help=False, **as_given)

    verb = add('config', 'print a config for you to change', 'demo/pretrain > mine.py')
    verb.add_argument('name', help='end of the path of a config')
    return top


def bands(text: str) -> str | list[int]:
    return text if text == 'all' else [int(band) for band in text.split(',')]


def blocks(text: str) -> str | int:
    return text if text == 'all' else int(text)


def add_zero_label(verb: argparse.ArgumentParser) -> None:
    group = verb.add_mutually_exclusive_group()
    for option, value, meaning in (('reduce', True, 'marks unlabelled pixels'), ('keep', False, 'is a class')):
        option, text = f'--{option}-zero-label', f'0 in label maps {meaning} (default: as classes.txt shows)'
        group.add_argument(option, dest='reduce_zero_label', action='store_const', const=value, help=text)


def add_training(verb: argparse.ArgumentParser, images: str) -> Any:
    """Adds the arguments that both trainings share; returns the group of options for the length."""
    verb.add_argument('images', help=images)
    verb.add_argument('--out', required=True, metavar='FOLDER', help='for the run; the same command resumes it')
    init = 'weights to start from: any BEiT or plain ViT, by file, run folder or name; none: random weights'
    init += ' (default: demo on a CPU, see docs/own_images.md for a GPU)'
    verb.add_argument('--init', metavar='CKPT', help=init)
    verb.add_argument('--batch', type=int, help='images per step (default: by memory and number of images)')
    verb.add_argument('--seed', type=int, help='seed of all random choices (default: 0)')
    verb.add_argument('--workers', type=int, help='processes that read images (default: by the number of cores)')
    commands.add_mean_std(verb)
    length = verb.add_mutually_exclusive_group()
    length.add_argument('--minutes', type=float, help='time of the whole run (default: 15)')
    return length


def add_inputs(verb: argparse.ArgumentParser, default: str = 'five photos') -> None:
    verb.add_argument('checkpoint', help=CHECKPOINT)
    what = f'files and folders (default: {default} that come with the package)'
    verb.add_argument('images', nargs='*', default=argparse.SUPPRESS, help=what)
    commands.add_mean_std(verb)


def add_confidence(verb: argparse.ArgumentParser, help: str) -> None:
    verb.add_argument('--min-confidence', type=float, metavar='P', help=f'{help} (0 to 1)')


def add_out(verb: argparse.ArgumentParser, kind: str, default: str, what: str = '') -> None:
    verb.add_argument('--out', metavar=kind, default=default, help=f'{what} (default: %(default)s)'.strip())


def show(verb: str, result: Any, out: str | None, least: float | None) -> None:
    """Prints what a verb returned; exits with code 1 if none of its images could be read."""
    if verb in ('reconstruct', 'attention'):
        terminal.say(result)
    elif verb == 'classify':
        from beit_mm.apis.inference import summary_of

        for image in result[:MAX_LINES]:
            terminal.say('  '.join([image['path'], *summary_of(image)]).rstrip())
        if len(result) > MAX_LINES:
            terminal.say(f'... and {len(result) - MAX_LINES} more')
        if least is not None:
            kept = [image['name'] for image in result if 'error' not in image and image['scores'][0][1] >= least]
            terminal.say(f'{len(kept)} of {len(result)} images, of {len({*kept})} classes: {out}')
    elif verb in ('segment', 'embed'):
        unreadable = [image for image in (result if verb == 'segment' else result['skipped']) if 'error' in image]
        for image in unreadable:
            terminal.say(f'unreadable: {image["error"]}')
        if verb == 'segment':
            terminal.say(f'{len(result) - len(unreadable)} images: labels and overlays in {out}')
            if shares := [image['labelled'] for image in result if 'labelled' in image]:
                share = 100 * sum(shares) / len(shares)
                terminal.say(f'{share:.0f} % of the pixels of an image are labelled, on average')
        else:
            terminal.say(f'{out}: {" x ".join(map(str, result["features"].shape))}')
    if verb in ('segment', 'classify') and all('error' in image for image in result):
        sys.exit(1)


def script() -> None:
    os.environ.setdefault('PYTHONSAFEPATH', '1')  # for processes that read images
    terminal.run(main)


if __name__ == '__main__':
    script()
