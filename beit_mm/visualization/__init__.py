"""Pictures: reconstructions, curves and confusions, and the hooks that draw them."""
from .confusion import ConfusionHook
from .curves import CurveHook
from .pictures import PictureHook

__all__ = ['ConfusionHook', 'CurveHook', 'PictureHook']
