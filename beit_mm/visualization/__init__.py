"""Pictures: reconstructions, curves, confusions and overlays, and the hooks that draw them."""
from .confusion import ConfusionHook
from .curves import CurveHook
from .overlays import SavePredictionsHook
from .pictures import PictureHook

__all__ = ['ConfusionHook', 'CurveHook', 'PictureHook', 'SavePredictionsHook']
