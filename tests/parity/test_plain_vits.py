"""Plain ViTs of other code bases, in every layout that they are published in: our backbone computes their features."""

import re

import pytest
import timm
import torch
import transformers
from peers import randomise
from timm.layers import resample_abs_pos_embed
from timm.layers.patch_embed import resample_patch_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor
from torch.nn.functional import interpolate

from beit_mm import ClassificationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.names import ARCHITECTURES, convert_state_dict
from beit_mm.errors import CheckpointError
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.models.vit import BEiTBackbone
from beit_mm.positions import resize_patch_embedding
from beit_mm.registry import MODELS

DIMS, DEPTH, PATCH, SIZE = 128, 3, 14, 84
SHAPES = [(SIZE, SIZE), (140, 140), (70, 126)]


def timm_vit(size: int | tuple = SIZE, **options) -> VisionTransformer:
    sizes = dict(embed_dim=DIMS, depth=DEPTH, num_heads=DIMS // 64, patch_size=PATCH, img_size=size)
    return randomise(VisionTransformer(**sizes, num_classes=7, **options))


def resized(positions: Tensor, shape: tuple[int, int], author: str) -> Tensor:
    """A position embedding (1, rows, DIMS) for another image size, as the authors' code resizes it."""
    grid, before = [side // PATCH for side in shape], SIZE // PATCH
    prefix = positions.shape[1] - before**2
    if author == 'timm':
        return resample_abs_pos_embed(positions, grid, num_prefix_tokens=prefix)
    if grid == [before, before]:
        return positions
    patches = positions[:, prefix:].unflatten(1, (before, before)).permute(0, 3, 1, 2)
    if author == 'dino':  # DINO and DINOv2: interpolate_pos_encoding
        patches = interpolate(patches, scale_factor=[(side + 0.1) / before for side in grid], mode='bicubic')
    else:  # MAE: util/pos_embed.py; DeiT: main.py; DINOv2 with registers is antialiased
        patches = interpolate(patches, grid, mode='bicubic', antialias=author == 'registers')
    return torch.cat([positions[:, :prefix], patches.flatten(2).transpose(1, 2)], dim=1)


def timm_features(options: dict, shape: tuple[int, int], images: Tensor, author: str = 'timm') -> list[Tensor]:
    """Patches after each block, at another size with the position embedding of the author's code."""
    weights, peer = timm_vit(**options).state_dict(), timm_vit(shape, **options)
    peer.load_state_dict(weights | dict(pos_embed=resized(weights['pos_embed'], shape, author)))
    return peer.forward_intermediates(images, intermediates_only=True)


HF = {
    'ViT': (transformers.ViTModel, transformers.ViTConfig, {}),
    'ViT with a classifier': (transformers.ViTForImageClassification, transformers.ViTConfig, {}),
    'ViT without bias of queries, keys and values': (
        transformers.ViTModel,
        transformers.ViTConfig,
        dict(qkv_bias=False),
    ),
    'ViTMAE': (
        transformers.ViTMAEForPreTraining,
        transformers.ViTMAEConfig,
        dict(decoder_hidden_size=64, decoder_num_hidden_layers=1, mask_ratio=0.0),
    ),
    'DeiT': (transformers.DeiTModel, transformers.DeiTConfig, {}),
    'DINOv2 with a classifier': (transformers.Dinov2ForImageClassification, transformers.Dinov2Config, {}),
    'DINOv2 with registers': (
        transformers.Dinov2WithRegistersModel,
        transformers.Dinov2WithRegistersConfig,
        dict(num_register_tokens=4),
    ),
}


def hf_vit(name: str, heads: int = 4, **changes):
    """Heads of 32 channels, which only config.json tells."""
    kind, config, options = HF[name]
    sizes = dict(hidden_size=DIMS, intermediate_size=4 * DIMS, num_hidden_layers=DEPTH, num_attention_heads=heads)
    # google's and Meta's ViTs were trained with this epsilon; the configs of some copies say 1e-12
    images = dict(image_size=SIZE, patch_size=PATCH, layer_norm_eps=1e-6)
    return randomise(kind(config(**sizes, **images, **options, **changes)))


def hf_features(peer, shape: tuple[int, int], images: Tensor) -> list[Tensor]:
    encoder = getattr(peer, getattr(peer, 'base_model_prefix', ''), peer)
    resampled = {} if 'Dinov2' in type(peer).__name__ else dict(interpolate_pos_encoding=True)
    if 'MAE' in type(peer).__name__:  # it shuffles the patches
        count = shape[0] * shape[1] // PATCH**2
        resampled['noise'] = torch.arange(count).float()[None].expand(len(images), -1)
    states = encoder(images, output_hidden_states=True, **resampled).hidden_states[1:]
    grid = [side // PATCH for side in shape]
    return [x[:, -grid[0] * grid[1] :].transpose(1, 2).unflatten(2, grid) for x in states]


def meta_dinov2(registers: int) -> dict:
    """Meta's own names and shapes, of weights in timm's: each token has a position except for the registers."""
    weights = timm_vit(**TIMM['DINOv2 with registers' if registers else 'DINOv2']).state_dict()
    if registers:
        weights['register_tokens'] = weights.pop('reg_token')
        first_row = torch.linspace(-1, 1, DIMS).view(1, 1, DIMS)
        weights['cls_token'] = weights['cls_token'] - first_row
        weights['pos_embed'] = torch.cat([first_row, weights['pos_embed']], dim=1)
    return without_head(weights) | dict(mask_token=torch.zeros(1, DIMS))


def without_head(weights: dict) -> dict:
    return {name: part for name, part in weights.items() if not name.startswith('head')}


def prefixed(prefix: str, weights: dict) -> dict:
    return {prefix + name: part for name, part in weights.items()}


def mae_pretraining() -> dict:
    decoder = dict(mask_token=torch.zeros(1, 1, 64), decoder_pos_embed=torch.zeros(1, 37, 64))
    decoder |= {'decoder_embed.weight': torch.zeros(64, DIMS), 'decoder_blocks.0.norm1.weight': torch.ones(64)}
    return without_head(timm_vit().state_dict()) | decoder


def in_groups_of_blocks(weights: dict) -> dict:
    """DINOv2's training keeps the index of a block behind the index of its group."""
    groups = {f'blocks.{i}.': f'blocks.{i // 2}.{i}.' for i in range(DEPTH)}
    return {groups.get(name[:9], name[:9]) + name[9:]: part for name, part in weights.items()}


def wrong(weights: dict) -> dict:
    return {name: torch.full_like(part, 9.0) for name, part in weights.items()}


TIMM = {
    'ViT': {},
    'mean of the patches': dict(global_pool='avg', fc_norm=True),
    'DeiT-3, no position at the class token': dict(no_embed_class=True, init_values=0.1),
    'DINOv2': dict(init_values=0.1),
    'DINOv2 with registers': dict(init_values=0.1, reg_tokens=4, no_embed_class=True),
    'registers with positions': dict(reg_tokens=4),
}
PLAIN = timm_vit().state_dict()
FILES = {  # layout: how the truth is built, the content of its file, and who resizes its positions, if not timm
    **{f'timm, {name}': (options, timm_vit(**options).state_dict) for name, options in TIMM.items()},
    'MAE, pretraining': ({}, lambda: dict(model=mae_pretraining()), 'mae'),
    'DINO, teacher and student': (
        {},
        lambda: dict(
            teacher=prefixed('backbone.', without_head(PLAIN)) | {'head.mlp.0.weight': torch.ones(8, DIMS)},
            student=prefixed('module.backbone.', wrong(without_head(PLAIN))),
        ),
        'dino',
    ),
    'DINO, student': ({}, lambda: dict(student=prefixed('module.backbone.', without_head(PLAIN))), 'dino'),
    'dino_deitsmall16_pretrain': ({}, lambda: without_head(PLAIN), 'dino'),
    'Meta, DINOv2': (TIMM['DINOv2'], lambda: meta_dinov2(0), 'dino'),
    'Meta, DINOv2 with registers': (TIMM['DINOv2 with registers'], lambda: meta_dinov2(4), 'registers'),
    'Meta, DINOv2 in training': (
        TIMM['DINOv2'],
        lambda: dict(teacher=prefixed('backbone.', in_groups_of_blocks(meta_dinov2(0)))),
        'dino',
    ),
    'Lightning, backbone and head': (
        {},
        lambda: dict(state_dict=prefixed('net.backbone.', without_head(PLAIN)) | {'head.weight': torch.ones(3, DIMS)}),
    ),
    'teacher beside student': (
        {},
        lambda: prefixed('teacher.backbone.', PLAIN) | prefixed('student.backbone.', wrong(PLAIN)),
    ),
    'moving average of timm': ({}, lambda: dict(state_dict=wrong(PLAIN), state_dict_ema=PLAIN)),
    'moving average of DeiT': ({}, lambda: dict(model=wrong(PLAIN), model_ema=PLAIN), 'deit'),
    'moving average': ({}, lambda: dict(model=wrong(PLAIN), ema=PLAIN), 'deit'),
}


def deit_distilled(shape: tuple[int, int] = (SIZE, SIZE)):
    """timm's model of the released DeiT with a distillation token."""
    sizes = dict(embed_dim=DIMS, depth=DEPTH, num_heads=DIMS // 64, patch_size=PATCH, img_size=shape)
    return randomise(timm.models.deit.VisionTransformerDistilled(**sizes, qkv_bias=False))


@torch.no_grad()
def assert_features(path, expected: dict[tuple[int, int], list[Tensor]], images: dict) -> None:
    """Inner blocks, the last one, at the file's size, at another and as a rectangle."""
    arguments = Checkpoint.open(path).backbone_arguments()
    blocks = range(arguments['arch']['num_layers'])
    backbone = BEiTBackbone(**arguments | dict(out_indices=blocks, out_type='featmap'))
    backbone.load_state_dict(Checkpoint.open(path).state_dict)
    backbone.eval()
    assert not backbone.load_report.missing_keys and not backbone.load_report.resized
    for shape, features in expected.items():
        for found, truth in zip(backbone(images[shape]), features, strict=True):
            assert truth.std() > 0.1
            torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope='module')
def images() -> dict:
    torch.manual_seed(0)
    return {shape: torch.randn(2, 3, *shape) for shape in SHAPES}


@pytest.mark.parametrize('layout', FILES)
@torch.no_grad()
def test_a_layout_of_a_plain_vit(layout, images, tmp_path):
    options, content, *author = FILES[layout]
    path = tmp_path / f'{layout if layout.startswith("dino_") else "vit"}.pth'
    torch.save(content(), path)
    expected = {shape: timm_features(options, shape, images[shape], *author) for shape in SHAPES}
    assert_features(path, expected, images)
    convert_checkpoint(path, tmp_path / 'ours.pth')
    assert_features(tmp_path / 'ours.pth', expected, images)


@pytest.mark.parametrize('name', HF)
@torch.no_grad()
def test_a_folder_of_transformers(name, images, tmp_path):
    peer = hf_vit(name)
    peer.save_pretrained(tmp_path / 'hub')
    expected = {shape: hf_features(peer, shape, images[shape]) for shape in SHAPES}
    assert_features(tmp_path / 'hub', expected, images)


@torch.no_grad()
def test_a_distilled_deit(images, tmp_path):
    peers = {shape: deit_distilled(shape) for shape in SHAPES}
    weights = deit_distilled().state_dict()
    torch.save(dict(model=weights), tmp_path / 'deit.pth')
    for shape, peer in peers.items():
        peer.load_state_dict(weights | dict(pos_embed=resized(weights['pos_embed'], shape, 'deit')))
    expected = {
        shape: peer.forward_intermediates(images[shape], intermediates_only=True) for shape, peer in peers.items()
    }
    assert_features(tmp_path / 'deit.pth', expected, images)
    backbone, shape = BEiTBackbone.from_checkpoint(tmp_path / 'deit.pth'), (SIZE, SIZE)
    expected = peers[shape].forward_features(images[shape])
    torch.testing.assert_close(backbone(images[shape])[0], expected, atol=1e-5, rtol=1e-5)


def of_timm(name: str):
    return lambda: timm.create_model(name, **({} if 'swin' in name else dict(depth=1))).state_dict()


REFUSED = {  # what is not plain, and the word that names it
    'EVA-02': (of_timm('eva02_tiny_patch14_224'), 'EVA-02'),
    'RoPE-ViT': (of_timm('vit_small_patch16_rope_224'), 'rotary'),
    'RoPE-ViT, learned': (of_timm('vit_small_patch16_rope_mixed_224'), 'rope'),
    'RoPE-ViT, both': (of_timm('vit_small_patch16_rope_mixed_ape_224'), 'rope'),
    'Perception Encoder': (of_timm('vit_pe_core_tiny_patch16_384'), 'norm_pre'),
    'CLIP': (lambda: timm_vit(pre_norm=True).state_dict(), 'norm_pre.weight'),
    'BEiT-3': (of_timm('beit3_base_patch16_224'), 'attn.norm.weight'),
    'SigLIP': (lambda: timm_vit(class_token=False, global_pool='avg').state_dict(), 'ViT'),
    'Swin': (of_timm('swin_tiny_patch4_window7_224'), 'ViT'),
    'two encoders': (lambda: prefixed('image.', PLAIN) | prefixed('depth.', PLAIN), 'image.cls_token'),
}


@pytest.mark.parametrize('case', REFUSED)
def test_another_encoder_is_refused_by_its_part(case, tmp_path):
    content, part = REFUSED[case]
    torch.save(content(), tmp_path / 'other.pth')
    with pytest.raises(CheckpointError, match=part) as error:
        BEiTBackbone.from_checkpoint(tmp_path / 'other.pth')
    assert str(tmp_path / 'other.pth') in str(error.value) and '\n' not in str(error.value)


def test_registers_need_a_backbone_with_registers():
    weights = timm_vit(**TIMM['DINOv2 with registers']).state_dict()
    arch = dict(embed_dims=DIMS, num_layers=DEPTH, num_heads=DIMS // 64)
    with pytest.raises(CheckpointError, match='num_registers'):
        BEiTBackbone(arch, SIZE, PATCH, layer_scale_init=0.1).load_state_dict(weights)


@pytest.mark.slow
def test_heads_of_a_huge_vit_are_not_64_channels_wide(tmp_path):
    """Its width is 20 x 64, but every published one has 16 heads."""
    peer = randomise(
        VisionTransformer(img_size=28, patch_size=14, embed_dim=1280, depth=1, num_heads=16, num_classes=0)
    )
    torch.save(peer.state_dict(), tmp_path / 'huge.pth')
    images = torch.randn(1, 3, 28, 28)
    with torch.no_grad():
        found = BEiTBackbone.from_checkpoint(tmp_path / 'huge.pth')(images)[0]
        torch.testing.assert_close(found, peer.forward_features(images), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('arch', ARCHITECTURES)
def test_named_architectures_are_timms(arch):
    with torch.device('meta'):
        peer = timm.create_model(f'vit_{arch}_patch{14 if arch == "huge" else 16}_224')
    sizes = dict(embed_dims=peer.embed_dim, num_layers=len(peer.blocks), num_heads=peer.blocks[0].attn.num_heads)
    assert ARCHITECTURES[arch] == sizes


@pytest.mark.parametrize(('before', 'after'), [(14, 16), (16, 14), (16, 8)])
def test_a_patch_embedding_of_another_size(before, after):
    weight = torch.randn(DIMS, 3, before, before)
    expected = resample_patch_embed(weight, [after, after])
    torch.testing.assert_close(resize_patch_embedding(weight, after), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize('options', [dict(), dict(init_values=0.1), dict(reg_tokens=4, no_embed_class=True)])
@torch.no_grad()
def test_there_and_back_in_timm(options, images, tmp_path):
    """Also with the registers of DINOv2; only the bias of the keys, which has no effect, is lost."""
    peer = timm_vit(**options)
    torch.save(peer.state_dict(), tmp_path / 'vit.pth')
    convert_checkpoint(tmp_path / 'vit.pth', tmp_path / 'ours.pth')
    convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'back.pth', 'timm')
    back = timm_vit(**options)
    back.load_state_dict(torch.load(tmp_path / 'back.pth'))
    torch.testing.assert_close(back(images[SIZE, SIZE]), peer(images[SIZE, SIZE]), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize('target', ['unilm', 'hf', 'mmpretrain', 'mmseg'])
def test_registers_have_no_place_in_other_formats(target):
    with pytest.raises(CheckpointError, match='registers'):
        convert_state_dict(timm_vit(reg_tokens=4).state_dict(), target=target)


@torch.no_grad()
def test_the_extractor_leaves_registers_out_of_the_patches(images, tmp_path):
    peer = timm_vit(**TIMM['DINOv2 with registers'])
    torch.save(peer.state_dict(), tmp_path / 'vit.pth')
    extractor = FeatureExtractor(tmp_path / 'vit.pth', mean=127.5, std=50.0, device='cpu')
    pixels = images[SIZE, SIZE]
    found = extractor.features(50 * pixels + 127.5, [DEPTH - 1])
    expected = peer.forward_intermediates(pixels, intermediates_only=True)[-1]
    torch.testing.assert_close(found['patches'][:, 0].permute(0, 3, 1, 2), expected, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(found['mean'][:, 0], expected.mean(dim=(2, 3)), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize('name', ['vit_small_patch16_rope_ape_224', 'eva02_enormous_patch14_clip_224'])
def test_what_no_tensor_of_timm_shows_is_refused_by_the_models_name(name, tmp_path):
    """Rotary positions beside learned ones, and norms behind the branches: both have the tensors of a plain ViT."""
    model = timm.create_model(name, embed_dim=DIMS, depth=1, num_heads=2, img_size=56)
    timm.models.save_for_hf(model, tmp_path / 'hub')
    torch.save(dict(arch=name, state_dict=model.state_dict()), tmp_path / 'training.pth')
    for path in (tmp_path / 'hub', tmp_path / 'training.pth'):
        with pytest.raises(CheckpointError, match=name):
            BEiTBackbone.from_checkpoint(path)


def test_a_folder_of_another_encoder_is_refused_by_its_activation(tmp_path):
    """No tensor shows it."""
    hf_vit('DINOv2 with a classifier', hidden_act='relu').save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match='relu'):
        BEiTBackbone.from_checkpoint(tmp_path)


def test_the_head_behind_a_pooling_by_attention_is_no_classifier_of_ours(tmp_path):
    torch.save(timm_vit(global_pool='map').state_dict(), tmp_path / 'vit.pth')
    assert Checkpoint.open(tmp_path / 'vit.pth').task == 'features'


@pytest.mark.parametrize(('grid', 'registers'), [((14, 16), 0), ((10, 20), 4), ((10, 20), 3)])
@torch.no_grad()
def test_a_rectangle_with_as_many_rows_as_a_square(grid, registers, tmp_path, warnings):
    """14 x 16 patches and a class token are 225 rows, as are 15 x 15 patches without one.

    10 x 20 and a class token are 201, as are 14 x 14 and five tokens.
    """
    shape = (grid[0] * PATCH, grid[1] * PATCH)
    peer = timm_vit(shape, reg_tokens=registers, no_embed_class=registers == 4)
    weights, images = without_head(peer.state_dict()), torch.randn(1, 3, *shape)
    if registers == 4:  # as Meta's DINOv2 has it: a row for the class token, but not for the registers
        weights['pos_embed'] = torch.cat([torch.zeros(1, 1, DIMS), weights['pos_embed']], dim=1)
    torch.save(weights, tmp_path / 'bare.pth')
    arch = dict(embed_dims=DIMS, num_layers=DEPTH, num_heads=2)
    for source in (weights, Checkpoint.open(tmp_path / 'bare.pth').state_dict):
        backbone = BEiTBackbone(arch, shape, PATCH, num_registers=registers).eval()
        backbone.load_state_dict(source)
        torch.testing.assert_close(backbone(images)[0], peer.forward_features(images), atol=1e-5, rtol=1e-5)
    square = {0: '15 x 15', 4: '14 x 14'}.get(registers)  # 3 registers with positions leave none
    assert not square or f'{grid[0]} x {grid[1]} patches, not {square}' in warnings()[-1]
    meta = dict(preprocessing=dict(size=list(shape)), architecture=dict(num_heads=2))
    torch.save(dict(state_dict=weights, meta=meta), tmp_path / 'vit.pth')
    found = BEiTBackbone.from_checkpoint(tmp_path / 'vit.pth')(images)[0]
    torch.testing.assert_close(found, peer.forward_features(images), atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_square_with_as_many_patches_as_the_rectangle_is_resized(tmp_path, warnings):
    shape = (4 * PATCH, 9 * PATCH)
    peer, images = timm_vit(), torch.randn(1, 3, *shape)  # 6 x 6
    options = dict(out_type='featmap', interpolate_mode='bicubic_antialias')
    arch = dict(embed_dims=DIMS, num_layers=DEPTH, num_heads=2)
    backbone, copy = (BEiTBackbone(arch, shape, PATCH, **options).eval() for _ in range(2))
    torch.save(peer.state_dict(), tmp_path / 'vit.pth')
    backbone.load_state_dict(Checkpoint.open(tmp_path / 'vit.pth').state_dict)
    assert re.search('vit.pth does not say .* 6 x 6 patches, not 4 x 9', warnings()[-1])
    torch.testing.assert_close(backbone(images)[0], timm_features({}, shape, images)[-1], atol=1e-5, rtol=1e-5)
    copy.load_state_dict(backbone.state_dict())
    assert torch.equal(copy.pos_embed, backbone.pos_embed)
    torch.save(dict(state_dict=prefixed('backbone.', backbone.state_dict())), tmp_path / 'ours.pth')
    copy.load_state_dict(Checkpoint.open(tmp_path / 'ours.pth').state_dict)
    assert torch.equal(copy.pos_embed, backbone.pos_embed)
    assert re.search('ours.pth does not say .* 4 x 9 patches, not 6 x 6', warnings()[-1])


def test_a_classifier_of_mmpretrain_with_two_final_norms_is_refused(tmp_path):
    """What `out_type='avg_featmap'` alone gives; ours and transformers' BEiT would leave out the first norm."""
    sizes = dict(arch=dict(embed_dims=DIMS, num_layers=1, num_heads=2, feedforward_channels=DIMS), img_size=28)
    backbone = dict(type='mmpretrain.VisionTransformer', out_type='avg_featmap', patch_size=PATCH, **sizes)
    head = dict(type='mmpretrain.LinearClsHead', in_channels=DIMS, num_classes=3)
    peer = MODELS.build(dict(type='mmpretrain.ImageClassifier', backbone=backbone, head=head))
    path = tmp_path / 'epoch_1.pth'
    torch.save(dict(state_dict=peer.state_dict(), meta=dict(epoch=1)), path)
    with pytest.raises(CheckpointError, match='norms before and after .*config=PATH'):
        ClassificationInferencer(path, device='cpu', mean=127.5, std=127.5)
    with pytest.raises(CheckpointError, match='norms before and after'):
        convert_checkpoint(path, tmp_path / 'hub', 'hf')
