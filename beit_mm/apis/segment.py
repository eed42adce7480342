"""Segments images with a checkpoint and nothing else."""
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.device import get_device
from mmengine.registry import DefaultScope

from beit_mm.checkpoint.content import meta_of
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.loading import load_from_file
from beit_mm.registry import MODELS

from .images import ImageInput, Preparation, iterate_images, path_of
from .parts import Kind, parts_of, without

TYPES = re.compile(
    r'beit_mm\.(SlidingSegmentor|BEiTBackbone|EfficientUPerHead|EfficientSETRUPHead|SyncBN|LoadImage|MultiScaleViews|'
    r'MultiScaleTTA)|(mmseg\.)?(SegDataPreProcessor|Feature2Pyramid|UPerHead|SETRUPHead|FCNHead|LoadImageFromFile|'
    r'Resize|PackSegInputs)|SyncBN|BN|LN|GN|ReLU|GELU')
FOR_TRAINING = ('init_cfg', 'loss_decode', 'pretrained', 'train_cfg', 'auxiliary_head')  # keys of a model
MAX_CLASSES = 256  # that labels of 8 bits can tell apart


class SegmentationInferencer:
    """A trained segmentor, with the names and colours of its classes and the preparation of its images.

    Args:
        checkpoint: a file that a training of ours wrote; it holds its config. Of other files give the `config`.
        device: such as 'cuda:1' or 'cpu'; None for what there is.
        config: path of a config, or a Config, instead of the checkpoint's own; unlike that one it may name any type.
            Of a FolderRunner's the number of classes is taken from the checkpoint.
        multi_scale: at all scales with flip, by the config's `tta_model` and `tta_pipeline`.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the checkpoint has no config, or one that names types which only a given config may; or its
            weights do not fit.
        ValueError: the config describes something else than a segmentor, or has no scales.

    Labels are those of tools/test.py, of which `test_cfg` of the model says the windows and the precision. `classes`
    are the names, `palette` the colours, [red, green, blue] of 0-255.
    """

    def __init__(self, checkpoint: str | Path, device: str | torch.device | None = None,
                 config: str | Path | Config | None = None, multi_scale: bool = False):
        from beit_mm.segmentation.datasets import distinct_colours  # needs mmseg

        content = load_from_file(str(checkpoint))
        meta = meta_of(content)
        known = meta.get('dataset_meta') or {}
        kind = Kind('segmentor', 'SegmentationInferencer', 'mmseg', TYPES, partial(_take, multi_scale=multi_scale))
        cfg = parts_of(kind, checkpoint, meta, config)
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            self.model = MODELS.build(cfg.model)
            self.prepared = Preparation(cfg.pipeline)
        segmentor = getattr(self.model, 'module', self.model)
        count = getattr(getattr(segmentor, 'decode_head', None), 'num_classes', None)
        if count is None:
            raise ValueError(f'{checkpoint} is no segmentor, but a {type(segmentor).__name__}')
        if count > MAX_CLASSES:
            raise ValueError(f'{checkpoint} has {count} classes; labels of 8 bits have {MAX_CLASSES}')
        weights = {name: tensor for name, tensor in content['state_dict'].items()
                   if not name.startswith('auxiliary_head.')}
        try:
            segmentor.load_state_dict(weights, strict=True)
        except RuntimeError as error:
            raise CheckpointError(f'{checkpoint} does not fit its config: {" ".join(str(error).split())}') from None
        self.device = torch.device(device or get_device())
        self.model.to(self.device).eval()
        self.classes: tuple[str, ...] = tuple(known.get('classes') or map(str, range(count)))
        self.palette: list[list[int]] = known.get('palette') or distinct_colours(count)

    def __call__(self, images: ImageInput | Sequence[ImageInput]) -> Iterator[dict[str, Any]]:
        """Segments images, each when it is asked for.

        Args:
            images: a file, a folder (all its images, to any depth, sorted), an array uint8 (H, W, 3), **RGB**, a PIL
                image, or a list of these; of any size.

        Yields:
            For each image dict(path=its file, None for an array or image; labels=uint8 (H, W), indices into
            `classes`, of the image as a viewer shows it).

        Raises:
            FileNotFoundError: no such file, or a folder without images.
            UnreadableImageError: a file that is no image; names it.
            TypeError, ValueError: something else than images.
        """
        for image in iterate_images(images):
            with torch.no_grad():
                sample, = self.model.test_step(pseudo_collate([self.prepared(image)]))
            yield dict(path=path_of(image), labels=sample.pred_sem_seg.data[0].cpu().numpy().astype(np.uint8))


def _take(values: Mapping[str, Any], name: str, multi_scale: bool) -> dict[str, Any]:
    """Model, pipeline and scope of a config called `name`, without what only training needs."""
    try:
        model = without(values['model'], FOR_TRAINING)
        loader = values.get('test_dataloader') or values['val_dataloader']
        pipeline = loader['dataset']['pipeline']
        model['type'], pipeline[0]['type']
    except (KeyError, TypeError, IndexError):
        raise ValueError(f'{name} has no model and test pipeline of a segmentor; give another: '
                         'SegmentationInferencer(checkpoint, config=...)') from None
    if multi_scale:
        if not {'tta_model', 'tta_pipeline'} <= set(values):
            raise ValueError(f'{name} has no tta_model and tta_pipeline, which multi_scale takes; give another: '
                             'SegmentationInferencer(checkpoint, config=..., multi_scale=True)')
        model, pipeline = dict(values['tta_model'], module=model), values['tta_pipeline']
    pipeline = [step for step in pipeline if 'LoadAnnotation' not in str(step.get('type'))]
    return dict(model=model, pipeline=pipeline, default_scope=values.get('default_scope', 'mmseg'))
