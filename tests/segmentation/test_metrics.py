"""The IoU of each class, in the logs of a training, as what `save_best` follows, and in the file of a test."""

import json
import math
import re

import pytest
import torch
from helpers import run_tool, train
from label_maps import CLASSES, make_label_maps, mask_training

from beit_mm.engine.logs import ProgressHook
from beit_mm.pictures import read_scalars
from beit_mm.segmentation import IoUMetric


def test_the_iou_of_each_class_by_hand():
    metric = IoUMetric()
    metric.dataset_meta = dict(classes=['a', 'b c', 'never'])
    for predicted, labels in (([0, 0, 0, 1], [0, 0, 1, 1]), ([1, 1, 0, 0], [1, 255, 0, 1])):
        pair = dict(pred_sem_seg=torch.tensor([predicted]), gt_sem_seg=torch.tensor([labels]))
        metric.process({}, [{name: dict(data=data) for name, data in pair.items()}])
    found = metric.evaluate(2)
    assert [found['IoU/a'], found['IoU/b c']] == [60, 50] and math.isnan(found['IoU/never'])
    assert found['mIoU'] == 55 and {'aAcc', 'mAcc'} < {*found}


def test_a_training_keeps_the_best_weights_for_a_class(tmp_path, capsys):
    cfg = mask_training(make_label_maps(tmp_path / 'data'), tmp_path / 'run')
    cfg.train_cfg.update(max_iters=2, val_interval=1)
    cfg.default_hooks.checkpoint.save_best = 'IoU/green'
    cfg.visualizer.vis_backends = [dict(type='LocalVisBackend')]
    train(cfg, ProgressHook('run'))
    (line,) = re.findall('run 2, held-out images.*', capsys.readouterr().out)
    assert 'mIoU' in line and 'IoU/' not in line  # there may be hundreds of classes
    names = [f'IoU/{name}' for name in CLASSES]
    _, validations = read_scalars(tmp_path / 'run')
    greens = {step: row['IoU/green'] for step, row in validations.items()}
    best = max(greens, key=lambda step: greens[step])
    assert [file.name for file in (tmp_path / 'run').glob('best*')] == [f'best_IoU_green_iter_{best}.pth']
    out, cfg.test_dataloader = tmp_path / 'metrics.json', cfg.val_dataloader
    cfg.dump(tmp_path / 'config.py')
    run_tool('test.py', tmp_path / 'config.py', *(tmp_path / 'run').glob('best*'), '--out', out, '--work-dir', tmp_path)
    found = json.loads(out.read_text(), parse_constant=pytest.fail)
    assert {*names} < {*found} and found['IoU/green'] == pytest.approx(greens[best], abs=0.02)
