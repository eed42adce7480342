"""What tools/train.py and tools/test.py share: arguments, the config, and one line for a user's mistake.

Only the standard library is imported before the arguments are parsed, so that `--help` and a misspelt option answer at
once.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.terminal import Parser, UserError, run  # noqa: F401  (run: for the tools)

if TYPE_CHECKING:
    from mmengine.config import Config
    from mmengine.runner import Runner


def argument_parser(description: str) -> argparse.ArgumentParser:
    """Parser of the arguments that OpenMMLab's train.py and test.py have in common."""
    parser = Parser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='path of the config file')
    parser.add_argument(
        '--work-dir', help='folder for logs, checkpoints and pictures (default: work_dirs/<name of the config>)'
    )
    parser.add_argument('--amp', action='store_true', help='mixed precision, where the config has none')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        default=[],
        action='extend',
        metavar='KEY=VALUE',
        help='override entries of the config, for example '
        'train_dataloader.batch_size=64 train_dataloader.dataset.data_root=images',
    )
    parser.add_argument(
        '--launcher',
        choices=['none', 'pytorch', 'slurm', 'mpi'],
        default='none',
        help='how the processes are started (dist_train.sh passes pytorch)',
    )
    # Launchers older than torchrun pass the rank as an argument, in either spelling.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    return parser


def load_config(args: argparse.Namespace) -> Config:
    """The config with the command line's overrides; starts a gloo group where there is no GPU."""
    import torch
    from mmengine.config import Config

    from beit_mm.apis.configs import RunConfig

    if args.local_rank is not None:
        os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    if not args.config.endswith(('.py', '.yml', '.yaml', '.json')):
        raise UserError(f'{args.config!r} is no config; expected the path of one, a file ending in .py')
    cfg = Config.fromfile(args.config)
    options = parse_options(args.cfg_options)
    for key in options:
        check_key(cfg, key)
    merge_options(cfg, options)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or f'work_dirs/{Path(args.config).stem}'
    if args.launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine's launcher would select a GPU; it accepts a group that is there already.
        torch.distributed.init_process_group('gloo')
    return RunConfig(cfg.to_dict(), filename=cfg.filename)


def parse_options(pairs: list[str]) -> dict[str, object]:
    """Keys and values of `--cfg-options`, as mmengine's DictAction reads them.

    A `data_root`, the path of an existing file or folder, and a value with spaces and no comma are taken as they are:
    DictAction would drop their spaces and split them at their commas. A list of dicts, such as a pipeline, is read as
    JSON, which DictAction has no form for.

    Raises:
        ValueError: a pair without `=` or with a template, or what begins as a list of dicts and is no JSON.
    """
    from mmengine.config import ConfigDict, DictAction

    options = argparse.Namespace(values={})
    action = DictAction([], dest='values')
    for pair in pairs:
        key, equals, value = pair.partition('=')
        if not equals:
            raise UserError(f'--cfg-options: {pair!r} is no KEY=VALUE')
        if '{{' in value:
            raise UserError(
                f'--cfg-options: {pair!r} has "{{{{", which mmengine executes in the configs that it writes'
            )
        is_folder = key.endswith('data_root') and ',' in value
        if is_folder or os.path.exists(value) or (' ' in value and not set('[({\',"') & set(value)):
            options.values[key] = value
        elif value.startswith('[{'):
            try:
                options.values[key] = ConfigDict(value=json.loads(value)).value
            except json.JSONDecodeError as error:
                raise UserError(f'--cfg-options: {key} begins as a list of dicts and is no JSON ({error})') from error
        else:
            action(None, options, [pair])
    return options.values


def merge_options(cfg: Config, options: dict[str, object]) -> None:
    """Overrides entries of a config. `data_root` becomes that of all datasets, but where one is given its own."""
    if 'data_root' in options:
        loaders = [name for name in cfg if name.endswith('_dataloader') and cfg[name]]
        options = {f'{name}.dataset.data_root': options['data_root'] for name in loaders} | options
    cfg.merge_from_dict(options)


# What the Runner reads beside the arguments of its constructor.
READ_TOO = {
    'runner_type',
    'model_wrapper_cfg',
    'tta_model',
    'tta_pipeline',
    'sync_bn',
    'compile',
    'find_unused_parameters',
}
# Keys of data loaders, which have no `type` to refuse others.
LOADER = set(
    'batch_size num_workers dataset sampler batch_sampler collate_fn persistent_workers pin_memory prefetch_factor '
    'drop_last timeout multiprocessing_context worker_init_fn shuffle num_batch_per_epoch'.split()
)


def check_key(cfg: Config, key: str) -> None:
    """Finds keys of `--cfg-options` that would be new entries of the config, which nothing reads.

    Keys below a `type` are for its class to refuse, unless they nearly are one that is there.

    Raises:
        ValueError: the key is none; names the nearest.
    """
    from difflib import get_close_matches
    from inspect import signature

    from mmengine.runner import Runner

    entry: object = cfg
    *parents, last = key.split('.')
    for depth, name in enumerate([*parents, last]):
        known: set[str] = set()
        if depth == 0:
            known = {*signature(Runner).parameters, *READ_TOO, *(['data_root'] if 'data_root' in cfg else [])}
            if name in cfg and name not in known:
                raise UserError(
                    f'--cfg-options: {key}: nothing reads {name}, from which other entries were made; set those, such '
                    'as train_dataloader.dataset.pipeline'
                )
            known &= {*cfg, *signature(Runner).parameters, *READ_TOO}
        elif isinstance(entry, list | tuple):
            if not name.isdecimal() or int(name) >= len(entry):
                raise UserError(f'--cfg-options: {key}: {parents[depth - 1]} has entries 0 to {len(entry) - 1}')
            entry = entry[int(name)]
            continue
        elif not isinstance(entry, dict):
            return
        elif parents[depth - 1].endswith('_dataloader'):
            known = LOADER
        if name in entry:
            entry = entry[name]
            continue
        near = get_close_matches(name, {*entry, *known}, n=1, cutoff=0.85 if 'type' in entry else 0.7)
        if name not in known and (near or known):
            advice = f'; did you mean {".".join([*parents[:depth], near[0]])}?' if near else ''
            where = f'{key}: {name}' if parents else key
            raise UserError(f'--cfg-options: {where} is no entry of the config{advice}')
        return


def few_of_each(folder: str | Path, classes: Sequence[str], per_class: int, seed: int) -> list[str]:
    """A few images of each class, for training with few labels.

    Args:
        folder: with one folder a class.
        classes: names of the folders, in the order in which the images are drawn.
        per_class: images of each class; a class that has fewer gives all.
        seed: of `random.Random`, one generator for all classes.

    Returns:
        Paths relative to the folder: of each class the first after the sorted ones were shuffled.
    """
    import random

    from beit_mm.datasets.image_folder import list_images

    generator = random.Random(seed)
    chosen = []
    for name in classes:
        images = list(list_images(str(folder), subfolders=[name]))
        generator.shuffle(images)
        chosen += images[:per_class]
    return chosen


def load_strictly(runner: Runner, checkpoint: str) -> None:
    """Loads a checkpoint that must fit in full: the numbers of a half-loaded model would mislead.

    Raises:
        ValueError: tensors are missing, left over or of another shape.
    """
    try:
        runner.load_checkpoint(checkpoint, strict=True)
    except RuntimeError as error:
        raise UserError(f'{checkpoint}: {" ".join(str(error).split())}') from error
