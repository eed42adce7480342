"""Semantic segmentation with MMSegmentation. Outside this folder only functions in apis import mmseg."""

from .heads import EfficientSETRUPHead, EfficientUPerHead, FCNHead, SETRUPHead, SyncBN
from .mask_head import MaskClassificationHead
from .metrics import IoUMetric
from .segmentor import BandsDataPreprocessor, MultiScaleTTA, MultiScaleViews, SlidingSegmentor
