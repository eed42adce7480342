"""tools/train.py, tools/test.py and dist_train.sh as a user runs them, on a CPU."""
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import ROOT

# The demo's model on twelve images of 48 x 64 pixels: three steps.
OPTIONS = [
    'model.target_generator.checkpoint=None', 'train_cfg.max_iters=3', 'train_cfg.val_interval=3',
    'default_hooks.logger.interval=1', 'default_hooks.checkpoint.interval=3', 'train_dataloader.batch_size=4'
]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=240,
        env=dict(os.environ, OMP_NUM_THREADS='1', PYTHON=sys.executable, PYTHONPATH=str(ROOT), **environment))


def image_options(images: Path) -> list[str]:
    return [f'{name}_dataloader.dataset.data_root={images}' for name in ('train', 'val', 'test')]


def test_train_then_test_give_the_same_numbers(images, tmp_path):
    config = str(ROOT / 'configs/demo/pretrain.py')
    options = ['--cfg-options', *OPTIONS, *image_options(images)]
    trained = run(sys.executable, str(ROOT / 'tools/train.py'), config, *options, cwd=tmp_path)
    assert trained.returncode == 0, trained.stderr[-2000:]
    assert 'eta: ' in trained.stdout and 'images_per_second: ' in trained.stdout
    work = tmp_path / 'work_dirs/pretrain'  # the default: the config's name
    checkpoint = work / 'iter_3.pth'
    tested = run(sys.executable, str(ROOT / 'tools/test.py'), config, str(checkpoint), '--out', 'metrics.json',
                 *options, cwd=tmp_path)
    assert tested.returncode == 0, tested.stderr[-2000:]
    metrics = json.loads((tmp_path / 'metrics.json').read_text())
    in_training = next(line for path in work.glob('*/*.log') for line in path.read_text().splitlines()
                       if 'Iter(val)' in line and 'mim_loss' in line)
    assert f"{metrics['mim_loss']:.4f}" == re.search(r'mim_loss: ([\d.]+)', in_training)[1]
    assert (work / 'pictures/test.png').exists()


def test_two_processes_share_the_images_and_agree(images, tmp_path):
    config = str(ROOT / 'configs/demo/pretrain.py')
    done = run('bash', str(ROOT / 'tools/dist_train.sh'), config, '2', '--cfg-options', *OPTIONS,
               'train_dataloader.batch_size=2', *image_options(images), cwd=tmp_path, CUDA_VISIBLE_DEVICES='',
               PORT='29617')
    assert done.returncode == 0, done.stderr[-2000:]
    assert '2 process(es) on the CPU with gloo' in done.stderr
    assert re.search(r'2 processes x 2 images x 1 accumulated = 4; the recipe has 32', done.stdout)
    together = re.search(r'Iter\(val\).* mim_loss: ([\d.]+)', done.stdout)[1]
    # the weights that the two agreed on give the same number in one process
    tested = run(sys.executable, str(ROOT / 'tools/test.py'), config, 'work_dirs/pretrain/iter_3.pth', '--out',
                 'metrics.json', '--cfg-options', *OPTIONS, *image_options(images), cwd=tmp_path)
    assert tested.returncode == 0, tested.stderr[-2000:]
    alone = json.loads((tmp_path / 'metrics.json').read_text())['mim_loss']
    assert float(together) == pytest.approx(alone, abs=1e-3)
    wrong = run(sys.executable, str(ROOT / 'tools/test.py'), config, 'work_dirs/pretrain/iter_3.pth', '--cfg-options',
                *OPTIONS, *image_options(images), 'model.backbone.rel_pos_bias=shared', cwd=tmp_path)
    assert wrong.returncode != 0 and 'rel_pos_bias' in wrong.stderr


def test_mim_trains_from_the_config_alone(images, tmp_path):
    """Our tools are not in that process: everything must come from the registries."""
    mim = Path(sys.executable).with_name('mim')
    done = run(str(mim), 'train', 'mmpretrain', str(ROOT / 'configs/demo/pretrain.py'), '--gpus', '0', '--launcher',
               'none', '--work-dir', 'run', '--cfg-options', *OPTIONS, *image_options(images), cwd=tmp_path,
               PATH=f'{mim.parent}:{os.environ["PATH"]}')
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / 'run/iter_3.pth').exists() and (tmp_path / 'run/pictures/iter_3.png').exists()


@pytest.mark.parametrize(('options', 'message'), [
    (['model.target_generator.checkpoint=nowhere.pth'], 'looked for nowhere.pth'),
    (['train_dataloader.dataset.data_root=no_such_folder'], "no folder 'no_such_folder"),
    (['optim_wrapper.dtype=float8'], "dtype is 'float8'; choose one of"),
])
def test_mistakes_end_with_one_clear_line(images, tmp_path, options, message):
    done = run(sys.executable, str(ROOT / 'tools/train.py'), str(ROOT / 'configs/demo/pretrain.py'),
               '--cfg-options', *OPTIONS, *image_options(images), *options, cwd=tmp_path)
    assert done.returncode != 0
    assert message in '\n'.join(done.stderr.strip().splitlines()[-3:])


def test_missing_dalle_weights_say_where_to_get_them(images, tmp_path):
    done = run(sys.executable, str(ROOT / 'tools/train.py'), str(ROOT / 'configs/beit/pretrain_300e.py'),
               '--cfg-options', f'train_dataloader.dataset.data_root={images}',
               'model.target_generator.checkpoint=dalle_encoder.pth', 'model.backbone.arch=tiny',
               'model.head.embed_dims=192', cwd=tmp_path)
    assert done.returncode != 0
    last = '\n'.join(done.stderr.strip().splitlines()[-3:])
    assert 'dalle_encoder.pth' in last and 'random_weights=True' in last and 'https://' in last
