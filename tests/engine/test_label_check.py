"""The first batch's labels against the model, and batch norm on CPUs."""

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from beit_mm.engine.checks import FitCheckHook, check_labels
from beit_mm.segmentation.heads import SyncBN


def sample(labels: list[int], reduced: bool = False) -> SegDataSample:
    made = SegDataSample(metainfo=dict(seg_map_path='data/x.png', reduce_zero_label=reduced))
    made.gt_sem_seg = PixelData(data=torch.tensor(labels)[None, None])
    return made


def test_labels_that_fit():
    check_labels([sample([0, 1, 2, 255]), sample([2, 2, 2, 2])], 3, 255)
    check_labels([sample([0, 1, 254])], 3, 254)


@pytest.mark.parametrize(
    'reduced, advice',
    [
        (False, 'if 0 marks unlabelled pixels, reduce_zero_label=True'),
        (True, 'reduce_zero_label=True has already made labels one lower'),
    ],
)
def test_a_label_without_a_class_is_named_with_its_file(reduced, advice):
    with pytest.raises(ValueError) as error:
        check_labels([sample([0, 1]), sample([0, 3, 5, 255], reduced)], 3, 255)
    assert str(error.value) == (
        f'data/x.png gives label 3, the model has num_classes=3 (0 to 2); set num_classes of '
        f'every head to that of the data ({advice})'
    )


def test_ignored_pixels(monkeypatch):
    said = []
    monkeypatch.setattr('beit_mm.engine.checks.print_log', lambda message, **_: said.append(message))
    check_labels([sample([0, 1, 255, 255])], 3, 255)
    assert not said
    check_labels([sample([0, 255, 255, 255], reduced=True)], 3, 255)
    assert said == [
        '75% of the pixels of the first batch are ignored (label 255, and label 0 with reduce_zero_label='
        'True). Is it meant?'
    ]
    with pytest.raises(ValueError, match='every pixel of the first batch is ignored'):
        check_labels([sample([255, 255])], 3, 255)


def test_the_hook_looks_once_a_run():
    hook, head = FitCheckHook(), SimpleNamespace(num_classes=3, ignore_index=255)
    runner = SimpleNamespace(model=SimpleNamespace(decode_head=head))
    wrong = dict(data_samples=[sample([7])])
    for _ in range(2):  # a second training of the same runner is another run
        hook.labels_checked = False
        with pytest.raises(ValueError, match='gives label 7'):
            hook.before_train_iter(runner, 0, wrong)
        hook.before_train_iter(runner, 1, wrong)


def test_sync_bn_is_batch_norm_in_every_respect(monkeypatch):
    monkeypatch.setattr('beit_mm.segmentation.heads.get_device', lambda: 'cpu')
    torch.manual_seed(0)
    ours, peer = SyncBN(5), nn.BatchNorm2d(5)
    for _ in range(3):
        x = torch.randn(4, 5, 6, 7) * 3 + 1
        ours_x, peer_x = x.clone().requires_grad_(), x.clone().requires_grad_()
        results = ours(ours_x), peer(peer_x)
        assert torch.equal(*results)
        for result in results:
            result.square().sum().backward()
        assert torch.equal(ours_x.grad, peer_x.grad) and torch.equal(ours.weight.grad, peer.weight.grad)
    for name, value in peer.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value)
    nn.SyncBatchNorm(5).load_state_dict(ours.state_dict())
    assert torch.equal(ours.eval()(x), peer.eval()(x))
    with pytest.raises(ValueError, match='more than 1 value per channel'):
        ours.train()(torch.zeros(1, 5, 1, 1))


@pytest.fixture
def gloo(tmp_path):
    dist.init_process_group('gloo', init_method=f'file://{tmp_path}/group', rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_sync_bn_trains_on_a_cpu_where_torchs_refuses(gloo, monkeypatch):
    monkeypatch.setattr('beit_mm.segmentation.heads.get_device', lambda: 'cpu')
    x = torch.randn(4, 5, 6, 7)
    with pytest.raises(ValueError, match='only work with GPU modules'):
        DistributedDataParallel(nn.SyncBatchNorm(5))
    assert torch.equal(DistributedDataParallel(SyncBN(5))(x), nn.BatchNorm2d(5)(x))


def test_sync_bn_is_torchs_where_there_is_a_gpu(monkeypatch):
    monkeypatch.setattr('beit_mm.segmentation.heads.get_device', lambda: 'cuda')
    made = SyncBN(5, eps=1e-3)
    assert isinstance(made, nn.SyncBatchNorm) and (made.num_features, made.eps) == (5, 1e-3)
    assert torch.equal(made.eval()(torch.ones(1, 5, 2, 2)), nn.BatchNorm2d(5, eps=1e-3).eval()(torch.ones(1, 5, 2, 2)))
