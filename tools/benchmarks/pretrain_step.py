"""Times a whole pretraining step (tokenizer, forward, backward, clip, AdamW) beside mmpretrain's BEiT.

    python tools/benchmarks/pretrain_step.py --batch 8 --threads 2              # CPU
    python tools/benchmarks/pretrain_step.py --batch 64 128 256 --rounds 20     # GPU

Both train the same architecture (base, shared relative position bias, LayerScale 0.1) on the same random
images and masks, in the same precision (the tokenizer too), interleaved step by step in one process, so
that whatever else the machine does hits both alike. Only the ratios of the medians carry over to other
machines.
"""

from collections.abc import Callable

import mmpretrain.models  # noqa: F401  (registers BEiT and DALL-E)
import torch
from _timing import interleave, prepare, report, step_parser
from mmengine.device import get_device
from mmpretrain.registry import MODELS as MMPRETRAIN
from mmpretrain.structures import DataSample

from beit_mm.datasets.masking import BlockwiseMask
from beit_mm.engine import AutocastOptimWrapper, BEiTOptimWrapperConstructor  # noqa: F401
from beit_mm.registry import MODELS

# 105.1 for ViT-B forward and backward, 52.1 for the tokenizer, 2.8 for the head on 75 tokens
GFLOP_PER_IMAGE = dict(base=160.1, large=424.9)
WIDTH = dict(base=768, large=1024)
ADAMW = dict(type='AdamW', lr=1.5e-3, betas=(0.9, 0.999), weight_decay=0.05)
IMAGENET = dict(mean=[123.675, 116.28, 103.53], std=[58.395, 57.12, 57.375])


def our_model(arch: str, precision: str) -> torch.nn.Module:
    tokenizer = {'bfloat16': 'bf16', 'float16': 'fp16', 'float32': 'fp32'}[precision]
    return MODELS.build(
        dict(
            type='BEiTPretrainer',
            data_preprocessor=dict(type='beit_mm.TwoViewDataPreprocessor', **IMAGENET),
            backbone=dict(
                type='BEiTBackbone',
                arch=arch,
                masked_input=True,
                abs_pos_embed=False,
                rel_pos_bias='shared',
                layer_scale_init=0.1,
                drop_path_rate=0.1,
            ),
            head=dict(type='BEiTMIMHead', embed_dims=WIDTH[arch]),
            target_generator=dict(type='DALLETokenizer', random_weights=True, precision=tokenizer),
        )
    )


def peer_model(arch: str) -> torch.nn.Module:
    model = MMPRETRAIN.build(
        dict(
            type='BEiT',
            data_preprocessor=dict(
                type='mmpretrain.TwoNormDataPreprocessor',
                to_rgb=True,
                second_mean=[-31.875] * 3,
                second_std=[318.75] * 3,
                **IMAGENET,
            ),
            backbone=dict(
                type='BEiTPretrainViT',
                arch=arch,
                patch_size=16,
                drop_path_rate=0.1,
                final_norm=True,
                out_type='raw',
                layer_scale_init_value=0.1,
            ),
            neck=None,
            head=dict(type='BEiTV1Head', embed_dims=WIDTH[arch], num_embed=8192, loss=dict(type='CrossEntropyLoss')),
            target_generator=dict(type='DALL-E'),
        )
    )
    model.init_weights()
    return model


def make_batch(size: int) -> tuple[dict, dict]:
    """The same images and masks as our pipeline collates them and as mmpretrain's does."""
    first = torch.randint(0, 256, (size, 224, 224, 3), dtype=torch.uint8)
    second = torch.randint(0, 256, (size, 112, 112, 3), dtype=torch.uint8)
    generate = BlockwiseMask((14, 14), 75).draw
    masks = torch.stack([torch.from_numpy(generate()) for _ in range(size)])
    samples = []
    for mask in masks:
        sample = DataSample()
        sample.set_field(mask, 'mask')
        samples.append(sample)
    ours = dict(inputs=dict(images=first, tokenizer_images=second, mask=masks))
    planar = [view.permute(0, 3, 1, 2).contiguous() for view in (first, second)]
    return ours, dict(inputs=planar, data_samples=samples)


def training_step(model: torch.nn.Module, wrapper: AutocastOptimWrapper, batch: dict) -> Callable[[], None]:
    model.train()
    return lambda: model.train_step(batch, wrapper)


def contenders(arch: str, precision: str, size: int) -> dict[str, Callable[[], None]]:
    ours_batch, peer_batch = make_batch(size)
    device = get_device()
    ours, peer = our_model(arch, precision).to(device), peer_model(arch).to(device)
    common = dict(type='beit_mm.AutocastOptimWrapper', dtype=precision, clip_grad=dict(max_norm=3.0))
    build = BEiTOptimWrapperConstructor(dict(common, optimizer=dict(ADAMW, fused=True)))
    peer.target_generator.requires_grad_(False)  # mmpretrain leaves it to AdamW to skip
    peer_wrapper = AutocastOptimWrapper(
        precision,
        optimizer=torch.optim.AdamW([p for p in peer.parameters() if p.requires_grad], lr=1.5e-3),
        clip_grad=dict(max_norm=3.0),
    )
    return dict(
        beit_mm=training_step(ours, build(ours), ours_batch), mmpretrain=training_step(peer, peer_wrapper, peer_batch)
    )


def tokenizer_contenders(precision: str, size: int) -> dict[str, Callable[[], None]]:
    """Tokens at the masked places: ours, and mmpretrain's logits everywhere with an argmax."""
    device = get_device()
    ours = our_model('base', precision).to(device)
    peer = MMPRETRAIN.build(dict(type='DALL-E')).to(device).eval()
    ours_batch, _ = make_batch(size)
    inputs = ours.data_preprocessor(ours_batch)['inputs']
    mapped = 0.8 * inputs['tokenizer_images'] + 0.1

    def run_peer() -> None:
        with (
            torch.no_grad(),
            torch.autocast(torch.device(device).type, getattr(torch, precision), enabled=precision != 'float32'),
        ):
            peer(mapped).argmax(dim=1)

    return dict(
        beit_mm=lambda: ours.target_generator.encode_at(inputs['tokenizer_images'], inputs['positions']),
        mmpretrain=run_peer,
    )


def main() -> None:
    args = step_parser(__doc__).parse_args()
    gflop = GFLOP_PER_IMAGE[args.arch]
    limit = prepare(args, gflop)
    for size in args.batch:
        times, memory, _ = interleave(tokenizer_contenders(args.precision, size), args.rounds)
        report(f'tokenizer, batch {size}', times, memory, size, None, None)
        times, memory, _ = interleave(contenders(args.arch, args.precision, size), args.rounds)
        report(f'whole step, batch {size}', times, memory, size, gflop, limit)


if __name__ == '__main__':
    main()
