"""Model, data sets and checkpoint that disagree about the classes are stopped before the first step."""

import shutil
from pathlib import Path

import pytest
import torch
from helpers import make_runner
from labelled import classifier_config, make_images


@pytest.fixture
def cfg(tmp_path):
    cfg = classifier_config(make_images(tmp_path / 'images', per_class=2), tmp_path / 'work')
    cfg.train_cfg.max_epochs = 1
    cfg.default_hooks.checkpoint.interval = 1
    return cfg


def refused(cfg, message, loop='train'):
    runner = make_runner(cfg)
    with pytest.raises(ValueError, match=message) as error:
        getattr(runner, loop)()
    assert '\n' not in str(error.value)


def test_number_of_classes(cfg):
    cfg.model.head.num_classes = cfg.model.data_preprocessor.num_classes = 4
    refused(
        cfg,
        r'images/train has 3 classes \(blue to red\), the model is built for 4; set '
        r'model.data_preprocessor.num_classes=3 model.head.num_classes=3, or give the right folder',
    )
    refused(cfg, 'images/val has 3 classes', loop='test')


def test_a_class_that_one_split_lacks(cfg, tmp_path):
    shutil.rmtree(tmp_path / 'images/val/green')
    refused(
        cfg,
        "images/val has 2 classes, .*images/train has 3, and class 1 is 'red' in the first, 'green' in the "
        'second; .*images/val lacks green; give the datasets one list',
    )
    cfg.train_dataloader.dataset.classes = cfg.val_dataloader.dataset.classes = ['blue', 'green', 'red']
    make_runner(cfg).train()  # an explicit list may have classes of which there is nothing to test


def test_classes_of_the_checkpoint(cfg, tmp_path):
    make_runner(cfg).train()
    path = tmp_path / 'work/epoch_1.pth'
    assert torch.load(path, weights_only=True)['meta']['dataset_meta']['classes'] == ('blue', 'green', 'red')
    cfg.load_from = str(path)
    cfg.test_dataloader.dataset.classes = ['red', 'green', 'blue']
    refused(cfg, "the checkpoint has 3, and class 0 is 'red' in the first, 'blue' in the second", loop='test')
    cfg.test_dataloader.dataset.classes = None
    (tmp_path / 'images/val/green').rename(tmp_path / 'green')
    cfg.model.head.num_classes = 2
    refused(cfg, 'images/val lacks green', loop='test')  # said before the weights are found not to fit
    cfg.model.head.num_classes = 3
    (tmp_path / 'green').rename(tmp_path / 'images/val/green')
    for split in Path(tmp_path / 'images').iterdir():  # other names of the same classes are no contradiction
        for name in ('blue', 'green', 'red'):
            (split / name).rename(split / f'n0_{name}')
    make_runner(cfg).test()
