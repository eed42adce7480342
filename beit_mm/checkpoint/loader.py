"""How mmengine reads checkpoint files once our models are there: safely, and BEiT files of any format."""

import json
import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from beit_mm.checkpoint.fit import SOURCE_KEY
from beit_mm.checkpoint.io import HUB_FILES, CheckpointError, locate_weights, read_checkpoint
from beit_mm.checkpoint.names import convert_state_dict, detect_format, first_names, unwrapped

FORMAT_VERSION = 1  # of the checkpoints that we write, `meta['beit_mm_format']`
ADVICE = 'Name a file that exists, as load_from, init_cfg.checkpoint, --resume or on the command line.'
WRAPPERS = ('state_dict', 'model', 'module', 'weights', 'model_ema', 'state_dict_ema')  # keys of the state dict
IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
HALF = dict(mean=[127.5] * 3, std=[127.5] * 3)
# The released files do not say how their images were normalised; microsoft/unilm's README and ADE20K configs do.
RELEASED = re.compile(
    r'beit_(?:base|large)_patch16_(?P<size>\d+)_(?P<data>pt1k|pt22k)\w*?(?P<ade>toade20k)?(?:-\w+)?\.\w+$'
)


def load_from_file(filename: str, map_location: object = None) -> dict[str, Any]:
    """Content of a checkpoint file as mmengine wants it: of a BEiT dict(state_dict=..., meta=..., ...).

    A BEiT's file of the released code, timm or transformers gets our names: it has no prefix by which mmengine could
    find the backbone's part. Files with OpenMMLab's names keep them, since its own classes in the same process may want
    them; our backbone translates what it is given. Other files stay as they are, but for the text `meta['config']`,
    which mmengine's resume would execute. What the backbone has to know of the file is in the state dict's metadata.

    Args:
        filename: path or URL.
        map_location: ignored; models and optimizers copy to where their parameters are.

    Raises:
        FileNotFoundError: with the places looked at.
        CheckpointError: no checkpoint, damaged, or written by a later version.
        UnsafeCheckpointError: the file wants to run code.
    """
    path = locate_weights(filename, ADVICE)
    # Not mapped: an optimizer on the CPU keeps the very tensors that it is given, and would crash the process when the
    # file is written again in place, as a script would that edits a checkpoint.
    content = read_checkpoint(path)
    check_version(content, path)
    meta_of(content).pop('config', None)
    weights = weights_of(content)
    source = describe_source(content, path)
    if source['format'] in ('unilm', 'timm', 'hf'):
        try:
            converted = convert_state_dict(weights, source['format'])
        except CheckpointError:  # a Transformer of another kind: a model that wants it knows its names
            source['format'] = None
        else:
            content = dict(
                state_dict=converted.state_dict, meta=dict(meta_of(content), preprocessing=source['preprocessing'])
            )
            source['translated'] = True
            if converted.dropped_keys:
                print_log(
                    f'{path} ({source["format"]}) holds tensors that no model of ours has: {converted.dropped_keys}',
                    logger='current',
                    level=logging.WARNING,
                )
    elif source['format'] is not None:
        content['state_dict'] = weights  # under names without wrappers
    return _with_source(content, source)


def install_loader() -> None:
    """Makes `load_from_file` the way in which mmengine reads paths and URLs; its other schemes stay what they are.

    mmengine 0.10.7 cannot read its own checkpoints with torch >= 2.6; its successors run whatever code a file holds.
    `mim` and the libraries' own scripts start processes in which nothing of ours runs but what the config names, so
    this is done when our models are imported.
    """
    CheckpointLoader.register_scheme(('', 'http://', 'https://'), load_from_file, force=True)


def weights_of(content: Mapping[str, Any]) -> dict[str, Tensor]:
    """The state dict in a file's content, however it and its names are wrapped."""
    while inner := next((content[key] for key in WRAPPERS if isinstance(content.get(key), dict)), None):
        content = inner
    return {
        unwrapped(name): value for name, value in content.items() if isinstance(name, str) and isinstance(value, Tensor)
    }


def meta_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `meta` of OpenMMLab's and our files; empty in others."""
    meta = content.get('meta')
    return meta if isinstance(meta, dict) else {}


def check_version(content: Mapping[str, Any], path: Path) -> None:
    """Raises CheckpointError when a later version of this package wrote the file."""
    version = meta_of(content).get('beit_mm_format', 0)
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise CheckpointError(
            f'{path} has format {version}, this version of beit_mm reads up to {FORMAT_VERSION}: upgrade beit_mm.'
        )


def describe_source(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """What a backbone has to know of the file that it is loaded from, beside its weights.

    Returns:
        path: of the file.
        format: one of `names.FORMATS`, None for no BEiT.
        translated: whether the names are ours by now; False.
        names: the first few.
        preprocessing: what the images were that the weights were trained on: `mean` and `std` of each channel, pixels
            0-255, and `size` (height, width) in pixels; only what file, neighbours and file name say.
        architecture: what the shapes of the weights do not show, `num_heads` and `out_indices`, likewise.

    Raises:
        CheckpointError: a neighbour that is no JSON.
    """
    weights = weights_of(content)
    return dict(
        path=str(path),
        format=detect_format(weights),
        translated=False,
        names=first_names(weights),
        preprocessing=_preprocessing(content, path),
        architecture=_architecture(content, path),
    )


def _with_source(content: dict[str, Any], source: dict[str, Any]) -> dict[str, Any]:
    """The content with `source` in the metadata of the state dict, which reach the backbone's load hook.

    mmengine takes the whole content for a state dict where it has none.
    """
    whole = not isinstance(content.get('state_dict'), dict)
    state_dict = content if whole else content['state_dict']
    metadata = OrderedDict(getattr(state_dict, '_metadata', {}))
    for module in ('', 'backbone', 'module.backbone'):  # of a backbone, of a model, of a model in a wrapper
        metadata[module] = {**metadata.get(module, {}), SOURCE_KEY: source}
    state_dict = OrderedDict(state_dict)
    state_dict._metadata = metadata
    if whole:
        return state_dict
    content['state_dict'] = state_dict
    return content


def _preprocessing(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = meta_of(content).get('preprocessing')
    if not found and isinstance(args := content.get('args'), dict):  # of unilm's trainers
        found = dict(IMAGENET if args.get('imagenet_default_mean_and_std') else HALF)
        found |= dict(size=[args['input_size']] * 2) if 'input_size' in args else {}
    if not found:
        found = _hub_preprocessing(_neighbour(path, 'preprocessor_config.json'), _neighbour(path, 'config.json'))
    if not found and (match := RELEASED.search(path.name)):
        found = dict(IMAGENET if match['data'] == 'pt1k' or match['ade'] else HALF, size=[int(match['size'])] * 2)
    return {name: list(found[name]) for name in ('mean', 'std', 'size') if _is_numbers(found, name)}


def _hub_preprocessing(processor: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """From the files beside transformers' and timm's weights, which have pixels in [0, 1]."""
    timm = config.get('pretrained_cfg')
    if isinstance(timm, dict):
        processor = dict(image_mean=timm.get('mean'), image_std=timm.get('std'))
        config = dict(image_size=(timm.get('input_size') or [None])[-2:])
    found = {
        ours: [255 * value for value in processor[theirs]]
        for ours, theirs in (('mean', 'image_mean'), ('std', 'image_std'))
        if _is_numbers(processor, theirs)
    }
    size = config.get('image_size')
    size = [size] * 2 if isinstance(size, int) else size
    return found | (dict(size=size) if size else {})


def _architecture(content: Mapping[str, Any], path: Path) -> dict[str, Any]:
    found = meta_of(content).get('architecture')
    if not isinstance(found, dict):
        config = _neighbour(path, 'config.json')
        found = dict(num_heads=config.get('num_attention_heads')) if config.get('model_type') == 'beit' else {}
    return {name: value for name, value in found.items() if isinstance(value, (int, list))}


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


def _is_numbers(values: object, name: str) -> bool:
    values = values.get(name) if isinstance(values, Mapping) else None
    return isinstance(values, (list, tuple)) and all(isinstance(value, (int, float)) for value in values)
