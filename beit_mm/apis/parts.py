"""Model and test pipeline of a trained checkpoint, from the config inside it or from one that is given."""
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict

from beit_mm.checkpoint.config_text import read_config_text
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.engine.runner import set_num_classes


@dataclass(frozen=True)
class Kind:
    """One kind of trained model.

    Args:
        name: what it is called, e.g. 'classifier'.
        api: the class that asks, for messages.
        scope: the library's scope in which its types are named.
        types: what a checkpoint's own config may name. Building a type runs code with the config's arguments, and
            mmengine imports names that it does not know from anywhere.
        take: `take(values, name)` makes dict(model=..., pipeline=..., default_scope=...) of the values of a config;
            `name` is for messages.
    """
    name: str
    api: str
    scope: str
    types: re.Pattern[str]
    take: Callable[[Mapping[str, Any], str], dict[str, Any]]


def parts_of(kind: Kind, checkpoint: str | Path, meta: Mapping[str, Any], config: str | Path | Config | None,
             ) -> ConfigDict:
    """What an inferencer builds.

    Args:
        kind: what is expected.
        checkpoint: its path, for messages.
        meta: its `meta`.
        config: instead of the checkpoint's own; None for that.

    Returns:
        model, pipeline and default_scope.

    Raises:
        CheckpointError: the checkpoint has no config, or one that names types which only a given config may.
        ValueError: the config describes something else.
    """
    if config is None:
        return _own(kind, checkpoint, meta)
    cfg = config if isinstance(config, Config) else Config.fromfile(str(config))
    parts = kind.take(cfg, f'The config {cfg.filename or ""}'.rstrip())
    classes = (meta.get('dataset_meta') or {}).get('classes')
    if classes and str(cfg.get('runner_type')).endswith('FolderRunner'):
        set_num_classes(parts['model'], len(classes))  # which that runner found out, whatever the config says
    return ConfigDict(parts)


def _own(kind: Kind, checkpoint: str | Path, meta: Mapping[str, Any]) -> ConfigDict:
    text = meta.get('cfg')
    if not isinstance(text, str):
        raise CheckpointError(f'{checkpoint} holds no config; give the one that it was trained with: '
                              f'{kind.api}(checkpoint, config=...)')
    parts = dict(kind.take(read_config_text(text), f'The config in {checkpoint}'), default_scope=kind.scope)
    for name in _types(parts):
        if not isinstance(name, str) or not kind.types.fullmatch(name):
            raise CheckpointError(f'The config in {checkpoint} asks for {name!r}, which is no part of a {kind.name} '
                                  'that is built on the word of a checkpoint; if you trust it, give the config: '
                                  f'{kind.api}(checkpoint, config=...)')
    return ConfigDict(parts)


def without(value: Any, keys: Sequence[str]) -> Any:
    """Nested containers without some keys of their dicts."""
    if isinstance(value, dict):
        return {key: without(inner, keys) for key, inner in value.items() if key not in keys}
    return [without(item, keys) for item in value] if isinstance(value, (list, tuple)) else value


def _types(value: Any) -> Iterator[Any]:
    """Every `type` in nested containers."""
    if isinstance(value, dict):
        if 'type' in value:
            yield value['type']
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _types(item)
