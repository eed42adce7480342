"""The segmentation configs for one's own folders: one step and a test on a folder in CamVid's layout."""

from pathlib import Path

import numpy as np
import pytest
from helpers import NO_WORKERS, set_num_classes, with_options
from mmengine.config import Config
from mmengine.registry import RUNNERS
from mmengine.runner import Runner
from PIL import Image

from beit_mm.apis.inferencers import SegmentationInferencer

CLASSES = ('sky', 'building', 'pole')
IMAGES = dict(plain=(40, 50), odd=(33, 47), wide=(20, 400), dot=(1, 1), gray=(50, 60), cmyk=(60, 50), line=(1, 50))
MODES = {'gray': 'L', 'cmyk': 'CMYK'}


@pytest.fixture(scope='module')
def images(tmp_path_factory) -> Path:
    """Images of all kinds, `wide` with the shape of 2000 x 100 pixels."""
    folder = tmp_path_factory.mktemp('camvid')
    rng = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for kind in ('images', 'annotations'):
            (folder / kind / split).mkdir(parents=True)
        for name, size in IMAGES.items():
            image = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
            labels = rng.integers(0, len(CLASSES) + 1, size, dtype=np.uint8)
            image.convert(MODES.get(name, 'RGB')).save(folder / f'images/{split}/{name}.jpg')
            Image.fromarray(labels).save(folder / f'annotations/{split}/{name}.png')
    table = [f'{index}\t{name}' for index, name in enumerate(CLASSES, start=1)]
    (folder / 'classes.txt').write_text('\n'.join(['Idx\tName', *table]) + '\n')
    return folder


def short_run(name: str, images: Path, work_dir: Path) -> Config:
    """One step on these images."""
    folders = [f'{loader}_dataloader.dataset.data_root={images}' for loader in ('train', 'val', 'test')]
    short = ['train_cfg.max_iters=1', 'train_cfg.val_interval=1', 'default_hooks.checkpoint.interval=1']
    short += [f'train_dataloader.batch_size={len(IMAGES)}', 'model.backbone.init_cfg=None']
    cfg = with_options(f'demo/{name}.py', [*folders, *NO_WORKERS, *short])
    set_num_classes(cfg.model, len(CLASSES))
    cfg.work_dir, cfg.launcher, cfg.experiment_name = str(work_dir), 'none', f'{name}_{work_dir.name}'
    return cfg


@pytest.mark.parametrize('name', ['camvid_setr_pup', pytest.param('camvid_upernet', marks=pytest.mark.slow)])
def test_one_step_on_own_classes(name, images, tmp_path):
    runner = RUNNERS.build(short_run(name, images, tmp_path))
    assert runner.model.decode_head.num_classes == len(CLASSES)
    before = {key: tensor.clone() for key, tensor in runner.model.named_parameters()}
    runner.train()
    moved = [key for key, tensor in runner.model.named_parameters() if not tensor.equal(before[key])]
    assert any(key.startswith('backbone.') for key in moved) and any(key.startswith('decode_head.') for key in moved)
    segmenter = SegmentationInferencer(tmp_path / 'iter_1.pth', device='cpu')
    assert segmenter.classes == CLASSES and len(segmenter.palette) == len(CLASSES)
    for image, size in IMAGES.items():
        (result,) = segmenter(images / f'images/validation/{image}.jpg')
        assert result['labels'].shape == size and result['labels'].max() < len(CLASSES)
    cfg = short_run(name, images, tmp_path / 'test')  # as mmseg's test.py goes about it
    cfg.load_from = str(tmp_path / 'iter_1.pth')
    assert Runner.from_cfg(cfg).test()['mIoU'] == runner.message_hub.get_scalar('val/mIoU').current()
