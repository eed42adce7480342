"""The segmentor: mmseg's, with inference that takes any size in little memory."""
from collections.abc import Iterator

import torch
from mmseg.models.segmentors import EncoderDecoder
from torch import Tensor

from beit_mm.engine.optim import DTYPES, usable_dtype
from beit_mm.registry import MODELS

from .sliding import Grid, View, slide

MODES = ('slide', 'whole')
WINDOWS_PER_BATCH = dict(cpu=1)  # a batch gains nothing there and costs memory
WINDOWS_PER_BATCH_OF_ACCELERATORS = 8


@MODELS.register_module()
class SlidingSegmentor(EncoderDecoder):
    """mmseg's EncoderDecoder; training is its own, inference is ours.

    `test_cfg` has, beside mmseg's `mode` ('slide' or 'whole'), `crop_size` and `stride` in pixels (height, width):
        precision: 'bfloat16' (the default), 'float16' or 'float32' of the network at inference; logits are gathered
            in float32 in any case. A CPU without fast bfloat16 uses float32 instead, as in training.
        windows_per_batch: windows that go through the network together; 8 unless given, 1 on a CPU.

    Args: as EncoderDecoder. The decode head's logits are those of its `forward`, as with UPerHead, SETRUPHead and
        FCNHead.

    Raises:
        ValueError: a test_cfg that cannot be met.

    Differs from it in: any image size in both modes, filled up to whole patches and to whole cells of a pyramid's
    coarsest level; see `sliding.slide`; windows of a batch of images go through the network together; no more than one
    image's logits at a time.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.test_cfg = self.test_cfg or {}
        check_test_cfg(self.test_cfg)

    def inference(self, inputs: Tensor, batch_img_metas: list[dict] | None = None) -> Tensor:
        """Logits of an image batch.

        Args:
            inputs: (B, 3, h, w) normalised.
            batch_img_metas: not needed; mmseg gives them.

        Returns:
            float32 (B, C, h, w).
        """
        logits = list(self.slide([View(image, tuple(inputs.shape[2:])) for image in inputs]))
        return logits[0].unsqueeze(0) if len(logits) == 1 else torch.stack(logits)

    def slide(self, views: list[View]) -> Iterator[Tensor]:
        """Logits of each view in turn, as `test_cfg` says; see `sliding.slide`."""
        cfg = self.test_cfg
        grid = Grid(cfg['crop_size'], cfg['stride']) if cfg.get('mode') == 'slide' else Grid()
        device = views[0].image.device.type
        default = WINDOWS_PER_BATCH.get(device, WINDOWS_PER_BATCH_OF_ACCELERATORS)
        return slide(self.logits, views, grid, cfg.get('windows_per_batch', default), self.align_corners,
                     self._divisor())

    def _divisor(self) -> int:
        """Pixels that a cell of the coarsest map sees: patches of 16 under a pyramid down to a half make 32."""
        patch = getattr(self.backbone, 'patch_size', 1)
        rescales = self.neck.rescales if self.with_neck and hasattr(self.neck, 'rescales') else [1]
        return max(patch, round(patch / min(rescales)))

    def logits(self, images: Tensor) -> Tensor:
        """Logits (B, C, h', w') at the decode head's resolution, of images (B, 3, h, w), in `test_cfg`'s precision."""
        device = images.device.type
        dtype = getattr(torch, usable_dtype(self.test_cfg.get('precision', 'bfloat16'), device))
        with torch.autocast(device, dtype, enabled=dtype is not torch.float32):
            return self.decode_head(self.extract_feat(images))


def check_test_cfg(cfg: dict) -> None:
    """Raises ValueError where a test_cfg of a segmentor cannot be met."""
    if (mode := cfg.get('mode', 'whole')) not in MODES:
        raise ValueError(f'test_cfg.mode is {mode!r}; choose one of {MODES}')
    if (precision := cfg.get('precision', 'bfloat16')) not in DTYPES:
        raise ValueError(f'test_cfg.precision is {precision!r}; choose one of {DTYPES}')
    if (windows := cfg.get('windows_per_batch', 1)) < 1:
        raise ValueError(f'test_cfg.windows_per_batch is {windows}; it must be at least 1')
    if mode == 'whole':
        return
    if missing := {'crop_size', 'stride'} - set(cfg):
        raise ValueError(f"test_cfg.mode='slide' needs {' and '.join(sorted(missing))}, in pixels (height, width)")
    if any(stride > crop or stride < 1 for stride, crop in zip(cfg['stride'], cfg['crop_size'], strict=True)):
        raise ValueError(f"test_cfg.stride {tuple(cfg['stride'])} leaves gaps between windows of "
                         f"{tuple(cfg['crop_size'])}; it must be at least 1 and at most the window")
