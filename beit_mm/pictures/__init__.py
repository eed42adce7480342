"""Pictures of what a model makes of images."""

from beit_mm.pictures.training import ReconstructionHook
