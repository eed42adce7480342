"""Narrow models of other code bases, and ours beside them, all with random weights.

Each task has one form of ours and one call that gives the outputs to compare:

    pretraining     backbone + BEiTMIMHead; logits of all patches of masked images
    classification  backbone in mmpretrain's ImageClassifier; logits
    segmentation    backbone in mmseg's EncoderDecoder; logits of both heads
    features        backbone; tokens after the final norm
"""

from pathlib import Path

import mmpretrain.models  # noqa: F401  (registers)
import mmseg.models  # noqa: F401
import torch
import transformers
from mmpretrain.registry import MODELS as MMPRETRAIN
from timm.models.beit import Beit
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from beit_mm.checkpoint.names import weights_of
from beit_mm.checkpoint.read import read_checkpoint
from beit_mm.registry import MODELS

DIMS, HEADS, PATCH, SIZE = 32, 2, 8, 48
CLASSES, VOCAB = 5, 16
VARIANTS = {
    'vit': dict(abs_pos_embed=True),
    'vit_layer_scale': dict(abs_pos_embed=True, layer_scale_init=0.1),
    'shared': dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1),
    'per_layer': dict(abs_pos_embed=False, rel_pos_bias='per_layer', layer_scale_init=0.1),
}
OUT_INDICES = [0, 1, 2, 3]  # blocks that feed the segmentation heads
SEGMENTATION_DEPTH = 5  # transformers cannot take the last block's output
DEPTH = dict(pretraining=2, classification=2, features=2, segmentation=SEGMENTATION_DEPTH)
# What is no BEiT
RESNET = {f'{name}.weight': torch.ones(2) for name in ('conv1', 'bn1', 'layer1.0.conv1', 'layer1.0.bn1', 'fc')}


def randomise(model: nn.Module, seed: int = 0) -> nn.Module:
    """Every parameter and every statistic random, of a size that keeps activations near 1; in evaluation mode."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith('running_var'):
                tensor.uniform_(0.5, 1.5, generator=generator)
            elif name.endswith('num_batches_tracked'):
                tensor.random_(1, 100, generator=generator)
            elif tensor.is_floating_point() and tensor.ndim:  # not the base of rotary positions
                single = tensor.ndim == 1 or name.endswith(('token', 'tokens', 'pos_embed', 'embeddings', 'table'))
                tensor.normal_(0, 0.5 if single else tensor[0].numel() ** -0.5, generator=generator)
    return model.eval()


def dinov2_layout(path: Path, width: int = 64, depth: int = 2) -> str:
    """Random weights as Meta's DINOv2 with registers has them, for 518 pixels, of narrow blocks."""
    sizes = dict(embed_dim=width, depth=depth, num_heads=1, num_classes=0)
    model = VisionTransformer(518, 14, init_values=0.1, reg_tokens=4, no_embed_class=True, **sizes)
    weights = model.state_dict()
    weights['register_tokens'] = weights.pop('reg_token')
    weights['pos_embed'] = torch.cat([torch.zeros(1, 1, width), weights['pos_embed']], dim=1)
    torch.save(dict(weights, mask_token=torch.zeros(1, width)), path)
    return str(path)


def save_clip(folder: Path) -> transformers.CLIPVisionModelWithProjection:
    """Saves a narrow CLIP of 12 features with random weights, for images of 4 x 4 patches of 7 pixels."""
    sizes = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, projection_dim=12)
    network = transformers.CLIPVisionModelWithProjection(
        transformers.CLIPVisionConfig(image_size=28, patch_size=7, **sizes)
    )
    network.save_pretrained(folder)
    return network.eval()


def images_and_mask(size: int = SIZE) -> tuple[Tensor, Tensor]:
    """Two images and a mask of some of their patches."""
    return torch.randn(2, 3, size, size), torch.rand(2, size // PATCH, size // PATCH) < 0.4


def read(path) -> dict[str, Tensor]:
    """State dict in a file."""
    return weights_of(read_checkpoint(path))


def backbone_config(task: str, variant: str, size: int = SIZE, **changes) -> dict:
    of_task = dict(pretraining=dict(masked_input=True), classification=dict(out_type='avg_featmap'), features={})
    of_task['segmentation'] = dict(out_type='featmap', out_indices=OUT_INDICES)
    arch = dict(embed_dims=DIMS, num_layers=DEPTH[task], num_heads=HEADS)
    sizes = dict(type='beit_mm.BEiTBackbone', arch=arch, img_size=size, patch_size=PATCH)
    return sizes | VARIANTS[variant] | of_task[task] | changes


def ours(task: str, variant: str, size: int = SIZE, seed: int = 1, **changes) -> nn.Module:
    """Our model for a task, with changes of the backbone's config."""
    backbone = backbone_config(task, variant, size, **changes)
    if task == 'pretraining':
        head = dict(type='beit_mm.BEiTMIMHead', embed_dims=DIMS, vocab_size=VOCAB)
        model = MODELS.build(dict(type='beit_mm.BEiTPretrainer', backbone=backbone, head=head))
    elif task == 'classification':
        head = dict(type='mmpretrain.LinearClsHead', num_classes=CLASSES, in_channels=DIMS)
        model = MODELS.build(dict(type='mmpretrain.ImageClassifier', backbone=backbone, head=head))
    elif task == 'segmentation':
        model = segmentor(backbone)
    else:
        model = nn.ModuleDict(dict(backbone=MODELS.build(backbone)))
    return randomise(model, seed)


def segmentor(backbone: dict, dims: int = DIMS, classes: int = CLASSES, auxiliary_channels: int = 24) -> nn.Module:
    """mmseg's UperNet, with BatchNorm in place of SyncBN, which has the same state."""
    norm, levels = dict(type='BN'), dict(in_channels=[dims] * 4, in_index=[0, 1, 2, 3])
    head = dict(num_classes=classes, norm_cfg=norm, align_corners=False)
    auxiliary = dict(in_channels=dims, in_index=2, channels=auxiliary_channels, num_convs=1, concat_input=False)
    return MODELS.build(
        dict(
            type='mmseg.EncoderDecoder',
            backbone=backbone,
            neck=dict(type='mmseg.Feature2Pyramid', embed_dim=dims, norm_cfg=norm),
            decode_head=dict(head, type='mmseg.UPerHead', channels=dims, pool_scales=(1, 2, 3, 6), **levels),
            auxiliary_head=dict(head, type='mmseg.FCNHead', **auxiliary),
            test_cfg=dict(mode='whole'),
        )
    )


@torch.no_grad()
def outputs(model: nn.Module, task: str, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """What a model of ours, or OpenMMLab's in the same form, gives."""
    if task == 'features':
        return [model['backbone'](images)[0]]
    if task == 'pretraining':
        head = model.head if hasattr(model.head, 'lm_head') else model.head.cls_head
        return [head(model.backbone(images, mask)[0][:, 1:])]
    if task == 'classification':
        return [model.head(model.backbone(images))]
    maps = model.extract_feat(images)
    return [model.decode_head(maps), model.auxiliary_head(maps)]


def positions(variant: str, *names: str) -> dict:
    """By a library's names for an embedding, a bias in each block, a shared one, and where LayerScale starts."""
    options = VARIANTS[variant]
    kind, scale = options.get('rel_pos_bias'), options.get('layer_scale_init', 0.0)
    return dict(zip(names, (options['abs_pos_embed'], kind == 'per_layer', kind == 'shared', scale), strict=True))


def has_bias_table(variant: str) -> bool:
    return 'rel_pos_bias' in VARIANTS[variant]


def timm_options(task: str, size: int) -> dict:
    is_classifier = task == 'classification'
    sizes = dict(img_size=size, patch_size=PATCH, embed_dim=DIMS, depth=DEPTH[task], num_heads=HEADS)
    return dict(sizes, num_classes=CLASSES if is_classifier else 0, global_pool='avg' if is_classifier else '')


def beit_of_timm(task: str, variant: str, size: int = SIZE, **changes) -> nn.Module:
    names = 'use_abs_pos_emb', 'use_rel_pos_bias', 'use_shared_rel_pos_bias', 'init_values'
    return randomise(Beit(**timm_options(task, size) | positions(variant, *names) | changes))


def timm_peer(task: str, variant: str, size: int = SIZE, **changes) -> nn.Module:
    """The class of timm that our conversion is for."""
    if has_bias_table(variant):
        return beit_of_timm(task, variant, size, **changes)
    scale = dict(init_values=VARIANTS[variant].get('layer_scale_init'))
    return randomise(VisionTransformer(**timm_options(task, size) | scale | changes))


HF_CLASSES = dict(
    pretraining=transformers.BeitForMaskedImageModeling,
    features=transformers.BeitModel,
    classification=transformers.BeitForImageClassification,
    segmentation=transformers.BeitForSemanticSegmentation,
)


def hf_peer(task: str, variant: str, size: int = SIZE, **changes) -> nn.Module:
    # Its number i means the output of our block i - 2.
    of_task = dict(
        pretraining=dict(use_mask_token=True, vocab_size=VOCAB),
        features=dict(use_mean_pooling=False),
        classification=dict(num_labels=CLASSES),
        segmentation=dict(num_labels=CLASSES, out_indices=[block + 2 for block in OUT_INDICES], auxiliary_channels=24),
    )
    sizes = dict(hidden_size=DIMS, num_hidden_layers=DEPTH[task], num_attention_heads=HEADS, intermediate_size=4 * DIMS)
    kinds = 'absolute_position_embeddings', 'relative_position_bias', 'shared_relative_position_bias'
    names = *(f'use_{kind}' for kind in kinds), 'layer_scale_init_value'
    images = dict(image_size=size, patch_size=PATCH, layer_norm_eps=1e-6)
    options = sizes | positions(variant, *names) | images | of_task[task] | changes
    return randomise(HF_CLASSES[task](transformers.BeitConfig(**options)))


def mmpretrain_peer(task: str, variant: str, size: int = SIZE, **changes) -> nn.Module:
    arch = dict(embed_dims=DIMS, num_layers=DEPTH[task], num_heads=HEADS, feedforward_channels=4 * DIMS)
    names = 'use_abs_pos_emb', 'use_rel_pos_bias', 'use_shared_rel_pos_bias', 'layer_scale_init_value'
    backbone, head = 'BEiTViT', dict(type='LinearClsHead', num_classes=CLASSES, in_channels=DIMS)
    if task == 'pretraining':
        backbone = 'BEiTPretrainViT'
        head = dict(type='BEiTV1Head', embed_dims=DIMS, num_embed=VOCAB, loss=dict(type='CrossEntropyLoss'))
    options = dict(arch=arch, img_size=size, patch_size=PATCH) | positions(variant, *names) | changes
    model = nn.Module()  # what its algorithms are, less the tokenizer
    model.backbone = MMPRETRAIN.build(dict(type=backbone, **options))
    model.head = MMPRETRAIN.build(head)
    return randomise(model)


def mmseg_peer(task: str, variant: str, size: int = SIZE, **changes) -> nn.Module:
    sizes = dict(img_size=size, patch_size=PATCH, embed_dims=DIMS, num_layers=DEPTH[task], num_heads=HEADS)
    norm = dict(type='LN', eps=1e-6)
    return randomise(segmentor(dict(sizes, type='mmseg.BEiT', out_indices=OUT_INDICES, norm_cfg=norm) | changes))


PEERS = dict(timm=timm_peer, hf=hf_peer, mmpretrain=mmpretrain_peer, mmseg=mmseg_peer)


@torch.no_grad()
def peer_outputs(model: nn.Module, task: str, images: Tensor, mask: Tensor | None = None) -> list[Tensor]:
    """What a peer gives, in the order of `outputs`."""
    if isinstance(model, Beit | VisionTransformer):
        return [model(images)]
    if not isinstance(model, transformers.PreTrainedModel):
        return outputs(model, task, images, mask)
    if task == 'pretraining':
        return [model(images, bool_masked_pos=mask.flatten(1)).logits]
    if task != 'segmentation':
        return [model(images)['last_hidden_state' if task == 'features' else 'logits']]
    auxiliary = []
    handle = model.auxiliary_head.register_forward_hook(lambda module, inputs, output: auxiliary.append(output))
    logits = model(images).logits
    handle.remove()
    return [logits, *auxiliary]


def assert_same_outputs(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        assert theirs.std() > 0.01  # something to compare
        torch.testing.assert_close(mine, theirs, atol=1e-4, rtol=1e-4)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Bitwise equal state dicts."""
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
