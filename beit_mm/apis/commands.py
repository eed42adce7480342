"""`train` and `test`: the commands for configs, with OpenMMLab's arguments.

Only the standard library is imported before the arguments are parsed, so that `--help` answers at once.
"""

from __future__ import annotations

import argparse
import contextlib
import inspect
import json
import os
import re
import sys
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from beit_mm.errors import UserError
from beit_mm.terminal import Parser, quiet, training_output, without_output

if TYPE_CHECKING:
    from mmengine.config import Config

    from beit_mm.engine.logs import ProgressHook

# Keys that the Runner reads besides the arguments of its constructor, and keys that `merge_options` reads.
READ_TOO = 'runner_type model_wrapper_cfg tta_model tta_pipeline sync_bn find_unused_parameters data_root'
# Keys that builders of hooks, optimizer wrappers and schedulers read besides the arguments of a class.
READ_BY_BUILDERS = '_scope_ _delete_ priority constructor paramwise_cfg convert_to_iter_based'


def train(arguments: Sequence[str] | None = None) -> None:
    """Trains a config; `arguments` are words of the command line, by default those of this process."""
    args = train_parser().parse_args(arguments)
    with contextlib.nullcontext() if args.verbose else quiet():
        from mmengine.registry import RUNNERS

        from beit_mm.engine.logs import LockingRunner

        cfg = train_config(args)
        if args.verbose or 'runner_type' in cfg:
            build = RUNNERS.build if 'runner_type' in cfg else LockingRunner.from_cfg
            with training_output():
                build(cfg).train()
        else:
            train_quietly(cfg, Path(args.config).stem)


def train_parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        """Trains what a config describes: a tokenizer, a pretraining, a fine-tuning, a segmentor.

            %(prog)s beit/pretrain_300e
            tools/dist_train.sh configs/beit/pretrain_800e.py 16
        """
    )
    resume = "resume from a checkpoint, or the work directory's newest intact one; settings come from the config"
    parser.add_argument('--resume', nargs='?', const='auto', metavar='CHECKPOINT', help=resume)
    steps = 'run N batches: schedules keep their shares of the run, --cfg-options apply, and it validates at the end'
    parser.add_argument('--steps', type=int, metavar='N', help=steps)
    parser.add_argument('--no-validate', action='store_true', help='train without held-out images')
    parser.add_argument('--auto-scale-lr', action='store_true', help="scale the recipe's rates to this run's batch")
    parser.add_argument('--verbose', action='store_true', help='print the whole log, not just a line now and then')
    parser.add_argument('--compile', action='store_true', help="compile the model's part of a step (CompileHook)")
    return parser


def train_config(args: argparse.Namespace) -> Config:
    cfg = load_config(args, args.steps)
    if args.resume == 'auto':
        cfg.resume = 'auto'  # see CheckpointHook
    elif args.resume:
        cfg.resume, cfg.load_from = True, args.resume
    if args.no_validate:
        cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    if args.auto_scale_lr:
        if 'auto_scale_lr' not in cfg:
            raise UserError(f'--auto-scale-lr: {args.config} has no auto_scale_lr to say which batch its rates are for')
        cfg.auto_scale_lr.enable = True
    wrapper = cfg.optim_wrapper
    is_mixed = 'AmpOptimWrapper' in str(wrapper.get('type')) or wrapper.get('dtype', 'float32') != 'float32'
    if args.amp and not is_mixed:
        wrapper.update(type='beit_mm.AutocastOptimWrapper', dtype='bfloat16')
    if args.compile:
        cfg.custom_hooks = [*cfg.get('custom_hooks', []), dict(type='beit_mm.CompileHook')]
    cfg.custom_hooks = with_checks(cfg.get('custom_hooks'))  # by which a resumed run follows its config
    check_kept(cfg, args.cfg_options)
    return cfg


def train_quietly(cfg: Config, name: str) -> None:
    """Trains, and prints a line now and then that begins with `name`."""
    from beit_mm.engine.logs import QuietRunner
    from beit_mm.engine.signals import resuming_command

    progress = progress_hook(name)
    with training_output():
        runner = QuietRunner.from_cfg(cfg)
        runner.register_hook(progress)
        progress.say(f'{cfg.work_dir}: checkpoints; {os.path.relpath(runner.log_dir)}: the whole log')
        try:
            runner.train()
        except SystemExit:  # after a signal, when the checkpoint is written
            progress.say(f'Stopped after step {runner.iter:,}. Resume with: {resuming_command()}')
            raise


def progress_hook(name: str) -> ProgressHook:
    """A hook that prints a line now and then, less often if the output is not a terminal."""
    from beit_mm.engine.logs import SECONDS, ProgressHook

    return ProgressHook(name, SECONDS if sys.stdout.isatty() else 60.0)


def scale_to_steps(cfg: Config, steps: int) -> None:
    """Turns a config into a run of `steps` steps (batches, before accumulation): scales its schedules, logs by step."""
    unit = 'max_epochs' if 'max_epochs' in cfg.train_cfg else 'max_iters'
    length = cfg.train_cfg[unit]
    scale_schedules(cfg, unit, length, steps)
    for key in {'temperature_steps', 'kl_steps'} & cfg.model.keys():  # DiscreteVAE
        cfg.model[key] = step_of(cfg.model[key], length, steps)
    for hook in cfg.get('custom_hooks', []):
        for key in {'warmup_epochs', 'freeze_last_layer'} & hook.keys():  # DINOHook
            hook[key] = round(hook[key] * steps / length) if unit == 'max_iters' else 0  # of epochs: unknown
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=steps, val_interval=steps, shortened_from={unit: length})
    hooks = dict(logger=dict(type='LoggerHook'), checkpoint=dict(type='CheckpointHook'))  # mmengine's defaults
    cfg.default_hooks = dict(hooks, **cfg.get('default_hooks', {}))
    cfg.default_hooks.checkpoint.update(by_epoch=False, interval=min(steps, 1000))
    cfg.default_hooks.logger.interval = min(cfg.default_hooks.logger.get('interval', 10), max(1, steps // 10))
    cfg.log_processor = dict(cfg.get('log_processor', {}), by_epoch=False)


def step_of(place: int, length: int, steps: int) -> int:
    """The step of a run of `steps` at which a place in a run of `length` lies; a warm-up of one step would not end."""
    if place >= length:  # mmengine's PolyLR ends one step after the run
        return steps + place - length
    return place and min(steps, max(2, place * steps // length))


def scale_schedules(cfg: Config, unit: str, length: int, steps: int) -> None:
    """Each schedule keeps its share of the run, which has a `length` in the `unit`.

    One that would begin at the end of the run stays in the list, so that options find the others under their numbers.
    """
    schedules = cfg.get('param_scheduler') or []
    schedules = [schedules] if isinstance(schedules, dict) else schedules
    others = [schedule for schedule in schedules if schedule.get('by_epoch', True) != (unit == 'max_epochs')]
    if others:  # schedules in steps of a run in epochs, or the reverse, keep their shares of the longest of them
        if len(others) < len(schedules) or any('end' not in schedule for schedule in others):
            raise UserError(f'--steps: {others[0].type} does not count by {unit} as the run does; write a config')
        length = max(schedule.end for schedule in others)
    for schedule in schedules:
        begin = step_of(schedule.get('begin', 0), length, steps)
        end = max(begin + 1, step_of(schedule.get('end', length), length, steps))
        schedule.update(begin=begin, end=end, by_epoch=False)
        schedule.pop('convert_to_iter_based', None)
        if 'T_max' in schedule:
            schedule.T_max = end - begin
        if 'milestones' in schedule:
            schedule.milestones = [step_of(place, length, steps) for place in schedule.milestones]
    cfg.param_scheduler = schedules


def test(arguments: Sequence[str] | None = None) -> None:
    """Tests a checkpoint on the held-out images of its config; for `arguments` see `train`."""
    args = test_parser().parse_args(arguments)
    if args.out:  # a file that cannot be written fails here, not after the test
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.open('a').close()
    from mmengine.dist import get_world_size, is_main_process
    from mmengine.registry import RUNNERS

    from beit_mm.engine import Predictions

    cfg = test_config(args)
    runner = RUNNERS.build(cfg)
    if args.show_dir and get_world_size() > 1:  # mmengine draws in the first alone
        raise UserError('--show-dir draws only what one process tests; leave it out, or start one process')
    runner.register_hook(progress_hook(Path(args.config).stem))
    predictions = None
    dataset = runner.test_dataloader.dataset
    if args.out and 'gt_label' in dataset.get_data_info(0):
        predictions = Predictions(dataset.metainfo['classes'])
        runner.test_evaluator.metrics.append(predictions)
    report: dict[str, Any] = runner.test()
    if args.out and is_main_process():
        report = {name: None if value != value else value for name, value in report.items()}  # JSON has no nan
        if predictions and predictions.predicted:
            report = dict(report, classes=predictions.classes, predictions=predictions.predicted)
        text = json.dumps(report, indent=2, default=lambda value: value.tolist())  # mmseg's metrics are NumPy numbers
        args.out.write_text(f'{text}\n', encoding='utf-8')


def test_parser() -> argparse.ArgumentParser:
    parser = argument_parser(
        r"""Tests a checkpoint on the held-out images of its config.

            %(prog)s beit/pretrain_300e work_dirs/pretrain_300e/epoch_300.pth
            %(prog)s beit/finetune_in1k_100e CHECKPOINT --tta --out predictions.json
            %(prog)s beit_plus/upernet_640_ade20k_160k_after_in22k CHECKPOINT --tta --show-dir pictures
            %(prog)s dvae/dalle_8k_in1k --cfg-options \
                model.checkpoint=encoder.pkl model.decoder_checkpoint=decoder.pkl

        --out writes the metrics as one JSON object; for a classifier also `classes`, the names, and
        `predictions`: each image's path, label, name, and scores, [label, probability] of the five best.
        """
    )
    parser.add_argument('checkpoint', nargs='?', help='file or released name; none if model.checkpoint names one')
    parser.add_argument('--out', type=Path, metavar='FILE', help='also write metrics and predictions as JSON')
    parser.add_argument('--show-dir', metavar='FOLDER', help='also draw the predictions on the images')
    augmentation = "average over the views of the config's tta_pipeline, or over an image and its mirror image"
    parser.add_argument('--tta', action='store_true', help=augmentation)
    return parser


def numbers(text: str) -> list[float]:
    return [float(number) for number in text.split(',')]


def add_mean_std(parser: argparse.ArgumentParser) -> None:
    """Adds --mean and --std, for a checkpoint that does not name them or was trained with others."""
    what = 'of the images: three numbers, or one for all channels, of pixels 0-255 (default: as the checkpoint says)'
    for option, words in (('--mean', 'mean'), ('--std', 'standard deviation')):
        parser.add_argument(option, type=numbers, metavar='R,G,B', help=f'{words} {what}')


def test_config(args: argparse.Namespace) -> Config:
    cfg = load_config(args)
    if cfg.get('test_dataloader') is None:
        raise UserError(f'{args.config} has no test_dataloader: there is nothing to test this model on')
    if not args.checkpoint and not cfg.model.get('checkpoint'):
        raise UserError('no CHECKPOINT given; give it after the config')
    cfg.load_from = args.checkpoint
    # the checkpoint's weights are already the averaged ones
    cfg.default_hooks = {key: hook for key, hook in cfg.get('default_hooks', {}).items() if not averages(hook)}
    hooks = [hook for hook in cfg.get('custom_hooks') or [] if not averages(hook)]
    cfg.custom_hooks = with_checks(hooks)  # which refuses a model that is only partly loaded
    if args.amp and not cfg.model.type.endswith('SlidingSegmentor'):
        cfg.test_cfg.fp16 = True
    elif args.amp and cfg.model.test_cfg.get('precision') == 'float32':  # otherwise it is already mixed
        cfg.model.test_cfg.precision = 'bfloat16'
    check_kept(cfg, args.cfg_options)
    if args.tta:
        enable_tta(cfg, args.cfg_options)
    if args.show_dir:
        enable_drawing(cfg, args.show_dir)
    return cfg


def with_checks(hooks: Sequence[Any] | None) -> list[Any]:
    """Configs of hooks, and that of the FitCheckHook if it is not among them."""
    hooks = list(hooks or [])
    return hooks if 'FitCheckHook' in str(hooks) else [*hooks, dict(type='beit_mm.FitCheckHook')]


def averages(hook: Any) -> bool:
    """Whether the config of a hook is of an EMAHook, in any library's scope."""
    return str(hook and hook.get('type')).strip("<>'").endswith('EMAHook')


def enable_tta(cfg: Config, pairs: Sequence[str]) -> None:
    """Switches test-time augmentation on, as mmpretrain's test.py does; `pairs` are the user's --cfg-options."""
    if 'tta_pipeline' in cfg and any('test_dataloader.dataset.pipeline' in pair for pair in pairs):
        raise UserError('--tta uses tta_pipeline, not test_dataloader.dataset.pipeline; set tta_pipeline instead')
    dataset = cfg.test_dataloader.dataset
    if 'tta_model' not in cfg:
        *transforms, pack = dataset.pipeline
        probes_layers = cfg.model.type.endswith('Probe') and not isinstance(cfg.model.get('layers'), int)
        if not pack.type.endswith('PackInputs') or probes_layers:
            raise UserError('--tta is for a classifier, a segmentor, or a probe of one layer: set model.layers=...')
        mirror = [dict(type='RandomFlip', prob=1.0), dict(type='RandomFlip', prob=0.0)]
        cfg.tta_model = dict(type='mmpretrain.AverageClsScoreTTA')
        cfg.tta_pipeline = [*transforms, dict(type='TestTimeAug', transforms=[mirror, [pack]])]
    cfg.model = dict(cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def enable_drawing(cfg: Config, folder: str) -> None:
    """Has hooks draw each prediction and save it in a folder."""
    pipeline = cfg.test_dataloader.dataset.pipeline
    segments, backends = cfg.default_scope == 'mmseg', [dict(type='LocalVisBackend')]
    if pipeline[0].type.endswith('LoadBands') or not (segments or pipeline[-1].type.endswith('PackInputs')):
        raise UserError('--show-dir draws results of classifiers and segmentors on RGB images; leave it out, or --tta')
    if segments:
        cfg.default_hooks.visualization = dict(type='SegVisualizationHook', draw=True, interval=1)
        cfg.visualizer = dict(dict(vis_backends=backends), **cfg.get('visualizer', {}))
        cfg.visualizer.update(type='SegLocalVisualizer', save_dir=folder)
    else:
        cfg.default_hooks.visualization = dict(type='beit_mm.DrawingHook', folder=folder)
        cfg.visualizer = dict(type='UniversalVisualizer', vis_backends=backends)


# Options of commands that take a config


def argument_parser(description: str, config_only: bool = False) -> argparse.ArgumentParser:
    """A parser of the arguments that OpenMMLab's train.py and test.py share, or of CONFIG and --cfg-options only."""
    parser = Parser(description=inspect.cleandoc(description), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='path of a config file, or the end of one below configs/')
    override = 'override entries of the config, for example train_dataloader.batch_size=64 data_root=images'
    parser.add_argument('--cfg-options', nargs='+', default=[], action='extend', metavar='KEY=VALUE', help=override)
    if config_only:
        parser.set_defaults(work_dir=None, launcher='none')
        return parser
    parser.add_argument('--work-dir', help='folder of logs and checkpoints (default: work_dirs/<name of the config>)')
    parser.add_argument('--amp', action='store_true', help='mixed precision, if the config has none')
    launchers = 'how the processes are started (dist_train.sh passes pytorch)'
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none', help=launchers)
    # Launchers older than torchrun pass LOCAL_RANK as an argument too, in either spelling.
    parser.add_argument('--local_rank', '--local-rank', type=int, help=argparse.SUPPRESS)
    return parser


def load_config(args: argparse.Namespace, steps: int | None = None) -> Config:
    """Reads the config and applies the command line; for torchrun without a GPU it also starts a gloo group."""
    from beit_mm.apis.configs import RunConfig, find_config, read_config

    path = find_config(args.config)
    cfg = read_config(path)
    if steps is not None:
        for pair in args.cfg_options:
            if pair.startswith(('train_cfg.max_iters=', 'train_cfg.max_epochs=')):
                raise UserError(f'--steps {steps} and {pair} both say how long the run is; leave one of them out')
        scale_to_steps(cfg, steps)
    merge_options(cfg, args.cfg_options)
    set_launcher(cfg, args.launcher)
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or f'work_dirs/{path.stem}'
    # Without a name mmengine writes the config as Python, where RunConfig removes templates; JSON and YAML keep them.
    return RunConfig(cfg.to_dict(), filename=cfg.filename if path.suffix == '.py' else None)


def set_launcher(cfg: Config, launcher: str) -> None:
    import torch

    if launcher == 'none' and os.environ.get('WORLD_SIZE', '1') not in ('', '1'):
        raise UserError(f'WORLD_SIZE={os.environ["WORLD_SIZE"]}: give --launcher pytorch, or each process runs alone')
    if launcher in ('slurm', 'mpi') and not torch.cuda.is_available():  # mmengine would divide by 0
        raise UserError(f'--launcher {launcher} needs GPUs, and torch sees none; use tools/dist_*.sh on CPUs')
    cfg.launcher = launcher
    if launcher == 'pytorch' and not torch.cuda.is_available():
        # mmengine's launcher and wrapper would select a GPU; it accepts an existing group, and another wrapper.
        torch.distributed.init_process_group('gloo')
        wrapper = dict(type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
        cfg.model_wrapper_cfg = cfg.get('model_wrapper_cfg') or wrapper
    if 'find_unused_parameters' in cfg and cfg.get('model_wrapper_cfg'):  # then mmengine ignores the former
        cfg.model_wrapper_cfg.find_unused_parameters = cfg.find_unused_parameters


def merge_options(cfg: Config, pairs: Iterable[str]) -> None:
    """Overrides entries of a config by KEY=VALUE pairs; UserError for a key that nothing reads."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, value = pair.partition('=')
        if not equals:
            raise UserError(f'--cfg-options: {pair!r} is not KEY=VALUE')
        options[key] = parse_value(key, value)
        if key.endswith('init_cfg.checkpoint'):
            options.setdefault(key.replace('init_cfg.checkpoint', 'init_cfg.type'), 'Pretrained')
    if 'data_root' in options:
        options = roots_of_datasets(cfg, options['data_root']) | options

    def order(key: str) -> int:
        return dict(_delete_=0, type=1).get(key.rpartition('.')[2], 2)  # the others are types' arguments

    for name in sorted(options, key=order):
        key, value = key_with_places(cfg, name), options[name]
        check_key(cfg, key)
        replace_none(cfg, key, value)
        cfg.merge_from_dict({key: value})


def key_with_places(cfg: Config, key: str) -> str:
    """The key with places in lists for names of types: `pipeline.3.variant` for `pipeline.BlockwiseMask.variant`.

    A type may have its scope, `pipeline.beit_mm.BlockwiseMask`; UserError if a list has it more than once.
    """
    entry: Any = cfg.to_dict()
    path: list[str] = []
    for name in key.split('.'):
        if isinstance(entry, list | tuple):
            whole = [str(item.get('type')) if isinstance(item, dict) else '' for item in entry]
            types = [each.rpartition('.')[2] for each in whole]
            if any(each.startswith(f'{name}.') for each in whole):  # a scope, as in beit_mm.BlockwiseMask
                continue
            if types.count(name) > 1:
                raise UserError(f'--cfg-options {key}: {name} stands {types.count(name)} times; give its place instead')
            name = str(types.index(name)) if name in types else name
            entry = entry[int(name)] if name.isdigit() and int(name) < len(entry) else None
        else:
            entry = entry.get(name) if isinstance(entry, dict) else None
        path.append(name)
    return '.'.join(path)


def replace_none(entry: Any, key: str, value: Any) -> None:
    """Turns each None that an option would fill into an empty dict: mmengine merges nothing into a None."""
    path = key.split('.')
    outer = path if isinstance(value, dict) else path[:-1]
    for name in outer:
        place = int(name) if isinstance(entry, list | tuple) else name
        if place == name and name not in entry:
            return
        if entry[place] is None:
            entry[place] = {}
        entry = entry[place]


def roots_of_datasets(cfg: Config, new: str) -> dict[str, str]:
    """The `data_root` of each dataset, with `new` in place of their common part: data/train and data/val in `data`."""
    loaders = [name for name in cfg if name.endswith('_dataloader') and cfg[name]]
    roots = {name: cfg[name].dataset.data_root for name in loaders if cfg[name].dataset.get('data_root')}
    if not roots:
        raise UserError('--cfg-options data_root: no dataset of this config has one; set each data_prefix')
    parts = {name: os.path.relpath(root, os.path.commonpath(roots.values())) for name, root in roots.items()}
    moved = {name: new if part == '.' else os.path.join(new, part) for name, part in parts.items()}
    return {f'{name}.dataset.data_root': root for name, root in moved.items()}


def check_kept(cfg: Config, pairs: Iterable[str]) -> None:
    """Raises UserError for an option of `--cfg-options` that another argument of the command line has overridden."""
    from beit_mm.engine.resuming import settings_by_name

    settings = settings_by_name(cfg.to_dict())
    for key, value in dict(pair.split('=', 1) for pair in pairs).items():
        given = repr(parse_value(key, value))
        if (found := settings.get(key_with_places(cfg, key), given)) != given:
            raise UserError(f'--cfg-options {key}={value}: another argument makes it {found}; leave one out')


def parse_value(key: str, value: str) -> Any:
    """The value of an option as mmengine's DictAction reads it, which drops spaces and splits at commas.

    Unlike there, a `data_root`, an existing path and plain text with spaces stay as they are; dicts are JSON.
    """
    from mmengine.config import ConfigDict, DictAction

    is_root = key.endswith('data_root') and ',' in value
    is_path = set(', /') & set(value) and os.path.exists(value)  # a plain number, too, may be the name of a folder
    is_text = ' ' in value and not set('[({\',"') & set(value)
    if is_root or is_path or is_text:
        return value
    if re.match(r'\{ *["\'}]|\[ *\{', value):
        try:
            return ConfigDict(value=json.loads(value)).value
        except json.JSONDecodeError as error:
            raise UserError(f'--cfg-options: {key} holds dicts but is not JSON ({error})') from error
    read = argparse.Namespace()
    DictAction([], dest='values')(None, read, [f'{key}={value}'])
    return read.values[key]


def check_key(cfg: Config, key: str) -> None:
    """Refuses a key that nothing reads, which would be a new entry without effect, and suggests a similar one."""
    entry: Any = cfg.to_dict()
    path: list[str] = []
    for name in key.split('.'):
        if not isinstance(entry, dict | list | tuple):
            return
        known, takes_others = keys_of(entry, path, cfg.get('default_scope') or 'mmengine')
        if name not in known:
            near = get_close_matches(name, known, n=1, cutoff=0.85 if takes_others else 0.6)
            if takes_others and not near:
                return
            owner = entry.get('type') if isinstance(entry, dict) else None
            owner = owner or '.'.join(path) or 'the config'
            raise UserError(
                f'--cfg-options {key}: {name} is not a setting of {owner}'
                + (f'; did you mean {".".join([*path, *near])}?' if near else '')
            )
        entry = entry.get(name) if isinstance(entry, dict) else entry[int(name)]
        path.append(name)


def keys_of(entry: Any, path: Sequence[str], scope: str) -> tuple[set[str], bool]:
    """Keys that the config entry at `path` may have, and whether others may also have an effect."""
    from mmengine.runner import Runner
    from torch.utils.data import DataLoader

    if not path:
        return {*inspect.signature(Runner).parameters, *READ_TOO.split()}, False
    if not isinstance(entry, dict):
        types = {item['type'] for item in entry if isinstance(item, dict) and isinstance(item.get('type'), str)}
        return {*map(str, range(len(entry))), *(each.rpartition('.')[2] for each in types)}, False
    if path[-1].endswith('_dataloader'):
        return {*entry, *inspect.signature(DataLoader).parameters} - {'shuffle'}, False  # the sampler decides
    if 'type' not in entry:
        return {*entry}, True
    arguments, takes_others = arguments_of(entry['type'], scope)
    return arguments.union(entry), takes_others


def arguments_of(kind: Any, scope: str) -> tuple[set[str], bool]:
    """Arguments of a class, or of all classes that registries have under a name, and whether they take any others."""
    found = classes_named(kind if '.' in kind else f'{scope}.{kind}') if isinstance(kind, str) else [kind]
    names, takes_others = {*READ_BY_BUILDERS.split()}, not found
    for one in found:
        bases = inspect.getmro(one) if inspect.isclass(one) else ()
        for function in [vars(base)['__init__'] for base in bases if '__init__' in vars(base)] or [one]:
            kinds = {parameter.name: parameter.kind for parameter in inspect.signature(function).parameters.values()}
            names |= {name for name, kind in kinds.items() if not kind.name.startswith('VAR_')} - {'self'}
            if inspect.Parameter.VAR_KEYWORD not in kinds.values():
                break
            takes_others = True  # handed to the base class, or to another library
    return names, takes_others


def classes_named(name: str) -> list[Any]:
    """What the registries have under a name."""
    from mmengine import registry

    found: list[Any] = []
    for root in vars(registry).values():
        if isinstance(root, registry.Registry):
            with without_output(), contextlib.suppress(ImportError, RuntimeError):  # `get` raises for unknown names
                found += filter(None, [root.get(name)])
    return found
