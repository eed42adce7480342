"""Makes a file of the packaged weights, beit_mm/weights/PART.safetensors, of a run's checkpoint.

    python tools/dev/package_weights.py tokenizer work_dirs/caltech101_dvae/iter_3000.pth

It holds half-precision weights, and of the run what belongs to them. beit_mm/weights/README.md has all commands.
"""

import argparse
from pathlib import Path

PARTS = ('tokenizer', 'pretrained', 'classifier', 'segmentor')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('part', choices=PARTS)
    parser.add_argument('checkpoint')
    args = parser.parse_args()
    path = package(args.part, args.checkpoint)
    print(f'{path}: {path.stat().st_size / 1e6:.2f} MB')


def package(part: str, source: str) -> Path:
    """Writes PART.safetensors of a checkpoint."""
    from beit_mm.checkpoint.checkpoint import Checkpoint
    from beit_mm.checkpoint.convert import KEPT
    from beit_mm.checkpoint.find import PACKAGED
    from beit_mm.checkpoint.read import write_checkpoint

    checkpoint = Checkpoint.open(source)
    weights = {
        name: tensor.half() if tensor.is_floating_point() else tensor
        for name, tensor in checkpoint.weights.items()
        if not name.startswith('auxiliary_head.')
    }
    meta = {} if part == 'tokenizer' else {key: value for key, value in checkpoint.meta.items() if key in KEPT}
    for key in ('work_dir', 'load_from'):  # paths say nothing elsewhere
        meta.get('config_dict', {}).pop(key, None)
    backbone = meta.get('config_dict', {}).get('model', {}).get('backbone', {})
    backbone.pop('frozen_stages', None)  # says how it was trained, not what it is
    if tokenizer := meta.get('tokenizer'):
        meta['tokenizer'] = {key: value for key, value in tokenizer.items() if not key.endswith('path')}
    path = PACKAGED / f'{part}.safetensors'
    write_checkpoint(path, dict(state_dict=weights, meta=meta))
    return path


if __name__ == '__main__':
    main()
