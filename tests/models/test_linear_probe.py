"""Linear probes: frozen features, gradients in the classifiers only."""

import pytest
import torch
import torch.nn.functional as F
from labelled import BACKBONE
from mmpretrain.structures import DataSample

from beit_mm.engine import LayerAccuracy
from beit_mm.registry import MODELS

SAMPLES = [DataSample().set_gt_label(label) for label in (0, 2)]


def build(**changes):
    return MODELS.build(dict(dict(type='beit_mm.LinearProbe', backbone=BACKBONE, num_classes=3), **changes))


def test_features_are_the_blocks_outputs_averaged_and_classifiers_train_as_if_alone():
    model, outputs = build(), []
    images = torch.randn(2, 3, 32, 32)
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model(images, SAMPLES, mode='loss')['loss'].backward()
    assert all(p.grad is None and not p.requires_grad for p in model.backbone.parameters())
    for tokens, head in zip(outputs, model.heads.values(), strict=True):
        weight = head.weight.detach().clone().requires_grad_()
        F.cross_entropy(F.linear(tokens[:, 1:].mean(1), weight, head.bias), torch.tensor([0, 2])).backward()
        torch.testing.assert_close(head.weight.grad, weight.grad)
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
    with pytest.raises(ValueError, match='block 3; .* 2'):
        build(layers=3)


def test_classifiers_are_in_float32_under_autocast():
    model = build()
    images = torch.randn(2, 3, 32, 32)
    with torch.autocast('cpu', torch.bfloat16):
        logits, features = model(images), model.features(images)
    for scores, feature, head in zip(logits, features, model.heads.values(), strict=True):
        assert torch.equal(scores, F.linear(feature.float(), head.weight, head.bias))


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
