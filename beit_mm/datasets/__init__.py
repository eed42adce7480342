"""Images, their transforms, masks and samplers."""

from beit_mm.terminal import without_output

with without_output():
    import mmpretrain.datasets  # noqa: F401

from .image_folder import ImageFolder, MultiLabelFolder, UnlabeledImages
from .masking import BlockwiseMask, RandomMask
from .multi_crop import MultiCrop
from .reading import LoadBands, LoadImage, UnreadableImageError
from .samplers import RepeatedAugmentationSampler, SeededSampler
from .segmentation_folder import LoadAnnotation, SegmentationFolder
from .transforms import (
    CenterCropDown,
    PackViews,
    RandAugment,
    RandomCropAtScale,
    RandomErasing,
    RandomResizedCrop,
    ResizeToPatches,
    ResizeToScale,
    TwoViewCenterCrop,
    TwoViewColorJitter,
    TwoViewRandomResizedCrop,
)
