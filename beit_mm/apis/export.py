"""ONNX export of a classifier or segmentor, for images of any height and width."""

import copy
import json
import math
from collections.abc import Callable, Mapping
from functools import partial
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
from beit_mm.apis.page import cached_runtime, write_page
from beit_mm.apis.rebuild import ConfigInput
from beit_mm.checkpoint.checkpoint import Checkpoint, CheckpointInput, PerChannel
from beit_mm.checkpoint.find import GENERIC_NAME
from beit_mm.datasets.reading import LoadBands
from beit_mm.engine.checks import swaps_colours
from beit_mm.errors import UserError
from beit_mm.files import quoted
from beit_mm.models.provenance import preprocessing_of_model
from beit_mm.models.vit import Attention, BEiTBackbone, SharedRelativePositionBias
from beit_mm.positions import NUM_CLS_ROWS, Grid, compute_rotary_table, offset_spline, resize_position_embedding
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
    runtime: str | Path | None = None,
) -> Path:
    """Writes a classifier or segmentor as one ONNX file, or as one page (.html) that runs it in a browser.

    Args:
        checkpoint: a classifier or segmentor, see `classify`.
        out: ONNX file (.onnx), which tools/onnx_predict.py runs without torch; or a page (.html).
        config: path of a config, in place of the one in the checkpoint; it may name any type.
        mean, std: see `classify`.
        float16: weights and arithmetic in half precision.
        runtime: for a page, folder with the unpacked npm package onnxruntime-web (default: npm gets it once).

    Returns:
        The path. The metadata, see `export_onnx`, also hold `classes` and `steps`, what the test pipeline does to an
        image after reading it; for a segmentor also `palette`, `crop_size`, `stride` and `ratios` of all scales;
        for a model of bands also `bands`, the settings of LoadBands; `multi_label` if probabilities are the sigmoid of
        logits, not their softmax, because an image may have several labels.
    """
    path = Path(out).expanduser()
    ending = path.suffix.lower()
    if ending not in ('.onnx', '.html') or str(out).endswith('/') or path.is_dir():
        raise UserError(f'export to {quoted(str(out))}: expected a file that ends in .onnx, or in .html for a page')
    with quiet():
        opened = Checkpoint.open(checkpoint, mean=mean, std=std)
        of_task = SegmentationInferencer if opened.task == 'segmentation' else ClassificationInferencer
        inferencer = of_task(opened, 'cpu', config)
        notes = describe_use(inferencer)
        gives_rgb = inferencer.reader.loads_rgb  # OpenMMLab's readers give BGR
        if gives_rgb == swaps_colours(inferencer.model):
            see_rgb(inferencer.model)
        package = None
        if ending == '.html':  # first, because it may fail
            package = Path(runtime).expanduser() if runtime else cached_runtime()
        elif runtime:
            raise UserError(f'--runtime is for a page, whose name ends in .html, not for {path.name}; leave it out')
        with TemporaryDirectory() as folder:
            graph = Path(folder, 'model.onnx') if package else path
            difference = export_onnx(inferencer.model, graph, float16, notes)
            if package:
                where = opened.path.absolute()
                name = where.parent.name if GENERIC_NAME.match(where.name) else where.stem
                write_page(graph, path, package, name)
        use = f'images of any height and width, logits differ by at most {difference:.1e} of the largest'
        say(f'{path}: {"open it by double click; it needs no network" if package else use}')
    return path


def describe_use(inferencer: ClassificationInferencer | SegmentationInferencer) -> dict[str, Any]:
    """What a program needs to prepare images and to name the results, for the metadata."""
    steps = [step for step in inferencer.reader.prepare.transforms if not type(step).__name__.startswith('Pack')]
    notes: dict[str, Any] = dict(classes=inferencer.classes, steps=[*map(describe_step, steps)])
    if isinstance(inferencer, SegmentationInferencer):
        notes |= {key: list(inferencer.model.test_cfg.get(key, ())) for key in ('crop_size', 'stride')}
        notes |= dict(palette=inferencer.palette, ratios=inferencer.ratios)
    elif inferencer.has_several_labels:
        notes['multi_label'] = True
    loader = inferencer.reader.loader
    if isinstance(loader, LoadBands):
        low, high = (np.asarray(value).tolist() for value in (loader.low, loader.high))
        notes['bands'] = dict(bands=loader.bands, low=low, high=high, nodata=loader.nodata)
    return notes


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
    if name == 'CenterCropDown' or (name == 'CenterCrop' and not transform.auto_pad):
        return dict(type=name, crop_size=transform.crop_size)
    if name == 'ResizeToScale':
        scale = dict(short_side=transform.short_side, factor=transform.factor, within=transform.within)
        return dict(type=name, **scale, interpolation='bilinear', backend='cv2')
    is_resize = (name == 'Resize' and transform.scale) or (name == 'ResizeEdge' and transform.edge == 'short')
    if not is_resize or (transform.backend != 'pillow' and transform.interpolation != 'bilinear'):
        raise UserError(
            f'the test pipeline has {transform}, which an ONNX file cannot describe; expected Resize, ResizeEdge of '
            'the short edge, CenterCrop, by Pillow or bilinear'
        )
    step = dict(type=name, scale=transform.scale, interpolation=transform.interpolation, backend=transform.backend)
    return step if name == 'ResizeEdge' else dict(step, keep_ratio=transform.keep_ratio)


class WholeImage(nn.Module):
    """A SlidingSegmentor for the graph: maps images (B, C, H, W), each as one window, to logits (B, classes, H, W)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        features, size = self.model.extract_feat(images), images.shape[2:]
        if self.model.gives_probabilities:  # at this size
            return self.model.decode_head(features, size)
        logits = self.model.decode_head(features)  # B, classes, h, w
        return F.interpolate(logits, size, mode='bilinear', align_corners=self.model.align_corners)


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
    check_packages()
    path = Path(path)
    segments = hasattr(model, 'decode_head')
    if segments and not hasattr(model, 'divisor'):
        found = type(model).__name__
        raise UserError(f'ONNX export takes beit_mm.SlidingSegmentor, not {found}; set model.type to it in the config')
    if segments and model.decode_head.out_channels == 1 and not model.gives_probabilities:
        raise UserError('ONNX export takes a segmentor with a logit for each class, not one with a threshold')
    size, divisor, most = input_sides(model, segments)
    metadata = dict(preprocessing_of_model(model), size=size, divisor=divisor, most=most, **(notes or {}))
    metadata['probabilities'] = segments and model.gives_probabilities
    exported = copy.deepcopy(WholeImage(model) if segments else model).cpu().float().eval()
    generator = torch.Generator().manual_seed(0)
    batches = [  # of the size that the model was built for, and of another
        torch.randn(number, model.backbone.patch_embed.proj.in_channels, *sides, generator=generator)
        for number, sides in ((2, size), (3, (2 * divisor, 3 * divisor)))
    ]
    with torch.no_grad():
        outputs = [exported(images) for images in batches]
        logits = [output if isinstance(output, Tensor) else output[0] for output in outputs]  # a probe's: a tuple
        take_any_size(exported, most // model.backbone.patch_size)
        program = traced(exported, batches[1], divisor, most)
    program.model.metadata_props['beit_mm'] = json.dumps(metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=path.parent) as folder:
        file = Path(folder, path.name)
        program.save(file)
        if float16:
            convert_to_float16(file)
        difference = check_graph(file, batches, logits, TOLERANCES[float16])
        for written in Path(folder).iterdir():
            written.replace(path.parent / written.name)
    return difference


def check_packages() -> None:
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f'ONNX export needs {", ".join(missing)}: pip install {" ".join(PACKAGES)}')
    if torch.__version__.startswith('2.6.'):
        raise UserError(f'ONNX export needs torch 2.7 or newer, not {torch.__version__}')


def input_sides(model: Any, segments: bool) -> tuple[list[int], int, int]:
    """Height and width that a model was built for, the divisor of all sides, and the largest side, in pixels."""
    patch, grid = model.backbone.patch_size, model.backbone.grid
    divisor = model.divisor if segments else patch
    largest = [MIN_MOST * patch, *(2 * side * patch for side in grid)]
    if segments:
        largest += model.test_cfg['crop_size']  # windows may exceed what it was built for
    size = [divisor * math.ceil(side * patch / divisor) for side in grid]
    return size, divisor, divisor * math.ceil(max(largest) / divisor)


def traced(model: nn.Module, images: Tensor, divisor: int, most: int) -> torch.onnx.ONNXProgram:
    """The graph of a model for images of any number and, in multiples of `divisor` up to `most`, any size."""
    rows, columns = (divisor * torch.export.Dim(name, max=most // divisor) for name in ('rows', 'columns'))
    shapes = ({0: torch.export.Dim('batch'), 2: rows, 3: columns},)
    settings: dict[str, Any] = dict(input_names=['images'], output_names=['logits'], verbose=False, optimize=True)
    program = torch.onnx.export(model, (images,), dynamic_shapes=shapes, dynamo=True, **settings)
    for value in program.model.graph.initializers.values():  # onnxruntime's quantize_dynamic transposes some
        value.shape = value.type = None
        value.metadata_props.clear()
    return program


def convert_to_float16(file: Path) -> None:
    """Rewrites a graph with weights and arithmetic in half precision, and without a second file for them."""
    import onnx
    from onnxruntime.transformers.float16 import convert_float_to_float16

    half = convert_float_to_float16(onnx.load(file), keep_io_types=True)
    nodes = {tuple(node.output): node for node in half.graph.node}  # it casts a value once for each use
    del half.graph.node[:]
    half.graph.node.extend(nodes.values())
    onnx.save(half, file)
    file.with_name(f'{file.name}.data').unlink(missing_ok=True)  # of the weights in float32


def check_graph(path: Path, batches: list[Tensor], logits: list[Tensor], tolerance: float) -> float:
    """The largest difference between the graph's logits and the model's, as a share of the largest logit."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    difference = 0.0
    for images, expected in zip(batches, logits, strict=True):
        found = torch.from_numpy(session.run(['logits'], {'images': images.numpy()})[0])
        scale = expected.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
        difference = max(difference, ((found - expected).abs().max() / scale).nan_to_num(torch.inf).item())
    if difference > tolerance:
        raise UserError(
            f'The exported graph differs from the model by {difference:.1e} of the largest logit, more than '
            f'{tolerance:.0e}; nothing was written. Is one of its layers random in evaluation?'
        )
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
                module.forward = super(type(module), module).forward  # mmseg's UPerHead's
            elif isinstance(module, BEiTBackbone):
                store_resampling(module, most)


def store_resampling(backbone: BEiTBackbone, most: int) -> None:
    """Lets a backbone resample its position parameters with stored matrices."""
    bias = StoredBias(backbone.grid, most, partial(offset_spline, device=torch.device('cpu')))
    for module in backbone.modules():
        if isinstance(module, Attention | SharedRelativePositionBias) and module.table_grid is not None:
            module.resample = bias
        if isinstance(module, Attention):
            module.rotation = compute_rotary_table  # from the shape, not a constant
    if backbone.pos_embed is not None:
        backbone.resample = StoredPositions(backbone.grid, most, partial(interpolation, mode=backbone.interpolate_mode))


def interpolation(source: int, target: int, mode: str) -> Tensor:
    """The matrix (target, source) that resize_position_embedding applies along an axis."""
    tokens = torch.cat([torch.zeros(1, source), torch.eye(source)])[None]  # 1, 1 + source, source
    return resize_position_embedding(tokens, (source, 1), (target, 1), mode)[0, 1:]


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


class StoredMatrices(nn.Module):
    """Holds the matrices that resample the axes of a patch grid to each number of patches up to `most`."""

    def __init__(self, grid: Grid, most: int, matrix_of: Callable[[int, int], Tensor]):
        super().__init__()
        for axis, side in zip(('of_rows', 'of_columns'), grid, strict=True):
            matrices = [matrix_of(side, target).float() for target in range(1, most + 1)]
            # most, rows of the largest matrix, columns
            self.register_buffer(axis, pad_sequence(matrices, batch_first=True))

    def resampled(self, table: Tensor, grid: Grid, height: int, width: int) -> Tensor:
        """The table (C, h', w') at another patch grid; the result (C, height, width) has that size or its offsets'."""
        rows, columns = self.of_rows[grid[0] - 1][:height], self.of_columns[grid[1] - 1][:width]
        return rows @ table @ columns.t()


class StoredPositions(StoredMatrices):
    """Does what resize_position_embedding does, but 'bicubic_offset' keeps an axis that has the model's own length."""

    def forward(self, pos_embed: Tensor, source: Grid, target: Grid, mode: str) -> Tensor:
        patch_rows = pos_embed[0, 1:].unflatten(0, source).permute(2, 0, 1)  # C, h', w'
        patch_rows = self.resampled(patch_rows, target, *target).flatten(1).t()  # h*w, C
        return torch.cat([pos_embed[:, :1], patch_rows[None]], dim=1)


class StoredBias(StoredMatrices):
    """Does what bias_from_table does, without the padding."""

    def forward(self, table: Tensor, table_grid: Grid, grid: Grid, dtype: torch.dtype, num_prefix: int) -> Tensor:
        height, width = grid
        table = table.t()  # heads, rows of the table
        patches = table[:, :-NUM_CLS_ROWS].unflatten(1, [2 * side - 1 for side in table_grid])
        patches = self.resampled(patches, grid, 2 * height - 1, 2 * width - 1)
        table = torch.cat([table[:, -NUM_CLS_ROWS:], patches.flatten(1)], dim=1)  # the class token's rows first
        row = torch.arange(height)[:, None].expand(height, width).reshape(-1)
        column = torch.arange(width)[None].expand(height, width).reshape(-1)
        index = (row[:, None] - row + height - 1) * (2 * width - 1) + column[:, None] - column + width - 1  # h*w, h*w
        index = F.pad(index + NUM_CLS_ROWS, (num_prefix, 0), value=1)  # a patch looks at cls
        index = F.pad(index, (0, 0, num_prefix, 0), value=0)  # cls looks at a patch
        index[:num_prefix, :num_prefix] = 2  # cls looks at itself
        return table[:, index][None]
