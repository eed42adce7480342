"""The stages of tools/run_demo.sh: images, a tokenizer, a pretraining on its tokens, fine-tuning, segmentation, a test.

    python tools/demo.py [--data DIR] [--stages data,dvae,pretrain,finetune,segment,test] [--work-dir work_dirs/demo]

Fine-tuning needs images in class folders: DIR/<class>/*.jpg. It trains the pretrained model, and the same model from
random weights for as long, so that one sees what pretraining is worth. Segmentation needs label maps, which the drawn
pictures have.
"""
import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from beit_mm.datasets.demo_images import make_demo_images

from beit_mm.apis.segment import SegmentationInferencer
from beit_mm.datasets.annotation import IGNORED, read_labels
from beit_mm.datasets.image_reading import read_image
from beit_mm.datasets.images import list_images
from beit_mm.visualization.curves import draw_comparison, read_curves, read_scalars
from beit_mm.visualization.overlays import draw_sheet

ROOT = Path(__file__).resolve().parents[1]
STAGES = ('data', 'dvae', 'pretrain', 'finetune', 'segment', 'test')
HELD_OUT = 0.1  # share of the user's images kept for the test
MIN_IMAGES = 100
DRAWN = 'drawn_images'
SEGMENT_STEPS = 300
SEGMENTED = 6  # images in the picture of overlays


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', type=Path, help='folder of images, searched to any depth '
                        '(default: pictures that the package draws itself)')
    parser.add_argument('--stages', default=','.join(STAGES), help='comma-separated, in this order: %(default)s')
    parser.add_argument('--work-dir', type=Path, default=Path('work_dirs/demo'))
    args = parser.parse_args()
    stages = args.stages.split(',')
    if unknown := set(stages) - set(STAGES):
        parser.error(f'unknown stage {sorted(unknown)[0]!r}; choose from {",".join(STAGES)}')

    if args.data and 'data' not in stages:
        parser.error('--data is read by the stage data, which --stages leaves out')

    demo = Demo(args.work_dir.resolve())
    for number, stage in enumerate(stages, start=1):
        print(f'\n== {number}/{len(stages)} {stage}', flush=True)
        start = time.time()
        demo.data(args.data) if stage == 'data' else getattr(demo, stage)()
        print(f'== {stage}: {time.time() - start:.0f} s', flush=True)


def class_of(path: str) -> str | None:
    """The folder that a listed image lies in; None for a image that lies in none."""
    return Path(path).parent.name or None


class Demo:
    """The stages; each leaves its files in the work directory, so that the next finds them.

    Args:
        work_dir: `lists/` holds the images' names, `dvae/`, `pretrain/`, `finetune/`, `scratch/` and `segment/` the
            runs. Tools run inside it on relative paths, because `--cfg-options` drops the spaces of a value and splits
            it at commas.
    """

    def __init__(self, work_dir: Path):
        self.work_dir = work_dir
        self.lists = work_dir / 'lists'

    def data(self, folder: Path | None) -> None:
        """Lists the images to learn from and those held out."""
        self.lists.mkdir(parents=True, exist_ok=True)
        if folder is None:
            link = folder = self.work_dir / DRAWN
            make_demo_images(folder, num_train=1200, num_val=300, size=160, seed=0)
            train, val = ([f'{split}/{path}' for path in list_images(str(folder / split))]
                          for split in ('train', 'val'))
        else:
            if not folder.is_dir():
                sys.exit(f'--data: no folder {folder}')
            folder = folder.resolve()
            link = self.work_dir / 'own_images'
            link.unlink(missing_ok=True)
            link.symlink_to(folder)
            images = list_images(str(folder))
            if len(images) < MIN_IMAGES:
                sys.exit(f'--data: {len(images)} images in {folder}, at least {MIN_IMAGES} are needed to learn from')
            random.Random(0).shuffle(images)
            held_out = round(HELD_OUT * len(images))
            train, val = images[held_out:], images[:held_out]
        (self.lists / 'folder.txt').write_text(f'{link.name}\n')
        classes = sorted({class_of(path) for path in train + val} - {None})
        (self.lists / 'classes.txt').write_text('\n'.join(classes) + '\n')
        for name, paths in (('train', train), ('val', val)):
            (self.lists / f'{name}.txt').write_text('\n'.join(paths) + '\n')
            labelled = [f'{path} {classes.index(class_of(path))}' for path in paths if class_of(path)]
            (self.lists / f'{name}_labelled.txt').write_text('\n'.join(labelled) + '\n')
        print(f'{len(train)} images of {folder} to learn from, {len(val)} held out')

    def dvae(self) -> None:
        """Trains the tokenizer."""
        self._run('train.py', 'dvae')

    def pretrain(self) -> None:
        """Pretrains on its tokens."""
        self._run('train.py', 'pretrain', tokenizer=self._checkpoint('dvae'))

    def finetune(self) -> None:
        """Trains classifiers from the pretrained and from random weights, equally long."""
        if not self._has_classes():
            print('no class folders, nothing to fine-tune on')
            return
        pretrained = self._checkpoint('pretrain')
        self._run('train.py', 'finetune_folder', run='finetune',
                  options=[f'model.backbone.init_cfg.checkpoint={pretrained}'])
        # lower rates for lower layers keep what they have learned; here they have learned nothing
        self._run('train.py', 'finetune_folder', run='scratch',
                  options=['model.backbone.init_cfg=None', 'optim_wrapper.paramwise_cfg.layer_decay_rate=1.0'])

    def segment(self) -> None:
        """Trains SETR-PUP on the pretrained model."""
        if not self._has_label_maps():
            print('no label maps, nothing to segment')
            return
        steps = SEGMENT_STEPS
        self._run('train.py', 'segment_setr_pup', run='segment', options=[
            f'model.backbone.init_cfg.checkpoint={self._checkpoint("pretrain")}', f'train_cfg.max_iters={steps}',
            f'train_cfg.val_interval={steps}', f'param_scheduler.1.end={steps + 1}',
            f'default_hooks.checkpoint.interval={steps}'])

    def test(self) -> None:
        """Evaluates the models on the held-out images and writes the summary."""
        out = self.work_dir / 'metrics.json'
        summary = {}
        for name, tokenizer in (('dvae', None), ('pretrain', self._checkpoint('dvae'))):
            self._run('test.py', name, str(self._checkpoint(name)), '--out', out.name, tokenizer=tokenizer)
            summary.update(json.loads(out.read_text()))
        numbers = dict(
            recon_mae_01=summary['tokenizer/recon_mae_01'],
            codes_used=summary['tokenizer/codes_used'],
            val_mim_loss=summary['mim_loss'],
            token_entropy=summary['token_entropy'],
            position_entropy=summary['position_entropy'],
            val_mim_acc=summary['mim_acc'],
            images_per_second=self._images_per_second())
        if (self.work_dir / 'scratch').is_dir():
            for run in ('finetune', 'scratch'):
                self._run('test.py', 'finetune_folder', str(self._checkpoint(run)), '--out', out.name, run=run,
                          options=['model.backbone.init_cfg=None'])
                numbers[f'{run}_accuracy'] = json.loads(out.read_text())['accuracy/top1']
            curves = {label: read_curves(self.work_dir / run, 'accuracy/top1')
                      for label, run in (('pretrained', 'finetune'), ('from scratch', 'scratch'))}
            draw_comparison(curves, 'accuracy/top1', self.work_dir / 'finetune_curves.png')
        if (self.work_dir / 'segment').is_dir() and self._has_label_maps():
            self._run('test.py', 'segment_setr_pup', str(self._checkpoint('segment')), '--out', out.name, run='segment',
                      options=['model.backbone.init_cfg=None'])
            numbers['segment_miou'] = json.loads(out.read_text())['mIoU']
            self._draw_segmentation()
        out.unlink()
        path = self.work_dir / 'summary.json'
        path.write_text(json.dumps(numbers, indent=2) + '\n')
        print(f'\n{json.dumps(numbers, indent=2)}')
        gain = 1 - numbers['val_mim_loss'] / numbers['token_entropy']
        print(f'\nHidden patches are predicted {gain:.0%} better than by how frequent each visual token is.')
        print(f'Look at\n  {self.work_dir}/pretrain/pictures/test.png   what was hidden and what was predicted\n'
              f'  {self.work_dir}/pretrain/curves.png          the loss over time\n'
              f'  {self.work_dir}/dvae/pictures/test.png       what the visual tokens keep of a image')
        if 'scratch_accuracy' in numbers:
            print(f"  {self.work_dir}/finetune_curves.png           accuracy with and without pretraining: "
                  f"{numbers['finetune_accuracy']:.1f} % and {numbers['scratch_accuracy']:.1f} %")
        if 'segment_miou' in numbers:
            print(f"  {self.work_dir}/segmentation.png              what each pixel is taken for: "
                  f"{numbers['segment_miou']:.1f} % mIoU")
        print(f'  {path}')

    def _draw_segmentation(self) -> None:
        """A picture of some held-out images, with what they show and what the model sees in them."""
        folder = self.work_dir / self._folder()
        names = (self.lists / 'val.txt').read_text().splitlines()
        names = names[::len(names) // SEGMENTED][:SEGMENTED]  # sorted by class
        segmenter = SegmentationInferencer(self.work_dir / self._checkpoint('segment'))
        found = [result['labels'] for result in segmenter([folder / name for name in names])]
        true = []
        for name in names:
            labels = read_labels(str((folder / 'annotations' / name).with_suffix('.png')))
            true.append(np.where(labels == 0, IGNORED, labels - 1))  # the labels of reduce_zero_label
        images = [read_image(str(folder / name)) for name in names]
        columns = {'annotation': true, 'prediction': found}
        draw_sheet(images, columns, segmenter.classes, segmenter.palette).save(self.work_dir / 'segmentation.png')

    def _run(self, tool: str, config: str, *arguments: str, run: str | None = None, tokenizer: Path | None = None,
             options: Sequence[str] = ()) -> None:
        """A tool on configs/demo/<config>.py in the folder `run`, with the listed images.

        All paths are relative to the work directory.
        """
        options = [*options, *self._data_options(config)]
        if tokenizer is not None:
            options.append(f'model.target_generator.checkpoint={tokenizer}')
        run = run or config
        command = [sys.executable, str(ROOT / 'tools' / tool), str(ROOT / f'configs/demo/{config}.py'), *arguments,
                   '--work-dir', run, '--cfg-options', *options]
        if subprocess.run(command, check=False, cwd=self.work_dir).returncode:
            sys.exit(f'the stage failed; its log is in {self.work_dir / run}')

    def _data_options(self, config: str) -> list[str]:
        """The images for a config."""
        folder = self._folder()
        if config == 'segment_setr_pup':
            return [f'data_root={folder}']
        labelled = config == 'finetune_folder'
        options = []
        for loader, split in (('train', 'train'), ('val', 'val'), ('test', 'val')):
            dataset = dict(data_root='.', data_prefix=folder,
                           ann_file=f'lists/{split}_labelled.txt' if labelled else f'lists/{split}.txt')
            if labelled:
                dataset['classes'] = 'lists/classes.txt'
            options += [f'{loader}_dataloader.dataset.{key}={value}' for key, value in dataset.items()]
        return options

    def _folder(self) -> str:
        """Name of the images' folder in the work directory."""
        if not self.lists.is_dir():
            sys.exit(f'{self.lists} is missing: run the stage data first')
        return (self.lists / 'folder.txt').read_text().strip()

    def _has_label_maps(self) -> bool:
        return self._folder() == DRAWN

    def _has_classes(self) -> bool:
        classes = self.lists / 'classes.txt'
        return classes.is_file() and len(classes.read_text().split('\n')) > 2  # a line end stands after the last

    def _checkpoint(self, name: str) -> Path:
        """The newest checkpoint of a run, relative to the work directory."""
        pointer = self.work_dir / name / 'last_checkpoint'
        if not pointer.exists():
            sys.exit(f'{pointer} is missing: run the stage {name} first')
        return Path(name, Path(pointer.read_text().strip()).name)

    def _images_per_second(self) -> float:
        """Median over the pretraining."""
        train, _ = read_scalars(self.work_dir / 'pretrain')
        return statistics.median(row['images_per_second'] for row in train)


if __name__ == '__main__':
    main()
