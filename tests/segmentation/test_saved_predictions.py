"""Label maps and overlays of a test, as the libraries save them: IoUMetric and SegVisualizationHook."""

import numpy as np
import pytest
import torch
from mmengine.runner import Runner
from narrow_segmentors import CLASSES, narrow_segmentor
from PIL import Image

from beit_mm.registry import TRANSFORMS

ALPHA = 0.8  # SegLocalVisualizer's weight of the colours
LOAD = dict(type='beit_mm.LoadImage')
NAMES = [f'class {label}' for label in range(CLASSES)]


@pytest.fixture
def root(tmp_path):
    """Three kinds of files of one orange image, 90 x 64 as shown, with five stripes of labels from 1."""
    rotated = Image.Exif()
    rotated[0x0112] = 6
    image = Image.new('RGB', (90, 64), (250, 120, 10))
    (tmp_path / 'images').mkdir()
    (tmp_path / 'annotations').mkdir()
    image.save(tmp_path / 'images/plain.png')
    image.convert('CMYK').save(tmp_path / 'images/cmyk.jpg', quality=100)
    image.transpose(Image.Transpose.ROTATE_90).save(tmp_path / 'images/turned.jpg', exif=rotated, quality=100)
    stripes = Image.fromarray(np.arange(90, dtype=np.uint8)[None].repeat(64, 0) // 18 + 1)
    for name in ('plain', 'cmyk', 'turned'):
        stripes.save(tmp_path / f'annotations/{name}.png')
    return tmp_path


def test_label_maps_have_the_annotations_numbers_and_overlays_the_palettes_colours(root, monkeypatch):
    load, loader = TRANSFORMS.build(LOAD), dict(batch_size=1, num_workers=0)
    loader['sampler'] = dict(type='beit_mm.SeededSampler', shuffle=False)
    loader['dataset'] = dict(
        type='beit_mm.SegmentationFolder',
        data_root=str(root),
        classes=NAMES,
        reduce_zero_label=True,
        data_prefix=dict(img_path='images', seg_map_path='annotations'),
        test_mode=True,
        pipeline=[LOAD, dict(type='beit_mm.LoadAnnotation'), dict(type='PackSegInputs')],
    )
    model, predicted = narrow_segmentor(), {}
    with torch.no_grad():  # every class wins somewhere
        logits = model(torch.randn(1, 3, 64, 64))
        model.decode_head.conv_seg.bias -= logits.mean(dim=(0, 2, 3))
    test_step = model.test_step

    def noted(data):
        samples = test_step(data)
        predicted.update({sample.img_path: sample.pred_sem_seg.data[0].numpy() for sample in samples})
        return samples

    monkeypatch.setattr(model, 'test_step', noted)
    runner = Runner(
        model=model,
        work_dir=str(root / 'work'),
        default_scope='mmseg',
        experiment_name=root.name,
        test_dataloader=loader,
        test_evaluator=dict(type='IoUMetric', output_dir=str(root / 'labels')),
        test_cfg=dict(type='TestLoop'),
        default_hooks=dict(visualization=dict(type='SegVisualizationHook', draw=True, interval=1)),
        visualizer=dict(type='SegLocalVisualizer', name=root.name, vis_backends=[dict(type='LocalVisBackend')]),
    )
    runner.test()
    palette = np.array(runner.test_dataloader.dataset.metainfo['palette'])
    assert len(predicted) == 3
    for path, labels in predicted.items():
        name = path.split('/')[-1]
        assert np.array_equal(np.asarray(Image.open(root / f'labels/{name[:-4]}.png')), labels + 1)
        (picture,) = root.glob(f'work/*/vis_data/vis_image/test_{name}_*.png')
        picture = np.asarray(Image.open(picture)).astype(int)
        pixels = load(dict(img_path=path))['img']
        both = np.concatenate([np.arange(90)[None].repeat(64, 0) // 18, labels], axis=1)  # annotation, prediction
        expected = (1 - ALPHA) * np.concatenate([pixels, pixels], axis=1) + ALPHA * palette[both]
        assert picture.shape == expected.shape
        near = np.abs(picture - expected).max(axis=2) <= 4  # not under the names of the classes
        assert near[:, :90].mean() > 0.7 and near[:, 90:].mean() > 0.7, name
