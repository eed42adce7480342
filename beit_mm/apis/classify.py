"""Classifies photos with a checkpoint and nothing else."""
import copy
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose, default_collate
from mmengine.device import get_device
from mmengine.registry import DefaultScope
from PIL import Image
from torch import nn

from beit_mm.checkpoint.config_text import read_config_text
from beit_mm.checkpoint.content import meta_of
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.loading import load_from_file
from beit_mm.datasets.photo_reading import UPRIGHT, orientation, to_rgb
from beit_mm.datasets.photos import list_photos
from beit_mm.engine.folder_runner import set_num_classes
from beit_mm.engine.predictions import TOP, describe
from beit_mm.engine.preprocessing import preprocessing_of_model
from beit_mm.registry import MODELS, TRANSFORMS

# What a checkpoint's own config may name: building a type runs code with the config's arguments, and mmengine imports
# names that it does not know from anywhere.
TYPES = re.compile(
    r'beit_mm\.(BEiTBackbone|LinearProbe|ClassificationDataPreprocessor|LoadPhoto)|'
    r'(mmpretrain\.)?(ImageClassifier|LinearClsHead|StackedLinearClsHead|ClsDataPreprocessor|'
    r'LoadImageFromFile|Resize|ResizeEdge|CenterCrop|PackInputs)')
FOR_TRAINING = ('init_cfg', 'loss', 'pretrained', 'train_cfg')  # keys of a model
LOADERS = ('LoadPhoto', 'LoadImageFromFile')

CROP_RATIO, WHOLE = 0.875, 384  # of our configs' test pipelines, and the size from which on they take all of a photo

Photo = str | Path | np.ndarray | Image.Image


class Classifier:
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

    A config without photos to test on has no test pipeline; photos are then loaded as in training, and the middle is
    taken in the model's size, as our configs with a test pipeline do. On a GPU it computes in bfloat16.
    """

    def __init__(self, checkpoint: str | Path, device: str | torch.device | None = None,
                 config: str | Path | Config | None = None):
        content = load_from_file(str(checkpoint))
        meta = meta_of(content)
        cfg = _own_config(meta, checkpoint) if config is None else _given_config(config, meta)
        load, *prepare = cfg.pipeline
        if load['type'].split('.')[-1] not in LOADERS:
            raise ValueError(f'the test pipeline begins with {load["type"]}; expected one of {LOADERS}')
        self.rgb = load['type'].endswith('LoadPhoto')
        with DefaultScope.overwrite_default_scope(cfg.default_scope):
            self.model = MODELS.build(cfg.model)
            self.load = TRANSFORMS.build(load)
            prepare = prepare or _usual_preparation(self.model)
            self.prepare = Compose([TRANSFORMS.build(transform) for transform in prepare])
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

    def __call__(self, photos: Photo | Sequence[Photo], batch_size: int = 32, top: int = TOP) -> list[dict[str, Any]]:
        """Classifies photos.

        Args:
            photos: a file, a folder (all its photos, to any depth, sorted), an array uint8 (H, W, 3), **RGB**, a PIL
                image, or a list of these.
            batch_size: photos computed at a time.
            top: classes to return for each.

        Returns:
            For each photo dict(path=its file, None for an array or image; label=the most likely class; name=its name;
            scores=[[label, probability], ...] of the `top` most likely, best first).

        Raises:
            FileNotFoundError: no such file, or a folder without photos.
            UnreadableImageError: a file that is no photo; names it.
            TypeError, ValueError: something else than photos, or a number below 1.
        """
        for name, number in (('batch_size', batch_size), ('top', top)):
            if number < 1:
                raise ValueError(f'{name} is {number}; expected 1 or more')
        waiting = iter(_photos(photos))
        found = []
        while batch := list(islice(waiting, batch_size)):
            with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == 'cuda'):
                samples = self.model.test_step(default_collate([self._prepared(photo) for photo in batch]))
            for photo, sample in zip(batch, samples, strict=True):
                path = str(photo) if isinstance(photo, (str, Path)) else None
                found.append(describe(sample.pred_score, self.classes, path, top))
        return found

    def _prepared(self, photo: Photo) -> dict:
        if isinstance(photo, (str, Path)):
            return self.prepare(self.load(dict(img_path=str(photo))))
        if isinstance(photo, Image.Image):
            photo = _pixels(photo)
        if photo.ndim != 3 or photo.shape[2] != 3 or photo.dtype != np.uint8 or not photo.size:
            raise ValueError(f'an array of {photo.dtype} {photo.shape}; expected uint8 (height, width, 3), RGB, '
                             'not empty')
        image = np.ascontiguousarray(photo if self.rgb else photo[..., ::-1])
        return self.prepare(dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2]))


def _own_config(meta: dict, checkpoint: str | Path) -> ConfigDict:
    text = meta.get('cfg')
    if not isinstance(text, str):
        raise CheckpointError(f'{checkpoint} holds no config; give the one that it was trained with: '
                              'Classifier(checkpoint, config=...)')
    parts = _parts(read_config_text(text), f'The config in {checkpoint}')
    parts = dict(parts, model=_without(parts['model'], FOR_TRAINING), default_scope='mmpretrain')
    for name in _types(parts):
        if not isinstance(name, str) or not TYPES.fullmatch(name):
            raise CheckpointError(f'The config in {checkpoint} asks for {name!r}, which is no part of a classifier '
                                  'that is built on the word of a checkpoint; if you trust it, give the config: '
                                  'Classifier(checkpoint, config=...)')
    return ConfigDict(parts)


def _given_config(config: str | Path | Config, meta: dict) -> ConfigDict:
    cfg = config if isinstance(config, Config) else Config.fromfile(str(config))
    parts = _parts(cfg, f'The config {cfg.filename or ""}'.rstrip())
    classes = (meta.get('dataset_meta') or {}).get('classes')
    if classes and str(cfg.get('runner_type')).endswith('FolderRunner'):
        set_num_classes(parts['model'], len(classes))  # which that runner found out, whatever the config says
    return ConfigDict(parts)


def _parts(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Model, pipeline and scope of a config called `name`; of a training's pipeline only what loads the photo."""
    try:
        model = copy.deepcopy(values['model'])
        loader = values.get('test_dataloader') or values.get('val_dataloader')
        pipeline = (loader or values['train_dataloader'])['dataset']['pipeline']
        pipeline = list(pipeline if loader else pipeline[:1])
        model['type'], pipeline[0]['type']
    except (KeyError, TypeError, IndexError):
        raise ValueError(f'{name} has no model and test pipeline of a classifier; give another: '
                         'Classifier(checkpoint, config=...)') from None
    if 'data_preprocessor' in values:
        model.setdefault('data_preprocessor', values['data_preprocessor'])
    return dict(model=model, pipeline=pipeline, default_scope=values.get('default_scope', 'mmpretrain'))


def _usual_preparation(model: nn.Module) -> list[dict]:
    """What follows the loading of a photo where no config says so: the middle of it, in the model's size."""
    if (size := preprocessing_of_model(model).get('size')) is None:
        raise ValueError(f'the config of this {type(model).__name__} has no test pipeline, and its backbone no image '
                         'size to make one for; give another: Classifier(checkpoint, config=...)')
    edge = max(size) if max(size) >= WHOLE else round(max(size) / CROP_RATIO)
    return [dict(type='ResizeEdge', scale=edge, edge='short', backend='pillow', interpolation='bicubic'),
            dict(type='CenterCrop', crop_size=tuple(size[::-1])), dict(type='PackInputs')]


def _without(value: Any, keys: Sequence[str]) -> Any:
    """Nested containers without some keys of their dicts."""
    if isinstance(value, dict):
        return {key: _without(inner, keys) for key, inner in value.items() if key not in keys}
    return [_without(item, keys) for item in value] if isinstance(value, (list, tuple)) else value


def _types(value: Any) -> Iterator[Any]:
    """Every `type` in nested containers."""
    if isinstance(value, dict):
        if 'type' in value:
            yield value['type']
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        for item in value:
            yield from _types(item)


def _photos(photos: Photo | Sequence[Photo]) -> Iterator[Photo]:
    """Files, arrays and images, folders and lists taken apart."""
    if isinstance(photos, (str, Path)):
        if not Path(photos).exists():
            raise FileNotFoundError(f'no file or folder {str(photos)!r}; expected photos')
        if not Path(photos).is_dir():
            yield photos
            return
        if not (names := list_photos(str(photos))):
            raise FileNotFoundError(f'no photos in {str(photos)!r}')
        yield from (str(Path(photos, name)) for name in names)
    elif isinstance(photos, (np.ndarray, Image.Image)):
        yield photos
    elif isinstance(photos, Iterable) and not isinstance(photos, (bytes, bytearray, torch.Tensor)):
        for photo in photos:
            yield from _photos(photo)
    else:
        raise TypeError(f'a photo of type {type(photos).__name__}; expected a file or folder (str or Path), an array, '
                        'a PIL image, or a list of these')


def _pixels(image: Image.Image) -> np.ndarray:
    """The pixels that the image's file would be read as: uint8 (H, W, 3), RGB, upright."""
    image.load()  # some formats learn of their palette or transparency only here
    turn = UPRIGHT.get(orientation(image))
    image = to_rgb(image)
    return np.array(image if turn is None else image.transpose(turn))
