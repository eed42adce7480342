"""Times segmentation inference beside mmsegmentation's: one scale, its memory, and all scales with flip.

    python tools/dev/benchmarks/segmentation_inference.py                                       # float32
    python tools/dev/benchmarks/segmentation_inference.py --precision bfloat16                  # where that is fast
    python tools/dev/benchmarks/segmentation_inference.py --parts scales                        # narrow model, a minute

`time`: the true model (UperNet, windows of 640 pixels) slides over one scale, 640 x 854, of one 512 x 683 image. The
contenders have the same weights, which equal logits prove in the same run:
    beit_mm          SlidingSegmentor, EfficientUPerHead
    mmseg            EncoderDecoder with mmseg's BEiT and UPerHead, slide_inference
    mmseg sliding    mmseg's head and slide_inference on our backbone
`memory`: the peak of such a call above the loaded model, with one window a batch; on a CPU each contender has a fresh
process for it, whose anonymous memory is polled from outside.
`scales`: windows of the whole protocol, and its time with a narrow model (image to labels, everything a
quarter as wide and high), whose network is cheap, so that what is done around it shows.

Rounds are interleaved in one process. A CPU is timed by CPU time, with one thread, so that it may be busy otherwise;
only the ratios of the medians carry over to other machines. mmseg's contenders run in float32, as its BEiT configs do,
beside ours in any precision; with --peers-too they have ours.
"""

import argparse
import statistics
import subprocess
import sys
import time

import mmseg.models  # noqa: F401  (registers BEiT, EncoderDecoder and UPerHead)
import numpy as np
import torch
import torch.nn.functional as F
from _timing import OURS, POLL, anonymous_bytes, interleave
from mmengine.config import ConfigDict
from mmengine.dataset import pseudo_collate
from mmengine.logging import MMLogger
from torch import Tensor, nn

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.models.vit import ARCHITECTURES
from beit_mm.registry import MODELS
from beit_mm.segmentation.segmentor import RATIOS, MultiScaleTTA, MultiScaleViews, window_intervals

CONTENDERS = (OURS, 'mmseg', 'mmseg sliding')
PARTS = ('time', 'memory', 'scales')
IMAGE, SCALE, CROP, STRIDE = (512, 683), (640, 854), 640, 426
NARROW = dict(embed_dims=32, num_layers=4, num_heads=2)
NARROW_IMAGE, NARROW_SCALE, NARROW_CROP, NARROW_STRIDE = (128, 171), (160, 214), 160, 106  # a quarter: as many windows
OUT_INDICES = dict(base=(3, 5, 7, 11), large=(7, 11, 15, 23), narrow=(0, 1, 2, 3))
TOLERANCE = dict(float32=1e-4, bfloat16=0.1)  # of the logits' largest
GPU = torch.cuda.is_available()


def build(name: str, arch: str, args: argparse.Namespace) -> nn.Module:
    """A contender; equal weights come from the same seed."""
    sizes = NARROW if arch == 'narrow' else ARCHITECTURES[arch]
    dims, norm = sizes['embed_dims'], dict(type='BN')
    crop, stride = (NARROW_CROP, NARROW_STRIDE) if arch == 'narrow' else (CROP, STRIDE)
    torch.manual_seed(0)
    ours = MODELS.build(
        dict(
            type='beit_mm.BEiTBackbone',
            arch=sizes,
            img_size=crop,
            out_indices=OUT_INDICES[arch],
            out_type='featmap',
            abs_pos_embed=False,
            rel_pos_bias='per_layer',
            layer_scale_init=0.1,
        )
    )
    with torch.no_grad():
        for parameter_name, parameter in ours.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.5 if parameter_name.endswith('table') else 0.01)
    precision = args.precision if name == OURS or args.peers_too else 'float32'
    model = MODELS.build(
        dict(
            type='beit_mm.SlidingSegmentor' if name == OURS else 'mmseg.EncoderDecoder',
            backbone=dict(
                type='mmseg.BEiT',
                img_size=(crop, crop),
                out_indices=OUT_INDICES[arch],
                init_values=0.1,
                norm_cfg=dict(type='LN', eps=1e-6),
                **sizes,
            )
            if name == 'mmseg'
            else dict(type=nn.Identity),
            neck=dict(type='mmseg.Feature2Pyramid', embed_dim=dims, norm_cfg=norm),
            decode_head=dict(
                type='beit_mm.EfficientUPerHead' if name == OURS else 'mmseg.UPerHead',
                in_channels=[dims] * 4,
                in_index=[0, 1, 2, 3],
                channels=dims,
                num_classes=150,
                norm_cfg=norm,
            ),
            data_preprocessor=dict(type='mmseg.SegDataPreProcessor', mean=[127.5] * 3, std=[127.5] * 3),
            test_cfg=ConfigDict(
                mode='slide',
                crop_size=(crop, crop),
                stride=(stride, stride),
                precision=precision,
                windows_per_batch=args.windows,
            ),
        )
    )
    if name == 'mmseg':
        weights = {f'backbone.{key}': tensor for key, tensor in ours.state_dict().items()}
        weights = convert_state_dict(weights, target='mmseg').state_dict
        found = model.load_state_dict(weights, strict=False)  # it keeps its indices
        assert not found.unexpected_keys and all('backbone' not in key or 'index' in key for key in found.missing_keys)
    else:
        model.backbone = ours
    generator = torch.Generator().manual_seed(1)
    for part in (model.neck, model.decode_head):
        for _, parameter in sorted(part.named_parameters()):
            nn.init.normal_(parameter, 0.5 if parameter.ndim == 1 else 0, parameter[0].numel() ** -0.5, generator)
    model.autocast = precision != 'float32' and name != OURS  # ours has its own
    return model.eval().to('cuda' if GPU else 'cpu')


@torch.no_grad()
def one_scale(model: nn.Module, image: Tensor) -> Tensor:
    """Logits of one scale, at its size."""
    with torch.autocast(image.device.type, torch.bfloat16, enabled=model.autocast):
        return model.inference(image, [dict(ori_shape=image.shape[2:], img_shape=image.shape[2:])])


def image_of_one_scale(arch: str) -> Tensor:
    """A normalised image as one_scale takes it."""
    return torch.randn(1, 3, *(NARROW_SCALE if arch == 'narrow' else SCALE), device='cuda' if GPU else 'cpu')


@torch.no_grad()
def all_scales(model: nn.Module, original: np.ndarray) -> Tensor:
    """Labels (H, W) of a original by the whole protocol: ours, or mmseg's inference for every ratio and flip."""
    crop, size = (NARROW_CROP, NARROW_CROP), original.shape[:2]
    if isinstance(model, MultiScaleTTA):
        batch = pseudo_collate([MultiScaleViews(NARROW_CROP, crop)(dict(img=original, ori_shape=size))])
        return model.test_step(batch)[0].pred_sem_seg.data[0]
    mean = 0
    for ratio in RATIOS:
        view = MultiScaleViews(NARROW_CROP, crop, [ratio])(dict(img=original, ori_shape=size))['inputs']
        image = model.data_preprocessor(dict(inputs=view))['inputs']
        for flip in (False, True):
            logits = one_scale(model, image.flip(3) if flip else image)
            logits = F.interpolate(logits, size, mode='bilinear').softmax(dim=1)
            mean = mean + (logits.flip(3) if flip else logits)
    return mean.argmax(dim=1)[0]


def report(title: str, times: dict[str, list[float]]) -> None:
    print(f'\n{title}')
    ours = statistics.median(times[OURS])
    for name, values in times.items():
        line = f'{name:16}{statistics.median(values):10.3f} s'
        if name != OURS:
            ratios = [theirs / own for own, theirs in zip(times[OURS], values, strict=True)]
            line += (
                f'   {statistics.median(values) / ours:.2f} times ours (rounds: {min(ratios):.2f} to {max(ratios):.2f})'
            )
        print(line, flush=True)


def part_time(args: argparse.Namespace) -> None:
    models = {name: build(name, args.arch, args) for name in CONTENDERS}
    image = image_of_one_scale(args.arch)
    times, _, logits = interleave(
        {name: lambda m=model: one_scale(m, image).cpu() for name, model in models.items()},
        args.rounds,
        warmup=int(GPU),
        clock=time.process_time,
    )
    report(f'one scale, {image.shape[2]} x {image.shape[3]}', times)
    for name in CONTENDERS[1:]:
        difference = float((logits[name].float() - logits[OURS]).abs().max() / logits[name].abs().max())
        print(f'largest difference to {name}: {difference:.1e} of the largest logit')
        if not difference < TOLERANCE[args.precision]:
            sys.exit('error: these are not the same models')


def part_memory(args: argparse.Namespace) -> None:
    peaks = {}
    for name in CONTENDERS:
        if GPU:
            model = build(name, args.arch, args)
            standing = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            one_scale(model, image_of_one_scale(args.arch))
            peaks[name] = torch.cuda.max_memory_allocated() - standing
            del model
        else:
            peaks[name] = peak_of_child(name)
    print('\npeak above the loaded model, one scale')
    for name, peak in peaks.items():
        print(f'{name:16}{peak / 1e6:10.0f} MB   ours is {peaks[OURS] / peak:.2f} of it')


def peak_of_child(name: str) -> int:
    """Bytes that a fresh process takes for one call, above what it has with the model."""
    child = subprocess.Popen(
        [sys.executable, *sys.argv, '--child', name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
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
        time.sleep(POLL)
    if child.wait():
        sys.exit(f'error: the process of {name} failed')
    return peak - before


def run_child(args: argparse.Namespace) -> None:
    """What `peak_of_child` looks at."""
    model, image = build(args.child, args.arch, args), image_of_one_scale(args.arch)
    print('ready', flush=True)
    sys.stdin.readline()
    one_scale(model, image)


def part_scales(args: argparse.Namespace) -> None:
    def windows(ratio: float) -> int:
        short = max(int(CROP * ratio), CROP)
        sides = [int(side * short / min(IMAGE) + 0.5) for side in IMAGE]
        return 2 * len(window_intervals(sides[0], CROP, STRIDE)) * len(window_intervals(sides[1], CROP, STRIDE))

    once = {max(ratio, 1.0) for ratio in RATIOS}
    ours, theirs = sum(map(windows, once)), sum(map(windows, RATIOS))
    print(
        f'\nall scales with flip of {IMAGE[0]} x {IMAGE[1]}: {ours} windows, {theirs} without counting equal scales '
        f'once, {theirs / ours:.2f} times ours'
    )
    image = np.random.default_rng(0).integers(0, 256, (*NARROW_IMAGE, 3), dtype=np.uint8)
    models = {name: build(name, 'narrow', args) for name in CONTENDERS}
    models[OURS] = MultiScaleTTA(models[OURS])
    times, _, labels = interleave(
        {name: lambda m=model: all_scales(m, image).cpu() for name, model in models.items()},
        args.rounds,
        warmup=int(GPU),
        clock=time.process_time,
    )
    report(f'narrow model, image of {NARROW_IMAGE[0]} x {NARROW_IMAGE[1]} to labels', times)
    for name in CONTENDERS[1:]:
        print(f'labels equal to those of {name}: {float((labels[name] == labels[OURS]).float().mean()):.4%}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', choices=[*OUT_INDICES], default='base', help='narrow tries the script out')
    parser.add_argument('--precision', choices=[*TOLERANCE], default='float32')
    parser.add_argument('--peers-too', action='store_true', help="mmseg's contenders in --precision as well")
    parser.add_argument('--windows', type=int, default=1, help='windows a batch of ours')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--threads', type=int, default=1, help='CPU threads')
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--child', help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    MMLogger.get_instance('benchmark', log_level='ERROR')
    if args.child:
        run_child(args)
        return
    print(
        f'{torch.cuda.get_device_name() if GPU else f"CPU, {args.threads} threads"}; torch {torch.__version__}; '
        f'{args.arch}; ours in {args.precision}; {args.windows} windows a batch; {args.rounds} rounds'
    )
    for part in args.parts:
        globals()[f'part_{part}'](args)


if __name__ == '__main__':
    main()
