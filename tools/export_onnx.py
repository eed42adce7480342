"""Writes a classifier or segmentor as an ONNX graph for images of one size, and checks it with onnxruntime.

    python tools/export_onnx.py CHECKPOINT OUT.onnx --size 384 384
    python tools/export_onnx.py CONFIG CHECKPOINT OUT.onnx        of a model that the checkpoint does not describe

The graph takes normalised images, float32 (N, C, H, W), and gives logits, of a segmentor at each pixel; its metadata
hold mean, std and size.
"""

import argparse

from beit_mm.terminal import quiet, run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', nargs='?', help='path of the config file (default: what the checkpoint says)')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('out', help='path of the ONNX file')
    side = "image size in pixels (default: the backbone's)"
    parser.add_argument('--size', type=int, nargs=2, metavar=('HEIGHT', 'WIDTH'), help=side)
    args = parser.parse_args()
    with quiet():
        from mmengine.config import Config

        from beit_mm.apis.export import export_onnx
        from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
        from beit_mm.checkpoint.checkpoint import Checkpoint

        checkpoint, config = Checkpoint.open(args.checkpoint), args.config and Config.fromfile(args.config)
        segments = config.get('default_scope') == 'mmseg' if config else checkpoint.task == 'segmentation'
        model = (SegmentationInferencer if segments else ClassificationInferencer)(checkpoint, 'cpu', config).model
        size = args.size or [side * model.backbone.patch_size for side in model.backbone.grid]
        difference = export_onnx(model, args.out, tuple(size))
    print(f"{args.out}: {size[0]} x {size[1]} pixels, logits within {difference:.1e} of the model's")


if __name__ == '__main__':
    run(main)
