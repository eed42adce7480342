"""Classifies images with a checkpoint and nothing else."""
import re
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dataset import default_collate
from mmengine.device import get_device
from mmengine.registry import DefaultScope
from torch import nn

from beit_mm.checkpoint.content import meta_of
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.loading import load_from_file
from beit_mm.engine.checks import preprocessing_of_model
from beit_mm.engine.metrics import TOP, describe
from beit_mm.registry import MODELS

from .images import ImageInput, Preparation, iterate_images, path_of
from .parts import Kind, parts_of, without

TYPES = re.compile(
    r'beit_mm\.(BEiTBackbone|LinearProbe|ClassificationDataPreprocessor|LoadImage)|'
    r'(mmpretrain\.)?(ImageClassifier|LinearClsHead|StackedLinearClsHead|ClsDataPreprocessor|'
    r'LoadImageFromFile|Resize|ResizeEdge|CenterCrop|PackInputs)')
FOR_TRAINING = ('init_cfg', 'loss', 'pretrained', 'train_cfg')  # keys of a model
CROP_RATIO, WHOLE = 0.875, 384  # of our configs' test pipelines, and the size from which on they take all of a image


class ClassificationInferencer:
    """A trained classifier, with the names of its classes and the preparation of its images.

    Args:
        checkpoint: a file that a fine-tuning of ours wrote; it holds its config. Of other files give the `config`.
        device: such as 'cuda:1' or 'cpu'; None for what there is.
        config: path of a config, or a Config, instead of the checkpoint's own; unlike that one it may name any type.
            Of a FolderRunner's the number of classes is taken from the checkpoint.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the checkpoint has no config, or one that names types which only a given config may; or its
            weights do not fit.
        ValueError: the config describes something else than a classifier.

    A config without images to test on has no test pipeline; images are then loaded as in training, and the middle is
    taken in the model's size, as our configs with a test pipeline do. On a GPU it computes in bfloat16.
    """

    def __init__(self, checkpoint: str | Path, device: str | torch.device | None = None,
                 config: str | Path | Config | None = None):
        content = load_from_file(str(checkpoint))
        meta = meta_of(content)
        cfg = parts_of(CLASSIFIER, checkpoint, meta, config)
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            self.model = MODELS.build(cfg.model)
            rest = _usual_preparation(self.model) if len(cfg.pipeline) == 1 else []
            self.prepared = Preparation([*cfg.pipeline, *rest])
        try:
            self.model.load_state_dict(content['state_dict'], strict=True)
        except RuntimeError as error:
            raise CheckpointError(f'{checkpoint} does not fit its config: {" ".join(str(error).split())}') from None
        self.device = torch.device(device or get_device())
        self.model.to(self.device).eval()
        count = getattr(getattr(self.model, 'head', self.model), 'num_classes', None)
        if count is None or len(getattr(self.model, 'layers', [-1])) > 1:
            raise ValueError(f'{checkpoint} is no classifier with one head, but a {type(self.model).__name__}')
        classes = (meta.get('dataset_meta') or {}).get('classes')
        self.classes: tuple[str, ...] = tuple(classes or map(str, range(count)))

    def __call__(self, images: ImageInput | Sequence[ImageInput], batch_size: int = 32, top: int = TOP) -> list[dict[str, Any]]:
        """Classifies images.

        Args:
            images: a file, a folder (all its images, to any depth, sorted), an array uint8 (H, W, 3), **RGB**, a PIL
                image, or a list of these.
            batch_size: images computed at a time.
            top: classes to return for each.

        Returns:
            For each image dict(path=its file, None for an array or image; label=the most likely class; name=its name;
            scores=[[label, probability], ...] of the `top` most likely, best first).

        Raises:
            FileNotFoundError: no such file, or a folder without images.
            UnreadableImageError: a file that is no image; names it.
            TypeError, ValueError: something else than images, or a number below 1.
        """
        for name, number in (('batch_size', batch_size), ('top', top)):
            if number < 1:
                raise ValueError(f'{name} is {number}; expected 1 or more')
        waiting = iterate_images(images)
        found = []
        while batch := list(islice(waiting, batch_size)):
            with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == 'cuda'):
                samples = self.model.test_step(default_collate([self.prepared(image) for image in batch]))
            for image, sample in zip(batch, samples, strict=True):
                found.append(describe(sample.pred_score, self.classes, path_of(image), top))
        return found


def _take(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Model, pipeline and scope of a config called `name`; of a training's pipeline only what loads the image."""
    try:
        model = without(values['model'], FOR_TRAINING)
        loader = values.get('test_dataloader') or values.get('val_dataloader')
        pipeline = (loader or values['train_dataloader'])['dataset']['pipeline']
        pipeline = list(pipeline if loader else pipeline[:1])
        model['type'], pipeline[0]['type']
    except (KeyError, TypeError, IndexError):
        raise ValueError(f'{name} has no model and test pipeline of a classifier; give another: '
                         'ClassificationInferencer(checkpoint, config=...)') from None
    if 'data_preprocessor' in values:
        model.setdefault('data_preprocessor', values['data_preprocessor'])
    return dict(model=model, pipeline=pipeline, default_scope=values.get('default_scope', 'mmpretrain'))


def _usual_preparation(model: nn.Module) -> list[dict]:
    """What follows the loading of a image where no config says so: the middle of it, in the model's size."""
    if (size := preprocessing_of_model(model).get('size')) is None:
        raise ValueError(f'the config of this {type(model).__name__} has no test pipeline, and its backbone no image '
                         'size to make one for; give another: ClassificationInferencer(checkpoint, config=...)')
    edge = max(size) if max(size) >= WHOLE else round(max(size) / CROP_RATIO)
    return [dict(type='ResizeEdge', scale=edge, edge='short', backend='pillow', interpolation='bicubic'),
            dict(type='CenterCrop', crop_size=tuple(size[::-1])), dict(type='PackInputs')]


CLASSIFIER = Kind('classifier', 'ClassificationInferencer', 'mmpretrain', TYPES, _take)
