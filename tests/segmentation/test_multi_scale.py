"""Multi-scale inference with flip against the released protocol in plain loops: every ratio, every flip."""

import cv2
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.dataset import pseudo_collate
from mmseg.models.segmentors import EncoderDecoder
from mmseg.structures import SegDataSample
from narrow_segmentors import CROP, build_segmentor, mmsegs_logits, narrow_config, narrow_segmentor
from PIL import Image

from beit_mm.registry import TRANSFORMS
from beit_mm.segmentation.segmentor import RATIOS, MultiScaleTTA, MultiScaleViews, confidence_of, probabilities_of


def resized(image: np.ndarray, ratio: float, short_side: int, crop: int) -> np.ndarray:
    """The released SETR_Resize: short side of ratio * short_side, at least the window."""
    height, width = image.shape[:2]
    short = max(int(short_side * ratio), crop)
    scale = short / min(height, width)
    return cv2.resize(image, (int(width * scale + 0.5), int(height * scale + 0.5)), interpolation=cv2.INTER_LINEAR)


def slow_reference(
    model: EncoderDecoder, original: np.ndarray, ratios: tuple, short_side: int = CROP, masks: bool = False
) -> torch.Tensor:
    """Probabilities (C, H, W): every ratio and flip on its own, by mmseg's windows, logits at the image's size."""
    found = []
    for ratio in ratios:
        view = resized(original, ratio, short_side, CROP)
        image = (torch.from_numpy(view).permute(2, 0, 1)[None].float() - 127.5) / 127.5
        for flip in (False, True):
            logits = mmsegs_logits(model, image.flip(3) if flip else image)
            logits = F.interpolate(logits, original.shape[:2], mode='bilinear')[0]
            probability = logits if masks else logits.softmax(dim=0)
            found.append(probability.flip(2) if flip else probability)
    return torch.stack(found).mean(dim=0)


@torch.no_grad()
def predict(tta: MultiScaleTTA, paths: list, ratios: tuple) -> list[SegDataSample]:
    """By the test pipeline, the collation and `test_step`."""
    load = TRANSFORMS.build(dict(type='beit_mm.LoadImage'))
    views = MultiScaleViews(CROP, (CROP, CROP), ratios)
    tta.with_probabilities = True
    return tta.test_step(pseudo_collate([views(load(dict(img_path=str(path)))) for path in paths]))


def check(sample: SegDataSample, probabilities: torch.Tensor) -> None:
    """Each pixel has the class of the highest probability (C, H, W), as its confidence; queries of masks add up."""
    label, highest = sample.pred_sem_seg.data, probabilities.amax(dim=0)
    assert label.dtype == torch.int64 and label.shape[1:] == highest.shape
    torch.testing.assert_close(probabilities.gather(0, label)[0], highest, atol=1e-5, rtol=0)
    sums = probabilities.sum(dim=0).clamp(min=1)
    torch.testing.assert_close(confidence_of(sample), highest / sums, atol=1e-5, rtol=0)
    torch.testing.assert_close(probabilities_of(sample), probabilities / sums, atol=1e-5, rtol=0)


def save_image(folder, name: str, height: int, width: int, mode: str = 'RGB'):
    small = np.random.default_rng(0).integers(0, 256, (5, 7, len(mode)), dtype=np.uint8).squeeze()
    Image.fromarray(small, mode).resize((width, height), Image.Resampling.BICUBIC).save(folder / name)
    return folder / name


@pytest.mark.filterwarnings('ignore:.*mode.*:DeprecationWarning')
@pytest.mark.parametrize(
    'variant, head, theirs, size, ratios',
    [
        ('bias', 'beit_mm.EfficientUPerHead', 'UPerHead', (33, 47), RATIOS),
        ('bias', 'beit_mm.EfficientUPerHead', 'UPerHead', (1, 1), (0.75, 1.0)),
        ('absolute', 'beit_mm.EfficientSETRUPHead', 'SETRUPHead', (5, 100), (0.5, 1.0, 1.25)),
        ('bias', 'decoder', 'decoder', (90, 64), (1.0, 1.75)),  # of masks
        ('bias', 'decoder', 'decoder', (5, 100), (1.0,)),
        ('bias', 'backbone', 'backbone', (90, 64), (1.0, 1.75)),
    ],
)
def test_the_mean_is_the_slow_references(tmp_path, variant, head, theirs, size, ratios):
    """Also 20 times as wide as high, and one pixel."""
    path = save_image(tmp_path, 'image.png', *size)
    tta = MultiScaleTTA(narrow_segmentor(variant, head, windows_per_batch=5))
    image, masks = np.array(Image.open(path)), head in ('decoder', 'backbone')
    expected = slow_reference(narrow_segmentor(variant, theirs), image, ratios, masks=masks)
    (sample,) = predict(tta, [path], ratios)
    check(sample, expected)
    assert size == (1, 1) or expected.std(dim=(1, 2)).max() > 1e-3


@pytest.mark.filterwarnings('ignore:.*mode.*:DeprecationWarning')
def test_images_of_any_kind_and_size_in_one_batch(tmp_path):
    paths = [save_image(tmp_path, 'gray.png', 40, 50, 'L'), save_image(tmp_path, 'cmyk.jpg', 47, 33, 'CMYK')]
    tta = MultiScaleTTA(narrow_segmentor(windows_per_batch=7))
    ratios = (0.5, 1.0, 1.5)
    for path, sample in zip(paths, predict(tta, paths, ratios), strict=True):
        image = TRANSFORMS.build(dict(type='beit_mm.LoadImage'))(dict(img_path=str(path)))['img']
        check(sample, slow_reference(tta.module, image, ratios))


@pytest.mark.parametrize('short_side, sides', [(512, [512, 640, 768, 896]), (640, [640, 800, 960, 1120])])
def test_equal_sizes_are_one_view_that_counts_thrice(short_side, sides):
    image = np.zeros((512, 683, 3), np.uint8)
    packed = MultiScaleViews(short_side, (short_side, short_side))(dict(img=image, ori_shape=(512, 683)))
    shapes = [tuple(view.shape[1:]) for view in packed['inputs']]
    assert shapes == [resized(image, side / short_side, short_side, short_side).shape[:2] for side in sides]
    assert [min(shape) for shape in shapes] == sides
    assert packed['data_samples'].view_weights == (3, 1, 1, 1)


@torch.no_grad()
def test_two_classes_by_one_logit(tmp_path):
    model, path = narrow_segmentor(), save_image(tmp_path, 'image.png', 64, 64)
    images = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 127.5 - 1
    model.decode_head.conv_seg = torch.nn.Conv2d(model.decode_head.channels, 1, 1)
    model.decode_head.threshold = 0.5
    model.decode_head.conv_seg.weight.mul_(20)
    model.decode_head.conv_seg.bias.sub_(model.inference(images).mean())  # about half of the pixels
    (sample,) = predict(MultiScaleTTA(model), [path], (1.0,))
    one, mirrored = (model.inference(x).sigmoid()[0] for x in (images, images.flip(3)))
    second = (one + mirrored.flip(2)) / 2
    assert second.min() < 0.45 and second.max() > 0.55
    check(sample, torch.cat([1 - second, second]))


@torch.no_grad()
def test_a_mask_head_of_one_class_finds_it_everywhere_with_its_probability(tmp_path):
    """mmseg takes the sigmoid of a single channel, which is a probability here."""
    config = narrow_config('bias', 'decoder')
    config.decode_head.num_classes = 1
    model = build_segmentor(config)
    (at_all,) = predict(MultiScaleTTA(model), [path := save_image(tmp_path, 'image.png', 64, 70)], (1.0,))
    image = torch.from_numpy(np.array(Image.open(path))).permute(2, 0, 1)[None] / 127.5 - 1
    (sample,) = model.predict(image)
    for label in (at_all.pred_sem_seg.data, sample.pred_sem_seg.data):
        assert label.shape == (1, 64, 70) and not label.any()
    torch.testing.assert_close(confidence_of(sample), model.inference(image)[0, 0].clamp(max=1), atol=1e-5, rtol=0)
    assert torch.equal(probabilities_of(at_all)[0], confidence_of(at_all)) and len(probabilities_of(at_all)) == 1
