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
from beit_mm.checkpoint.find import DEMO, HUB_SCHEME, names_of_file, path_of_checkpoint, plain_vits, released
from beit_mm.checkpoint.read import as_checkpoint_error, read_checkpoint
from beit_mm.errors import CheckpointError, UserError, warn
from beit_mm.positions import Grid, resize_bias_table, resize_patch_embedding, resize_position_embedding

ORIGIN = 'beit_mm'  # key in a state dict's metadata, which torch hands to load hooks as `local_metadata`
TRANSLATED = ('unilm', 'timm', 'hf')  # formats whose names lack the prefix `backbone.`
MIN_COVERAGE = 0.95  # share of the backbone's tensors, without TASK_PARTS, that a file must have
PATCHES = 'patch_embed.proj.weight'
TASK_PARTS = ('mask_token', 'norm.', 'fc_norm.')  # present for some tasks only
StateDict: TypeAlias = Mapping[str, Tensor]
PerChannel: TypeAlias = Sequence[float] | float | None  # for each channel or for all, pixels 0-255; None: not given


class Checkpoint:
    """A checkpoint file, read once and passed around, with all its weights in memory.

    Attributes:
        path: where the file is.
        content: what it holds, tensors on the CPU, without the text `meta['config']`, which mmengine would execute.
        weights: the state dict under the file's own names, without what trainers add (`module.`, `_orig_mod.`).
        converted, state_dict: the weights under our models' names, computed once, and in a form for any model to load.
        format: one of `formats.FORMATS`, or None if it is not a BEiT.
        meta, preprocessing, architecture: see `description.describe_source`.
        mean_std: the `mean` and `std` that the user gave, if any.
    """

    def __init__(self, content: dict[str, Any], path: Path) -> None:
        self.mean_std: dict[str, list[float]] = {}
        self.made: dict[str, names.Converted] = {}  # shared with copies that have another mean_std
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
        if self.format == 'timm':
            self.architecture['interpolate_mode'] = names.position_mode(self.weights, content, path.stem)

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

    @property
    def converted(self) -> names.Converted:
        if 'converted' not in self.made:
            with as_checkpoint_error(self.path):
                patches = [part for name, part in self.weights.items() if names.PATCH_EMBEDDING.match(name)]
                grid = names.trained_grid(self.meta, patches[0].shape[-1]) if patches else None
                self.made['converted'] = names.convert_state_dict(self.weights, self.format, grid=grid)
        return self.made['converted']

    @property
    def is_vit(self) -> bool:
        """Whether it is a BEiT or plain ViT by all its tensors, not only by the ones that show a format."""
        try:
            return self.format is not None and bool(self.converted)
        except CheckpointError:
            return False

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
        listed = next((plain_vits()[name] for name in names_of_file(self.path) if name in plain_vits()), None)
        if 'mean' not in found and listed:
            found = description.NORMALISATIONS[listed['normalisation']]
        elif 'mean' not in found and name in released().keys() - {DEMO}:  # OpenMMLab's files do not record it
            found = Config.fromfile(released()[name].config).model.data_preprocessor
        return normalisation_of(str(self), found, weights, weights[f'backbone.{PATCHES}'].shape[1], **self.mean_std)

    @cached_property
    def state_dict(self) -> dict[str, Any]:
        """The weights for any model's `load_state_dict`, with ORIGIN in their metadata.

        mmengine finds a backbone by its prefix, so unilm, timm and hf files are renamed; OpenMMLab's stay as they are.
        """
        given: Mapping[str, Any] = self.content.get('state_dict', self.content)
        if self.format in TRANSLATED and self.is_vit:
            given, dropped, _ = self.converted
            if dropped:
                warn(f'{self.path} ({self.format}) holds tensors that none of our models has: {dropped}')
        elif self.format is not None and self.format not in TRANSLATED:
            given = self.weights
        origin = dict(
            path=str(self.path),
            format=self.format,
            names=names.preview(self.weights),
            preprocessing=self.preprocessing,
            architecture=self.architecture,
            is_converted=self.is_vit and self.converted.state_dict.keys() == given.keys(),
        )
        if self.format in ('timm', 'hf') and not self.preprocessing.get('size'):
            origin['raw'] = self.weights  # only a model's grid tells the rows of patches from others
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
        if not all(map(math.isfinite, values)) or 0 < max(values) <= 1 or (name == 'std' and min(values) <= 0):
            raise UserError(f'{name} is {values}; expected values for pixels 0-255, such as 127.5, not 0.5')
    return given


@CheckpointLoader.register_scheme(prefixes=('', 'http://', 'https://', HUB_SCHEME), force=True)
def load_from_file(filename: str, map_location: object = None) -> dict[str, Any]:
    """Reads a path or URL for mmengine: dict(state_dict=..., meta=..., ...), or a bare state dict, on the CPU.

    mmengine 0.10.7's own reader fails with torch >= 2.6; that of later versions executes code in files.
    """
    checkpoint = Checkpoint.open(filename)
    is_translated = checkpoint.format in TRANSLATED
    if is_translated and 'mmengine_version' in checkpoint.meta:
        return checkpoint.content  # of a run of another library's model, for example mmpretrain's TIMMBackbone
    if is_translated and checkpoint.is_vit:  # without the optimizer and the like, which belong to the old names
        return dict(state_dict=checkpoint.state_dict, meta=checkpoint.meta)
    if not checkpoint.is_vit and 'state_dict' not in checkpoint.content:  # a bare state dict of another model
        return checkpoint.state_dict
    return dict(checkpoint.content, state_dict=checkpoint.state_dict)  # all that resuming needs


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
    state_dict: StateDict, wanted: StateDict, grid: Grid, num_heads: int, mode: str, origin: Mapping | None = None
) -> tuple[names.Weights, LoadReport]:
    """Fits a state dict to a backbone's names and shapes; returns the tensors and a report.

    Args:
        state_dict: state dict of a model or a backbone, in any format.
        wanted, grid, num_heads, mode: the backbone's state dict, patch grid, heads and `interpolate_mode`.
        origin: what `Checkpoint.state_dict` records about the file; None for a bare state dict.

    Raises CheckpointError, whose message lacks the path.
    """
    origin = origin or dict(path='the state dict', format=None, preprocessing={}, architecture={})
    if origin['format'] is None and state_dict.keys() == wanted.keys():  # a backbone's own, for example of an average
        origin = dict(origin, format='beit_mm', is_converted=True)
    weights, dropped, format = _of_backbone(state_dict, origin, grid)
    report = LoadReport(f'{origin["path"]} ({format})', origin['preprocessing'])
    check_finite(weights, report.source)
    if names.SHARED_TABLE in weights and f'blocks.0.attn.{names.TABLE}' in wanted:
        names.expand_shared_table(weights)
        report.expanded = [name for name in weights if name.endswith(names.TABLE)]
    report.folded = _fold_layer_scale(weights, wanted)
    file_grid = names.trained_grid(origin, weights[PATCHES].shape[-1])
    fitted = {name: weights[name] for name in wanted if name in weights}
    report.adapted = _adapt_patches(fitted, wanted)
    report.resized = _resize_positions(fitted, file_grid, grid, mode, origin)
    changed = {*report.resized, *report.expanded, *report.adapted}
    report.matched = [name for name in fitted if name not in changed]
    report.missing_keys = [name for name in wanted if name not in fitted]
    report.unexpected_keys = dropped + [name for name in weights if name not in wanted]
    _check_sizes(weights | fitted, wanted, names.heads_of(weights, origin) or num_heads, num_heads)
    _check_coverage(wanted, report)
    return fitted, report


def _of_backbone(state_dict: StateDict, origin: Mapping, grid: Grid) -> tuple[names.Weights, list[str], str]:
    """The backbone's tensors under our names, what has no place there, and the format; names without `backbone.`."""
    prefix, dropped, format = 'backbone.', [], origin['format']
    if not origin.get('is_converted'):
        state_dict, dropped, source = names.convert_state_dict(state_dict, grid=grid)
        format = format or source
    # a model hands its backbone the names without the prefix; what is not a part belongs to heads
    weights = {name.removeprefix(prefix): tensor for name, tensor in state_dict.items()}
    weights = {name: tensor for name, tensor in weights.items() if names.is_part(name)}
    rows = weights['pos_embed'].shape[1] if 'pos_embed' in weights else 0
    if 'raw' in origin and rows not in (0, 1 + math.prod(grid)):
        again = names.convert_state_dict(origin['raw'], format, grid=grid).state_dict
        weights |= {name: again[prefix + name] for name in ('pos_embed', 'register_tokens') if prefix + name in again}
        side = math.isqrt(rows - 1)
        if weights['pos_embed'].shape[1] != rows == 1 + side**2:
            _warn_of_two_grids(origin, grid, (side, side))
    return weights, [name.removeprefix(prefix) for name in dropped if name.startswith(prefix)], format


def _check_sizes(weights: names.Weights, wanted: StateDict, file_heads: Any, num_heads: int) -> None:
    """Raises CheckpointError if weights that are fitted to a backbone belong to one of other sizes."""
    blocks, wanted_blocks = (sum(name.endswith('attn.qkv.weight') for name in part) for part in (weights, wanted))
    sizes: list[tuple[str, Any, Any]] = [('heads', file_heads, num_heads), ('blocks', blocks, wanted_blocks)]
    if 'rotary_base' in weights and 'rotary_base' in wanted:
        theirs, ours = float(weights['rotary_base']), float(wanted['rotary_base'])
        if not math.isclose(theirs, ours, rel_tol=1e-3):  # half precision and averages round it
            sizes.append(('rotary_base', theirs, ours))
    if 'register_tokens' in weights and 'register_tokens' not in wanted:
        sizes.append(('num_registers', weights['register_tokens'].shape[1], 0))
    shapes = [(name, tuple(weights[name].shape), tuple(wanted[name].shape)) for name in wanted if name in weights]
    sizes += [row for row in shapes if row[1] != row[2]][:1]  # one is enough
    if differences := [f'{what} {theirs}, the model has {ours}' for what, theirs, ours in sizes if theirs != ours]:
        raise CheckpointError(
            f'does not fit the backbone: {names.preview(differences)}. Nothing was loaded; build the backbone like '
            'the weights (arch, patch_size), or take other weights.'
        )


def check_finite(weights: StateDict, source: str) -> None:
    """Raises CheckpointError for NaN or infinity, which a diverged run leaves behind."""
    real = {name: tensor for name, tensor in weights.items() if not tensor.is_meta}
    if broken := [name for name, tensor in real.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f'{source}: {len(broken)} of {len(weights)} tensors hold NaN or infinity: {names.preview(broken)}. '
            'Nothing was loaded; the run that wrote them had diverged: use one of its earlier checkpoints.'
        )


def _fold_layer_scale(weights: names.Weights, wanted: StateDict) -> list[str]:
    """Multiplies LayerScale into the layers before it if the model has none, in place; returns the names."""
    if 'blocks.0.gamma_1' in wanted:
        return []
    scales = [name for name in weights if name.endswith(('.gamma_1', '.gamma_2'))]
    for name in scales:
        gamma = weights.pop(name).float()  # float16 would round products with small gammas to zero
        layer = name.replace('gamma_1', 'attn.proj').replace('gamma_2', 'mlp.fc2')
        for scaled in (f'{layer}.weight', f'{layer}.bias'):
            if scaled in weights:  # otherwise it is reported as missing
                weights[scaled] = weights[scaled] * gamma.view(-1, *[1] * (weights[scaled].dim() - 1))
    return scales


def _adapt_patches(fitted: names.Weights, wanted: StateDict) -> list[str]:
    """Fits the patch embedding (dims, c, patch, patch) to other patches or channels, in place; returns its name."""
    weight, (_, channels, _, side) = fitted[PATCHES], wanted[PATCHES].shape
    if weight.shape == wanted[PATCHES].shape:
        return []
    if weight.shape[-1] != side:
        weight = resize_patch_embedding(weight, side)
    if channels == 1:  # a gray image then gives the same tokens as its RGB copy
        fitted[PATCHES] = weight.sum(dim=1, keepdim=True)
    else:  # the filters are repeated and scaled down in proportion
        repeats = math.ceil(channels / weight.shape[1])
        fitted[PATCHES] = weight.repeat(1, repeats, 1, 1)[:, :channels] * (weight.shape[1] / channels)
    return [PATCHES]


def _resize_positions(
    fitted: names.Weights, file_grid: Grid | None, grid: Grid, mode: str, origin: Mapping
) -> dict[str, str]:
    """Resamples bias tables and position embeddings to the model's grid, in place; returns name -> both grids."""
    resized = {}
    for name in [name for name in fitted if name.endswith(names.POSITIONS)]:
        fitting = names.grids_of(name, fitted[name], file_grid, grid)
        if file_grid not in fitting:  # other libraries' files without a size are of squares, unless none fits
            fitting = fitting if origin['format'] in (None, 'beit_mm') else fitting[::-1]
            _warn_of_two_grids(origin, fitting[0], fitting[-1])
        before = fitting[0]
        if before == grid:
            continue
        if name.endswith(names.TABLE):
            fitted[name] = resize_bias_table(fitted[name], before, grid)
        else:
            fitted[name] = resize_position_embedding(fitted[name], before, grid, mode)
        resized[name] = f'{before[0]} x {before[1]} -> {grid[0]} x {grid[1]}'
    return resized


def _warn_of_two_grids(origin: Mapping, taken: Grid, other: Grid) -> None:
    if taken != other:
        grids = f'{taken[0]} x {taken[1]} patches, not {other[0]} x {other[1]}'
        known = f'{origin["path"]} does not say the size of its images'
        warn(f'{known}: taken for {grids}; if wrong, add meta=dict(preprocessing=dict(size=[height, width]))')


def _check_coverage(wanted: StateDict, report: LoadReport) -> None:
    """Raises CheckpointError if too much of the backbone, or its positions, would keep initial values."""
    needed, missing = len(drop_task_parts([*wanted])), drop_task_parts(report.missing_keys)
    # A backbone may lack positions on purpose, but trained ones of another kind must not get lost unnoticed.
    positions = (*names.POSITIONS, 'rotary_base')
    lost = [key for key in report.unexpected_keys if key.endswith(positions)]
    loses_positions = lost and any(key.endswith(positions) for key in missing)
    if loses_positions or len(missing) > (1 - MIN_COVERAGE) * needed:
        raise CheckpointError(
            f"has {needed - len(missing)} of the backbone's {needed} tensors: missing ({names.preview(missing)}), "
            f'without a place in it ({names.preview(lost)}). Nothing was loaded; build the backbone like the weights '
            '(rel_pos_bias, rotary_base, layer_scale_init, abs_pos_embed).'
        )
