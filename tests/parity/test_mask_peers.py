"""Mask classification against transformers' Mask2Former and EoMT, with the same weights, inputs and points."""

import pytest
import torch
from torch import Tensor
from transformers import EomtConfig, EomtForUniversalSegmentation, Mask2FormerConfig
from transformers.models.eomt.modeling_eomt import EomtLoss
from transformers.models.mask2former.modeling_mask2former import Mask2FormerLoss

from beit_mm.registry import MODELS
from beit_mm.segmentation import MaskClassificationHead
from beit_mm.segmentation.mask_head import class_scores

CLASSES, QUERIES, DIMS, POINTS = 7, 6, 64, 40
SIZES = dict(num_labels=CLASSES, num_queries=QUERIES, train_num_points=POINTS)
WEIGHTS = dict(class_weight=2.0, mask_weight=5.0, dice_weight=5.0, no_object_weight=0.1)


@pytest.fixture
def same_points(monkeypatch):
    """Every call of torch.rand for points of as many images gives the same points."""
    rand, generator = torch.rand, torch.Generator().manual_seed(0)
    drawn = {}

    def fixed(*shape: int, **options: object) -> Tensor:
        if len(shape) != 3 or shape[-1] != 2:
            return rand(*shape, **options)
        if shape[1] not in drawn:
            drawn[shape[1]] = rand(shape[1], 2, generator=generator)
        return drawn[shape[1]].expand(*shape).clone()

    monkeypatch.setattr(torch, 'rand', fixed)


def head(**changes: object) -> MaskClassificationHead:
    sizes = dict(in_channels=DIMS, num_classes=CLASSES, num_queries=QUERIES, num_blocks=2, num_points=POINTS)
    return MODELS.build(dict(type='beit_mm.MaskClassificationHead', **sizes, **changes))


def label_maps() -> Tensor:
    """An image of five classes, one of two, one of one."""
    rows = [[0, 1, 2, 3, 4], [5, 5, 6, 6, 6], [2, 2, 2, 2, 2]]
    return torch.tensor(rows).repeat_interleave(5, 1)[:, None].repeat(1, 18, 1)[..., :23]


def masks_of(labels: Tensor) -> dict[str, list[Tensor]]:
    """Label maps as transformers takes them."""
    classes = [image.unique() for image in labels]
    masks = [(image == found[:, None, None]).float() for image, found in zip(labels, classes, strict=True)]
    return dict(mask_labels=masks, class_labels=classes)


@pytest.mark.parametrize('loss', [EomtLoss, Mask2FormerLoss])
def test_losses_and_gradients_are_transformers(loss, same_points):
    weights = dict(loss_cross_entropy=2.0, loss_mask=5.0, loss_dice=5.0)
    config = EomtConfig(**SIZES, **WEIGHTS) if loss is EomtLoss else Mask2FormerConfig(**SIZES, **WEIGHTS)
    config.num_labels = CLASSES
    theirs = loss(config, weights)
    generator = torch.Generator().manual_seed(1)
    masks = torch.randn(3, QUERIES, 12, 16, generator=generator).mul(3).requires_grad_()
    classes = torch.randn(3, QUERIES, CLASSES + 1, generator=generator).requires_grad_()
    labels = label_maps()
    found = theirs(masks, classes, **masks_of(labels))
    expected = torch.stack([weight * found[name] for name, weight in weights.items()])
    ours = torch.stack([*head().mask_losses([(masks, classes)], labels).values()])
    torch.testing.assert_close(ours, expected, atol=1e-6, rtol=1e-6)
    gradients = [torch.autograd.grad(value.sum(), (masks, classes)) for value in (ours, expected)]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def copy_mask_module(eomt: EomtForUniversalSegmentation, ours: MaskClassificationHead) -> None:
    """Queries, the last norm, class and mask predictions."""
    state = {'queries': eomt.query.weight[None]}
    names = {'layernorm': 'norm', 'class_predictor': 'class_predictor'}
    names |= {f'mask_head.fc{place + 1}': f'mask_mlp.{2 * place}' for place in range(3)}
    for stage in range(2):
        layers = {'conv1': 0, 'conv2': 2, 'layernorm2d': 3}
        names |= {f'upscale_block.block.{stage}.{name}': f'upscale.{4 * stage + at}' for name, at in layers.items()}
    weights = eomt.state_dict()
    for name, own in names.items():
        state |= {
            f'{own}.{part}': weights[f'{name}.{part}'] for part in ('weight', 'bias') if f'{name}.{part}' in weights
        }
    _, unexpected = ours.load_state_dict(state, strict=False)
    assert not unexpected and len(state) == 21


def eomt(**changes: object) -> EomtForUniversalSegmentation:
    """With random norms too."""
    sizes = dict(hidden_size=DIMS, num_hidden_layers=4, num_attention_heads=4, num_blocks=2, image_size=64)
    config = EomtConfig(**SIZES, **WEIGHTS, **sizes, patch_size=16, num_register_tokens=1, **changes)
    config.num_labels = CLASSES
    model = EomtForUniversalSegmentation(config)
    for name, parameter in model.named_parameters():
        if 'norm' in name or 'lambda1' in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model


@torch.no_grad()
def test_masks_and_classes_are_those_of_eomt():
    theirs, ours = eomt().eval(), head().eval()
    copy_mask_module(theirs, ours)
    x = torch.randn(2, QUERIES + 2 + 16, DIMS)
    expected = theirs.predict(theirs.layernorm(x))
    found = ours.predict_masks(x, (4, 4))
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_scores_are_those_of_mask2former():
    """Its post-processing, of logits as large as the image."""
    from transformers import Mask2FormerImageProcessorPil as Processor

    masks, classes = torch.randn(2, QUERIES, 384, 384), torch.randn(2, QUERIES, CLASSES + 1)
    outputs = type('Outputs', (), dict(masks_queries_logits=masks, class_queries_logits=classes))
    expected = Processor().post_process_semantic_segmentation(outputs)
    assert torch.equal(class_scores(masks, classes).argmax(dim=1), torch.stack(expected))
