"""CompileHook: one graph over changing masks, the same losses, and a run that goes on where it fails."""

import copy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import load_config, narrow_dino_model, narrow_feature_model, narrow_model, train
from mmengine.registry import MODELS as RootModels
from mmengine.registry import DefaultScope
from torch._dynamo.testing import CompileCounter

from beit_mm.datasets.masking import masked_positions
from beit_mm.engine.steps import CompiledInTraining, CompileHook
from beit_mm.errors import UserError
from beit_mm.models.layers import DropPath
from beit_mm.models.vit import BEiTBackbone
from beit_mm.positions import bias_from_table, num_relative_positions
from beit_mm.registry import MODELS


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


BACKBONE = narrow_model()['backbone']
MODELS_OF = dict(
    tokens=narrow_model(backbone=dict(BACKBONE, rel_pos_bias='shared', abs_pos_embed=False)),
    rotary=narrow_model(backbone=dict(BACKBONE, rotary_base=100.0, abs_pos_embed=False, feedforward='swiglu')),
    dino=narrow_dino_model(),
    average=narrow_feature_model(layers=[0, 1]),
)


def make_batch(size: int = 32) -> dict:
    """Images that have 1 to 6 masked patches of 16."""
    masks = (torch.rand(4, 16).argsort(dim=1) < torch.randint(1, 7, (4, 1))).unflatten(1, (4, 4))
    positions = torch.from_numpy(np.stack([masked_positions(mask.numpy(), 6) for mask in masks]))
    crops = dict(second_images=torch.randn(4, 3, 32, 32), local_images=torch.randn(8, 3, 16, 16))
    views = dict(images=torch.randn(4, 3, size, size), tokenizer_images=torch.rand(4, 3, 32, 32))
    return dict(views, **crops, mask=masks, positions=positions)


@pytest.mark.parametrize('kind', MODELS_OF)
def test_one_graph_serves_changing_masks_with_the_plain_losses_and_gradients(kind):
    """And DINO's schedules; also after a validation of images of another size."""
    model, counter = MODELS.build(MODELS_OF[kind]).train(), CompileCounter()
    compiled = CompiledInTraining(model, model.loss, dict(backend=counter))
    for number in range(3):
        batch, results, before = make_batch(), [], copy.deepcopy(model.state_dict())
        model.teacher_temperature = torch.tensor(0.04 + 0.01 * number)  # as DINOHook does
        for loss in (compiled, model.loss):
            model.load_state_dict(before)
            model.zero_grad()
            losses = loss(batch)
            sum(losses[name] for name in losses if 'loss' in name).backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append({name: value.detach() for name, value in losses.items()} | gradients)
        torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
        if number == 1:
            model.eval()
            with torch.no_grad():
                compiled(batch)
                model(dict(make_batch(size=48), mask=None), mode='tensor')
            model.train()
    assert counter.frame_count == 1


TOKENIZERS = dict(
    dalle=dict(type='beit_mm.DALLETokenizer', random_weights=True, precision='bf16', hidden=8, vocab_size=32),
    dvae=dict(type='beit_mm.DiscreteVAE', hidden=8, vocab_size=32, embed_dims=16),
    vqkd=dict(
        type='beit_mm.VQKDTokenizer',
        random_weights=True,
        precision='bf16',
        arch=dict(embed_dims=32, num_layers=1, num_heads=2),
        img_size=32,
        patch_size=8,
        vocab_size=32,
    ),
)


@pytest.mark.parametrize('tokenizer', TOKENIZERS)
def test_a_tokenizer_is_part_of_the_graph_in_its_own_precision(tokenizer):
    """None of them casts its weights, or makes anything else, in the first call: that cannot be compiled."""
    model, counter = MODELS.build(narrow_model(target_generator=TOKENIZERS[tokenizer])).train(), CompileCounter()
    eager, hook = model.loss, CompileHook(backend=counter)
    model.to('cpu')  # as the Runner does
    hook.before_train(SimpleNamespace(model=model))
    for _ in range(2):
        batch = make_batch()
        torch.testing.assert_close(model.loss(batch), eager(batch), atol=1e-6, rtol=1e-5)
    assert counter.frame_count == 1 and not hook.compiled.failure


@pytest.mark.parametrize('name', ['demo/finetune_folder.py', 'demo/segment_setr_pup.py'])
def test_features_of_classifiers_and_segmentors_are_one_graph(name):
    config = copy.deepcopy(load_config(name))
    config.model.backbone.init_cfg = None
    with DefaultScope.overwrite_default_scope(config.default_scope):
        model = RootModels.build(config.model).train()
    for module in model.modules():
        if isinstance(module, DropPath):
            module.p = 0.0
    counter, plain = CompileCounter(), model.extract_feat
    CompileHook(backend=counter).before_train(SimpleNamespace(model=model))
    for _ in range(2):
        images = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(model.extract_feat(images), plain(images), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


def test_a_table_is_resized_in_compiled_code():
    """Of two constants with one name aot_autograd, which every compiler uses, makes no graph."""
    table = torch.randn(num_relative_positions((4, 4)), 2, requires_grad=True)
    compiled = torch.compile(bias_from_table, fullgraph=True, dynamic=False, backend='aot_eager')
    for grid in ((8, 8), (5, 7)):
        bias = compiled(table, (4, 4), grid, torch.float32, 1)
        torch.testing.assert_close(bias, bias_from_table(table, (4, 4), grid, torch.float32, 1))
        bias.sum().backward()


@pytest.mark.slow  # generates and compiles C++
def test_one_graph_takes_images_of_any_size():
    arch = dict(embed_dims=32, num_layers=1, num_heads=2)
    backbone = BEiTBackbone(arch, img_size=32, out_type='featmap').eval()
    compiled = torch.compile(backbone, fullgraph=True, dynamic=True)
    with torch.no_grad():
        for size in ((32, 48), (70, 33)):  # of whole patches, and padded
            images = torch.randn(1, 3, *size)
            torch.testing.assert_close(compiled(images), backbone(images), atol=1e-5, rtol=1e-4)


def test_a_run_uses_the_compiled_method_and_gives_it_back(pretrain_config):
    pretrain_config.train_cfg.max_epochs = 1
    counter = CompileCounter()
    runner = train(pretrain_config, CompileHook(backend=counter))
    assert counter.frame_count == 1 and 'loss' not in vars(runner.model)


def test_a_model_without_a_part_to_compile_is_refused():
    model = MODELS.build(dict(type='beit_mm.DiscreteVAE', hidden=8, vocab_size=8, embed_dims=8))
    with pytest.raises(UserError, match='DiscreteVAE: leave --compile out'):
        CompileHook().before_train(SimpleNamespace(model=model))


def test_a_run_that_cannot_be_compiled_goes_on_and_says_so_once_and_at_its_end(pretrain_config):
    def broken(graph, inputs):
        raise RuntimeError('no compiler\nin this test')

    pretrain_config.train_cfg.max_epochs = 1
    assert train(pretrain_config, CompileHook(backend=broken)).iter == 3
    log = next(Path(pretrain_config.work_dir).glob('*/*.log')).read_text()
    warnings = [line for line in log.splitlines() if 'WARNING' in line and 'no compiler in this test' in line]
    assert len(warnings) == 2 and warnings[-1] in log.splitlines()[-3:]
