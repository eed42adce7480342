"""Images of many bands from files to predictions: the three demo configs in small, the inferencer, segmentation."""

from pathlib import Path

import numpy as np
import pytest
from draw_bands import CLASSES, draw_bands
from helpers import NO_WORKERS, ROOT, run_tool

from beit_mm import ClassificationInferencer
from beit_mm.checkpoint.read import CheckpointError, read_checkpoint, write_checkpoint

NARROW = ['backbone.arch.embed_dims=32', 'backbone.arch.num_layers=2']


@pytest.fixture(scope='module')
def work(tmp_path_factory) -> Path:
    """Runs of two steps of the three configs: tokenizer, pretrained model and classifier."""
    folder = tmp_path_factory.mktemp('bands')
    draw_bands(folder / 'data', 40, 16, 56)
    tokenizer = 'target_generator.checkpoint=work_dirs/bands_dvae/iter_2.pth'
    start = 'backbone.init_cfg.checkpoint=work_dirs/bands_pretrain/iter_2.pth'
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, *options in (
            ('dvae',),
            ('pretrain', *NARROW, 'head.embed_dims=32', tokenizer),
            ('finetune', *NARROW, 'head.in_channels=32', start),
        ):
            options = [*NO_WORKERS, 'data_root=data', *(f'model.{option}' for option in options)]
            run_tool('train.py', f'demo/bands_{name}', '--steps', 2, '--cfg-options', *options)
    assert all([*(folder / f'work_dirs/bands_{name}').rglob('iter_2.png')] for name in ('dvae', 'pretrain'))
    return folder


def test_a_classifier_of_six_bands_reads_files_folders_and_arrays(work):
    classify = ClassificationInferencer(work / 'work_dirs/bands_finetune/iter_2.pth')
    assert classify.classes == CLASSES
    results = classify(work / 'data/val')
    assert len(results) == 16 and all(Path(result['path']).suffix == '.tif' for result in results)
    first, values = results[0], np.random.default_rng(0).integers(1000, 3000, (60, 70, 6)).astype(np.uint16)
    np.save(work / 'a.npy', values)
    single, array, file = classify([first['path'], values, work / 'a.npy'])
    assert single['scores'] == [[label, pytest.approx(score, abs=1e-5)] for label, score in first['scores']]
    assert array['path'] is None and array['scores'] == file['scores']
    with pytest.raises(ValueError, match='3 bands; expected 6'):
        classify(values[..., :3])
    (skipped,) = classify(ROOT / 'docs/images/attention.png', on_error='skip')
    assert 'not a TIFF file' in skipped['error']


@pytest.mark.parametrize('wrong', [dict(max_pixels=10**12), dict(low=[1e300] * 6), dict(bands=[0] * 17)])
def test_what_a_stored_config_may_say_of_bands_is_limited(work, tmp_path, wrong):
    content = read_checkpoint(work / 'work_dirs/bands_finetune/iter_2.pth')
    content['meta']['config_dict']['test_dataloader']['dataset']['pipeline'][0].update(wrong)
    write_checkpoint(tmp_path / 'a.pth', dict(state_dict=content['state_dict'], meta=content['meta']))
    with pytest.raises(CheckpointError, match=next(iter(wrong))):
        ClassificationInferencer(tmp_path / 'a.pth')
