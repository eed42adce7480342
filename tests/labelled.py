"""Labelled images that can be told apart by their colour, and a narrow classifier of them."""

from pathlib import Path

import numpy as np
import torch
from mmengine.config import Config
from PIL import Image

from beit_mm.registry import MODELS

CLASSES = ('blue', 'green', 'red')
TEST_PIPELINE = [
    dict(type='beit_mm.LoadImage'),
    dict(type='ResizeEdge', scale=36, edge='short', backend='pillow', interpolation='bicubic'),
    dict(type='CenterCrop', crop_size=32),
    dict(type='PackInputs'),
]
ARCH = dict(embed_dims=32, num_layers=3, num_heads=4)
BACKBONE = dict(type='beit_mm.BEiTBackbone', arch=ARCH, img_size=32, patch_size=8)


def save_backbone(path: Path, **options: object) -> str:
    """Saves a pretrained backbone of three blocks with random weights, and says where."""
    weights = MODELS.build(dict(BACKBONE, **options)).state_dict()
    state = dict(state_dict=weights, meta=dict(architecture=dict(num_heads=4)))
    torch.save(state, path)
    return str(path)


def make_images(folder: Path, per_class: int = 6) -> Path:
    """Makes train/ and val/, each with three class folders of images of 36 x 40 pixels."""
    rng = np.random.default_rng(0)
    for split in ('train', 'val'):
        for channel, name in zip((2, 1, 0), CLASSES, strict=True):
            (folder / split / name).mkdir(parents=True)
            for index in range(per_class):
                pixels = rng.integers(0, 120, (36, 40, 3), dtype=np.uint8)
                pixels[..., channel] += 130
                Image.fromarray(pixels).save(folder / split / name / f'{index}.png')
    return folder


def loader(folder: Path, split: str, **changes: object) -> dict:
    """Config of a data loader."""
    data = dict(type='beit_mm.ImageFolder', data_root=str(folder), data_prefix=split, test_mode=split == 'val')
    return dict(
        batch_size=4,
        num_workers=0,
        persistent_workers=False,
        collate_fn=dict(type='default_collate'),
        sampler=dict(type='beit_mm.SeededSampler', shuffle=split == 'train'),
        dataset=dict(data, pipeline=TEST_PIPELINE) | changes,
    )


def classifier_config(folder: Path, work_dir: Path) -> Config:
    """A fine-tuning of two epochs."""
    hooks = 'FitCheckHook', 'ThroughputHook', 'UnreadableImagesHook', 'CheckpointMetaHook'
    optimizer = dict(type='AdamW', lr=1e-3)
    config = dict(
        default_scope='mmpretrain',
        model=dict(
            type='ImageClassifier',
            data_preprocessor=dict(type='ClsDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3),
            backbone=dict(BACKBONE, out_type='avg_featmap'),
            head=dict(type='LinearClsHead', num_classes=3, in_channels=32),
        ),
        train_dataloader=loader(folder, 'train'),
        val_dataloader=loader(folder, 'val'),
        test_dataloader=loader(folder, 'val'),
        val_evaluator=dict(type='Accuracy', topk=1),
        test_evaluator=dict(type='Accuracy', topk=1),
        train_cfg=dict(type='beit_mm.EpochLoop', max_epochs=2, val_interval=2),
        val_cfg={},
        test_cfg={},
        optim_wrapper=dict(type='beit_mm.AutocastOptimWrapper', dtype='float32', optimizer=optimizer),
        default_hooks=dict(checkpoint=dict(type='beit_mm.CheckpointHook', interval=2)),
        custom_hooks=[dict(type=f'beit_mm.{name}') for name in hooks],
        model_wrapper_cfg=dict(type='MMDistributedDataParallel', device_ids=None),
        work_dir=str(work_dir),
        launcher='none',
    )
    return Config(config)
