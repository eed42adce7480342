"""Semantic segmentation with MMSegmentation: what its segmentors, heads and hooks lack. The only folder with mmseg."""
from .lean_heads import EfficientSETRUPHead, EfficientUPerHead
from .multi_scale import MultiScaleTTA, MultiScaleViews
from .segmentor import SlidingSegmentor
from .sync_bn import SyncBN

__all__ = [
    'EfficientSETRUPHead', 'EfficientUPerHead', 'MultiScaleTTA', 'MultiScaleViews', 'SlidingSegmentor', 'SyncBN'
]
