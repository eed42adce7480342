"""Weights from every format into every other; with them the peers' own classes and our models give the same outputs,
and the same gradients."""

import itertools
import json

import numpy as np
import peers
import pytest
import torch
import transformers
from peers import HEADS, SIZE, VARIANTS, assert_equal, assert_same_outputs, images_and_mask, ours, outputs

from beit_mm.apis.inferencers import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.formats import FORMATS
from beit_mm.checkpoint.names import convert_state_dict, task_of
from beit_mm.checkpoint.read import CheckpointError

TASKS = tuple(peers.DEPTH)
LOSSES = {  # format and task: what has no place there, as beginnings of names; all else is held without loss
    ('timm', 'pretraining'): ('backbone.mask_token', 'head.lm_head.'),
    ('timm', 'segmentation'): ('neck.', 'decode_head.', 'auxiliary_head.'),
    ('mmseg', 'pretraining'): ('backbone.mask_token', 'backbone.norm.', 'head.lm_head.'),
    ('mmseg', 'classification'): ('backbone.fc_norm.', 'head.fc.'),
    ('mmseg', 'features'): ('backbone.norm.',),
}
CLASSES_OF = dict(  # the tasks that a library has a class for
    hf=TASKS, timm=('classification', 'features'), mmpretrain=('pretraining', 'classification'), mmseg=('segmentation',)
)
CASES = [
    (library, task, variant)
    for library, tasks in CLASSES_OF.items()
    for task, variant in itertools.product(tasks, VARIANTS)
    if library != 'mmseg' or variant == 'per_layer'  # which is all that mmseg has
]
LARGE, SMALL = 192, 112  # 24 x 24 and 14 x 14 patches, as 384 and 224 pixels with patches of 16


@pytest.mark.parametrize(('task', 'variant'), list(itertools.product(TASKS, VARIANTS)))
def test_there_and_back_and_from_each_format_into_every_other(task, variant):
    """What has no place in a format is named, what it would compute otherwise is refused."""
    state = ours(task, variant).state_dict()
    assert task_of(state) == task
    names, files = list(state), {}
    for target in FORMATS:
        if target == 'mmseg' and 'backbone.pos_embed' in state:
            with pytest.raises(CheckpointError, match='position embedding'):
                convert_state_dict(state, target=target)
            continue
        lost = [name for name in state if name.startswith(LOSSES.get((target, task), ('none',)))]
        assert len(lost) >= len(LOSSES.get((target, task), ()))
        there, dropped, _ = convert_state_dict(state, target=target)
        assert sorted(dropped) == sorted(lost)
        expected = {name: tensor for name, tensor in state.items() if name not in lost}
        if target == 'mmseg' and variant == 'shared':  # it has a table in every block
            table = expected.pop('backbone.rel_pos_bias.relative_position_bias_table')
            blocks = range(peers.DEPTH[task])
            expected |= {f'backbone.blocks.{i}.attn.relative_position_bias_table': table for i in blocks}
        elif not lost:
            files[target] = there
        openmmlab = 'mmseg' if task == 'segmentation' else 'mmpretrain'  # they have the same names
        detected = dict(
            timm='unilm' if peers.has_bias_table(variant) else 'timm', mmseg=openmmlab, mmpretrain=openmmlab
        ).get(target, target)
        for prefix in ('', 'module.'):  # of the wrapper around a model that trains on several devices
            back = convert_state_dict({prefix + name: tensor for name, tensor in there.items()})
            assert back.source == detected
            assert_equal(back.state_dict, expected)
        assert_equal(convert_state_dict(there, source=target).state_dict, expected)
    for source, target in itertools.permutations(files, 2):
        before = list(files[source])
        assert_equal(convert_state_dict(files[source], target=target).state_dict, files[target])
        assert list(files[source]) == before  # what is given is not changed
    assert list(state) == names


def saved(peer, folder) -> dict:
    """The weights in a file of the peer's library, or of a script that uses it."""
    if isinstance(peer, transformers.PreTrainedModel):
        peer.save_pretrained(folder)
        return peers.read(folder / 'model.safetensors')
    weights = peer.state_dict()
    torch.save(dict(state_dict=weights, meta=dict(epoch=1)) if hasattr(peer, 'backbone') else weights, folder / 'w.pth')
    return peers.read(folder / 'w.pth')


def load_all(model, weights: dict) -> None:
    """Loads a file's weights into a model of ours; every name has its place, on both sides."""
    translation = convert_state_dict(weights)
    assert translation.dropped_keys == []
    assert not any(model.load_state_dict(translation.state_dict, strict=True))
    report = model.get_submodule('backbone').load_report
    assert report.unexpected_keys == [] and report.missing_keys == [] and not report.resized


def through_hub_folder(model, task: str, tmp_path):
    """Our file converted to a folder, and the model that transformers makes of it."""
    architecture = dict(num_heads=HEADS, out_indices=model.get_submodule('backbone').out_indices)
    torch.save(dict(state_dict=model.state_dict(), meta=dict(architecture=architecture)), tmp_path / 'ours.pth')
    conversion = convert_checkpoint(tmp_path / 'ours.pth', tmp_path / 'hub', to='hf')
    assert conversion.dropped_keys == [] and conversion.task == task
    kind = peers.HF_CLASSES[task]
    if task == 'classification':
        assert type(transformers.AutoModelForImageClassification.from_pretrained(tmp_path / 'hub')) is kind
    # A model of features has no pooler, and its class no config for that.
    options = dict(add_pooling_layer=False) if task == 'features' else {}
    peer, info = kind.from_pretrained(tmp_path / 'hub', output_loading_info=True, local_files_only=True, **options)
    assert not any(info.values()), info
    return peer.eval()


def in_the_peers_class(library: str, model, task: str, variant: str, tmp_path, size: int = SIZE, **options):
    """The peer with the weights of a model of ours."""
    if library == 'hf':
        return through_hub_folder(model, task, tmp_path)
    peer = peers.PEERS[library](task, variant, size, **options)
    weights, dropped, _ = convert_state_dict(model.state_dict(), target=library)
    assert dropped == []
    peer.load_state_dict(weights, strict=True)
    return peer


@pytest.mark.parametrize(('library', 'task', 'variant'), CASES)
def test_a_peers_file_in_our_model_and_ours_in_the_peers_class(library, task, variant, tmp_path):
    peer, model = peers.PEERS[library](task, variant), ours(task, variant)
    images, mask = images_and_mask()
    loaded = in_the_peers_class(library, model, task, variant, tmp_path)
    expected = outputs(model, task, images, mask)
    assert_same_outputs(peers.peer_outputs(loaded, task, images, mask), expected)
    load_all(model, saved(peer, tmp_path))
    assert_same_outputs(outputs(model, task, images, mask), peers.peer_outputs(peer, task, images, mask))


@pytest.mark.parametrize('library', ['timm', 'hf', 'mmpretrain'])
@pytest.mark.parametrize('variant', ['vit', 'per_layer'])
def test_classification_by_the_class_token(library, variant, tmp_path):
    model, (images, _) = ours('classification', variant, out_type='cls_token'), images_and_mask()
    expected = outputs(model, 'classification', images)
    options = dict(timm=dict(global_pool='token'), mmpretrain=dict(out_type='cls_token', final_norm=True), hf={})
    peer = in_the_peers_class(library, model, 'classification', variant, tmp_path, **options[library])
    assert_same_outputs(peers.peer_outputs(peer, 'classification', images), expected)
    back = ours('classification', variant, seed=2, out_type='cls_token')
    load_all(back, saved(peer, tmp_path))
    assert_same_outputs(outputs(back, 'classification', images), expected)


@pytest.mark.parametrize(
    ('source', 'target', 'variant'), [('timm', 'hf', 'per_layer'), ('hf', 'timm', 'vit'), ('timm', 'hf', 'shared')]
)
def test_weights_that_we_resized_in_a_peer_built_larger(source, target, variant, tmp_path):
    weights = saved(peers.PEERS[source]('classification', variant, SMALL), tmp_path)
    model, (images, _) = ours('classification', variant, LARGE), images_and_mask(LARGE)
    model.load_state_dict(convert_state_dict(weights).state_dict, strict=True)
    assert set(model.backbone.load_report.resized.values()) == {'14 x 14 -> 24 x 24'}
    expected = outputs(model, 'classification', images)
    peer = in_the_peers_class(target, model, 'classification', variant, tmp_path, LARGE)
    assert_same_outputs(peers.peer_outputs(peer, 'classification', images), expected)
    # and our small model resamples the same way at run time
    as_trained = ours('classification', variant, SMALL)
    load_all(as_trained, weights)
    assert_same_outputs(outputs(as_trained, 'classification', images), expected)


@pytest.mark.parametrize('variant', VARIANTS)
def test_gradients_of_all_parameters_are_timms(variant):
    model, peer = ours('features', variant)['backbone'], peers.beit_of_timm('features', variant)
    peer.load_state_dict(model.state_dict(), strict=True)
    parameters, others = dict(model.named_parameters()), dict(peer.named_parameters())
    assert set(parameters) == set(others)
    images, _ = images_and_mask()
    outputs = model(images)[0], peer.forward_features(images)
    weight = torch.linspace(-1, 1, outputs[0].numel()).view_as(outputs[0])
    for output in outputs:
        (output * weight).sum().backward()
    for name, parameter in parameters.items():
        expected = others[name].grad
        assert (parameter.grad - expected).norm() < 1e-3 * expected.norm().clamp(min=1e-12), name


def test_mmseg_gets_layer_scale_of_ones_and_no_model_without_a_bias(tmp_path):
    """Its backbone always multiplies by LayerScale and always adds a bias."""
    model = ours('segmentation', 'per_layer', layer_scale_init=None)
    peer = in_the_peers_class('mmseg', model, 'segmentation', 'per_layer', tmp_path)
    images, _ = images_and_mask()
    assert_same_outputs(peers.peer_outputs(peer, 'segmentation', images), outputs(model, 'segmentation', images))
    with pytest.raises(CheckpointError, match='no relative position bias'):
        convert_state_dict(ours('segmentation', 'vit', abs_pos_embed=False).state_dict(), target='mmseg')


@pytest.mark.parametrize('library', ['hf', 'mmseg', 'timm'])
def test_layer_scale_is_folded_into_a_backbone_without(library, tmp_path):
    task = 'classification' if library == 'timm' else 'segmentation'
    peer = peers.PEERS[library](task, 'per_layer')
    model = ours(task, 'per_layer', layer_scale_init=None)
    model.load_state_dict(convert_state_dict(saved(peer, tmp_path)).state_dict, strict=True)
    depth = range(peers.DEPTH[task])
    assert sorted(model.backbone.load_report.folded) == [f'blocks.{i}.gamma_{j}' for i in depth for j in (1, 2)]
    images, _ = images_and_mask()
    assert_same_outputs(outputs(model, task, images), peers.peer_outputs(peer, task, images))


def test_pooled_features_of_transformers(tmp_path):
    """BeitModel by default has the mean of the patches, then the norm."""
    config = peers.hf_peer('features', 'per_layer').config
    config.use_mean_pooling = True
    peer = peers.randomise(transformers.BeitModel(config))
    model, (images, _) = ours('features', 'per_layer', out_type='avg_featmap'), images_and_mask()
    load_all(model, saved(peer, tmp_path))
    with torch.no_grad():
        assert_same_outputs(outputs(model, 'features', images), [peer(images).pooler_output])


def test_a_folder_of_transformers_is_a_classifier_with_the_names_of_its_classes(tmp_path):
    names = [f'animal {label}' for label in range(peers.CLASSES)]
    peer = peers.hf_peer('classification', 'per_layer', id2label=dict(enumerate(names)))
    peer.save_pretrained(tmp_path / 'hub')
    mean, std = [0.5, 0.4, 0.3], [0.2, 0.3, 0.4]
    processor = dict(image_mean=mean, image_std=std, size=dict(height=SIZE, width=SIZE))
    (tmp_path / 'hub/preprocessor_config.json').write_text(json.dumps(processor))
    pixels = np.random.default_rng(0).integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)  # nothing is resized
    (found,) = ClassificationInferencer(tmp_path / 'hub', device='cpu')(pixels)
    images = torch.from_numpy(pixels).permute(2, 0, 1)[None] / 255
    images = (images - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    (expected,) = peers.peer_outputs(peer, 'classification', images)[0].softmax(dim=-1).tolist()
    assert dict(found['scores']) == pytest.approx(dict(enumerate(expected)), abs=1e-4)
    assert found['name'] == names[int(np.argmax(expected))]


@torch.no_grad()
def test_a_folder_of_transformers_is_a_segmentor_of_the_blocks_in_its_config(tmp_path):
    """Blocks 0 to 3 of 5, which are not the released ones; its own logits."""
    peers.hf_peer('features', 'per_layer').save_pretrained(tmp_path)  # its config.json has the last block's number
    assert 'out_indices' not in Checkpoint.open(tmp_path).architecture
    peer = peers.hf_peer('segmentation', 'per_layer')
    peer.save_pretrained(tmp_path)
    model = SegmentationInferencer(tmp_path, device='cpu', mean=127.5, std=127.5).model
    assert model.backbone.out_indices == peers.OUT_INDICES
    model.test_cfg.precision, (images, _) = 'float32', images_and_mask()
    torch.testing.assert_close(model.logits(images), peer(images).logits, atol=1e-5, rtol=1e-4)
    peers.hf_peer('segmentation', 'per_layer', out_indices=[1, 2, 3, 4]).save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match='patch embedding'):
        SegmentationInferencer(tmp_path, device='cpu', mean=127.5, std=127.5)


@pytest.mark.parametrize('blocks', [[0, 1, 2, 3], [1, 2, 3, 4], [0, 1, 2, 4]])
def test_a_segmentor_comes_back_from_transformers_with_its_blocks(blocks, tmp_path, warnings):
    """transformers cannot use the last one, 4, which is said."""
    meta = dict(preprocessing=dict(mean=[127.5] * 3, std=[127.5] * 3, size=[SIZE] * 2))
    state = ours('segmentation', 'per_layer', out_indices=blocks).state_dict()
    torch.save(dict(state_dict=state, meta=meta | dict(architecture=dict(out_indices=blocks))), tmp_path / 'seg.pth')
    convert_checkpoint(tmp_path / 'seg.pth', tmp_path / 'hub', 'hf')
    assert len(warnings()) == (4 in blocks)
    transformers.BeitForSemanticSegmentation.from_pretrained(tmp_path / 'hub').save_pretrained(tmp_path / 'again')
    for folder in ('hub', 'again'):
        convert_checkpoint(tmp_path / folder, tmp_path / 'back.pth')
        assert torch.load(tmp_path / 'back.pth')['meta']['architecture']['out_indices'] == blocks
