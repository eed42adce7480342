"""The config inside a checkpoint is data: a closed list of types, of their arguments, and of the values of these.

Building a type runs code with its arguments, and mmengine imports names that it does not know from anywhere. So an
inferencer builds what is listed here and nothing else, and no sizes that only take memory and time.
"""

import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from beit_mm.checkpoint.names import MAX_SIDE
from beit_mm.terminal import UserError

Check = Callable[[Any, str], Any]  # (value, its place) -> the value as it is to be built

# Of no use to a model that is not trained; taken out, whatever they hold
TRAINING_KEYS = ('init_cfg', 'loss', 'loss_decode', 'pretrained', 'train_cfg', 'auxiliary_head', 'batch_augments')
IDENTIFIER = re.compile(r'[A-Za-z]\w{0,40}')
MAX_UPSAMPLING = 64  # of a head, each side
MAX_WINDOWS = 8  # along a side of a window: how often windows of a segmentor may overlap


class RefusedError(UserError):
    """A config asks for something that is not on the list; says for what."""


def _leaf(is_right: Callable[[Any], bool], expected: str) -> Check:
    def check(value: Any, place: str) -> Any:
        if value is None or is_right(value):
            return value
        raise RefusedError(f'{place}={reprlib.repr(value)} (expected {expected})')

    return check


def whole(most: int, least: int = 1) -> Check:
    """An integer."""
    return _leaf(lambda value: type(value) is int and least <= value <= most, f'{least} to {most}')


def real(least: float, most: float) -> Check:
    """A finite number."""
    return _leaf(lambda value: type(value) in (int, float) and least <= value <= most, f'{least:g} to {most:g}')


def one_of(*values: Any) -> Check:
    """One of some values, of the same type."""
    return _leaf(
        lambda value: any(type(value) is type(known) and value == known for known in values),
        ' or '.join(map(repr, values)),
    )


def several(check: Check, most: int = 64, alone: bool = False) -> Check:
    """A list of at most `most` values, which becomes a tuple as mmcv wants it; `alone`: or a single value."""

    def check_all(values: Any, place: str) -> Any:
        if isinstance(values, (list, tuple)) and 0 < len(values) <= most:
            return tuple(check(value, place) for value in values)
        if alone or values is None:
            return check(values, place)
        raise RefusedError(f'{place}={reprlib.repr(values)} (expected a list of 1 to {most})')

    return check_all


def fields(**checks: Check) -> Check:
    """A dict without a type."""

    def check(values: Any, place: str) -> Any:
        return values if values is None else _arguments(values, checks, place)

    return check


def part(*types: str) -> Check:
    """A dict that is built: the type is one of these, the first where none is named, its arguments are listed below."""
    return lambda values, place: values if values is None else check_part(values, types, place)


FLAG = one_of(True, False)
NAME = _leaf(lambda value: isinstance(value, str) and IDENTIFIER.fullmatch(value) is not None, 'a name')
WIDTH, WIDTHS = whole(16_384), several(whole(16_384), 8, alone=True)
PIXELS, SIZE = whole(4096), several(whole(4096), 2, alone=True)
CLASSES = whole(100_000)
BLOCKS = several(whole(127, -128), 128, alone=True)
CHANNELS = several(real(-1000, 1000), 16)
SPREADS = several(real(0.001, 1000), 16)
VALUES = several(real(-1e9, 1e9), 16, alone=True)  # in a file of bands
ARCHITECTURE = fields(
    embed_dims=whole(8192), num_layers=whole(128), num_heads=whole(256), feedforward_channels=whole(32_768)
)
RESIZING = dict(
    scale=SIZE,
    backend=one_of('cv2', 'pillow'),
    interpolation=one_of('nearest', 'bilinear', 'bicubic', 'area', 'lanczos', 'box', 'hamming'),
)
NORM = part('BN', 'SyncBN', 'beit_mm.SyncBN', 'LN', 'GN')
ACTIVATION = part('ReLU', 'GELU')
BACKBONE = part('beit_mm.BEiTBackbone')
CLASSIFIED = dict(
    mean=CHANNELS,
    std=SPREADS,
    num_classes=CLASSES,
    to_rgb=FLAG,
    to_onehot=FLAG,
    pad_size_divisor=whole(256),
    pad_value=real(0, 255),
)
HEAD = dict(
    in_channels=WIDTHS,
    in_index=several(whole(63, -64), 8, alone=True),
    channels=WIDTH,
    num_classes=CLASSES,
    out_channels=CLASSES,
    threshold=real(0, 1),
    dropout_ratio=real(0, 1),
    norm_cfg=NORM,
    act_cfg=ACTIVATION,
    input_transform=one_of('resize_concat', 'multiple_select'),
    ignore_index=whole(100_000, -100),
    align_corners=FLAG,
)
SETR_HEAD = dict(HEAD, norm_layer=NORM, num_convs=whole(6), up_scale=whole(8), kernel_size=one_of(1, 3))
UPER_HEAD = dict(HEAD, pool_scales=several(whole(64), 8))
SEGMENTOR = ('beit_mm.SlidingSegmentor',)
# Types and arguments; those of mmpretrain and mmseg may also be named with the library before them
ARGUMENTS: dict[str, dict[str, Check]] = {
    'beit_mm.BEiTBackbone': dict(
        arch=lambda value, place: (NAME if isinstance(value, str) else ARCHITECTURE)(value, place),
        img_size=SIZE,
        patch_size=whole(64, 4),
        in_channels=whole(64),
        out_indices=BLOCKS,
        out_type=NAME,
        masked_input=FLAG,
        abs_pos_embed=FLAG,
        rel_pos_bias=NAME,
        layer_scale_init=real(0, 1),
        drop_path_rate=real(0, 1),
        frozen_stages=whole(128, -1),
        with_cp=FLAG,
        interpolate_mode=NAME,
    ),
    # classification
    'ImageClassifier': dict(
        backbone=BACKBONE,
        head=part('LinearClsHead', 'StackedLinearClsHead'),
        data_preprocessor=part('ClsDataPreprocessor', 'beit_mm.ClassificationDataPreprocessor'),
    ),
    'beit_mm.LinearProbe': dict(
        backbone=BACKBONE,
        num_classes=CLASSES,
        layers=BLOCKS,
        feature=NAME,
        data_preprocessor=part('ClsDataPreprocessor', 'beit_mm.ClassificationDataPreprocessor'),
    ),
    'LinearClsHead': dict(num_classes=CLASSES, in_channels=WIDTH, topk=several(CLASSES, alone=True), cal_acc=FLAG),
    'StackedLinearClsHead': dict(
        num_classes=CLASSES,
        in_channels=WIDTH,
        mid_channels=several(WIDTH, 8),
        dropout_rate=real(0, 1),
        norm_cfg=NORM,
        act_cfg=ACTIVATION,
        topk=several(CLASSES, alone=True),
        cal_acc=FLAG,
    ),
    'ClsDataPreprocessor': CLASSIFIED,
    'beit_mm.ClassificationDataPreprocessor': CLASSIFIED,
    # segmentation
    'beit_mm.MultiScaleTTA': dict(module=part(*SEGMENTOR)),
    'beit_mm.SlidingSegmentor': dict(
        backbone=BACKBONE,
        neck=part('Feature2Pyramid'),
        decode_head=part(
            'UPerHead', 'beit_mm.EfficientUPerHead', 'SETRUPHead', 'beit_mm.EfficientSETRUPHead', 'FCNHead'
        ),
        data_preprocessor=part('SegDataPreProcessor'),
        test_cfg=fields(
            mode=one_of('slide'),
            crop_size=several(PIXELS, 2),
            stride=several(PIXELS, 2),
            precision=NAME,
            windows_per_batch=whole(64),
        ),
    ),
    'Feature2Pyramid': dict(
        embed_dim=WIDTH, rescales=several(one_of(4, 2, 1, 0.5, 0.25, 4.0, 2.0, 1.0), 8), norm_cfg=NORM
    ),
    'UPerHead': UPER_HEAD,
    'beit_mm.EfficientUPerHead': UPER_HEAD,
    'SETRUPHead': SETR_HEAD,
    'beit_mm.EfficientSETRUPHead': SETR_HEAD,
    'FCNHead': dict(HEAD, num_convs=whole(8, 0), kernel_size=one_of(1, 3, 5, 7), concat_input=FLAG, dilation=whole(8)),
    'SegDataPreProcessor': dict(
        mean=CHANNELS,
        std=SPREADS,
        size=SIZE,
        size_divisor=whole(256),
        pad_val=real(0, 255),
        seg_pad_val=real(0, 255),
        bgr_to_rgb=FLAG,
        rgb_to_bgr=FLAG,
    ),
    # visual tokens; files are found by the caller
    'beit_mm.DiscreteVAE': dict(
        arch=one_of('conv', 'dalle'),
        hidden=whole(2048),
        vocab_size=whole(65_536),
        embed_dims=whole(8192),
        num_levels=whole(6),
        in_channels=whole(64),
        bottleneck_blocks=whole(16, 0),
        loss=one_of('mse', 'laplace'),
    ),
    'beit_mm.DALLETokenizer': dict(precision=one_of('fp16', 'bf16', 'fp32')),
    # layers
    **dict.fromkeys(('BN', 'SyncBN', 'beit_mm.SyncBN'), dict(eps=real(0, 1), momentum=real(0, 1), requires_grad=FLAG)),
    'LN': dict(eps=real(0, 1), requires_grad=FLAG),
    'GN': dict(eps=real(0, 1), requires_grad=FLAG, num_groups=WIDTH),
    'ReLU': dict(inplace=FLAG),
    'GELU': {},
    # images
    'beit_mm.LoadImage': dict(scaled=FLAG),
    'beit_mm.LoadBands': dict(bands=several(whole(1000, 0), 16), low=VALUES, high=VALUES),
    'LoadImageFromFile': dict(
        to_float32=FLAG,
        ignore_empty=one_of(False),
        color_type=one_of('color', 'grayscale', 'unchanged'),
        imdecode_backend=one_of('cv2'),  # Pillow would hand PostScript to a program
    ),
    'Resize': dict(
        RESIZING, keep_ratio=FLAG, scale_factor=several(real(0.1, 4), 2, alone=True), clip_object_border=FLAG
    ),
    'ResizeEdge': dict(RESIZING, scale=whole(2048), edge=one_of('short', 'long', 'width', 'height')),
    'CenterCrop': dict(crop_size=SIZE),
    'PackInputs': dict(input_key=NAME, meta_keys=several(NAME), algorithm_keys=several(NAME)),
    'PackSegInputs': dict(meta_keys=several(NAME)),
    'beit_mm.MultiScaleViews': dict(short_side=whole(1024), crop_size=SIZE, ratios=several(real(0.1, 4), 16)),
}
MODELS = {'classifier': ('ImageClassifier', 'beit_mm.LinearProbe'), 'segmentor': (*SEGMENTOR, 'beit_mm.MultiScaleTTA')}
LOADERS = ('beit_mm.LoadImage', 'beit_mm.LoadBands', 'LoadImageFromFile')
TRANSFORMS = {
    'classifier': (*LOADERS, 'Resize', 'ResizeEdge', 'CenterCrop', 'PackInputs'),
    'segmentor': (*LOADERS, 'Resize', 'PackSegInputs', 'beit_mm.MultiScaleViews'),
}


def check_stored_config(model: Any, pipeline: Sequence[Any], task: str) -> tuple[dict, list[dict]]:
    """A model and a test pipeline that a file asks for, as far as they may be built on its word.

    Args:
        model, pipeline: nested containers of anything.
        task: 'classifier' or 'segmentor'.

    Returns:
        New containers without what only training needs.

    Raises:
        RefusedError: a type, an argument or a value that is not on the list; names it.
    """
    model = check_part(model, MODELS[task], 'model')
    steps = [check_part(step, TRANSFORMS[task], f'pipeline[{index}]') for index, step in enumerate(pipeline)]
    segmentor = model.get('module', model)
    backbone, test_cfg = segmentor.get('backbone') or {}, segmentor.get('test_cfg') or {}
    patch = backbone.get('patch_size') or 16
    fixed = [size for step in steps if (size := _fixed_size(step))]
    if task == 'classifier' and len(steps) > 1 and not fixed:
        raise RefusedError('a test pipeline that gives images of any size (expected CenterCrop or Resize)')
    sizes = dict(img_size=backbone.get('img_size') or 1, crop_size=test_cfg.get('crop_size') or 1)
    for name, size in (*sizes.items(), *(('pipeline', size) for size in fixed)):
        if _longest(size) > MAX_SIDE * patch:
            raise RefusedError(f'{name}={size} (expected at most {MAX_SIDE} patches of {patch} pixels a side)')
    stride = test_cfg.get('stride') or (_longest(sizes['crop_size']),)
    if min(stride) * MAX_WINDOWS < _longest(sizes['crop_size']):
        raise RefusedError(f'stride={stride} (expected at least 1/{MAX_WINDOWS} of the window)')
    head = segmentor.get('decode_head') or {}
    if (head.get('up_scale') or 1) ** (head.get('num_convs') or 1) > MAX_UPSAMPLING:
        raise RefusedError(
            f'up_scale={head["up_scale"]} of {head["num_convs"]} layers (expected {MAX_UPSAMPLING} in all)'
        )
    return model, steps


def check_part(values: Any, types: Sequence[str], place: str) -> dict:
    """A dict with its type, one of `types`, and its arguments."""
    if not isinstance(values, dict):
        raise RefusedError(f'{place}={reprlib.repr(values)} (expected a dict)')
    name = values.get('type', types[0])
    bare = re.sub(r'^(mmpretrain|mmseg)\.', '', name) if isinstance(name, str) else ''
    if bare not in types:
        raise RefusedError(reprlib.repr(name))
    arguments = {key: value for key, value in values.items() if key != 'type'}
    return dict(type=name, **_arguments(arguments, ARGUMENTS[bare], place))


def _arguments(values: Any, checks: Mapping[str, Check], place: str) -> dict:
    if not isinstance(values, dict):
        raise RefusedError(f'{place}={reprlib.repr(values)} (expected a dict)')
    found = {}
    for name, value in values.items():
        if name in checks:
            found[name] = checks[name](value, f'{place}.{name}')
        elif name not in TRAINING_KEYS and value is not None:
            raise RefusedError(f'{place}.{reprlib.repr(name)[1:-1]}={reprlib.repr(value)}')
    return found


def _fixed_size(step: dict) -> Any:
    """The size of the images that a step of a pipeline gives whatever theirs; None where theirs matters."""
    return step.get('crop_size') or (None if step.get('keep_ratio') or 'edge' in step else step.get('scale'))


def _longest(size: int | Sequence[int]) -> int:
    return size if isinstance(size, int) else max(size)
