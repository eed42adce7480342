"""Mask classification against transformers' Mask2Former and EoMT, with the same weights, inputs and points."""

import pytest
import torch
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import EomtConfig, EomtForUniversalSegmentation, Mask2FormerConfig
from transformers.models.eomt.modeling_eomt import EomtLoss
from transformers.models.mask2former.modeling_mask2former import Mask2FormerLoss

from beit_mm.registry import MODELS
from beit_mm.segmentation import MaskClassificationHead, SlidingSegmentor

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


def joined(theirs: EomtForUniversalSegmentation) -> SlidingSegmentor:
    """Our segmentor, whose queries join the last two blocks, with the weights of an EoMT without biases of keys."""
    sizes = dict(arch=dict(embed_dims=DIMS, num_layers=4, num_heads=4), img_size=64, num_registers=1)
    backbone = dict(type='beit_mm.BEiTBackbone', **sizes, layer_scale_init=1.0, out_type='featmap')
    sizes = dict(in_channels=DIMS, num_classes=CLASSES, num_queries=QUERIES, num_blocks=2, num_points=POINTS)
    masks = dict(type='beit_mm.MaskClassificationHead', where='backbone', **sizes)
    cfg = dict(mode='slide', crop_size=(64, 64), stride=(64, 64), precision='float32')
    ours = MODELS.build(dict(type='beit_mm.SlidingSegmentor', backbone=backbone, decode_head=masks, test_cfg=cfg))
    copy_mask_module(theirs, ours.decode_head)
    weights, state = theirs.state_dict(), ours.backbone.state_dict()
    state['cls_token'] = weights['embeddings.cls_token']
    state['register_tokens'] = weights['embeddings.register_tokens']
    positions = weights['embeddings.position_embeddings.weight'][None]  # of the patches alone
    state['pos_embed'] = torch.cat([torch.zeros(1, 1, DIMS), positions], dim=1)
    names = {'patch_embed.proj': 'embeddings.patch_embeddings.projection'}
    for block in range(4):
        pairs = {'norm1': 'norm1', 'norm2': 'norm2', 'mlp.fc1': 'mlp.fc1', 'mlp.fc2': 'mlp.fc2'}
        pairs['attn.proj'] = 'attention.out_proj'
        names |= {f'blocks.{block}.{name}': f'layers.{block}.{their}' for name, their in pairs.items()}
        layer, own = f'layers.{block}.attention.', f'blocks.{block}.'
        weights[f'{layer}k_proj.bias'].zero_()
        state[f'{own}attn.qkv.weight'] = torch.cat([weights[f'{layer}{part}_proj.weight'] for part in 'qkv'])
        state |= {f'{own}attn.{part}_bias': weights[f'{layer}{part}_proj.bias'] for part in 'qv'}
        state |= {f'{own}gamma_{part}': weights[f'layers.{block}.layer_scale{part}.lambda1'] for part in (1, 2)}
    state |= {f'{own}.{part}': weights[f'{name}.{part}'] for own, name in names.items() for part in ('weight', 'bias')}
    ours.backbone.load_state_dict(state)
    return ours


def test_queries_in_the_backbone_are_eomt(same_points, monkeypatch):
    """Its results, and in training all losses and gradients, with all queries masked in all blocks."""
    monkeypatch.setattr('beit_mm.segmentation.mask_head.progress_of', lambda: 0.0)
    theirs = eomt()
    ours, images = joined(theirs), torch.randn(3, 3, 64, 64)
    theirs.eval().attn_mask_probs.zero_()
    with torch.no_grad():
        found = theirs(images)
        masks = interpolate(found.masks_queries_logits, (64, 64), mode='bilinear').sigmoid()
        expected = torch.einsum('bqk,bqhw->bkhw', found.class_queries_logits.softmax(dim=-1)[..., :-1], masks)
        torch.testing.assert_close(ours.eval().logits(images), expected, atol=1e-5, rtol=1e-5)
    theirs.train().attn_mask_probs.fill_(1)
    labels = label_maps()
    expected = theirs(images, **masks_of(labels)).loss
    samples = [SegDataSample(gt_sem_seg=PixelData(data=image[None])) for image in labels]
    features = ours.train().extract_feat(images)
    found = sum(ours.decode_head.loss(features, samples, None).values())
    assert found.item() == pytest.approx(expected.item(), rel=1e-6)
    found.backward()
    expected.backward()
    pairs = [
        (ours.decode_head.queries.grad[0], theirs.query.weight.grad),
        (ours.backbone.patch_embed.proj.weight.grad, theirs.embeddings.patch_embeddings.projection.weight.grad),
        (ours.backbone.blocks[3].attn.proj.weight.grad, theirs.layers[3].attention.out_proj.weight.grad),
    ]
    for own, other in pairs:
        torch.testing.assert_close(own, other, atol=1e-5, rtol=1e-4)
