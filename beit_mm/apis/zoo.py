"""Released models by name: which there are, and one of them with its weights."""

import functools
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import torch
from mmengine.config import Config
from mmengine.fileio import load
from mmengine.registry import DefaultScope
from torch import nn

from beit_mm.apis.plans import config_folders
from beit_mm.checkpoint.fit import load_from_file
from beit_mm.registry import MODELS

WHOLE = 'this config'  # what the metafile says of weights that have a value for every tensor of the config's model


class Released(NamedTuple):
    """Released weights.

    Attributes:
        config: path of the config whose model they belong to.
        url: of the file.
        holds: what was trained, on which data.
        fits: the part of the model that they are for.
    """

    config: Path
    url: str
    holds: str
    fits: str


@functools.cache
def released() -> dict[str, Released]:
    """All released weights of whole models and backbones, by the names of their files, from the configs' metafiles."""
    found = {}
    for file in sorted(config_folders()[0].glob('*/metafile.yml')):
        for entry in load(file)['Models']:
            for weights in entry.get('Released Weights') or ():
                if weights['Fits'] in (WHOLE, 'the backbone and head of this config'):
                    config = file.parents[1].parent / entry['Config']
                    name = Path(weights['URL']).stem
                    found[name] = Released(config, weights['URL'], weights['Holds'], weights['Fits'])
    return found


def list_models(pattern: str = '*') -> list[str]:
    """Names of released weights.

    Args:
        pattern: as of file names: '*ade20k', 'beitv2_large*'.

    Returns:
        Sorted names for `get_model`.
    """
    return sorted(name for name in released() if fnmatch(name, pattern))


def get_model(name: str, pretrained: bool | str | Path = False) -> nn.Module:
    """A model of a released file: a pretrainer without its tokenizer, a classifier or a segmentor.

    Args:
        name: one of `list_models`.
        pretrained: True takes the released weights from $BEIT_MM_WEIGHTS, torch hub's cache or the web; a path takes
            those of a file; False leaves random ones.

    Returns:
        The model of the file's config, in evaluation mode. What its images need is in its `data_preprocessor`;
        ClassificationInferencer, SegmentationInferencer and FeatureExtractor take files and do all of that.

    Raises:
        ValueError: an unknown name; names the nearest.
        FileNotFoundError: no weights; says where they are.
        CheckpointError, RuntimeError: weights of another backbone, or of another whole model.
    """
    if name not in released():
        near = get_close_matches(name, released(), n=1, cutoff=0.5)
        raise ValueError(
            f'no released model {name!r}' + (f'; did you mean {near[0]!r}?' if near else '; see list_models()')
        )
    entry = released()[name]
    cfg = Config.fromfile(entry.config)
    cfg.model.get('backbone').init_cfg = None
    if 'target_generator' in cfg.model:
        cfg.model.target_generator = None
    with DefaultScope.overwrite_default_scope(cfg.default_scope):
        model = MODELS.build(cfg.model)
    if pretrained:
        content = load_from_file(entry.url if pretrained is True else str(pretrained))
        with torch.no_grad():
            model.load_state_dict(content.get('state_dict', content), strict=entry.fits == WHOLE)
    return model.eval()
