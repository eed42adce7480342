"""compare_methods.py on a GPU: after a hundred epochs of 40,000 small images, who is better, not who starts fastest.

    python tools/dev/gpu/hundred_epochs.py pack tiny photos.npz        images of a folder as one small file, to carry
    python tools/dev/gpu/hundred_epochs.py run photos.npz OUT          what is finished is not run again
    python tools/dev/gpu/hundred_epochs.py run photos.npz OUT --teacher vit_small    with its features
    python tools/dev/gpu/hundred_epochs.py table OUT

A ViT of 9.9 million parameters (8 x 8 patches of 64 pixels) is pretrained by each row for as many steps as it makes in
--seconds of the card when all rows are timed in turn, then measured by k-NN and a linear layer on frozen features, and
fine-tuned with 20 and with all labels. All pixels lie on the card and crops are made there, so no row waits for data;
nothing is compiled. Each row's learning rate is the best of three, by the linear layer on a tenth of the training
images after a fifth of the steps. The packaged tokenizer has seen other photos; its hour of a core is not counted.
"""

import argparse
import io
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from mmengine.registry import init_default_scope
from PIL import Image
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / 'tools/dev'))

import _methods as methods  # noqa: E402
from _results import add_result, pooled_variance, read_results, run_all, run_command  # noqa: E402

GPU = torch.cuda.is_available()
DEVICE = torch.device('cuda' if GPU else 'cpu')
ROWS = dict(
    tokens='BEiT, visual tokens',
    pixels='BEiT, pixels of the masked patches',
    features_ema='BEiT, features of its own moving average',
    features_teacher='BEiT, features of --teacher',
    dino='DINO',
    beit_ours="mmpretrain's BEiT",
    mae_ours="mmpretrain's MAE",
    simmim_ours="mmpretrain's SimMIM",
    random='no pretraining',
    supervised='no pretraining, all labels for the time of both',
)
UNTRAINED = ('random', 'supervised')
MEASURES = dict(knn='k-NN', linear='linear', few='fine-tuned, 20 labels', all='fine-tuned, all labels')
CROPS = dict(mae_ours=(0.2, 1.0), simmim_ours=(0.67, 1.0))  # shares of an image; the other rows (0.3, 1.0)
JITTERED = ('tokens', 'pixels', 'features_ema', 'features_teacher', 'beit_ours')
BATCH, RATES, SHORT = 512, (1e-3, 2e-3, 4e-3), 0.2  # of the steps, to choose a rate
FEW, FINETUNE_BATCH, FINETUNE_RATE = 20, 256, 2e-3
EPOCHS = dict(few=60, all=20)
POOL = 4096  # masks that are drawn once, and then taken at random
MOMENTUM, TEMPERATURE = 0.99, 0.04  # of teachers


def pack(args: argparse.Namespace) -> None:
    """Writes the images of train/<class>/ and val/<class>/ as WebP into one file."""
    found: dict[str, Any] = {}
    for split in ('train', 'val'):
        paths = sorted((args.data / split).glob('*/*'))
        classes = sorted({path.parent.name for path in paths})
        coded = []
        for path in paths:
            buffer = io.BytesIO()
            Image.open(path).convert('RGB').resize((methods.SIDE,) * 2).save(buffer, 'WEBP', quality=args.quality)
            coded.append(buffer.getvalue())
        found[split] = np.frombuffer(b''.join(coded), np.uint8)
        found[f'{split}_lengths'] = np.array([len(each) for each in coded])
        found[f'{split}_labels'] = np.array([classes.index(path.parent.name) for path in paths])
    np.savez(args.file, **found)


def unpack(file: Path, split: str) -> tuple[Tensor, Tensor]:
    """Pixels uint8 (N, 3, H, W) and classes (N,) on the device."""
    packed = np.load(file)
    parts = np.split(packed[split], packed[f'{split}_lengths'].cumsum()[:-1])
    with ThreadPoolExecutor() as pool:
        pixels = [*pool.map(lambda part: np.asarray(Image.open(io.BytesIO(part.tobytes())).convert('RGB')), parts)]
    labels = torch.from_numpy(packed[f'{split}_labels'])
    return torch.from_numpy(np.stack(pixels)).permute(0, 3, 1, 2).contiguous().to(DEVICE), labels.to(DEVICE)


# Data of a step, made on the device


def crops(images: Tensor, scale: tuple[float, float], size: int) -> Tensor:
    """Random parts of images (B, 3, H, W), `scale` of their area, half of them mirrored: float (B, size, size, 3)."""
    area, ratio, x, y, mirror = torch.rand(5, len(images), device=images.device)
    area, ratio = scale[0] + (scale[1] - scale[0]) * area, ((2 * ratio - 1) * math.log(4 / 3)).exp()
    width, height = (area * ratio).sqrt().clamp(max=1), (area / ratio).sqrt().clamp(max=1)
    zero = torch.zeros_like(width)
    rows = [(mirror < 0.5).float().mul(2).sub(1) * width, zero, (2 * x - 1) * (1 - width)]
    rows += [zero, height, (2 * y - 1) * (1 - height)]
    grid = F.affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), [len(images), 3, size, size], align_corners=False)
    taken = F.grid_sample(images.float(), grid, padding_mode='border', align_corners=False)
    return taken.permute(0, 2, 3, 1)


def jitter(images: Tensor) -> Tensor:
    """What TwoViewColorJitter leaves to the model, float32 (B, 7), for images (B, 3, H, W)."""
    from beit_mm.datasets.transforms import BRIGHTNESS, CONTRAST

    factors = 0.6 + 0.8 * torch.rand(len(images), 3, device=images.device)
    order = torch.rand(len(images), 3, device=images.device).argsort(dim=1)
    places = order.argsort(dim=1)
    level = images.float().mean(dim=(1, 2, 3))
    before = places[:, BRIGHTNESS] < places[:, CONTRAST]
    level = torch.where(before, level * factors[:, BRIGHTNESS], level)
    return torch.cat([factors, level[:, None], order.float()], dim=1)


class Batches:
    """Inputs of a row's model from the pixels; masks come from a pool, whose drawing would take longer than a step."""

    def __init__(self, row: str, pixels: Tensor, batch: int) -> None:
        self.row, self.pixels, self.batch = row, pixels, batch
        self.order, self.place = torch.randperm(len(pixels), device=DEVICE), 0
        self.masks = self.positions = None
        if row == 'simmim_ours':
            from mmpretrain.datasets import SimMIMMaskGenerator

            options = dict(input_size=methods.SIDE, mask_patch_size=2 * methods.PATCH, model_patch_size=methods.PATCH)
            generator = SimMIMMaskGenerator(**options, mask_ratio=0.6)
            drawn = [generator.transform({})['mask'] for _ in range(POOL)]
            self.masks = torch.from_numpy(np.stack(drawn)).bool().to(DEVICE)
        elif row not in ('mae_ours', 'dino'):
            from beit_mm.datasets.masking import BlockwiseMask, masked_positions

            draw = BlockwiseMask(methods.GRID, methods.MASKED, min_block=methods.MIN_BLOCK).draw
            drawn = [draw() for _ in range(POOL)]
            self.masks = torch.from_numpy(np.stack(drawn)).to(DEVICE)
            slots = [masked_positions(mask, methods.MASKED) for mask in drawn]
            self.positions = torch.from_numpy(np.stack(slots)).to(DEVICE)

    def next(self) -> dict:
        if self.place + self.batch > len(self.order):
            self.order, self.place = torch.randperm(len(self.pixels), device=DEVICE), 0
        images = self.pixels[self.order[self.place : self.place + self.batch]]
        self.place += self.batch
        scale = CROPS.get(self.row, (0.3, 1.0))
        inputs = dict(images=crops(images, scale, methods.SIDE))
        if self.row in ('tokens', 'beit_ours'):
            inputs['tokenizer_images'] = inputs['images']
        if self.row in JITTERED:
            inputs['jitter'] = jitter(images)
        if self.row == 'dino':
            inputs = {name: crops(images, (0.4, 1.0), methods.SIDE) for name in ('images', 'second_images')}
            local = [crops(images, (0.1, 0.4), methods.SIDE // 2) for _ in range(4)]
            inputs['local_images'] = torch.stack(local, dim=1)
        if self.masks is not None:
            chosen = torch.randint(POOL, (len(images),), device=DEVICE)
            inputs['mask'] = self.masks[chosen]
            if self.positions is not None:
                inputs['positions'] = self.positions[chosen]
        return dict(inputs=inputs)


# Training


def widen(args: argparse.Namespace) -> None:
    """The network of the rows, which compare_methods.py has narrower."""
    methods.DIMS, methods.DEPTH, methods.HEADS = (32, 2, 2) if args.rehearse else (320, 8, 5)


def build(row: str, args: argparse.Namespace, rate: float) -> tuple[nn.Module, Any]:
    from mmengine.optim import build_optim_wrapper

    from beit_mm.registry import MODELS

    methods.register_peers()
    shown = 'features_ema' if row == 'features_teacher' else row
    cfg = methods.settings(shown, Path('.'), Path('.'))
    model = cfg.model.to_dict()
    model['backbone']['arch'] = dict(model['backbone']['arch'], **arch())
    if 'embed_dims' in model.get('head', {}):
        model['head']['embed_dims'] = methods.DIMS
    for part in (model.get('target_generator') or {}, (model.get('target_generator') or {}).get('tokenizer', {})):
        if 'checkpoint' in part:
            part['checkpoint'] = 'demo'
    if row == 'features_teacher':
        from beit_mm.checkpoint.checkpoint import Checkpoint

        width = Checkpoint.open(args.teacher).backbone_arguments()['arch']['embed_dims']
        model['target_generator']['teacher'], model['head']['target_dims'] = str(args.teacher), width
    model = MODELS.build(model)
    model.init_weights()
    model.to(DEVICE).train()
    wrapper = dict(cfg.optim_wrapper, type='beit_mm.AutocastOptimWrapper', dtype='bfloat16')
    wrapper['optimizer'] = dict(wrapper['optimizer'], lr=rate)
    return model, build_optim_wrapper(model, wrapper)


def arch() -> dict[str, int]:
    return dict(embed_dims=methods.DIMS, num_layers=methods.DEPTH, num_heads=methods.HEADS)


class Schedule:
    """A twentieth of the steps warms up; then half a cosine to a hundredth, of each group's own rate."""

    def __init__(self, optimizer: torch.optim.Optimizer, steps: int) -> None:
        self.optimizer, self.steps, self.warmup = optimizer, steps, max(1, steps // 20)
        self.rates = [group['lr'] for group in optimizer.param_groups]

    def set(self, step: int) -> None:
        share = max(0.0, (step - self.warmup) / max(1, self.steps - self.warmup))
        factor = min((step + 1) / self.warmup, 0.01 + 0.99 * (1 + math.cos(math.pi * share)) / 2)
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            group['lr'] = rate * factor


def stepper(row: str, args: argparse.Namespace, pixels: Tensor, rate: float) -> tuple[nn.Module, Any, Any]:
    """The model, its optimizer, and a step, which takes the share of the training that is done."""
    model, wrapper = build(row, args, rate)
    batches = Batches(row, pixels, args.batch)
    teaches = row in ('dino', 'features_ema')
    if row == 'dino':
        model.teacher_temperature = TEMPERATURE

    def step(done: float) -> dict:
        losses = model.train_step(batches.next(), wrapper)
        if teaches:
            model.update_teacher(1 - (1 - MOMENTUM) * (1 + math.cos(math.pi * done)) / 2)
        return losses

    return model, wrapper, step


def calibrate(args: argparse.Namespace, pixels: Tensor) -> dict[str, int]:
    """Steps that each row makes in --seconds: medians, all rows in turn."""
    rows = [row for row in args.rows if row not in UNTRAINED]
    steps = {row: stepper(row, args, pixels, 1e-6)[2] for row in rows}
    taken: dict[str, list[float]] = defaultdict(list)
    for is_measured in (False, True, True, True):
        for row, step in steps.items():
            for _ in range(2 if args.rehearse else 10):
                begin = now()
                step(0.0)
                taken[row] += [now() - begin] * is_measured
    return {row: max(10, round(args.seconds / statistics.median(seconds))) for row, seconds in taken.items()}


def now() -> float:
    if GPU:
        torch.cuda.synchronize()
    return time.perf_counter()


def pretrain(row: str, args: argparse.Namespace, pixels: Tensor, steps: int, rate: float, path: Path) -> list[float]:
    """Writes the backbone in our format, and returns some losses on the way."""
    from beit_mm.checkpoint.names import convert_state_dict
    from beit_mm.checkpoint.read import write_checkpoint
    from beit_mm.models import BEiTBackbone

    losses = []
    if row in UNTRAINED:
        network = BEiTBackbone(arch=arch(), img_size=methods.SIDE, patch_size=methods.PATCH)
        network.init_weights()
        found, part = network.state_dict(), ''
    else:
        model, wrapper, step = stepper(row, args, pixels, rate)
        schedule = Schedule(wrapper.optimizer, steps)
        for number in range(steps):
            schedule.set(number)
            values = step(number / steps)
            if number % max(1, steps // 10) == 0 or number == steps - 1:
                losses.append(round(float(values['loss'].detach()), 4))
        found, part = model.state_dict(), 'teacher.backbone.' if row == 'dino' else 'backbone.'
    ours = {f'backbone.{name.removeprefix(part)}': it.cpu() for name, it in found.items() if name.startswith(part)}
    preprocessing = dict(methods.IMAGENET, size=[methods.SIDE] * 2)
    meta = dict(beit_mm_format=1, architecture=dict(num_heads=methods.HEADS), preprocessing=preprocessing)
    write_checkpoint(path, dict(state_dict=convert_state_dict(ours).state_dict, meta=meta))
    return losses


# Measuring


@torch.no_grad()
def features_of(path: Path, pixels: Tensor) -> list[Tensor]:
    """The mean of the patches of each block, then the class token of each: (N, C)."""
    from beit_mm.features.extractor import FeatureExtractor

    extractor = FeatureExtractor(path, device=DEVICE)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        parts = [extractor.features(part, range(methods.DEPTH)) for part in pixels.split(500)]
    kinds = [torch.cat([part[kind] for part in parts]).float() for kind in ('mean', 'class_token')]
    return [kind[:, block] for kind in kinds for block in range(methods.DEPTH)]


def right(predicted: Tensor, labels: Tensor) -> float:
    return 100 * float((predicted == labels).double().mean())


class Probes:
    """k-NN and a linear layer on the features that are best on a tenth of the training images."""

    def __init__(self, path: Path, train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor]) -> None:
        from beit_mm.features import evaluation

        self.evaluation, (pixels, self.labels), (asked, self.truth) = evaluation, train, val
        self.classes = int(self.labels.max()) + 1
        self.tenth = torch.arange(len(self.labels), device=DEVICE) % 10 == 0
        banks, queries = features_of(path, pixels), features_of(path, asked)
        scales = [evaluation.standardiser(bank) for bank in banks]
        self.banks = [scale(bank) for scale, bank in zip(scales, banks, strict=True)]
        self.queries = [scale(query) for scale, query in zip(scales, queries, strict=True)]

    def knn(self, bank: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
        return self.evaluation.knn_predict(asked, bank, labels, self.classes)

    def ridge(self, bank: Tensor, labels: Tensor, asked: Tensor) -> Tensor:
        return self.evaluation.ridge(bank.double(), labels, asked.double())

    def on_the_tenth(self, method: str) -> list[float]:
        """Of each of the features; fitted on a third of the other images."""
        rows = (~self.tenth).nonzero().squeeze(1)[::3]
        predict = getattr(self, method)
        asked, labels = (self.tenth, self.labels[self.tenth])
        return [right(predict(bank[rows], self.labels[rows], bank[asked]), labels) for bank in self.banks]

    def figures(self) -> dict[str, float]:
        by = self.on_the_tenth('knn')
        best = by.index(max(by))
        found = dict(knn=right(self.knn(self.banks[best], self.labels, self.queries[best]), self.truth))
        by = self.on_the_tenth('ridge')
        best = by.index(max(by))
        predicted, _ = self.evaluation.linear_predict(self.queries[best], self.banks[best], self.labels, self.classes)
        return dict(found, linear=right(predicted, self.truth))


def finetune(path: Path, row: str, train: tuple[Tensor, Tensor], val: tuple[Tensor, Tensor], steps: int) -> float:
    """Top-1 of the held-out images; the config's layer decay where there is something to keep."""
    from mmengine.config import Config
    from mmengine.optim import build_optim_wrapper

    from beit_mm.registry import MODELS

    cfg = Config.fromfile(ROOT / 'configs/demo/finetune_folder.py')
    (pixels, labels), (asked, truth) = train, val
    options, classes = cfg.model.to_dict(), int(truth.max()) + 1
    init = None if row in UNTRAINED else dict(type='Pretrained', checkpoint=str(path))
    options['backbone'].update(arch=arch(), img_size=methods.SIDE, init_cfg=init)
    options['head'].update(num_classes=classes, in_channels=methods.DIMS)
    options['data_preprocessor'].update(num_classes=classes)
    if row in UNTRAINED:
        cfg.optim_wrapper.paramwise_cfg.layer_decay_rate = 1.0
    model = MODELS.build(options)
    model.init_weights()
    model.to(DEVICE).train()
    wrapper = dict(cfg.optim_wrapper, type='beit_mm.AutocastOptimWrapper', dtype='bfloat16')
    wrapper['optimizer'] = dict(wrapper['optimizer'], lr=FINETUNE_RATE)
    wrapper = build_optim_wrapper(model, wrapper)
    schedule = Schedule(wrapper.optimizer, steps)
    mean, std = (torch.tensor(methods.IMAGENET[name], device=DEVICE).view(-1, 1, 1) for name in ('mean', 'std'))
    size = min(FINETUNE_BATCH, len(pixels))
    order, place = torch.randperm(len(pixels), device=DEVICE), 0
    for number in range(steps):
        schedule.set(number)
        if place + size > len(order):
            order, place = torch.randperm(len(pixels), device=DEVICE), 0
        chosen, place = order[place : place + size], place + size
        images = (crops(pixels[chosen], (0.3, 1.0), methods.SIDE).permute(0, 3, 1, 2) - mean) / std
        with wrapper.optim_context(model):
            scores = model.head(model.extract_feat(images))
            loss = F.cross_entropy(scores.float(), labels[chosen], label_smoothing=0.1)
        wrapper.update_params(loss)
    model.eval()
    with torch.no_grad(), torch.autocast(DEVICE.type, torch.bfloat16):
        parts = [model.head(model.extract_feat((part.float() - mean) / std)).argmax(dim=1) for part in asked.split(500)]
    return right(torch.cat(parts), truth)


def few_of(train: tuple[Tensor, Tensor], seed: int) -> tuple[Tensor, Tensor]:
    """FEW images of each class."""
    pixels, labels = train
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed)).to(DEVICE)
    chosen = [order[labels[order] == number][:FEW] for number in range(int(labels.max()) + 1)]
    return pixels[torch.cat(chosen)], labels[torch.cat(chosen)]


# Runs


def child(args: argparse.Namespace) -> None:
    """One row with one seed and rate: figures.json in its folder."""
    row, seed, rate, steps, folder = args.child
    torch.manual_seed(int(seed))
    np.random.seed(int(seed))
    train, val = unpack(args.file, 'train'), unpack(args.file, 'val')
    folder = Path(folder)
    path, begin = folder / 'encoder.pth', now()
    losses = pretrain(row, args, train[0], int(steps), float(rate), path)
    figures: dict[str, Any] = dict(losses=losses, seconds=round(now() - begin, 1))
    if folder.name.endswith('short'):
        figures['tenth'] = max(Probes(path, train, val).on_the_tenth('ridge'))
    else:
        if row != 'supervised':
            figures |= Probes(path, train, val).figures()
            few, epochs = few_of(train, int(seed)), 1 if args.rehearse else EPOCHS['few']
            figures['few'] = finetune(path, row, few, val, math.ceil(epochs * len(few[0]) / FINETUNE_BATCH))
        steps_of_all = math.ceil((1 if args.rehearse else EPOCHS['all']) * len(train[0]) / FINETUNE_BATCH)
        longer = int(steps) if row == 'supervised' else 0
        figures['all'] = finetune(path, row, train, val, steps_of_all + longer)
    (folder / 'figures.json').write_text(json.dumps(figures))


def run_row(name: str, row: str, seed: int, rate: float, steps: int, args: argparse.Namespace, lock: Lock) -> None:
    if name in read_results(args.out):
        return
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, __file__, 'run', args.file, args.out, '--batch', args.batch, '--child', row, seed, rate]
    words += [steps, folder] + ['--teacher', args.teacher] * bool(args.teacher) + ['--rehearse'] * args.rehearse
    run_command(words, folder / 'log.txt')
    found = json.loads((folder / 'figures.json').read_text())
    add_result(args.out, name, dict(found, row=row, seed=seed, rate=rate, steps=steps), lock)


def run(args: argparse.Namespace) -> None:
    """First the steps of all rows, then the rates, then the rows; the first seeds of all rows before the second."""
    args.out.mkdir(parents=True, exist_ok=True)
    file, lock = args.out / 'steps.json', Lock()
    if not file.exists():
        file.write_text(json.dumps(calibrate(args, unpack(args.file, 'train')[0])))
    steps = json.loads(file.read_text())
    trained = [row for row in args.rows if row not in UNTRAINED]
    sweep = [(row, rate, max(10, round(SHORT * steps[row]))) for row in trained for rate in args.rates]
    run_all(run_row, [(f'{row}-{rate:g}-short', row, 0, rate, n, args, lock) for row, rate, n in sweep], args.jobs)
    results = read_results(args.out)
    best = {row: max(args.rates, key=lambda rate: results[f'{row}-{rate:g}-short']['tenth']) for row in trained}
    best |= {row: FINETUNE_RATE for row in args.rows if row in UNTRAINED}
    steps |= dict(random=0, supervised=steps.get('mae_ours', 10))
    pairs = [(row, seed) for seed in args.seeds for row in args.rows]
    calls = [(f'{row}-{seed}', row, seed, best[row], steps[row], args, lock) for row, seed in pairs]
    run_all(run_row, calls, args.jobs)
    table(args)


def table(args: argparse.Namespace) -> None:
    """Means over seeds, with standard errors of seeds (pooled over rows) and of the held-out images."""
    results = [found for name, found in read_results(args.out).items() if not name.endswith('short')]
    by_row: dict[str, list[dict]] = defaultdict(list)
    for found in results:
        by_row[found['row']].append(found)
    heads = ' | '.join(['row', 'rate', 'steps', 'seconds', 'seeds', *MEASURES.values()])
    print(f'| {heads} |\n|{" --- |" * (5 + len(MEASURES))}')
    groups = {name: [[f[name] for f in of if name in f] for of in by_row.values()] for name in MEASURES}
    spread = {name: pooled_variance(each) for name, each in groups.items()}
    for row, title in ROWS.items():
        if not (of := by_row.get(row)):
            continue
        seconds = statistics.mean(found['seconds'] for found in of)
        cells = [f'{of[0]["rate"]:g}', str(of[0]['steps']), f'{seconds:.0f}', str(len(of))]
        for name in MEASURES:
            values = [found[name] for found in of if name in found]
            mean = statistics.mean(values) if values else 0.0
            error = math.sqrt(mean * (100 - mean) / args.held_out + spread[name] / max(1, len(values)))
            cells.append(f'{mean:.1f} ± {error:.1f}' if values else '–')
        print(f'| {title} | {" | ".join(cells)} |')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest='verb', required=True)
    packing = verbs.add_parser('pack')
    packing.add_argument('data', type=Path, help='holds train/<class>/ and val/<class>/')
    packing.add_argument('file', type=Path)
    packing.add_argument('--quality', type=int, default=70, help='of WebP')
    running = verbs.add_parser('run')
    running.add_argument('file', type=Path)
    running.add_argument('out', type=Path)
    running.add_argument('--rows', nargs='+', choices=ROWS, metavar='ROW', help=', '.join(ROWS))
    running.add_argument('--seeds', nargs='+', type=int, default=[0, 1])
    running.add_argument('--rates', nargs='+', type=float, default=[*RATES])
    running.add_argument('--seconds', type=float, default=30, help='of the card, of a pretraining (30)')
    running.add_argument('--batch', type=int, default=BATCH)
    running.add_argument('--jobs', type=int, default=4, help='rows at a time on the card')
    running.add_argument('--teacher', help='a plain ViT, by file, folder or name')
    running.add_argument('--rehearse', action='store_true', help='a narrow network, to see that every row runs')
    running.add_argument('--child', nargs=5, help=argparse.SUPPRESS)
    showing = verbs.add_parser('table')
    showing.add_argument('out', type=Path)
    for each in (running, showing):
        each.add_argument('--held-out', type=int, default=5000, help='images of val, for standard errors')
    args = parser.parse_args()
    if args.verb == 'run':
        args.rows = args.rows or [row for row in ROWS if args.teacher or row != 'features_teacher']
        widen(args)
        init_default_scope('mmpretrain')
    if getattr(args, 'child', None):
        return child(args)
    dict(pack=pack, run=run, table=table)[args.verb](args)


if __name__ == '__main__':
    main()
