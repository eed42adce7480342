"""Trains what a config describes: a tokenizer, a pretraining, a fine-tuning, a segmentor.

python tools/train.py configs/beit/pretrain_300e.py
tools/dist_train.sh configs/beit/pretrain_800e.py 16
"""

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any

from _cli import argument_parser, load_config, run

from beit_mm.terminal import UserError


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from a checkpoint, or from the newest intact one of the work directory',
    )
    parser.add_argument(
        '--steps',
        type=steps,
        metavar='N',
        help='make it a run of N steps: warm-up and schedules keep their shares; a validation at the end',
    )
    parser.add_argument('--no-validate', action='store_true', help='train without held-out images')
    parser.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help="scale the learning rate by the ratio of this run's batch to the recipe's",
    )
    parser.add_argument('--verbose', action='store_true', help='print the whole log instead of a line now and then')
    parser.add_argument('--compile', action='store_true', help="compile the model's part of a step (CompileHook)")
    args = parser.parse_args()
    from beit_mm.terminal import quiet

    short = not args.verbose
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
    if args.steps:
        shorten(cfg, args.steps)
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.auto_scale_lr:
        if 'auto_scale_lr' not in cfg:
            raise UserError(f'--auto-scale-lr: {args.config} has no auto_scale_lr, the batch that its rates belong to')
        cfg.auto_scale_lr.enable = True
    if args.amp and cfg.optim_wrapper.get('dtype', 'float32') == 'float32':
        cfg.optim_wrapper.update(type='beit_mm.AutocastOptimWrapper', dtype='bfloat16')
    if args.compile:
        cfg.custom_hooks = [*cfg.get('custom_hooks', []), dict(type='beit_mm.CompileHook')]
    if short and 'runner_type' not in cfg:
        from beit_mm.engine.interruption import resuming_command
        from beit_mm.engine.steps import SECONDS, ProgressHook, QuietRunner
        from beit_mm.terminal import without_output

        progress = ProgressHook(Path(args.config).stem, SECONDS if sys.stdout.isatty() else 60.0)
        with without_output():
            runner = QuietRunner.from_cfg(cfg)
            runner.register_hook(progress)
            progress.say(f'{cfg.work_dir}: checkpoints; {os.path.relpath(runner.log_dir)}: the whole log')
            try:
                runner.train()
            except SystemExit:  # a signal: its checkpoint is written
                progress.say(f'Stopped after step {runner.iter:,}. Resume with: {resuming_command()}')
                raise
        return
    RUNNERS.build(cfg).train()


def steps(text: str) -> int:
    """A number of steps."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f'{text!r}; expected a whole number from 1')
    return int(text)


def shorten(cfg: Any, steps: int) -> None:
    """Changes a config to a run of so many steps (of mmengine's, before accumulation) in which all has its share.

    Warm-ups and other schedules end where they would have ended, as a part of the run. A warm-up has at least two
    steps, since mmengine's does not end in one. What hooks count in epochs is rounded; in a run that is counted in
    epochs its share is not known, and taken for none.
    """
    unit = 'max_epochs' if 'max_epochs' in cfg.train_cfg else 'max_iters'
    length = cfg.train_cfg[unit]

    def moved(place: int) -> int:  # mmengine's PolyLR is given an end one step behind the run's
        return steps + place - length if place >= length else place and min(steps, max(2, place * steps // length))

    schedulers, given = [], cfg.get('param_scheduler') or []
    for scheduler in [given] if isinstance(given, dict) else given:
        if scheduler.get('by_epoch', True) != (unit == 'max_epochs'):
            raise UserError(f'--steps: a {scheduler.type} does not count as the run does, by {unit}; write a config')
        begin, end = moved(scheduler.get('begin', 0)), moved(scheduler.get('end', length))
        scheduler.update(begin=begin, end=end, by_epoch=False)
        scheduler.pop('convert_to_iter_based', None)
        if 'T_max' in scheduler:
            scheduler.T_max = max(1, end - begin)
        if 'milestones' in scheduler:
            scheduler.milestones = [moved(place) for place in scheduler.milestones]
        if begin < end:
            schedulers.append(scheduler)
    cfg.param_scheduler = schedulers
    for part in (cfg.model, *cfg.get('custom_hooks', [])):
        for key in ('temperature_steps', 'kl_steps'):  # DiscreteVAE
            if key in part:
                part[key] = moved(part[key])
        for key in ('warmup_epochs', 'freeze_last_layer'):  # DINOHook
            if key in part:
                part[key] = round(part[key] * steps / length) if unit == 'max_iters' else 0
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=steps, val_interval=steps)
    cfg.default_hooks.checkpoint.update(by_epoch=False, interval=min(steps, 1000))
    cfg.default_hooks.logger.update(interval=min(cfg.default_hooks.logger.interval, max(1, steps // 10)))
    cfg.log_processor.update(by_epoch=False)


if __name__ == '__main__':
    run(main)
