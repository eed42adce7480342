"""Images, their transforms, masks and samplers."""

from .image_folder import ImageFolder, UnlabeledImages
from .masking import BlockwiseMask, RandomMask
from .samplers import RepeatedAugmentationSampler, SeededSampler
from .transforms import (
    LoadImage,
    PackViews,
    RandAugment,
    RandomErasing,
    TwoViewCenterCrop,
    TwoViewColorJitter,
    TwoViewRandomResizedCrop,
    UnreadableImageError,
)
