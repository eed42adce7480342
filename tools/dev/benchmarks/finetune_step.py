"""Times a whole fine-tuning step (forward, backward, AdamW) beside mmpretrain's and timm's BEiT.

    python tools/dev/benchmarks/finetune_step.py --batch 8 --threads 2              # CPU
    python tools/dev/benchmarks/finetune_step.py --batch 64 128 256 --rounds 20     # GPU

All three train the same architecture (BEiT+: bias tables in every block, LayerScale, mean pooling, 1000 classes, drop
path 0.1) from the same weights on the same random images, in the same precision, with label smoothing and a learning
rate for each layer; that their losses agree is checked first. The optimizers are everybody's own: ours as
configs/_base_/schedules has it, mmpretrain's as its BEiT config has it (AdamW not fused, each parameter a group),
timm's parameter groups in a fused AdamW. Steps are interleaved in one process, so that whatever else the machine does
hits all alike. Only the ratios of the medians carry over to other machines.
"""

import copy
import sys
from collections.abc import Callable, Mapping

import mmpretrain.models  # noqa: F401  (registers BEiTViT)
import torch
from _timing import OURS, compiled, interleave, prepare, profile_step, report, step_parser, stops_at_full_memory
from mmengine.device import get_device
from mmpretrain.engine import LearningRateDecayOptimWrapperConstructor
from mmpretrain.registry import MODELS as MMPRETRAIN
from mmpretrain.structures import DataSample
from timm.loss import LabelSmoothingCrossEntropy
from timm.models.beit import Beit
from timm.optim import param_groups_layer_decay
from torch import Tensor, nn

from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.engine import AutocastOptimWrapper, BEiTOptimWrapperConstructor
from beit_mm.models.vit import ARCHITECTURES
from beit_mm.registry import MODELS

GFLOP_PER_IMAGE = dict(base=105.1, large=369.0)  # forward and backward of a ViT
CLASSES, MEAN, STD = 1000, 127.5, 127.5
# A rate so small that all go on computing the same: steep attention makes numbers near zero, which are slow on CPUs.
LR, DECAY, LAYER_DECAY = 1e-6, 0.05, 0.65
ADAMW = dict(type='AdamW', lr=LR, betas=(0.9, 0.999), weight_decay=DECAY)
# mmpretrain's configs/beit/benchmarks/beit-base-p16_8xb128-coslr-100e_in1k.py
PEER_PARAMWISE = dict(
    layer_decay_rate=LAYER_DECAY,
    custom_keys={
        name: dict(decay_mult=0.0)
        for name in ('.ln', '.bias', 'q_bias', 'v_bias', '.cls_token', '.pos_embed', '.gamma')
    },
)
TOLERANCE = 1e-3  # between the losses of the three; bfloat16 would need ten times as much
Step = Callable[[], None]


def classifier(arch: str, preprocessor: str, backbone: dict) -> dict:
    return dict(
        type='mmpretrain.ImageClassifier',
        data_preprocessor=dict(type=preprocessor, num_classes=CLASSES, mean=[MEAN] * 3, std=[STD] * 3),
        backbone=dict(backbone, arch=arch, out_type='avg_featmap', drop_path_rate=0.1),
        head=dict(
            type='mmpretrain.LinearClsHead',
            num_classes=CLASSES,
            in_channels=ARCHITECTURES[arch]['embed_dims'],
            loss=dict(type='mmpretrain.LabelSmoothLoss', label_smooth_val=0.1, mode='original'),
        ),
    )


def our_model(arch: str) -> nn.Module:
    """With random numbers also where training starts from zero or one, so that the check of the losses sees them."""
    model = MODELS.build(
        classifier(
            arch,
            'beit_mm.ClassificationDataPreprocessor',
            dict(type='beit_mm.BEiTBackbone', abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
        )
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1.0 if name.endswith('table') else 0.05)
    return model


def mmpretrain_model(arch: str, ours: Mapping[str, Tensor]) -> nn.Module:
    model = MMPRETRAIN.build(
        classifier(
            arch, 'mmpretrain.ClsDataPreprocessor', dict(type='BEiTViT', patch_size=16, layer_scale_init_value=0.1)
        )
    )
    model.load_state_dict(convert_state_dict(ours, target='mmpretrain').state_dict)
    return model


def timm_model(arch: str, ours: Mapping[str, Tensor]) -> nn.Module:
    sizes = ARCHITECTURES[arch]
    model = Beit(
        embed_dim=sizes['embed_dims'],
        depth=sizes['num_layers'],
        num_heads=sizes['num_heads'],
        num_classes=CLASSES,
        use_abs_pos_emb=False,
        use_rel_pos_bias=True,
        init_values=0.1,
        drop_path_rate=0.1,
    )
    model.load_state_dict(convert_state_dict(ours, target='timm').state_dict)
    return model


def make_batch(size: int) -> dict:
    """As the pipelines of OpenMMLab collate it."""
    samples = [DataSample().set_gt_label(int(label)) for label in torch.randint(CLASSES, (size,))]
    return dict(inputs=torch.randint(0, 256, (size, 3, 224, 224), dtype=torch.uint8), data_samples=samples)


def openmmlab(model: nn.Module, wrapper: AutocastOptimWrapper, batch: dict) -> tuple[Step, Callable[[], Tensor]]:
    """A step, and the loss in float32 without one."""

    def loss() -> Tensor:
        return model(**model.data_preprocessor(batch), mode='loss')['loss']

    return lambda: model.train_step(batch, wrapper), loss


def timm(model: nn.Module, wrapper: AutocastOptimWrapper, batch: dict) -> tuple[Step, Callable[[], Tensor]]:
    """The same as timm's train.py does it, in the precision of a wrapper of ours."""
    groups = param_groups_layer_decay(model, DECAY, model.no_weight_decay(), layer_decay=LAYER_DECAY)
    for group in groups:
        group['lr'] = LR * group['lr_scale']  # timm leaves that to its schedulers
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.999), fused=True)
    scaler = torch.amp.GradScaler(wrapper.device_type, enabled=wrapper.dtype is torch.float16)
    smoothed = LabelSmoothingCrossEntropy(0.1)
    device, labels = get_device(), torch.cat([sample.gt_label for sample in batch['data_samples']])

    def loss() -> Tensor:
        images = batch['inputs'].to(device).float().sub_(MEAN).div_(STD)
        return smoothed(model(images).float(), labels.to(device))  # a CPU's autocast would leave the logits in bfloat16

    def step() -> None:
        with torch.autocast(wrapper.device_type, wrapper.dtype, enabled=wrapper.dtype is not torch.float32):
            value = loss()
        scaler.scale(value).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

    return step, loss


def contenders(arch: str, precision: str, size: int, with_compiled: bool) -> dict[str, Step]:
    device, batch = get_device(), make_batch(size)
    ours = our_model(arch)
    weights = copy.deepcopy(ours.state_dict())
    models = {OURS: ours, 'mmpretrain': mmpretrain_model(arch, weights), 'timm': timm_model(arch, weights)}
    for model in models.values():
        model.to(device)
    common = dict(type='beit_mm.AutocastOptimWrapper', dtype=precision)
    wrapper = BEiTOptimWrapperConstructor(
        dict(common, optimizer=dict(ADAMW, fused=True)), dict(layer_decay_rate=LAYER_DECAY)
    )(ours)
    peer_wrapper = LearningRateDecayOptimWrapperConstructor(dict(common, optimizer=ADAMW), PEER_PARAMWISE)(
        models['mmpretrain']
    )
    runs = {
        OURS: openmmlab(ours, wrapper, batch),
        'mmpretrain': openmmlab(models['mmpretrain'], peer_wrapper, copy.deepcopy(batch)),
        'timm': timm(models['timm'], wrapper, batch),
    }
    check_losses(models, {name: loss for name, (_, loss) in runs.items()})
    for model in models.values():
        model.train()
    steps = {name: step for name, (step, _) in runs.items()}
    if with_compiled:
        steps[f'{OURS} compiled'] = compiled(ours, 'extract_feat', steps[OURS])
    return steps


@torch.no_grad()
def check_losses(models: dict[str, nn.Module], losses: dict[str, Callable[[], Tensor]]) -> None:
    """Without drop path all must compute the same; float32 shows differences that bfloat16's rounding would hide."""
    for model in models.values():
        model.eval()
    found = {name: float(loss()) for name, loss in losses.items()}
    print('\nlosses in float32 without drop path: ' + ', '.join(f'{name} {value:.5f}' for name, value in found.items()))
    if not max(found.values()) - min(found.values()) < TOLERANCE:
        sys.exit(f'error: the losses differ by more than {TOLERANCE}: these are not the same models')


def main() -> None:
    args = step_parser(__doc__).parse_args()
    gflop = GFLOP_PER_IMAGE[args.arch]
    limit, record = prepare(args, gflop)
    for size in args.batch:
        with stops_at_full_memory(size):
            steps = contenders(args.arch, args.precision, size, args.compile)
            times, memory, _ = interleave(steps, args.rounds)
            report(f'whole step, batch {size}', times, memory, size, gflop, limit, record)
            record.write(args.json)
            profile_step(steps[OURS], args.profile)
        steps = None


if __name__ == '__main__':
    main()
