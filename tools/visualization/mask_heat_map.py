"""Draws how often the masks of a config mask each patch, beside the histogram of the number of masked patches.

python tools/visualization/mask_heat_map.py configs/beit/pretrain_800e.py --out masks.png
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.apis.options import argument_parser, load_config
from beit_mm.terminal import UserError, run

if TYPE_CHECKING:
    import numpy as np
    from matplotlib.figure import Figure
    from mmengine.config import Config


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

        cfg = load_config(args)
        init_default_scope(cfg.default_scope)
        frequency, counts = draw_masks(cfg, args.number, args.seed)
        print(f'{counts.mean():.2f} of {frequency.size} patches on average, {counts.min()} to {counts.max()}')
        print(f'a patch: in {frequency.min():.1%} to {frequency.max():.1%} of the masks')
        args.out.parent.mkdir(parents=True, exist_ok=True)
        draw_mask_statistics(frequency, counts).savefig(args.out, dpi=100)
        print(args.out)


def draw_masks(cfg: Config, number: int = 10_000, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """How often a config masks each patch, and how many patches it masks.

    Args:
        cfg: of a pretraining; its `default_scope` is set.
        number: of masks.
        seed: of the masks.

    Returns:
        float (rows, columns), the part of the masks that have the patch; int (number,), masked patches of each.

    Raises:
        ValueError: the pipeline has no BlockwiseMask or RandomMask.
    """
    import numpy as np

    from beit_mm.datasets.masking import BlockwiseMask, RandomMask
    from beit_mm.datasets.samplers import SampleKey, seed_generators
    from beit_mm.registry import TRANSFORMS

    pipeline = (cfg.get('train_dataloader') or {}).get('dataset', {}).get('pipeline', [])
    steps = [step for step in pipeline if str(step.get('type')).endswith('Mask')]
    masker = TRANSFORMS.build(steps[0]) if steps else None
    if not isinstance(masker, (BlockwiseMask, RandomMask)):
        raise UserError('the training pipeline has no beit_mm.BlockwiseMask or RandomMask; expected a pretraining')
    seed_generators(SampleKey(seed, 0, 0))
    masks = np.stack([masker.transform({})['mask'] for _ in range(number)])
    return masks.mean(axis=0), masks.sum(axis=(1, 2))


def draw_mask_statistics(frequency: np.ndarray, counts: np.ndarray) -> Figure:
    """A heat map of how often patches are masked (rows, columns), beside the histogram of their number (masks,)."""
    import numpy as np
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout='constrained')
    heat, histogram = figure.subplots(1, 2)
    drawn = heat.imshow(frequency, cmap='viridis')
    figure.colorbar(drawn, ax=heat)
    if frequency.size <= 400:
        for (row, column), value in np.ndenumerate(frequency):
            light = drawn.norm(value) > 0.6
            text = f'{100 * value:.0f}'
            heat.text(column, row, text, ha='center', va='center', color='black' if light else 'white', size=7)
    heat.set(title=f'masked in part of {len(counts):,} masks (numbers: %)', xticks=[], yticks=[])
    numbers, times = np.unique(counts, return_counts=True)
    histogram.bar(numbers, times / len(counts), width=0.9)
    title = f'mean {counts.mean():.2f} of {frequency.size} patches ({counts.mean() / frequency.size:.1%})'
    histogram.set(title=title, xlabel='masked patches of an image', ylabel='part of the masks')
    return figure


if __name__ == '__main__':
    run(main)
