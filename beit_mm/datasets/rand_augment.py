"""RandAugment for RGB images."""
import numpy as np
from mmpretrain.datasets import RandAugment as RandAugmentBGR

from beit_mm.registry import TRANSFORMS


@TRANSFORMS.register_module()
class RandAugment(RandAugmentBGR):
    """mmpretrain's RandAugment for the RGB images of LoadImage.

    Its colour and contrast operations weigh the channels as those of a BGR image. On RGB they took blue for red: up to
    10 of 255 away from timm's on a image, 0.5 at most with the channels in their order.

    Args: as mmpretrain's. `pad_val` in `hparams` is a gray value, or three of R, G, B.
    """

    def __init__(self, *args, hparams: dict | None = None, **kwargs) -> None:
        hparams = dict(hparams or dict(pad_val=128))
        if not np.isscalar(hparams.get('pad_val', 0)):
            hparams['pad_val'] = list(hparams['pad_val'])[::-1]
        super().__init__(*args, hparams=hparams, **kwargs)

    def transform(self, results: dict) -> dict:
        results['img'] = np.ascontiguousarray(results['img'][..., ::-1])
        results = super().transform(results)
        results['img'] = np.ascontiguousarray(results['img'][..., ::-1])
        return results
