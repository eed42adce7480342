"""Kills a training of two processes again and again, and compares its end with a training that nobody disturbed.

python tools/dev/stress/kill_loop.py --kills 50 --out /tmp/kill_loop

The run is configs/demo/pretrain.py made small, with drop path, a moving average of the weights, and a checkpoint after
every step, of which one is kept. Half of the kills come at any moment, half while a checkpoint is being written. After
each the folder must hold a checkpoint that can be read, and at the end all tensors and numbers must be equal.
"""

from __future__ import annotations

import argparse
import copy
import multiprocessing
import os
import random
import secrets
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mmengine.config import Config

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT))
RANKS = 2
# what the clock, the folder or the number of starts changes
NOT_COMPARED = {'time', 'run', 'experiment_name', 'cfg', 'config_dict', 'last_ckpt', 'outdated', 'kept_checkpoints'}
NOT_COMPARED |= {'train/time', 'train/data_time', 'train/images_per_second'}


def differences(one: Any, two: Any, place: str = '') -> list[str]:
    """Where the contents of two checkpoints differ."""
    import torch

    if isinstance(one, dict) and isinstance(two, dict):
        keys = {*one, *two} - NOT_COMPARED
        missing = [f'{place}/{key} is in one only' for key in keys if (key in one) != (key in two)]
        shared = sorted(keys & one.keys() & two.keys(), key=str)
        return missing + [found for key in shared for found in differences(one[key], two[key], f'{place}/{key}')]
    if isinstance(one, (list, tuple)) and isinstance(two, (list, tuple)) and len(one) == len(two):
        pairs = enumerate(zip(one, two, strict=True))
        return [found for index, pair in pairs for found in differences(*pair, f'{place}/{index}')]
    same = torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two or one is two
    return [] if same else [f'{place}: {one} and {two}']


def make_config(folder: Path, steps: int) -> Config:
    """The demo's pretraining on 32 drawn images, with a model that takes a tenth of a second for a step."""
    import numpy as np
    from mmengine.config import Config
    from PIL import Image

    images = folder / 'images' / 'train'
    images.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(0)
    for index in range(32):
        small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        small.resize((80, 60), Image.Resampling.BICUBIC).save(images / f'{index}.jpg')
    config = Config.fromfile(ROOT / 'configs/demo/pretrain.py')
    config.model.backbone.update(arch=dict(embed_dims=64, num_layers=4, num_heads=4), drop_path_rate=0.2)
    config.model.head.embed_dims = 64
    config.model.target_generator = dict(
        type='beit_mm.DALLETokenizer', random_weights=True, hidden=8, vocab_size=config.model.head.vocab_size
    )
    for transform in config.train_dataloader.dataset.pipeline:
        if 'second_size' in transform:
            transform.second_size = 8 * transform.size // config.model.backbone.patch_size  # DALL-E's stride is 8
    config.train_dataloader.update(batch_size=4, num_workers=1, persistent_workers=True)
    config.train_dataloader.dataset.update(data_root=str(folder / 'images'), data_prefix='train')
    config.train_cfg.max_iters = steps
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    config.auto_scale_lr.base_batch_size = 8
    config.default_hooks.checkpoint.update(interval=1, max_keep_ckpts=1, by_epoch=False)
    config.custom_hooks.append(dict(type='EMAHook', momentum=0.1))
    config.env_cfg.dist_cfg.backend = 'gloo'
    config.update(log_level='WARNING', launcher='pytorch', resume=True)
    return config


def rank_process(config: Config, rank: int, store: Path) -> None:
    """One process of the run; started by fork, since importing everything takes longer than many steps."""
    import torch
    from mmengine.registry import RUNNERS

    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(RANKS))
    output = open(Path(config.work_dir).with_suffix('.log'), 'a')
    os.dup2(output.fileno(), 1)
    os.dup2(output.fileno(), 2)
    torch.set_num_threads(1)
    torch.distributed.init_process_group('gloo', f'file://{store}', rank=rank, world_size=RANKS)
    config = copy.deepcopy(config)
    config.experiment_name = f'kill_loop_{secrets.token_hex(4)}'
    RUNNERS.build(config).train()
    os._exit(0)


def start(config: Config) -> list[multiprocessing.Process]:
    context = multiprocessing.get_context('fork')
    store = Path(config.work_dir).with_name(f'store_{secrets.token_hex(4)}')
    ranks = [context.Process(target=rank_process, args=(config, rank, store)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    return ranks


def kill_later(ranks: list[multiprocessing.Process], folder: Path, longest: float) -> str:
    """Kills all processes at a random moment, or in the middle of a file, and says which; '' where they end before."""
    file = random.randint(1, 4) if random.random() < 0.5 else None  # the one of this start that is not to be finished
    deadline = time.monotonic() + random.uniform(0, longest)
    before, seen = set(folder.glob('*.part')), set()  # what the last kill left; what this start began
    while any(process.is_alive() for process in ranks):
        seen.update(set(folder.glob('*.part')) - before)
        if len(seen) >= file if file else time.monotonic() > deadline:
            for process in random.sample(ranks, RANKS):
                os.kill(process.pid, signal.SIGKILL)
            for process in ranks:
                process.join()
            return 'writing' if set(folder.glob('*.part')) - before else 'elsewhere'
        time.sleep(0.0005 if file else 0.01)
    return ''


def finish(config: Config) -> None:
    """Runs to the end."""
    ranks = start(config)
    for process in ranks:
        process.join()
    if any(process.exitcode for process in ranks):
        sys.exit(f'error: the run ended by itself, see the end of {config.work_dir}.log')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--kills', type=int, default=50)
    parser.add_argument('--steps', type=int, default=120, help='of the whole run')
    parser.add_argument('--longest', type=float, default=6.0, help='seconds from a start to a kill at any moment')
    parser.add_argument('--seed', type=int, default=0, help='of the moments')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/kill_loop'), help='folder, made anew')
    args = parser.parse_args()
    from beit_mm.checkpoint.read import CheckpointError, read_checkpoint
    from beit_mm.engine.checkpoints import newest_checkpoint

    random.seed(args.seed)
    shutil.rmtree(args.out, ignore_errors=True)
    config = make_config(args.out.resolve(), args.steps)

    disturbed, kills, newest, without = args.out.resolve() / 'disturbed', [], None, 0
    config.work_dir = str(disturbed)
    while len(kills) < args.kills and (where := kill_later(start(config), disturbed, args.longest)):
        kills.append(where)
        had_one = newest is not None
        try:
            newest = newest_checkpoint(disturbed) if disturbed.is_dir() else None
        except CheckpointError:
            newest = None
        without += had_one and newest is None
        at = read_checkpoint(newest)['meta']['iter'] if newest is not None else 0
        print(f'kill {len(kills)} ({where}): step {at} of {args.steps} is on the disk', flush=True)
    finish(config)
    config.work_dir = str(args.out.resolve() / 'undisturbed')
    finish(config)

    one, two = (read_checkpoint(args.out / name / f'iter_{args.steps}.pth') for name in ('undisturbed', 'disturbed'))
    found = differences(one, two)
    left = sorted(path.name for path in disturbed.iterdir() if path.suffix in ('.pth', '.part'))
    print(
        f'{len(kills)} kills, {kills.count("writing")} of them while a checkpoint was written; {without} times '
        f'there was none to resume from; left over: {left}; {len(one["state_dict"])} tensors of the model and '
        f'{len(one["optimizer"]["state"])} states of the optimizer compared: {len(found)} differences.'
    )
    if found or without or left != [f'iter_{args.steps}.pth']:
        sys.exit('\n'.join(['error: the runs are not equal', *found[:10]]))


if __name__ == '__main__':
    main()
