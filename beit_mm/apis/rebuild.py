"""Rebuilds what a checkpoint holds: a model and its image preparation, a pretrainer, or a part's config."""

import copy
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from torch import nn

from beit_mm.apis.configs import bundled_config, read_config
from beit_mm.apis.stored_config import PARTS, STEPS, TOKENIZERS, RefusedError, check_part
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, LoadReport, check_finite
from beit_mm.checkpoint.description import class_names
from beit_mm.checkpoint.find import (
    DEMO,
    FITS_WHOLE_MODEL,
    WEIGHTS_VARIABLE,
    names_of_file,
    nearest,
    plain_vits,
    released,
)
from beit_mm.checkpoint.names import released_out_indices
from beit_mm.checkpoint.read import CheckpointError, as_checkpoint_error
from beit_mm.datasets.reading import LoadBands
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.datasets.transforms import as_size
from beit_mm.engine.checks import load_whole
from beit_mm.errors import UserError
from beit_mm.features.extractor import ImageReader, usual_preparation
from beit_mm.files import quoted
from beit_mm.models import BEiTBackbone, LinearProbe
from beit_mm.models.beit import BEiTPretrainer
from beit_mm.models.feature_targets import EMA
from beit_mm.models.lora import merge_lora
from beit_mm.models.provenance import preprocessing_of_model, target_provenance
from beit_mm.models.tokenizers.dalle import DECODER_URL, ENCODER_URL, STRIDE
from beit_mm.registry import MODELS, TRANSFORMS, building

ConfigInput: TypeAlias = str | Path | Config | None
SCOPES = dict(classifier='mmpretrain', segmentor='mmseg')  # task -> the library whose types need no prefix
# tensors of the heads that show the rest of a model; those of other heads do not show how they resize
HEAD_TENSORS = dict(
    classifier=['head.fc.weight'],
    segmentor=['decode_head.conv_seg.weight', 'decode_head.fpn_bottleneck.conv.weight', 'neck.upsample_4x.0.weight'],
)
TOKENIZER = 'demo/dvae.py'  # the config that trains a user's own tokenizer
# arguments of the tokenizers that the config TOKENIZER trains
TRAINED_KEYS = ('type', 'arch', 'hidden', 'vocab_size', 'embed_dims', 'num_levels', 'bottleneck_blocks')
DALLE_VOCABULARY = 8192
FILES = ('checkpoint', 'decoder_checkpoint')  # arguments of tokenizers that name files

# Endings of file names by which the authors, OpenMMLab and timm say what a model was last trained on
TRAINED_ON = re.compile(r'(?:(?:ft|to|[._-]in)1k|(?P<ade>ade20k))(?:_\d{8})?(?:-[0-9a-f]{8})?$')


class NeedsConfigError(UserError):
    """A file does not show its whole model, or its config is refused; `reason` says why, without the file's name."""

    def __init__(self, reason: str) -> None:
        super().__init__(f'{reason}; give a config that you trust (config=PATH of an inferencer, --config of `export`)')


@dataclass
class Recipe:
    """Configs of a model and of its image preparation."""

    scope: str
    model: dict[str, Any]
    pipeline: list[dict[str, Any]]  # for testing; the first step loads an image
    tta_model: dict[str, Any] = field(default_factory=dict)  # wraps the model for a multi-scale test; else empty
    views: dict[str, Any] = field(default_factory=dict)  # config of a multi-scale test's MultiScaleViews; else empty


@dataclass
class Rebuilt:
    """A classifier or segmentor, and what its results need."""

    model: nn.Module  # in evaluation mode, on the CPU; for a multi-scale test inside the config's `tta_model`
    reader: ImageReader
    classes: tuple[str, ...]
    palette: list[list[int]]  # [red, green, blue] of each class, 0-255
    ratios: list[float]  # of the sizes of a multi-scale test; else empty


def rebuild(
    checkpoint: Checkpoint,
    task: str,
    config: ConfigInput,
    multi_scale: bool,
    max_pixels: int | None,
    short_side: int | None = None,
    full_size: bool = False,
) -> Rebuilt:
    """Builds the 'classifier' or 'segmentor' in a checkpoint, and its image preparation.

    Args:
        config: a trusted config to use instead of the checkpoint's own; it may name any type.
        multi_scale: build the config's `tta_model` and `tta_pipeline`.
        max_pixels: limit for an image file, instead of the config's.
        short_side, full_size: see SegmentationInferencer.
    """
    if config is not None:
        recipe = given_recipe(config, task, multi_scale)
    else:
        with as_checkpoint_error(checkpoint.path):
            recipe = stored_recipe(checkpoint, task, multi_scale)
    if max_pixels is not None:
        loader, *steps = recipe.pipeline
        recipe.pipeline = [dict(loader, max_pixels=max_pixels), *steps]  # leaves a given config unchanged
    if task == 'segmentor' and (config is None or short_side or full_size):
        recipe.pipeline = [at_scale(step, short_side, full_size) for step in recipe.pipeline]
    if checkpoint.mean_std:
        checked = {name: checkpoint.normalisation[0][name] for name in checkpoint.mean_std}
        recipe.model['data_preprocessor'] = {**(recipe.model.get('data_preprocessor') or {}), **checked}
    check_finite(checkpoint.weights, str(checkpoint.path))
    with building(recipe.scope):
        try:
            settings = ConfigDict(recipe.model)  # mmseg reads its test_cfg by attributes
            if config is None:
                model = stored_model(settings, checkpoint)
            else:
                model = MODELS.build(settings)
                load_whole(model, checkpoint.state_dict)
                model = merge_lora(model)
            reader = built_reader(recipe.pipeline, model)
            ratios = [*TRANSFORMS.build(recipe.views).ratios] if recipe.views else []
            num_classes = number_of_classes(model)
        except Exception as error:
            reason = ' '.join(str(error).split())
            raise CheckpointError(f'{checkpoint} does not fit its config: {reason:.500}') from error
        if recipe.tta_model:
            model = MODELS.build(dict(recipe.tta_model, module=model))
    with as_checkpoint_error(checkpoint.path):
        classes, palette = classes_of(checkpoint, num_classes)
    return Rebuilt(model.eval(), reader, classes, palette, ratios)


def merge_lora_weights(checkpoint: Checkpoint, task: str, config: Config) -> dict[str, Any]:
    """A LoRA run's checkpoint as the weights and meta of a plain model, with the matrices merged in."""
    model = rebuild(checkpoint, task, config, multi_scale=False, max_pixels=None).model
    meta = copy.deepcopy(checkpoint.content['meta'])
    settings = meta['config_dict']['model']
    settings['backbone'] = settings['backbone']['module']
    return dict(state_dict=model.state_dict(), meta=meta)


def given_recipe(config: str | Path | Config, task: str, multi_scale: bool) -> Recipe:
    values = config if isinstance(config, Config) else read_config(config)
    try:
        recipe = recipe_of_config(values, task, multi_scale)
    except UserError as error:
        raise UserError(f'{values.filename or "the config"} {error}') from None
    recipe.model.pop('auxiliary_head', None)
    recipe.scope = values.get('default_scope', recipe.scope)
    return recipe


def stored_recipe(checkpoint: Checkpoint, task: str, multi_scale: bool) -> Recipe:
    """The recipe from a checkpoint's config, else from the shapes of its tensors; types must be on the allow-list."""
    stored = checkpoint.meta.get('config_dict')
    values = stored if isinstance(stored, dict) else {}
    if values or multi_scale:  # a multi-scale test without a config is refused
        recipe = recipe_of_config(values, task, multi_scale)
    else:
        recipe = recipe_of_tensors(checkpoint, task)
    parts = PARTS[task]
    try:  # drops what only training needs, too
        recipe.model = check_part(recipe.model, parts, 'model')
        recipe.pipeline = [check_part(step, STEPS, f'pipeline[{index}]') for index, step in enumerate(recipe.pipeline)]
        if recipe.tta_model:
            recipe.tta_model = check_part(recipe.tta_model, parts, 'tta_model')
        if recipe.views:
            recipe.views = check_part(recipe.views, STEPS, 'tta_pipeline')
    except RefusedError as error:
        raise NeedsConfigError(f'cannot be rebuilt as a {task}: {error}') from None
    return recipe


def recipe_of_config(values: Mapping[str, Any], task: str, multi_scale: bool) -> Recipe:
    """Model and test pipeline of a config; UserError, whose message lacks the name of the config, if it has none."""
    try:
        model = dict(values['model'])
        if 'data_preprocessor' in values:  # mmpretrain's configs have it beside the model
            model.setdefault('data_preprocessor', values['data_preprocessor'])
        pipeline = pipeline_of_config(values, task, multi_scale)
        tta_model = dict(values['tta_model']) if multi_scale else {}
        last_step = (values.get('tta_pipeline') or [{}])[-1]
        views = last_step if last_step.get('type') == 'beit_mm.MultiScaleViews' else {}
        has_types = 'type' in model and 'type' in pipeline[0]
    except (LookupError, TypeError, AttributeError, RuntimeError, ValueError):  # a stored config may hold anything
        has_types = False
    if not has_types:
        needed = 'tta_model and tta_pipeline' if multi_scale else 'model and test pipeline'
        raise NeedsConfigError(f'has no {needed} for a {task}')
    return Recipe(SCOPES[task], model, pipeline, tta_model, views)


def pipeline_of_config(values: Mapping[str, Any], task: str, multi_scale: bool) -> list[dict[str, Any]]:
    loader: Any = values.get('test_dataloader') or values.get('val_dataloader')
    if multi_scale:
        pipeline = values['tta_pipeline']
    elif task == 'segmentor' or loader:
        pipeline = loader['dataset']['pipeline']
    else:
        pipeline = values['train_dataloader']['dataset']['pipeline'][:1]  # how an image is loaded
    return [step for step in pipeline if 'LoadAnnotation' not in str(step.get('type'))]


def recipe_of_tensors(checkpoint: Checkpoint, task: str) -> Recipe:
    """The recipe of a file without a config, as written by timm, transformers, mmseg or the released code."""
    backbone = dict(checkpoint.backbone_arguments(), type='beit_mm.BEiTBackbone')
    weights = checkpoint.converted.state_dict
    missing = [name for name in HEAD_TENSORS[task] if name not in weights]
    if missing:
        raise NeedsConfigError(f'has no config and no {missing[0]!r}, which a {task} needs')
    mean_std, _ = checkpoint.normalisation
    recipe_of = segmentor_of if task == 'segmentor' else classifier_of
    return recipe_of(checkpoint, backbone, mean_std)


def classifier_of(checkpoint: Checkpoint, backbone: dict[str, Any], mean_std: dict[str, Any]) -> Recipe:
    weights = checkpoint.converted.state_dict
    num_classes, dims = weights['head.fc.weight'].shape
    if {'backbone.norm.weight', 'backbone.fc_norm.weight'} <= weights.keys():
        raise NeedsConfigError('has norms before and after the mean over the patches')
    model = dict(
        type='ImageClassifier',
        backbone=dict(backbone, out_type='avg_featmap' if 'backbone.fc_norm.weight' in weights else 'cls_token'),
        head=dict(type='LinearClsHead', num_classes=num_classes, in_channels=dims),
        data_preprocessor=dict(type='ClsDataPreprocessor', to_rgb=False, **mean_std),
    )
    steps: list[dict[str, Any]] = [dict(type='beit_mm.LoadImage')]
    if geometry := checkpoint.preprocessing.get('geometry'):
        steps[0]['scaled'] = False  # so that large JPEGs too get the library's own probabilities
        steps += usual_preparation(backbone['img_size'], 'pillow', geometry)
    return Recipe('mmpretrain', model, steps)


def segmentor_of(checkpoint: Checkpoint, backbone: dict[str, Any], mean_std: dict[str, Any]) -> Recipe:
    """A UperNet as in the released code."""
    weights = checkpoint.converted.state_dict
    num_classes, channels = weights['decode_head.conv_seg.weight'].shape[:2]
    size, dims, depth = backbone['img_size'], backbone['arch']['embed_dims'], backbone['arch']['num_layers']
    norm = dict(type='beit_mm.SyncBN')
    head = dict(in_channels=[dims] * 4, in_index=[0, 1, 2, 3], channels=channels, num_classes=num_classes)
    out_indices = checkpoint.architecture.get('out_indices') or released_out_indices(depth)
    if min(out_indices) < 0:  # -1 is the patch embedding, to transformers number 1
        raise NeedsConfigError('segments from the patch embedding, not only from outputs of blocks')
    model = dict(
        type='beit_mm.SlidingSegmentor',
        backbone=dict(backbone, out_type='featmap', out_indices=out_indices),
        neck=dict(type='Feature2Pyramid', embed_dim=dims, norm_cfg=norm),
        decode_head=dict(head, type='beit_mm.EfficientUPerHead', norm_cfg=norm),
        data_preprocessor=dict(type='SegDataPreProcessor', size=size, **mean_std),
        test_cfg=dict(mode='slide', crop_size=size, stride=[side * 2 // 3 for side in size]),
    )
    resize = dict(type='Resize', scale=[2048, min(size)], keep_ratio=True)
    return Recipe('mmseg', model, [dict(type='beit_mm.LoadImage'), resize, dict(type='PackSegInputs')])


def stored_model(config: ConfigDict, checkpoint: Checkpoint) -> nn.Module:
    """Builds a model from a stored config and loads its weights; allocates memory only if these fit."""
    with torch.device('meta'):
        model = MODELS.build(config)
    weights = checkpoint.converted.state_dict if checkpoint.format else checkpoint.weights
    expected = model.state_dict()
    for name, tensor in expected.items():
        shape = tuple(weights[name].shape) if name in weights else 'missing'
        if shape != tuple(tensor.shape):
            raise UserError(f'{name} is {shape} in the file, {tuple(tensor.shape)} in the config')
    model.to_empty(device='cpu')
    settings = {key: value for key, value in (config.get('data_preprocessor') or {}).items() if key != 'type'}
    model.data_preprocessor = type(model.data_preprocessor)(**settings)  # to_empty erased mean and std
    heads = checkpoint.architecture.get('num_heads')
    has_other_heads = heads is not None and heads != getattr(model.backbone, 'num_heads', heads)
    if checkpoint.weights.keys() == expected.keys() and not has_other_heads:  # nothing is left to convert or to fit
        model.backbone.fits_on_load = False
        model.backbone.load_report = LoadReport(str(checkpoint.path), checkpoint.preprocessing, matched=[*expected])
        model.load_state_dict(checkpoint.weights)
        model.backbone.fits_on_load = True
    else:
        load_whole(model, checkpoint.state_dict)
    return model


def at_scale(step: Mapping[str, Any], short_side: int | None, full_size: bool) -> dict[str, Any]:
    """A step of a segmentor's test pipeline; one that resizes keeps the scale of the training, or gets another one."""
    scale = {name: step[name] for name in ('short_side', 'factor', 'within') if name in step}
    if step['type'] == 'Resize' and step.get('keep_ratio') and step.get('scale'):
        short, long = sorted(as_size(step['scale']))
        if long < 2 * short and not short_side and not full_size:  # the long side of usual images decides
            return dict(step)
        scale = dict(short_side=short)
    if not scale:
        return dict(step)
    scale.setdefault('factor', 1.0)  # recipes for images of about that size
    if short_side:
        scale = dict(short_side=short_side, factor=None)
    elif full_size:
        scale = dict(scale, factor=1.0, within=1.0)
    if step['type'] == 'beit_mm.MultiScaleViews':
        return dict(step, **scale)
    return dict(type='beit_mm.ResizeToScale', **scale)


def built_reader(pipeline: Sequence[dict], model: nn.Module) -> ImageReader:
    """Builds the reader of a pipeline; if it only loads an image, the usual crop to the model's size is added."""
    load, *prepare = pipeline
    load = TRANSFORMS.build(load)
    backend = 'cv2' if isinstance(load, LoadBands) else 'pillow'
    prepare = prepare or usual_preparation(preprocessing_of_model(model)['size'], backend)
    return ImageReader([load, *(TRANSFORMS.build(step) for step in prepare)])


def number_of_classes(model: Any) -> int:
    """Number of classes of a classifier or segmentor; UserError for a probe that gives several predictions."""
    if isinstance(model, LinearProbe) and len(model.layers) > 1:
        raise UserError(f'the probe has {len(model.layers)} layers, each with its prediction; expected one')
    return model.num_classes if hasattr(model, 'num_classes') else model.head.num_classes


def classes_of(checkpoint: Checkpoint, number: int) -> tuple[tuple[str, ...], list[list[int]]]:
    """Names and colours of the classes: from the file, else from its name, else numbers and distinct colours."""
    names = class_names(checkpoint.meta)
    palette = (checkpoint.meta.get('dataset_meta') or {}).get('palette') or checkpoint.meta.get('PALETTE')
    if not names:
        known = metainfo_of_name(checkpoint.path, number)
        names = known.get('classes', map(str, range(number)))
        palette = known.get('palette', palette)
    classes = tuple(map(quoted, names))  # a terminal would obey control characters in a name
    if len(classes) != number:
        raise UserError(f'names {len(classes)} classes, but its model has {number}')
    colours = np.array(palette or distinct_colours(number))
    if colours.shape[1:] != (3,) or len(colours) < number or not np.isin(colours, range(256)).all():
        raise UserError(f'has a palette that is not a list of {number} colours [red, green, blue], 0-255')
    return classes, colours.tolist()


def metainfo_of_name(path: Path, num_classes: int) -> dict[str, Any]:
    """Class names (ADE20K's colours too) for a file that holds none, if its name shows them; else empty.

    The number of classes is not enough, because other data sets have 1000 or 150 too: the name (for files of timm and
    transformers, of their folder or repository) must end like a released file's. The order is the released heads'.
    """
    found = next(filter(None, map(TRAINED_ON.search, names_of_file(path))), None)
    if found is None:
        return {}
    if found['ade'] and num_classes == 150:
        from mmseg.datasets import ADE20KDataset

        return dict(ADE20KDataset.METAINFO)
    if not found['ade'] and num_classes == 1000:
        from mmpretrain.datasets.categories import IMAGENET_CATEGORIES

        return dict(classes=IMAGENET_CATEGORIES)
    return {}


def get_model(name: str, pretrained: bool | CheckpointInput | None = None) -> nn.Module:
    """Builds a released model: a pretrainer without its tokenizer, a classifier, a segmentor or a plain ViT.

    Args:
        name: one of `list_models`.
        pretrained: True loads the released weights from $BEIT_MM_WEIGHTS, torch hub's cache or the web; False keeps
            random weights; anything else goes to `Checkpoint.open`. None means True for 'demo', otherwise False. A
            plain ViT is built from its file, so it needs True or a checkpoint.

    Returns:
        The model of the file's config, in evaluation mode. Its `data_preprocessor` normalises images.
    """
    if name in plain_vits():
        if not pretrained:
            raise UserError(f'{name} is built from its file: get_model(name, pretrained=True)')
        return BEiTBackbone.from_checkpoint(name if pretrained is True else pretrained)
    if name not in released():
        raise UserError(f'no released model {name!r}{nearest(name) or "; see list_models()"}')
    entry = released()[name]
    pretrained = name == DEMO if pretrained is None else pretrained
    cfg = Config.fromfile(entry.config)
    cfg.model.backbone.init_cfg = None
    cfg.model.pop('target_generator', None)
    with building(cfg.default_scope):
        model = MODELS.build(cfg.model)
    if pretrained:
        checkpoint = Checkpoint.open(entry.url if pretrained is True else pretrained)
        model.load_state_dict(checkpoint.state_dict, strict=entry.fits == FITS_WHOLE_MODEL)
    return model.eval()


def rebuild_pretrainer(checkpoint: Checkpoint) -> BEiTPretrainer:
    """Builds the pretrainer of a checkpoint, with its weights and its tokenizer or teacher, in evaluation mode."""
    mean_std, _ = checkpoint.normalisation
    with as_checkpoint_error(checkpoint.path):
        model = BEiTPretrainer(
            backbone=dict(backbone_config(checkpoint), type='beit_mm.BEiTBackbone', out_type='raw', masked_input=True),
            head=head_config(checkpoint),
            target_generator=targets_config(checkpoint),
            data_preprocessor=dict(mean_std, type='beit_mm.TwoViewDataPreprocessor'),
        )
        stored, found = checkpoint.meta.get('tokenizer') or {}, target_provenance(model) or {}
        before, now = stored.get('sha256'), found.get('sha256')
        if before and now and before != now:
            raise UserError(f'was trained with another {stored.get("type")}: SHA-256 {before}, the one found has {now}')
        model.load_state_dict(checkpoint.state_dict, strict=False)
    return model.eval()


def backbone_config(checkpoint: Checkpoint, channels: int = 3) -> dict[str, Any]:
    """Arguments of a checkpoint's backbone; CheckpointError unless it takes RGB or `channels` bands."""
    arguments = checkpoint.backbone_arguments()
    if (found := arguments['in_channels']) not in (3, channels):
        expected = 'RGB' if channels == 3 else f'RGB or {channels} bands'
        raise CheckpointError(f'{checkpoint} takes images with {found} bands; expected {expected}')
    arguments['img_size'] = as_size(arguments['img_size'])
    return arguments


def targets_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of the tokenizer or teacher that a checkpoint was trained with; CheckpointError if unknown.

    Released checkpoints do not name it: it is DALL-E's if the vocabulary fits and the model is not BEiT v2.
    """
    head = head_config(checkpoint)
    learns_features = head['type'] == 'beit_mm.FeatureRegressionHead'
    with as_checkpoint_error(checkpoint.path):
        stored = ((checkpoint.meta.get('config_dict') or {}).get('model') or {}).get('target_generator')
        if stored:
            return stored_teacher(checkpoint, stored) if learns_features else stored_tokenizer(checkpoint, stored)
    if learns_features:
        raise CheckpointError(f'{checkpoint} does not say which teacher its features come from')
    of_beit_v2 = any(name.startswith('patch_aggregation.') for name in checkpoint.converted.state_dict)
    if head['vocab_size'] != DALLE_VOCABULARY or of_beit_v2:
        raise CheckpointError(f'{checkpoint} does not say which tokenizer its visual tokens come from')
    if dalle := find_dalle():
        return dalle
    raise CheckpointError(
        f"{checkpoint} names no tokenizer; if it is DALL-E's, put {ENCODER_URL} and {DECODER_URL} into "
        f'${WEIGHTS_VARIABLE}'
    )


def head_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of a checkpoint's head, which predicts visual tokens or features."""
    weights = checkpoint.converted.state_dict
    if (weight := weights.get('head.feature_head.weight')) is not None:
        return dict(type='beit_mm.FeatureRegressionHead', embed_dims=weight.shape[1], target_dims=len(weight))
    if (weight := weights.get('head.lm_head.weight')) is not None:
        return dict(type='beit_mm.BEiTMIMHead', embed_dims=weight.shape[1], vocab_size=len(weight))
    raise CheckpointError(f'{checkpoint} predicts no visual tokens: head.lm_head.weight is missing')


def stored_tokenizer(checkpoint: Checkpoint, stored: Any) -> dict[str, Any]:
    config = check_part(without_files(stored), TOKENIZERS, 'target_generator')
    config |= {key: find_again(str(stored[key]), checkpoint) for key in FILES if stored.get(key)}
    if config['type'] == 'beit_mm.DiscreteVAE' and 'checkpoint' not in config:
        raise UserError('does not name the file of its tokenizer')
    digest = (checkpoint.meta.get('tokenizer') or {}).get('sha256')
    return dict(config, sha256=str(digest)) if digest and 'checkpoint' in config else config


def stored_teacher(checkpoint: Checkpoint, stored: Any) -> dict[str, Any]:
    """The config of FeatureTargets; 'ema' needs no file, because the checkpoint holds its weights."""
    others = {key: value for key, value in stored.items() if key != 'teacher'}
    config = check_part(others, ('beit_mm.FeatureTargets',), 'target_generator')
    teacher = stored.get('teacher')
    if not isinstance(teacher, str):
        raise UserError('was trained with a teacher, such as CLIP, that is not a single file; it cannot be rebuilt')
    if teacher != EMA and teacher not in released() and teacher not in plain_vits():
        teacher = find_again(teacher, checkpoint, 'teacher')
    return dict(config, teacher=teacher)


def without_files(tokenizer: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in tokenizer.items() if key not in (*FILES, 'sha256')}


def find_again(file: str, checkpoint: Checkpoint, what: str = 'tokenizer') -> str:
    """Finds a file that a checkpoint names, even if the run was moved."""
    if file == DEMO:
        return file
    beside = checkpoint.path.resolve().parent
    places = [Path(file), *(beside / folder / Path(file).name for folder in ('tokenizer', '../tokenizer', '.'))]
    for place in places:
        if place.is_file() and place.resolve().parts[1] not in ('proc', 'sys'):  # reading there may never end
            return str(place)
    names = ' and '.join(quoted(str(place)) for place in places)
    raise FileNotFoundError(f'the {what} of {checkpoint} is gone: looked for {names}')


def trained_tokenizer(checkpoint: str | Path) -> dict[str, Any]:
    """The config of a tokenizer trained with TOKENIZER, such as 'demo'."""
    model = bundled_config(TOKENIZER).model
    return dict({key: model[key] for key in TRAINED_KEYS}, checkpoint=str(checkpoint))


def find_dalle() -> dict[str, Any] | None:
    """The config of a DALLETokenizer with weights from $BEIT_MM_WEIGHTS or torch hub's cache; None without them."""
    folders = filter(None, (os.environ.get(WEIGHTS_VARIABLE), f'{torch.hub.get_dir()}/checkpoints'))
    encoders = [Path(folder, name) for folder in folders for name in ('dalle_encoder.pth', 'encoder.pkl')]
    for encoder in encoders:
        if encoder.is_file():
            files = dict(checkpoint=encoder, decoder_checkpoint=encoder.with_name('decoder.pkl'))
            found = {key: str(file.resolve()) for key, file in files.items() if file.is_file()}
            return dict(found, type='beit_mm.DALLETokenizer')
    return None


def stride_and_vocab(tokenizer: Mapping[str, Any]) -> tuple[int, int]:
    """Side of a visual token in pixels, and number of different tokens, from a tokenizer's config."""
    if tokenizer['type'] == 'beit_mm.DALLETokenizer':
        return STRIDE, tokenizer.get('vocab_size', DALLE_VOCABULARY)
    with torch.device('meta'):
        built = MODELS.build(without_files(tokenizer))
    return built.stride, built.vocab_size
