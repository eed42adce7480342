"""Makes a file to give away of a run's checkpoint: weights and what belongs to them, with a hash in the name.

python tools/publish_model.py work_dirs/pretrain_300e/epoch_300.pth beit_base_300e.safetensors
"""

import argparse
import sys

from beit_mm.checkpoint.convert import publish_checkpoint
from beit_mm.checkpoint.read import CheckpointError


def main() -> None:
    parser = argparse.ArgumentParser(description='Strip a checkpoint and put its hash into its name.')
    parser.add_argument('source', help='any BEiT checkpoint')
    parser.add_argument('target', help='the file to write, .safetensors or .pth; the hash goes before the suffix')
    args = parser.parse_args()
    try:
        print(publish_checkpoint(args.source, args.target))
    except (CheckpointError, OSError) as error:
        sys.exit(f'error: {error}')


if __name__ == '__main__':
    main()
