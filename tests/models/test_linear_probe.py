"""Linear probes: frozen features, gradients in the classifiers only."""

import pytest
import torch
from helpers import make_runner
from labelled import BACKBONE, classifier_config, make_images
from mmpretrain.structures import DataSample
from peers import assert_equal

from beit_mm.engine import LayerAccuracy
from beit_mm.registry import MODELS

SAMPLES = [DataSample().set_gt_label(label) for label in (0, 2)]


def build(**changes):
    return MODELS.build(dict(dict(type='beit_mm.LinearProbe', backbone=BACKBONE, num_classes=3), **changes))


def test_gradients_reach_the_classifiers_only_and_each_as_if_alone():
    model = build()
    images = torch.randn(2, 3, 32, 32)
    model(images, SAMPLES, mode='loss')['loss'].backward()
    assert all(p.grad is None and not p.requires_grad for p in model.backbone.parameters())
    features = [f.clone() for f in model.features(images)]
    for feature, head in zip(features, model.heads.values(), strict=True):
        alone = torch.nn.Linear(32, 3)
        alone.load_state_dict(head.state_dict())
        torch.nn.functional.cross_entropy(alone(feature), torch.tensor([0, 2])).backward()
        torch.testing.assert_close(head.weight.grad, alone.weight.grad)


def test_features_are_the_blocks_outputs_averaged():
    model = build()
    images = torch.randn(2, 3, 32, 32)
    outputs = []
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    features = model.features(images)
    assert len(features) == 3
    for feature, tokens in zip(features, outputs, strict=True):
        torch.testing.assert_close(feature, tokens[:, 1:].mean(1))
    model.feature = 'cls_mean'
    for feature, tokens in zip(model.features(images), outputs[:3], strict=True):
        torch.testing.assert_close(feature, torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1))


def test_layers_start_and_mode():
    model = build(layers=[-1, 0], feature='cls_mean', num_classes=400).train()
    assert list(model.heads) == ['2', '0'] and model.heads['0'].in_features == 64
    assert not model.backbone.training and model.training
    weights = torch.cat([head.weight.detach().flatten() for head in model.heads.values()])
    assert weights.std() == pytest.approx(0.01, rel=0.02) and weights.mean().abs() < 2e-4
    assert not any(head.bias.any() for head in model.heads.values())
    with pytest.raises(ValueError, match='block 3 does not exist'):
        build(layers=3)
    with pytest.raises(ValueError, match='feature'):
        build(feature='max')


def test_classifiers_are_in_float32_under_autocast():
    model = build()
    images = torch.randn(2, 3, 32, 32)
    with torch.autocast('cpu', torch.bfloat16):
        logits, features = model(images), model.features(images)
    for scores, feature, head in zip(logits, features, model.heads.values(), strict=True):
        assert torch.equal(scores, torch.nn.functional.linear(feature.float(), head.weight, head.bias))


def test_one_layer_is_a_classifier_like_any_other():
    model = build(layers=1)
    sample = model(torch.randn(2, 3, 32, 32), None, mode='predict')[0]
    assert sample.pred_score.sum().item() == pytest.approx(1, abs=1e-5)
    assert sample.layer_labels == {1: int(sample.pred_label)}


def test_accuracy_layer_by_layer():
    metric = LayerAccuracy()
    for label, found in ((0, {4: 0, 5: 0, 6: 1}), (1, {4: 0, 5: 1, 6: 1}), (2, {4: 0, 5: 2, 6: 0})):
        metric.process(None, [dict(gt_label=torch.tensor([label]), layer_labels=found)])
    expected = dict(layer_4=100 / 3, layer_5=100, layer_6=100 / 3, best=100, best_layer=5)
    assert metric.evaluate(3) == pytest.approx({f'accuracy/{name}': value for name, value in expected.items()})


def test_a_run_probes_all_layers_of_pretrained_weights(tmp_path):
    cfg = classifier_config(make_images(tmp_path / 'images'), tmp_path / 'work')
    pretrained = MODELS.build(dict(BACKBONE, masked_input=True))
    torch.nn.init.normal_(pretrained.cls_token)
    torch.save(dict(state_dict={f'backbone.{k}': v for k, v in pretrained.state_dict().items()}), tmp_path / 'it.pth')
    backbone = dict(BACKBONE, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'it.pth'), prefix='backbone.'))
    preprocessor = cfg.model.data_preprocessor
    cfg.model = dict(type='beit_mm.LinearProbe', num_classes=3, backbone=backbone, data_preprocessor=preprocessor)
    cfg.val_evaluator = cfg.test_evaluator = dict(type='beit_mm.LayerAccuracy')
    cfg.optim_wrapper.optimizer.lr = 0.05
    cfg.train_cfg.update(max_epochs=8, val_interval=8)
    cfg.default_hooks.checkpoint.interval = 8
    runner = make_runner(cfg)
    runner.train()
    found, expected = runner.model.backbone.state_dict(), pretrained.state_dict()
    assert_equal(found, {name: expected[name] for name in found})  # they stay as they were
    assert expected.keys() - found.keys() == {'mask_token', 'norm.weight', 'norm.bias'}
    metrics = runner.val_loop.run()
    assert {'accuracy/layer_0', 'accuracy/layer_1', 'accuracy/layer_2', 'accuracy/best_layer'} <= set(metrics)
    assert metrics['accuracy/best'] == 100  # three colours
