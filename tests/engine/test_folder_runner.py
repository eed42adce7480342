"""One data_root on the command line is enough for a config with FolderRunner."""

import shutil
from pathlib import Path

import pytest
from helpers import ROOT
from mmengine.config import Config
from mmengine.registry import RUNNERS

from beit_mm.engine import FolderRunner


@pytest.fixture
def tree(images: Path, tmp_path: Path) -> Path:
    """Three classes of two images to train on, two of one to look at."""
    root = tmp_path / 'tree'
    for index, place in enumerate(('train/ant', 'train/bee', 'train/cat', 'val/ant', 'val/bee', 'val/cat')):
        (root / place).mkdir(parents=True)
        for image in (2 * index, 2 * index + 1):
            shutil.copy(images / f'{image:02}.jpg', root / place)
    return root


def demo(root: Path, work_dir: Path, **options: object) -> Config:
    cfg = Config.fromfile(ROOT / 'configs/demo/finetune_folder.py')
    cfg.merge_from_dict(
        {
            'data_root': str(root),
            'model.backbone.init_cfg': None,
            'train_dataloader.batch_size': 3,
            'train_dataloader.num_workers': 0,
            'train_dataloader.persistent_workers': False,
            'val_dataloader.num_workers': 0,
            'val_dataloader.persistent_workers': False,
            'train_cfg.max_epochs': 1,
            'train_cfg.val_interval': 1,
            'default_hooks.checkpoint.interval': 1,
            **options,
        }
    )
    cfg.work_dir, cfg.launcher = str(work_dir), 'none'
    cfg.experiment_name = work_dir.parent.name  # the default, the time in seconds, is that of the test before too
    return cfg


def test_data_root_reaches_every_dataset_and_the_classes_are_counted(tree, tmp_path):
    cfg = demo(tree, tmp_path / 'work')
    runner = RUNNERS.build(cfg)
    assert isinstance(runner, FolderRunner)
    runner.train()
    assert runner.train_dataloader.dataset.metainfo['classes'] == ('ant', 'bee', 'cat')
    assert len(runner.train_dataloader.dataset) == len(runner.val_dataloader.dataset) == 6
    assert runner.model.head.fc.out_features == runner.model.data_preprocessor.num_classes == 3
    assert runner.cfg.test_dataloader.dataset.data_root == str(tree)  # is what a checkpoint remembers
    assert cfg.model.head.num_classes == 2 and 'data_root' not in cfg.train_dataloader.dataset  # the caller's stays


def test_without_held_out_images_there_is_no_validation(tree, tmp_path):
    shutil.rmtree(tree / 'val')
    runner = RUNNERS.build(demo(tree, tmp_path / 'work'))
    runner.train()
    assert runner.val_loop is None and (tmp_path / 'work/epoch_1.pth').exists()
    (log,) = (tmp_path / 'work').glob('*/*.log')
    assert f"No folder '{tree}/val': training without validation." in log.read_text()


def test_a_config_without_classes(images, tmp_path):
    (tmp_path / 'images').mkdir()
    (tmp_path / 'images/train').symlink_to(images)
    cfg = Config.fromfile(ROOT / 'configs/demo/dvae.py')
    cfg.merge_from_dict(
        {
            'data_root': str(tmp_path / 'images'),
            'train_dataloader.num_workers': 0,
            'train_dataloader.persistent_workers': False,
            'train_dataloader.batch_size': 4,
        }
    )
    cfg.work_dir, cfg.launcher = str(tmp_path / 'work'), 'none'
    runner = RUNNERS.build(cfg)
    assert len(runner.build_dataloader(runner.cfg.train_dataloader).dataset) == 12
    assert runner.val_loop is None and 'data_root' not in cfg.train_dataloader.dataset


def test_a_dataset_may_have_a_root_of_its_own(tree, tmp_path):
    elsewhere = tmp_path / 'elsewhere'
    shutil.copytree(tree / 'val', elsewhere / 'val')
    runner = RUNNERS.build(demo(tree, tmp_path / 'work', **{'val_dataloader.dataset.data_root': str(elsewhere)}))
    assert runner.cfg.val_dataloader.dataset.data_root == str(elsewhere)
    assert runner.cfg.train_dataloader.dataset.data_root == str(tree)


def test_an_unreadable_image_is_replaced_and_listed(tree, tmp_path):
    broken = tree / 'train/bee/00.jpg'
    broken.write_bytes(b'no image')
    RUNNERS.build(demo(tree, tmp_path / 'work', **{'train_cfg.max_epochs': 2})).train()
    assert (tmp_path / 'work/unreadable_images.txt').read_text() == f'{broken}\n'


def test_fewer_images_than_a_batch_are_named(tree, tmp_path):
    runner = RUNNERS.build(demo(tree, tmp_path / 'work', **{'train_dataloader.batch_size': 7}))
    with pytest.raises(ValueError, match='tree/train has 6 images, less than one batch of 7 for each of 1 processes'):
        runner.train()


def test_a_test_needs_no_images_to_train_on(tree, tmp_path):
    RUNNERS.build(demo(tree, tmp_path / 'work')).train()
    shutil.rmtree(tree / 'train')
    cfg = demo(tree, tmp_path / 'work', load_from=str(tmp_path / 'work/epoch_1.pth'))
    runner = RUNNERS.build(cfg)
    assert runner.model.head.fc.out_features == 3
    assert 'accuracy/top1' in runner.test()


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder '.*nowhere/train'; expected"):
        RUNNERS.build(demo(tmp_path / 'nowhere', tmp_path / 'work'))
