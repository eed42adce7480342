"""Pictures that no library draws."""

from .pictures import ReconstructionHook

__all__ = ['ReconstructionHook']
