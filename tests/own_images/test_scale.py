"""The scale at which a segmentor sees images: chosen by sizes and objects, and the same everywhere."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from beit_mm import __main__ as command
from beit_mm.apis.inferencers import SegmentationInferencer
from beit_mm.apis.stored_config import STEPS, check_part
from beit_mm.datasets import transforms
from beit_mm.datasets.transforms import RandomCropAtScale, ResizeToScale
from beit_mm.errors import UserError
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.own_images.label_maps import find_label_maps
from beit_mm.own_images.scale import Sizes, areas_of_objects, choose_scale, half_of_pixels, measure

pytestmark = pytest.mark.long

USUAL, PATCH = 160, 8  # of the recipe for narrow models


def save_maps(folder: Path, size: tuple[int, int], side: int, number: int = 12) -> Path:
    """Images with four square objects of class 1, `side` pixels wide, and a speck of class 2."""
    for name in ('images', 'annotations'):
        (folder / name).mkdir(parents=True)
    for index in range(number):
        labels = np.zeros(size, np.uint8)
        for corner in ((5, 5), (5, 60), (60, 5), (60, 60)):
            labels[corner[0] : corner[0] + side, corner[1] : corner[1] + side] = 1
        labels[-40:-1, -40:-1] = 2
        image = np.random.default_rng(index).integers(0, 99, (*size, 3), np.uint8)
        image[..., 0] += labels * 70
        Image.fromarray(image).save(folder / 'images' / f'{index}.png')
        Image.fromarray(labels).save(folder / 'annotations' / f'{index}.png')
    (folder / 'classes.txt').write_text('ground\ncell\nsquare\n')
    return folder


def test_objects_are_connected_pixels_of_a_class(tmp_path):
    sizes = measure(find_label_maps(save_maps(tmp_path / 'maps', (300, 400), 13)))
    assert sizes.images == [(300, 400)] * len(sizes.images) and len(sizes.images) > 5
    assert sizes.objects['cell'] == 13 and sizes.objects['square'] == 39
    assert sizes.pixels['cell'] == 4 * 13**2 * len(sizes.images)
    mask = np.zeros((20, 30), bool)
    mask[2:5, 2:6] = mask[10:15, 10:20] = mask[5, 6] = True  # the last touches the first at a corner
    mask[18, 28] = True  # a speck
    assert sorted(areas_of_objects(mask)) == [13, 50]
    assert half_of_pixels([4] * 10 + [100]) == 10 and half_of_pixels([9] * 20 + [100]) == 3


@pytest.mark.parametrize(
    ('images', 'side', 'options', 'seen', 'of_twice'),
    [
        ((1200, 1600), 13, {}, (1200, 1600), (3200, 4800)),  # objects need all of it
        ((1200, 1600), 50, {}, (384, 512), (1024, 1536)),  # two patches for an object
        ((1200, 1600), 70, {}, (160, 213), (427, 640)),  # more than a patch at the recipe's size
        ((1200, 1600), 600, {}, (160, 213), (427, 640)),  # never below the recipe's size
        ((150, 200), 13, {}, (160, 213), (3413, 5120)),  # never above the image's, but the recipe's
        ((1200, 1600), 13, dict(short_side=300), (300, 400), (800, 1200)),
        ((1200, 1600), 600, dict(full_size=True), (1200, 1600), (3200, 4800)),
    ],
)
def test_a_scale_is_chosen_by_images_and_objects(images, side, options, seen, of_twice):
    found = choose_scale(
        Sizes([images] * 9, dict(cell=side), Counter()),
        USUAL,
        PATCH,
        **(dict(short_side=None, full_size=False) | options),
    )
    resize = ResizeToScale(**found.arguments)
    assert resize.size_of(*images) == seen
    assert resize.size_of(3200, 4800) == of_twice  # more than twice as large: the same scale
    if not options.get('full_size') and seen != images:  # a little larger: the same size
        larger = [round(1.5 * length) for length in images]
        assert resize.size_of(*larger)[0] == seen[0]


def test_images_without_a_common_size_get_a_common_side():
    sizes = [(100 * number, 150 * number) for number in range(1, 31)]
    found = choose_scale(Sizes(sizes, dict(cat=400), Counter()), USUAL, PATCH, None, False)
    resize = ResizeToScale(**found.arguments)
    assert {min(resize.size_of(*size)) for size in sizes} == {USUAL}


@pytest.mark.parametrize(('side', 'seen'), [(8, USUAL), (9, USUAL), (32, USUAL), (12_000, 12_000)])
def test_weights_of_tiny_and_of_huge_images_can_be_rebuilt(side, seen):
    found = choose_scale(Sizes([(side, side)] * 9, dict(cat=5), Counter()), USUAL, PATCH, None, False)
    step = dict(type='beit_mm.ResizeToScale', **found.arguments)
    assert check_part(step, STEPS, 'step') == step
    assert ResizeToScale(**found.arguments).size_of(side, side) == (seen, seen)


def test_a_crop_shows_its_part_of_the_image_at_the_scale():
    """Red and label show the column, green the row: a crop must hold equal steps of both, scaled by the ratio."""
    rows, columns = np.indices((1000, 1400))
    image = np.stack([columns // 10, rows // 10, rows * 0], axis=2).astype(np.uint8)
    labels = (columns // 10).astype(np.uint8)
    crop = RandomCropAtScale((100, 120), short_side=500, factor=0.5, ratio_range=(0.8, 0.8))
    starts = set()
    for _ in range(20):
        results = dict(img=image, gt_seg_map=labels, seg_fields=['gt_seg_map'], ori_shape=(1000, 1400))
        found = crop.transform(results)
        assert found['img'].shape == (100, 120, 3) and found['gt_seg_map'].shape == (100, 120)
        assert np.abs(found['img'][..., 0].astype(int) - found['gt_seg_map']).max() <= 1
        red, green = found['img'][..., 0].astype(float), found['img'][..., 1].astype(float)
        # 0.4 pixels of the crop for each of the image: ten columns of it in four
        assert np.ptp(red[0]) == pytest.approx(120 / 4, abs=1.1) and np.ptp(green[:, 0]) == pytest.approx(25, abs=1.1)
        starts.add((red[0, 0], green[0, 0]))
    assert len(starts) > 10
    small = dict(img=image[:90, :110], gt_seg_map=labels[:90, :110], seg_fields=['gt_seg_map'], ori_shape=(90, 110))
    assert RandomCropAtScale((100, 120), 90, 1.0, 1.0).transform(small)['img'].shape == (90, 110, 3)


def test_crops_that_hold_several_classes_are_preferred():
    labels = np.zeros((400, 400), np.uint8)
    labels[:, 200:220] = 1
    mixed = {1.0: 0, 0.8: 0}
    for share in mixed:
        crop = RandomCropAtScale((50, 50), 400, 1.0, 1.0, cat_max_ratio=share)
        for _ in range(60):
            results = dict(img=np.zeros((400, 400, 3), np.uint8), gt_seg_map=labels, seg_fields=['gt_seg_map'])
            mixed[share] += crop.transform(results)['gt_seg_map'].mean() > 0.2
    assert mixed[0.8] > 2 * mixed[1.0] + 5


def test_a_segmentor_sees_one_scale_from_training_to_use(tmp_path, monkeypatch, capsys):
    """In the run's config, `segment`, and for other sizes, which are named."""
    monkeypatch.chdir(tmp_path)
    save_maps(tmp_path / 'maps', (300, 400), 13)
    command.main(['finetune', 'maps', '--out', 'run', '--epochs', '2', '--batch', '4', '--workers', '0'])
    assert 'full size' in capsys.readouterr().out
    assert json.loads((tmp_path / 'run/plan.json').read_text())['options']['full_size']
    segmentor = SegmentationInferencer('run/finetuned.pth', 'cpu')
    seen = []
    inference = segmentor.model.inference
    monkeypatch.setattr(segmentor.model, 'inference', lambda images, *args: seen.append(images) or inference(images))
    large = np.random.default_rng(0).integers(0, 256, (700, 800, 3), np.uint8)
    transforms.WARNED.clear()
    labels = [result['labels'].shape for result in segmentor([large, large[:300, :310]])]
    assert [tuple(images.shape[2:]) for images in seen] == [(700, 800), (300, 310)] == labels
    assert '--short-side 300' in capsys.readouterr().err
    halved = SegmentationInferencer('run/finetuned.pth', 'cpu', short_side=150)
    assert halved.reader.prepare(halved.reader.load(large))['inputs'].shape == (3, 150, 171)
    with pytest.raises(UserError, match='--full-size'):
        command.main(['finetune', 'maps', '--out', 'other', '--short-side', '99', '--full-size'])


def test_features_of_large_images_are_those_of_their_windows():
    extract = FeatureExtractor('demo', 'cpu', size=544, whole=True)
    images = 255 * torch.rand(1, 3, 544, 1088, generator=torch.Generator().manual_seed(0))  # 68 x 136 patches
    found = extract.features(images, [None])
    height, width = 8 * 23, 8 * 28
    expected = extract.features(images[..., height : 2 * height, 2 * width : 3 * width], [None])
    assert found['patches'].shape[2:4] == (68, 136)
    torch.testing.assert_close(found['patches'][:, :, 23:46, 56:84], expected['patches'], atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found['mean'], found['patches'].mean(dim=(2, 3)))
