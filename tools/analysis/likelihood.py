"""The evidence lower bound of the paper's section 2.4, on the held-out images of a pretraining's config.

    python tools/analysis/likelihood.py configs/demo/pretrain.py work_dirs/pretrain/iter_3000.pth

For each image x with its most likely visual tokens z, and the same image with a part of its patches masked, it prints
the means of

    ln p(x | z)             the tokenizer's decoder
    ln p(z | masked image)  the pretrained BEiT
    their sum               equation 3

in nats an image and in bits per value of a pixel. docs/tokenizers.md says what they mean.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))


def main() -> None:
    from _cli import argument_parser, load_config, load_strictly

    parser = argument_parser(__doc__)
    parser.add_argument('checkpoint', help='path of the checkpoint of the pretraining')
    parser.add_argument('--out', metavar='FILE', help='also write the numbers to this JSON file')
    args = parser.parse_args()
    if args.launcher != 'none':
        parser.error('it runs in one process')
    from beit_mm.terminal import quiet

    with quiet():
        import torch
        from mmengine.registry import RUNNERS

        from beit_mm.engine.checks import unwrap

        cfg = load_config(args)
        if not cfg.model.get('target_generator'):
            raise ValueError(f'{args.config} has no visual tokens; expected the config of a pretraining on them')
        cfg.default_hooks.pop('ema', None)  # the checkpoint's weights are the averaged ones already
        runner = RUNNERS.build(cfg)
        load_strictly(runner, args.checkpoint)
        model = unwrap(runner).eval()
        batches = []
        for batch in runner.test_dataloader:
            inputs = model.data_preprocessor(batch)['inputs']
            batches.append({name: values.cpu() for name, values in model.log_likelihoods(inputs).items()})
        nats = {name: torch.cat([batch[name] for batch in batches]).double() for name in batches[0]}  # (images,) each
        shape = inputs['tokenizer_images'].shape[1:]
        num_tokens = math.prod(model.target_generator.grid_size(*shape[1:]))
        uniform = -num_tokens * math.log(model.target_generator.vocab_size)
        report = table(
            {name: values.mean().item() for name, values in nats.items()}, uniform, num_values=math.prod(shape)
        )
        print(f'{len(nats["image"])} images of {" x ".join(map(str, shape))} values, {num_tokens} tokens each')
        print(f'{"":50}{"nats an image":>15}{"bits per value":>16}')
        for name, row in report.items():
            print(f'{name:50}{row["nats"]:15,.1f}{row["bits"]:16.4f}')
        if args.out:
            Path(args.out).write_text(json.dumps(report, indent=2) + '\n', encoding='utf-8')


def table(means: dict[str, float], uniform: float, num_values: int) -> dict[str, dict[str, float]]:
    """Name -> nats an image, and bits per value of a pixel with the sign of a code length."""
    image = means['image']
    rows = {
        'ln p(x | z)': image,
        'ln p(z | masked image), masked patches': means['masked_tokens'],
        'sum, equation 3': image + means['masked_tokens'],
        'ln p(z | masked image), all patches': means['all_tokens'],
        'sum, all patches': image + means['all_tokens'],
        'ln p(z), uniform': uniform,
        'sum, uniform': image + uniform,
    }
    return {name: dict(nats=nats, bits=-nats / num_values / math.log(2)) for name, nats in rows.items()}


if __name__ == '__main__':
    from _cli import run

    run(main)
