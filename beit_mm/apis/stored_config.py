"""The config inside a checkpoint is data: a closed list of types, and of the names of their arguments.

Building a type runs code with its arguments, and mmengine imports names that it does not know from anywhere. So an
inferencer builds what is listed here and nothing else, first without memory, to compare shapes with the weights'.
"""

import re
import reprlib
from collections.abc import Sequence
from typing import Any

from beit_mm.errors import UserError

# Of no use to a model that is not trained; taken out, whatever they hold
TRAINING_KEYS = 'init_cfg loss loss_decode pretrained train_cfg auxiliary_head batch_augments cache_bytes'.split()
NAME = re.compile(r'[A-Za-z]\w*')  # of all text: no path and no address
MAX_SIDE = 8192  # pixels
# Largest numbers, of what would take memory or hours whatever the weights are. Each layer does on the meta device too.
MOST = {
    **dict.fromkeys('num_layers num_levels num_convs bottleneck_blocks windows_per_batch'.split(), 256),
    **dict.fromkeys('crop_size img_size short_side size size_divisor pad_size_divisor'.split(), MAX_SIDE),
    **dict.fromkeys('ratios scale_factor up_scale rescales'.split(), 16),
    'pool_scales': 64,
}
MAX_LENGTH = 64  # of lists, as of the scales of a test
LEAST_STRIDE = 8  # pixels; and a window is at most so many strides
FIXED = dict(imdecode_backend='cv2')  # Pillow would hand PostScript to a program

SEGMENTOR = ('beit_mm.SlidingSegmentor',)
UPERNET = ('UPerHead', 'beit_mm.EfficientUPerHead')
SETR_PUP = ('SETRUPHead', 'beit_mm.SETRUPHead', 'beit_mm.EfficientSETRUPHead')
FCN = ('FCNHead', 'beit_mm.FCNHead')
NORM = ('BN', 'SyncBN', 'beit_mm.SyncBN', 'LN', 'GN')
LOADERS = ('beit_mm.LoadImage', 'beit_mm.LoadBands', 'LoadImageFromFile')
MODELS = dict(classifier=('ImageClassifier', 'beit_mm.LinearProbe'), segmentor=(*SEGMENTOR, 'beit_mm.MultiScaleTTA'))
TRANSFORMS = dict(
    classifier=(*LOADERS, 'Resize', 'ResizeEdge', 'CenterCrop', 'PackInputs'),
    segmentor=(*LOADERS, 'Resize', 'PackSegInputs', 'beit_mm.MultiScaleViews'),
)
# Arguments that are built, and of which types; of the first where none is named
PARTS = dict(
    backbone=('beit_mm.BEiTBackbone',),
    data_preprocessor=('ClsDataPreprocessor', 'beit_mm.ClassificationDataPreprocessor', 'SegDataPreProcessor'),
    head=('LinearClsHead', 'StackedLinearClsHead'),
    module=SEGMENTOR,
    neck=('Feature2Pyramid',),
    decode_head=(*UPERNET, *SETR_PUP, *FCN),
    norm_cfg=NORM,
    norm_layer=NORM,
    act_cfg=('ReLU', 'GELU'),
)
# Arguments that are dicts without a type, and their keys
SETTINGS = dict(
    arch='embed_dims num_layers num_heads feedforward_channels',
    test_cfg='mode crop_size stride precision windows_per_batch',
)
CLASSES = 'mean std num_classes to_rgb to_onehot pad_size_divisor pad_value'
HEAD = 'in_channels in_index channels num_classes out_channels threshold dropout_ratio norm_cfg act_cfg '
HEAD += 'input_transform ignore_index align_corners'
RESIZED = 'scale backend interpolation'
# Types and their arguments; those of mmpretrain and mmseg may also be named with the library before them
ARGUMENTS = {
    'beit_mm.BEiTBackbone': """
        arch img_size patch_size in_channels out_indices out_type masked_input abs_pos_embed rel_pos_bias
        layer_scale_init drop_path_rate frozen_stages with_cp interpolate_mode
    """,
    # classification
    'ImageClassifier': 'backbone head data_preprocessor',
    'beit_mm.LinearProbe': 'backbone num_classes layers feature data_preprocessor',
    'LinearClsHead': 'num_classes in_channels topk cal_acc',
    'StackedLinearClsHead': 'num_classes in_channels mid_channels dropout_rate norm_cfg act_cfg topk cal_acc',
    **dict.fromkeys(('ClsDataPreprocessor', 'beit_mm.ClassificationDataPreprocessor'), CLASSES),
    # segmentation
    'beit_mm.MultiScaleTTA': 'module',
    'beit_mm.SlidingSegmentor': 'backbone neck decode_head data_preprocessor test_cfg',
    'Feature2Pyramid': 'embed_dim rescales norm_cfg',
    **dict.fromkeys(UPERNET, f'{HEAD} pool_scales'),
    **dict.fromkeys(SETR_PUP, f'{HEAD} norm_layer num_convs up_scale kernel_size'),
    **dict.fromkeys(FCN, f'{HEAD} num_convs kernel_size concat_input dilation'),
    'SegDataPreProcessor': 'mean std size size_divisor pad_val seg_pad_val bgr_to_rgb rgb_to_bgr',
    # visual tokens; their caller finds the files
    'beit_mm.DiscreteVAE': 'arch hidden vocab_size embed_dims num_levels in_channels bottleneck_blocks loss',
    'beit_mm.DALLETokenizer': 'precision',
    # layers
    **dict.fromkeys(('BN', 'SyncBN', 'beit_mm.SyncBN'), 'eps momentum requires_grad'),
    'LN': 'eps requires_grad',
    'GN': 'eps requires_grad num_groups',
    'ReLU': 'inplace',
    'GELU': '',
    # images
    'beit_mm.LoadImage': 'scaled',
    'beit_mm.LoadBands': 'bands low high',
    'LoadImageFromFile': 'to_float32 ignore_empty color_type imdecode_backend',
    'Resize': f'{RESIZED} keep_ratio scale_factor clip_object_border',
    'ResizeEdge': f'{RESIZED} edge',
    'CenterCrop': 'crop_size',
    'PackInputs': 'input_key meta_keys algorithm_keys',
    'PackSegInputs': 'meta_keys',
    'beit_mm.MultiScaleViews': 'short_side crop_size ratios',
}


class RefusedError(UserError):
    """A config asks for something that is not on the list; says for what."""


def check_stored_config(model: Any, pipeline: Sequence[Any], task: str) -> tuple[dict, list[dict]]:
    """Model and test pipeline of a stored config as they may be built for a 'classifier' or 'segmentor'.

    Raises:
        RefusedError: a type or an argument that is not on the list, or a value that is no name, number or list.
    """
    model = check_part(model, MODELS[task], 'model')
    return model, [check_part(step, TRANSFORMS[task], f'pipeline[{index}]') for index, step in enumerate(pipeline)]


def check_part(values: Any, types: Sequence[str], place: str) -> dict[str, Any]:
    """What may be built of a stored config, as a new dict without what only training needs; else RefusedError.

    `types` are those that it may have, the first where none is named; `place` stands in the message.
    """
    if not isinstance(values, dict):
        raise RefusedError(f'{place}={reprlib.repr(values)} (expected a dict)')
    kind = values.get('type', types[0])
    bare = re.sub(r'^(mmpretrain|mmseg)\.', '', kind) if isinstance(kind, str) else ''
    if bare not in types:
        raise RefusedError(reprlib.repr(kind))
    arguments = {name: value for name, value in values.items() if name != 'type'}
    return dict(type=kind, **_arguments(arguments, ARGUMENTS[bare].split(), place))


def _arguments(values: dict, names: Sequence[str], place: str) -> dict[str, Any]:
    checked = {}
    for name, value in values.items():
        if name in names:
            checked[name] = _value(name, value, f'{place}.{name}')
        elif name not in TRAINING_KEYS and value is not None:
            raise RefusedError(f'{place}.{reprlib.repr(name)[1:-1]}={reprlib.repr(value)}')
    _check_sizes(checked, place)
    return checked


def _check_sizes(values: dict, place: str) -> None:
    """Raises RefusedError for a resizing or windows that could take hours, which two arguments decide."""
    scale, stride, crop = (values.get(name) for name in ('scale', 'stride', 'crop_size'))
    sides = scale if isinstance(scale, tuple) else (scale or 0,)
    if (min if values.get('keep_ratio') else max)(sides) > MAX_SIDE:  # of an image that keeps its shape the short side
        raise RefusedError(f'{place}.scale={reprlib.repr(scale)} (expected at most {MAX_SIDE} pixels)')
    if isinstance(stride, tuple) and isinstance(crop, tuple):
        if any(step < max(LEAST_STRIDE, side / LEAST_STRIDE) for step, side in zip(stride, crop, strict=False)):
            expected = f'expected {LEAST_STRIDE} pixels or more, and an eighth of crop_size={crop}'
            raise RefusedError(f'{place}.stride={reprlib.repr(stride)} ({expected})')


def _value(name: str, value: Any, place: str) -> Any:
    if name in PARTS and value is not None:
        return check_part(value, PARTS[name], place)
    if name in SETTINGS and isinstance(value, dict):
        return _arguments(value, SETTINGS[name].split(), place)
    if name in MOST and isinstance(value, (int, float)) and value > MOST[name]:
        raise RefusedError(f'{place}={reprlib.repr(value)} (expected at most {MOST[name]})')
    if value is None or type(value) in (bool, int, float):
        return value
    if isinstance(value, (list, tuple)) and len(value) <= MAX_LENGTH:
        # mmcv wants tuples, and the JSON of .safetensors files has none
        return tuple(_value(name, item, place) for item in value)
    if isinstance(value, str) and NAME.fullmatch(value) and value == FIXED.get(name, value):
        return value
    raise RefusedError(f'{place}={reprlib.repr(value)} (expected {FIXED.get(name, "a name, number or short list")})')
