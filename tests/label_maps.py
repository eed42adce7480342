"""Images with label maps whose classes can be told apart by their colour, in ADE20K's layout."""

from pathlib import Path

import numpy as np
from helpers import ROOT
from mmengine.config import Config
from PIL import Image

CLASSES = ['red', 'green', 'blue']


def make_label_maps(folder: Path, number: int = 4, size: tuple[int, int] = (40, 56)) -> Path:
    """Images of `size` (height, width) in noisy rectangles of the classes' colours; 0 is unlabelled, classes from 1."""
    rng = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for part in ('images', 'annotations'):
            (folder / part / split).mkdir(parents=True)
        for index in range(number):
            labels = rng.integers(1, 4, (2, 3)).repeat(size[0] // 2, 0).repeat(-(-size[1] // 3), 1)[:, : size[1]]
            pixels = rng.integers(0, 100, (*size, 3))
            pixels += 150 * np.eye(3, dtype=int)[labels - 1]
            labels[:3] = 0
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f'images/{split}/{index}.png')
            Image.fromarray(labels.astype(np.uint8)).save(folder / f'annotations/{split}/{index}.png')
    (folder / 'classes.txt').write_text('\n'.join(CLASSES))
    return folder


def options(folder: Path, split: str) -> dict:
    """Of a SegmentationFolder."""
    prefix = dict(img_path=f'images/{split}', seg_map_path=f'annotations/{split}')
    return dict(data_root=str(folder), classes='classes.txt', reduce_zero_label=True, data_prefix=prefix)


def mask_training(folder: Path, work_dir: Path, where: str = 'decoder') -> Config:
    """A training of a narrow mask head on the four images of `make_label_maps`, seven steps of two."""
    cfg = Config.fromfile(ROOT / 'configs/demo/segment_masks.py')
    cfg.model.data_preprocessor.size = cfg.model.test_cfg.crop_size = cfg.model.test_cfg.stride = (32, 32)
    arch = dict(embed_dims=32, num_layers=4, num_heads=4)
    cfg.model.backbone.update(arch=arch, img_size=32, out_indices=(1, 2, 3), drop_path_rate=0.3, init_cfg=None)
    head = dict(where=where, in_channels=32, in_index=(0, 2), num_classes=3, num_queries=6, num_points=100)
    cfg.model.decode_head.update(head)
    if where == 'backbone':
        cfg.model.backbone.out_indices = -1
        cfg.model.decode_head.in_index = -1
    for loader, split in ((cfg.train_dataloader, 'training'), (cfg.val_dataloader, 'validation')):
        loader.update(num_workers=0, persistent_workers=False)
        loader.dataset.update(options(folder, split))
        for step in loader.dataset.pipeline:
            if step['type'] in ('Resize', 'RandomResize'):
                step.update(scale=(2048, 40))
            if step['type'] == 'RandomCrop':
                step.update(crop_size=(32, 32))
    cfg.train_dataloader.batch_size = 2
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=7)
    cfg.param_scheduler = [dict(type='PolyLR', power=0.9, eta_min=0, by_epoch=False, begin=0, end=8)]
    cfg.work_dir, cfg.launcher = str(work_dir), 'none'
    return cfg
