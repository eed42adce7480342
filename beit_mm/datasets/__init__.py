"""Images, their transforms, masks and samplers."""
from .annotation import LoadAnnotation
from .image_folder import ImageFolder, UnlabeledImages
from .masking import BlockwiseMask, RandomMask
from .samplers import RepeatedAugmentationSampler, SeededSampler
from .segmentation_folder import SegmentationFolder
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

__all__ = [
    'BlockwiseMask', 'ImageFolder', 'LoadAnnotation', 'LoadImage', 'PackViews', 'RandAugment', 'RandomErasing',
    'RandomMask', 'RepeatedAugmentationSampler', 'SeededSampler', 'SegmentationFolder', 'TwoViewCenterCrop',
    'TwoViewColorJitter', 'TwoViewRandomResizedCrop', 'UnlabeledImages', 'UnreadableImageError'
]
