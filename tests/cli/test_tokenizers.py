"""Tokenizers on the command line: trained with a moving average and tested, on a CPU."""

import json
import re
from pathlib import Path

import pytest
import torch
from helpers import NO_WORKERS, run_tool

from beit_mm.models import DiscreteVAE

DALLE = 'dvae/dalle_8k_in1k'
NARROW = dict(hidden=8, vocab_size=32, embed_dims=16)


def test_the_average_of_the_weights_is_kept_and_tested(images, tmp_path, monkeypatch):
    """DALL-E's training made small: four steps on twelve images."""
    monkeypatch.chdir(tmp_path)
    options = ['--cfg-options', *NO_WORKERS, *(f'model.{name}={value}' for name, value in NARROW.items())]
    for name in (f'dataset.data_root={images}', 'dataset.pipeline.1.size=16', 'batch_size=4'):
        options += [f'{split}_dataloader.{name}' for split in ('train', 'val', 'test')]
    options += ['train_cfg.max_iters=4', 'train_cfg.val_interval=4', 'optim_wrapper.optimizer.lr=0.01']
    hooks = ('checkpoint.interval=1', 'checkpoint.max_keep_ckpts=-1', 'ema.momentum=0.25')
    options += [f'default_hooks.{option}' for option in hooks]
    run_tool('train.py', DALLE, *options)
    work = Path('work_dirs/dalle_8k_in1k')
    log = next(work.glob('*/*.log')).read_text()
    files = [torch.load(work / f'iter_{step}.pth', weights_only=True)['ema_state_dict'] for step in range(1, 5)]
    trained = [{name.removeprefix('module.'): x for name, x in file.items()} for file in files]
    average = trained[0]  # the average begins with the first step's weights
    for weights in trained[1:]:
        average = {name: 0.75 * average[name] + 0.25 * weights[name] for name in average if name != 'steps'}
    used = DiscreteVAE('dalle', loss='laplace', checkpoint=str(work / 'iter_4.pth'), **NARROW)
    for name, tensor in average.items():
        torch.testing.assert_close(used.state_dict()[name], tensor, msg=name)
        assert not name.endswith('.w') or not torch.equal(tensor, trained[-1][name])
    assert used.steps == 4  # of the schedules

    run_tool('test.py', DALLE, work / 'iter_4.pth', '--out', 'metrics.json', *options)
    metrics = json.loads(Path('metrics.json').read_text())
    for name in ('recon_mae_01', 'recon_mae_pm1_soft', 'codes_share', 'posterior_entropy'):
        validated = re.search(rf'Iter\(val\).* tokenizer/{name}: ([\d.]+)', log)[1]
        assert f'{metrics[f"tokenizer/{name}"]:.4f}' == validated
    assert (work / 'pictures/test.png').is_file()

    with pytest.raises(SystemExit, match='no CHECKPOINT given'):
        run_tool('test.py', DALLE, *options)
