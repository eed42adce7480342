"""RandAugment's operations against timm's, on an RGB image of strong colours."""

import random

import numpy as np
import pytest
from mmengine.registry import init_default_scope
from PIL import Image

from beit_mm.datasets import RandAugment

auto_augment = pytest.importorskip('timm.data.auto_augment')

FILL = (124, 116, 104)
OPERATIONS = {  # timm's name -> mmpretrain's, range, other arguments, mean difference of 255 that is let pass
    'Equalize': ('Equalize', None, {}, 0),
    'PosterizeIncreasing': ('Posterize', (4, 0), {}, 0),
    'ColorIncreasing': ('ColorTransform', (0, 0.9), {}, 1),  # rounds its gray otherwise
    # OpenCV's bicubic against Pillow's
    'Rotate': ('Rotate', (0, 30), {}, 2),
    'ShearX': ('Shear', (0, 0.3), dict(direction='horizontal'), 2),
    'TranslateYRel': ('Translate', (0, 0.45), dict(direction='vertical'), 2),
}


@pytest.fixture(scope='module')
def image() -> np.ndarray:
    small = np.random.default_rng(0).integers(0, 256, (5, 5, 3), dtype=np.uint8)
    small[..., 0] //= 4  # little red, so that the order of the channels shows
    return np.asarray(Image.fromarray(small).resize((96, 96), Image.Resampling.BICUBIC))


@pytest.mark.parametrize('name', OPERATIONS)
def test_operation_is_timms(image, name):
    """At magnitude 9 without its noise. Both draw a sign or none: every result of ours is one of timm's."""
    init_default_scope('mmpretrain')
    kind, magnitude_range, others, tolerance = OPERATIONS[name]
    policy = dict(type=kind, prob=1.0, **others)
    if magnitude_range:
        policy['magnitude_range'] = magnitude_range
    ours = RandAugment([policy], 1, 9, hparams=dict(pad_val=list(FILL), interpolation='bicubic'))
    theirs = auto_augment.AugmentOp(
        name,
        prob=1.0,
        magnitude=9,
        hparams=dict(translate_pct=0.45, img_mean=FILL, interpolation=Image.Resampling.BICUBIC, magnitude_std=0),
    )
    random.seed(0)
    expected = [np.asarray(theirs(Image.fromarray(image))).astype(int) for _ in range(12)]
    np.random.seed(0)
    for _ in range(4):
        result = ours(dict(img=image))['img']
        assert result.shape == image.shape and result.flags.c_contiguous
        assert min(abs(result.astype(int) - image).mean() for image in expected) <= tolerance
