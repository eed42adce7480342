"""Multi-scale inference with flip, as the released protocol defines it: the views of a image, and their mean."""
from collections import Counter
from collections.abc import Iterator, Sequence

from mmengine.model import BaseTTAModel
from mmengine.structures import PixelData
from mmseg.datasets.transforms import PackSegInputs
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from beit_mm.registry import MODELS, TRANSFORMS

from .segmentor import SlidingSegmentor
from .sliding import View

RATIOS = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75)


@TRANSFORMS.register_module()
class MultiScaleViews:
    """Packs a image at several sizes; the annotation keeps the image's own.

    The short side is `ratio * short_side`, and never under the window, `crop_size`; the long side follows, whatever its
    length: of 100 x 2000 pixels the largest view is 896 x 17,920 in the protocol of 512. Ratios that give one size are
    one view that counts as often.

    Args:
        short_side: of ratio 1, in pixels.
        crop_size: (height, width) of the window in pixels.
        ratios: sizes relative to `short_side`.

    Returns, when called with the results of loading:
        dict(inputs=[uint8 (3, h, w) of each view], data_samples=SegDataSample), whose metainfo has the `view_weights`,
        how many ratios each view stands for.

    Raises:
        ValueError: settings that are no sizes.

    Source: microsoft/unilm `beit/semantic_segmentation/mmcv_custom/resize_transform.py`, SETR_Resize.
    Differs from it in: equal sizes once.
    """

    def __init__(self, short_side: int, crop_size: tuple[int, int], ratios: Sequence[float] = RATIOS):
        if min(short_side, *crop_size) < 1 or not ratios or min(ratios) <= 0:
            raise ValueError(f'short_side {short_side}, crop_size {tuple(crop_size)} and ratios {tuple(ratios)}: all '
                             'must be positive, and there must be a ratio')
        # Where the window is no square, its longer side is the safe one: a image may be turned either way.
        self.short_sides = Counter(max(int(short_side * ratio), *crop_size) for ratio in ratios)
        self.pack = PackSegInputs()

    def __call__(self, results: dict) -> dict:
        image = results.pop('img')
        height, width = image.shape[:2]
        views = []
        for short in self.short_sides:
            long = short * max(height, width) / min(height, width)
            resize = TRANSFORMS.build(dict(type='mmseg.Resize', scale=(long, short), keep_ratio=True))
            views.append(self.pack(resize(dict(img=image)))['inputs'])
        sample = self.pack(results)['data_samples']
        sample.set_metainfo(dict(view_weights=tuple(self.short_sides.values())))
        return dict(inputs=views, data_samples=sample)


@MODELS.register_module()
class MultiScaleTTA(BaseTTAModel):
    """Mean of the class probabilities over the views of MultiScaleViews and their mirror images.

    All windows of all views, of all views_of_images of a batch, go through the network in common batches. The logits of a view
    are resized to the image before the softmax, as the released protocol does. Images of a batch may
    have different sizes.

    Args:
        module: the segmentor, a SlidingSegmentor or its config.
        flip: also run each view's mirror image.

    Raises:
        ValueError: `module` already is multi-scale, or no SlidingSegmentor.

    Source: mmseg 0.11 `EncoderDecoder.aug_test`, `inference`.
    Differs from mmseg's SegTTAModel in: weights, common batches, one view's logits in memory at a time.
    """

    def __init__(self, module: dict | nn.Module, flip: bool = True):
        if isinstance(module, MultiScaleTTA) or (isinstance(module, dict) and 'module' in module):
            raise ValueError('this config already tests at all scales with flip; leave --tta out (in '
                             'Python multi_scale=True), or take the config without _ms')
        super().__init__(module)
        if not isinstance(self.module, SlidingSegmentor):
            raise ValueError('multi-scale inference needs a beit_mm.SlidingSegmentor, got '
                             f'{type(self.module).__name__}')
        self.flips = (False, True) if flip else (False, )

    def test_step(self, data: dict) -> list[SegDataSample]:
        """Predicts a batch.

        Args:
            data: dict(inputs=[[view 1 of each image], [view 2 of each image], ...], data_samples=[of each image]).

        Returns:
            The data samples, with `pred_sem_seg`, int64 (1, H, W).
        """
        samples = data['data_samples']
        views_of_images = []
        for number, sample in enumerate(samples):
            images = [self.module.data_preprocessor(dict(inputs=[same_view[number]]))['inputs'][0]
                      for same_view in data['inputs']]
            views_of_images.append([View(image, tuple(sample.ori_shape[:2]), flip) for image in images for flip in self.flips])
        weights = [sample.view_weights for sample in samples]
        for sample, mean in zip(samples, self.probabilities(views_of_images, weights), strict=True):
            if len(mean) == 1:  # two classes told apart by one logit
                label = (mean > self.module.decode_head.threshold).long()
            else:
                label = mean.argmax(dim=0, keepdim=True)
            sample.pred_sem_seg = PixelData(data=label)
        return samples

    def probabilities(self, views_of_images: Sequence[Sequence[View]], weights: Sequence[Sequence[int]]) -> Iterator[Tensor]:
        """Class probabilities of each image.

        Args:
            views_of_images: the views of each image; those of one image, flipped and not, follow each other.
            weights: of each image, how often each image counts.

        Yields:
            float32 (C, H, W).
        """
        logits = self.module.slide([view for views in views_of_images for view in views])
        for views, of_images in zip(views_of_images, weights, strict=True):
            mean = 0
            for _, weight in zip(views, (weight for weight in of_images for _ in self.flips), strict=True):
                found = next(logits)
                found = found.sigmoid_() if len(found) == 1 else found.softmax(dim=0)
                mean += found.mul_(weight / (sum(of_images) * len(self.flips)))
            yield mean

    def merge_preds(self, data_samples_list: list) -> list:
        """Never called: `test_step` merges while it predicts."""
        raise NotImplementedError
