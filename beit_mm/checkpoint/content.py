"""What stands in a checkpoint file beside its weights."""
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError

FORMAT_VERSION = 1  # of the checkpoints that we write, `meta['beit_mm_format']`
WRAPPERS = ('state_dict', 'model', 'module', 'weights')  # under which files keep a state dict
IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
HALF = dict(mean=[127.5] * 3, std=[127.5] * 3)
# The released files do not say how their images were normalised; microsoft/unilm's README and ADE20K configs do.
RELEASED = re.compile(
    r'beit_(?:base|large)_patch16_(?P<size>\d+)_(?P<data>pt1k|pt22k)\w*?(?P<ade>toade20k)?(?:-\w+)?\.\w+$')


def weights_of(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict in a file's content, however it is wrapped."""
    while inner := next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None):
        content = inner
    return {name: value for name, value in content.items() if isinstance(value, Tensor)}


def meta_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `meta` of OpenMMLab's and our files; empty in others."""
    meta = content.get('meta')
    return meta if isinstance(meta, dict) else {}


def check_version(content: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError when a later version of this package wrote the file."""
    version = meta_of(content).get('beit_mm_format', 0)
    if version > FORMAT_VERSION:
        raise CheckpointError(f'{path} has format {version}, this version of beit_mm reads up to {FORMAT_VERSION}: '
                              'upgrade beit_mm.')


def preprocessing_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """How the images were prepared that the weights were trained on, as far as file, neighbours and name say.

    Returns:
        Some of `mean` and `std` of each channel, pixels 0-255, and `size` (height, width) in pixels.
    """
    if said := meta_of(content).get('preprocessing'):
        return said
    if isinstance(args := content.get('args'), dict) and 'imagenet_default_mean_and_std' in args:  # unilm's trainers
        found = dict(IMAGENET if args['imagenet_default_mean_and_std'] else HALF)
        return dict(found, size=[args['input_size']] * 2) if 'input_size' in args else found
    neighbour = path.with_name('preprocessor_config.json')
    if neighbour.is_file():
        return _of_transformers(json.loads(neighbour.read_text()))
    if match := RELEASED.search(path.name):
        mean_and_std = IMAGENET if match['data'] == 'pt1k' or match['ade'] else HALF
        return dict(mean_and_std, size=[int(match['size'])] * 2)
    return {}


def architecture_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the shapes of the weights do not show, as far as file and neighbours say: `num_heads`, `out_indices`."""
    if said := meta_of(content).get('architecture'):
        return said
    neighbour = path.with_name('config.json')
    config = json.loads(neighbour.read_text()) if neighbour.is_file() else {}
    return dict(num_heads=config['num_attention_heads']) if config.get('model_type') == 'beit' else {}


def _of_transformers(config: Mapping[str, Any]) -> dict[str, Any]:
    """From the content of a preprocessor_config.json, which has pixels in [0, 1]."""
    found = {ours: [255 * value for value in config[theirs]]
             for ours, theirs in (('mean', 'image_mean'), ('std', 'image_std')) if theirs in config}
    size = config.get('crop_size') if config.get('do_center_crop') else config.get('size')
    if isinstance(size, int):
        found['size'] = [size, size]
    elif isinstance(size, Mapping) and 'height' in size:
        found['size'] = [size['height'], size['width']]
    return found
