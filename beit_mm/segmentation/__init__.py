"""Semantic segmentation with MMSegmentation. No other folder imports mmseg."""

from .datasets import LoadAnnotation, SegmentationFolder
from .heads import EfficientSETRUPHead, EfficientUPerHead, SyncBN
from .segmentor import MultiScaleTTA, MultiScaleViews, SlidingSegmentor
