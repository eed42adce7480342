"""Weights of timm, transformers, mmpretrain and mmseg compute the same in our models, and ours in theirs."""

import argparse
import json

import numpy as np
import peers
import pytest
import timm
import torch
import transformers
from narrow_segmentors import CROP, narrow_segmentor
from peers import PEERS, VARIANTS, assert_same_outputs, images_and_mask, ours, outputs, peer_outputs, read

from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.features.extractor import CROP_RATIO
from beit_mm.registry import MODELS

# Everything that the peers' classes can be built as
CASES = [
    *[('hf', 'pretraining', variant) for variant in VARIANTS],
    *[('hf', 'classification', variant) for variant in VARIANTS],
    *[('hf', 'features', variant) for variant in VARIANTS],
    *[('hf', 'segmentation', variant) for variant in VARIANTS],
    *[('timm', 'classification', variant) for variant in VARIANTS],
    *[('timm', 'features', variant) for variant in VARIANTS],
    *[('mmpretrain', 'pretraining', variant) for variant in VARIANTS],
    *[('mmpretrain', 'classification', variant) for variant in VARIANTS],
    ('mmseg', 'segmentation', 'per_layer'),
]
LARGE, SMALL = 192, 112  # 24 x 24 and 14 x 14 patches, as 384 and 224 pixels with patches of 16


def saved(peer, folder) -> dict:
    """The weights in a file of the peer's library, or of a script that uses it."""
    if isinstance(peer, transformers.PreTrainedModel):
        peer.save_pretrained(folder)
        return read(folder / 'model.safetensors')
    weights = peer.state_dict()
    torch.save(dict(state_dict=weights, meta=dict(epoch=1)) if hasattr(peer, 'backbone') else weights, folder / 'w.pth')
    return read(folder / 'w.pth')


def load_all(model, weights: dict) -> None:
    """Loads a file's weights into a model of ours; every name has its place, on both sides."""
    translation = convert_state_dict(weights)
    assert translation.dropped_keys == []
    incompatible = model.load_state_dict(translation.state_dict, strict=True)
    assert not incompatible.missing_keys and not incompatible.unexpected_keys
    report = model.get_submodule('backbone').load_report
    assert report.unexpected_keys == [] and report.missing_keys == [] and not report.resized


@pytest.mark.parametrize(('library', 'task', 'variant'), CASES)
def test_a_peers_file_in_our_model_and_ours_in_the_peers_class(library, task, variant, tmp_path):
    peer, model = PEERS[library](task, variant), ours(task, variant)
    images, mask = images_and_mask()
    expected = outputs(model, task, images, mask)
    if library == 'hf':
        loaded = through_hub_folder(model, task, tmp_path)
    else:
        loaded = PEERS[library](task, variant)
        weights, dropped, _ = convert_state_dict(model.state_dict(), target=library)
        assert dropped == []
        loaded.load_state_dict(weights, strict=True)
    assert_same_outputs(peer_outputs(loaded, task, images, mask), expected)
    load_all(model, saved(peer, tmp_path))
    assert_same_outputs(outputs(model, task, images, mask), peer_outputs(peer, task, images, mask))


def through_hub_folder(model, task: str, tmp_path):
    """Our file converted to a folder, and the model that transformers makes of it."""
    backbone = model.get_submodule('backbone')
    architecture = dict(num_heads=peers.HEADS, out_indices=backbone.out_indices)
    torch.save(dict(state_dict=model.state_dict(), meta=dict(architecture=architecture)), tmp_path / 'ours.pth')
    conversion = convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'hub', to='hf')
    assert conversion.dropped_keys == [] and conversion.task == task
    # A model of features has no pooler, and its class no config for that.
    options = dict(add_pooling_layer=False) if task == 'features' else {}
    peer, info = peers.HF_CLASSES[task].from_pretrained(
        tmp_path / 'hub', output_loading_info=True, local_files_only=True, **options
    )
    assert not any(info.values()), info
    return peer.eval()


def test_transformers_finds_the_class_by_itself(tmp_path):
    through_hub_folder(ours('classification', 'per_layer'), 'classification', tmp_path)
    found = transformers.AutoModelForImageClassification.from_pretrained(tmp_path / 'hub', local_files_only=True)
    assert type(found) is transformers.BeitForImageClassification
    assert found.config.num_labels == peers.CLASSES


@pytest.mark.parametrize('library', ['timm', 'hf', 'mmpretrain'])
@pytest.mark.parametrize('variant', VARIANTS)
def test_classification_by_the_class_token(library, variant, tmp_path):
    model = ours('classification', variant, out_type='cls_token')
    images, _ = images_and_mask()
    expected = outputs(model, 'classification', images)
    if library == 'hf':
        peer = through_hub_folder(model, 'classification', tmp_path)
    else:
        options = dict(timm=dict(global_pool='token'), mmpretrain=dict(out_type='cls_token', final_norm=True))
        peer = PEERS[library]('classification', variant, **options[library])
        peer.load_state_dict(convert_state_dict(model.state_dict(), target=library).state_dict, strict=True)
    assert_same_outputs(peer_outputs(peer, 'classification', images), expected)
    back = ours('classification', variant, seed=2, out_type='cls_token')
    load_all(back, saved(peer, tmp_path))
    assert_same_outputs(outputs(back, 'classification', images), expected)


# --- at a larger size -----------------------------------------------------------------------------


@pytest.mark.parametrize('target', ['timm', 'hf'])
@pytest.mark.parametrize('source', ['timm', 'hf'])
@pytest.mark.parametrize('variant', ['per_layer', 'vit'])
def test_weights_that_we_resized_in_a_peer_built_larger(source, target, variant, tmp_path):
    small = PEERS[source]('classification', variant, SMALL)
    model = ours('classification', variant, LARGE)
    weights = saved(small, tmp_path)
    model.load_state_dict(convert_state_dict(weights).state_dict, strict=True)
    report = model.backbone.load_report
    assert set(report.resized.values()) == {'14 x 14 -> 24 x 24'}
    assert not report.missing_keys and not report.unexpected_keys
    images, _ = images_and_mask(LARGE)
    expected = outputs(model, 'classification', images)
    if target == 'hf':
        peer = through_hub_folder(model, 'classification', tmp_path)
        assert peer.config.image_size == LARGE
    else:
        peer = peers.timm_peer('classification', variant, LARGE)
        peer.load_state_dict(convert_state_dict(model.state_dict(), target='timm').state_dict, strict=True)
    assert_same_outputs(peer_outputs(peer, 'classification', images), expected)
    # and our small model resamples the same way at run time
    as_trained = ours('classification', variant, SMALL)
    load_all(as_trained, weights)
    assert_same_outputs(outputs(as_trained, 'classification', images), expected)


# --- from one task to the next --------------------------------------------------------------------


def test_from_pretraining_to_mmseg_the_shared_table_is_expanded():
    """mmseg itself cannot read these weights: it has a table in every block, and no final norm."""
    pretrained = ours('pretraining', 'shared')
    weights, dropped, _ = convert_state_dict(pretrained.state_dict(), target='mmseg')
    assert sorted(dropped) == [
        'backbone.mask_token',
        'backbone.norm.bias',
        'backbone.norm.weight',
        'head.lm_head.bias',
        'head.lm_head.weight',
    ]
    peer = peers.mmseg_peer('segmentation', 'per_layer', num_layers=2, out_indices=[0, 1]).backbone
    peer.load_state_dict({name.removeprefix('backbone.'): tensor for name, tensor in weights.items()})
    maps = ours('features', 'shared', out_type='featmap', out_indices=[0, 1]).backbone
    maps.load_state_dict(pretrained.backbone.state_dict(), strict=True)
    images, _ = images_and_mask()
    with torch.no_grad():
        assert_same_outputs(list(peer(images)), list(maps(images)))


def test_mmseg_without_layer_scale_gets_ones():
    """Its backbone always multiplies by LayerScale."""
    model = ours('segmentation', 'per_layer', layer_scale_init=None)
    peer = PEERS['mmseg']('segmentation', 'per_layer')
    peer.load_state_dict(convert_state_dict(model.state_dict(), target='mmseg').state_dict, strict=True)
    images, _ = images_and_mask()
    assert_same_outputs(peer_outputs(peer, 'segmentation', images), outputs(model, 'segmentation', images))


@pytest.mark.parametrize('library', ['hf', 'mmseg', 'timm'])
def test_layer_scale_is_folded_into_a_backbone_without(library, tmp_path):
    task = 'classification' if library == 'timm' else 'segmentation'
    peer = PEERS[library](task, 'per_layer')
    model = ours(task, 'per_layer', layer_scale_init=None)
    model.load_state_dict(convert_state_dict(saved(peer, tmp_path)).state_dict, strict=True)
    assert len(model.backbone.load_report.folded) == 2 * peers.DEPTH[task]
    images, _ = images_and_mask()
    assert_same_outputs(outputs(model, task, images), peer_outputs(peer, task, images))


@pytest.mark.parametrize('variant', ['vit', 'vit_layer_scale'])
def test_a_plain_vit_of_timm(variant):
    """One bias for q, k and v; that of k cancels in the softmax. LayerScale has another name there, as in DeiT-3."""
    peer = peers.randomise(
        timm.models.VisionTransformer(
            img_size=peers.SIZE,
            patch_size=peers.PATCH,
            embed_dim=peers.DIMS,
            depth=2,
            num_heads=peers.HEADS,
            num_classes=peers.CLASSES,
            init_values=VARIANTS[variant].get('layer_scale_init'),
        )
    )
    assert peer.state_dict()['blocks.0.attn.qkv.bias'][peers.DIMS : 2 * peers.DIMS].std() > 0.1
    model = ours('classification', variant, out_type='cls_token')
    load_all(model, peer.state_dict())
    images, _ = images_and_mask()
    with torch.no_grad():
        assert_same_outputs([model.backbone(images)[0]], [peer.forward_features(images)[:, 0]])
        assert_same_outputs(outputs(model, 'classification', images), [peer(images)])


@pytest.mark.parametrize('wrapper', ['bare', 'DeiT', 'DINO'])
def test_public_vits_under_a_segmentation_head(wrapper, tmp_path):
    """As DeiT and DINO publish them: every block's output is that of timm's Transformer, which both share."""
    peer = peers.randomise(
        timm.models.VisionTransformer(
            img_size=peers.SIZE, patch_size=peers.PATCH, embed_dim=peers.DIMS, depth=3, num_heads=peers.HEADS
        )
    )
    weights = {name: tensor for name, tensor in peer.state_dict().items() if not name.startswith('head.')}
    head = {'head.mlp.0.weight': torch.randn(8, peers.DIMS), 'head.last_layer.weight_g': torch.ones(9, 1)}
    teacher = {f'backbone.{name}': tensor for name, tensor in weights.items()} | head
    student = {f'module.{name}': torch.zeros_like(tensor) for name, tensor in teacher.items()}
    args = argparse.Namespace(arch='vit_base', lr=5e-4)  # says nothing of mean and std
    contents = dict(
        bare=weights,
        DeiT=dict(model=peer.state_dict()),
        DINO=dict(student=student, teacher=teacher, epoch=400, args=args, dino_loss=dict(center=torch.zeros(1, 9))),
    )
    torch.save(contents[wrapper], tmp_path / 'vit.pth')
    config = peers.backbone_config('segmentation', 'vit', out_indices=[0, 1, 2])
    config['arch']['num_layers'] = 3
    backbone = MODELS.build(dict(config, init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))))
    backbone.init_weights()
    assert not backbone.load_report.missing_keys and not backbone.load_report.preprocessing
    images, _ = images_and_mask()
    with torch.no_grad():
        expected = peer.forward_intermediates(images, intermediates_only=True)
        for mine, other in zip(backbone.eval()(images), expected, strict=True):
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=1e-5)


def test_pooled_features_of_transformers(tmp_path):
    """BeitModel as it is by default: the mean of the patches, then the norm; and no part of a bigger model."""
    config = peers.hf_peer('features', 'per_layer').config
    config.use_mean_pooling = True
    peer = peers.randomise(transformers.BeitModel(config))
    peer.save_pretrained(tmp_path)
    model = ours('features', 'per_layer', out_type='avg_featmap')
    load_all(model, read(tmp_path / 'model.safetensors'))
    images, _ = images_and_mask()
    with torch.no_grad():
        assert_same_outputs(outputs(model, 'features', images), [peer(images).pooler_output])


def test_a_backbone_of_transformers_with_a_pyramid(tmp_path):
    """BeitBackbone, of object detectors: `beit.` below no head, the pyramid beside it."""
    config = peers.hf_peer('segmentation', 'per_layer').config
    config.add_fpn = True
    peer = transformers.BeitBackbone(config)
    translation = convert_state_dict(saved(peer, tmp_path))
    assert translation.dropped_keys == []
    assert {name.split('.')[0] for name in translation.state_dict} == {'backbone', 'neck'}


# --- by inferencers, without a config --------------------------------------------------------------


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_folder_of_transformers_is_a_classifier_with_the_names_of_its_classes(variant, tmp_path):
    names = [f'animal {label}' for label in range(peers.CLASSES)]
    peer = peers.hf_peer('classification', variant, id2label=dict(enumerate(names)))
    peer.eval().save_pretrained(tmp_path / 'hub')
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    processor = dict(image_mean=mean, image_std=std, size=dict(height=peers.SIZE, width=peers.SIZE))
    (tmp_path / 'hub/preprocessor_config.json').write_text(json.dumps(processor))
    edge = round(peers.SIZE / CROP_RATIO)  # what the crop is taken from, so that nothing is resized
    pixels = np.random.default_rng(0).integers(0, 256, (edge, edge, 3), dtype=np.uint8)
    (found,) = ClassificationInferencer(tmp_path / 'hub', device='cpu')(pixels)
    first = round((edge - peers.SIZE) / 2)
    crop = torch.from_numpy(pixels[first : first + peers.SIZE, first : first + peers.SIZE]).permute(2, 0, 1) / 255
    images = (crop[None] - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    with torch.no_grad():
        expected = peer(images).logits.softmax(dim=-1)[0]
    for label, score in found['scores']:
        assert abs(score - expected[label].item()) < 1e-4
    assert found['name'] == names[int(expected.argmax())]
    convert_checkpoint(tmp_path / 'hub', tmp_path / 'again', to='hf')  # and there they stay
    labels = json.loads((tmp_path / 'again/config.json').read_text())['id2label']
    assert list(labels.values()) == names

    (tmp_path / 'hub/preprocessor_config.json').unlink()
    with pytest.raises(CheckpointError, match='does not say how its images were normalised'):
        ClassificationInferencer(tmp_path / 'hub', device='cpu')


def test_an_upernet_of_mmseg_is_a_segmentor_whatever_it_says(tmp_path):
    model = narrow_segmentor('bias', 'mmseg.UPerHead')  # head and neck are mmseg's own
    preprocessing = dict(mean=[127.5] * 3, std=[127.5] * 3, size=[CROP, CROP])
    meta = dict(preprocessing=preprocessing, architecture=dict(num_heads=4, out_indices=[0, 1, 2, 3]))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'bare.pth')
    segment = SegmentationInferencer(tmp_path / 'bare.pth', device='cpu')
    pixels = np.random.default_rng(0).integers(0, 256, (CROP, 90, 3), dtype=np.uint8)
    (found,) = segment(pixels)
    images = (torch.from_numpy(pixels).permute(2, 0, 1)[None].float() - 127.5) / 127.5
    with torch.no_grad():
        expected = model.inference(images).argmax(dim=1)[0]
    assert (torch.from_numpy(found['labels']) == expected).float().mean() > 0.99  # windows of bfloat16 here
    with pytest.raises(CheckpointError, match='holds no config with tta_model'):
        SegmentationInferencer(tmp_path / 'bare.pth', device='cpu', multi_scale=True)
    plain = {name: tensor for name, tensor in model.state_dict().items() if 'fpn_bottleneck' not in name}
    torch.save(dict(state_dict=plain, meta=meta), tmp_path / 'other.pth')
    with pytest.raises(CheckpointError, match="as a segmentor lacks 'decode_head.fpn_bottleneck"):
        SegmentationInferencer(tmp_path / 'other.pth', device='cpu')
