"""Trains what a config describes: a tokenizer, a pretraining, a fine-tuning, a segmentor.

python tools/train.py configs/beit/pretrain_300e.py
tools/dist_train.sh configs/beit/pretrain_800e.py 16
"""

import argparse
import contextlib
import os
import sys
import tempfile
from pathlib import Path

from _cli import argument_parser, load_config, run


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='go on from a checkpoint, or from the newest of the work directory',
    )
    parser.add_argument('--no-validate', action='store_true', help='train without held-out images')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help="scale the learning rate by the ratio of this run's batch to the recipe's",
    )
    parser.add_argument(
        '--verbose',
        action='store_true',
        help='print the whole log, as where the output is no terminal, instead of a line now and then',
    )
    parser.add_argument('--compile', action='store_true', help="compile the model's part of a step (CompileHook)")
    parser.add_argument(
        '--replay',
        action='store_true',
        help='run only the one step after the checkpoint of --resume, say where its numbers go bad, write nothing',
    )
    args = parser.parse_args()
    from beit_mm.terminal import quiet

    short = sys.stdout.isatty() and not (args.verbose or args.replay)
    with quiet() if short else contextlib.nullcontext():
        train(args, short)


def train(args: argparse.Namespace, short: bool) -> None:
    """Trains, with the whole log in the terminal or, `short`, a line now and then."""
    import mmengine.runner  # noqa: F401  (registers Runner, which the registry does not look for)
    from mmengine.registry import RUNNERS

    cfg = load_config(args)
    if args.resume:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.auto_scale_lr:
        if 'auto_scale_lr' not in cfg:
            raise ValueError(f'--auto-scale-lr: {args.config} has no auto_scale_lr, the batch that its rates belong to')
        cfg.auto_scale_lr.enable = True
    if args.amp and cfg.optim_wrapper.get('dtype', 'float32') == 'float32':
        cfg.optim_wrapper.update(type='beit_mm.AutocastOptimWrapper', dtype='bfloat16')
    if args.compile:
        cfg.custom_hooks = [*cfg.get('custom_hooks', []), dict(type='beit_mm.CompileHook')]
    if short:
        from beit_mm.engine.interruption import resuming_command
        from beit_mm.engine.progress import ProgressHook, with_quiet_terminal
        from beit_mm.terminal import without_output

        progress = ProgressHook(Path(args.config).stem)
        with without_output():
            runner = with_quiet_terminal(RUNNERS.get(cfg.get('runner_type', 'Runner'))).from_cfg(cfg)
            runner.register_hook(progress)
            progress.say(f'{cfg.work_dir}: checkpoints; {os.path.relpath(runner.log_dir)}: the whole log')
            try:
                runner.train()
            except SystemExit:  # a signal: its checkpoint is written
                progress.say(f'Stopped after step {runner.iter:,}. Go on with: {resuming_command()}')
                raise
        return
    if not args.replay:
        RUNNERS.build(cfg).train()
        return
    if args.resume in (None, 'auto'):
        raise ValueError('--replay needs the checkpoint before the step: --resume work_dir/bad_step_N/checkpoint.pth')
    from beit_mm.engine.bad_steps import replay_config

    with tempfile.TemporaryDirectory() as folder:
        replay_config(cfg, args.resume, folder)
        RUNNERS.build(cfg).train()


if __name__ == '__main__':
    run(main)
