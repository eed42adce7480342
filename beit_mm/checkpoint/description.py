"""Reads what a checkpoint file, its name and the files beside it say about its weights."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from beit_mm.checkpoint.find import HUB_FILES
from beit_mm.checkpoint.names import ROTARY_BASE, TABLE, released_out_indices
from beit_mm.errors import CheckpointError, warn
from beit_mm.files import quoted
from beit_mm.positions import POSITION_MODES

MAX_NUMBER = 1e6  # limit for pixels, means and numbers of blocks
MAX_SIDE = 8192  # pixels of an image that is resized as a file says
ROTARY_SETTINGS = dict(rope_theta=ROTARY_BASE, layer_norm_eps=1e-5)  # of transformers' DINOv3
FORMAT_VERSION = 1  # stored as `meta['beit_mm_format']` in the checkpoints that we write
IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])
HALF = dict(mean=[127.5] * 3, std=[127.5] * 3)
SATELLITE = dict(mean=[109.65, 104.805, 75.48], std=[54.315, 39.78, 36.465])  # of DINOv3's SAT-493M
NORMALISATIONS = dict(imagenet=IMAGENET, half=HALF, satellite=SATELLITE, none=dict(mean=[0.0] * 3, std=[255.0] * 3))
CROP_RATIO = 0.875  # of the configs' test pipelines, which crop nothing at 384 pixels or more
INTERPOLATIONS = ('nearest', 'lanczos', 'bilinear', 'bicubic', 'box', 'hamming')  # in the order of Pillow's numbers
# steps of transformers' processors that are done here too, or that do not concern images
DONE = 'do_resize do_center_crop do_rescale do_normalize do_convert_rgb do_reduce_labels'.split()
# Names of released files, which show how images were normalised: microsoft/unilm's, according to its README and ADE20K
# configs, and timm's for the same files, which end in `.in22k_ft_in1k` or the like.
RELEASED = re.compile(
    r'beit(?P<v2>v2)?_(?:base|large)_patch16_(?P<size>\d+)[_.](?P<data>(?:pt|in)(?:1k|22k))\w*?(?P<ade>ade20k)?'
    r'(?:-\w+)?\.\w+$'
)


def meta_of(content: Mapping[str, Any]) -> dict[str, Any]:
    """The `meta` of OpenMMLab's and our files; empty for others."""
    meta = content.get('meta')
    return meta if isinstance(meta, dict) else {}


def class_names(meta: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Class names in a file's `meta`, or None; CheckpointError for anything other than names."""
    dataset = meta.get('dataset_meta')
    names = (dataset.get('classes') if isinstance(dataset, dict) else None) or meta.get('CLASSES') or ()
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise CheckpointError(f'has classes of type {type(names).__name__}, expected a list of names')
    return tuple(names) or None


def describe_source(content: Mapping[str, Any], path: Path, format: str | None = None) -> dict[str, Any]:
    """The `meta` of a file, completed from its arguments, its name and the JSON files beside it.

    Returns:
        preprocessing: where known, `mean` and `std` of each channel, pixels 0-255, `size` (height, width), and
            `geometry`: see `usual_geometry`.
        architecture: what the shapes of the weights do not show, `num_heads`, `out_indices` and `interpolate_mode`.
        dataset_meta: with the class names as `classes`, even if only a config.json of transformers or timm has them.
        Everything else is as in the file.

    Raises CheckpointError for a file of a later version, or a model whose JSON file names what we do not have.
    """
    meta = dict(meta_of(content))
    version = meta.get('beit_mm_format', 0)
    if version > FORMAT_VERSION:
        raise CheckpointError(f'has format {version}, but this reads {FORMAT_VERSION}: upgrade beit_mm.')
    config = _neighbour(path, 'config.json')
    model, activation = config.get('architecture') or content.get('arch'), config.get('hidden_act', 'gelu')
    if format and re.search('rope|enormous', str(model)):  # timm's; no tensor shows it, nor the activation
        raise CheckpointError(f'is not a BEiT or plain ViT: {ascii(model):.60} has rotary positions or post-norm')
    expected = 'silu' if config.get('use_gated_mlp') else 'gelu'
    if format == 'hf' and activation != expected:
        raise CheckpointError(f'is not a BEiT or plain ViT: its activation is {ascii(activation):.40}, not {expected}')
    for key, usual in ROTARY_SETTINGS.items() if 'rope_theta' in config else ():
        if config.get(key, usual) != usual:
            raise CheckpointError(f'has {key} {ascii(config[key]):.40}; expected {usual}')
    meta['preprocessing'] = _find_preprocessing(content, config, path)
    architecture = meta.get('architecture') or _architecture_of_json(config)
    known = architecture.items() if isinstance(architecture, dict) else ()
    kept = [name for name, part in known if isinstance(part, int) or _numbers(part, int) or part in POSITION_MODES]
    meta['architecture'] = {name: architecture[name] for name in kept}
    classes = _classes_of_json(config)
    if classes and not meta.get('dataset_meta'):
        meta['dataset_meta'] = dict(classes=classes)
    return meta


def _classes_of_json(config: Mapping[str, Any]) -> list[str]:
    """Class names that transformers or timm wrote; empty if there are none."""
    timm = config.get('pretrained_cfg') or {}
    labels = config.get('id2label') or config.get('label_names') or timm.get('label_names') or []
    if isinstance(labels, dict):
        labels = [labels.get(str(label)) for label in range(len(labels))]
    described = config.get('label_descriptions') or timm.get('label_descriptions')
    if isinstance(described, dict):  # timm's names may be numbers of WordNet
        labels = [described.get(name, name) for name in labels]
    return labels if all(isinstance(name, str) for name in labels) else []


def _find_preprocessing(content: Mapping[str, Any], config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Mean and std, and size, from the first source that has any; without values that images cannot have."""
    meta = meta_of(content)
    found = (
        meta.get('preprocessing')
        or _preprocessing_of_arguments(content.get('args'))
        or _preprocessing_of_json(config, path)
        or _preprocessing_of_config_text(meta.get('cfg'))
        or _preprocessing_of_name(path.name)
    )
    found = found if isinstance(found, dict) else {}
    mean, std = (_numbers(found.get(name)) for name in ('mean', 'std'))
    size = _numbers(found.get('size'), int)
    known: dict[str, Any] = dict(size=size) if len(size) == 2 and min(size) > 0 else {}
    if found.get('geometry'):
        known['geometry'] = _checked_geometry(found['geometry'], path)
    return dict(known, mean=mean, std=std) if mean and min(std, default=0) > 0 else known


def _preprocessing_of_arguments(args: Any) -> dict[str, Any]:
    """From unilm's command line, which its files hold; empty if this file has none, as the functions below."""
    if not isinstance(args, dict) or 'imagenet_default_mean_and_std' not in args:
        return {}
    normalisation = IMAGENET if args['imagenet_default_mean_and_std'] else HALF
    return dict(normalisation, size=[args.get('input_size')] * 2)


def _preprocessing_of_json(config: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """From the JSON of transformers or timm, who write mean and std for pixels from 0 to 1; returned for 0 to 255."""
    processor, timm = _neighbour(path, 'preprocessor_config.json'), config.get('pretrained_cfg') or config
    if not processor and not config:
        return {}
    size = config.get('image_size') or _numbers(timm.get('input_size'))[-2:]
    scale = (processor.get('rescale_factor') or 1 / 255) if processor.get('do_rescale', True) else 1
    found = dict(
        mean=[value / scale for value in _numbers(processor.get('image_mean') or timm.get('mean'))],
        std=[value / scale for value in _numbers(processor.get('image_std') or timm.get('std'))],
        size=[size] * 2 if isinstance(size, int) else size,
    )
    if not processor.get('do_normalize', True):
        found |= dict(mean=[0.0] * 3, std=[1 / scale] * 3)
    if processor.get('size'):
        found['geometry'] = _geometry_of_processor(processor)
    elif 'input_size' in timm:
        found['geometry'] = _geometry_of_timm(timm)
    return found


def _geometry_of_processor(processor: Mapping[str, Any]) -> dict[str, Any] | str:
    """How an image processor of transformers resizes and crops; old files have one number for both sides."""
    size, crop = (
        dict(height=value, width=value) if isinstance(value, int) else value or {}
        for value in (processor['size'], processor.get('do_center_crop') and processor.get('crop_size'))
    )
    edges = ['shortest_edge'] if [*size] == ['shortest_edge'] else ['height', 'width']
    steps = [key for key in processor if key.startswith('do_') and key not in DONE and processor[key]]
    asked = [f'{key}={processor[key]}' for key in (*steps, 'crop_pct') if key in processor]
    if not processor.get('do_resize', True):
        asked.append('do_resize=False')
    if {*size} != {*edges}:
        asked.append(f'size={size}')
    if asked:
        return ', '.join(asked)
    resize, number = [size[edge] for edge in edges], processor.get('resample')
    return dict(
        resize=resize,
        crop=[crop['height'], crop['width']] if crop else resize,
        interpolation='bilinear' if number is None else dict(enumerate(INTERPOLATIONS)).get(number),
        rounds_down=True,
    )


def _geometry_of_timm(timm: Mapping[str, Any]) -> dict[str, Any] | str:
    """How timm resizes and crops an image for a test."""
    crop, mode = _numbers(timm['input_size'], int)[-2:], timm.get('crop_mode') or 'center'
    if timm.get('crop_border_pixels'):
        return 'crop_border_pixels'
    if mode != 'squash' and (mode != 'center' or len({*crop}) > 1):
        return f'crop_mode={mode} to {crop}'
    resize = [math.floor(side / (timm.get('crop_pct') or CROP_RATIO)) for side in crop]
    resize = resize if mode == 'squash' else resize[:1]
    return dict(resize=resize, crop=crop, interpolation=timm.get('interpolation') or 'bicubic', rounds_down=False)


def _checked_geometry(found: Any, path: Path) -> dict[str, Any] | None:
    """A geometry from a file; None, with a warning, for one that is not supported."""
    if isinstance(found, dict):
        resize, crop = (_numbers(found.get(name), int) for name in ('resize', 'crop'))
        sides = resize * 2 if len(resize) == 1 else resize
        fits = len(sides) == len(crop) == 2 and all(0 < crop[axis] <= sides[axis] <= MAX_SIDE for axis in (0, 1))
        if fits and found.get('interpolation') in INTERPOLATIONS:
            return dict(found, rounds_down=bool(found.get('rounds_down')))
        found = ', '.join(f'{name}={found.get(name)!r:.40}' for name in ('resize', 'crop', 'interpolation'))
    warn(
        f'{quoted(str(path))}: it asks for {quoted(str(found)[:200])}, which is not supported; the middle of an image '
        'is cropped instead'
    )
    return None


def usual_geometry(size: Sequence[int]) -> dict[str, Any]:
    """How images are resized and cropped to `size` (height, width) if no file says it.

    Returns:
        resize: [short side], or [height, width] for images of any shape; crop: [height, width] of the middle;
        interpolation: Pillow's; rounds_down: see CenterCropDown.
    """
    edge = max(size) if max(size) >= 384 else round(max(size) / CROP_RATIO)
    return dict(resize=[edge], crop=[*size], interpolation='bicubic', rounds_down=False)


def _preprocessing_of_config_text(text: Any) -> dict[str, Any]:
    """Mean and std in a config that OpenMMLab's runner wrote; it is not executed."""
    settings = text.partition('data_preprocessor')[2] if isinstance(text, str) else ''
    lists = {name: re.search(rf'\b{name}=\[([\d.,\s]{{1,999}})\]', settings) for name in ('mean', 'std')}
    return {name: [*map(float, re.findall(r'\d+\.?\d*', found[1]))] for name, found in lists.items() if found}


def _preprocessing_of_name(name: str) -> dict[str, Any]:
    match = RELEASED.search(name)
    if match is None:
        return IMAGENET if 'beitv2' in name else {}
    normalisation = IMAGENET if match['data'].endswith('1k') or match['ade'] else HALF
    # BEiT v2's ADE20K files are named after the pretraining's size
    return dict(normalisation, size=[512 if match['v2'] and match['ade'] else int(match['size'])] * 2)


def _architecture_of_json(config: Mapping[str, Any]) -> dict[str, Any]:
    numbers = _numbers(config.get('out_indices'), int)
    is_released = numbers == released_out_indices(config.get('num_hidden_layers', 12))
    # transformers counts outputs: its 2 is the output of block 0. The files of the released UperNets count blocks.
    blocks = [] if is_released or len(numbers) != 4 else [number - 2 for number in numbers]
    # our own files have beit_mm_out_indices
    return dict(num_heads=config.get('num_attention_heads'), out_indices=config.get('beit_mm_out_indices') or blocks)


def usual_normalisation(names: Iterable[str]) -> tuple[dict[str, list[float]], str]:
    """Mean and std of released weights whose tensors have these names, and a phrase that says whose they are."""
    names = [*names]
    has_tables = any(name.endswith(TABLE) for name in names)
    if not has_tables or any(name.startswith(('patch_aggregation.', 'decode_head.')) for name in names):
        return IMAGENET, "ImageNet's"
    imagenet = ' '.join(f'--{name} {",".join(map(str, values))}' for name, values in IMAGENET.items())
    return HALF, f"BEiT's 127.5, because of the bias tables (BEiT v2 has them too: for it give {imagenet})"


def _numbers(values: Any, kind: Any = (int, float)) -> list:
    """The values as a list if all of them are plausible numbers; otherwise an empty list."""
    numbers = list(values) if isinstance(values, (list, tuple)) else []
    return numbers if all(isinstance(number, kind) and abs(number) < MAX_NUMBER for number in numbers) else []


def _neighbour(path: Path, name: str) -> dict[str, Any]:
    """Content of a JSON file beside weights that are named as on the Hub; empty if there is none."""
    file = path.with_name(name)
    try:
        return json.loads(file.read_text()) if path.name in HUB_FILES and file.is_file() else {}
    except (ValueError, RecursionError) as error:  # the latter of brackets nested too deeply
        raise CheckpointError(f'{file} beside the weights is not JSON: {error}.') from None
