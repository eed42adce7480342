"""An opened checkpoint, and its weights fitted to a backbone."""

import copy
import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import torch
from mmengine.config import Config
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from beit_mm.checkpoint import description, names
from beit_mm.checkpoint.find import DEMO, HUB_SCHEME, path_of_checkpoint, plain_vits, released
from beit_mm.checkpoint.read import as_checkpoint_error, read_checkpoint
from beit_mm.errors import CheckpointError, UserError, warn
from beit_mm.positions import Grid, resize_bias_table, resize_patch_embedding, resize_position_embedding

ORIGIN = 'beit_mm'  # key in a state dict's metadata, which torch hands to load hooks as `local_metadata`
TRANSLATED = ('unilm', 'timm', 'hf')  # formats whose names lack the prefix `backbone.`
MIN_COVERAGE = 0.95  # share of the backbone's tensors, without TASK_PARTS, that a file must have
PATCHES = 'patch_embed.proj.weight'
TASK_PARTS = ('mask_token', 'norm.', 'fc_norm.')  # present for some tasks only
PerChannel: TypeAlias = Sequence[float] | float | None  # for each channel or for all, pixels 0-255; None: not given


class Checkpoint:
    """A checkpoint file, read once and passed around, with all its weights in memory.

    Attributes:
        path: where the file is.
        content: what it holds, tensors on the CPU, without the text `meta['config']`, which mmengine would execute.
        weights: the state dict under the file's own names, without what trainers add (`module.`, `_orig_mod.`).
        converted, state_dict: the weights under our models' names, and in the form that any model can load.
        format: one of `names.FORMATS`, or None if it is not a BEiT.
        meta, preprocessing, architecture: see `description.describe_source`.
        mean_std: the `mean` and `std` that the user gave, if any.
    """

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.mean_std: dict[str, list[float]] = {}
        with as_checkpoint_error(path):
            self.path, self.content = path, content
            self.weights = names.weights_of(content)
            bare = names.bare_names(self.weights)
            self.format = names.detect_format(bare)
            if self.format is not None:
                self.weights = bare
            description.meta_of(content).pop('config', None)
            self.meta = description.describe_source(content, path, self.format)
        self.preprocessing: dict[str, Any] = self.meta['preprocessing']
        self.architecture: dict[str, Any] = self.meta['architecture']

    @classmethod
    def open(cls, source: 'CheckpointInput', part: str = 'pretrained', **mean_std: Any) -> 'Checkpoint':
        """Reads a file; raises FileNotFoundError, or CheckpointError if it is not a checkpoint.

        Args:
            source: a file; a folder of a finished run, of transformers or of timm; a URL (http, https,
                hf://owner/name); 'demo'; a name from `find.list_models`; or a Checkpoint, which is returned.
            part: which of the packaged weights 'demo' stands for, see `find.path_of_checkpoint`.
            mean_std: `mean` and `std` of its images, pixels 0-255, to use instead of the file's.
        """
        if not isinstance(source, Checkpoint):
            path = path_of_checkpoint(source, part)
            source = cls(read_checkpoint(path), path)
        if given := given_mean_std(**mean_std):
            source = copy.copy(source)
            source.mean_std = source.mean_std | given
        return source

    def __str__(self) -> str:
        return str(self.path)

    @cached_property
    def converted(self) -> names.Converted:
        with as_checkpoint_error(self.path):
            patches = [part for name, part in self.weights.items() if description.PATCH_EMBEDDING.search(name)]
            grid = names.trained_grid(self.meta, patches[0].shape[-1]) if patches else None
            return names.convert_state_dict(self.weights, self.format, grid=grid)

    @property
    def task(self) -> str:
        if any(name.startswith(('heads.', 'head.layers.')) for name in self.weights):  # linear probes, deeper heads
            return 'classification'
        by_lora = any('.lora_' in name for name in self.weights)  # a checkpoint of such a run lacks the backbone
        return names.task_of(self.weights if by_lora else self.converted.state_dict)

    def backbone_arguments(self) -> dict[str, Any]:
        """Arguments of the BEiTBackbone that the weights fit."""
        with as_checkpoint_error(self.path):
            return names.backbone_arguments(self.converted.state_dict, self.meta)

    @property
    def normalisation(self) -> tuple[dict[str, list[float]], str]:
        found, name, weights = self.preprocessing, self.path.stem, self.converted.state_dict
        if 'mean' not in found and name in plain_vits():
            found = description.IMAGENET if plain_vits()[name]['normalisation'] == 'imagenet' else description.HALF
        elif 'mean' not in found and name in released().keys() - {DEMO}:  # OpenMMLab's files do not record it
            found = Config.fromfile(released()[name].config).model.data_preprocessor
        return normalisation_of(str(self), found, weights, weights[f'backbone.{PATCHES}'].shape[1], **self.mean_std)

    @cached_property
    def state_dict(self) -> dict[str, Any]:
        """The weights for any model's `load_state_dict`, with ORIGIN in their metadata.

        mmengine finds a backbone by its prefix, so unilm, timm and hf files are renamed; OpenMMLab's stay as they are.
        """
        given, format = self.content.get('state_dict', self.content), self.format
        if format in TRANSLATED:
            try:
                given, dropped, _ = self.converted
                if dropped:
                    warn(f'{self.path} ({format}) holds tensors that none of our models has: {dropped}')
            except CheckpointError:  # not a BEiT: the model to load expects the file's own names
                format = None
        elif format is not None:
            given = self.weights
        origin = dict(
            path=str(self.path),
            format=format,
            names=names.preview(self.weights),
            preprocessing=self.preprocessing,
            architecture=self.architecture,
        )
        state_dict: Any = OrderedDict(given)
        state_dict._metadata = OrderedDict(getattr(given, '_metadata', {}))
        for module in ('', 'backbone', 'module.backbone'):  # a backbone, a model, a model in a wrapper
            state_dict._metadata[module] = {**state_dict._metadata.get(module, {}), ORIGIN: origin}
        return state_dict


CheckpointInput: TypeAlias = str | Path | Checkpoint


def normalisation_of(
    source: str, found: Mapping, weights: Iterable[str], channels: int, **mean_std: Any
) -> tuple[dict[str, list[float]], str]:
    """`mean` and `std` of each channel of a model's images, pixels 0-255, and a warning if they are assumed.

    The user's `mean_std` override what was `found` in the file; released weights with these names supply the rest.
    """
    known = {name: list(found[name]) for name in ('mean', 'std') if found.get(name)} | given_mean_std(**mean_std)
    warning = ''
    if len(known) < 2:
        problem = f'{source} does not say how its images were normalised'
        if channels != 3:
            raise UserError(f'{problem}, which have {channels} channels; give the mean and std of each: --mean, --std')
        usual, whose = description.usual_normalisation(weights)
        assumed = ' and '.join(name for name in usual if name not in known)
        warning = f'{problem}. Assumed {assumed}: {whose}; to change this, give --mean and --std'
        warn(warning)
        known = usual | known
    for name, values in known.items():
        if len(values) not in (1, channels):
            raise UserError(f'{source} takes images of {channels} channels; {name} has {len(values)}')
    return {name: values * (channels // len(values)) for name, values in known.items()}, warning


def given_mean_std(mean: PerChannel = None, std: PerChannel = None) -> dict[str, list[float]]:
    """The `mean` and `std` that a user gave, as lists; UserError if pixels 0-255 cannot have them."""
    given = {}
    for name, channels in (('mean', mean), ('std', std)):
        if channels is None:
            continue
        given[name] = values = torch.as_tensor(channels, dtype=torch.float64).flatten().tolist()
        if 0 < max(values) <= 1 or (name == 'std' and min(values) <= 0):
            raise UserError(f'{name} is {values}; expected values for pixels 0-255, such as 127.5, not 0.5')
    return given


@CheckpointLoader.register_scheme(prefixes=('', 'http://', 'https://', HUB_SCHEME), force=True)
def load_from_file(filename: str, map_location: object = None) -> dict[str, Any]:
    """Reads a path or URL for mmengine: dict(state_dict=..., meta=..., ...), or a bare state dict, on the CPU.

    mmengine 0.10.7's own reader fails with torch >= 2.6; that of later versions executes code in files.
    """
    checkpoint = Checkpoint.open(filename)
    if checkpoint.format in TRANSLATED and 'mmengine_version' in checkpoint.meta:
        return checkpoint.content  # of a run of another library's model, for example mmpretrain's TIMMBackbone
    state_dict: Any = checkpoint.state_dict
    format = state_dict._metadata[''][ORIGIN]['format']
    if format in TRANSLATED:  # drops the optimizer and the like, which belong to the old names
        return dict(state_dict=state_dict, meta=checkpoint.meta)
    if format is None and 'state_dict' not in checkpoint.content:  # a bare state dict of another model
        return state_dict
    return dict(checkpoint.content, state_dict=state_dict)  # all that resuming needs


@dataclass
class LoadReport:
    """What happened to each tensor when a backbone was loaded; names without `backbone.`."""

    source: str  # file and format
    preprocessing: Mapping  # of the training images, see `description.describe_source`
    matched: list[str] = field(default_factory=list)  # loaded in the shape that they have in the file
    expanded: list[str] = field(default_factory=list)  # bias tables of the blocks, made from the shared one
    resized: dict[str, str] = field(default_factory=dict)  # tables and position embeddings: name -> patch grids
    adapted: list[str] = field(default_factory=list)  # patch embedding of other channels or patch size
    folded: list[str] = field(default_factory=list)  # LayerScale multiplied into other weights
    missing_keys: list[str] = field(default_factory=list)  # not in the file, so they keep their initial values
    unexpected_keys: list[str] = field(default_factory=list)  # in the file, but not in the model

    def __str__(self) -> str:
        grids = ', '.join(sorted(set(self.resized.values())))
        parts = {
            'matched': self.matched,
            'expanded': self.expanded,
            f'resized ({grids})': self.resized,
            'adapted': self.adapted,
            'folded': self.folded,
            f'missing ({names.preview(self.missing_keys)})': self.missing_keys,
            f'unexpected ({names.preview(self.unexpected_keys)})': self.unexpected_keys,
        }
        counts = ', '.join(f'{len(keys)} {what}' for what, keys in parts.items() if keys)
        return f'Backbone weights from {self.source}: {counts}.'


def drop_task_parts(keys: list[str]) -> list[str]:
    return [key for key in keys if not key.startswith(TASK_PARTS)]


def fit_weights(
    state_dict: Mapping[str, Tensor],
    own: Mapping[str, Tensor],
    grid: Grid,
    num_heads: int,
    interpolate_mode: str,
    origin: Mapping | None = None,
) -> tuple[names.Weights, LoadReport]:
    """Fits a state dict to a backbone's names and shapes; returns the tensors and a report.

    Args:
        state_dict: state dict of a model or a backbone, in any format.
        own, grid, num_heads, interpolate_mode: the backbone's; `own` is its state dict.
        origin: what `Checkpoint.state_dict` records about the file; None for a bare state dict.

    Raises CheckpointError, whose message lacks the path.
    """
    origin = origin or dict(path='the state dict', format=None, preprocessing={}, architecture={})
    converted, dropped, format = names.convert_state_dict(state_dict, grid=grid)
    prefix = 'backbone.'
    weights = {name.removeprefix(prefix): tensor for name, tensor in converted.items() if name.startswith(prefix)}
    report = LoadReport(f'{origin["path"]} ({origin["format"] or format})', origin['preprocessing'])
    _check_sizes(weights, own, names.heads_of(weights, origin) or num_heads, num_heads)
    check_finite(weights, report.source)
    if names.SHARED_TABLE in weights and f'blocks.0.attn.{names.TABLE}' in own:
        names.expand_shared_table(weights)
        report.expanded = [name for name in weights if name.endswith(names.TABLE)]
    if 'blocks.0.gamma_1' not in own:
        report.folded = [name for name in weights if '.gamma_' in name]
        _fold_layer_scale(weights)
    file_grid = names.trained_grid(origin, weights[PATCHES].shape[-1])
    fitted = {name: weights[name] for name in own if name in weights}
    for name, tensor in fitted.items():
        if name == PATCHES and tensor.shape != own[name].shape:
            if tensor.shape[-1] != own[name].shape[-1]:
                tensor = resize_patch_embedding(tensor, own[name].shape[-1])
            fitted[name] = _adapt_channels(tensor, own[name].shape[1])
            report.adapted.append(name)
        before = names.grid_of(name, tensor, file_grid, grid) if name.endswith(names.POSITIONS) else grid
        if before != grid:
            if name.endswith(names.TABLE):
                fitted[name] = resize_bias_table(tensor, before, grid)
            else:
                fitted[name] = resize_position_embedding(tensor, before, grid, interpolate_mode)
            report.resized[name] = f'{before[0]} x {before[1]} -> {grid[0]} x {grid[1]}'
    report.matched = [name for name in fitted if name not in {*report.resized, *report.expanded, *report.adapted}]
    report.missing_keys = [name for name in own if name not in fitted]
    report.unexpected_keys = [name.removeprefix(prefix) for name in dropped if name.startswith(prefix)]
    report.unexpected_keys += [name for name in weights if name not in own]
    _check_coverage(own, report)
    return fitted, report


def _check_sizes(weights: names.Weights, own: Mapping[str, Tensor], file_heads: Any, num_heads: int) -> None:
    blocks, own_blocks = (sum(name.endswith('attn.qkv.weight') for name in part) for part in (weights, own))
    sizes: list[tuple[str, Any, Any]] = [('heads', file_heads, num_heads), ('blocks', blocks, own_blocks)]
    if 'register_tokens' in weights and 'register_tokens' not in own:
        sizes.append(('num_registers', weights['register_tokens'].shape[1], 0))
    unlike = [name for name in weights if name in own and not _same_shape(name, weights[name], own[name])]
    sizes += [(name, tuple(weights[name].shape), tuple(own[name].shape)) for name in unlike[:1]]  # one is enough
    if differences := [f'{what} {theirs}, the model has {ours}' for what, theirs, ours in sizes if theirs != ours]:
        raise CheckpointError(
            f'does not fit the backbone: {names.preview(differences)}. Nothing was loaded; build the backbone like '
            'the weights (arch, patch_size), or take other weights.'
        )


def _same_shape(name: str, one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same shape, apart from axes that can be adapted."""
    free_axes = {PATCHES: (1, 2, 3), 'pos_embed': (1,)}.get(name, (0,) if name.endswith(names.TABLE) else ())
    fixed = [axis for axis in range(one.dim()) if axis not in free_axes]
    return one.dim() == other.dim() and all(one.shape[axis] == other.shape[axis] for axis in fixed)


def check_finite(weights: Mapping[str, Tensor], source: str) -> None:
    """Raises CheckpointError for NaN or infinity, which a diverged run leaves behind."""
    real = {name: tensor for name, tensor in weights.items() if not tensor.is_meta}
    if broken := [name for name, tensor in real.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f'{source}: {len(broken)} of {len(weights)} tensors hold NaN or infinity: {names.preview(broken)}. '
            'Nothing was loaded; the run that wrote them had diverged: use one of its earlier checkpoints.'
        )


def _fold_layer_scale(weights: names.Weights) -> None:
    """Multiplies LayerScale into the layers before it, in place."""
    for name in [name for name in weights if name.endswith(('.gamma_1', '.gamma_2'))]:
        gamma = weights.pop(name).float()  # float16 would round products with small gammas to zero
        layer = name.replace('gamma_1', 'attn.proj').replace('gamma_2', 'mlp.fc2')
        for scaled in (f'{layer}.weight', f'{layer}.bias'):
            if scaled in weights:  # otherwise it is reported as missing
                weights[scaled] = weights[scaled] * gamma.view(-1, *[1] * (weights[scaled].dim() - 1))


def _adapt_channels(weight: Tensor, channels: int) -> Tensor:
    """Patch embedding (dims, c, patch, patch) for images with another number of channels."""
    if channels == 1:  # a gray image then gives the same tokens as its RGB copy
        return weight.sum(dim=1, keepdim=True)
    # the filters are repeated and scaled down in proportion
    repeats = math.ceil(channels / weight.shape[1])
    return weight.repeat(1, repeats, 1, 1)[:, :channels] * (weight.shape[1] / channels)


def _check_coverage(own: Mapping[str, Tensor], report: LoadReport) -> None:
    """Raises CheckpointError if too much of the backbone, or its positions, would keep initial values."""
    needed, missing = len(drop_task_parts([*own])), drop_task_parts(report.missing_keys)
    # A backbone may lack positions on purpose, but trained ones of another kind must not get lost unnoticed.
    lost = [key for key in report.unexpected_keys if key.endswith(names.POSITIONS)]
    loses_positions = lost and any(key.endswith(names.POSITIONS) for key in missing)
    if loses_positions or len(missing) > (1 - MIN_COVERAGE) * needed:
        raise CheckpointError(
            f"has {needed - len(missing)} of the backbone's {needed} tensors: missing ({names.preview(missing)}), "
            f'without a place in it ({names.preview(lost)}). Nothing was loaded; build the backbone like the weights '
            '(rel_pos_bias, layer_scale_init, abs_pos_embed).'
        )
