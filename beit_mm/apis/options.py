"""The options of command lines that take a config, and the config that they make.

Only the standard library is imported before the arguments are parsed, so that `--help` and a misspelt option answer at
once.
"""

from __future__ import annotations

import argparse
import inspect
import json
import os
from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from beit_mm.terminal import Parser, UserError

if TYPE_CHECKING:
    from mmengine.config import Config

# What the Runner reads beside the arguments of its constructor, and what `merge_options` makes roots of datasets from.
READ_TOO = 'runner_type model_wrapper_cfg tta_model tta_pipeline sync_bn compile find_unused_parameters data_root'


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Parser of the arguments that OpenMMLab's train.py and test.py have in common."""
    parser = Parser(description=inspect.cleandoc(description), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='path of a config file, or the end of one below configs/')
    parser.add_argument('--work-dir', help='folder of logs and checkpoints (default: work_dirs/<name of the config>)')
    parser.add_argument('--amp', action='store_true', help='mixed precision, where the config has none')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        default=[],
        action='extend',
        metavar='KEY=VALUE',
        help='override entries of the config, for example train_dataloader.batch_size=64 data_root=images',
    )
    started = 'how the processes are started (dist_train.sh passes pytorch)'
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none', help=started)
    # Launchers older than torchrun pass the rank as an argument, in either spelling.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """The config with the command line's overrides; starts a gloo group where there is no GPU."""
    import torch
    from mmengine.config import Config

    from beit_mm.apis.configs import RunConfig, find_config

    if args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    path = find_config(args.config)
    cfg = Config.fromfile(str(path))
    merge_options(cfg, args.cfg_options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or f'work_dirs/{path.stem}'
    if args.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine's launcher would select a GPU; it accepts a group that is there already.
        torch.distributed.init_process_group('gloo')
    # Without a name it is written as Python, in which no template stays; JSON and YAML keep them.
    return RunConfig(cfg.to_dict(), filename=cfg.filename if path.suffix == '.py' else None)


def merge_options(cfg: Config, pairs: Iterable[str]) -> None:
    """Overrides entries of a config. `data_root` becomes that of all datasets, but where one is given its own.

    Where datasets have different roots (`data/imagenet/train`, `data/imagenet/val`) it replaces their common part.

    Args:
        cfg: is changed.
        pairs: KEY=VALUE of `--cfg-options`.

    Raises:
        UserError: a pair without `=`, a key that nothing reads, a value that begins as a list of dicts and is no JSON.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition('=')
        if not equals:
            raise UserError(f'--cfg-options: {pair!r} is no KEY=VALUE')
        check_key(cfg, key)
        options[key] = parse_value(key, value)
    if 'data_root' in options:
        roots = {name: cfg[name].dataset.data_root for name in cfg if name.endswith('_dataloader') and cfg[name]}
        parts = {name: os.path.relpath(root, os.path.commonpath(roots.values())) for name, root in roots.items()}
        options = {
            f'{name}.dataset.data_root': options['data_root']
            if part == '.'
            else os.path.join(options['data_root'], part)
            for name, part in parts.items()
        } | options
    cfg.merge_from_dict(options)


def parse_value(key: str, value: str) -> Any:
    """The value of an option, as mmengine's DictAction reads it, but for what that has no form for.

    A `data_root`, the path of an existing file or folder, and a value with spaces and no comma are taken as they are:
    DictAction would drop their spaces and split them at their commas. A list of dicts, such as a pipeline, is JSON.
    """
    from mmengine.config import ConfigDict, DictAction

    is_folder = key.endswith('data_root') and ',' in value
    is_path = set(', /') & set(value) and os.path.exists(value)  # a number may be the name of a folder, too
    if is_folder or is_path or (' ' in value and not set('[({\',"') & set(value)):
        return value
    if value.startswith('[{'):
        try:
            return ConfigDict(value=json.loads(value)).value
        except json.JSONDecodeError as error:
            raise UserError(f'--cfg-options: {key} begins as a list of dicts and is no JSON ({error})') from error
    read = argparse.Namespace()
    DictAction([], dest='values')(None, read, [f'{key}={value}'])
    return read.values[key]


def check_key(cfg: Config, key: str) -> None:
    """Refuses a key that would be a new entry of the config, which nothing reads, and names the nearest.

    Keys beside a `type` are for its class to refuse, unless they nearly are one that is there.
    """
    from mmengine.runner import Runner
    from torch.utils.data import DataLoader

    entry: Any = cfg.to_dict()
    path: list[str] = []
    for name in key.split('.'):
        if not isinstance(entry, dict | list | tuple):
            return
        is_loader, is_list = bool(path) and path[-1].endswith('_dataloader'), not isinstance(entry, dict)
        known = {*(map(str, range(len(entry))) if is_list else entry)}
        if not path:
            known = {*inspect.signature(Runner).parameters, *READ_TOO.split()}
        elif is_loader:  # it has no `type` to refuse others
            known |= {*inspect.signature(DataLoader).parameters}
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.85 if 'type' in known else 0.7)
            if not (near or not path or is_loader or is_list):
                return
            advice = f'; did you mean {".".join([*path, *near])}?' if near else ''
            if is_list:
                advice = f'; {path[-1]} has entries 0 to {len(entry) - 1}'
            elif name in entry:
                advice = ' that is read; set those made of it, such as train_dataloader.dataset.pipeline'
            raise UserError(f'--cfg-options: {key}: {name} is no entry of the config{advice}')
        entry = entry[int(name)] if is_list else entry.get(name)
        path.append(name)
