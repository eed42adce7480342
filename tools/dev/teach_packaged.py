"""A stage of the packaged pretraining: a trained ViT's features of each photo, computed once, as targets.

    python tools/dev/teach_packaged.py look data/caltech101/train views --teacher vit_small --layer 8
    python tools/dev/teach_packaged.py train data/caltech101/train views --steps 5000 --work-dir work_dirs/taught

`look` writes a block's features of the patches of each photo and of its mirror image, whole, in about 256 patches.
`train` is configs/demo/pretrain_features.py on crops of these; it takes the arguments of tools/train.py.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.device import get_device

from beit_mm.apis.commands import train_config, train_parser, train_quietly
from beit_mm.datasets.image_folder import list_images
from beit_mm.datasets.reading import LoadImage
from beit_mm.datasets.transforms import TwoViewRandomResizedCrop, resize_bicubic
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.tokenizers.vqkd_training import BEiTTeacher
from beit_mm.registry import MODELS, TRANSFORMS
from beit_mm.terminal import run

SIDE, GRID = 16, (12, 12)  # patches along a side of a square photo that the teacher sees, and of the student's crop


def look(args: argparse.Namespace) -> None:
    """Writes VIEWS/features.npy, float16 (patches, channels), and VIEWS/photos.json: path -> first patch, grid."""
    device = torch.device(get_device())
    read, teacher = LoadImage(), BEiTTeacher(args.teacher, args.layer).to(device)
    photos, parts = {}, []
    for path in list_images(args.photos):
        image = read(dict(img_path=f'{args.photos}/{path}'))['img']
        aspect = len(image) / len(image[0])
        grid = [max(1, round(SIDE * ratio**0.5)) for ratio in (aspect, 1 / aspect)]
        pixels = torch.from_numpy(resize_bicubic(image, tuple(teacher.patch_size * side for side in grid)))
        views = torch.stack([pixels, pixels.flip(1)]).permute(0, 3, 1, 2).to(device) / 255
        with torch.autocast(device.type, torch.bfloat16):
            (features,) = teacher(views, tuple(grid))
        photos[path] = sum(map(len, parts)), *grid
        parts.append(features.flatten(0, 1).half().cpu().numpy())
    args.views.mkdir(parents=True, exist_ok=True)
    np.save(args.views / 'features.npy', np.concatenate(parts))
    (args.views / 'photos.json').write_text(json.dumps(photos))


@TRANSFORMS.register_module(force=True)
class TeacherCrop(TwoViewRandomResizedCrop):
    """Also says which part of the photo it has cut: top, left, height, width, in [0, 1], of the mirror image if so."""

    def transform(self, results: dict) -> dict:
        height, width = results['img'].shape[:2]
        (top, left, rows, columns), flip, _ = self.drawn_crop(results, height, width)
        part = top / height, (width - left - columns if flip else left) / width, rows / height, columns / width
        return dict(super().transform(results), part=part, flip=flip)


@TRANSFORMS.register_module(force=True)
class TeacherFeatures:
    """Adds the teacher's features of the part as the second view, standardised by channel."""

    def __init__(self, photos: str, views: str) -> None:
        self.folder, self.photos = photos, json.loads(Path(views, 'photos.json').read_text())
        self.features = np.load(f'{views}/features.npy', mmap_mode='r')
        self.std, self.mean = torch.std_mean(torch.from_numpy(self.features[::50].astype(np.float32)), dim=0)

    def __call__(self, results: dict) -> dict:
        first, *grid = self.photos[str(Path(results['img_path']).relative_to(self.folder))]
        number = grid[0] * grid[1]
        first += number * results['flip']
        seen = self.features[first : first + number].astype(np.float32)
        features = ((torch.from_numpy(seen) - self.mean) / self.std).T.view(1, -1, *grid)
        y, x, height, width = results['part']
        rows, columns = ((torch.arange(side) + 0.5) / side for side in GRID)
        points = torch.meshgrid(2 * (y + height * rows) - 1, 2 * (x + width * columns) - 1, indexing='ij')
        points = torch.stack(points[::-1], dim=-1)[None]  # 1, 12, 12, 2
        taken = F.grid_sample(features, points, padding_mode='border', align_corners=False)
        return dict(results, tokenizer_images=taken[0].permute(1, 2, 0).half().numpy())


@MODELS.register_module(force=True)
class TaughtPretrainer(BEiTPretrainer):
    """Predicts the added features of all patches twice: from the last block, and from the one that verbs take."""

    def __init__(self, head: dict, **options: Any) -> None:
        super().__init__(head=head, **options)
        self.middle_head = MODELS.build(head)

    def loss(self, inputs: dict) -> dict[str, torch.Tensor]:
        targets, first = inputs['tokenizer_images'].flatten(2).mT, self.backbone.num_prefix_tokens
        middle, last = (hidden[:, first:] for hidden in self.backbone(inputs['images'], inputs['mask']))
        values = self.head.loss(last, targets, None)
        return dict(values, loss_middle=self.middle_head.loss(middle, targets, None)['loss'])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('verb', choices=['look', 'train'])
    parser.add_argument('photos', help='folder of photos')
    parser.add_argument('views', type=Path, help='folder of the features')
    parser.add_argument('--teacher', help='look: a plain ViT')
    parser.add_argument('--layer', type=int, default=-1, help='look: its block, from 0')
    args, others = parser.parse_known_args()
    if args.verb == 'look':
        return look(args)
    config: Any = train_config(train_parser().parse_args(['demo/pretrain_features', '--no-validate', *others]))
    config.train_dataloader.dataset.update(data_root=args.photos, data_prefix='')
    steps = config.train_dataloader.dataset.pipeline
    steps[1].type = 'beit_mm.TeacherCrop'
    steps.insert(-1, dict(type='beit_mm.TeacherFeatures', photos=args.photos, views=str(args.views)))
    config.model.type, config.model.target_generator = 'beit_mm.TaughtPretrainer', None
    config.model.backbone.out_indices = (2, 4)
    config.model.head.update(target_dims=np.load(args.views / 'features.npy', 'r').shape[1], loss='cosine')
    train_quietly(config, 'taught')


if __name__ == '__main__':
    run(main)
