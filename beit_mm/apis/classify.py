"""Classifies photos with a checkpoint and nothing else."""
import re
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose, default_collate
from mmengine.device import get_device
from mmengine.registry import DefaultScope

from beit_mm.checkpoint.config_text import read_config_text
from beit_mm.checkpoint.content import meta_of
from beit_mm.checkpoint.errors import CheckpointError
from beit_mm.checkpoint.loading import load_from_file
from beit_mm.datasets.photos import list_photos
from beit_mm.engine.predictions import TOP, describe
from beit_mm.registry import MODELS, TRANSFORMS

# What a checkpoint's own config may name: building a type runs code with the config's arguments, and mmengine imports
# names that it does not know from anywhere.
TYPES = re.compile(
    r'beit_mm\.\w+|(mmpretrain\.)?(ImageClassifier|LinearClsHead|StackedLinearClsHead|ClsDataPreprocessor|'
    r'LoadImageFromFile|Resize|ResizeEdge|CenterCrop|PackInputs)')
FOR_TRAINING = ('init_cfg', 'loss', 'pretrained', 'train_cfg')  # keys of a model
LOADERS = ('LoadPhoto', 'LoadImageFromFile')

Photo = str | Path | np.ndarray


class Classifier:
    """A trained classifier, with the names of its classes and the preparation of its images.

    Args:
        checkpoint: a file that a fine-tuning of ours wrote; it holds its config. Of other files give the `config`.
        device: such as 'cuda:1' or 'cpu'; None for what there is.
        config: path of a config, or a Config, instead of the checkpoint's own; unlike that one it may name any type.

    Raises:
        FileNotFoundError: no such file.
        CheckpointError: the checkpoint has no config, or one that names types which only a given config may; or its
            weights do not fit.
        ValueError: the config describes something else than a classifier.

    On a GPU it computes in bfloat16.
    """

    def __init__(self, checkpoint: str | Path, device: str | torch.device | None = None,
                 config: str | Path | Config | None = None):
        content = load_from_file(str(checkpoint))
        meta = meta_of(content)
        cfg = _own_config(meta, checkpoint) if config is None else _given_config(config)
        if 'data_preprocessor' in cfg:
            cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
        load, *prepare = cfg.test_dataloader.dataset.pipeline
        if load['type'].split('.')[-1] not in LOADERS:
            raise ValueError(f'the test pipeline begins with {load["type"]}; expected one of {LOADERS}')
        self.rgb = load['type'].endswith('LoadPhoto')
        with DefaultScope.overwrite_default_scope(cfg.get('default_scope', 'mmpretrain')):
            self.model = MODELS.build(cfg.model)
            self.load = TRANSFORMS.build(load)
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
            photos: a file, a folder (all its photos, to any depth, sorted), an array uint8 (H, W, 3), **RGB**, or a
                list of these.
            batch_size: photos computed at a time.
            top: classes to return for each.

        Returns:
            For each photo dict(path=its file, None for an array; label=the most likely class; name=its name;
            scores=[[label, probability], ...] of the `top` most likely, best first).

        Raises:
            FileNotFoundError: no such file, or a folder without photos.
            UnreadableImageError: a file that is no photo; names it.
        """
        waiting = iter(_photos(photos))
        found = []
        while batch := list(islice(waiting, batch_size)):
            with torch.no_grad(), torch.autocast(self.device.type, torch.bfloat16, enabled=self.device.type == 'cuda'):
                samples = self.model.test_step(default_collate([self._prepared(photo) for photo in batch]))
            for photo, sample in zip(batch, samples, strict=True):
                path = None if isinstance(photo, np.ndarray) else str(photo)
                found.append(describe(sample.pred_score, self.classes, path, top))
        return found

    def _prepared(self, photo: Photo) -> dict:
        if not isinstance(photo, np.ndarray):
            return self.prepare(self.load(dict(img_path=str(photo))))
        if photo.ndim != 3 or photo.shape[2] != 3 or photo.dtype != np.uint8:
            raise ValueError(f'an array of {photo.dtype} {photo.shape}; expected uint8 (height, width, 3), RGB')
        image = np.ascontiguousarray(photo if self.rgb else photo[..., ::-1])
        return self.prepare(dict(img=image, img_shape=image.shape[:2], ori_shape=image.shape[:2]))


def _own_config(meta: dict, checkpoint: str | Path) -> ConfigDict:
    text = meta.get('cfg')
    if not isinstance(text, str):
        raise CheckpointError(f'{checkpoint} holds no config; give the one that it was trained with: '
                              'Classifier(checkpoint, config=...)')
    values = read_config_text(text)
    try:
        parts = dict(model=_without(values['model'], FOR_TRAINING), test_dataloader=dict(dataset=dict(
            pipeline=values['test_dataloader']['dataset']['pipeline'])))
    except (KeyError, TypeError):
        raise CheckpointError(f'The config in {checkpoint} has no model and test pipeline of a classifier; give '
                              'another: Classifier(checkpoint, config=...)') from None
    if 'data_preprocessor' in values:
        parts['data_preprocessor'] = values['data_preprocessor']
    for name in _types(parts):
        if not isinstance(name, str) or not TYPES.fullmatch(name):
            raise CheckpointError(f'The config in {checkpoint} asks for {name!r}, which is not built on the word of a '
                                  'checkpoint; if you trust it, give the config: Classifier(checkpoint, config=...)')
    return ConfigDict(parts, default_scope='mmpretrain')


def _given_config(config: str | Path | Config) -> Config:
    return config.copy() if isinstance(config, Config) else Config.fromfile(str(config))


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
    """Files and arrays, folders taken apart."""
    if isinstance(photos, (str, Path)):
        if not Path(photos).exists():
            raise FileNotFoundError(f'no file or folder {str(photos)!r}; expected photos')
        if not Path(photos).is_dir():
            yield photos
            return
        if not (names := list_photos(str(photos))):
            raise FileNotFoundError(f'no photos in {str(photos)!r}')
        yield from (str(Path(photos, name)) for name in names)
    elif isinstance(photos, np.ndarray):
        yield photos
    else:
        for photo in photos:
            yield from _photos(photo)
