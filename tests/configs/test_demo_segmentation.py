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
PHOTOS = {'plain': (40, 50), 'odd': (33, 47), 'wide': (20, 400), 'dot': (1, 1), 'gray': (50, 60), 'cmyk': (60, 50)}
MODES = {'gray': 'L', 'cmyk': 'CMYK'}


@pytest.fixture(scope='module')
def photos(tmp_path_factory) -> Path:
    """Photos of all kinds, the widest with the shape of 2000 x 100 pixels."""
    folder = tmp_path_factory.mktemp('camvid')
    rng = np.random.default_rng(0)
    for split in ('training', 'validation'):
        for kind in ('images', 'annotations'):
            (folder / kind / split).mkdir(parents=True)
        for name, size in PHOTOS.items():
            photo = Image.fromarray(rng.integers(0, 256, (*size, 3), dtype=np.uint8))
            labels = rng.integers(0, len(CLASSES) + 1, size, dtype=np.uint8)
            photo.convert(MODES.get(name, 'RGB')).save(folder / f'images/{split}/{name}.jpg')
            Image.fromarray(labels).save(folder / f'annotations/{split}/{name}.png')
    table = [f'{index}\t{name}' for index, name in enumerate(CLASSES, start=1)]
    (folder / 'classes.txt').write_text('\n'.join(['Idx\tName', *table]) + '\n')
    return folder


def runner_of(name: str, photos: Path, work_dir: Path):
    cfg = Config.fromfile(ROOT / f'configs/demo/{name}.py')
    options = {'data_root': str(photos), 'model.backbone.init_cfg': None, 'train_cfg.max_iters': 1,
               'train_cfg.val_interval': 1, 'default_hooks.checkpoint.interval': 1,
               'train_dataloader.batch_size': len(PHOTOS)}
    for loader in ('train', 'val', 'test'):
        options |= {f'{loader}_dataloader.num_workers': 0, f'{loader}_dataloader.persistent_workers': False}
    cfg.merge_from_dict(options)
    assert len(cfg.param_scheduler) == 2 and cfg.param_scheduler[1].end == 600 + 1  # as the run that the header names
    cfg.work_dir, cfg.launcher, cfg.experiment_name = str(work_dir), 'none', f'{name}_{work_dir.name}'
    return RUNNERS.build(cfg)


@pytest.mark.parametrize('name', ['camvid_setr_pup', 'camvid_upernet'])
def test_one_step_on_own_classes(name, photos, tmp_path):
    runner = runner_of(name, photos, tmp_path)
    assert runner.model.decode_head.num_classes == len(CLASSES)
    before = {key: tensor.clone() for key, tensor in runner.model.named_parameters()}
    runner.train()
    moved = [key for key, tensor in runner.model.named_parameters() if not tensor.equal(before[key])]
    assert any(key.startswith('backbone.') for key in moved) and any(key.startswith('decode_head.') for key in moved)
    segmenter = Segmenter(tmp_path / 'iter_1.pth', device='cpu')
    assert segmenter.classes == CLASSES and len(segmenter.palette) == len(CLASSES)
    for photo, size in PHOTOS.items():
        result, = segmenter(photos / f'images/validation/{photo}.jpg')
        assert result['labels'].shape == size and result['labels'].max() < len(CLASSES)


@pytest.mark.parametrize(('label', 'message'), [
    (None, "no annotation '.*odd.png' for '.*odd.jpg'; 1 of 6 photos have none"),
    (np.zeros((47, 33), np.uint8), r'odd.png is 33 x 47 pixels, its photo .*odd.jpg is 47 x 33; expected the same'),
])
def test_an_annotation_that_is_missing_or_of_another_size_stops_the_run(label, message, photos, tmp_path):
    path = photos / 'annotations/training/odd.png'
    kept = path.read_bytes()
    try:
        path.unlink()
        if label is not None:
            Image.fromarray(label).save(path)
        with pytest.raises((FileNotFoundError, ValueError), match=message):
            runner_of('camvid_upernet', photos, tmp_path).train()
    finally:
        path.write_bytes(kept)
