"""Each row of docs/mixing.md: our parts in models and inferencers of mmpretrain and mmseg, and their masks in ours."""

import copy
import itertools
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import ROOT, make_runner, narrow_dino_model, narrow_model
from label_maps import make_label_maps
from labelled import CLASSES, classifier_config, make_images
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose, default_collate
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS as ROOT_MODELS
from mmengine.registry import DefaultScope, Registry
from mmpretrain import FeatureExtractor, ImageClassificationInferencer
from mmpretrain.structures import DataSample
from mmseg import apis
from mmseg.structures import SegDataSample
from narrow_segmentors import SEGMENTOR, narrow_segmentor
from peers import randomise
from PIL import Image
from torch import nn

from beit_mm import ClassificationInferencer, SegmentationInferencer
from beit_mm.checkpoint.description import IMAGENET
from beit_mm.datasets import UnlabeledImages
from beit_mm.engine.checks import check_colours, check_groups
from beit_mm.models.tokenizers.base import map_pixels
from beit_mm.models.vit import BEiTBackbone
from beit_mm.registry import MODELS

DIMS, VOCAB = 32, 16
ARCH = dict(embed_dims=DIMS, num_layers=4, num_heads=4, feedforward_channels=4 * DIMS)
SIZES = dict(arch=ARCH, img_size=32, patch_size=8)
VARIANT = dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1)
OURS = dict(
    backbone=dict(type='beit_mm.BEiTBackbone', masked_input=True, **SIZES, **VARIANT),
    head=dict(type='beit_mm.BEiTMIMHead', embed_dims=DIMS, vocab_size=VOCAB),
    target_generator=dict(type='beit_mm.DALLETokenizer', precision='fp32', hidden=8, vocab_size=VOCAB),
)
THEIRS = dict(
    backbone=dict(type='BEiTPretrainViT', layer_scale_init_value=0.1, **SIZES),
    head=dict(type='BEiTV1Head', embed_dims=DIMS, num_embed=VOCAB, loss=dict(type='CrossEntropyLoss')),
    target_generator=dict(type='DALL-E', n_hid=8, vocab_size=VOCAB),
)
TWO_VIEWS = dict(type='RandomResizedCropAndInterpolationWithTwoPic', size=32, second_size=32)
THEIR_MASK = dict(type='BEiTMaskGenerator', input_size=(4, 4), num_masking_patches=6, min_num_patches=2)
OUR_MASK = dict(type='beit_mm.BlockwiseMask', grid=(4, 4), num_masked=6, min_block=2)
SECOND = dict(second_mean=[-31.875] * 3, second_std=[318.75] * 3)
THEIR_PREPROCESSOR = dict(type='TwoNormDataPreprocessor', to_rgb=True, **IMAGENET, **SECOND)  # of mmpretrain's recipe


@pytest.fixture(autouse=True)
def _in_mmpretrain():
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        yield


@pytest.fixture(scope='module')
def batch(images) -> dict:
    """Images as mmpretrain's recipe prepares them, one with each kind of mask."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        masks = THEIR_MASK, OUR_MASK, dict(type='beit_mm.RandomMask', grid=(4, 4), num_masked=6)
        steps = [dict(type='LoadImageFromFile'), TWO_VIEWS], [dict(type='PackInputs')]
        data = [Compose([*steps[0], mask, *steps[1]])(dict(img_path=str(images / '00.jpg'))) for mask in masks]
        collated = dict(
            inputs=[torch.stack(view) for view in zip(*(sample['inputs'] for sample in data), strict=True)],
            data_samples=[sample['data_samples'] for sample in data],
        )
        return MODELS.build(THEIR_PREPROCESSOR)(collated)


@pytest.fixture(scope='module')
def reference(tmp_path_factory, batch) -> tuple[dict, Path, float]:
    """Weights of mmpretrain's BEiT, the file of its DALL-E, and its loss."""
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = dict(type='BEiT', data_preprocessor=THEIR_PREPROCESSOR, **copy.deepcopy(THEIRS))
        model = randomise(MODELS.build(model))
        path = tmp_path_factory.mktemp('weights') / 'dalle_encoder.pth'
        torch.save(model.target_generator.state_dict(), path)
        with torch.no_grad():
            loss = float(model(**batch, mode='loss')['loss'])
    return model.state_dict(), path, loss


def mixed(names: tuple[str, ...], path: Path) -> dict[str, dict]:
    """Parts of a model: those of `names` are ours."""
    parts = {name: copy.deepcopy(OURS[name] if name in names else THEIRS[name]) for name in OURS}
    file = dict(checkpoint=str(path))
    parts['target_generator'] |= file if 'target_generator' in names else dict(init_cfg=dict(file, type='Pretrained'))
    return parts


def load(model: nn.Module, weights: dict) -> nn.Module:
    """The reference's weights, with the names of its head for ours."""
    if hasattr(model.target_generator, 'init_weights'):
        model.target_generator.init_weights()
    wanted = {name: tensor for name, tensor in weights.items() if not name.startswith('target_generator.')}
    if hasattr(model.head, 'lm_head'):
        wanted = {name.replace('.cls_head.', '.lm_head.'): tensor for name, tensor in wanted.items()}
    missing, unexpected = model.load_state_dict(wanted, strict=False)
    assert not unexpected and not [name for name in missing if not name.startswith('target_generator.')]
    return model.eval()


@pytest.mark.parametrize('ours', [*((name,) for name in OURS), tuple(OURS)], ids='-'.join)
def test_our_parts_in_mmpretrains_beit_have_its_loss(ours, batch, reference):
    weights, path, expected = reference
    parts = mixed(ours, path)
    model = load(MODELS.build(dict(type='BEiT', data_preprocessor=THEIR_PREPROCESSOR, **parts)), weights)
    loss, _ = model.parse_losses(model(**batch, mode='loss'))
    loss.backward()
    assert float(loss) == pytest.approx(expected, rel=1e-5)
    assert model.backbone.mask_token.grad.abs().sum() > 0


V2 = dict(type='beit_mm.BEiTV2Pretrainer', early_layers=1, aggregation_layers=1)
PRETRAINERS = [narrow_model(), narrow_model(**V2), narrow_dino_model()]
THEIR_MASKS = [THEIR_MASK, dict(type='SimMIMMaskGenerator', input_size=32, mask_patch_size=8, model_patch_size=8)]


@pytest.mark.parametrize('mask', THEIR_MASKS)
@pytest.mark.parametrize('model', PRETRAINERS)
def test_mmpretrains_masks_in_our_pipeline(model, mask, images):
    crops = [dict(type='beit_mm.TwoViewRandomResizedCrop', size=32, second_size=32)]
    crops += [dict(type='beit_mm.MultiCrop', size=32, local_size=16, num_local=1)] * ('dino_head' in model)
    pipeline = Compose([dict(type='beit_mm.LoadImage'), *crops, mask, dict(type='beit_mm.PackViews')])
    data = default_collate([pipeline(dict(img_path=str(images / '00.jpg'))) for _ in range(2)])
    assert data['inputs']['mask'].dtype == torch.bool and data['inputs']['mask'].any()
    model = MODELS.build(copy.deepcopy(model))
    model.teacher_temperature = 0.05
    assert all(loss.isfinite() for loss in model(**model.data_preprocessor(data), mode='loss').values())


def test_every_tokenizer_of_ours_is_a_target_generator(batch):
    vae = dict(type='beit_mm.DiscreteVAE', hidden=8, vocab_size=VOCAB, embed_dims=8)
    model = MODELS.build(dict(type='BEiT', **copy.deepcopy(dict(THEIRS, target_generator=vae))))
    assert model(**batch, mode='loss')['loss'].isfinite()
    images, tokenizer = torch.rand(2, 3, 32, 24), model.target_generator
    assert torch.equal(tokenizer(map_pixels(images)).argmax(dim=1), tokenizer.encode(images))


def test_our_backbone_in_mmpretrains_simmim():
    backbone = dict(OURS['backbone'], out_type='featmap')
    neck = dict(type='SimMIMLinearDecoder', in_channels=DIMS, encoder_stride=8)
    head = dict(type='SimMIMHead', patch_size=8, loss=dict(type='PixelReconstructionLoss', criterion='L1'))
    model = MODELS.build(dict(type='SimMIM', backbone=backbone, neck=neck, head=head))
    samples = [DataSample(mask=torch.randint(0, 2, (4, 4))) for _ in range(2)]
    loss = model.loss(torch.rand(2, 3, 32, 32), samples)['loss']
    loss.backward()
    assert loss.isfinite() and model.backbone.mask_token.grad.abs().sum() > 0


@pytest.mark.parametrize('swapped', [False, True])
def test_swapped_colours_are_refused(swapped, images):
    dataset = UnlabeledImages(str(images), pipeline=[dict(type='beit_mm.LoadImage')])
    preprocessor = dict(type='mmseg.SegDataPreProcessor', bgr_to_rgb=swapped)
    for model in (
        classifier(OUR_CLASSIFIER, data_preprocessor=dict(to_rgb=swapped)),
        segmentor(OUR_PYRAMID, data_preprocessor=preprocessor),
    ):
        with pytest.raises(ValueError, match='LoadImage gives RGB') if swapped else nullcontext():
            check_colours(model, dataset)


RECIPE_KEYS = {  # of mmpretrain's recipes for BEiT
    key: dict(decay_mult=0.0) for key in ('.ln', '.bias', 'q_bias', 'v_bias', '.cls_token', '.pos_embed', '.gamma')
}
ADAMW = dict(type='AdamW', lr=1e-3, weight_decay=0.05)
MMPRETRAIN_DECAY = dict(constructor='LearningRateDecayOptimWrapperConstructor')
OUR_DECAY = dict(constructor='beit_mm.BEiTOptimWrapperConstructor', paramwise_cfg=dict(layer_decay_rate=0.65))


def classifier(backbone: dict, **changes) -> nn.Module:
    head = dict(type='LinearClsHead', num_classes=3, in_channels=DIMS)
    return MODELS.build(dict(type='ImageClassifier', backbone=backbone, head=head, **changes))


OUR_CLASSIFIER = dict(OURS['backbone'], out_type='avg_featmap', masked_input=False, rel_pos_bias='per_layer')
THEIR_BIAS = dict(use_abs_pos_emb=False, use_rel_pos_bias=True, use_shared_rel_pos_bias=False)
THEIR_CLASSIFIER = dict(type='BEiTViT', out_type='avg_featmap', layer_scale_init_value=0.1, **SIZES, **THEIR_BIAS)


def one_step(model: nn.Module, **config) -> dict[str, tuple[float, float]]:
    """Learning rate and weight decay of each parameter, after a step of training."""
    model.train()
    wrapper = build_optim_wrapper(model, dict(optimizer=ADAMW, **copy.deepcopy(config)))
    if isinstance(model.backbone, BEiTBackbone):
        check_groups(model.backbone, wrapper.param_groups)  # as FitCheckHook does
    sum(output.sum() for output in model.backbone(torch.rand(2, 3, 32, 32))).backward()
    wrapper.step()
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = wrapper.optimizer.param_groups
    return {names[one]: (round(group['lr'], 12), group['weight_decay']) for group in groups for one in group['params']}


def test_mmpretrains_constructor_with_our_backbone():
    keys = dict(layer_decay_rate=0.65, custom_keys=RECIPE_KEYS)
    expected = one_step(classifier(OUR_CLASSIFIER), **OUR_DECAY)
    for norms in (dict(custom_keys=dict(RECIPE_KEYS, norm=dict(decay_mult=0.0))), dict(norm_decay_mult=0.0)):
        assert one_step(classifier(OUR_CLASSIFIER), **MMPRETRAIN_DECAY, paramwise_cfg=keys | norms) == expected
    assert one_step(classifier(OUR_CLASSIFIER), paramwise_cfg=None)


def test_our_constructor_with_mmpretrains_backbones():
    keys = dict(layer_decay_rate=0.65, custom_keys=RECIPE_KEYS)
    expected = one_step(classifier(THEIR_CLASSIFIER), **MMPRETRAIN_DECAY, paramwise_cfg=keys)
    assert one_step(classifier(THEIR_CLASSIFIER), **OUR_DECAY) == expected
    groups = one_step(classifier(dict(type='VisionTransformer', **SIZES)), **OUR_DECAY)
    assert groups['backbone.cls_token'] == (pytest.approx(1e-3 * 0.65**5), 0)
    assert groups['backbone.layers.3.attn.qkv.weight'] == (pytest.approx(1e-3 * 0.65), 0.05)


UPERNET = dict(in_channels=[DIMS] * 4, in_index=[0, 1, 2, 3], channels=8, num_classes=3, norm_cfg=dict(type='BN'))


def segmentor(backbone: dict, **changes) -> nn.Module:
    """A segmentor of mmseg's with a pyramid and UPerHead, unless changed."""
    config = dict(
        type='mmseg.EncoderDecoder',
        data_preprocessor=dict(type='mmseg.SegDataPreProcessor'),
        backbone=backbone,
        neck=dict(type='mmseg.Feature2Pyramid', embed_dim=DIMS, norm_cfg=dict(type='BN')),
        decode_head=dict(UPERNET, type='mmseg.UPerHead'),
        test_cfg=dict(mode='slide', crop_size=(32, 32), stride=(32, 32)),
    )
    with DefaultScope.overwrite_default_scope('mmseg'):
        return MODELS.build(ConfigDict(config | changes))


OUR_PYRAMID = dict(OUR_CLASSIFIER, out_type='featmap', out_indices=(0, 1, 2, 3))
THEIR_PYRAMID = dict(embed_dims=DIMS, num_layers=4, num_heads=4, img_size=(32, 32), patch_size=8, init_values=0.1)
THEIR_PYRAMID = dict(THEIR_PYRAMID, type='mmseg.BEiT', out_indices=(0, 1, 2, 3))


def test_mmsegs_constructor_finds_no_layers_of_ours():
    model, decay = segmentor(OUR_PYRAMID), dict(num_layers=4, decay_rate=0.9)
    with DefaultScope.overwrite_default_scope('mmseg'), pytest.raises(ValueError, match='^.*gives all blocks .*$'):
        one_step(model, constructor='LearningRateDecayOptimizerConstructor', paramwise_cfg=decay)


def test_mmsegs_backbone_has_the_same_logits_in_segmentors_and_with_heads_of_both():
    """With our backbone, of SETR-PUP, and at any size: tests/segmentation."""
    images, weights, logits = torch.rand(2, 3, 32, 32), None, []
    samples = [SegDataSample(metainfo=dict(img_shape=(32, 32), ori_shape=(32, 32))) for _ in images]
    algorithms, heads = ('mmseg.EncoderDecoder', 'beit_mm.SlidingSegmentor'), ('mmseg.UPer', 'beit_mm.EfficientUPer')
    for algorithm, head in itertools.product(algorithms, heads):
        head = dict(UPERNET, type=f'{head}Head')
        model = segmentor(dict(THEIR_PYRAMID), type=algorithm, decode_head=head).eval()
        weights = weights or randomise(model).state_dict()
        model.load_state_dict(weights)
        model.test_cfg.precision = 'float32'
        logits.append(model.predict(images, copy.deepcopy(samples))[1].seg_logits.data.detach())
    for found in logits[1:]:
        torch.testing.assert_close(found, logits[0], rtol=1e-4, atol=1e-4)


def test_mmsegs_pretrained_is_our_init_cfg(tmp_path):
    """mmseg's recipes name the weights beside the backbone."""
    torch.save(randomise(MODELS.build(OUR_PYRAMID)).state_dict(), tmp_path / 'beit.pth')
    model = segmentor(dict(OUR_PYRAMID), pretrained=str(tmp_path / 'beit.pth'))
    model.backbone.init_weights()
    torch.testing.assert_close(model.backbone.state_dict(), torch.load(tmp_path / 'beit.pth'))


def test_our_backbone_in_another_librarys_registry():
    """mmdet's scope, for instance: four maps of one resolution."""
    registry = Registry('model', parent=ROOT_MODELS, scope='somedet')
    with DefaultScope.overwrite_default_scope('somedet'):
        backbone = registry.build(dict(OUR_PYRAMID))
        assert [tuple(level.shape) for level in backbone(torch.rand(1, 3, 50, 70))] == [(1, DIMS, 7, 9)] * 4


def test_mmpretrains_inferencers(tmp_path):
    config = classifier_config(make_images(tmp_path / 'images', per_class=1), tmp_path / 'work')
    paths = [str(tmp_path / name) for name in ('config.py', 'model.pth')]
    config.dump(paths[0])
    model = randomise(MODELS.build(config.model))
    torch.save(dict(state_dict=model.state_dict(), meta=dict(dataset_meta=dict(classes=CLASSES))), paths[1])
    image = next((tmp_path / 'images/val').rglob('*.png'))
    pixels = np.asarray(Image.open(image))
    (expected,) = ClassificationInferencer(paths[1], config=paths[0], device='cpu')(image)
    scores = [score for _, score in sorted(expected['scores'])]
    classify = ImageClassificationInferencer(paths[0], pretrained=paths[1], device='cpu')
    for result in classify([str(image), pixels[..., ::-1].copy()]):  # mmpretrain's arrays are BGR
        np.testing.assert_allclose(result['pred_scores'], scores, rtol=1e-5)
        assert result['pred_class'] == expected['name']
    (features,) = FeatureExtractor(paths[0], pretrained=paths[1], device='cpu')(str(image), stage='pre_logits')
    torch.testing.assert_close(model.head.fc(features).softmax(0), torch.tensor(scores), rtol=1e-5, atol=1e-6)
    del config.model['head']  # features of a pretraining, without a classifier
    ((alone,),) = FeatureExtractor(config, pretrained=paths[1], device='cpu')(str(image))
    torch.testing.assert_close(alone, features)


def test_mmsegs_inferencers(tmp_path):
    """With the test pipeline of a shipped config, from files and from arrays, which are BGR."""
    config = Config.fromfile(ROOT / 'configs/demo/camvid_setr_pup.py')
    config.model = SEGMENTOR
    config.test_pipeline[1].scale = config.test_dataloader.dataset.pipeline[1].scale = (2048, 64)
    config.dump(tmp_path / 'config.py')
    model = narrow_segmentor()
    with torch.no_grad():  # every class wins somewhere
        model.decode_head.conv_seg.bias -= model(torch.randn(1, 3, 64, 64)).mean(dim=(0, 2, 3))
    meta = dict(dataset_meta=dict(classes=tuple('abcde'), palette=[[50 * i] * 3 for i in range(5)]))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'model.pth')
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'image.png')
    paths = [str(tmp_path / name) for name in ('config.py', 'model.pth')]
    (expected,) = SegmentationInferencer(paths[1], 'cpu', paths[0])(tmp_path / 'image.png')
    infer = apis.MMSegInferencer(*paths, device='cpu')
    with DefaultScope.overwrite_default_scope('mmseg'):
        loaded = apis.init_model(*paths, device='cpu')
        for source in (str(tmp_path / 'image.png'), pixels[..., ::-1].copy()):
            assert np.array_equal(infer(source)['predictions'], expected['labels'])
            assert np.array_equal(apis.inference_model(loaded, source).pred_sem_seg.data[0], expected['labels'])


NARROWER = {  # text of the example -> what is run in its place
    "arch='base'": 'arch=dict(embed_dims=32, num_layers=12, num_heads=2)',
    **{'768': '32', 'size=224': 'size=32', 'scale=224': 'scale=32', 'scale=256': 'scale=36'},
    **{'512': '64', '2048': '256', '341': '43', 'batch_size=32': 'batch_size=3', 'num_classes = 10': 'num_classes = 3'},
    **{'num_workers=2': 'num_workers=0', 'persistent_workers=True': 'persistent_workers=False'},
}


@pytest.mark.parametrize('scope, name', [('mmpretrain', 'mmpretrain_folder'), ('mmseg', 'mmseg_ade20k')])
def test_the_complete_configs_train_and_validate(scope, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = (ROOT / f'docs/examples/{name}.py').read_text()
    for theirs, narrow in NARROWER.items():
        text = text.replace(theirs, narrow)
    (tmp_path / 'mine.py').write_text(text)
    config = Config.fromfile('mine.py')
    config.work_dir, config.param_scheduler = str(tmp_path / 'work_dir'), None
    if scope == 'mmpretrain':
        make_images(tmp_path / 'images', per_class=2)
        config.train_cfg.update(max_epochs=1, val_interval=1)
    else:
        make_label_maps(tmp_path / 'data/ade20k', number=2, size=(64, 80))
        for image in (tmp_path / 'data/ade20k/images').rglob('*.png'):
            Image.open(image).save(image.with_suffix('.jpg'))
        config.train_cfg.update(max_iters=2, val_interval=2)
    backbone = dict(config.model.backbone, init_cfg=None, out_type='raw', out_indices=(-1,))
    torch.manual_seed(1)
    released = MODELS.build(backbone).state_dict()
    torch.save(released, config.model.backbone.init_cfg.checkpoint)
    with DefaultScope.overwrite_default_scope(scope):
        runner = make_runner(config)
        runner.train()
    assert len(runner.model.backbone.load_report.matched) == 3 + 12 * 16  # all but norms, which belong to the task
    assert runner.iter == 2 and runner.message_hub.get_scalar('train/loss').current() > 0
    measured = dict(mmpretrain='val/accuracy/top1', mmseg='val/mIoU')[scope]
    assert 0 <= runner.message_hub.get_scalar(measured).current() <= 100
