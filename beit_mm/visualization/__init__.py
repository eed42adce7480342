"""Pictures: reconstructions and curves, and the hooks that draw them."""
from .curves import CurveHook
from .pictures import PictureHook

__all__ = ['CurveHook', 'PictureHook']
