"""Pictures that no library draws."""

from .pictures import ReconstructionHook
