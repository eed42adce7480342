"""What the lines of a training say."""

from types import SimpleNamespace

import numpy as np

from beit_mm.engine.steps import ProgressHook


def test_a_validation_prints_the_numbers_that_mmseg_gives_and_the_first_picture(tmp_path, capsys, monkeypatch):
    metrics = {'aAcc': np.float32(52.0), 'mIoU': np.float32(17.5), 'classes': ['sky']}
    hook, line = ProgressHook('upernet'), 'upernet {}, held-out images:  aAcc 52  mIoU 17.5\n'
    hook.after_val_epoch(SimpleNamespace(iter=200, work_dir=tmp_path), metrics)
    assert capsys.readouterr().out == line.format(200)
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'pictures').mkdir()
    for step in (300, 400):
        (tmp_path / f'pictures/iter_{step}.png').touch()
        hook.after_val_epoch(SimpleNamespace(iter=step, work_dir=tmp_path), metrics)
    first = 'upernet: first picture, pictures/iter_300.png\n'
    assert capsys.readouterr().out == line.format(300) + first + line.format(400)
