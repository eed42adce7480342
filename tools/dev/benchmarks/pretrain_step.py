"""Times a whole pretraining step (tokenizer, forward, backward, clip, AdamW), and its parts, beside its peers.

    python tools/dev/benchmarks/pretrain_step.py --batch 8 --threads 2                        # CPU
    python tools/dev/benchmarks/pretrain_step.py --batch 64 128 256 --rounds 20 --compile     # GPU; --arch large

Three train the same architecture (shared relative position bias, LayerScale 0.1, drop path 0.1) on the same random
images and masks, in the same precision (the tokenizer too), interleaved step by step in one process, so that whatever
else the machine does hits all alike: ours, mmpretrain's BEiT, and timm's backbone with our tokenizer and head, which it
has not. That ours and mmpretrain's losses agree is checked first. The optimizers are everybody's own: a fused AdamW in
ours and timm's, torch's default in mmpretrain's. Only the ratios of the medians carry over to other machines.
"""

import sys
from collections.abc import Callable

import mmpretrain.models  # noqa: F401  (registers BEiT and DALL-E)
import torch
from _timing import (
    OURS,
    compiled,
    interleave,
    prepare,
    profile_step,
    report,
    report_parts,
    step_parser,
    stops_at_full_memory,
    time_parts,
)
from mmengine.device import get_device
from mmpretrain.registry import MODELS as MMPRETRAIN
from mmpretrain.structures import DataSample
from timm.models.beit import Beit
from torch import Tensor

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.datasets.masking import BlockwiseMask, masked_positions
from beit_mm.engine import AutocastOptimWrapper, BEiTOptimWrapperConstructor  # noqa: F401
from beit_mm.models.tokenizers import DALLETokenizer
from beit_mm.models.vit import ARCHITECTURES
from beit_mm.positions import take_tokens
from beit_mm.registry import MODELS

# 105.1 for ViT-B forward and backward, 52.1 for the tokenizer, 2.8 for the head on 75 tokens
GFLOP_PER_IMAGE = dict(base=160.1, large=424.9)
ADAMW = dict(type='AdamW', lr=1.5e-3, betas=(0.9, 0.999), weight_decay=0.05)
# Between the losses: the networks compute in float32 there, our tokenizer in the step's precision.
TOLERANCE = dict(float32=1e-3, float16=0.01, bfloat16=0.1)
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
            head=dict(type='BEiTMIMHead', embed_dims=ARCHITECTURES[arch]['embed_dims']),
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
            head=dict(
                type='BEiTV1Head',
                embed_dims=ARCHITECTURES[arch]['embed_dims'],
                num_embed=8192,
                loss=dict(type='CrossEntropyLoss'),
            ),
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
    drawn = [generate() for _ in range(size)]
    masks = torch.stack([torch.from_numpy(mask) for mask in drawn])
    positions = torch.stack([torch.from_numpy(masked_positions(mask, 75)) for mask in drawn])
    samples = []
    for mask in masks:
        sample = DataSample()
        sample.set_field(mask, 'mask')
        samples.append(sample)
    ours = dict(images=first, tokenizer_images=second, mask=masks, positions=positions)
    if torch.cuda.is_available():
        ours = {name: tensor.pin_memory() for name, tensor in ours.items()}  # as the loader does
    planar = [view.permute(0, 3, 1, 2).flip(1).contiguous() for view in (first, second)]  # BGR, as OpenCV reads
    if torch.cuda.is_available():
        planar = [view.pin_memory() for view in planar]
    return dict(inputs=ours), dict(inputs=planar, data_samples=samples)


class TimmPretrainer(torch.nn.Module):
    """timm's backbone, which has no mask token, with our tokenizer and head; all patches go through all blocks."""

    def __init__(self, arch: str, tokenizer: DALLETokenizer):
        super().__init__()
        sizes = ARCHITECTURES[arch]
        self.backbone = Beit(
            embed_dim=sizes['embed_dims'],
            depth=sizes['num_layers'],
            num_heads=sizes['num_heads'],
            num_classes=0,
            use_abs_pos_emb=False,
            use_shared_rel_pos_bias=True,
            init_values=0.1,
            drop_path_rate=0.1,
        )
        self.head = torch.nn.Linear(sizes['embed_dims'], 8192)
        self.tokenizer = [tokenizer]  # in a list: not to be trained

    def loss(self, inputs: dict) -> Tensor:
        positions = inputs['positions']
        targets = self.tokenizer[0].encode_at(inputs['tokenizer_images'], positions)
        hidden = self.backbone.forward_features(inputs['images'])
        logits = self.head(take_tokens(hidden, positions + 1)).flatten(0, 1)
        valid = (positions >= 0).flatten()
        losses = torch.nn.functional.cross_entropy(logits, targets.clamp(min=0).flatten(), reduction='none')
        return torch.where(valid, losses, 0).sum() / valid.sum()


def contenders(arch: str, precision: str, size: int, with_compiled: bool) -> tuple[dict[str, Callable], Callable]:
    """Whole steps by name, and ours with marks at the end of its parts."""
    ours_batch, peer_batch = make_batch(size)
    device = get_device()
    ours, peer = our_model(arch, precision).to(device), peer_model(arch).to(device)
    timm = TimmPretrainer(arch, ours.target_generator).to(device)
    check_losses(ours, peer, ours_batch, peer_batch, TOLERANCE[precision])
    clip = dict(max_norm=3.0)
    build = BEiTOptimWrapperConstructor(
        dict(type='beit_mm.AutocastOptimWrapper', dtype=precision, clip_grad=clip, optimizer=dict(ADAMW, fused=True))
    )
    wrapper = build(ours)
    peer.target_generator.requires_grad_(False)  # mmpretrain leaves it to AdamW to skip
    peer_wrapper, timm_wrapper = (
        AutocastOptimWrapper(
            precision,
            optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1.5e-3, fused=fused),
            clip_grad=clip,
        )
        for model, fused in ((peer, None), (timm, True))
    )
    for model in (ours, peer, timm):
        model.train()

    def timm_step() -> None:
        inputs = ours.data_preprocessor(ours_batch, True)['inputs']
        with timm_wrapper.optim_context(timm):
            loss = timm.loss(inputs)
        timm_wrapper.update_params(loss)

    def parts(mark: Callable[[str], None]) -> None:
        inputs = ours.data_preprocessor(ours_batch, True)['inputs']
        mark('other')
        with wrapper.optim_context(ours):
            targets = ours.target_generator.encode_at(inputs['tokenizer_images'], inputs['positions'])
            mark('tokenizer')
            hidden = ours.backbone(inputs['images'], inputs['mask'], inputs['positions'])[0]
            mark('forward')
            loss = ours.head.loss(hidden, targets, inputs['positions'])['loss']
            mark('head')
        wrapper.backward(loss)
        mark('backward')
        wrapper.step()
        wrapper.zero_grad()
        mark('optimizer')

    steps = {
        OURS: lambda: ours.train_step(ours_batch, wrapper),
        'mmpretrain': lambda: peer.train_step(peer_batch, peer_wrapper),
        'timm': timm_step,
    }
    if with_compiled:
        steps[f'{OURS} compiled'] = compiled(ours, 'loss', steps[OURS])
    return steps, parts


@torch.no_grad()
def check_losses(
    ours: torch.nn.Module, peer: torch.nn.Module, ours_batch: dict, peer_batch: dict, tolerance: float
) -> None:
    """Gives mmpretrain's model our weights; without drop path both must compute the same."""
    weights = convert_state_dict(ours.state_dict(), target='mmpretrain').state_dict
    tokenizer = {f'target_generator.{k}': v for k, v in ours.target_generator.encoder.state_dict().items()}
    found = peer.load_state_dict(weights | tokenizer, strict=False)
    left_over = [*found.unexpected_keys, *(key for key in found.missing_keys if 'relative_position_index' not in key)]
    if left_over:
        sys.exit(f"error: mmpretrain's model has other weights: {', '.join(left_over[:3])}, ...")
    losses = []
    for model, batch in ((ours, ours_batch), (peer, peer_batch)):
        model.eval()
        losses.append(float(model(**model.data_preprocessor(batch, True), mode='loss')['loss']))
    print('\nlosses without drop path: ours {:.5f}, mmpretrain {:.5f}'.format(*losses))
    if not abs(losses[0] - losses[1]) < tolerance:
        sys.exit(f'error: the losses differ by more than {tolerance}: these are not the same models')


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
    limit, record = prepare(args, gflop)
    for size in args.batch:
        with stops_at_full_memory(size):
            times, memory, _ = interleave(tokenizer_contenders(args.precision, size), args.rounds)
            report(f'tokenizer, batch {size}', times, memory, size, None, None, record)
            steps, parts = contenders(args.arch, args.precision, size, args.compile)
            times, memory, _ = interleave(steps, args.rounds)
            report(f'whole step, batch {size}', times, memory, size, gflop, limit, record)
            report_parts(f'parts of our step, batch {size}', *time_parts(parts, args.rounds), size, limit, record)
            record.write(args.json)
            profile_step(steps[OURS], args.profile)
        steps = parts = None


if __name__ == '__main__':
    main()
