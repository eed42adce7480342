"""The host waits for the device within a step only where the log is due, and once where masks are matched."""

import copy
import functools
import runpy
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from conftest import narrow_dino_pretraining, narrow_feature_pretraining, narrow_pretraining
from helpers import ROOT, build_on_meta, check_all, list_configs, load_config, make_runner
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmengine.structures import PixelData
from mmpretrain.structures import DataSample
from mmseg.structures import SegDataSample
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode

from beit_mm.engine.loops import EpochLoop
from beit_mm.models import VQKD, BEiTBackbone, Tokenizer

pytestmark = pytest.mark.long

# What makes the host wait where its argument is on a CUDA device: values, and shapes that depend on values.
WAITING = {'_local_scalar_dense', 'is_nonzero', 'equal', 'nonzero', 'masked_select', '_unique2', 'unique_dim'}
WAITING |= {'repeat_interleave', 'bincount', 'unique_consecutive'}
INDEXING = {'index', 'index_put', 'index_put_'}  # by a boolean tensor
METHODS = ('tolist', 'item', 'cpu', 'numpy')  # on a CPU some of them call no operation that could be counted


@pytest.mark.parametrize('config', [narrow_pretraining, narrow_feature_pretraining, narrow_dino_pretraining])
def test_a_step_asks_for_no_value_of_the_device(config, images, tmp_path, monkeypatch):
    pretrain_config = config(images, tmp_path)
    pretrain_config.train_cfg.update(max_epochs=4, val_interval=4)  # 12 batches
    pretrain_config.optim_wrapper.accumulative_counts = 2
    pretrain_config.default_hooks.logger.interval = 5
    pretrain_config.default_hooks.checkpoint.interval = 100
    run_iter, waits, steps = EpochLoop.run_iter, Counter(), []

    class Operations(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            name = function.overloadpacket.__name__
            boolean_index = name in INDEXING and any(i is not None and i.dtype == torch.bool for i in args[1])
            waits.update([name] if name in WAITING or boolean_index else ())
            return function(*args, **(kwargs or {}))

    def counted(method):
        return lambda *args, **kwargs: waits.update([method.__name__]) or method(*args, **kwargs)

    def step(self, index, batch):  # with all its hooks
        waits.clear()
        with Operations():
            run_iter(self, index, batch)
        steps.append(waits.copy())

    for name in METHODS:
        monkeypatch.setattr(torch.Tensor, name, counted(getattr(torch.Tensor, name)))
    monkeypatch.setattr(EpochLoop, 'run_iter', step)
    make_runner(pretrain_config).train()
    due = {2, 5, 8, 11}  # the ends of the epochs, whose three steps are fewer than the logger's five
    first = {0, 1}  # where the optimizer has no state, the host decides
    assert all(steps[step] for step in due)
    assert not {step: counts for step, counts in enumerate(steps) if counts and step not in {*due, *first}}


def whole(
    intervals: tuple, index: int, size: int, flip: bool, resolution: int, *_: object
) -> tuple[slice, torch.Tensor]:
    """In the place of `window_matrix`, of the shapes where one window is the whole image."""
    return slice(0, size), torch.zeros(size, resolution, device='cuda')


class Copies(TorchDispatchMode):
    """Raises AssertionError where the host waits for a copy to a CUDA device; indices on the host are such copies."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        name, kwargs = function.overloadpacket.__name__, kwargs or {}
        waits = name == '_to_copy' and args[0].is_cpu and 'cuda' in str(kwargs.get('device'))
        assert not waits or kwargs.get('non_blocking'), 'a copy'
        assert name not in INDEXING or all(i is None or i.device == args[0].device for i in args[1]), 'an index'
        return function(*args, **kwargs)


on_fake_gpu = pytest.mark.skipif(torch.__version__.startswith('2.6.'), reason='fake tensors of torch 2.6 want a GPU')
CLASSIFYING = ['beit/finetune_in1k_100e.py', 'beit/linear_probe_in1k_50e.py', 'beit/attentive_probe_in1k_90e.py']


@on_fake_gpu
@pytest.mark.parametrize('name', CLASSIFYING)
def test_the_host_does_not_wait_for_copies_of_images_and_labels_nor_for_mixing(name):
    cfg, mode = load_config(name), FakeTensorMode(allow_non_fake_inputs=True)
    init_default_scope(cfg.default_scope)
    prepare = on_fake_device(build_on_meta(name).data_preprocessor, mode)
    prepare._device = torch.device('cuda')
    for _ in range(8):  # mixup or cutmix, whichever is drawn
        samples = [DataSample().set_gt_label(label) for label in range(4)]
        batch = dict(inputs=torch.zeros(4, 3, 32, 32, dtype=torch.uint8), data_samples=samples)
        with mode, Copies():
            prepared = prepare(batch, training=True)
        assert prepared['inputs'].is_cuda and all(sample.gt_label.is_cuda for sample in prepared['data_samples'])


def paired(costs: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """In the place of `assign`: five pairs of a query and an object in each prediction."""
    return torch.zeros(len(costs), 3, 5, dtype=torch.int64, device='cuda')


def ask(self: FakeTensor) -> None:
    """In the place of FakeTensor's `numpy`, which says something else."""
    raise DataDependentOutputException('numpy')


# What a step waits for, by the file that asks, and what takes its place to see what comes after it. In a training only
# the matching of masks asks, once. In a test: what a probe predicts, at the end, and in a segmentor a small matrix, on
# the CPU.
IN_TRAINING = {'beit_mm/segmentation/mask_head.py': ('beit_mm.segmentation.mask_head.assign', paired)}
IN_TESTS = {
    'beit_mm/models/probe.py': None,
    'beit_mm/segmentation/segmentor.py': ('beit_mm.segmentation.segmentor.window_matrix', whole),
}


def on_fake_device(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy whose parameters and buffers are on 'cuda' for what torch dispatches, and nowhere."""
    model = copy.deepcopy(model)
    for module in model.modules():
        for table in (module._parameters, module._buffers):
            for name, tensor in table.items():
                if tensor is not None:
                    with mode:
                        new = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device='cuda')
                    table[name] = nn.Parameter(new, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else new
        if isinstance(module, Tokenizer):
            module.precision = 'fp32'  # modules cannot be cast there
        if isinstance(module, VQKD):  # k-means begins a training once
            sizes, module.has_started = (1, 144 if module.stride == 8 else 196, module.teacher_dims), True
            module.__dict__['teacher'] = [lambda images, grid, sizes=sizes: [images.new_zeros(sizes)]]
    return model


def shorten(model: nn.Module) -> None:
    """The first and the last block of each backbone stand for those between, which are alike."""
    for module in model.modules():
        if isinstance(module, BEiTBackbone):
            for block in module.blocks[1:-1]:
                block.forward = lambda x, *_, **__: x


def take_step(model: nn.Module, cfg: Config, views: Callable) -> None:
    mode = 'loss' if model.training else 'predict'
    settings = cfg.model.get('backbone', cfg.model)  # a VQKD has `img_size` itself
    size = settings.get('img_size', 224)
    images = torch.zeros(2, settings.get('in_channels', 3), size, size, device='cuda')
    labels = torch.zeros(1, size, size, dtype=torch.int64, device='cuda')
    if hasattr(model, 'target_generator'):
        model(views(model, cfg, images[:1]), mode='loss')  # in a test `predict` fetches figures once
    elif isinstance(model, Tokenizer):
        model(dict(images=images[:1]), mode='loss')
    else:
        inputs, samples = images.byte(), [DataSample().set_gt_label(labels[0, 0, :1]) for _ in images]
        if hasattr(model, 'decode_head'):
            meta = dict(ori_shape=(size, size), img_shape=(size, size))
            samples = [SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=meta) for _ in images]
            inputs = list(inputs)
        model.data_preprocessor._device = images.device
        model(**model.data_preprocessor(dict(inputs=inputs, data_samples=samples), model.training), mode=mode)


@on_fake_gpu
@pytest.mark.parametrize(
    ('training', 'known'), [(True, IN_TRAINING), pytest.param(False, IN_TESTS, marks=pytest.mark.slow)]
)
def test_a_configs_forward_pass_is_right_for_a_gpu_and_waits_for_what_is_known_alone(training, known, monkeypatch):
    """torch dispatches it as on a GPU, and raises where the host asks for a value; the first of each kind of model.

    A backward pass wants a GPU.
    """
    monkeypatch.setattr('torch.cuda.amp.common.amp_definitely_not_available', lambda: False)
    monkeypatch.setattr('torch.cuda.is_bf16_supported', lambda *_, **__: True)
    monkeypatch.setattr(FakeTensor, 'numpy', ask)
    views = runpy.run_path(str(ROOT / 'tools/dev/flops.py'))['views']
    mode, asking, shown = FakeTensorMode(allow_non_fake_inputs=True), set(), set()

    def check(name: str) -> None:
        if 'large' in name:  # of a kind that there is smaller
            return
        cfg, model = load_config(name), build_on_meta(name)
        augments = bool(cfg.model.get('train_cfg')) and 'decode_head' not in cfg.model
        kind = augments, frozenset(map(type, model.modules()))
        if kind in shown:
            return
        shown.add(kind)
        init_default_scope(cfg.default_scope)
        model = on_fake_device(model, mode).train(training)
        shorten(model)
        step = functools.partial(take_step, model, cfg, views)
        with mode, torch.autocast('cuda', torch.bfloat16), torch.set_grad_enabled(training):
            try:
                step()
            except (DataDependentOutputException, DynamicOutputShapeException) as wait:
                files = [Path(frame.filename) for frame in traceback.extract_tb(wait.__traceback__)]
                own = Path(__file__)  # where `ask` is
                file = next(str(file) for file in files[::-1] if 'torch' not in file.parts and file != own)
                asked = next((end for end in known if file.endswith(end)), file)
                asking.add(asked)
                if known.get(asked):
                    with monkeypatch.context() as patch:
                        patch.setattr(*known[asked])
                        step()

    check_all(list_configs(), check)
    assert len(shown) > 10 and asking == known.keys()
