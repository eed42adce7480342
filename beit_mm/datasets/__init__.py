"""Photos, their transforms and samplers, and photos that the package makes itself."""
from .color_jitter import TwoViewColorJitter
from .formatting import PackViews
from .masks import BlockwiseMask, RandomMask
from .photo_reading import LoadPhoto, UnreadableImageError
from .photos import UnlabeledImages
from .sampler import SeededSampler
from .two_views import TwoViewCenterCrop, TwoViewRandomResizedCrop

__all__ = [
    'BlockwiseMask', 'LoadPhoto', 'PackViews', 'RandomMask', 'SeededSampler', 'TwoViewCenterCrop',
    'TwoViewColorJitter', 'TwoViewRandomResizedCrop', 'UnlabeledImages', 'UnreadableImageError'
]
