"""Times a whole training step (forward, backward, AdamW, and what else belongs to it) beside its peers.

    python tools/dev/benchmarks/step.py pretrain --batch 8 --threads 2                         # CPU
    python tools/dev/benchmarks/step.py finetune --batch 64 128 256 --rounds 20 --compile      # GPU; --arch large
    python tools/dev/benchmarks/step.py dino --batch 1 --threads 1

pretrain: BEiT+ with the tokenizer, by our config and by mmpretrain's, and timm's backbone with our tokenizer and head,
which it has not; the parts of our step. finetune: BEiT+ with 1000 classes and label smoothing, by
our config, by mmpretrain's and timm's. Weights, random images and masks, and precision are the same for all; that ours
and mmpretrain's losses agree (in fine-tuning timm's too) is checked first. The optimizers are everybody's own: fused in
ours and timm's, a group for each parameter in mmpretrain's.
dino: BEiT, DINO and both together by our configs, on a CPU in CPU seconds of all threads together. The paper has 4.2
for both beside BEiT.

Steps are interleaved in one process, so that whatever else the machine does hits all alike. Only the ratios of the
medians carry over to other machines.
"""

import argparse
import copy
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mmpretrain.models
import torch
import torch.nn.functional as F
from _timing import GPU, OURS, interleave, machine, measured_limit, profile_step, report, report_parts, time_parts
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample
from timm.models.beit import Beit
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from beit_mm.checkpoint.names import ARCHITECTURES, convert_state_dict
from beit_mm.datasets.masking import BlockwiseMask, masked_positions
from beit_mm.engine import AutocastOptimWrapper
from beit_mm.models import DINOPretrainer
from beit_mm.positions import take_tokens
from beit_mm.registry import MODELS

CONFIGS = Path(__file__).resolve().parents[3] / 'configs'
PRETRAIN, FINETUNE = CONFIGS / 'beit_plus/pretrain_300e.py', CONFIGS / 'beit_plus/finetune_in1k_100e.py'
DINO = {
    'BEiT': CONFIGS / 'beit/pretrain_300e.py',
    'DINO': CONFIGS / 'beit_dino/pretrain_dino_400e.py',
    'BEiT + DINO': CONFIGS / 'beit_dino/pretrain_beit_dino_300e.py',
}
THEIRS = Path(mmpretrain.__file__).parent / '.mim/configs/beit'
THEIR_PRETRAIN = THEIRS / 'beit_beit-base-p16_8xb256-amp-coslr-300e_in1k.py'
THEIR_FINETUNE = THEIRS / 'benchmarks/beit-base-p16_8xb128-coslr-100e_in1k.py'
# GFLOP an image. Pretraining of base: 105.1 for ViT-B forward and backward, 52.1 for the tokenizer, 2.8 for the head on
# 75 tokens; DINO: both together, counted by torch's FlopCounterMode.
GFLOP = dict(pretrain=dict(base=160.1, large=424.9), finetune=dict(base=105.1, large=369.0), dino=dict(base=592.5))
# A rate so small that all go on computing the same: steep attention makes numbers near zero, which are slow on CPUs.
LR = 1e-6
# Between the losses: the networks compute in float32 there, our tokenizer in the step's precision.
TOLERANCE = dict(float32=1e-3, float16=0.01, bfloat16=0.1)
Step = Callable[[], object]


def build(config: Path, args: argparse.Namespace, **options: object) -> tuple[nn.Module, AutocastOptimWrapper]:
    """Model and optimizer of a config, ours or mmpretrain's, in the precision asked for, with options of the model."""
    cfg = Config.fromfile(config)
    cfg.merge_from_dict({f'model.{name.replace("__", ".")}': value for name, value in options.items()})
    if args.arch != 'base':
        width = 'in_channels' if 'in_channels' in cfg.model.head else 'embed_dims'
        cfg.merge_from_dict(
            {'model.backbone.arch': args.arch, f'model.head.{width}': ARCHITECTURES[args.arch]['embed_dims']}
        )
    if 'DALLETokenizer' in str(cfg.model.get('target_generator')):
        precision = {'bfloat16': 'bf16', 'float16': 'fp16', 'float32': 'fp32'}[args.precision]
        cfg.model.target_generator.update(random_weights=True, precision=precision)
    if 'data_preprocessor' not in cfg.model:  # where mmpretrain's configs have it
        cfg.model.data_preprocessor = dict({'type': 'ClsDataPreprocessor'}, **cfg.data_preprocessor)
    model = MODELS.build(cfg.model).to(get_device()).train()
    if config == THEIR_PRETRAIN:
        model.target_generator.requires_grad_(False)  # mmpretrain leaves it to AdamW to skip
    wrapper = dict(cfg.optim_wrapper, type='beit_mm.AutocastOptimWrapper', dtype=args.precision)
    wrapper.pop('loss_scale', None)
    wrapper['optimizer'].lr = LR
    return model, build_optim_wrapper(model, wrapper)


def build_timm(arch: str, **options: object) -> nn.Module:
    sizes = ARCHITECTURES[arch]
    names = dict(embed_dim=sizes['embed_dims'], depth=sizes['num_layers'], num_heads=sizes['num_heads'])
    return Beit(**names, use_abs_pos_emb=False, init_values=0.1, drop_path_rate=0.1, **options).to(get_device())


def timm_step(model: nn.Module, groups: object, loss: Callable[[], Tensor], precision: str, **options: object) -> Step:
    """A step of timm's model in a fused AdamW, in the precision of a wrapper of ours."""
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), weight_decay=0.05, fused=True)
    wrapper = AutocastOptimWrapper(precision, optimizer=optimizer, **options)

    def step() -> None:
        with wrapper.optim_context(model):
            value = loss()
        wrapper.update_params(value)

    return step


def compiled(model: nn.Module, method: str, step: Step) -> Step:
    """A step of the same model with one of its methods compiled as CompileHook does it."""
    call = torch.compile(getattr(model, method), fullgraph=True, dynamic=False)  # raises where it fails

    def compiled_step() -> None:
        setattr(model, method, call)
        try:
            step()
        finally:
            delattr(model, method)

    return compiled_step


@torch.no_grad()
def check_losses(losses: dict[str, Callable[[], Tensor]], models: list[nn.Module], tolerance: float) -> None:
    """Without drop path all must compute the same; float32 shows differences that bfloat16's rounding would hide."""
    for model in models:
        model.eval()
    found = {name: float(loss()) for name, loss in losses.items()}
    print('\nlosses without drop path: ' + ', '.join(f'{name} {value:.5f}' for name, value in found.items()))
    if not max(found.values()) - min(found.values()) < tolerance:
        sys.exit(f'error: the losses differ by more than {tolerance}: these are not the same models')
    for model in models:
        model.train()


def loss_of(model: nn.Module, batch: dict) -> Callable[[], Tensor]:
    return lambda: model(**model.data_preprocessor(batch, True), mode='loss')['loss']


def two_views(size: int) -> dict[str, Tensor]:
    """What our pipeline of pretraining collates, pinned as the loader does it."""
    draw = BlockwiseMask((14, 14), 75).draw
    masks = [draw() for _ in range(size)]
    views = {name: (size, side, side, 3) for name, side in dict(images=224, tokenizer_images=112).items()}
    inputs = {name: torch.randint(0, 256, shape, dtype=torch.uint8) for name, shape in views.items()}
    inputs['mask'] = torch.stack([torch.from_numpy(mask) for mask in masks])
    inputs['positions'] = torch.stack([torch.from_numpy(masked_positions(mask, 75)) for mask in masks])
    return {name: tensor.pin_memory() if GPU else tensor for name, tensor in inputs.items()}


def pretraining(args: argparse.Namespace, size: int) -> tuple[dict[str, Step], Callable | None]:
    """Steps by contender, and ours with marks at the ends of its parts."""
    ours, wrapper = build(PRETRAIN, args)
    peer, peer_wrapper = build(THEIR_PRETRAIN, args, target_generator__init_cfg=None)
    tokenizer = ours.target_generator
    weights = convert_state_dict(ours.state_dict(), target='mmpretrain').state_dict
    weights |= {f'target_generator.{name}': tensor for name, tensor in tokenizer.encoder.state_dict().items()}
    found = peer.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys and all('relative_position_index' in name for name in found.missing_keys), found
    batch = dict(inputs=two_views(size))
    samples = [DataSample() for _ in range(size)]
    for sample, mask in zip(samples, batch['inputs']['mask'], strict=True):
        sample.set_field(mask, 'mask')
    views = (batch['inputs'][name].permute(0, 3, 1, 2).flip(1) for name in ('images', 'tokenizer_images'))  # BGR
    planar = [view.contiguous().pin_memory() if GPU else view.contiguous() for view in views]
    peer_batch = dict(inputs=planar, data_samples=samples)
    losses = {OURS: loss_of(ours, batch), 'mmpretrain': loss_of(peer, peer_batch)}
    check_losses(losses, [ours, peer], TOLERANCE[args.precision])
    timm = build_timm(args.arch, use_shared_rel_pos_bias=True, num_classes=8192, global_pool='token')

    def timm_loss() -> Tensor:
        inputs = ours.data_preprocessor(batch, True)['inputs']
        positions = inputs['positions']
        targets = tokenizer.encode_at(inputs['tokenizer_images'], positions)
        logits = timm.head(take_tokens(timm.forward_features(inputs['images']), positions + 1)).flatten(0, 1)
        valid = (positions >= 0).flatten()
        each = F.cross_entropy(logits, targets.clamp(min=0).flatten(), reduction='none')
        return torch.where(valid, each, 0).sum() / valid.sum()

    def parts(mark: Callable[[str], None]) -> None:
        inputs = ours.data_preprocessor(batch, True)['inputs']
        mark('other')
        with wrapper.optim_context(ours):
            targets = tokenizer.encode_at(inputs['tokenizer_images'], inputs['positions'])
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
        OURS: lambda: ours.train_step(batch, wrapper),
        'mmpretrain': lambda: peer.train_step(peer_batch, peer_wrapper),
        'timm': timm_step(timm, timm.parameters(), timm_loss, args.precision, clip_grad=dict(max_norm=3.0)),
    }
    if args.compile:
        steps[f'{OURS} compiled'] = compiled(ours, 'loss', steps[OURS])
    return steps, parts


def finetuning(args: argparse.Namespace, size: int) -> tuple[dict[str, Step], Callable | None]:
    ours, wrapper = build(FINETUNE, args)
    with torch.no_grad():  # random also where training starts from zero or one, so that the check sees it
        for name, parameter in ours.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1.0 if name.endswith('table') else 0.05)
    options = dict(train_cfg=None, backbone__layer_scale_init_value=0.1)  # no mixup
    peer, peer_wrapper = build(THEIR_FINETUNE, args, **options)
    peer.load_state_dict(convert_state_dict(ours.state_dict(), target='mmpretrain').state_dict)
    timm = build_timm(args.arch, use_rel_pos_bias=True, num_classes=1000)
    timm.load_state_dict(convert_state_dict(ours.state_dict(), target='timm').state_dict)
    images, labels = torch.randint(0, 256, (size, 3, 224, 224), dtype=torch.uint8), torch.randint(1000, (size,))
    samples = [DataSample().set_gt_label(int(label)) for label in labels]
    batch = dict(inputs=images, data_samples=samples)
    peer_batch = dict(inputs=images.flip(1), data_samples=copy.deepcopy(samples))  # BGR, as OpenCV reads

    def timm_loss() -> Tensor:
        logits = timm(images.to(get_device()).float().sub_(127.5).div_(127.5))
        return F.cross_entropy(logits.float(), labels.to(get_device()), label_smoothing=0.1)

    losses = {OURS: loss_of(ours, batch), 'mmpretrain': loss_of(peer, peer_batch), 'timm': timm_loss}
    check_losses(losses, [ours, peer, timm], TOLERANCE['float32'])
    groups = param_groups_layer_decay(timm, 0.05, timm.no_weight_decay(), layer_decay=0.65)
    steps = {
        OURS: lambda: ours.train_step(batch, wrapper),
        'mmpretrain': lambda: peer.train_step(peer_batch, peer_wrapper),
        'timm': timm_step(timm, groups, timm_loss, args.precision),
    }
    if args.compile:
        steps[f'{OURS} compiled'] = compiled(ours, 'extract_feat', steps[OURS])
    return steps, None


def with_dino(args: argparse.Namespace, size: int) -> tuple[dict[str, Step], Callable | None]:
    """The rows, and the last one with `dino_on_masked`: by the same model, whose weights stand in memory once."""
    inputs = two_views(size)  # each model takes its part
    inputs['second_images'] = torch.randint_like(inputs['images'], 256)
    inputs['local_images'] = torch.randint(0, 256, (size, 10, 96, 96, 3), dtype=torch.uint8)

    def step_of(config: Path) -> Callable[..., None]:
        model, wrapper = build(config, args)
        teaches = isinstance(model, DINOPretrainer)
        if teaches:
            model.teacher_temperature = 0.04

        def step(**options: bool) -> None:
            vars(model).update(options)
            model.train_step(dict(inputs=inputs), wrapper)
            if teaches:
                model.update_teacher(0.996)

        return step

    steps = {name: step_of(config) for name, config in DINO.items()}
    both = steps['BEiT + DINO']
    steps['BEiT + DINO'] = lambda: both(dino_on_masked=False)
    steps['dino_on_masked'] = lambda: both(dino_on_masked=True)
    return steps, None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=[*GFLOP])
    parser.add_argument('--arch', choices=['base', 'large'], default='base')
    parser.add_argument('--compile', action='store_true', help='time our step compiled by CompileHook too')
    parser.add_argument('--batch', type=int, nargs='+', default=[8], help='images a step')
    parser.add_argument('--precision', choices=[*TOLERANCE], default='bfloat16')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2, help='CPU threads')
    parser.add_argument('--profile', type=int, metavar='N', help='print the N operations that take most of our step')
    parser.add_argument('--json', type=Path, metavar='FILE', help='write options and times there')
    args = parser.parse_args()
    MMLogger.get_instance('benchmark', log_level='WARNING')  # mmpretrain lists every parameter it initialises
    init_default_scope('mmpretrain')
    gflop, limit = GFLOP[args.what][args.arch], measured_limit() if GPU else None
    record = dict(vars(args), json=None, **machine(args.threads), limit_gflops=limit, gflop_per_image=gflop, tables=[])
    print(*(f'{name} {value}' for name, value in record.items() if value), sep='; ')
    contenders = dict(pretrain=pretraining, finetune=finetuning, dino=with_dino)[args.what]
    clock = time.process_time if args.what == 'dino' else time.perf_counter
    for size in args.batch:
        steps = parts = None  # gives the last size's memory back
        try:
            steps, parts = contenders(args, size)
            times, memory, _ = interleave(steps, args.rounds, clock=clock)
            report(f'whole step, batch {size}', times, memory, size, gflop * size / limit if limit else 0)
            record['tables'].append(dict(title='whole step', batch=size, seconds=times, gibibytes=memory))
            if parts:
                times, counted = time_parts(parts, args.rounds)
                report_parts(f'parts of our step, batch {size}', times, counted, size, limit)
                record['tables'].append(dict(title='parts of our step', batch=size, seconds=times, gflop=counted))
            if args.profile:
                profile_step(next(iter(steps.values())), args.profile)
        except torch.OutOfMemoryError as error:  # the smaller ones' figures are kept
            print(f'\nbatch {size} does not fit: {str(error).splitlines()[0]}')
        torch.cuda.empty_cache()
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(record, indent=1) + '\n')


if __name__ == '__main__':
    main()
