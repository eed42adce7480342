"""Classifies and segments images with a checkpoint alone."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from mmengine.dataset import default_collate, pseudo_collate
from mmengine.device import get_device
from mmpretrain.models import MultiLabelClsHead

from beit_mm.apis.rebuild import ConfigInput, rebuild
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, PerChannel
from beit_mm.datasets.geotiff import Mosaic
from beit_mm.datasets.reading import UnreadableImageError
from beit_mm.engine.metrics import TOP, describe
from beit_mm.errors import CheckpointError
from beit_mm.features.extractor import Device, Sources
from beit_mm.precision import inference_autocast

MAX_SIDE = 4000  # pixels of a picture of a large image


def reduction(size: Sequence[int]) -> int:
    """The smallest whole number by which an image of `size` is divided to have at most MAX_SIDE pixels a side."""
    return -(-max(size) // MAX_SIDE)


class Inferencer:
    task: str  # kind of model that it builds
    for_task: str  # task that the weights must be for, see `Checkpoint.task`

    def __init__(
        self,
        checkpoint: CheckpointInput,
        device: Device = None,
        config: ConfigInput = None,
        *,
        multi_scale: bool = False,
        max_pixels: int | None = None,
        short_side: int | None = None,
        full_size: bool = False,
        mean: PerChannel = None,
        std: PerChannel = None,
    ):
        opened = Checkpoint.open(checkpoint, self.task, mean=mean, std=std)
        if config is None and opened.task != self.for_task:
            raise CheckpointError(
                f'{opened} is for {opened.task}, not for {self.for_task}; fine-tune it, or give --labelled FOLDER'
            )
        built = rebuild(opened, self.task, config, multi_scale, max_pixels, short_side, full_size)
        self.device = torch.device(device or get_device())
        self.model = built.model.to(self.device)
        self.reader, self.classes = built.reader, built.classes
        self.num_classes = len(built.classes)
        self.palette, self.ratios = built.palette, built.ratios


class ClassificationInferencer(Inferencer):
    """A trained classifier, with the names of its `classes` and the preparation of its images.

    Args:
        checkpoint: path, URL or name in `list_models` of a model that this package fine-tuned, whose file holds its
            config, or of any BEiT whose tensors show the model. Other files need the `config`.
        device: such as 'cuda:1' or 'cpu'; None for a GPU, if there is one.
        config: path of a config, or a Config, in place of the checkpoint's own; unlike that one it may name any type.
        multi_scale: average over all scales and flips, by the config's `tta_model` and `tta_pipeline`; segmentors only.
        max_pixels: limit for an image file, see LoadImage, in place of the config's.
        mean, std: of the images, see `Checkpoint.open`, in place of the config's.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: neither config nor tensors show the model, the file's config names a type that is not allowed
            there, or the config is for another task or does not fit the weights.

    `classes` are the names in the file, or ImageNet's or ADE20K's if the file's name ends like a released one, or else
    numbers. Without a test pipeline, images get the usual centre crop to the model's size.
    """

    task, for_task = 'classifier', 'classification'

    @property
    def has_several_labels(self) -> bool:
        """Whether an image may have several labels, each with a probability of its own."""
        return isinstance(getattr(self.model, 'head', None), MultiLabelClsHead)  # a LinearProbe has several

    def __call__(
        self, images: Sources, batch_size: int = 32, top: int = TOP, on_error: str = 'raise'
    ) -> list[dict[str, Any]]:
        """Classifies images.

        Args:
            images, on_error: a file, a folder, an array, a PIL image, or a list of these; see `ImageReader.results`.
            batch_size: images per forward pass.
            top: classes to return for each.

        Returns:
            For each image dict(path=its file, None for an array or PIL image; label=the most likely class; name=its
            name; scores=[[label, probability], ...] of the `top` most likely classes, best first). Of a classifier with
            several labels per image also names=the classes of probability 0.5 and more, in the order of `classes`;
            probabilities=a dict with all of these.
        """
        return list(self.reader.results(images, partial(self.predict, top=top), batch_size, on_error))

    def predict(self, samples: list[dict], top: int = TOP) -> list[dict[str, Any]]:
        """The label, name and scores of each sample of the pipeline."""
        with torch.no_grad(), inference_autocast(self.device):
            found = self.model.test_step(default_collate(samples))
        results = [describe(sample.pred_score, self.classes, None, top) for sample in found]
        for result, sample in zip(results, found, strict=True) if self.has_several_labels else ():
            result['names'] = [self.classes[label] for label in sample.pred_label]
            result['probabilities'] = dict(zip(self.classes, sample.pred_score.tolist(), strict=True))
        return results


class SegmentationInferencer(Inferencer):
    """A trained segmentor, with the names of its `classes`, their colours, and the preparation of its images.

    It has the arguments of ClassificationInferencer, and predicts the same labels as tools/test.py, except for images
    more than twice as large or as small as those of the training, which keep the scale of the training. (A config
    without ResizeToScale shows only their short side; where the long side of its Resize is less than twice as long,
    all images are seen as in the config.) `palette` has the colours, [red, green, blue] of 0-255.

    Args:
        short_side: of each image as the model sees it, in pixels, instead of the scale of the training.
        full_size: let the model see images pixel by pixel.

    If its attribute `with_probabilities` is True, results have `probabilities` too, float16 (classes, H, W).
    """

    task, for_task = 'segmentor', 'segmentation'
    with_probabilities = False
    bar: Callable[[list], Iterable] = staticmethod(iter)  # passes on the blocks of a large image, and may count them

    def __call__(
        self, images: Sources, on_error: str = 'raise', return_images: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Segments images one at a time, each when the iterator reaches it.

        Args:
            images, on_error, return_images: see `ImageReader.results`.

        Large images are segmented in blocks, with the same labels. With rasterio, large TIFFs are read in blocks too,
        also beyond `max_pixels`; their `image` is one of so many pixels that at most MAX_SIDE remain on a side.

        Yields:
            For each image dict(path=its file, None for an array or PIL image; labels=(H, W), indices into `classes` for
            the image as a viewer shows it, uint8, or uint16 for more than 256 classes; confidence=float32 (H, W), the
            probability of each label; in blocks float16).
        """
        self.model.with_probabilities = self.with_probabilities
        for source in self.reader.sources(images):
            mosaic = None
            if self.takes_blocks:
                mosaic = Mosaic.open(source, self.reader.loader, self.reader.prepare.transforms)
            if mosaic is None:
                yield from self.reader.results([source], self.predict, 1, on_error, return_images)
                continue
            try:
                result = self.predict_blocks(mosaic.read_seen, mosaic.size, mosaic.seen)
                if return_images:
                    result['image'] = mosaic.preview(reduction(mosaic.size))
            except UnreadableImageError as error:
                if on_error == 'raise':
                    raise
                result = dict(error=str(error))
            yield dict(result, path=str(source))

    @property
    def takes_blocks(self) -> bool:
        from beit_mm.segmentation.segmentor import SlidingSegmentor  # classifiers do not need mmseg

        return isinstance(self.model, SlidingSegmentor) and not self.model.align_corners

    def predict_blocks(self, read: Callable, size: tuple[int, int], seen: tuple[int, int]) -> dict[str, Any]:
        from beit_mm.segmentation.blocks import segment_blocks

        return segment_blocks(self.model, read, size, seen, self.num_classes, self.bar)

    def predict(self, samples: list[dict]) -> list[dict[str, Any]]:
        """The labels of one sample of the pipeline, and their probabilities."""
        from beit_mm.segmentation.segmentor import MAX_LOGITS, confidence_of, probabilities_of

        image = samples[0]['inputs']  # C, h, w; of a multi-scale test a list of views
        if self.takes_blocks and self.num_classes * math.prod(image.shape[1:]) > MAX_LOGITS:
            size, seen = samples[0]['data_samples'].ori_shape, tuple(image.shape[1:])
            return [self.predict_blocks(lambda rows, columns: image[:, rows, columns], size, seen)]
        self.model.with_confidence = True
        with torch.no_grad():
            (sample,) = self.model.test_step(pseudo_collate(samples))
        labels = sample.pred_sem_seg.data[0].cpu().numpy()
        confidence = confidence_of(sample).float().cpu().numpy()
        result = dict(labels=labels.astype(np.min_scalar_type(self.num_classes - 1)), confidence=confidence)
        if self.with_probabilities:
            result['probabilities'] = probabilities_of(sample).half().cpu().numpy()
        return [result]
