"""Draws how often the masks of a config mask each patch, beside the histogram of the number of masked patches.

python tools/visualization/mask_heat_map.py configs/beit/pretrain_800e.py --out masks.png
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _cli import argument_parser, load_config, run  # noqa: E402


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument('--number', type=int, default=10_000, help='of masks (default: 10000)')
    parser.add_argument('--seed', type=int, default=0, help='of the masks (default: 0)')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/masks.png'), help='default: work_dirs/masks.png')
    args = parser.parse_args()
    if args.number < 1:
        parser.error(f'--number {args.number} is below 1')
    from beit_mm.terminal import quiet

    with quiet():
        from mmengine.registry import init_default_scope

        from beit_mm.pictures.training import draw_mask_statistics, draw_masks

        cfg = load_config(args)
        init_default_scope(cfg.default_scope)
        frequency, counts = draw_masks(cfg, args.number, args.seed)
        print(f'{counts.mean():.2f} of {frequency.size} patches on average, {counts.min()} to {counts.max()}')
        print(f'a patch: in {frequency.min():.1%} to {frequency.max():.1%} of the masks')
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw_mask_statistics(frequency, counts).savefig(args.out, dpi=100)
        print(args.out)


if __name__ == '__main__':
    run(main)
