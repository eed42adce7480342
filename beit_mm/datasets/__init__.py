"""Images, their transforms and samplers, and images that the package makes itself."""
from .color_jitter import TwoViewColorJitter
from .formatting import PackViews
from .image_folder import ImageFolder
from .image_reading import LoadImage, UnreadableImageError
from .images import UnlabeledImages
from .masks import BlockwiseMask, RandomMask
from .rand_augment import RandAugment
from .random_erasing import RandomErasing
from .sampler import RepeatedAugmentationSampler, SeededSampler
from .two_views import TwoViewCenterCrop, TwoViewRandomResizedCrop

__all__ = [
    'BlockwiseMask', 'ImageFolder', 'LoadImage', 'PackViews', 'RandAugment', 'RandomErasing',
    'RandomMask', 'RepeatedAugmentationSampler', 'SeededSampler', 'TwoViewCenterCrop',
    'TwoViewColorJitter', 'TwoViewRandomResizedCrop', 'UnlabeledImages', 'UnreadableImageError'
]
