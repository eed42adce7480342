"""Draws the schedules of a config: learning rates, weight decay, and momentum and temperature of DINO's teacher.

    python tools/visualization/schedule.py configs/beit/finetune_in1k_100e.py --images 1281167 --out schedule.png

The config's own schedulers are stepped as often as in the run; nothing is trained. The steps of an epoch are those of
the recipe's batch (auto_scale_lr.base_batch_size); without --images the training images are listed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from _cli import argument_parser, load_config, run  # noqa: E402


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument('--images', type=int, help='number of training images, where they are not at hand')
    parser.add_argument(
        '--out', type=Path, default=Path('work_dirs/schedule.png'), help='default: work_dirs/schedule.png'
    )
    args = parser.parse_args()
    from beit_mm.terminal import quiet

    with quiet():
        from mmengine.registry import init_default_scope

        from beit_mm.visualization.training import draw_schedules, run_schedules

        cfg = load_config(args)
        init_default_scope(cfg.default_scope)
        found = run_schedules(cfg, args.images)
        print(f'{found.total:,} steps')
        print(f'{"":24}{"first":>12}{"highest":>12}{"last":>12}')
        rows = {f'lr, {name}': curve for name, curve in found.lr.items()} | {'weight decay': found.weight_decay}
        if len(found.momentum):
            rows |= {"teacher's momentum": found.momentum, "teacher's temperature": found.temperature}
        for name, curve in rows.items():
            print(f'{name:24}{curve[0]:12.3g}{curve.max():12.3g}{curve[-1]:12.3g}')
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw_schedules(found).savefig(args.out, dpi=100)
        print(args.out)


if __name__ == '__main__':
    run(main)
