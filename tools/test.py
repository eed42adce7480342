"""Evaluates a checkpoint on the held-out images of its config.

    python tools/test.py configs/beit/pretrain_300e.py work_dirs/pretrain_300e/epoch_300.pth
"""
import json
from functools import partial
from pathlib import Path

from mmengine.dist import is_main_process
from mmengine.runner import Runner

from beit_mm.engine.launch import argument_parser, load_config


def main() -> None:
    parser = argument_parser('Evaluate a checkpoint.')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('--out', metavar='FILE', help='also write the metrics to this JSON file')
    args = parser.parse_args()
    cfg = load_config(args)
    cfg.load_from = args.checkpoint
    runner = Runner.from_cfg(cfg)
    # numbers of a half-loaded model would mislead
    runner.load_checkpoint = partial(runner.load_checkpoint, strict=True)
    metrics = runner.test()
    if args.out and is_main_process():
        Path(args.out).write_text(json.dumps(metrics, indent=2) + '\n')


if __name__ == '__main__':
    main()
