"""Times segmentation inference beside mmsegmentation's: one scale, its memory, and all scales with flip.

    python tools/dev/benchmarks/segmentation.py                            # float32
    python tools/dev/benchmarks/segmentation.py --precision bfloat16       # ours; mmseg's in float32, as its config
    python tools/dev/benchmarks/segmentation.py --parts scales             # narrow model, a minute

`time`: UperNet by configs/beit_plus/upernet_640_ade20k_160k_after_in22k.py slides over one scale, 640 x 854, of an
image of 512 x 683: beit_mm; mmseg's model by its config; mmseg's head and slide_inference on our backbone. They have
the same weights, which equal logits prove in the same run. `memory`: the peak of such a call above the loaded model; on
a CPU of a fresh process, whose anonymous memory is polled from outside. `scales`: windows of the whole protocol, and
its time with a narrow model (everything a quarter as wide and high), so that what is done around the network shows.

Rounds are interleaved in one process. A CPU is timed by CPU time, with one thread, so that it may be busy otherwise;
only the ratios of the medians carry over to other machines.
"""

import argparse
import subprocess
import sys
import time
from pathlib import Path

import mmseg.models
import numpy as np
import torch
import torch.nn.functional as F
from _timing import GPU, OURS, anonymous_bytes, interleave, machine, report
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.device import get_device
from mmengine.logging import MMLogger
from mmengine.registry import init_default_scope
from torch import Tensor, nn

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.registry import MODELS
from beit_mm.segmentation.segmentor import RATIOS, MultiScaleTTA, MultiScaleViews, window_intervals

CONFIG = Path(__file__).resolve().parents[3] / 'configs/beit_plus/upernet_640_ade20k_160k_after_in22k.py'
THEIRS = Path(mmseg.__file__).parent / '.mim/configs/beit/beit-base_upernet_8xb2-160k_ade20k-640x640.py'
CONTENDERS = (OURS, 'mmseg', 'mmseg sliding')
PARTS = ('time', 'memory', 'scales')
IMAGE, SCALE, CROP, STRIDE = (512, 683), (640, 854), 640, 426
NARROW = dict(embed_dims=32, num_layers=4, num_heads=2)  # its images and windows have a quarter of the sides
TOLERANCE = dict(float32=1e-4, bfloat16=0.1)  # of the logits' largest


def build(name: str, args: argparse.Namespace, narrow: bool) -> nn.Module:
    """A contender; equal weights come from the same seed."""
    cfg = Config.fromfile(THEIRS if name == 'mmseg' else CONFIG).model
    cfg.update(auxiliary_head=None, pretrained=None, data_preprocessor=dict(type='SegDataPreProcessor'))
    cfg.backbone.init_cfg = None
    if narrow:
        cfg.backbone.update(NARROW if name == 'mmseg' else dict(arch=NARROW))
        cfg.backbone.update(img_size=(CROP // 4, CROP // 4), out_indices=(0, 1, 2, 3))
        cfg.neck.embed_dim = cfg.decode_head.channels = NARROW['embed_dims']
        cfg.decode_head.in_channels = [NARROW['embed_dims']] * 4
        cfg.test_cfg.update(crop_size=(CROP // 4, CROP // 4), stride=(STRIDE // 4, STRIDE // 4))
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
def all_scales(model: nn.Module, original: np.ndarray) -> Tensor:
    """Labels (H, W) of an image by the whole protocol: ours, or mmseg's inference for every ratio and flip."""
    views, size = (CROP // 4, (CROP // 4, CROP // 4)), original.shape[:2]
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


def part_time(args: argparse.Namespace) -> None:
    models = {name: build(name, args, args.narrow) for name in CONTENDERS}
    image = image_of_one_scale(args.narrow)
    runs = {name: lambda m=model: one_scale(m, image).cpu() for name, model in models.items()}
    times, memory, logits = interleave(runs, args.rounds, warmup=int(GPU), clock=time.process_time)
    report(f'one scale, {image.shape[2]} x {image.shape[3]}', times, memory)
    for name in CONTENDERS[1:]:
        difference = float((logits[name].float() - logits[OURS]).abs().max() / logits[name].abs().max())
        print(f'largest difference to {name}: {difference:.1e} of the largest logit')
        if not difference < TOLERANCE[args.precision]:
            sys.exit('error: these are not the same models')


def part_memory(args: argparse.Namespace) -> None:
    peaks = {}
    for name in CONTENDERS:
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
        print(f'{name:16}{peak / 1e6:10.0f} MB   ours is {peaks[OURS] / peak:.2f} of it')


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
    image = np.random.default_rng(0).integers(0, 256, (IMAGE[0] // 4, IMAGE[1] // 4, 3), dtype=np.uint8)
    models = {name: build(name, args, narrow=True) for name in CONTENDERS}
    models[OURS] = MultiScaleTTA(models[OURS])
    runs = {name: lambda m=model: all_scales(m, image).cpu() for name, model in models.items()}
    times, memory, labels = interleave(runs, args.rounds, warmup=int(GPU), clock=time.process_time)
    report(f'narrow model, image of {image.shape[0]} x {image.shape[1]} to labels', times, memory)
    for name in CONTENDERS[1:]:
        print(f'labels equal to those of {name}: {float((labels[name] == labels[OURS]).float().mean()):.4%}')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--narrow', action='store_true', help='a small model in all parts, to try the script out')
    parser.add_argument('--precision', choices=[*TOLERANCE], default='float32')
    parser.add_argument('--rounds', type=int, default=3)
    parser.add_argument('--threads', type=int, default=1, help='CPU threads')
    parser.add_argument('--parts', nargs='+', choices=PARTS, default=PARTS)
    parser.add_argument('--child', help=argparse.SUPPRESS)  # what peak_of_child looks at
    args = parser.parse_args()
    MMLogger.get_instance('benchmark', log_level='ERROR')
    init_default_scope('mmseg')
    on = machine(args.threads)
    if args.child:
        model, image = build(args.child, args, args.narrow), image_of_one_scale(args.narrow)
        print('ready', flush=True)
        sys.stdin.readline()
        one_scale(model, image)
        return
    print(*(f'{name} {value}' for name, value in {**vars(args), **on}.items() if value), sep='; ')
    for part in args.parts:
        globals()[f'part_{part}'](args)


if __name__ == '__main__':
    main()
