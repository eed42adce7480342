"""Sliding inference against mmseg's own, at any size."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.config import ConfigDict
from mmengine.registry import DefaultScope
from mmengine.structures import PixelData
from mmseg.apis import inference_model
from mmseg.structures import SegDataSample
from narrow_segmentors import CLASSES, WIDTH, build_segmentor, mmsegs_logits, narrow_config, narrow_segmentor
from PIL import Image

from beit_mm.engine.optim import parameter_groups
from beit_mm.segmentation.segmentor import View, bilinear_matrix, confidence_of, probabilities_of

# wide, smaller than a window, one side smaller, a line, odd, exactly a window, exactly on the strides
SIZES = [(32, 200), (33, 47), (40, 150), (1, 90), (97, 131), (64, 64), (64 + 43, 64 + 86)]


@pytest.mark.parametrize('align_corners', [False, True])
@pytest.mark.parametrize(
    'source, target', [(1, 1), (1, 9), (7, 1), (20, 160), (160, 640), (1494, 683), (47, 33), (64, 64), (12800, 2000)]
)
def test_the_matrix_is_torchs_interpolation(source, target, align_corners):
    pixels = torch.randn(3, source)
    expected = F.interpolate(pixels[None, :, None], (1, target), mode='bilinear', align_corners=align_corners)[0, :, 0]
    matrix = bilinear_matrix(source, target, align_corners)
    torch.testing.assert_close(pixels @ matrix.T, expected, atol=1e-5, rtol=0)
    third = source // 3
    assert torch.equal(bilinear_matrix(source, target, align_corners, third, third + 1), matrix[:, third : third + 1])


@torch.no_grad()
@pytest.mark.parametrize('window', [{}, dict(crop_size=(256, 256), stride=(256, 256))], ids=['slide', 'whole'])
@pytest.mark.parametrize(
    'variant, head',
    [
        ('absolute', 'beit_mm.EfficientSETRUPHead'),
        ('bias', 'beit_mm.EfficientUPerHead'),
        ('bias', 'SETRUPHead'),
        ('rotary', 'beit_mm.EfficientUPerHead'),
        ('rotary', 'beit_mm.EfficientSETRUPHead'),
        ('absolute', 'UPerHead'),
    ],
)
def test_logits_are_mmsegs_at_any_size(variant, head, window):
    model = narrow_segmentor(variant, head, windows_per_batch=3, **window)
    for size in SIZES:
        images = torch.randn(2, 3, *size)
        torch.testing.assert_close(model.inference(images), mmsegs_logits(model, images), atol=1e-5, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize('head', ['beit_mm.EfficientUPerHead', 'SETRUPHead'])
def test_a_plain_vit_with_registers_and_patches_of_14_pixels(head):
    """Its features, and those of files that begin a segmentor: tests/parity/test_plain_vits.py, tests/configs."""
    config = narrow_config('absolute', head, crop_size=(56, 56), stride=(37, 37))
    config.backbone.update(num_registers=4, img_size=56, patch_size=14)
    model = build_segmentor(config)
    for size in [(56, 56), (61, 97), (20, 130)]:
        images = torch.randn(1, 3, *size)
        torch.testing.assert_close(model.inference(images), mmsegs_logits(model, images), atol=1e-5, rtol=1e-5)
    rates = {}
    for group in parameter_groups(model, rate=0.5, lr=1.0):
        rates |= dict.fromkeys(group['names'], (group['lr'], group.get('weight_decay')))
    assert rates['backbone.register_tokens'] == rates['backbone.cls_token'] == (0.5**5, 0)
    assert rates['backbone.blocks.3.mlp.fc1.weight'][0] == 0.5


@pytest.mark.parametrize('head', ['beit_mm.EfficientUPerHead', 'SETRUPHead', 'decoder', 'backbone'])
def test_crops_that_are_no_whole_patches_are_learned_where_inference_sees_them(head):
    """The backbone pads them, and what its padding shows is ignored in the label maps. Also of auxiliary heads."""
    config = narrow_config('absolute', head)
    if head != 'backbone':
        config.auxiliary_head = dict(type='beit_mm.FCNHead', in_channels=WIDTH, in_index=0, channels=8, num_convs=1)
        config.auxiliary_head |= dict(num_classes=CLASSES, norm_cfg=dict(type='BN'))
    model = build_segmentor(config).train()
    images, labels, padding = torch.randn(2, 3, 60, 51), torch.randint(CLASSES, (2, 1, 60, 51)), (0, 13, 0, 4)

    def losses(images: torch.Tensor, labels: torch.Tensor) -> dict:
        torch.manual_seed(0)
        samples = [SegDataSample(gt_sem_seg=PixelData(data=label)) for label in labels]
        found = model.loss(images, samples)
        assert all(torch.equal(sample.gt_sem_seg.data, label) for sample, label in zip(samples, labels, strict=True))
        return found

    expected = losses(F.pad(images, padding), F.pad(labels, padding, value=255))
    assert all(torch.equal(value, expected[name]) for name, value in losses(images, labels).items())


def test_windows_leave_no_gaps():
    with pytest.raises(ValueError, match='stride.*crop_size'):
        narrow_segmentor(stride=(65, 64))


@torch.no_grad()
@pytest.mark.parametrize(('per_batch', 'align_corners'), [(1, False), (4, True), (100, False)])
def test_views_of_all_sizes_share_batches_and_come_out_in_turn(per_batch, align_corners):
    """Each view's logits are mmseg's, resized to the size wanted; of a mirror image, mirrored back."""
    model, batches = narrow_segmentor(windows_per_batch=per_batch), []
    model.align_corners = model.decode_head.align_corners = align_corners
    model.backbone.register_forward_pre_hook(lambda _, args: batches.append(len(args[0])))
    wanted = [(30, 45), (64, 96), (90, 135)]
    views = [
        View(torch.randn(3, *size), out, flip)
        for flip in (False, True)
        for size, out in zip([(64, 96), (75, 131), (130, 195)], wanted, strict=True)
    ]
    found, count = list(model.slide(views)), sum(batches)
    assert max(batches) == min(per_batch, count) and len(batches) == -(-count // per_batch)
    for view, logits in zip(views, found, strict=True):
        image = view.image.unsqueeze(0)
        expected = mmsegs_logits(model, image.flip(3) if view.flip else image)
        expected = F.interpolate(expected, view.size, mode='bilinear', align_corners=align_corners)[0]
        torch.testing.assert_close(logits, expected.flip(2) if view.flip else expected, atol=1e-5, rtol=1e-5)


def test_arrays_of_bgr_stay_so_for_a_model_that_swaps_them_itself(tmp_path):
    """With our loader, which gives RGB: tests/parity/test_mixing.py."""
    pixels = np.random.default_rng(0).integers(0, 256, (70, 90, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / 'image.png')
    model = narrow_segmentor(bgr_to_rgb=True)
    model.cfg = ConfigDict(test_pipeline=[dict(type='LoadImageFromFile'), dict(type='mmseg.PackSegInputs')])
    with DefaultScope.overwrite_default_scope('mmseg'):
        sources = str(tmp_path / 'image.png'), pixels[..., ::-1].copy()
        file, array = (inference_model(model, source).seg_logits.data for source in sources)
    assert torch.equal(array, file)


@torch.no_grad()
@pytest.mark.parametrize('step', ['val_step', 'test_step'])
def test_a_batch_may_hold_images_of_several_sizes(step):
    model = narrow_segmentor()
    images = [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in [(70, 90), (64, 33), (70, 90)]]

    def labels(batch: list[torch.Tensor]) -> list[torch.Tensor]:
        samples = [SegDataSample(metainfo=dict(ori_shape=image.shape[1:], img_path='a.png')) for image in batch]
        return [found.pred_sem_seg.data for found in getattr(model, step)(dict(inputs=batch, data_samples=samples))]

    for found, image in zip(labels(images), images, strict=True):
        assert torch.equal(found, labels([image])[0])


@torch.no_grad()
@pytest.mark.parametrize('flip', [False, True])
def test_a_view_of_mmsegs_test_time_augmentation_keeps_its_logits(flip, monkeypatch):
    monkeypatch.setattr('beit_mm.segmentation.segmentor.MAX_LOGITS', 1)
    meta = dict(ori_shape=(40, 50), img_shape=(20, 30), flip=flip, flip_direction='horizontal')
    (sample,) = narrow_segmentor().postprocess_result(torch.randn(1, CLASSES, 20, 30), [SegDataSample(metainfo=meta)])
    assert sample.seg_logits.data.shape == (CLASSES, 40, 50)


@torch.no_grad()
@pytest.mark.parametrize('align_corners', [False, True])
def test_labels_of_large_images_are_made_in_strips(align_corners, monkeypatch):
    """With the same answers, where two classes are not as good as even, and without logits of the image's size."""
    model = narrow_segmentor()
    model.align_corners, model.with_confidence = align_corners, True
    logits = torch.randn(2, CLASSES, 20, 30)

    def samples() -> list[SegDataSample]:
        return [SegDataSample(metainfo=dict(ori_shape=(170, 211), img_shape=(20, 30))) for _ in logits]

    expected = model.postprocess_result(logits, samples())
    monkeypatch.setattr('beit_mm.segmentation.segmentor.MAX_LOGITS', 170 * 211 * CLASSES - 1)
    for sample, peer in zip(model.postprocess_result(logits, samples()), expected, strict=True):
        best, second = peer.seg_logits.data.topk(2, dim=0).values
        clear = best - second > 1e-4
        assert clear.float().mean() > 0.99 and 'seg_logits' not in sample
        assert torch.equal(sample.pred_sem_seg.data[0][clear], peer.pred_sem_seg.data[0][clear])
        probability = peer.seg_logits.data.softmax(dim=0).amax(dim=0)
        for found in (confidence_of(sample), confidence_of(peer)):  # with logits of the image's size, and without
            torch.testing.assert_close(found, probability, atol=1e-5, rtol=0)
    model.with_probabilities = True  # which take as much memory, so all is made at once
    for sample, peer in zip(model.postprocess_result(logits, samples()), expected, strict=True):
        torch.testing.assert_close(probabilities_of(sample), peer.seg_logits.data.softmax(dim=0))


@torch.no_grad()
def test_the_confidence_of_probabilities_is_the_share_of_the_highest(monkeypatch):
    """A head that classifies masks gives no logits; of its queries several can add up to more than 1.

    A pixel that no query is sure of keeps the low probability that they give it.
    """
    model = narrow_segmentor()
    model.gives_probabilities = model.with_confidence = model.with_probabilities = True
    scores = 1.5 * torch.rand(1, CLASSES, 20, 30)
    scores[..., :10] /= 10
    expected = torch.where(scores.sum(dim=1) > 1, scores.amax(dim=1) / scores.sum(dim=1), scores.amax(dim=1))[0]
    for limit in (2**27, 20 * 30 * CLASSES - 1):  # with scores of the image's size, and in strips
        monkeypatch.setattr('beit_mm.segmentation.segmentor.MAX_LOGITS', limit)
        sample = SegDataSample(metainfo=dict(ori_shape=(20, 30), img_shape=(20, 30)))
        (found,) = model.postprocess_result(scores, [sample])
        torch.testing.assert_close(confidence_of(found), expected)
        torch.testing.assert_close(probabilities_of(found).amax(dim=0).float(), expected, atol=1e-3, rtol=0)
        assert confidence_of(found)[:, :10].max() < 0.2


@torch.no_grad()
def test_the_confidence_of_two_classes_by_one_logit():
    """mmseg leaves its sigmoid; a threshold of 0.3 labels pixels whose class is the less probable one."""
    model = narrow_segmentor()
    model.decode_head.threshold = 0.3
    logits = torch.randn(1, 1, 20, 30)
    (sample,) = model.postprocess_result(logits, [SegDataSample(metainfo=dict(ori_shape=(20, 30)))])
    second = logits[0, 0].sigmoid()
    torch.testing.assert_close(probabilities_of(sample), torch.stack([1 - second, second]))
    found, labels = confidence_of(sample), sample.pred_sem_seg.data[0]
    torch.testing.assert_close(found, torch.where(second > 0.3, second, 1 - second))
    assert (labels == (second > 0.3)).all() and 0.3 < found.min() < 0.5


@torch.no_grad()
@pytest.mark.skipif(torch.cuda.is_available(), reason='a GPU has float16')
def test_a_precision_that_the_device_does_not_have_is_said(monkeypatch):
    said = []
    monkeypatch.setattr('beit_mm.segmentation.segmentor.warn', said.append)
    for precision, number in (('float32', 0), ('float16', 1)):
        narrow_segmentor(precision=precision).inference(torch.zeros(1, 3, 64, 64))
        assert len(said) == number
    assert 'float32' in said[0] and 'test_cfg.precision=float16' in said[0]


@torch.no_grad()
def test_lower_precision_is_near_and_gathered_in_float32(monkeypatch):
    """Also where a CPU without fast bfloat16 would take float32."""
    model = narrow_segmentor()
    image = torch.randn(1, 3, 70, 90)
    exact = model.inference(image)
    monkeypatch.setattr('beit_mm.segmentation.segmentor.usable_dtype', lambda dtype, device: dtype)
    model.test_cfg.update(precision='bfloat16')
    rough = model.inference(image)
    assert rough.dtype == torch.float32 and not torch.equal(rough, exact)
    assert (rough - exact).std() < 0.03 * exact.std()
