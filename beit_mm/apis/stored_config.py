"""Allow-list of the types that a config stored in a checkpoint may build.

Building a type runs code with its arguments, and mmengine imports a name that it does not know. So a stored config may
use only these types, and give them names, numbers and short lists. A number is limited where it alone, whatever the
weights are, could take too much memory or hours.
"""

import re
import reprlib
from collections.abc import Sequence
from typing import Any

from beit_mm.checkpoint.description import MAX_SIDE
from beit_mm.datasets.reading import MAX_PIXELS
from beit_mm.errors import UserError

# Only training needs these. They are left out, whatever their values.
TRAINING_KEYS = 'init_cfg loss loss_decode pretrained train_cfg auxiliary_head batch_augments cache_bytes'.split()
UNTYPED = ('arch', 'data_preprocessor', 'test_cfg')  # arguments that may be dicts without a type
NAME = re.compile(r'[A-Za-z]\w*')  # any text must be such a name, not a path or URL
FIXED = dict(
    imdecode_backend='cv2',  # Pillow would hand PostScript to a program
    random_weights=False,  # a tokenizer with random weights could have any size
)
MAX_LENGTH = 64  # of lists, such as the scales of a test
LEAST_STRIDE = 8  # pixels; a window also has at most this many strides along a side
LIMITS = {
    **dict.fromkeys('num_layers num_levels num_convs bottleneck_blocks windows_per_batch dilation'.split(), 256),
    **dict.fromkeys('crop_size img_size short_side size size_divisor pad_size_divisor'.split(), MAX_SIDE),
    **dict.fromkeys('ratios factor scale_factor up_scale rescales'.split(), 16),
    'pool_scales': 64,
    'num_blocks': 256,
    'max_pixels': MAX_PIXELS,
}

# The types of mmpretrain and mmseg may have the library's name as a prefix
LAYERS = 'beit_mm.BEiTBackbone BN SyncBN beit_mm.SyncBN LN GN ReLU GELU'
PARTS = dict(
    classifier=f"""
        ImageClassifier beit_mm.LinearProbe beit_mm.AttentiveProbe LinearClsHead StackedLinearClsHead
        MultiLabelLinearClsHead ClsDataPreprocessor beit_mm.ClassificationDataPreprocessor {LAYERS}
    """.split(),
    segmentor=f"""
        beit_mm.SlidingSegmentor beit_mm.MultiScaleTTA SegDataPreProcessor Feature2Pyramid UPerHead SETRUPHead FCNHead
        beit_mm.EfficientUPerHead beit_mm.SETRUPHead beit_mm.EfficientSETRUPHead beit_mm.FCNHead
        beit_mm.MaskClassificationHead {LAYERS}
    """.split(),
)
TOKENIZERS = ('beit_mm.DiscreteVAE', 'beit_mm.DALLETokenizer')
STEPS = """
    beit_mm.LoadImage beit_mm.LoadImageFromFile beit_mm.LoadBands LoadImageFromFile Resize ResizeEdge CenterCrop
    beit_mm.CenterCropDown PackInputs PackSegInputs beit_mm.ResizeToScale beit_mm.MultiScaleViews
""".split()


class RefusedError(UserError):
    """A value that is not allowed in a config stored in a checkpoint."""

    def __init__(self, place: str, value: Any, expected: str) -> None:
        argument = f'{place}={reprlib.repr(value)}'
        super().__init__(f'{argument} is not allowed in a config stored in a checkpoint (expected {expected})')


def check_part(values: Any, types: Sequence[str], place: str) -> dict[str, Any]:
    """Checks a part of a stored config; returns it as a new dict without what only training needs.

    Raises RefusedError for a type, at any depth, that is not among `types`, and for a value that is not a name, a
    number within the limits or a short list. `place` is where the part stands in the config.
    """
    checked: dict[str, Any] = {}
    if 'type' in values or not place.endswith(UNTYPED):
        kind = values.get('type')
        if values.get('_scope_') == 'beit_mm':  # LoadImage, under the name that mmseg's inferencers look for
            kind = f'beit_mm.{kind}'
        if not isinstance(kind, str) or re.sub(r'^(mmpretrain|mmseg)\.', '', kind) not in types:
            raise RefusedError(f'{place}.type', kind, 'a type from the allow-list')
        checked['type'] = kind
    for name, value in values.items():
        of_training = name in TRAINING_KEYS and not (name == 'loss' and isinstance(value, str))  # a tokenizer's
        if name == 'type' or (name, value) == ('_scope_', 'beit_mm') or of_training:
            continue
        if not isinstance(name, str) or not NAME.fullmatch(name):
            raise RefusedError(f'{place}.{reprlib.repr(name)[1:-1]}', value, 'the name of an argument')
        checked[name] = check_value(name, value, types, f'{place}.{name}')
    check_sizes(checked, place)
    return checked


def check_value(name: str, value: Any, types: Sequence[str], place: str) -> Any:
    """Checks and returns an argument of a stored config; lists become tuples, which mmcv wants and JSON lacks."""
    if name in FIXED and value != FIXED[name]:
        raise RefusedError(place, value, repr(FIXED[name]))
    if isinstance(value, dict):
        return check_part(value, types, place)
    if isinstance(value, (list, tuple)) and len(value) <= MAX_LENGTH:
        return tuple(check_value(name, item, types, place) for item in value)
    is_name = isinstance(value, str) and NAME.fullmatch(value)
    if not is_name and type(value) not in (type(None), bool, int, float):
        raise RefusedError(place, value, 'a name, number or short list')
    if name in LIMITS and isinstance(value, (int, float)) and value > LIMITS[name]:
        raise RefusedError(place, value, f'at most {LIMITS[name]}')
    return value


def check_sizes(values: dict, place: str) -> None:
    """Raises RefusedError for resizing or windows that could take hours; both depend on two arguments."""
    scale, stride, crop = (values.get(name) for name in ('scale', 'stride', 'crop_size'))
    sides = scale if isinstance(scale, tuple) else (scale or 0,)
    side = min(sides) if values.get('keep_ratio') else max(sides)  # of an image that keeps its shape: the short side
    if side > MAX_SIDE:
        raise RefusedError(f'{place}.scale', scale, f'at most {MAX_SIDE} pixels')
    if isinstance(stride, tuple) and isinstance(crop, tuple):
        least = [max(LEAST_STRIDE, side / LEAST_STRIDE) for side in crop]
        if any(step < limit for step, limit in zip(stride, least, strict=False)):
            raise RefusedError(f'{place}.stride', stride, f'at least {LEAST_STRIDE} and an eighth of crop_size={crop}')
