"""Times a whole training step of BEiT, of DINO and of both together, on the same batch.

    python tools/dev/benchmarks/dino_step.py --batch 2 --threads 1                  # CPU
    python tools/dev/benchmarks/dino_step.py --batch 32 64 --rounds 20              # GPU

The models are those of the configs, with a tokenizer of random weights; images and masks are random. The steps
(tokenizer, forward, backward, clip, AdamW, the teacher's update) are interleaved in one process, so that whatever else
the machine does hits all alike. On a CPU the seconds are CPU seconds, of all threads together, which other processes
hardly change. Only the ratios of the medians carry over to other machines; the paper has 4.2 for both together beside
BEiT (table of multi-task pre-training).
"""

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _timing import interleave, prepare, step_parser
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.registry import init_default_scope

from beit_mm.datasets.masking import BlockwiseMask
from beit_mm.engine import BEiTOptimWrapperConstructor
from beit_mm.models import DINOPretrainer
from beit_mm.registry import MODELS

CONFIGS = Path(__file__).resolve().parents[3] / 'configs'
ROWS = {
    'BEiT': 'beit/pretrain_300e.py',
    'DINO': 'beit_dino/pretrain_dino_400e.py',
    'BEiT + DINO': 'beit_dino/pretrain_beit_dino_300e.py',
}
ON_MASKED = 'dino_on_masked'  # the last row again, with this option
GFLOP_PER_IMAGE = 592.5  # of the last row, counted by torch's FlopCounterMode; 151.5 and 440.9 of the others


def make_batch(size: int, num_local: int = 10) -> dict:
    """What the pipeline of the last row collates; the others take their part of it."""
    sides = dict(images=(224, 224), tokenizer_images=(112, 112), second_images=(224, 224))
    inputs = {name: torch.randint(0, 256, (size, *side, 3), dtype=torch.uint8) for name, side in sides.items()}
    inputs['local_images'] = torch.randint(0, 256, (size, num_local, 96, 96, 3), dtype=torch.uint8)
    draw = BlockwiseMask((14, 14), 75).draw
    inputs['mask'] = torch.stack([torch.from_numpy(draw()) for _ in range(size)])
    return dict(inputs=inputs)


def training_step(config: str, precision: str, batch: dict) -> tuple[torch.nn.Module, Callable[[], None]]:
    """A config's model and a step of it, in the precision asked for."""
    cfg = Config.fromfile(CONFIGS / config)
    if cfg.model.target_generator is not None:
        tokenizer = {'bfloat16': 'bf16', 'float16': 'fp16', 'float32': 'fp32'}[precision]
        cfg.model.target_generator.update(random_weights=True, precision=tokenizer)
    model = MODELS.build(cfg.model).to(get_device()).train()
    settings = dict(cfg.optim_wrapper, dtype=precision)
    del settings['constructor']
    wrapper = BEiTOptimWrapperConstructor(settings)(model)

    teaches = isinstance(model, DINOPretrainer)
    if teaches:
        model.teacher_temperature = 0.04

    def step() -> None:
        model.train_step(batch, wrapper)
        if teaches:
            model.update_teacher(0.996)

    return model, step


def contenders(precision: str, batch: dict) -> dict[str, Callable[[], None]]:
    """The rows, and the last one with its option: by the same model, whose weights stand in memory once."""
    steps = {}
    for name, config in ROWS.items():
        model, steps[name] = training_step(config, precision, batch)
    both = steps['BEiT + DINO']

    def with_option(on_masked: bool) -> Callable[[], None]:
        def step() -> None:
            model.dino_on_masked = on_masked
            both()

        return step

    return steps | {'BEiT + DINO': with_option(False), ON_MASKED: with_option(True)}


def main() -> None:
    args = step_parser(__doc__, large=False).parse_args()
    _, record = prepare(args, GFLOP_PER_IMAGE)
    init_default_scope('mmpretrain')
    on_gpu = torch.cuda.is_available()
    unit, rate = ('median s', 'images/s') if on_gpu else ('CPU seconds', 'images/CPU s')
    for size in args.batch:
        steps = contenders(args.precision, make_batch(size))
        times, memory, _ = interleave(steps, args.rounds, clock=time.process_time)
        print(f'\nbatch {size}\n{"":16}{unit:>13}{rate:>14}{"GiB":>8}{"times BEiT":>12}   (rounds)')
        for name, values in times.items():
            ratios = [mine / beit for mine, beit in zip(values, times['BEiT'], strict=True)]
            median = statistics.median(values)
            gigabytes = f'{memory[name]:8.1f}' if memory[name] else f'{"-":>8}'
            print(
                f'{name:16}{median:13.4f}{size / median:14.2f}{gigabytes}'
                f'{median / statistics.median(times["BEiT"]):12.2f}   ({min(ratios):.2f} to {max(ratios):.2f})'
            )
        record.add(f'batch {size}', batch=size, seconds=times, gibibytes=memory)
    record.write(args.json)


if __name__ == '__main__':
    main()
