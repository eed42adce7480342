"""Times the checkpoint of a training beside the writing of its bytes.

    python tools/dev/benchmarks/checkpoint.py --out /tmp --rounds 5

The run is the pretraining of pixels, without a tokenizer (which checkpoints do not hold), with the state of AdamW.
`bytes`: a file of as many bytes, written and flushed to the disk; `checkpoint`: CheckpointHook.save; `mmengine`: its
Runner.save_checkpoint, which does not flush; `step`: forward, backward and AdamW of one batch.
"""

import argparse
import os
import statistics
import tempfile
from pathlib import Path

import torch
from _timing import interleave
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from beit_mm.checkpoint.names import ARCHITECTURES
from beit_mm.engine.checkpoints import CheckpointHook

CONFIG = Path(__file__).resolve().parents[3] / 'configs/ablation/pretrain_pixels_300e.py'


def make_runner(arch: str, folder: str, batch: int) -> Runner:
    cfg = Config.fromfile(CONFIG)
    cfg.model.backbone.arch, cfg.model.head.embed_dims = arch, ARCHITECTURES[arch]['embed_dims']
    sample = dict(images=torch.zeros(224, 224, 3, dtype=torch.uint8), mask=torch.arange(196).view(14, 14) < 75)
    loader = dict(batch_size=batch, num_workers=0, persistent_workers=False, dataset=[dict(inputs=sample)] * batch)
    loader.update(sampler=dict(type='DefaultSampler'), collate_fn=dict(type='default_collate'))
    cfg.update(work_dir=folder, experiment_name='checkpoint_benchmark', log_level='WARNING', param_scheduler=None)
    cfg.val_dataloader = cfg.val_cfg = cfg.val_evaluator = None
    cfg.train_dataloader, cfg.train_cfg = loader, dict(type='beit_mm.IterLoop', max_iters=1)
    cfg.default_hooks = dict(checkpoint=dict(type='beit_mm.CheckpointHook', interval=1000, save_last=False))
    cfg.custom_hooks = [dict(type='beit_mm.CheckpointMetaHook')]
    return Runner.from_cfg(cfg)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', choices=['base', 'large'], default='base')
    parser.add_argument('--batch', type=int, default=8, help='images of the step')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--out', help='folder on the disk to be measured; a new one in it is removed afterwards')
    args = parser.parse_args()
    MMLogger.get_instance('benchmark', log_level='WARNING')
    with tempfile.TemporaryDirectory(dir=args.out) as folder:
        runner = make_runner(args.arch, folder, args.batch)
        runner.train()
        hook = next(hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
        batch = next(iter(runner.train_dataloader))
        data = hook.save(runner, 'first.pth').read_bytes()

        def write_bytes() -> None:
            with open(f'{folder}/bytes', 'wb') as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        runs = {
            'bytes': write_bytes,
            'checkpoint': lambda: hook.save(runner, 'sync.pth'),
            'mmengine': lambda: runner.save_checkpoint(folder, 'mmengine.pth'),
            'step': lambda: runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper),
        }
        times, _, _ = interleave(runs, args.rounds, warmup=1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    print(f'BEiT {args.arch} with AdamW: {len(data) / 1e9:.2f} GB; {args.rounds} rounds, medians')
    for name, median in medians.items():
        print(f'{name:12}{median:8.2f} s   {median / medians["bytes"]:5.2f} x bytes')


if __name__ == '__main__':
    main()
