"""Which visual tokens a tokenizer gives to images: how many, how evenly, and what the most frequent ones stand for.

    python tools/analysis/token_histogram.py configs/beit/pretrain_300e.py data/caltech101/val --out tokens.png
    python tools/analysis/token_histogram.py work_dirs/pretrain/iter_7000.pth images --out tokens.png

The tokenizer is that of a pretraining, by its config or its checkpoint, or one that was trained itself. The picture has
the tokens' frequencies in falling order, and of each of the 32 most frequent ones patches of the images that have it.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING

from beit_mm.apis.options import merge_options
from beit_mm.terminal import UserError, run

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from torch import Tensor

    from beit_mm.models import Tokenizer

TOKENS, PATCHES = 32, 10  # of the picture: tokens, patches of each
SIDE, GAP, GRAY = 32, 4, 0.8  # pixels of an enlarged patch, and between two, which are gray
SIZE = 112  # pixels, the side of the paper's view, where a tokenizer alone says none
BATCH = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', metavar='CONFIG_OR_CHECKPOINT', help='of a pretraining or of a tokenizer')
    parser.add_argument('images', nargs='+', help='files or folders')
    parser.add_argument('--size', type=int, help="side of the tokenizer's view in pixels (default: the source's)")
    parser.add_argument('--max-images', type=int, default=1000, help='spread evenly (default: 1000)')
    parser.add_argument('--cfg-options', nargs='+', default=[], action='extend', metavar='KEY=VALUE')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/tokens.png'), help='default: work_dirs/tokens.png')
    args = parser.parse_args()
    if args.max_images < 1:
        parser.error(f'--max-images {args.max_images} is below 1')
    from beit_mm.terminal import quiet

    with quiet():
        from beit_mm.engine.metrics import entropy

        tokenizer, pipeline = load(args.source, args.size, args.cfg_options)
        views, tokens = encode(tokenizer, pipeline, args.images, args.max_images)
    counts = tokens.flatten().bincount(minlength=tokenizer.vocab_size)
    used, nats = int((counts > 0).sum()), entropy(tokens.flatten().numpy())
    print(f'{type(tokenizer).__name__}, {tokenizer.provenance["path"]}')
    print(f'{len(views):,} images of {views.shape[2]} x {views.shape[3]} pixels, {tokens.numel():,} tokens')
    print(f'used        {used:,} of {len(counts):,} tokens of the vocabulary ({used / len(counts):.1%})')
    print(f'entropy     {nats:.3f} nats, at most {math.log(len(counts)):.3f}')
    print(f'perplexity  {math.exp(nats):,.1f}')
    frequent = ', '.join(f'{t} ({counts[t] / counts.sum():.1%})' for t in counts.argsort(descending=True)[:10].tolist())
    print(f'most frequent: {frequent}')
    args.out.parent.mkdir(parents=True, exist_ok=True)
    draw(views, tokens, counts, tokenizer.stride).savefig(args.out, dpi=100)
    print(args.out)


def load(source: str, size: int | None, options: list[str]) -> tuple[Tokenizer, list[dict]]:
    """The tokenizer of a config or checkpoint, and the transforms that make its view of an image."""
    from mmengine.config import Config
    from mmengine.registry import init_default_scope

    from beit_mm.apis.inference import load_pretrainer
    from beit_mm.apis.plans import TOKENIZERS
    from beit_mm.apis.stored_config import ARGUMENTS, check_part
    from beit_mm.checkpoint.checkpoint import Checkpoint
    from beit_mm.models import Tokenizer
    from beit_mm.registry import MODELS

    reader = dict(type='beit_mm.LoadImage')
    side: int | tuple[int, ...] = SIZE
    if Path(source).suffix == '.py':
        cfg = Config.fromfile(source)
        merge_options(cfg, options)
        init_default_scope(cfg.default_scope)
        tokenizer = MODELS.build(cfg.model.get('target_generator') or cfg.model)
        steps = (cfg.get('val_dataloader') or cfg.train_dataloader).dataset.pipeline
        reader = steps[0]
        for step in steps:
            if 'second_size' in step:  # where the pipeline makes no view for it, the preprocessor may
                scale = cfg.model.data_preprocessor.get('tokenizer_scale') or 1
                side = step.second_size or round(scale * step.size)
    else:
        checkpoint = Checkpoint.open(source)
        stored = (checkpoint.meta.get('config_dict') or {}).get('model') or {}
        if stored.get('type') in TOKENIZERS:  # the run of a tokenizer
            known = {key: value for key, value in stored.items() if key in {'type', *ARGUMENTS[stored['type']].split()}}
            tokenizer = MODELS.build(dict(check_part(known, TOKENIZERS, 'model'), checkpoint=str(checkpoint)))
        else:
            model = load_pretrainer(checkpoint)
            tokenizer = model.target_generator
            side = tuple(number * tokenizer.stride for number in model.backbone.grid)
    if not isinstance(tokenizer, Tokenizer):
        raise UserError(f'{source}: {type(tokenizer).__name__} gives no visual tokens; expected a tokenizer')
    view = dict(type='beit_mm.TwoViewCenterCrop', size=size or side, second_size=size or side)
    return tokenizer.eval(), [reader, view]


def encode(tokenizer: Tokenizer, pipeline: list[dict], images: list[str], limit: int) -> tuple[Tensor, Tensor]:
    """Views, uint8 or float (N, C, H, W) of 0-255, and their visual tokens, int64 (N, h, w)."""
    import torch
    from mmengine.device import get_device

    from beit_mm.apis.inference import masked_samples
    from beit_mm.datasets.image_folder import extensions_of
    from beit_mm.features.extractor import iterate_images
    from beit_mm.registry import TRANSFORMS

    paths = list(iterate_images(images, extensions_of([TRANSFORMS.build(pipeline[0])])))
    paths = [paths[i * len(paths) // limit] for i in range(limit)] if len(paths) > limit else paths
    samples = masked_samples(pipeline, paths)  # those that cannot be read are left out
    views = torch.stack([torch.from_numpy(sample['tokenizer_images']) for sample in samples.values()]).permute(
        0, 3, 1, 2
    )
    tokenizer.to(get_device())
    with torch.no_grad():
        batches = [tokenizer.encode(batch.to(get_device()).float() / 255).cpu() for batch in views.split(BATCH)]
    return views, torch.cat(batches)


def draw(views: Tensor, tokens: Tensor, counts: Tensor, stride: int) -> Figure:
    """The frequencies of all tokens that are used, and patches of the most frequent ones, a row each."""
    import torch.nn.functional as F
    from matplotlib.figure import Figure
    from torchvision.utils import make_grid

    order = counts.argsort(descending=True)[: int((counts > 0).sum())]
    figure = Figure(figsize=(17, 9), layout='constrained')
    curve, *panels = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
    curve.semilogy(range(1, len(order) + 1), (counts[order] / counts.sum()).numpy(), '.-')
    curve.set(title='frequencies of the tokens', xlabel='rank', ylabel='part of all tokens')
    curve.grid(alpha=0.3)
    shown = views[:, [0, 1, 2] if views.shape[1] > 2 else [0, 0, 0]].float() / 255
    for axes, chosen in zip(panels, order[:TOKENS].split(TOKENS // 2), strict=False):
        patches = shown.new_full((len(chosen), PATCHES, 3, stride, stride), GRAY)
        for row, token in enumerate(chosen):
            places = (tokens == token).nonzero()  # image after image
            for column in range(number := min(PATCHES, len(places))):
                image, top, left = places[column * len(places) // number].tolist()
                cut = shown[image, :, top * stride : (top + 1) * stride, left * stride : (left + 1) * stride]
                patches[row, column] = cut
        cells = F.interpolate(patches.flatten(0, 1), (SIDE, SIDE), mode='nearest-exact')
        axes.imshow(make_grid(cells, PATCHES, GAP, pad_value=GRAY).permute(1, 2, 0).numpy())
        labels = [f'{token}: {counts[token] / counts.sum():.1%}' for token in chosen.tolist()]
        axes.set_yticks([GAP + SIDE / 2 + row * (SIDE + GAP) for row in range(len(chosen))], labels)
        axes.set(title='patches of the most frequent tokens', xticks=[])
    for axes in panels[-(-len(order[:TOKENS]) // (TOKENS // 2)) :]:
        axes.remove()
    return figure


if __name__ == '__main__':
    run(main)
