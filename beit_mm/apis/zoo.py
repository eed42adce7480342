"""Released models by name: which there are, one with its weights, and the file that a name or path stands for."""

import functools
import re
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple

import torch
from mmengine.config import Config
from mmengine.fileio import load
from mmengine.registry import DefaultScope
from torch import nn

from beit_mm.apis.plans import config_folders
from beit_mm.checkpoint.fit import load_from_file
from beit_mm.checkpoint.io import HUB_FILES, locate_weights, weights_in
from beit_mm.registry import MODELS

WHOLE = 'this config'  # what the metafile says of weights that have a value for every tensor of the config's model
# How names of released, OpenMMLab's and timm's files end, for the data that the last stage of the training saw
TRAINED_ON = re.compile(r'(?:(?:ft|to|[._-]in)1k|(?P<ade>ade20k))(?:_\d{8})?(?:-[0-9a-f]{8})?$')


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
        raise ValueError(f'no released model {name!r}{_nearest(name) or "; see list_models()"}')
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


def checkpoint_of(source: str | Path) -> Path:
    """The weights that a path or a name stands for.

    Args:
        source: a file, the folder of a finished run or one of transformers' or timm's, an address, or one of
            `list_models`, whose file is looked for as that of an address. A file or folder comes before a name.

    Raises:
        FileNotFoundError: none of them; names released models of nearly that name.
    """
    advice = 'Name a file, the folder of a run, or an address.'
    if '://' in str(source):
        return locate_weights(str(source), advice)
    path = weights_in(Path(source).expanduser())
    if path.is_file():
        return path
    if known := released().get(str(source)):
        return locate_weights(known.url, advice)
    raise FileNotFoundError(
        f'{str(source)!r} does not exist; expected a checkpoint, the folder of a finished run, or a released model'
        + (_nearest(Path(source).stem) or ' (see list_models())')
    )


def _nearest(name: str) -> str:
    """A question that ends an error: the released models whose names are most like this one; empty without any."""
    near = get_close_matches(name.lower(), released(), n=3, cutoff=0.6)
    return f'; did you mean {" or ".join(map(repr, near))}?' if near else ''


def metainfo_of_name(checkpoint: Path, num_classes: int) -> dict[str, Any]:
    """Names, and of ADE20K colours, of the classes in a file that names none itself; empty where it cannot be known.

    The number of classes is no proof: there are other data with 1000 or 150 of them. The file's name must end as
    those of released files do: 'ft1k', 'ft22kto1k', '_in1k', 'ftade20k', with or without OpenMMLab's date and hash. Of
    a folder of transformers' or timm's that of the folder, or of the repository in the hub's cache, counts. The
    libraries have no names for ImageNet-22K's classes.

    Args:
        checkpoint: file.
        num_classes: of its head.

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
