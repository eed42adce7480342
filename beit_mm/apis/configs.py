"""Configs: found by name, written for a run, and the models of released ones."""

import functools
import pprint
import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import DefaultScope
from torch import nn

from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput
from beit_mm.checkpoint.find import DEMO, HUB_FILES, WHOLE, nearest, released
from beit_mm.errors import UserError
from beit_mm.files import atomic_file, config_folders, inert
from beit_mm.registry import MODELS


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
    folders = ' or '.join(map(str, config_folders())) or 'an installed package'
    advice = f'did you mean {near[0]!r}?' if near else f'looked for a file of this name, and in {folders}'
    raise FileNotFoundError(f'no config {name!r}; {advice}')


def config_text(name: str) -> str:
    """A config, see `find_config`, with all that it inherits."""
    return inert(Config.fromfile(str(find_config(name))).pretty_text)


@functools.cache
def own_config(name: str) -> Config:
    """A config of ours, by its path below configs/, and never of the current folder; not to be changed."""
    return Config.fromfile(str(next(path for folder in config_folders() if (path := folder / name).is_file())))


class RunConfig(Config):
    """A config in memory. What is written of it, for users and into checkpoints, no reader fills in as a template."""

    @property
    def pretty_text(self) -> str:
        return inert(super().pretty_text)


def run_config(base: str, settings: Mapping[str, Any], path: Path | None = None) -> RunConfig:
    """Our config `base` with other settings, of which `write_config` has written `path`.

    It is never text: names of files and what checkpoints say stay values.
    """
    config = Config(own_config(base).to_dict())
    config.merge_from_dict(settings)
    return RunConfig(config.to_dict(), filename=path and str(path))


def write_config(path: Path, title: str, base: str, settings: Mapping[str, Any]) -> None:
    """Writes a config on top of one of ours, for the user to read and to change."""
    assigned = [f'{key} = {pprint.pformat(value, width=110, sort_dicts=False)}' for key, value in settings.items()]
    text = f'"""{title}\n\nCommand: python tools/train.py {path.name}\n"""\n'
    text += f'_base_ = {own_config(base).filename!r}\n\n' + '\n\n'.join(assigned) + '\n'
    with atomic_file(path) as file:
        file.write(inert(text).encode())


# How names of released, OpenMMLab's and timm's files end, for the data that the last stage of the training saw
TRAINED_ON = re.compile(r'(?:(?:ft|to|[._-]in)1k|(?P<ade>ade20k))(?:_\d{8})?(?:-[0-9a-f]{8})?$')


def get_model(name: str, pretrained: bool | CheckpointInput | None = None) -> nn.Module:
    """A model of a released file: a pretrainer without its tokenizer, a classifier or a segmentor.

    Args:
        name: one of `list_models`.
        pretrained: True takes the released weights from $BEIT_MM_WEIGHTS, torch hub's cache or the web; others
            see `Checkpoint.open`; False leaves random ones. None is True for 'demo', whose weights are here, and False
            for others.

    Returns:
        The model of the file's config, in evaluation mode. What its images need is in its `data_preprocessor`;
        ClassificationInferencer, SegmentationInferencer and FeatureExtractor take files and do all of that.
    """
    if name not in released():
        raise UserError(f'no released model {name!r}{nearest(name) or "; see list_models()"}')
    entry = released()[name]
    pretrained = name == DEMO if pretrained is None else pretrained
    cfg = Config.fromfile(entry.config)
    cfg.model.get('backbone').init_cfg = None
    if 'target_generator' in cfg.model:
        cfg.model.target_generator = None
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    if pretrained:
        checkpoint = Checkpoint.open(entry.url if pretrained is True else pretrained)
        with torch.no_grad():
            model.load_state_dict(checkpoint.state_dict, strict=entry.fits == WHOLE)
    return model.eval()


def metainfo_of_name(checkpoint: Path, num_classes: int) -> dict[str, Any]:
    """Names, and of ADE20K colours, of the classes in a file that names none itself; empty where it cannot be known.

    Other data have 1000 or 150 classes too, so the file's name must end as those of released files do: 'ft1k',
    'ft22kto1k', '_in1k', 'ftade20k', with or without OpenMMLab's date and hash. Of transformers' and timm's files the
    name of the folder counts, or of the repository in the hub's cache.

    Source: mmpretrain `ImageNet.METAINFO`, mmseg `ADE20KDataset.METAINFO`; their order is the released heads'.
    """
    names = checkpoint.absolute().parts[-4:-1] if checkpoint.name in HUB_FILES else [checkpoint.stem]
    found = next((match for name in names if (match := TRAINED_ON.search(name))), None)
    if found and not found['ade'] and num_classes == 1000:
        from mmpretrain.datasets.categories import IMAGENET_CATEGORIES

        return dict(classes=IMAGENET_CATEGORIES)
    if found and found['ade'] and num_classes == 150:
        from mmseg.datasets import ADE20KDataset

        return dict(ADE20KDataset.METAINFO)
    return {}
