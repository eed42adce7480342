"""ONNX export of a classifier or segmentor at one image size."""

import copy
import json
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from beit_mm.models.interop import preprocessing_of_model
from beit_mm.models.vit import Attention, BEiTBackbone, SharedRelativePositionBias, patch_grid
from beit_mm.positions import resize_bias_table, resize_position_embedding
from beit_mm.terminal import UserError

PACKAGES = ('onnx', 'onnxruntime', 'onnxscript')
TOLERANCE = 1e-4  # of the largest logit, float32 on both sides
MAX_FILE_BYTES = 2 * 1000**3  # protobuf ends at 2 GiB, and the graph itself needs a few MB


class WholeImage(nn.Module):
    """A SlidingSegmentor as the graph has it: images (B, C, H, W) in one window, to logits (B, classes, H, W)."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        logits = self.model.decode_head(self.model.extract_feat(images))  # B, classes, h, w
        return F.interpolate(logits, images.shape[2:], mode='bilinear', align_corners=self.model.align_corners)


def export_onnx(model: nn.Module, path: str | Path, size: tuple[int, int]) -> float:
    """Writes a classifier or segmentor as an ONNX graph of float32 and checks it against the model.

    The graph takes `images`, float32 (N, C, H, W), normalised, and gives `logits`, float32 (N, classes), of a segmentor
    (N, classes, H, W), before the softmax, for any N. A segmentor sees the image as one window. The metadata hold JSON
    lists `mean` and `std` (of pixel values 0 to 255, where the data preprocessor knows them) and `size` (height,
    width), and describe `input` and `output` in words. A graph above 2 GB has its weights in a second file, PATH.data.

    Args:
        model: such as mmpretrain's ImageClassifier, or a SlidingSegmentor, on a BEiTBackbone; left as it is.
        path: where the file goes; written only when the check passes.
        size: height and width of the images in pixels.

    Returns:
        The largest difference between onnxruntime's and the model's logits, as a fraction of the largest logit.
    """
    if missing := [name for name in PACKAGES if find_spec(name) is None]:
        raise UserError(f'ONNX export needs {", ".join(missing)}: pip install {" ".join(PACKAGES)}')
    backbone = dict(model.named_children()).get('backbone')
    if not isinstance(backbone, BEiTBackbone):
        raise UserError(
            'ONNX export takes a classifier or segmentor whose backbone is a BEiTBackbone, not '
            f'{type(model).__name__} on {type(backbone).__name__}'
        )
    divisor = _cells_of_segmentor(model)
    if divisor and any(side % divisor for side in size):
        raise UserError(f'size is {size[0]} x {size[1]}; this segmentor takes sides that are multiples of {divisor}')
    if divisor and torch.__version__.startswith('2.6.'):
        raise UserError(f'ONNX export of a segmentor needs torch 2.7 or newer: {torch.__version__} has no batch norm')
    preprocessing = dict(preprocessing_of_model(model), size=list(size))
    model = copy.deepcopy(model).cpu().float().eval()
    _resample_positions(model.backbone, size)
    if divisor:
        model = WholeImage(model).eval()
    channels = backbone.patch_embed.proj.in_channels
    images = torch.randn(3, channels, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = model(images)
        if not isinstance(logits, Tensor) or logits.dim() != (4 if divisor else 2):
            raise UserError(
                'ONNX export takes a model that gives logits (batch, classes): it needs '
                "a classification head, and a backbone with out_type 'avg_featmap' or 'cls_token'"
            )
        program = torch.onnx.export(
            model,
            (images,),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim('batch', max=2**31 - 1)},),  # torch 2.6 needs an upper bound
            input_names=['images'],
            output_names=['logits'],
            verbose=False,
            optimize=True,  # the default since torch 2.7
        )
    program.model.metadata_props.update(
        {name: json.dumps(value) for name, value in preprocessing.items()},
        input='images: float32 (batch, channels, height, width) of `size`, (pixel 0..255 - mean) / std, RGB',
        output=f'logits: float32 (batch, classes{", height, width" if divisor else ""}), before the softmax',
    )

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    num_bytes = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    with TemporaryDirectory(dir=path.parent) as folder:
        program.save(Path(folder, path.name), external_data=num_bytes > MAX_FILE_BYTES)
        difference = _difference(Path(folder, path.name), images, logits)
        for file in Path(folder).iterdir():
            file.replace(path.parent / file.name)
    return difference


def _cells_of_segmentor(model: nn.Module) -> int | None:
    """What the sides of a SlidingSegmentor's windows are multiples of, in pixels; None for any other model."""
    if find_spec('mmseg') is None:
        return None
    from beit_mm.segmentation.segmentor import SlidingSegmentor

    return model.divisor if isinstance(model, SlidingSegmentor) else None


def _resample_positions(backbone: BEiTBackbone, size: tuple[int, int]) -> None:
    """Builds the position parameters anew for images of `size`, so that the graph has nothing to resample."""
    trained, grid = backbone.grid, patch_grid(size, backbone.patch_size)
    backbone.grid = grid
    if backbone.pos_embed is not None:
        resized = resize_position_embedding(backbone.pos_embed.data, trained, grid, backbone.interpolate_mode)
        backbone.pos_embed = nn.Parameter(resized)
    for module in backbone.modules():
        if isinstance(module, Attention | SharedRelativePositionBias) and module.table_grid is not None:
            resized = resize_bias_table(module.relative_position_bias_table.data, trained, grid)
            module.relative_position_bias_table, module.table_grid = nn.Parameter(resized), grid


def _difference(path: Path, images: Tensor, logits: Tensor) -> float:
    """Largest difference of the graph's logits from the model's, as a share of the largest logit."""
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=['CPUExecutionProvider'])
    # batches of one and more than one
    parts = [torch.from_numpy(session.run(['logits'], {'images': part.numpy()})[0]) for part in images.split([1, 2])]
    scale = logits.abs().max().clamp(min=torch.finfo(torch.float32).tiny)
    difference = ((torch.cat(parts) - logits).abs().max() / scale).item()
    if not difference <= TOLERANCE:  # not a number is no agreement either
        raise UserError(
            f'The exported graph differs from the model by {difference:.1e} of the largest logit, '
            f'more than {TOLERANCE:.0e}; nothing was written. Is a layer of it random in evaluation?'
        )
    return difference
