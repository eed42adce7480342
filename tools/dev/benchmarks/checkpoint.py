"""Times the checkpoint of a training beside the writing of its bytes.

    python tools/dev/benchmarks/checkpoint.py --out /tmp --rounds 5

The model is BEiT base (or large) with the state of AdamW, as pretraining has it. `bytes`: a file of as many bytes,
written and flushed to the disk; `checkpoint`: CheckpointHook.save; `mmengine`: its Runner.save_checkpoint, which does
not flush; `step`: forward, backward and AdamW of one batch.
"""

import argparse
import os
import shutil
import statistics
import tempfile

import torch
from _timing import interleave
from mmengine.logging import MMLogger
from mmengine.runner import Runner

from beit_mm.engine.checkpoints import CheckpointHook


def make_runner(arch: str, folder: str, batch: int) -> Runner:
    """A pretraining of pixels (without a tokenizer, which checkpoints do not hold) on random batches."""
    width = dict(base=768, large=1024)[arch]
    samples = [
        dict(inputs=dict(images=torch.zeros(224, 224, 3, dtype=torch.uint8), mask=torch.arange(196).view(14, 14) < 75))
    ] * batch
    return Runner(
        model=dict(
            type='beit_mm.BEiTPretrainer',
            data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3),
            backbone=dict(type='beit_mm.BEiTBackbone', arch=arch, masked_input=True),
            head=dict(type='beit_mm.PixelRegressionHead', embed_dims=width),
        ),
        work_dir=folder,
        train_dataloader=dict(
            batch_size=batch,
            num_workers=0,
            dataset=samples,
            sampler=dict(type='DefaultSampler'),
            collate_fn=dict(type='default_collate'),
        ),
        train_cfg=dict(type='beit_mm.IterLoop', max_iters=1),
        optim_wrapper=dict(
            type='beit_mm.AutocastOptimWrapper', optimizer=dict(type='AdamW', lr=1e-6, fused=True), dtype='bfloat16'
        ),
        default_hooks=dict(checkpoint=dict(type='beit_mm.CheckpointHook', interval=1000, save_last=False)),
        custom_hooks=[dict(type='beit_mm.CheckpointMetaHook')],
        default_scope='mmpretrain',
        experiment_name='checkpoint_benchmark',
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', choices=['base', 'large'], default='base')
    parser.add_argument('--batch', type=int, default=8, help='images of the step')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--out', help='folder on the disk to be measured; a new one in it is removed afterwards')
    args = parser.parse_args()
    folder = tempfile.mkdtemp(dir=args.out)
    try:
        MMLogger.get_instance('benchmark', log_level='WARNING')
        runner = make_runner(args.arch, folder, args.batch)
        runner.train()
        hook = next(hook for hook in runner.hooks if isinstance(hook, CheckpointHook))
        batch = next(iter(runner.train_dataloader))
        path = hook.save(runner, 'first.pth')
        data = path.read_bytes()

        def write_bytes() -> None:
            with open(f'{folder}/bytes', 'wb') as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())

        def step() -> None:
            runner.model.train_step(batch, optim_wrapper=runner.optim_wrapper)

        times, _, _ = interleave(
            {
                'bytes': write_bytes,
                'checkpoint': lambda: hook.save(runner, 'sync.pth'),
                'mmengine': lambda: runner.save_checkpoint(folder, 'mmengine.pth'),
                'step': step,
            },
            args.rounds,
            warmup=1,
        )
        medians = {name: statistics.median(values) for name, values in times.items()}
        print(f'BEiT {args.arch} with AdamW: {len(data) / 1e9:.2f} GB; {args.rounds} rounds, medians')
        for name, median in medians.items():
            print(f'{name:12}{median:8.2f} s   {median / medians["bytes"]:5.2f} x bytes')
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == '__main__':
    main()
