"""What tools/train.py and tools/test.py share: arguments, the config, and processes without a GPU."""
import argparse
import os
from pathlib import Path

import torch
from mmengine.config import Config, DictAction


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Parser of the arguments that OpenMMLab's train.py and test.py have in common."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help='path of the config file')
    parser.add_argument('--work-dir', help='folder for logs, checkpoints and pictures '
                        '(default: work_dirs/<name of the config>)')
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, metavar='KEY=VALUE',
                        help='override entries of the config, for example '
                        'train_dataloader.batch_size=64 train_dataloader.dataset.data_root=images')
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none',
                        help='how the processes are started (dist_train.sh passes pytorch)')
    # Launchers older than torchrun pass the rank as an argument, in either spelling.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """The config with the command line's overrides; starts a gloo group where there is no GPU."""
    if args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    cfg = Config.fromfile(args.config)
    if args.cfg_options:
        cfg.merge_from_dict(args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or f'work_dirs/{Path(args.config).stem}'
    if args.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine's launcher would select a GPU; it accepts a group that is there already.
        torch.distributed.init_process_group('gloo')
    return cfg
