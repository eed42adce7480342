"""Shows what a pretrained BEiT is good for, in at most 8 minutes on two CPU cores: pictures, numbers and a report.

    tools/run_demo.sh                 images that it draws itself, with classes and label maps
    tools/run_demo.sh --data DIR      your own images: any folder; with one folder a class, classifiers are trained too
    tools/run_demo.sh --full          a longer pretraining, and a tokenizer of its own: at most 20 minutes

The packaged weights predict masked patches, classify the frozen patches of drawn scenes, and are fine-tuned with few
labels, beside random weights and methods without a network. Last, a pretraining from random weights learns. Each
command is printed as you would type it. After an interruption the same command resumes. GPUs stay idle.
"""

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections import Counter, namedtuple
from collections.abc import Iterable
from functools import cached_property, partial
from pathlib import Path

from beit_mm import __main__ as verbs
from beit_mm import terminal

ROOT = Path(__file__).resolve().parents[2]
# Minutes and not steps, so that the demo ends in time on any machine
Lengths = namedtuple('Lengths', 'pretraining finetuning finetuning_random')
SHORT, FULL = Lengths(2.25, 0.6, 2.4), Lengths(11, 0.7, 4)
BATCH = 16  # images of a step of the short pretraining, which thereby has enough steps to learn
DRAWN, DRAWING = Path('data/demo'), ROOT / 'tools/demo/draw_images.py'
PER_CLASS = 20  # labels; with few classes more, because `finetune` needs 100 images
NUM_SCENES = 100  # drawn ones with label maps, and as many held out
MAX_HELD_OUT = 600  # images, which give standard errors of 2 %
NUM_PICTURES = 6
STARTS = dict(finetune_packaged='demo', finetune_random='none')  # folder of each fine-tuning -> --init


def main(lengths: Lengths | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, metavar='DIR', help='folder of images, searched to any depth')
    parser.add_argument('--full', action='store_true', help='longer, with a new tokenizer')
    help = 'folder for the results (default: work_dirs/demo, with --full work_dirs/demo_full)'
    parser.add_argument('--out', type=Path, help=help)
    parser.add_argument('--check', action='store_true', help='only check the arguments')
    args = parser.parse_args()
    if args.data and not args.data.is_dir():
        sys.exit(f'error: no folder {args.data}; expected a folder of images')
    if not args.check:
        os.environ['CUDA_VISIBLE_DEVICES'] = ''
        out = args.out or Path('work_dirs/demo_full' if args.full else 'work_dirs/demo')
        out.mkdir(parents=True, exist_ok=True)
        Demo(args.data, out, args.full, lengths or (FULL if args.full else SHORT)).run()


class Demo:
    """The parts of the demo; finished parts are skipped."""

    def __init__(self, data: Path | None, out: Path, full: bool, lengths: Lengths) -> None:
        self.data, self.out, self.full, self.lengths, self.drawn = data or DRAWN, out, full, lengths, data is None
        self.finding = terminal.quiet_import('beit_mm.own_images.images')

    @cached_property
    def images(self):
        """The images as the verbs find and split them; drawn images must exist before the first access."""
        return self.finding.find_images(self.data)

    def run(self) -> None:
        parts = {'masked patches, predicted by the packaged weights': self.reconstruct}
        if self.drawn:
            parts['drawing images'] = partial(execute, 'python', DRAWING, makes=DRAWN / 'meta')
            parts['frozen patches of few labelled scenes'] = self.segment
        if self.drawn or self.images.classes:
            for folder, start in STARTS.items():
                parts[f'a classifier with few labels, --init {start}'] = partial(self.finetune, folder)
        parts['pretraining from random weights'] = self.pretrain
        parts['the report'] = self.report
        for number, (title, part) in enumerate(parts.items(), start=1):
            print(f'\n== {number} of {len(parts)}: {title}', flush=True)
            try:
                part()
            except (KeyboardInterrupt, SystemExit):
                print('Run the same demo command again to resume here.', flush=True)
                raise

    def reconstruct(self) -> None:
        held_out = {} if self.drawn else self.images.held_out.names  # none: the verb shows photos of the package
        shown = [self.images.held_out.root / name for name in self.finding.evenly(held_out, NUM_PICTURES)]
        picture = self.out / 'packaged_reconstruct.png'
        execute('beit-mm', 'reconstruct', 'demo', *shown, '--out', picture, makes=picture)

    def segment(self) -> None:
        """Compares frozen patches on links to a few of the drawn images and their label maps."""
        labelled, found = self.out / 'label_maps', self.out / 'frozen_scenes.json'
        link(['train', 'val'], DRAWN / 'annotations', labelled / 'annotations')
        for part, images in dict(train=self.images.train, val=self.images.held_out).items():
            link(self.finding.evenly(images.names, NUM_SCENES), images.root, labelled / 'images' / part)
        shutil.copy(DRAWN / 'meta/segmentation_classes.txt', labelled / 'classes.txt')
        if not found.exists():
            with terminal.quiet():
                terminal.quiet_import('demo_report').segment_frozen(labelled, found)

    def pretrain(self) -> None:
        start = ['--tokenizer', 'new'] if self.full else ['--tokenizer', 'demo', '--batch', BATCH]
        words = ['--out', self.out / 'pretrain', '--init', 'none', *start, '--minutes', self.lengths.pretraining]
        execute('beit-mm', 'pretrain', self.data, *words)

    def finetune(self, folder: str) -> None:
        """Fine-tunes on links to a few images of each class, and validates on links to held-out images."""
        train, held_out, labelled = self.images.train, self.images.held_out, self.out / 'few_labels'
        counts, number = Counter(train.names.values()), PER_CLASS
        while sum(min(number, count) for count in counts.values()) < self.finding.MIN_IMAGES:
            number += 1
        few: list[str] = []
        for name in counts:
            few += self.finding.evenly([path for path, label in train.names.items() if label == name], number)
        link(few, train.root, labelled / 'train')
        link(self.finding.evenly(held_out.names, MAX_HELD_OUT), held_out.root, labelled / 'val')
        init = STARTS[folder]
        minutes = self.lengths.finetuning_random if init == 'none' else self.lengths.finetuning
        execute('beit-mm', 'finetune', labelled, '--init', init, '--out', self.out / folder, '--minutes', minutes)

    def report(self) -> None:
        with terminal.quiet():
            lines = terminal.quiet_import('demo_report').write(self.out, self.images, self.drawn)
        for line in lines:
            terminal.say(line)


def link(names: Iterable[str | Path], root: Path, folder: Path) -> None:
    """Fills a folder with links to files and folders below `root`."""
    shutil.rmtree(folder, ignore_errors=True)
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to((root / name).resolve())


def execute(*words: object, makes: Path | None = None) -> None:
    """Prints and runs a command unless its result exists; verbs run in this process, where all is imported already."""
    if makes is not None and makes.exists():
        terminal.say(f'{makes} already exists')
        return
    command = [os.path.relpath(word) if ROOT in getattr(word, 'parents', ()) else str(word) for word in words]
    terminal.say(f'$ {shlex.join(command)}')
    if command[0] == 'beit-mm':
        verbs.main(command[1:])
    else:
        subprocess.run([sys.executable, *command[1:]], check=True)


if __name__ == '__main__':
    terminal.run(main)
