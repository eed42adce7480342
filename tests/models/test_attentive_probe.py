"""The attentive probe: patches read by learned queries, gradients in the classifiers only."""

import pytest
import torch
import torch.nn.functional as F
from labelled import BACKBONE
from mmpretrain.structures import DataSample

from beit_mm.registry import MODELS

LABELS = (0, 2, 1)
SAMPLES = [DataSample().set_gt_label(label) for label in LABELS]


def build(**changes):
    return MODELS.build(dict(dict(type='beit_mm.AttentiveProbe', backbone=BACKBONE, num_classes=3), **changes))


def pooled(patches, queries, value):
    """The published formula, one image, one query, one channel at a time."""
    number, dims = queries.shape
    rows = []
    for image in patches:
        channels = []
        for index, query in enumerate(queries):
            scores = torch.stack([query @ patch / dims**0.5 for patch in image])
            weights = scores.exp() / scores.exp().sum()
            for channel in range(index * dims // number, (index + 1) * dims // number):
                channels.append(sum(w * (value[channel] @ patch) for w, patch in zip(weights, image, strict=True)))
        rows.append(torch.stack(channels))
    return torch.stack(rows)


@pytest.mark.parametrize('num_queries', [1, 4])
def test_loss_and_gradients_are_those_of_the_formula(num_queries):
    torch.manual_seed(0)
    model = build(layers=-1, num_queries=num_queries).train()
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


def test_the_last_block_is_normalised_and_inner_ones_are_not():
    model = build(layers=[1, 2]).eval()
    with torch.no_grad():
        model.backbone.norm.weight.fill_(3.0)
        inner, last = model.features(torch.randn(2, 3, 32, 32))
    assert last.std(dim=2).mean() == pytest.approx(3, rel=0.05)
    assert inner.std(dim=2).mean() < 1
