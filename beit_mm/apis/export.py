"""ONNX export of a classifier or segmentor, for images of any height and width."""

import copy
import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.apis.rebuild import ConfigInput
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, PerChannel
from beit_mm.datasets.reading import LoadBands
from beit_mm.engine.checks import swaps_colours
from beit_mm.errors import UserError
from beit_mm.models.provenance import preprocessing_of_model
from beit_mm.models.vit import Attention, BEiTBackbone, SharedRelativePositionBias
from beit_mm.positions import NUM_CLS_ROWS, Grid, offset_spline, resize_position_embedding
from beit_mm.terminal import quiet, say

PACKAGES = ('onnx', 'onnxruntime', 'onnxscript')
TOLERANCES = {False: 1e-4, True: 5e-2}  # share of the largest logit, without and with float16
MIN_MOST = 64  # every graph accepts this many patches along a side


def export(
    checkpoint: CheckpointInput,
    out: str | Path,
    config: ConfigInput = None,
    float16: bool = False,
    mean: PerChannel = None,
    std: PerChannel = None,
) -> Path:
    """Writes a classifier or segmentor as one ONNX file, which tools/onnx_predict.py runs without torch.

    Args:
        checkpoint: of a classifier or segmentor: see `classify`.
        out: ONNX file.
        config: path of its config, in place of the one in the checkpoint; it may name any type.
        mean, std: see `classify`.
        float16: weights and arithmetic in half precision.

    Returns:
        The path. The metadata, see `export_onnx`, also hold `classes` and `steps`, what the test pipeline does to an
        image after reading it; for a segmentor also `palette`, `crop_size`, `stride` and `short_sides` of all scales;
        for a model of bands also `bands`, the settings of LoadBands.
    """
    with quiet():
        opened = Checkpoint.open(checkpoint, mean=mean, std=std)
        segments = opened.task == 'segmentation'
        inferencer = (SegmentationInferencer if segments else ClassificationInferencer)(opened, 'cpu', config)
        transforms = inferencer.reader.prepare.transforms
        steps = [describe_step(step) for step in transforms if not type(step).__name__.startswith('Pack')]
        notes: dict[str, Any] = dict(classes=inferencer.classes, steps=steps)
        if segments:
            notes |= {key: list(inferencer.model.test_cfg.get(key, ())) for key in ('crop_size', 'stride')}
            notes |= dict(palette=inferencer.palette, short_sides=inferencer.short_sides)
        loader = inferencer.reader.loader
        if isinstance(loader, LoadBands):
            low, high = (np.asarray(value).tolist() for value in (loader.low, loader.high))
            notes['bands'] = dict(bands=loader.bands, low=low, high=high)
        gives_rgb = inferencer.reader.loads_rgb  # OpenMMLab's readers give BGR
        if gives_rgb == swaps_colours(inferencer.model):
            see_rgb(inferencer.model)
        path = Path(out).expanduser()
        difference = export_onnx(inferencer.model, path, float16, notes)
        say(f'{path}: images of any height and width, logits differ by at most {difference:.1e} of the largest')
    return path


@torch.no_grad()
def see_rgb(model: nn.Module) -> None:
    """Changes in place a model that sees BGR, so that its results for RGB are the same."""
    weight = model.backbone.patch_embed.proj.weight  # C, 3, p, p
    weight.copy_(weight.flip(1))
    for channels in model.data_preprocessor.buffers():  # mean and std, each 3, 1, 1
        channels.copy_(channels.flip(0))


def describe_step(transform: Any) -> dict[str, Any]:
    """Describes for the metadata what a transform of a test pipeline does to an image."""
    name = type(transform).__name__
    if name == 'CenterCrop' and not transform.auto_pad:
        return dict(type=name, crop_size=transform.crop_size)
    usual = name == 'Resize' and transform.keep_ratio and transform.scale
    usual = usual or (name == 'ResizeEdge' and transform.edge == 'short')
    if not usual or (transform.backend != 'pillow' and transform.interpolation != 'bilinear'):
        expected = 'Resize with keep_ratio, ResizeEdge of the short edge, CenterCrop, by Pillow or bilinear'
        raise UserError(f'the test pipeline has {transform}, which an ONNX file cannot describe; expected {expected}')
    return dict(type=name, scale=transform.scale, interpolation=transform.interpolation, backend=transform.backend)


class WholeImage(nn.Module):
    """A SlidingSegmentor for the graph: maps images (B, C, H, W), each as one window, to logits (B, classes, H, W)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits = self.model.decode_head(self.model.extract_feat(images))  # B, classes, h, w
        return F.interpolate(logits, images.shape[2:], mode='bilinear', align_corners=self.model.align_corners)


def export_onnx(
    model: nn.Module, path: str | Path, float16: bool = False, notes: Mapping[str, Any] | None = None
) -> float:
    """Writes a classifier or segmentor as an ONNX graph and checks it against the model.

    The graph takes normalised `images`, float32 (N, C, H, W), and gives `logits`, float32 (N, classes), or (N, classes,
    H, W) for a segmentor, which sees each image as one window. They are probabilities if `probabilities` in the
    metadata is true. H and W are multiples of `divisor`, at most `most`. The metadata `beit_mm` are JSON of `mean` and
    `std` (of pixel values 0 to 255), `size` (height, width) that the model was built for, `divisor`, `most`,
    `probabilities` and `notes`. A large graph has its weights in a second file, PATH.data.

    Args:
        model: such as mmpretrain's ImageClassifier, or a SlidingSegmentor, on a BEiTBackbone; left as it is.
        path: where the file goes; written only when the check passes.
        float16: weights and arithmetic in half precision; images and logits stay float32.
        notes: more entries of the metadata.

    Returns:
        The largest difference between onnxruntime's and the model's logits, as a fraction of the largest logit.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f'ONNX export needs {", ".join(missing)}: pip install {" ".join(PACKAGES)}')
    if torch.__version__.startswith('2.6.'):
        raise UserError(f'ONNX export needs torch 2.7 or newer, not {torch.__version__}')
    path = Path(path)
    backbone, segments = model.backbone, hasattr(model, 'decode_head')
    if segments and model.decode_head.out_channels == 1 and not model.gives_probabilities:
        raise UserError('ONNX export takes a segmentor with a logit for each class, not one with a threshold')
    patch = backbone.patch_size
    divisor = model.divisor if segments else patch
    largest = [MIN_MOST * patch, *(2 * side * patch for side in backbone.grid)]
    largest += model.test_cfg['crop_size'] if segments else []  # windows may exceed what it was built for
    most = -(-max(largest) // divisor) * divisor
    grid = [-(-side * patch // divisor) * divisor for side in backbone.grid]
    metadata = dict(preprocessing_of_model(model), size=grid, divisor=divisor, most=most, **(notes or {}))
    metadata['probabilities'] = segments and model.gives_probabilities
    original = copy.deepcopy(WholeImage(model) if segments else model).cpu().float().eval()
    exported = copy.deepcopy(original)
    take_any_size(exported, most // patch)
    generator = torch.Generator().manual_seed(0)
    batches = [  # of the size that the model was built for, and of another
        torch.randn(number, backbone.patch_embed.proj.in_channels, *sides, generator=generator)
        for number, sides in ((2, grid), (3, (2 * divisor, 3 * divisor)))
    ]
    with torch.no_grad():
        outputs = [original(images) for images in batches]
        logits = [output if isinstance(output, Tensor) else output[0] for output in outputs]  # a probe's: a tuple
        rows, columns = (divisor * torch.export.Dim(name, max=most // divisor) for name in ('rows', 'columns'))
        shapes = ({0: torch.export.Dim('batch'), 2: rows, 3: columns},)
        options: dict[str, Any] = dict(input_names=['images'], output_names=['logits'], verbose=False, optimize=True)
        program = torch.onnx.export(exported, (batches[1],), dynamic_shapes=shapes, dynamo=True, **options)
    program.model.metadata_props['beit_mm'] = json.dumps(metadata)
    for value in program.model.graph.initializers.values():  # onnxruntime's quantize_dynamic transposes some
        value.shape = value.type = None
        value.metadata_props.clear()
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, path.name)
        program.save(file)
        if float16:
            import onnx
            from onnxruntime.transformers.float16 import convert_float_to_float16

            half = convert_float_to_float16(onnx.load(file), keep_io_types=True)
            nodes = {tuple(node.output): node for node in half.graph.node}  # it casts a value once for each use
            del half.graph.node[:]
            half.graph.node.extend(nodes.values())
            onnx.save(half, file)
            file.with_name(f'{file.name}.data').unlink(missing_ok=True)  # of the weights in float32
        difference = _difference(file, batches, logits, TOLERANCES[float16])
        for written in Path(folder).iterdir():
            written.replace(path.parent / written.name)
    return difference


def _difference(path: Path, batches: list[Tensor], logits: list[Tensor], tolerance: float) -> float:
    """Largest difference between the graph's logits and the model's, as a share of the largest logit."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    difference = 0.0
    for images, expected in zip(batches, logits, strict=True):
        found = torch.from_numpy(session.run(['logits'], {'images': images.numpy()})[0])
        scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        difference = max(difference, ((found - expected).abs().max() / scale).nan_to_num(torch.inf).item())
    if difference > tolerance:
        more = f'by {difference:.1e} of the largest logit, more than {tolerance:.0e}; nothing was written'
        raise UserError(f'The exported graph differs from the model {more}. Is one of its layers random in evaluation?')
    return difference


def take_any_size(model: nn.Module, most: int) -> None:
    """Changes a model in place, so that torch.export keeps height and width open, up to `most` patches a side.

    Resampling is linear along each axis, so the graph holds one matrix for each number of patches. mmseg may not be
    installed, so its classes are recognised by their names.
    """
    for parent in [*model.modules()]:
        for name, module in [*parent.named_children()]:
            if isinstance(module, nn.AdaptiveAvgPool2d):  # of UperNet's pyramid
                setattr(parent, name, AveragePool(module.output_size))
            elif type(module).__name__ == 'Upsample' and hasattr(module, 'scale_factor'):  # mmseg's: integer sizes
                options = dict(scale_factor=module.scale_factor, mode=module.mode, align_corners=module.align_corners)
                setattr(parent, name, nn.Upsample(**options))
            elif type(module).__name__ == 'EfficientUPerHead':
                module.__class__ = type(module).__bases__[-1]  # mmseg's UPerHead
            elif isinstance(module, BEiTBackbone):
                module.__class__ = ResamplingBackbone
                module.prepare(most)


class AveragePool(nn.Module):
    """torch's AdaptiveAvgPool2d to a size x size grid as two matrix products."""

    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def forward(self, x: Tensor) -> Tensor:
        rows, columns = (self.means(side, x) for side in x.shape[2:])
        return rows @ x @ columns.t()

    def means(self, side: int, x: Tensor) -> Tensor:
        """Matrix (size, side): cell i is the mean of floor(i * side / size) to ceil((i + 1) * side / size)."""
        cell, place = torch.arange(self.size)[:, None], torch.arange(side)[None]
        inside = ((place + 1) * self.size > cell * side) & (place * self.size < (cell + 1) * side)
        return inside.to(x.dtype) / inside.sum(dim=1, keepdim=True)


class ResamplingBackbone(BEiTBackbone):
    """A BEiTBackbone that resamples its position parameters with stored matrices."""

    def prepare(self, most: int) -> None:
        cpu = torch.device('cpu')
        splines = [Resampling(side, most, lambda one, other: offset_spline(one, other, cpu)) for side in self.grid]
        for module in self.modules():
            if isinstance(module, Attention | SharedRelativePositionBias) and module.table_grid is not None:
                module.splines = nn.ModuleList(splines)
                module.__class__ = ResamplingAttention if isinstance(module, Attention) else ResamplingBias
        if self.pos_embed is not None:
            self.resamplings = nn.ModuleList(Resampling(side, most, self.interpolation) for side in self.grid)

    def interpolation(self, source: int, target: int) -> Tensor:
        """The matrix (target, source) that resize_position_embedding applies along an axis."""
        tokens = torch.cat([torch.zeros(1, source), torch.eye(source)])[None]  # 1, 1 + source, source
        return resize_position_embedding(tokens, (source, 1), (target, 1), self.interpolate_mode)[0, 1:]

    def resized_positions(self, pos_embed: Tensor, grid: Grid) -> Tensor:
        table = pos_embed[0, 1:].unflatten(0, self.grid).permute(2, 0, 1)  # C, h', w'
        of_patches = resample(table, self.resamplings, grid).flatten(1).t()  # h*w, C
        return torch.cat([pos_embed[:, :1], of_patches[None]], dim=1)


class ResamplingAttention(Attention):
    def _bias(self, grid: Grid, num_tokens: int, *rest: Any) -> Tensor:
        return resampled_bias(self, grid, num_tokens - grid[0] * grid[1])


class ResamplingBias(SharedRelativePositionBias):
    def forward(self, grid: Grid, dtype: torch.dtype, num_prefix: int = 1) -> Tensor:
        return resampled_bias(self, grid, num_prefix)


class Resampling(nn.Module):
    """Holds, for each number of cells up to `most`, the matrix that resamples an axis of `source` cells to it."""

    def __init__(self, source: int, most: int, matrix_of: Any):
        super().__init__()
        matrices = [matrix_of(source, target).float() for target in range(1, most + 1)]
        self.register_buffer('matrices', pad_sequence(matrices, batch_first=True))  # most, rows of the largest, columns

    def forward(self, target: int, length: int) -> Tensor:
        return self.matrices[target - 1][:length]


def resample(table: Tensor, resamplings: nn.ModuleList, grid: Grid, offsets: bool = False) -> Tensor:
    """Resamples a table (C, h', w') to another patch grid (C, h, w), or to its patch offsets (C, 2h-1, 2w-1)."""
    axes = zip(resamplings, grid, strict=True)
    rows, columns = (resampling(side, 2 * side - 1 if offsets else side) for resampling, side in axes)
    return rows @ table @ columns.t()


def resampled_bias(module: Any, grid: Grid, num_prefix: int) -> Tensor:
    """Does what bias_from_table does: the bias (1, heads, N, N) from a module's table."""
    height, width = grid
    table = module.relative_position_bias_table.t()  # heads, rows of the table
    sides = [2 * side - 1 for side in module.table_grid]
    patches = resample(table[:, :-NUM_CLS_ROWS].unflatten(1, sides), module.splines, grid, offsets=True)
    table = torch.cat([table[:, -NUM_CLS_ROWS:], patches.flatten(1)], dim=1)  # the class token's rows first
    row = torch.arange(height)[:, None].expand(height, width).reshape(-1)
    column = torch.arange(width)[None].expand(height, width).reshape(-1)
    index = (row[:, None] - row + height - 1) * (2 * width - 1) + column[:, None] - column + width - 1  # h*w, h*w
    index = F.pad(index + NUM_CLS_ROWS, (num_prefix, 0), value=1)  # a patch looks at cls
    index = F.pad(index, (0, 0, num_prefix, 0), value=0)  # cls looks at a patch
    index[:num_prefix, :num_prefix] = 2  # cls looks at itself
    return table[:, index][None]
