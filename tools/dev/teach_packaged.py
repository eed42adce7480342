"""The second stage of the packaged pretraining: features of a trained ViT, computed once, as targets.

    python tools/dev/teach_packaged.py look vit_small data/caltech101/train views       resumable
    python tools/dev/teach_packaged.py train views data/caltech101 --steps 8000 --work-dir work_dirs/caltech101_taught

`look` shows each photo and its mirror image to the ViT, whole, in about 256 patches, and writes the features of its
patches, standardised by channel. `train` is configs/demo/pretrain_features.py with crops of these views, and takes the
arguments of tools/train.py. beit_mm/weights/README.md has all commands.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from beit_mm.datasets.image_folder import list_images
from beit_mm.datasets.reading import LoadImage
from beit_mm.datasets.transforms import TwoViewRandomResizedCrop, resize_bicubic
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.tokenizers.base import TargetGenerator
from beit_mm.models.tokenizers.vqkd_training import BEiTTeacher
from beit_mm.positions import take_tokens
from beit_mm.registry import MODELS, TRANSFORMS
from beit_mm.terminal import run

SIDE, GRID = 16, (12, 12)  # patches along a side of a square photo that the teacher sees, and the student
MIDDLE_AND_LAST = (2, 4)  # blocks
SAMPLE = 500  # photos whose patches give mean and standard deviation of each channel


def look(args: argparse.Namespace) -> None:
    """Writes OUT/features.npy, float16 (patches, channels), and OUT/photos.json: path -> first patch, rows, columns."""
    paths, read, teacher = [*list_images(args.photos)], LoadImage(), BEiTTeacher(args.teacher, args.layer)
    photos, end = {}, 0
    for path in paths:
        height, width = read(dict(img_path=f'{args.photos}/{path}'))['ori_shape']
        rows, columns = (max(1, round(SIDE * ratio**0.5)) for ratio in (height / width, width / height))
        photos[path] = end, rows, columns
        end += 2 * rows * columns
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / 'photos.json').write_text(json.dumps(photos))
    done, file = args.out / 'done', args.out / 'features.npy'
    statistics = args.out / 'statistics.pt'
    shape = end, teacher.network.embed_dims
    features = np.lib.format.open_memmap(file, 'r+' if done.exists() else 'w+', np.float16, shape)

    def seen(path: str) -> Tensor:
        first, rows, columns = photos[path]
        size = rows * teacher.patch_size, columns * teacher.patch_size
        image = torch.from_numpy(resize_bicubic(read(dict(img_path=f'{args.photos}/{path}'))['img'], size))
        views = torch.stack([image, image.flip(1)]).permute(0, 3, 1, 2) / 255
        with torch.autocast('cpu', torch.bfloat16):
            return torch.stack(teacher(views, (rows, columns))).float().mean(dim=0).flatten(0, 1)

    if not statistics.exists():
        sample = torch.cat([seen(path) for path in paths[:: max(1, len(paths) // SAMPLE)]])
        torch.save([sample.mean(dim=0), sample.std(dim=0)], statistics)
    mean, std = torch.load(statistics)
    for number in range(int(done.read_text()) if done.exists() else 0, len(paths)):
        first, rows, columns = photos[paths[number]]
        features[first : first + 2 * rows * columns] = ((seen(paths[number]) - mean) / std).half()
        if number % 100 == 99:
            done.write_text(str(number + 1))
            print(f'{number + 1} of {len(paths)} photos', flush=True)


@TRANSFORMS.register_module()
class TeacherCrop(TwoViewRandomResizedCrop):
    """Says which part of the photo it has cut."""

    def transform(self, results: dict) -> dict:
        height, width = results['img'].shape[:2]
        (top, left, rows, columns), flip, _ = self.drawn_crop(results, height, width)
        left = width - left - columns if flip else left
        part = np.array([top / height, left / width, rows / height, columns / width])
        return dict(super().transform(results), teacher_part=part, teacher_flip=flip)


@TRANSFORMS.register_module()
class TeacherFeatures:
    """Adds the teacher's features of the part, in the student's grid, as the second view."""

    def __init__(self, views: str, photos: str) -> None:
        self.features, self.folder = np.load(f'{views}/features.npy', mmap_mode='r'), photos
        self.photos = json.loads(Path(views, 'photos.json').read_text())

    def __call__(self, results: dict) -> dict:
        first, rows, columns = self.photos[str(Path(results['img_path']).relative_to(self.folder))]
        first += results['teacher_flip'] * rows * columns
        whole = torch.from_numpy(self.features[first : first + rows * columns].astype(np.float32))
        axes = [(torch.arange(number) + 0.5) / number for number in GRID]
        top, left, height, width = results['teacher_part']
        y, x = torch.meshgrid(2 * (top + height * axes[0]) - 1, 2 * (left + width * axes[1]) - 1, indexing='ij')
        points = torch.stack([x, y], dim=-1)[None].float()
        taken = F.grid_sample(whole.T.view(1, -1, rows, columns), points, padding_mode='border', align_corners=False)
        return dict(results, tokenizer_images=taken[0].permute(1, 2, 0).half().numpy())


@MODELS.register_module()
class TaughtTargets(TargetGenerator):
    """The features that TeacherFeatures has added; the data preprocessor has divided them by 255."""

    gives = 'features'

    def targets(self, inputs: dict, positions: Tensor | None) -> Tensor:
        features = 255 * inputs['tokenizer_images'].flatten(2).mT
        return features if positions is None else take_tokens(features, positions.clamp(min=0))


@MODELS.register_module()
class TaughtPretrainer(BEiTPretrainer):
    """Predicts the features of every patch twice: from the last block, and from the one whose features users take."""

    def __init__(self, head: dict, **options: Any) -> None:
        super().__init__(head=head, **options)
        self.middle_head = MODELS.build(head)

    def loss(self, inputs: dict) -> dict[str, Tensor]:
        targets, first = self._targets(inputs, None), self.backbone.num_prefix_tokens
        middle, last = (hidden[:, first:] for hidden in self.backbone(inputs['images'], inputs['mask']))
        values = self.head.loss(last, targets, None)
        return dict(values, loss_middle=self.middle_head.loss(middle, targets, None)['loss'])


def train(args: argparse.Namespace, others: list[str]) -> None:
    from beit_mm.apis.commands import train_config, train_parser, train_quietly

    config: Any = train_config(train_parser().parse_args(['demo/pretrain_features', '--no-validate', *others]))
    steps = config.train_dataloader.dataset.pipeline
    steps[1] = dict(steps[1], type='beit_mm.TeacherCrop')
    steps.insert(-1, dict(type='beit_mm.TeacherFeatures', views=str(args.views), photos=f'{args.data}/train'))
    config.train_dataloader.dataset.data_root = args.data
    config.model.type, config.model.target_generator = 'beit_mm.TaughtPretrainer', dict(type='beit_mm.TaughtTargets')
    config.model.head.update(target_dims=np.load(args.views / 'features.npy', mmap_mode='r').shape[1], loss='cosine')
    config.model.backbone.out_indices = MIDDLE_AND_LAST
    train_quietly(config, 'taught')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest='verb', required=True)
    looking, training = verbs.add_parser('look'), verbs.add_parser('train')
    looking.add_argument('teacher', help='a plain ViT')
    looking.add_argument('photos')
    looking.add_argument('out', type=Path)
    looking.add_argument('--layer', type=int, default=-1)
    training.add_argument('views', type=Path)
    training.add_argument('data')
    args, others = parser.parse_known_args()
    if args.verb == 'train':
        return train(args, others)
    look(args)


if __name__ == '__main__':
    run(main)
