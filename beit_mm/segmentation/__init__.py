"""Semantic segmentation with MMSegmentation: what its segmentors, heads and hooks lack. The only folder with mmseg."""
from .label_check import LabelCheckHook
from .lean_heads import EfficientSETRUPHead, EfficientUPerHead
from .multi_scale import MultiScaleTTA, MultiScaleViews
from .segmentor import SlidingSegmentor
from .sync_bn import SyncBN

__all__ = [
    'LabelCheckHook', 'EfficientSETRUPHead', 'EfficientUPerHead', 'MultiScaleTTA', 'MultiScaleViews', 'SlidingSegmentor', 'SyncBN'
]
