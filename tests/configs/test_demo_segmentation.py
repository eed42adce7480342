"""The demo's segmentation configs: one step and a test on a folder in CamVid's layout, whose classes are found out."""
from pathlib import Path

import numpy as np
import pytest
from helpers import ROOT
from mmengine.config import Config
from mmengine.registry import RUNNERS
from PIL import Image

from beit_mm.apis.segment import Segmenter

CLASSES = ('sky', 'building', 'pole')


@pytest.fixture(scope='module')
def photos(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp('camvid')
    rng = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for kind in ('images', 'annotations'):
            (folder / kind / split).mkdir(parents=True)
        for index in range(2):
            photo = rng.integers(0, 256, (40, 50, 3), dtype=np.uint8)
            labels = rng.integers(0, len(CLASSES) + 1, (40, 50), dtype=np.uint8)
            Image.fromarray(photo).save(folder / f'images/{split}/{index}.jpg')
            Image.fromarray(labels).save(folder / f'annotations/{split}/{index}.png')
    table = [f'{index}\t{name}' for index, name in enumerate(CLASSES, start=1)]
    (folder / 'classes.txt').write_text('\n'.join(['Idx\tName', *table]) + '\n')
    return folder


@pytest.mark.parametrize('name', ['segment_setr_pup', 'segment_upernet'])
def test_one_step_on_own_classes(name, photos, tmp_path):
    cfg = Config.fromfile(ROOT / f'configs/demo/{name}.py')
    options = {'data_root': str(photos), 'model.backbone.init_cfg': None, 'train_cfg.max_iters': 1,
               'train_cfg.val_interval': 1, 'default_hooks.checkpoint.interval': 1, 'train_dataloader.batch_size': 2}
    for loader, split in (('train', 'training'), ('val', 'validation'), ('test', 'validation')):
        dataset = f'{loader}_dataloader.dataset'
        options |= {f'{dataset}.classes': 'classes.txt', f'{dataset}.data_prefix.img_path': f'images/{split}',
                    f'{dataset}.data_prefix.seg_map_path': f'annotations/{split}',
                    f'{loader}_dataloader.num_workers': 0, f'{loader}_dataloader.persistent_workers': False}
    cfg.merge_from_dict(options)
    assert len(cfg.param_scheduler) == 2 and cfg.param_scheduler[1].end == 1200 + 1  # as the run that the header names
    cfg.work_dir, cfg.launcher, cfg.experiment_name = str(tmp_path), 'none', f'{name}_{tmp_path.name}'
    runner = RUNNERS.build(cfg)
    assert runner.model.decode_head.num_classes == len(CLASSES)
    runner.train()
    segmenter = Segmenter(tmp_path / 'iter_1.pth', device='cpu')
    assert segmenter.classes == CLASSES and len(segmenter.palette) == len(CLASSES)
    result, = segmenter(photos / 'images/training/0.jpg')
    assert result['labels'].shape == (40, 50) and result['labels'].max() < len(CLASSES)
