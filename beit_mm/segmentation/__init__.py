"""Semantic segmentation with MMSegmentation, which only functions of apis import beside it."""

from .heads import EfficientSETRUPHead, EfficientUPerHead, FCNHead, SETRUPHead, SyncBN
from .segmentor import BandsDataPreprocessor, MultiScaleTTA, MultiScaleViews, SlidingSegmentor
