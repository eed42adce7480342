"""Probes: frozen features, gradients in the classifiers only; patches read by their mean or by learned queries."""

import pytest
import torch
import torch.nn.functional as F
from labelled import BACKBONE
from mmpretrain.structures import DataSample

from beit_mm.apis.rebuild import number_of_classes
from beit_mm.engine import LayerAccuracy
from beit_mm.registry import MODELS

LABELS = (0, 2, 1)
SAMPLES = [DataSample().set_gt_label(label) for label in LABELS]


def build(name: str = 'LinearProbe', **changes):
    return MODELS.build(dict(type=f'beit_mm.{name}', backbone=BACKBONE, num_classes=3) | changes)


def test_features_are_the_blocks_outputs_averaged_and_classifiers_train_as_if_alone():
    model, outputs = build(), []
    images = torch.randn(3, 3, 32, 32)
    for block in model.backbone.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    model(images, SAMPLES, mode='loss')['loss'].backward()
    assert all(p.grad is None and not p.requires_grad for p in model.backbone.parameters())
    for tokens, head in zip(outputs, model.heads.values(), strict=True):
        weight = head.weight.detach().clone().requires_grad_()
        F.cross_entropy(F.linear(tokens[:, 1:].mean(1), weight, head.bias), torch.tensor(LABELS)).backward()
        torch.testing.assert_close(head.weight.grad, weight.grad)
    model.feature = 'cls_mean'
    for feature, tokens in zip(model.features(images), outputs[:3], strict=True):
        torch.testing.assert_close(feature, torch.cat([tokens[:, 0], tokens[:, 1:].mean(1)], 1))


def test_layers_start_and_mode():
    model = build(layers=[-1, 0, 2], feature='cls_mean', num_classes=400).train()  # 2 is the last too
    assert list(model.heads) == ['2', '0'] and model.heads['0'].in_features == 64
    assert not model.backbone.training and model.training and len(model(torch.zeros(1, 3, 32, 32))) == 2
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
    assert number_of_classes(model) == 3
    with pytest.raises(ValueError, match='2 layers'):
        number_of_classes(build(layers=[0, 1]))


def test_accuracy_layer_by_layer():
    metric = LayerAccuracy()
    for label, found in ((0, {4: 0, 5: 0, 6: 1}), (1, {4: 0, 5: 1, 6: 1}), (2, {4: 0, 5: 2, 6: 0})):
        metric.process(None, [dict(gt_label=torch.tensor([label]), layer_labels=found)])
    expected = dict(layer_4=100 / 3, layer_5=100, layer_6=100 / 3, best=100, best_layer=5)
    assert metric.evaluate(3) == pytest.approx({f'accuracy/{name}': value for name, value in expected.items()})


def pooled(patches, queries, value):
    """The published formula: projects each patch, and averages the channels of each query by its own weights."""
    number, dims = queries.shape
    weights = (patches @ queries.T / dims**0.5).softmax(dim=1)  # B, N, Q
    values = (patches @ value.T).unflatten(2, (number, -1))  # B, N, Q, C / Q
    return (weights[..., None] * values).sum(dim=1).flatten(1)


@pytest.mark.parametrize('num_queries', [1, 4])
def test_loss_and_gradients_are_those_of_the_formula(num_queries):
    torch.manual_seed(0)
    model = build('AttentiveProbe', layers=-1, num_queries=num_queries).train()
    (pooling, _, classifier), images = model.heads['2'], torch.randn(3, 3, 32, 32)
    torch.nn.init.normal_(pooling.queries)
    loss = model(images, SAMPLES, mode='loss')['loss']
    loss.backward()
    assert all(parameter.grad is None for parameter in model.backbone.parameters())
    found = [pooling.queries.grad, pooling.value.weight.grad, classifier.weight.grad, classifier.bias.grad]

    with torch.no_grad():
        patches = model.backbone(images)[0][:, 1:].double()
    leaves = [tensor.detach().double().requires_grad_() for tensor in pooling.parameters()]
    leaves += [tensor.detach().double().requires_grad_() for tensor in classifier.parameters()]
    queries, value, weight, bias = leaves
    vectors = pooled(patches, queries, value)
    normalised = (vectors - vectors.mean(0)) / (vectors.var(0, correction=0) + 1e-6).sqrt()
    logits = normalised @ weight.t() + bias
    expected = -F.log_softmax(logits, dim=1)[range(3), LABELS].mean()
    expected.backward()
    torch.testing.assert_close(loss.double(), expected, atol=1e-5, rtol=1e-5)
    for gradient, leaf in zip(found, leaves, strict=True):
        torch.testing.assert_close(gradient.double(), leaf.grad, atol=2e-6, rtol=1e-4)


def test_patches_are_the_blocks_outputs_without_a_norm():
    model, outputs, images = build('AttentiveProbe', layers=[1, 2]).eval(), [], torch.randn(2, 3, 32, 32)
    for block in model.backbone.blocks[1:]:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output))
    for found, tokens in zip(model.features(images), outputs, strict=True):
        assert found.equal(tokens[:, 1:])
