"""Times segmentation beside mmsegmentation's: one scale, its memory, all scales with flip, a training step.

    python tools/dev/benchmarks/segmentation.py                                     # float32
    python tools/dev/benchmarks/segmentation.py --precision bfloat16 --parts time scales train     # GPU
    python tools/dev/benchmarks/segmentation.py --narrow --parts scales             # a minute on a CPU

`time`: UperNet by configs/beit_plus/upernet_640_ade20k_160k_after_in22k.py slides over one scale, 640 x 854, of an
image of 512 x 683: beit_mm; mmseg's model by its config; mmseg's head and slide_inference on our backbone. They have
the same weights, which equal logits prove in the same run. `memory`: the peak of such a call above the loaded model; on
a CPU of a fresh process, whose anonymous memory is polled from outside. `scales`: windows of the whole protocol, its
time from an image to labels, and how many labels agree; ours has as many windows in a batch as in use. On one core of a
CPU a call takes twenty minutes, so it is not in the default there. With --narrow everything is a quarter as wide and
high, so that what is done around the network shows. `train`: a step of the same configs, 2 images of 640 x 640 pixels.
--precision is ours in inference, where mmseg's config has float32, and of both in training.

Rounds are interleaved in one process. A CPU is timed by CPU time, with one thread, so that it may be busy otherwise;
only the ratios of the medians carry over to other machines.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import mmseg.models
import numpy as np
import torch
import torch.nn.functional as F
from _timing import GPU, OURS, add_line, anonymous_bytes, count_waits, interleave, machine, report
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.model import revert_sync_batchnorm
from mmengine.optim import build_optim_wrapper
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import Tensor, nn

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.registry import MODELS
from beit_mm.segmentation.segmentor import RATIOS, MultiScaleTTA, MultiScaleViews, window_intervals
from beit_mm.terminal import without_output

CONFIG = Path(__file__).resolve().parents[3] / 'configs/beit_plus/upernet_640_ade20k_160k_after_in22k.py'
THEIRS = Path(mmseg.__file__).parent / '.mim/configs/beit/beit-base_upernet_8xb2-160k_ade20k-640x640.py'
CONTENDERS = (OURS, 'mmseg', 'mmseg sliding')
PARTS = ('time', 'memory', 'scales', 'train')
IMAGE, SCALE, CROP, STRIDE = (512, 683), (640, 854), 640, 426
NARROW = dict(embed_dims=32, num_layers=4, num_heads=2)  # its images and windows have a quarter of the sides
TOLERANCE = dict(float32=1e-4, bfloat16=0.1)  # of the logits' largest


def config_of(name: str, narrow: bool) -> Config:
    """The config of a contender, without pretrained weights."""
    cfg = Config.fromfile(THEIRS if name == 'mmseg' else CONFIG)
    model = cfg.model
    model.backbone.init_cfg = model.pretrained = None
    if narrow:
        width = NARROW['embed_dims']
        model.backbone.update(NARROW if name == 'mmseg' else dict(arch=NARROW))
        model.backbone.update(img_size=(CROP // 4, CROP // 4), out_indices=(0, 1, 2, 3))
        model.neck.embed_dim = model.decode_head.channels = width
        model.decode_head.in_channels = [width] * 4
        model.auxiliary_head.update(in_channels=width, channels=width)
        model.test_cfg.update(crop_size=(CROP // 4, CROP // 4), stride=(STRIDE // 4, STRIDE // 4))
    return cfg


def build(name: str, args: argparse.Namespace, narrow: bool) -> nn.Module:
    """A contender; equal weights come from the same seed."""
    cfg = config_of(name, narrow).model
    cfg.update(auxiliary_head=None, data_preprocessor=dict(type='SegDataPreProcessor'))
    if name == 'mmseg sliding':
        cfg.type, cfg.decode_head.type = 'EncoderDecoder', 'UPerHead'
    cfg.test_cfg.update(precision=args.precision, windows_per_batch=1)
    torch.manual_seed(0)
    model = MODELS.build(cfg)
    if name == OURS:
        for key, parameter in model.named_parameters():
            if key.startswith('backbone'):
                parameter.data.add_(torch.randn_like(parameter), alpha=0.5 if key.endswith('table') else 0.01)
            else:
                nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0, parameter[0].numel() ** -0.5)
    else:
        weights = build(OURS, args, narrow).state_dict()
        weights = convert_state_dict(weights, target='mmseg').state_dict if name == 'mmseg' else weights
        found = model.load_state_dict(weights, strict=False)  # mmseg keeps its indices
        assert not found.unexpected_keys and all('index' in key for key in found.missing_keys), found
    return model.eval().to(get_device())


@torch.no_grad()
def one_scale(model: nn.Module, image: Tensor) -> Tensor:
    """Logits of one scale, at its size."""
    return model.inference(image, [dict(ori_shape=image.shape[2:], img_shape=image.shape[2:])])


def image_of_one_scale(narrow: bool) -> Tensor:
    """A normalised image as one_scale takes it."""
    return torch.randn(1, 3, *(side // 4 if narrow else side for side in SCALE), device=get_device())


@torch.no_grad()
def all_scales(model: nn.Module, original: np.ndarray, crop: int) -> Tensor:
    """Labels (H, W) of an image by the whole protocol: ours, or mmseg's inference for every ratio and flip."""
    views, size = (crop, (crop, crop)), original.shape[:2]
    if isinstance(model, MultiScaleTTA):
        batch = pseudo_collate([MultiScaleViews(*views)(dict(img=original, ori_shape=size))])
        return model.test_step(batch)[0].pred_sem_seg.data[0]
    mean = 0
    for ratio in RATIOS:
        view = MultiScaleViews(*views, [ratio])(dict(img=original, ori_shape=size))['inputs']
        image = model.data_preprocessor(dict(inputs=view))['inputs']
        for flip in (False, True):
            logits = one_scale(model, image.flip(3) if flip else image)
            logits = F.interpolate(logits, size, mode='bilinear').softmax(dim=1)
            mean = mean + (logits.flip(3) if flip else logits)
    return mean.argmax(dim=1)[0]


def record(args: argparse.Namespace, title: str, **figures: object) -> None:
    """One line of JSON."""
    options = {name: getattr(args, name) for name in ('only', 'narrow', 'precision', 'threads')}
    add_line(args.json, benchmark='segmentation', title=title, **options, **args.machine, **figures)


def part_time(args: argparse.Namespace) -> None:
    models = {name: build(name, args, args.narrow) for name in args.only}
    image = image_of_one_scale(args.narrow)
    runs = {name: lambda m=model: one_scale(m, image).cpu() for name, model in models.items()}
    times, memory, logits = interleave(runs, args.rounds, warmup=int(GPU), clock=time.process_time)
    report(f'one scale, {image.shape[2]} x {image.shape[3]}', times, memory)
    record(args, 'one scale', seconds=times, gibibytes=memory)
    first, *others = args.only
    for name in others:
        difference = float((logits[name].float() - logits[first]).abs().max() / logits[name].abs().max())
        print(f'largest difference to {name}: {difference:.1e} of the largest logit')
        if not difference < TOLERANCE[args.precision]:
            sys.exit('error: these are not the same models')


def part_memory(args: argparse.Namespace) -> None:
    peaks = {}
    for name in args.only:
        if GPU:
            model = build(name, args, args.narrow)
            standing = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            one_scale(model, image_of_one_scale(args.narrow))
            peaks[name] = torch.cuda.max_memory_allocated() - standing
            del model
        else:
            peaks[name] = peak_of_child(name)
    print('\npeak above the loaded model, one scale')
    for name, peak in peaks.items():
        print(f'{name:16}{peak / 1e6:10.0f} MB   {args.only[0]} is {peaks[args.only[0]] / peak:.2f} of it')
    record(args, 'memory of one scale', bytes=peaks)


def peak_of_child(name: str) -> int:
    """Bytes that a fresh process takes for one call, above what it has with the model."""
    command = [sys.executable, *sys.argv, '--child', name]
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if 'ready\n' not in child.stdout:  # imported packages may print before it
        sys.exit(f'error: the process of {name} failed')
    before = peak = anonymous_bytes(child.pid)
    child.stdin.write('go\n')
    child.stdin.flush()
    while child.poll() is None:
        try:
            peak = max(peak, anonymous_bytes(child.pid))
        except (IndexError, FileNotFoundError, ProcessLookupError):  # just ended
            break
        time.sleep(0.0005)
    if child.wait():
        sys.exit(f'error: the process of {name} failed')
    return peak - before


def part_scales(args: argparse.Namespace) -> None:
    def windows(ratio: float) -> int:
        short = max(int(CROP * ratio), CROP)
        sides = [int(side * short / min(IMAGE) + 0.5) for side in IMAGE]
        return 2 * len(window_intervals(sides[0], CROP, STRIDE)) * len(window_intervals(sides[1], CROP, STRIDE))

    ours, theirs = sum(map(windows, {max(ratio, 1.0) for ratio in RATIOS})), sum(map(windows, RATIOS))
    print(
        f'\nall scales with flip of {IMAGE[0]} x {IMAGE[1]}: {ours} windows, {theirs} with equal scales counted twice'
    )
    part = 4 if args.narrow else 1
    image = np.random.default_rng(0).integers(0, 256, (IMAGE[0] // part, IMAGE[1] // part, 3), dtype=np.uint8)
    models = {name: build(name, args, args.narrow) for name in args.only}
    if OURS in models:
        del models[OURS].test_cfg['windows_per_batch']
        models[OURS] = MultiScaleTTA(models[OURS])
    runs = {name: lambda m=model: all_scales(m, image, CROP // part).cpu() for name, model in models.items()}
    times, memory, labels = interleave(runs, args.rounds, warmup=int(GPU), clock=time.process_time)
    report(f'all scales with flip, image of {image.shape[0]} x {image.shape[1]} to labels', times, memory)
    first, *others = args.only
    equal = {name: float((labels[name] == labels[first]).float().mean()) for name in others}
    for name, share in equal.items():
        print(f'labels equal to those of {name}: {share:.4%}')
    record(args, 'all scales with flip', seconds=times, gibibytes=memory, equal_labels=equal)


def part_train(args: argparse.Namespace) -> None:
    side = CROP // 4 if args.narrow else CROP
    images = [torch.randint(0, 256, (3, side, side), dtype=torch.uint8) for _ in range(2)]
    batch = dict(inputs=[image.pin_memory() if GPU else image for image in images], data_samples=[])
    for _ in images:
        labels = torch.randint(0, 150, (1, side, side))
        sample = SegDataSample(metainfo=dict(img_shape=(side, side), ori_shape=(side, side)))
        sample.gt_sem_seg = PixelData(data=labels.pin_memory() if GPU else labels)
        batch['data_samples'].append(sample)

    def step_of(name: str) -> Callable[[], object]:
        cfg = config_of(name, args.narrow)
        cfg.model.data_preprocessor.size = (side, side)
        model = revert_sync_batchnorm(MODELS.build(cfg.model)).to(get_device()).train()
        wrapper = dict(cfg.optim_wrapper, type='beit_mm.AutocastOptimWrapper', dtype=args.precision)
        with without_output():  # mmseg prints the group of every parameter
            wrapper = build_optim_wrapper(model, wrapper)
        return lambda: model.train_step(batch, wrapper)

    steps = {name: step_of(name) for name in args.only if name != 'mmseg sliding'}
    times, memory, _ = interleave(steps, args.rounds)
    report(f'training step, batch 2, {side} x {side}', times, memory, size=2)
    waits = {name: count_waits(step) for name, step in steps.items()}
    record(args, 'training step', batch=2, seconds=times, gibibytes=memory, waits=waits)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--narrow', action='store_true', help='a small model in all parts, to try the script out')
    parser.add_argument('--precision', choices=[*TOLERANCE], default='float32')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--threads', type=int, default=1, help='CPU threads')
    everything = 'default: all; at full size on a CPU time and memory'
    parser.add_argument('--parts', nargs='+', choices=PARTS, help=everything)
    parser.add_argument('--only', nargs='+', choices=CONTENDERS, default=CONTENDERS, help='contenders (default: all)')
    parser.add_argument('--json', type=Path, metavar='FILE', help='add each table to it as a line of JSON')
    parser.add_argument('--child', help=argparse.SUPPRESS)  # what peak_of_child looks at
    args = parser.parse_args()
    MMLogger.get_instance('benchmark', log_level='ERROR')
    init_default_scope('mmseg')
    args.machine = machine(args.threads)
    args.parts = args.parts or (PARTS if GPU or args.narrow else PARTS[:2])
    if args.child:
        model, image = build(args.child, args, args.narrow), image_of_one_scale(args.narrow)
        print('ready', flush=True)
        sys.stdin.readline()
        one_scale(model, image)
        return
    print(*(f'{name} {value}' for name, value in vars(args).items() if value), sep='; ')
    for part in args.parts:
        globals()[f'part_{part}'](args)


if __name__ == '__main__':
    main()
