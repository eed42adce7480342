"""Finds configs by name, fits them to other images, and writes them."""

import functools
import math
import pprint
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml
from mmengine.config import Config

from beit_mm.errors import UserError
from beit_mm.files import atomic_file, config_folders, inert

NARROW_PRETRAINING = 'demo/pretrain.py'  # a pretraining of a narrow model on a user's images


def find_config(name: str) -> Path:
    """The file of a config: a path, or the end of one below configs/, with or without `.py`."""
    if (path := Path(name)).is_file():
        return path
    wanted = name.removesuffix('.py')
    files: dict[str, Path] = {}  # the checkout's replace the package's
    for folder in config_folders():
        files = {str(path.relative_to(folder))[:-3]: path for path in folder.rglob('*.py')} | files
    found = sorted(known for known in files if f'/{known}'.endswith(f'/{wanted}'))
    if len(found) > 1:
        raise UserError(f'{name!r} names {len(found)} configs; expected one of {", ".join(found)}')
    if found:
        return files[found[0]]
    near = get_close_matches(wanted, files, n=1)
    raise FileNotFoundError(
        f'{name!r}: no file of this name, and no config below {" or ".join(map(str, config_folders()))}'
        + (f'; did you mean {near[0]!r}?' if near else '')
    )


def read_config(path: str | Path) -> Config:
    """Reads a user's config; UserError if it is not Python, whose traceback names no file, or a module is not found."""
    try:
        refuse_tags(Path(path))
        return Config.fromfile(path)
    except RecursionError:
        raise UserError(f'{path} is among its own _base_, or nested too deeply') from None
    except SyntaxError as error:
        raise UserError(f'{path} or one of its _base_, line {error.lineno}: {error.msg}: {error.text}') from error
    except ImportError as error:  # of custom_imports too, whose cause mmengine hides behind the whole sys.path
        cause: BaseException = error
        while inner := cause.__cause__ or cause.__context__:
            cause = inner
        raise UserError(f'{path}: {cause}; for a module of your own, set PYTHONPATH to its folder') from error


def refuse_tags(path: Path) -> None:
    """Refuses YAML, also as a base, whose tags mmengine would execute: unlike Python it looks like data."""
    if path.suffix not in ('.yml', '.yaml'):
        return
    try:
        content = yaml.safe_load(path.read_bytes()) or {}
    except yaml.YAMLError as error:
        raise UserError(f'{path}: {" ".join(str(error).split())}; expected YAML without tags of Python') from None
    if not isinstance(content, dict):
        raise UserError(f'{path}: expected settings by name, found a {type(content).__name__}')
    for base in [bases] if isinstance(bases := content.get('_base_') or [], str) else bases:
        refuse_tags(path.parent / base)


def config_text(name: str) -> str:
    """The text of a config, see `find_config`, with all that it inherits."""
    return inert(read_config(find_config(name)).pretty_text)


@functools.cache
def bundled_config(name: str) -> Config:
    """A config of this package, by its path below configs/, never from the current folder. Do not change it."""
    return Config.fromfile(str(next(path for folder in config_folders() if (path := folder / name).is_file())))


class RunConfig(Config):
    """A config in memory. Its text, for users and in checkpoints, holds no template for mmengine to fill in."""

    @property
    def pretty_text(self) -> str:
        return inert(super().pretty_text)


def run_config(base: str, settings: Mapping[str, Any], path: Path | None = None) -> RunConfig:
    """The config that `write_config` writes to `path`, made without parsing file and class names as code."""
    config = Config(bundled_config(base).to_dict())
    config.merge_from_dict(settings)
    return RunConfig(config.to_dict(), filename=path and str(path))


def write_config(path: Path, title: str, base: str, settings: Mapping[str, Any]) -> None:
    """Writes a config based on one of this package, for the user to read and change."""
    assigned = [f'{key} = {pprint.pformat(value, width=110, sort_dicts=False)}' for key, value in settings.items()]
    text = f'"""{title}\n\nCommand: python tools/train.py {path.name}\n"""\n'
    text += f'_base_ = {bundled_config(base).filename!r}\n\n' + '\n\n'.join(assigned) + '\n'
    with atomic_file(path) as file:
        file.write(inert(text).encode())


def pipeline_for_size(
    pipeline: Sequence[Mapping[str, Any]], size: tuple[int, int], **others: Any
) -> list[dict[str, Any]]:
    """A recipe's pipeline for images of another size (height, width); `others` replace arguments that steps have."""
    values = dict(others, size=size, crop_size=size[::-1])
    steps = [{key: values.get(key, value) for key, value in step.items()} for step in pipeline]
    crop = next((step['crop_size'] for step in pipeline if 'crop_size' in step), None)
    for step in steps:
        if step['type'] == 'ResizeEdge':
            step['scale'] = round(step['scale'] * min(size) / crop)  # keeps the ratio of edge and crop
    return steps


def mask_settings(grid: tuple[int, int], stride: int | None) -> dict[str, Any]:
    """Pipeline arguments of a pretraining for a patch grid (h, w) and visual tokens of `stride` pixels; None: features.

    The same share of patches is masked as in the recipe, 75 of 14 x 14.
    """
    rows, columns = grid
    mask = dict(num_masked=round(75 / 196 * rows * columns), min_block=min(16, max(1, rows * columns // 9)))
    return dict(mask, grid=grid, second_size=(stride * rows, stride * columns) if stride else None)


def rate_for_batch(rate: float, ratio: float) -> float:
    """A recipe's learning rate for another batch size: times the square root of their `ratio`, as suits Adam."""
    return float(f'{rate * math.sqrt(ratio):.2g}')


def warmup_and_cosine(steps: int, warmup: int, batch: int, eta_min_ratio: float = 0.0) -> dict[str, Any]:
    warmup = max(2, min(warmup, steps // 5))  # mmengine never leaves a warm-up of one step
    end = max(steps, warmup + 1)
    cosine = dict(begin=warmup, end=end, T_max=end - warmup, eta_min_ratio=eta_min_ratio)
    return dict(
        param_scheduler=[
            dict(type='LinearLR', start_factor=1e-9, by_epoch=False, begin=0, end=warmup),
            dict(type='CosineAnnealingLR', by_epoch=False, **cosine),
        ],
        train_cfg=dict(_delete_=True, type='beit_mm.IterLoop', max_iters=steps, val_interval=steps),
        default_hooks=dict(
            logger=dict(interval=min(50, max(1, steps // 20)), log_metric_by_epoch=False),
            checkpoint=dict(by_epoch=False, interval=max(50, min(500, steps // 4)), max_keep_ckpts=2),
        ),
        log_processor=dict(by_epoch=False),
        auto_scale_lr=dict(base_batch_size=batch),
    )
