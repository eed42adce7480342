"""CompileHook: one graph over changing masks, the same losses, and a run that goes on where it fails."""

import copy
import re
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from helpers import load_config, make_runner, narrow_dino_model, narrow_model, set_num_classes
from mmengine.registry import MODELS as RootModels
from mmengine.registry import DefaultScope
from torch._dynamo.testing import CompileCounter

from beit_mm.datasets.masking import masked_positions
from beit_mm.engine.steps import compiled_in_training
from beit_mm.models.vit import DropPath
from beit_mm.registry import HOOKS, MODELS


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def make_model(rel_pos_bias: str | None = None, **changes: object) -> torch.nn.Module:
    torch.manual_seed(0)
    config = narrow_model(**changes)
    config['backbone'].update(rel_pos_bias=rel_pos_bias, abs_pos_embed=rel_pos_bias is None)
    return MODELS.build(config)


def make_batches(number: int, size: int = 32) -> list[dict]:
    """Batches whose images have 1 to 6 masked patches of 16."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for _ in range(number):
        ranks = torch.rand(4, 16, generator=generator).argsort(dim=1)
        masks = (ranks < torch.randint(1, 7, (4, 1), generator=generator)).unflatten(1, (4, 4))
        images = torch.randn(4, 3, size, size, generator=generator)
        views = dict(images=images, tokenizer_images=torch.rand(4, 3, 32, 32, generator=generator))
        positions = torch.from_numpy(np.stack([masked_positions(mask.numpy(), 6) for mask in masks]))
        batches.append(dict(views, mask=masks, positions=positions))
    return batches


PIXELS = dict(head=dict(type='beit_mm.PixelRegressionHead', embed_dims=32, patch_size=8), target_generator=None)


@pytest.mark.parametrize(
    ('rel_pos_bias', 'changes'),
    [(None, PIXELS), ('shared', {}), ('per_layer', dict(recover='all'))],
    ids=['pixels', 'tokens', 'all'],
)
def test_one_graph_serves_changing_masks_with_the_plain_losses_and_gradients(rel_pos_bias, changes):
    """Also after a validation of images of another size."""
    model = make_model(rel_pos_bias, **changes).train()
    counter = CompileCounter()
    compiled = compiled_in_training(model, model.loss, dict(backend=counter))
    for number, batch in enumerate(make_batches(4)):
        results = []
        for loss in (compiled, model.loss):
            model.zero_grad()
            losses = loss(batch)
            losses['loss'].backward()
            gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
            results.append({name: value.detach() for name, value in losses.items()} | gradients)
        torch.testing.assert_close(*results, atol=1e-6, rtol=1e-5)
        if number == 2:
            model.eval()
            with torch.no_grad():
                compiled(batch)
                model(dict(make_batches(1, size=48)[0], mask=None), mode='tensor')
            model.train()
    assert counter.frame_count == 1


@pytest.mark.parametrize('name', ['demo/finetune_folder.py', 'demo/segment_setr_pup.py'])
def test_features_of_classifiers_and_segmentors_are_one_graph(name):
    config = copy.deepcopy(load_config(name))
    config.model.backbone.init_cfg = None
    set_num_classes(config.model, 3)
    with DefaultScope.overwrite_default_scope(config.default_scope):
        model = RootModels.build(config.model).train()
    for module in model.modules():
        if isinstance(module, DropPath):
            module.p = 0.0
    counter, plain = CompileCounter(), model.extract_feat
    HOOKS.build(dict(type='beit_mm.CompileHook', backend=counter)).before_train(SimpleNamespace(model=model))
    for _ in range(2):
        images = torch.randn(2, 3, 64, 64)
        torch.testing.assert_close(model.extract_feat(images), plain(images), atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


def test_dinos_schedules_do_not_compile_it_again():
    torch.manual_seed(0)
    model = MODELS.build(narrow_dino_model()).train()
    counter = CompileCounter()
    compiled = compiled_in_training(model, model.loss, dict(backend=counter))
    for step, batch in enumerate(make_batches(2)):
        batch |= dict(second_images=torch.randn(4, 3, 32, 32), local_images=torch.randn(8, 3, 16, 16))
        model.teacher_temperature = torch.tensor(0.04 + 0.01 * step)  # as DINOHook does
        center = model.center.clone()
        found = compiled(batch)['loss_dino']
        model.center.copy_(center)
        torch.testing.assert_close(found, model.loss(batch)['loss_dino'], atol=1e-5, rtol=1e-4)
    assert counter.frame_count == 1


def test_an_error_that_is_not_the_compilers_is_raised_after_one_attempt():
    """Out of memory, above all: a second attempt would have less, and batch norm would have moved twice."""
    attempts = []

    def backend(graph, inputs):
        def run(*args):
            attempts.append(len(args))
            raise torch.OutOfMemoryError('no memory')

        return run

    model = make_model().train()
    with pytest.raises(torch.OutOfMemoryError, match='no memory'):
        compiled_in_training(model, model.loss, dict(backend=backend))(make_batches(1)[0])
    assert len(attempts) == 1


def test_a_run_uses_the_compiled_method_and_gives_it_back(pretrain_config):
    pretrain_config.train_cfg.max_epochs = 1
    counter, runner = CompileCounter(), make_runner(pretrain_config)
    runner.register_hook(HOOKS.build(dict(type='beit_mm.CompileHook', backend=counter)))
    runner.train()
    assert counter.frame_count == 1 and 'loss' not in vars(runner.model)
    with pytest.raises(ValueError, match="BEiTPretrainer has no method 'extract_feat'"):
        HOOKS.build(dict(type='beit_mm.CompileHook', method='extract_feat')).before_train(runner)


def test_what_cannot_be_compiled_runs_as_it_is_and_says_so_once(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError('no compiler\nin this test')

    said = []
    monkeypatch.setattr('beit_mm.engine.steps.print_log', lambda message, **_: said.append(message))
    model, (batch,) = make_model().train(), make_batches(1)
    compiled = compiled_in_training(model, model.loss, dict(backend=broken))
    for _ in range(2):
        assert torch.equal(compiled(batch)['loss'], model.loss(batch)['loss'])
    assert len(said) == 1
    assert re.match('loss could not be compiled and runs as it is .*no compiler in this test', said[0])
