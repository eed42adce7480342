"""Semantic segmentation with MMSegmentation: what its segmentors, heads and hooks lack. The only folder with mmseg."""
from .label_check import LabelCheckHook
from .sync_bn import SyncBN

__all__ = ['LabelCheckHook', 'SyncBN']
