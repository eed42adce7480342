"""Writes a classifier or segmentor as an ONNX graph for images of one size, and checks it with onnxruntime.

    python tools/export_onnx.py CONFIG CHECKPOINT OUT.onnx [--size HEIGHT WIDTH]

The graph takes normalised images, float32 (N, C, H, W), and gives logits, of a segmentor at each pixel; its metadata
hold mean, std and size.
"""

import argparse
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config', help='path of the config file')
    parser.add_argument('checkpoint', help='path of the checkpoint')
    parser.add_argument('out', help='path of the ONNX file')
    parser.add_argument(
        '--size',
        type=int,
        nargs=2,
        metavar=('HEIGHT', 'WIDTH'),
        help="image size in pixels (default: the img_size of the config's backbone)",
    )
    args = parser.parse_args()
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    from mmengine.runner import load_checkpoint

    from beit_mm.apis.export import export_onnx
    from beit_mm.registry import MODELS

    cfg = Config.fromfile(args.config)
    init_default_scope(cfg.get('default_scope', 'mmpretrain'))
    if 'data_preprocessor' in cfg:
        cfg.model.setdefault('data_preprocessor', cfg.data_preprocessor)
    size = args.size or cfg.model.backbone.get('img_size', 224)
    size = (size, size) if isinstance(size, int) else tuple(size)
    model = MODELS.build(cfg.model)
    try:
        load_checkpoint(model, args.checkpoint, strict=True)
        difference = export_onnx(model, args.out, size)
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        sys.exit(f'error: {error}')
    print(f"{args.out}: {size[0]} x {size[1]} pixels, logits within {difference:.1e} of the model's")


if __name__ == '__main__':
    main()
