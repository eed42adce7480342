"""Pictures of what a model makes of images."""

from .pictures import ReconstructionHook
