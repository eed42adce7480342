"""What stands in a checkpoint file beside its weights."""
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.keys import unwrapped

FORMAT_VERSION = 1  # of the checkpoints that we write, `meta['beit_mm_format']`
WRAPPERS = ('state_dict', 'model', 'module', 'weights', 'model_ema', 'state_dict_ema')  # keys of the state dict
HUB_FILES = ('model.safetensors', 'pytorch_model.bin')  # transformers' and timm's weights in a folder
IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
HALF = dict(mean=[127.5] * 3, std=[127.5] * 3)
# The released files do not say how their images were normalised; microsoft/unilm's README and ADE20K configs do.
RELEASED = re.compile(
    r'beit_(?:base|large)_patch16_(?P<size>\d+)_(?P<data>pt1k|pt22k)\w*?(?P<ade>toade20k)?(?:-\w+)?\.\w+$')


def weights_of(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict in a file's content, however it and its names are wrapped."""
    while inner := next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None):
        content = inner
    return {unwrapped(name): value for name, value in content.items()
            if isinstance(name, str) and isinstance(value, Tensor)}


def meta_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `meta` of OpenMMLab's and our files; empty in others."""
    meta = content.get('meta')
    return meta if isinstance(meta, dict) else {}


def check_version(content: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError when a later version of this package wrote the file."""
    version = meta_of(content).get('beit_mm_format', 0)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(f'{path} has format {version}, this version of beit_mm reads up to {FORMAT_VERSION}: '
                              'upgrade beit_mm.')


def preprocessing_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """How the images were prepared that the weights were trained on, as far as file, neighbours and name say.

    Returns:
        Some of `mean` and `std` of each channel, pixels 0-255, and `size` (height, width) in pixels.

    Raises:
        CheckpointError: a neighbour that is no JSON.
    """
    found = meta_of(content).get('preprocessing')
    if not found and isinstance(args := content.get('args'), dict):  # of unilm's trainers
        found = _of_unilm(args)
    if not found:
        found = _of_hub(_neighbour(path, 'preprocessor_config.json'), _neighbour(path, 'config.json'))
    if not found and (match := RELEASED.search(path.name)):
        mean_and_std = IMAGENET if match['data'] == 'pt1k' or match['ade'] else HALF
        found = dict(mean_and_std, size=[int(match['size'])] * 2)
    return {name: list(found[name]) for name in ('mean', 'std', 'size') if _is_numbers(found, name)}


def architecture_of(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What the shapes of the weights do not show, as far as file and neighbours say: `num_heads`, `out_indices`."""
    found = meta_of(content).get('architecture')
    if not isinstance(found, dict):
        config = _neighbour(path, 'config.json')
        found = dict(num_heads=config.get('num_attention_heads')) if config.get('model_type') == 'beit' else {}
    return {name: value for name, value in found.items() if isinstance(value, (int, list))}


def _of_unilm(args: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(IMAGENET if args.get('imagenet_default_mean_and_std') else HALF)
    return dict(found, size=[args['input_size']] * 2) if 'input_size' in args else found


def _of_hub(processor: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """From the files beside transformers' and timm's weights, which have pixels in [0, 1]."""
    timm = config.get('pretrained_cfg')
    if isinstance(timm, dict):
        processor = dict(image_mean=timm.get('mean'), image_std=timm.get('std'))
        config = dict(image_size=(timm.get('input_size') or [None])[-2:])
    found = {ours: [255 * value for value in processor[theirs]]
             for ours, theirs in (('mean', 'image_mean'), ('std', 'image_std')) if _is_numbers(processor, theirs)}
    size = config.get('image_size')
    return dict(found, size=[size] * 2 if isinstance(size, int) else size)


def _neighbour(path: Path, name: str) -> dict[str, Any]:
    """Content of a JSON file in the same folder as weights that bear one of the hub's names; empty without one."""
    file = path.with_name(name)
    if path.name not in HUB_FILES or not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text())
    except ValueError as error:
        raise CheckpointError(f'{file} beside the weights is no JSON: {error}.') from None
    return content if isinstance(content, dict) else {}


def _is_numbers(found: object, name: str) -> bool:
    values = found.get(name) if isinstance(found, Mapping) else None
    return isinstance(values, (list, tuple)) and all(isinstance(value, (int, float)) for value in values)
