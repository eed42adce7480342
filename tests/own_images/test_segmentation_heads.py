"""`finetune --head`: each head from plan to labels, file and test."""

from pathlib import Path

import numpy as np
import pytest
import torch
from label_maps import make_label_maps
from labelled import make_images
from mmengine.config import Config
from mmengine.registry import DefaultScope
from peers import dinov2_layout
from PIL import Image

import beit_mm
from beit_mm import __main__ as command
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.errors import UserError
from beit_mm.own_images import images as finding
from beit_mm.own_images import run as runs
from beit_mm.own_images.segmentation import HEADS
from beit_mm.registry import MODELS

pytestmark = pytest.mark.long

ADAPTED = [  # heads of pixels: test_adaptation.py
    pytest.param('masks', dict(lora=2), marks=pytest.mark.slow),
    pytest.param('masks_decoder', dict(freeze='all'), marks=pytest.mark.slow),
]


@pytest.fixture(scope='module')
def folder(tmp_path_factory) -> Path:
    return make_label_maps(tmp_path_factory.mktemp('maps') / 'maps', 12)


@pytest.mark.parametrize(('head', 'options'), [('setr_pup', {}), ('masks', {}), ('masks_decoder', {}), *ADAPTED])
def test_a_run_ends_and_its_result_is_used(head, options, folder, base, tmp_path, monkeypatch, capsys):
    has_report = head == 'masks' and not options
    if not has_report:
        monkeypatch.setattr(runs.Run, 'write_report', lambda *_: None)
    run = tmp_path / 'run'
    weights = beit_mm.finetune(folder, run, base, epochs=1, batch=4, workers=0, head=head, **options)
    assert not has_report or ' mIoU ' in (run / 'report.md').read_text()
    (said,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith('head')]
    assert said.split() == ['head', head]
    built = Config.fromfile(run / 'config.py').model.decode_head
    assert built.type.endswith('EfficientSETRUPHead' if head == 'setr_pup' else 'MaskClassificationHead')
    assert built.get('where') == dict(masks='backbone', masks_decoder='decoder').get(head)
    images = folder / 'images/validation'
    assert len(beit_mm.segment(weights, images, tmp_path / 'maps')) == 12
    last = max((run / 'finetune').glob('iter_*.pth'), key=lambda path: int(path.stem.partition('_')[2]))
    command.main(['test', str(run / 'config.py'), str(last), '--work-dir', str(tmp_path / 'test')])
    labels = np.asarray(Image.open(tmp_path / 'maps/labels/0.png'))
    assert labels.shape == (40, 56) and labels.max() < 3


@pytest.mark.parametrize('head', HEADS)
def test_the_heads_of_a_wide_model_build_and_a_call_with_another_is_refused(head, folder, tmp_path, monkeypatch):
    """Of DINOv2 with patches of 14 pixels."""
    init = dinov2_layout(tmp_path / 'dinov2.pth', 256, 3)
    monkeypatch.setattr(runs, 'make_runner', lambda *_: exit())
    options, words = dict(init=init, epochs=1), ['--init', init, '--epochs', '1', '--head', head]
    with pytest.raises(SystemExit):
        command.main(['finetune', str(folder), '--out', str(tmp_path / 'run'), *words])
    with DefaultScope.overwrite_default_scope('mmseg'), torch.device('meta'):
        stage = 'head_config.py' if head == 'linear' else 'config.py'  # a linear head is first fitted
        MODELS.build(Config.fromfile(tmp_path / 'run' / stage).model)
    with pytest.raises(SystemExit):
        beit_mm.finetune(folder, tmp_path / 'run', **options)
    other = 'linear' if head != 'linear' else 'masks'
    with pytest.raises(UserError, match=f'head={head}, this call says head={other}'):
        beit_mm.finetune(folder, tmp_path / 'run', head=other, **options)


def test_masks_are_left_out_step_by_step_of_a_run_of_minutes(folder, base, tmp_path, monkeypatch):
    """By the share of the time, as the schedules: at its end no query is masked."""
    shares = []
    monkeypatch.setattr(runs.Run, 'write_report', lambda *_: None)
    progress = beit_mm.segmentation.mask_head.progress_of
    monkeypatch.setattr('beit_mm.segmentation.mask_head.progress_of', lambda: shares.append(progress()) or shares[-1])
    beit_mm.finetune(folder, tmp_path / 'run', base, minutes=0.03, batch=4, workers=0, head='masks')
    assert shares == sorted(shares) and shares[0] == 0 and 0.8 < shares[-1] <= 1
    assert Checkpoint.open(tmp_path / 'run/finetuned.pth').meta['iter'] >= 20


def test_options_that_do_not_suit_the_images_are_refused(folder, base, tmp_path, monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)
    with pytest.raises(UserError, match='no label maps; leave out --head'):
        beit_mm.finetune(make_images(tmp_path / 'images', 12) / 'train', tmp_path / 'a', base, head='masks')
    with pytest.raises(UserError, match="'mask'.*masks_decoder"):
        beit_mm.finetune(folder, tmp_path / 'b', base, head='mask')
    with pytest.raises(UserError, match='has label maps; leave out --balance'):
        beit_mm.finetune(folder, tmp_path / 'c', base, balance=True)
