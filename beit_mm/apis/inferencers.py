"""Classifies and segments images with a checkpoint and nothing else: it holds its config, or its tensors show it."""

import copy
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import default_collate, pseudo_collate
from mmengine.device import get_device
from mmengine.model import BaseTTAModel
from mmengine.registry import DefaultScope
from mmpretrain.models import ImageClassifier
from torch import Tensor, nn

from beit_mm.apis.configs import metainfo_of_name
from beit_mm.apis.stored_config import TRAINING_KEYS, RefusedError, check_stored_config
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, check_finite
from beit_mm.checkpoint.names import released_out_indices
from beit_mm.checkpoint.read import CheckpointError, blaming
from beit_mm.datasets.reading import LoadBands
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.engine.metrics import TOP, describe
from beit_mm.errors import UserError
from beit_mm.features.extractor import Device, ImageInput, ImageReader, usual_preparation
from beit_mm.models import LinearProbe
from beit_mm.models.provenance import preprocessing_of_model
from beit_mm.precision import inference_autocast
from beit_mm.registry import MODELS, TRANSFORMS

ConfigInput: TypeAlias = str | Path | Config | None


class _Inferencer(ABC):
    """A trained model, and the preparation of its images, from the config in its checkpoint or a given one."""

    task: str  # what the model is called
    scope: str  # the library's, in which the types are named
    multi_scale = False
    views: Mapping[str, Any] = {}  # of a test at all scales with flip, the last step of its pipeline

    def __init__(self, checkpoint: CheckpointInput, device: Device = None, config: ConfigInput = None, **levels: Any):
        self._advice = f'{type(self).__name__}(checkpoint, config=...)'
        checkpoint = Checkpoint.open(checkpoint, self.task, **levels)
        self.meta = checkpoint.meta
        weights = copy.copy(checkpoint.state_dict)
        for name in [name for name in weights if name.startswith('auxiliary_head.')]:  # built for training only
            del weights[name]
        with blaming(checkpoint.path) if config is None else nullcontext():
            cfg = self._stored_config(checkpoint) if config is None else self._given_config(config)
        if checkpoint.levels:
            model = cfg.model.get('module', cfg.model)  # in a model for test-time augmentation
            model.data_preprocessor = {**(model.get('data_preprocessor') or {}), **checkpoint.levels}
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            try:
                if config is None:  # without memory for the weights, whatever sizes the file asks for
                    with torch.device('meta'):
                        check_shapes(MODELS.build(copy.deepcopy(cfg.model)), checkpoint)
                self.model = MODELS.build(cfg.model)
                module = self.model.module if isinstance(self.model, BaseTTAModel) else self.model
                load, *prepare = cfg.pipeline
                load = TRANSFORMS.build(load)
                backend = 'cv2' if isinstance(load, LoadBands) else 'pillow'
                prepare = prepare or usual_preparation(preprocessing_of_model(module)['size'], backend)
                self.reader = ImageReader([load, *(TRANSFORMS.build(step) for step in prepare)])
            except Exception as error:
                if config is not None:
                    raise
                reason = ' '.join(str(error).split())
                raise CheckpointError(f'{checkpoint} does not fit its config: {reason:.300}') from error
        if (num_classes := self._num_classes(module)) is None:
            raise UserError(f'{checkpoint} is no {self.task}, but a {type(module).__name__}')
        check_finite(checkpoint.weights, str(checkpoint))
        try:
            module.load_state_dict(weights, strict=True)
        except RuntimeError as error:
            reason = ' '.join(str(error).split())
            raise CheckpointError(f'{checkpoint} does not fit its config: {reason:.500}') from None
        self.device = torch.device(device or get_device())
        self.model.to(self.device).eval()
        self.num_classes: int = num_classes
        classes = checkpoint.classes
        if not classes and (known := metainfo_of_name(checkpoint.path, num_classes)):
            self.meta, classes = dict(self.meta, dataset_meta=known), known['classes']
        # a name that a terminal could obey is quoted
        named = [name if name.isprintable() else ascii(name)[1:-1] for name in classes or map(str, range(num_classes))]
        self.classes: tuple[str, ...] = tuple(named)
        if len(self.classes) != num_classes:
            raise CheckpointError(f'{checkpoint} names {len(self.classes)} classes, its model has {num_classes}')

    def _given_config(self, config: str | Path | Config) -> ConfigDict:
        values = config if isinstance(config, Config) else Config.fromfile(str(config))
        selected = self._selected(values, f'The config {values.filename or ""}'.rstrip())
        model, pipeline = without_training(selected)  # which could name files
        return ConfigDict(model=model, pipeline=pipeline, default_scope=values.get('default_scope', self.scope))

    def _stored_config(self, checkpoint: Checkpoint) -> ConfigDict:
        name, values = f'The config in {checkpoint}', self.meta.get('config_dict')
        stored = self._selected(values, name) if isinstance(values, dict) else self._shown(checkpoint)
        try:
            model, pipeline = check_stored_config(*stored, self.task)
        except RefusedError as error:
            refused = f'which is no part of a {self.task} that is built on the word of a checkpoint'
            advice = f'if you trust it, give the config: {self._advice}'
            raise CheckpointError(f'{name} asks for {error}, {refused}; {advice}') from None
        return ConfigDict(model=model, pipeline=pipeline, default_scope=self.scope)

    def _selected(self, values: Mapping[str, Any], name: str) -> tuple[dict, list[dict]]:
        """Model and test pipeline of a config."""
        try:
            model = dict(values['model'])
            if 'data_preprocessor' in values:  # mmpretrain's configs have it beside the model
                model.setdefault('data_preprocessor', values['data_preprocessor'])
            loader: Any = values.get('test_dataloader') or values.get('val_dataloader')
            self.views = (values.get('tta_pipeline') or [{}])[-1]
            if self.multi_scale:
                model, pipeline = dict(values['tta_model'], module=model), values['tta_pipeline']
            elif loader or self.task == 'segmentor':
                pipeline = loader['dataset']['pipeline']
            else:
                pipeline = values['train_dataloader']['dataset']['pipeline'][:1]
            if self.task == 'segmentor':
                pipeline = [_named_by_us(step) for step in pipeline if 'LoadAnnotation' not in str(step.get('type'))]
            model['type'], pipeline[0]['type']
        except (LookupError, TypeError, AttributeError, RuntimeError, ValueError):
            needed = 'tta_model and tta_pipeline' if self.multi_scale else 'model and test pipeline'
            raise UserError(f'{name} has no {needed} of a {self.task}; give another: {self._advice}') from None
        return model, pipeline

    def _shown(self, checkpoint: Checkpoint) -> tuple[dict, list[dict]]:
        """What the tensors of a file show, of timm's, transformers', the released code's and mmseg's too."""
        wanted = f'give the config that it was trained with: {self._advice}'
        if self.multi_scale:
            raise CheckpointError(f'{checkpoint} holds no config with tta_model and tta_pipeline; {wanted}')
        backbone = dict(checkpoint.backbone_arguments(), type='beit_mm.BEiTBackbone')
        levels, _ = checkpoint.normalisation
        weights, out_indices = checkpoint.converted.state_dict, checkpoint.architecture.get('out_indices')
        try:
            return self._of_weights(weights, backbone, levels, out_indices)
        except KeyError as error:
            lack = f'as a {self.task} lacks {error}'
            raise CheckpointError(f'{checkpoint} holds no config, and {lack}; {wanted}') from None

    @abstractmethod
    def _of_weights(self, weights: Mapping[str, Tensor], backbone: dict, levels: dict, out_indices: Any) -> tuple:
        """Model and test pipeline of weights under our names; KeyError for a tensor that is missing."""

    @abstractmethod
    def _num_classes(self, model: nn.Module) -> int | None:
        """Number of classes; None for a model of another task."""


class ClassificationInferencer(_Inferencer):
    """A trained classifier, with the names of its `classes` and the preparation of its images.

    Args:
        checkpoint: a file that a fine-tuning of ours wrote, which holds its config, or any BEiT whose tensors show the
            model, by its path, address or name in `list_models`. Of other files give the `config`.
        device: such as 'cuda:1' or 'cpu'; None for what there is.
        config: path of a config, or a Config, instead of the checkpoint's own; unlike that one it may name any type.
        levels: `mean` and `std` of the images, see `Checkpoint.open`, instead of the config's.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: neither config nor tensors show the model, the config names types which only a given config
            may, or its weights do not fit.
        UserError: the config describes something else than a classifier.

    `classes` are the names in the file, else those that `configs.metainfo_of_name` knows, else numbers. Without a test
    pipeline it takes the middle of an image in the model's size.
    """

    task, scope = 'classifier', 'mmpretrain'

    def __call__(
        self, images: ImageInput | Sequence[ImageInput], batch_size: int = 32, top: int = TOP, on_error: str = 'raise'
    ) -> list[dict[str, Any]]:
        """Classifies images.

        Args:
            images, on_error: a file, a folder, an array, a PIL image, or a list of these; see `ImageReader.results`.
            batch_size: images computed at a time.
            top: classes to return for each.

        Returns:
            For each image dict(path=its file, None for an array or image; label=the most likely class; name=its name;
            scores=[[label, probability], ...] of the `top` most likely, best first).
        """

        def predict(samples: list[dict]) -> list[dict]:
            with torch.no_grad(), inference_autocast(self.device):
                found = self.model.test_step(default_collate(samples))
            return [describe(sample.pred_score, self.classes, None, top) for sample in found]

        return list(self.reader.results(images, predict, batch_size, on_error))

    def _of_weights(self, weights: Mapping[str, Tensor], backbone: dict, levels: dict, out_indices: Any) -> tuple:
        num_classes, dims = weights['head.fc.weight'].shape
        model = dict(
            type='ImageClassifier',
            backbone=dict(backbone, out_type='avg_featmap' if 'backbone.fc_norm.weight' in weights else 'cls_token'),
            head=dict(type='LinearClsHead', num_classes=num_classes, in_channels=dims),
            data_preprocessor=dict(type='ClsDataPreprocessor', to_rgb=False, **levels),
        )
        return model, [dict(type='beit_mm.LoadImage')]

    def _num_classes(self, model: nn.Module) -> int | None:
        if isinstance(model, LinearProbe):
            return model.num_classes if len(model.layers) == 1 else None
        return getattr(model.head, 'num_classes', None) if isinstance(model, ImageClassifier) else None


class SegmentationInferencer(_Inferencer):
    """A trained segmentor, with the names and colours of its classes and the preparation of its images.

    Args:
        checkpoint, device, config, levels: as of ClassificationInferencer.
        multi_scale: at all scales with flip, by the config's `tta_model` and `tta_pipeline`.
        max_pixels: of an image file, see LoadImage, instead of the config's.

    Labels are those of tools/test.py. `classes` are the names, `palette` the colours, [red, green, blue] of 0-255.
    """

    task, scope = 'segmentor', 'mmseg'

    def __init__(
        self,
        checkpoint: CheckpointInput,
        device: Device = None,
        config: ConfigInput = None,
        multi_scale: bool = False,
        max_pixels: int | None = None,
        **levels: Any,
    ):
        self.multi_scale = multi_scale
        checkpoint = Checkpoint.open(checkpoint, self.task, **levels)
        super().__init__(checkpoint, device, config)
        if max_pixels is not None:
            loader: Any = self.reader.loader
            loader.max_pixels = max_pixels
        with blaming(checkpoint.path):
            palette = (self.meta.get('dataset_meta') or {}).get('palette') or self.meta.get('PALETTE')
        palette = palette or distinct_colours(self.num_classes)
        if not is_palette(palette, self.num_classes):
            raise CheckpointError(f'{checkpoint} has a palette that is no list of {self.num_classes} colours')
        self.palette: list[list[int]] = [list(colour) for colour in palette]

    def __call__(
        self, images: ImageInput | Sequence[ImageInput], on_error: str = 'raise', return_images: bool = False
    ) -> Iterator[dict[str, Any]]:
        """Segments images, each when it is asked for.

        Args:
            images, on_error, return_images: see `ImageReader.results`.

        Yields:
            For each image dict(path=its file, None for an array or image; labels=uint8 (H, W), uint16 of more than 256
            classes, indices into `classes`, of the image as a viewer shows it).
        """

        def predict(samples: list[dict]) -> list[dict]:
            with torch.no_grad():
                (sample,) = self.model.test_step(pseudo_collate(samples))
            labels = sample.pred_sem_seg.data[0].cpu().numpy().astype(np.min_scalar_type(self.num_classes - 1))
            return [dict(labels=labels)]

        return self.reader.results(images, predict, on_error=on_error, return_images=return_images)

    def _of_weights(self, weights: Mapping[str, Tensor], backbone: dict, levels: dict, out_indices: Any) -> tuple:
        """An UperNet of the released code's shape; other heads do not show their resizings."""
        num_classes, channels = weights['decode_head.conv_seg.weight'].shape[:2]
        weights['decode_head.fpn_bottleneck.conv.weight'], weights['neck.upsample_4x.0.weight']
        size, dims, depth = backbone['img_size'], backbone['arch']['embed_dims'], backbone['arch']['num_layers']
        norm = dict(type='beit_mm.SyncBN')
        levels_of_pyramid = dict(in_channels=[dims] * 4, in_index=[0, 1, 2, 3])
        head = dict(levels_of_pyramid, num_classes=num_classes, channels=channels, norm_cfg=norm)
        model = dict(
            type='beit_mm.SlidingSegmentor',
            backbone=dict(backbone, out_type='featmap', out_indices=out_indices or released_out_indices(depth)),
            neck=dict(type='Feature2Pyramid', embed_dim=dims, norm_cfg=norm),
            decode_head=dict(head, type='beit_mm.EfficientUPerHead'),
            data_preprocessor=dict(type='SegDataPreProcessor', size=size, **levels),
            test_cfg=dict(mode='slide', crop_size=size, stride=[side * 2 // 3 for side in size]),
        )
        resize = dict(type='Resize', scale=[2048, min(size)], keep_ratio=True)
        return model, [dict(type='beit_mm.LoadImage'), resize, dict(type='PackSegInputs')]

    def _num_classes(self, model: nn.Module) -> int | None:
        from mmseg.models import EncoderDecoder

        return model.decode_head.num_classes if isinstance(model, EncoderDecoder) else None


def _named_by_us(step: dict) -> dict:
    """A step of a pipeline; LoadImage under the name that mmseg's inferencers look for gets its own."""
    if (step.get('type'), step.get('_scope_')) != ('LoadImageFromFile', 'beit_mm'):
        return step
    return {key: value for key, value in step.items() if key != '_scope_'} | dict(type='beit_mm.LoadImage')


def without_training(value: Any) -> Any:
    """Nested containers without the keys that only training needs; a LoRAModel keeps its own."""
    if isinstance(value, dict):
        if str(value.get('type')).endswith('LoRAModel'):  # its checkpoints lack the weights that it builds on
            return value
        return {key: without_training(inner) for key, inner in value.items() if key not in TRAINING_KEYS}
    return type(value)(map(without_training, value)) if isinstance(value, (list, tuple)) else value


def is_palette(colours: Any, number: int) -> bool:
    """Whether this is a list of so many colours, [red, green, blue] of 0-255."""
    try:
        levels = np.array(colours)
    except ValueError:  # rows of several lengths
        return False
    return levels.shape == (number, 3) and levels.dtype.kind == 'i' and levels.min() >= 0 and levels.max() <= 255


def check_shapes(model: nn.Module, checkpoint: Checkpoint) -> None:
    """Raises UserError where the weights of a checkpoint have not the shapes of a model's."""
    weights = checkpoint.converted.state_dict if checkpoint.format else checkpoint.weights
    for name, tensor in model.state_dict().items():
        name = name.removeprefix('module.')  # of a model for test-time augmentation
        shape = tuple(weights[name].shape) if name in weights else 'missing'
        if shape != tuple(tensor.shape):
            raise UserError(f'{name} is {shape} in the file, {tuple(tensor.shape)} by the config')
