"""Semantic segmentation with MMSegmentation: what its segmentors, heads and hooks lack. The only folder with mmseg."""
from .label_check import LabelCheckHook
from .lean_heads import LeanSETRUPHead, LeanUPerHead
from .multi_scale import MultiScaleTTA, MultiScaleViews
from .segmentor import SlidingSegmentor
from .sync_bn import SyncBN

__all__ = [
    'LabelCheckHook', 'LeanSETRUPHead', 'LeanUPerHead', 'MultiScaleTTA', 'MultiScaleViews', 'SlidingSegmentor', 'SyncBN'
]
