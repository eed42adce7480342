"""What only a CUDA device can show: half precision, fused attention, compilation, no waiting.

Without one the tests run on the CPU as far as they go, so that a test that cannot pass anywhere fails the day it is
written.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import narrow_model
from mmengine.registry import DefaultScope
from mmpretrain.structures import DataSample
from torch.nn.attention import SDPBackend, sdpa_kernel

from beit_mm.datasets.masking import masked_positions
from beit_mm.engine.logs import RuntimeInfoHook
from beit_mm.engine.optim import AutocastOptimWrapper
from beit_mm.engine.steps import CompileHook
from beit_mm.models.tokenizers import DALLETokenizer
from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import MODELS

pytestmark = pytest.mark.gpu
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device('cuda' if ON_GPU else 'cpu')
needs_gpu = pytest.mark.skipif(not ON_GPU, reason='a CPU computes in float32 where float16 is asked for')
compiled_elsewhere = pytest.mark.skipif(not ON_GPU, reason='tests/engine/test_compile.py shows it on a CPU')
# Flash attention takes no bias. torch 2.11 tries cuDNN's first on Hopper, which takes a bias that is not trained.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]


def make_inputs(seed: int = 0, device: torch.device = DEVICE) -> dict:
    random = torch.Generator().manual_seed(seed)
    mask = torch.rand(4, 4, 4, generator=random) < 0.4
    inputs = dict(
        images=torch.randn(4, 3, 32, 32, generator=random),
        tokenizer_images=torch.rand(4, 3, 32, 32, generator=random),
        mask=mask,
        positions=torch.from_numpy(np.stack([masked_positions(m.numpy(), 16) for m in mask])),
    )
    return {name: tensor.to(device) for name, tensor in inputs.items()}


def pretrainer(rel_pos_bias: str | None = None, precision: str = 'fp32') -> torch.nn.Module:
    config = narrow_model()
    config['target_generator'].update(precision=precision)
    config['backbone'].update(rel_pos_bias=rel_pos_bias, abs_pos_embed=rel_pos_bias is None)
    return MODELS.build(config).to(DEVICE).train()


def make_wrapper(model: torch.nn.Module, dtype: str) -> AutocastOptimWrapper:
    return AutocastOptimWrapper(dtype, optimizer=torch.optim.AdamW(model.parameters(), 1e-3, fused=True))


@contextmanager
def refusing_to_wait() -> Iterator[None]:
    """On a GPU an error where the host waits for the device."""
    if not ON_GPU:
        yield
        return
    torch.cuda.set_sync_debug_mode('error')
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode('default')


@needs_gpu
def test_float16_trains_and_an_overflow_only_lowers_the_scale():
    model = pretrainer()
    wrapper = make_wrapper(model, 'float16')
    losses = []
    for _ in range(20):
        with wrapper.optim_context(model):
            loss = model(make_inputs(), mode='loss')['loss']
        wrapper.update_params(loss)
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    scale = wrapper.loss_scaler.get_scale()
    before = copy.deepcopy(model.head.lm_head.weight)
    wrapper.update_params(model(make_inputs(), mode='loss')['loss'] * 1e36)  # finite, but not its gradient times scale
    assert wrapper.loss_scaler.get_scale() < scale
    assert torch.equal(model.head.lm_head.weight, before)
    assert make_wrapper(model, 'bfloat16').loss_scaler.is_enabled() is False


@pytest.mark.parametrize('precision, agreement', [pytest.param('fp16', 0.98, marks=needs_gpu), ('bf16', 0.9)])
def test_a_tokenizer_in_half_precision_gives_the_same_tokens_but_for_a_few(precision, agreement):
    images = torch.rand(8, 3, 112, 112, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    settings = dict(random_weights=True, hidden=32, vocab_size=512)
    exact = DALLETokenizer(precision='fp32', **settings).to(DEVICE)
    half = DALLETokenizer(precision=precision, **settings).to(DEVICE)
    tokens = half.encode(images)
    assert next(half.encoder.parameters()).dtype in (torch.float16, torch.bfloat16)
    assert half.encoder.blocks.output.conv.w.dtype == torch.float32
    assert (tokens == exact.encode(images)).float().mean() > agreement
    on_cpu = copy.deepcopy(exact).cpu().encode(images.cpu())  # convolutions that a GPU computes in another way
    assert (exact.encode(images).cpu() == on_cpu).float().mean() > 0.99
    positions = torch.arange(196, device=DEVICE).expand(8, -1)
    assert torch.equal(half.encode_at(images, positions), tokens.flatten(1))


def backbone(img_size: int, rel_pos_bias: str | None) -> BEiTBackbone:
    arch = dict(embed_dims=128, num_layers=2, num_heads=2)
    return BEiTBackbone(arch, img_size=img_size, abs_pos_embed=rel_pos_bias is None, rel_pos_bias=rel_pos_bias).to(
        DEVICE
    )


@pytest.mark.parametrize('rel_pos_bias', [None, 'shared', 'per_layer'])
@pytest.mark.parametrize('img_size', [224, 384])
def test_attention_never_takes_the_unfused_path(rel_pos_bias, img_size):
    model = backbone(img_size, rel_pos_bias).train()
    images = torch.randn(2, 3, img_size, img_size, device=DEVICE)
    positions = torch.arange(75, device=DEVICE).expand(2, -1)
    with sdpa_kernel(FUSED), torch.autocast(DEVICE.type, torch.bfloat16):  # raises where none of these fits
        model(images)[0].float().sum().backward()
        model(images, positions=positions)[0].float().sum().backward()
        with torch.no_grad():
            model.eval()(images)
    if rel_pos_bias is not None:
        tables = [p for name, p in model.named_parameters() if name.endswith('relative_position_bias_table')]
        assert all(table.grad.abs().sum() > 0 for table in tables)


def test_fused_attention_with_bias_is_the_formula():
    model = backbone(224, 'shared').eval()
    torch.nn.init.normal_(model.rel_pos_bias.relative_position_bias_table)
    images = torch.randn(2, 3, 224, 224, device=DEVICE)
    expected = copy.deepcopy(model).cpu()(images.cpu())[0]
    with torch.no_grad():
        torch.testing.assert_close(model(images)[0].cpu(), expected, atol=2e-2, rtol=2e-2)  # TF32


@pytest.mark.parametrize(
    'rel_pos_bias, precision',
    [
        pytest.param(None, 'fp16', marks=needs_gpu),
        ('shared', 'bf16'),
        pytest.param('per_layer', 'fp32', marks=compiled_elsewhere),
    ],
)
def test_the_compiled_loss_is_the_loss_in_one_graph(rel_pos_bias, precision):
    model = pretrainer(rel_pos_bias, precision)
    eager = model.loss
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Inductor takes a minute on two cores, and is the same there as everywhere.
    CompileHook(**({} if ON_GPU else dict(backend='aot_eager'))).before_train(SimpleNamespace(model=model))
    for seed in range(3):
        inputs = make_inputs(seed)
        # In half precision the compiled tokenizer rounds less often, and some tokens are others.
        tolerance = 1e-3 if precision == 'fp32' else 0.05
        torch.testing.assert_close(model.loss(inputs)['loss'], eager(inputs)['loss'], atol=tolerance, rtol=tolerance)
    assert torch._dynamo.utils.counters['stats']['unique_graphs'] == 1 and not model.loss.failure


@pytest.mark.parametrize('rel_pos_bias', [None, 'shared', 'per_layer'])
def test_a_whole_step_waits_for_nothing(rel_pos_bias):
    model = pretrainer(rel_pos_bias)
    wrapper = make_wrapper(model, 'bfloat16')
    logs = RuntimeInfoHook()
    runner = SimpleNamespace(train_dataloader=range(100), iter=0, max_iters=100, hooks=[])  # no line of the log is due
    batch = {name: tensor.cpu() for name, tensor in make_inputs().items() if name != 'tokenizer_images'}
    batch['images'] = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)
    batch['tokenizer_images'] = torch.randint(0, 256, (4, 32, 32, 3), dtype=torch.uint8)
    batch['jitter'] = torch.tensor([1.1, 0.9, 1.2, 100.0, 2, 0, 1]).expand(4, -1).contiguous()
    batch = dict(inputs={name: tensor.pin_memory() if ON_GPU else tensor for name, tensor in batch.items()})
    for _ in range(3):  # the first decides on the host; kernels are chosen
        model.train_step(batch, wrapper)
    with refusing_to_wait():
        for _ in range(3):
            logs.after_train_iter(runner, 0, outputs=model.train_step(batch, wrapper))
    assert wrapper.read_counters().not_finite == 0


def test_a_step_of_classification_waits_for_nothing():
    norm = dict(mean=[127.5] * 3, std=[127.5] * 3, num_classes=4, to_onehot=True)
    loss = dict(type='LabelSmoothLoss', label_smooth_val=0.1, mode='original')
    config = dict(
        type='mmpretrain.ImageClassifier',
        data_preprocessor=dict(norm, type='beit_mm.ClassificationDataPreprocessor'),
        backbone=dict(narrow_model()['backbone'], masked_input=False, out_type='avg_featmap'),
        head=dict(type='LinearClsHead', num_classes=4, in_channels=32, loss=loss),
        train_cfg=dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)]),
    )
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config).to(DEVICE).train()
    wrapper = make_wrapper(model, 'bfloat16')
    images = torch.randint(0, 256, (4, 3, 32, 32), dtype=torch.uint8)
    images = images.pin_memory() if ON_GPU else images

    def step():
        samples = [DataSample(metainfo=dict(erase_box=(4, 8, 9, 9))).set_gt_label(label) for label in range(4)]
        model.train_step(dict(inputs=images, data_samples=samples), wrapper)

    for _ in range(3):
        step()
    with refusing_to_wait():
        for _ in range(8):  # mixup or cutmix, whichever is drawn
            step()
    assert wrapper.read_counters().not_finite == 0


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
def test_a_step_is_skipped_without_a_wait_for_the_device(dtype):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(DEVICE)
    wrapper = AutocastOptimWrapper(dtype, optimizer=torch.optim.AdamW(model.parameters(), fused=True))
    good = torch.randn(16, 8, device=DEVICE)
    for inputs in (good, good):  # the first step decides on the host
        with wrapper.optim_context(model):
            loss = model(inputs).square().mean()
        wrapper.update_params(loss)
    before = [value.clone() for value in model.state_dict().values()]
    bad = good * float('nan')
    with refusing_to_wait():
        with wrapper.optim_context(model):
            loss = model(bad).square().mean()
        wrapper.update_params(loss)
    assert all(map(torch.equal, before, model.state_dict().values())) and wrapper.read_counters().not_finite == 1
