"""The heads against mmseg's, with the same weights, and batch norm on CPUs."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from mmengine.structures import PixelData
from mmseg.registry import MODELS as MMSEG
from mmseg.structures import SegDataSample
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from beit_mm.registry import MODELS
from beit_mm.segmentation.heads import SyncBN

PYRAMIDS = [[(16, 16), (8, 8), (4, 4), (2, 2)], [(11, 24), (5, 12), (3, 6), (1, 3)]]


def pair(name: str, **changes: object) -> tuple[nn.Module, nn.Module]:
    """mmseg's head and ours, of this name, in evaluation mode, weights and statistics random and the same."""
    cfg = dict(in_channels=12, in_index=0, channels=8, num_classes=5)
    if 'UPer' in name:
        cfg.update(in_channels=[12] * 4, in_index=[0, 1, 2, 3])
    if 'SETR' in name:
        cfg.update(num_convs=4, up_scale=2)
    # named with its scope: other tests leave mmpretrain's as the default one
    cfg.update(norm_cfg=dict(type='BN'), dropout_ratio=0, loss_decode=dict(type='mmseg.CrossEntropyLoss'))
    cfg.update(changes)
    theirs = MMSEG.build(dict(cfg, type=f'mmseg.{name.removeprefix("Efficient")}'))
    ours = MODELS.build(dict(cfg, type=f'beit_mm.{name}'))
    for tensor in theirs.state_dict().values():
        if tensor.is_floating_point():
            tensor.uniform_(0.5, 1.5) if tensor.ndim == 1 else tensor.normal_(0, tensor[0].numel() ** -0.5)
    ours.load_state_dict(theirs.state_dict())  # strict: the same names and shapes
    return theirs.eval(), ours.eval()


@torch.no_grad()
@pytest.mark.filterwarnings('ignore:When align_corners')
@pytest.mark.parametrize(
    ('sizes', 'changes'),
    [
        (PYRAMIDS[0], {}),
        (PYRAMIDS[1], {}),  # where one level is no multiple of the next
        (PYRAMIDS[1], dict(align_corners=True)),
        (PYRAMIDS[0], dict(norm_cfg=None, act_cfg=None, pool_scales=(1, 2))),
    ],
)
def test_upernet_is_mmsegs(sizes, changes):
    theirs, ours = pair('EfficientUPerHead', **changes)
    features = [torch.randn(2, 12, *size) for size in sizes]
    kept = [feature.clone() for feature in features]
    torch.testing.assert_close(ours(features), theirs(features), atol=1e-5, rtol=1e-5)
    assert all(map(torch.equal, features, kept))


@torch.no_grad()
def test_upernet_calls_a_convolution_that_is_more_than_its_weight():
    """As mmseg's does: LoRA, pruning and hooks have their effect in tests as in training."""
    theirs, ours = pair('EfficientUPerHead')
    features = [torch.randn(2, 12, *size) for size in PYRAMIDS[0]]
    before = theirs(features)
    for head in (theirs, ours):
        head.fpn_bottleneck.conv.register_forward_hook(lambda module, inputs, output: 2 * output + 1)
    expected = theirs(features)
    assert (expected - before).abs().max() > 0.1
    torch.testing.assert_close(ours(features), expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_upernet_in_bfloat16_is_as_exact_as_mmsegs():
    theirs, ours = pair('EfficientUPerHead', in_channels=[48] * 4, channels=48)
    features = [torch.randn(2, 48, *size) for size in PYRAMIDS[0]]
    exact = theirs(features)
    with torch.autocast('cpu', torch.bfloat16):
        errors = [(head(features).float() - exact).square().mean().sqrt() for head in (theirs, ours)]
    assert errors[1] < 1.1 * errors[0]


@torch.no_grad()
@pytest.mark.parametrize('size', [(4, 4), (3, 5)])
def test_setr_pup_is_mmsegs_before_the_last_resizing(size):
    theirs, ours = pair('EfficientSETRUPHead')
    features = [torch.randn(2, 12, *size)]
    expected, found = theirs(features), ours(features)
    assert found.shape[2:] == (8 * size[0], 8 * size[1])
    found = F.interpolate(found, expected.shape[2:], mode='bilinear')
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


CROSS_ENTROPY = dict(type='mmseg.CrossEntropyLoss')
WEIGHTED = dict(CROSS_ENTROPY, class_weight=[0.5, 1, 2, 3, 1.5])


@pytest.mark.filterwarnings('ignore:When align_corners', 'ignore:Default', 'ignore:``build_pixel_sampler')
@pytest.mark.parametrize('share', [0.3, 1], ids=['some ignored', 'all ignored'])
@pytest.mark.parametrize(
    'changes',
    [
        dict(loss_decode=CROSS_ENTROPY),
        # mmseg 1.2 looks the ignored label's weight up too
        dict(loss_decode=[WEIGHTED, dict(type='mmseg.DiceLoss'), CROSS_ENTROPY], ignore_index=2),
        dict(loss_decode=dict(CROSS_ENTROPY, avg_non_ignore=True), align_corners=True),
        dict(loss_decode=dict(CROSS_ENTROPY, use_sigmoid=True), ignore_index=None),
        dict(sampler=dict(type='mmseg.OHEMPixelSampler', thresh=0.3, min_kept=100)),
    ],
    ids=['plain', 'weights, three losses', 'mean of valid', 'nothing to ignore', 'hard pixels'],
)
@pytest.mark.parametrize('name', ['EfficientUPerHead', 'EfficientSETRUPHead', 'SETRUPHead', 'FCNHead'])
def test_losses_accuracy_and_gradients_are_mmsegs(name, changes, share):
    """Also without a single pixel that counts."""
    sizes = [(4, 4)] if 'SETR' in name else PYRAMIDS[0]
    features = [torch.randn(2, 12, *size) for size in sizes]
    heads = pair(name, **changes)
    labels = torch.randint(5, (2, 1, 64, 64))
    if heads[0].ignore_index is not None:
        labels[torch.rand(labels.shape) < share] = heads[0].ignore_index  # 255 unless given
    samples = [SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels]
    losses, gradients = [], []
    for head in heads:
        found = head.train().loss(features, samples, None)
        sum(value for key, value in found.items() if 'loss' in key).backward()
        losses.append({key: value.detach() for key, value in found.items()})
        gradients.append([parameter.grad for parameter in head.parameters()])
    torch.testing.assert_close(*losses)
    torch.testing.assert_close(*gradients, atol=1e-5, rtol=1e-3)


def test_sync_bn_trains_on_a_cpu_where_torchs_refuses_and_is_torchs_where_there_is_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr('beit_mm.segmentation.heads.get_device', lambda: 'cpu')
    x, ours, peer = torch.randn(4, 5, 6, 7), SyncBN(5, eps=1e-3), nn.BatchNorm2d(5, eps=1e-3)
    nn.SyncBatchNorm(5).load_state_dict(ours.state_dict())
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    try:
        with pytest.raises(ValueError, match='only work with GPU modules'):
            DistributedDataParallel(nn.SyncBatchNorm(5))
        assert torch.equal(DistributedDataParallel(ours)(x), peer(x))
    finally:
        dist.destroy_process_group()
    monkeypatch.setattr('beit_mm.segmentation.heads.get_device', lambda: 'cuda')
    norm = SyncBN(5, eps=1e-3)
    assert isinstance(norm, nn.SyncBatchNorm) and (norm.num_features, norm.eps) == (5, 1e-3)
