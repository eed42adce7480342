"""Draws training samples of a config as the model gets them.

    python tools/visualization/browse_dataset.py configs/demo/caltech101_pretrain.py --out samples.png

A row for each sample. Of a pretraining: the first view, the same with its masked patches gray, the tokenizer's view,
its visual tokens (decoded where the tokenizer can, else a colour for each word), DINO's crops. Of a fine-tuning the
images, and label maps as colours. Crops, jitter and masks are those of the first epoch of a run with that seed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _cli import argument_parser, load_config, run  # noqa: E402


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument('--number', type=int, default=8, help='of samples (default: 8)')
    parser.add_argument('--seed', type=int, default=0, help='of the run (default: 0)')
    parser.add_argument('--epoch', type=int, default=0, help='from 0 (default: 0)')
    parser.add_argument('--no-tokens', action='store_true', help="do without the tokenizer's weights")
    parser.add_argument('--channels', type=int, nargs=3, default=(0, 1, 2), help='of images with many bands')
    parser.add_argument(
        '--out', type=Path, default=Path('work_dirs/samples.png'), help='default: work_dirs/samples.png'
    )
    args = parser.parse_args()
    if args.number < 1:
        parser.error(f'--number {args.number} is below 1')
    from beit_mm.terminal import quiet

    with quiet():
        from mmengine.registry import init_default_scope

        from beit_mm.pictures.training import draw_training_samples

        cfg = load_config(args)
        init_default_scope(cfg.default_scope)
        picture = draw_training_samples(cfg, args.number, args.seed, args.epoch, not args.no_tokens, args.channels)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        picture.save(args.out)
        print(args.out)


if __name__ == '__main__':
    run(main)
