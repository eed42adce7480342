"""Semantic segmentation with MMSegmentation. No other folder imports mmseg."""

from .heads import EfficientSETRUPHead, EfficientUPerHead, SyncBN
from .segmentor import MultiScaleTTA, MultiScaleViews, SlidingSegmentor
