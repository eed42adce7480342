"""Configs: found by name, and written for a run."""

import functools
import pprint
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mmengine.config import Config

from beit_mm.errors import UserError
from beit_mm.files import atomic_file, config_folders, inert


def find_config(name: str) -> Path:
    """The file of a config: a path, or the end of one below configs/, with or without `.py`."""
    if (path := Path(name)).is_file():
        return path
    wanted = name.removesuffix('.py')
    files: dict[str, Path] = {}  # of the checkout before those of the package
    for folder in config_folders():
        files = {str(path.relative_to(folder))[:-3]: path for path in folder.rglob('*.py')} | files
    found = sorted(known for known in files if f'/{known}'.endswith(f'/{wanted}'))
    if len(found) > 1:
        raise UserError(f'{name!r} names {len(found)} configs; expected one of {", ".join(found)}')
    if found:
        return files[found[0]]
    near = get_close_matches(wanted, files, n=1)
    looked = f'no file of this name, and no config below {" or ".join(map(str, config_folders()))}'
    raise FileNotFoundError(f'{name!r}: {looked}' + (f'; did you mean {near[0]!r}?' if near else ''))


def config_text(name: str) -> str:
    """A config, see `find_config`, with all that it inherits."""
    return inert(Config.fromfile(str(find_config(name))).pretty_text)


@functools.cache
def own_config(name: str) -> Config:
    """A config of this package, by its path below configs/, never from the current folder. Do not change it."""
    return Config.fromfile(str(next(path for folder in config_folders() if (path := folder / name).is_file())))


class RunConfig(Config):
    """A config in memory. Its text, for users and in checkpoints, holds no template for mmengine to fill in."""

    @property
    def pretty_text(self) -> str:
        return inert(super().pretty_text)


def run_config(base: str, settings: Mapping[str, Any], path: Path | None = None) -> RunConfig:
    """The config that `write_config` has written to `path`, without parsing names of files and classes as code."""
    config = Config(own_config(base).to_dict())
    config.merge_from_dict(settings)
    return RunConfig(config.to_dict(), filename=path and str(path))


def write_config(path: Path, title: str, base: str, settings: Mapping[str, Any]) -> None:
    """Writes a config based on one of this package, for the user to read and change."""
    assigned = [f'{key} = {pprint.pformat(value, width=110, sort_dicts=False)}' for key, value in settings.items()]
    text = f'"""{title}\n\nCommand: python tools/train.py {path.name}\n"""\n'
    text += f'_base_ = {own_config(base).filename!r}\n\n' + '\n\n'.join(assigned) + '\n'
    with atomic_file(path) as file:
        file.write(inert(text).encode())
