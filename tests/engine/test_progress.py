"""What the lines of a training say."""

from types import SimpleNamespace

import numpy as np

from beit_mm.engine.steps import ProgressHook


def test_a_validation_prints_the_numbers_that_mmseg_gives(capsys):
    metrics = {'aAcc': np.float32(52.0), 'mIoU': np.float32(17.5), 'classes': ['sky']}
    ProgressHook('upernet').after_val_epoch(SimpleNamespace(iter=200), metrics)
    assert capsys.readouterr().out == 'upernet 200, held-out images:  aAcc 52  mIoU 17.5\n'
