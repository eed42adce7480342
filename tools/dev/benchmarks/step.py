"""Times a whole training step (forward, backward, AdamW, and what else belongs to it) beside its peers.

    python tools/dev/benchmarks/step.py pretrain --batch 8 --threads 2                         # CPU
    python tools/dev/benchmarks/step.py finetune --batch 64 128 256 --rounds 20 --compile      # GPU; --arch large
    python tools/dev/benchmarks/step.py pretrain --batch 256 --compile --only beit_mm --profile 10 --waits
    python tools/dev/benchmarks/step.py dino --batch 1 --threads 1

pretrain: BEiT+ with the tokenizer, by our config and by mmpretrain's, and timm's backbone with our tokenizer and head,
since timm has none; the parts of our step. With --rotary our backbone has rotary positions and no bias, and timm's is
DINOv3's; mmpretrain has none. finetune: BEiT+ with 1000 classes and label smoothing, by our config, by mmpretrain's
and timm's; `beit_mm waiting` has mmpretrain's data preprocessor, which waits until labels are on the device. Weights,
random images and masks, and precision are the same for all; that ours and mmpretrain's losses agree (in fine-tuning
timm's too) is checked first. The tokenizer computes as the config has it, in mmpretrain's step as autocast has it.
Each has its own optimizer: fused in ours and timm's, a group for each parameter in mmpretrain's.
dino: BEiT, DINO and both together by our configs, on a CPU in CPU seconds of all threads together. The paper has 4.2
for both beside BEiT.

Steps are interleaved in one process, so that whatever else the machine does hits all alike. Only the ratios of the
medians carry over to other machines.
"""

import argparse
import copy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import mmpretrain.models
import torch
import torch.nn.functional as F
from _timing import (
    GPU,
    OURS,
    add_line,
    count_waits,
    interleave,
    machine,
    measured_limit,
    profile_steps,
    report,
    report_parts,
    seconds,
    time_parts,
)
from mmengine.config import Config, DictAction
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmpretrain.structures import DataSample
from timm import create_model
from timm.models.beit import Beit
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.datasets.masking import BlockwiseMask, masked_positions
from beit_mm.engine import AutocastOptimWrapper
from beit_mm.engine.optim import DTYPES
from beit_mm.engine.steps import CompileHook
from beit_mm.models import DINOPretrainer
from beit_mm.models.tokenizers.base import PRECISIONS, dtype_on
from beit_mm.models.vit import sizes_of
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
COMPILED = f'{OURS} compiled'
WAITING = f'{OURS} waiting'
PEERS = (OURS, 'mmpretrain', 'timm')
CONTENDERS = dict(pretrain=PEERS, finetune=(*PEERS, WAITING), dino=(*DINO, 'dino_on_masked'))
NARROW = dict(embed_dims=64, num_layers=2, num_heads=4, feedforward_channels=256)
NARROW_TOKENIZER = 8  # width of its first group
NARROW_DINO = dict(embed_dims=64, num_prototypes=64, hidden_dims=64, bottleneck_dims=16)
# GFLOP an image. Pretraining of base: 105.1 for ViT-B forward and backward, 52.1 for the tokenizer, 2.8 for the head on
# 75 tokens; DINO: both together, counted by torch's FlopCounterMode.
GFLOP = dict(pretrain=dict(base=160.1, large=424.9), finetune=dict(base=105.1, large=369.0), dino=dict(base=592.5))
# A rate so small that all go on computing the same: steep attention makes numbers near zero, which are slow on CPUs.
LR = 1e-6
# Between the losses, by the precision of our tokenizer: all else computes in float32 there.
TOLERANCE = {torch.float32: 1e-3, torch.float16: 0.01, torch.bfloat16: 0.1}
Step = Callable[[], object]
failures: list[str] = []  # of contenders, which do not keep the others from being timed


def build(config: Path, args: argparse.Namespace, **options: object) -> tuple[nn.Module, AutocastOptimWrapper]:
    """Model and optimizer of a config, ours or mmpretrain's, in the precision asked for, with options of the model."""
    cfg = Config.fromfile(config)
    cfg.merge_from_dict({f'model.{name.replace("__", ".")}': value for name, value in options.items()})
    if args.arch != 'base':
        cfg.model.backbone.arch = args.arch
        if cfg.model.get('head'):
            width = 'in_channels' if 'in_channels' in cfg.model.head else 'embed_dims'
            cfg.model.head[width] = sizes_of(args.arch)['embed_dims']
    if args.narrow and 'dino_head' in cfg.model:
        cfg.model.dino_head.update(NARROW_DINO)
    tokenizer = cfg.model.get('target_generator')
    if tokenizer and 'DALLETokenizer' in tokenizer.type:
        tokenizer.update(random_weights=True, precision=args.tokenizer or tokenizer.get('precision', 'fp16'))
    if tokenizer and args.narrow:
        tokenizer.update({'hidden' if 'DALLETokenizer' in tokenizer.type else 'n_hid': NARROW_TOKENIZER})
    if 'data_preprocessor' not in cfg.model:  # where mmpretrain's configs have it
        cfg.model.data_preprocessor = dict({'type': 'ClsDataPreprocessor'}, **cfg.data_preprocessor)
    model = MODELS.build(cfg.model).to(get_device()).train()
    if config == THEIR_PRETRAIN:
        model.target_generator.requires_grad_(False)  # mmpretrain leaves it to AdamW to skip
    wrapper = dict(cfg.optim_wrapper, type='beit_mm.AutocastOptimWrapper', dtype=args.precision)
    wrapper.pop('loss_scale', None)
    wrapper['optimizer'].lr = LR
    return model, build_optim_wrapper(model, wrapper)


def build_timm(arch: str | dict, **options: object) -> nn.Module:
    sizes = sizes_of(arch)
    names = dict(embed_dim=sizes['embed_dims'], depth=sizes['num_layers'], num_heads=sizes['num_heads'])
    return Beit(**names, use_abs_pos_emb=False, init_values=0.1, drop_path_rate=0.1, **options).to(get_device())


def timm_step(model: nn.Module, groups: object, loss: Callable[[], Tensor], precision: str, **options: object) -> Step:
    """A step of timm's model in a fused AdamW, in the precision of our wrapper."""
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), weight_decay=0.05, fused=True)
    wrapper = AutocastOptimWrapper(precision, optimizer=optimizer, **options)

    def step() -> None:
        with wrapper.optim_context(model):
            value = loss()
        wrapper.update_params(value)

    return step


def add_compiled(steps: dict[str, Step], model: nn.Module, step: Step, options: dict) -> None:
    """Adds a step of the same model, compiled as CompileHook does it in training, unless it falls back to eager."""
    hook = CompileHook(**options)
    hook.before_train(SimpleNamespace(model=model))
    delattr(model, hook.method)  # the other steps are eager

    def compiled_step() -> None:
        setattr(model, hook.method, hook.compiled)
        try:
            step()
        finally:
            delattr(model, hook.method)

    first = seconds(compiled_step)[0]
    if hook.compiled.failure:
        failures.append(f'{COMPILED}: {hook.compiled.failure}')
        return
    print(f'\nfirst step of {COMPILED}: {first:.1f} s')
    steps[COMPILED] = compiled_step


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
    rotary = dict(backbone__rel_pos_bias=None, backbone__rotary_base=100.0) if args.rotary else {}
    ours, wrapper = build(PRETRAIN, args, **rotary)
    batch = dict(inputs=two_views(size))
    steps = {OURS: lambda: ours.train_step(batch, wrapper)}
    if 'mmpretrain' in args.only:
        steps['mmpretrain'] = mmpretrain_pretraining(ours, batch, args)
    if 'timm' in args.only:
        steps['timm'] = timm_pretraining(ours, batch, args)
    if COMPILED in args.only:
        add_compiled(steps, ours, steps[OURS], args.compile)

    def parts(mark: Callable[[str], None]) -> None:
        inputs = ours.data_preprocessor(batch, True)['inputs']
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

    return steps, parts if OURS in args.only else None


def mmpretrain_pretraining(ours: nn.Module, batch: dict, args: argparse.Namespace) -> Step:
    """A step of mmpretrain's model with our weights on our batch."""
    peer, wrapper = build(THEIR_PRETRAIN, args, target_generator__init_cfg=None)
    tokenizer = ours.target_generator
    weights = convert_state_dict(ours.state_dict(), target='mmpretrain').state_dict
    weights |= {f'target_generator.{name}': tensor for name, tensor in tokenizer.encoder.state_dict().items()}
    found = peer.load_state_dict(weights, strict=False)
    assert not found.unexpected_keys and all('relative_position_index' in name for name in found.missing_keys), found
    inputs = batch['inputs']
    samples = [DataSample() for _ in inputs['mask']]
    for sample, mask in zip(samples, inputs['mask'], strict=True):
        sample.set_field(mask, 'mask')
    views = (inputs[name].permute(0, 3, 1, 2).flip(1) for name in ('images', 'tokenizer_images'))  # BGR
    planar = [view.contiguous().pin_memory() if GPU else view.contiguous() for view in views]
    peer_batch = dict(inputs=planar, data_samples=samples)
    losses = {OURS: loss_of(ours, batch), 'mmpretrain': loss_of(peer, peer_batch)}
    check_losses(losses, [ours, peer], TOLERANCE[dtype_on(tokenizer.precision, torch.device(get_device()))])
    return lambda: peer.train_step(peer_batch, wrapper)


def timm_pretraining(ours: nn.Module, batch: dict, args: argparse.Namespace) -> Step:
    """A step of timm's backbone and head with our tokenizer."""
    if args.rotary:
        name = f'vit_{args.arch}_patch16_dinov3'
        timm = create_model(name, img_size=224, num_classes=8192, global_pool='token', drop_path_rate=0.1)
        timm.to(get_device())
    else:
        timm = build_timm(args.arch, use_shared_rel_pos_bias=True, num_classes=8192, global_pool='token')
    first = timm.num_prefix_tokens

    def loss() -> Tensor:
        inputs = ours.data_preprocessor(batch, True)['inputs']
        positions = inputs['positions']
        targets = ours.target_generator.encode_at(inputs['tokenizer_images'], positions)
        logits = timm.head(take_tokens(timm.forward_features(inputs['images']), positions + first)).flatten(0, 1)
        valid = (positions >= 0).flatten()
        each = F.cross_entropy(logits, targets.clamp(min=0).flatten(), reduction='none')
        return torch.where(valid, each, 0).sum() / valid.sum()

    return timm_step(timm, timm.parameters(), loss, args.precision, clip_grad=dict(max_norm=3.0))


def finetuning(args: argparse.Namespace, size: int) -> tuple[dict[str, Step], Callable | None]:
    ours, wrapper = build(FINETUNE, args, train_cfg=None)  # no mixup, no cutmix
    with torch.no_grad():  # random also where training starts from zero or one, so that the check sees it
        for name, parameter in ours.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1.0 if name.endswith('table') else 0.05)
    images, labels = torch.randint(0, 256, (size, 3, 224, 224), dtype=torch.uint8), torch.randint(1000, (size,))
    images = images.pin_memory() if GPU else images
    samples = [DataSample().set_gt_label(int(label)) for label in labels]
    batch = dict(inputs=images, data_samples=samples)

    def read(batch: dict) -> dict:
        """As loaders give it: the step before has left the labels on the GPU."""
        for sample, label in zip(batch['data_samples'], labels.split(1), strict=True):
            sample.set_gt_label(label)
        return batch

    steps, models = {OURS: lambda: ours.train_step(read(batch), wrapper)}, [ours]
    losses = {OURS: loss_of(ours, batch)}
    if 'mmpretrain' in args.only:
        options = dict(train_cfg=None, backbone__layer_scale_init_value=0.1)
        peer, peer_wrapper = build(THEIR_FINETUNE, args, **options)
        peer.load_state_dict(convert_state_dict(ours.state_dict(), target='mmpretrain').state_dict)
        bgr = images.flip(1)  # as OpenCV reads
        peer_batch = dict(inputs=bgr.pin_memory() if GPU else bgr, data_samples=copy.deepcopy(samples))
        steps['mmpretrain'] = lambda: peer.train_step(read(peer_batch), peer_wrapper)
        losses['mmpretrain'] = loss_of(peer, peer_batch)
        models.append(peer)
    if 'timm' in args.only:
        timm = build_timm(args.arch, use_rel_pos_bias=True, num_classes=1000)
        timm.load_state_dict(convert_state_dict(ours.state_dict(), target='timm').state_dict)

        def timm_loss() -> Tensor:
            logits = timm(images.to(get_device(), non_blocking=True).float().sub_(127.5).div_(127.5))
            return F.cross_entropy(logits.float(), labels.to(get_device()), label_smoothing=0.1)

        groups = param_groups_layer_decay(timm, 0.05, timm.no_weight_decay(), layer_decay=0.65)
        steps['timm'], losses['timm'] = timm_step(timm, groups, timm_loss, args.precision), timm_loss
        models.append(timm)
    check_losses(losses, models, TOLERANCE[torch.float32])
    if WAITING in args.only:
        steps[WAITING] = waiting_step(ours, steps[OURS])
    if COMPILED in args.only:
        add_compiled(steps, ours, steps[OURS], args.compile)
    return steps, None


def waiting_step(model: nn.Module, step: Step) -> Step:
    cfg = dict(Config.fromfile(FINETUNE).model.data_preprocessor, type='ClsDataPreprocessor', batch_augments=None)
    own, plain = model.data_preprocessor, MODELS.build(cfg).to(get_device())

    def waiting() -> None:
        model.data_preprocessor = plain
        try:
            step()
        finally:
            model.data_preprocessor = own

    return waiting


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


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('what', choices=[*GFLOP])
    parser.add_argument('--arch', choices=['base', 'large'], default='base')
    parser.add_argument('--narrow', action='store_true', help='small models instead, to try the script out')
    parser.add_argument(
        '--only', nargs='+', metavar='NAME', help=f'contenders; of pretrain {", ".join(PEERS)}, {COMPILED}'
    )
    help_ = 'time our step compiled by CompileHook too, with options of torch.compile, as mode=reduce-overhead'
    parser.add_argument('--compile', nargs='*', action=DictAction, metavar='KEY=VALUE', help=help_)
    parser.add_argument('--batch', type=int, nargs='+', default=[8], help='images a step')
    parser.add_argument('--precision', choices=DTYPES, default='bfloat16')
    parser.add_argument('--tokenizer', choices=[*PRECISIONS], help="precision of our tokenizer (default: the config's)")
    parser.add_argument('--rotary', action='store_true', help='pretrain: rotary positions in place of biases')
    parser.add_argument('--rounds', type=int, default=7)
    parser.add_argument('--threads', type=int, default=2, help='CPU threads')
    parser.add_argument(
        '--profile', type=int, metavar='N', help='of N steps: idle share and largest kernels or operations'
    )
    parser.add_argument('--traces', type=Path, metavar='FOLDER', help='keep the traces of the profiles there')
    parser.add_argument('--waits', action='store_true', help='count how often our step waits for the GPU, and where')
    parser.add_argument('--json', type=Path, metavar='FILE', help='add each table to it as a line of JSON')
    args = parser.parse_args()
    known = CONTENDERS[args.what]
    if args.rotary:
        if args.what != 'pretrain':
            parser.error('--rotary is an option of pretrain')
        known = tuple(name for name in known if name == OURS or (name == 'timm' and not args.narrow))
    args.only = [*(args.only or known)]
    if args.compile is not None:
        known = (*known, COMPILED)
        args.only += [COMPILED] * (COMPILED not in args.only)
    if unknown := set(args.only) - set(known):
        parser.error(f'no contender {", ".join(unknown)}; choose from {", ".join(known)}')
    if args.what == 'dino' and args.compile is not None:
        parser.error('dino has no compiled step')
    args.arch = NARROW if args.narrow else args.arch
    return args


def main() -> None:
    args = parse_args()
    logger = MMLogger.get_instance('benchmark', log_level='WARNING')  # mmpretrain lists every parameter it initialises
    logger.addFilter(lambda record: 'is skipped since' not in record.getMessage())  # and every frozen one
    init_default_scope('mmpretrain')
    gflop, limit = None if args.narrow else GFLOP[args.what][args.arch], measured_limit() if GPU else None
    settings = dict(vars(args), **machine(args.threads), limit_gflops=limit, gflop_per_image=gflop)
    for name in ('json', 'traces', 'profile', 'waits'):
        del settings[name]
    print(*(f'{name} {value}' for name, value in settings.items() if value), sep='; ')
    for size in args.batch:
        try:
            measure(args, size, settings)
        except torch.OutOfMemoryError as error:  # the smaller ones' figures are kept
            failures.append(f'batch {size} does not fit: {str(error).splitlines()[0]}')
        torch.cuda.empty_cache()
    if failures:
        sys.exit('\n'.join(f'error: {failure}' for failure in failures))


def measure(args: argparse.Namespace, size: int, settings: dict[str, object]) -> None:
    """All tables of one batch size."""
    torch.compiler.reset()
    steps, parts = dict(pretrain=pretraining, finetune=finetuning, dino=with_dino)[args.what](args, size)
    steps = {name: step for name, step in steps.items() if name in args.only}
    limit, gflop = settings['limit_gflops'], settings['gflop_per_image']

    def record(title: str, **figures: object) -> None:
        add_line(args.json, benchmark='step', title=title, **dict(settings, batch=size, **figures))

    clock = time.process_time if args.what == 'dino' else time.perf_counter
    times, memory, _ = interleave(steps, args.rounds, clock=clock)
    report(f'whole step, batch {size}', times, memory, size, gflop * size / limit if limit and gflop else 0)
    record('whole step', seconds=times, gibibytes=memory)
    if parts:
        times, counted = time_parts(parts, args.rounds)
        report_parts(f'parts of our step, batch {size}', times, counted, size, limit)
        record('parts of our step', seconds=times, gflop=counted)
    for name in [name for name in steps if name.startswith(OURS)] or steps:
        if args.waits:
            record(f'waits of {name}', waits=count_waits(steps[name]))
        if args.profile:
            profile_name = f'{args.what} {name} {size}'
            record(f'profile of {name}', **profile_steps(profile_name, steps[name], args.profile, args.traces))


if __name__ == '__main__':
    main()
