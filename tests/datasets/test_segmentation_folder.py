"""Images with annotations: what is read equals mmseg's own reading, and what does not fit is refused by name."""

from pathlib import Path

import numpy as np
import pytest
from mmseg.datasets.transforms import LoadAnnotations
from PIL import Image

from beit_mm.datasets.segmentation_folder import distinct_colours, read_labels
from beit_mm.registry import DATASETS, TRANSFORMS

CLASSES = ['sky', 'road', 'tree']
PIPELINE = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]


def save(path: Path, labels: np.ndarray, palette: bool = False) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(labels)
    if palette:
        image.putpalette([7 * i % 256 for i in range(768)])
    image.save(path)


def save_label(path: Path, label: int, dtype: type = np.uint8) -> None:
    save(path, np.full((12, 16), label, dtype))


@pytest.fixture
def root(tmp_path) -> Path:
    """Four pairs of 12 x 16 pixels in two folders, one JPEG among PNGs, labels 0 to 3."""
    rng = np.random.default_rng(0)
    for number, name in enumerate(('b.jpg', 'a.png', 'deep/c.png', 'deep/d.png')):
        save(tmp_path / 'images' / name, rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        labels = rng.integers(0, 4, (12, 16), dtype=np.uint8)
        labels[0, :2] = 255, 0
        save(tmp_path / f'annotations/{name[:-4]}.png', labels, palette=number == 1)
    return tmp_path


def dataset(root: Path, **changes):
    settings = dict(
        type='beit_mm.SegmentationFolder',
        data_root=str(root),
        classes=CLASSES,
        reduce_zero_label=True,
        data_prefix=dict(img_path='images', seg_map_path='annotations'),
        pipeline=PIPELINE,
    )
    return DATASETS.build(dict(settings, **changes))


def refused(error: type[Exception], message: str, root: Path, index: int = 0, **changes) -> None:
    with pytest.raises(error, match=message) as raised:
        dataset(root, **changes)[index]
    assert '\n' not in str(raised.value)


@pytest.mark.parametrize('reduced', [False, True])
def test_labels_are_those_of_mmseg(root, reduced):
    """Gray files and one with a palette."""
    data = dataset(root, classes=[*CLASSES, 'car'], reduce_zero_label=reduced)
    assert [Path(data.get_data_info(i)['img_path']).name for i in range(4)] == ['a.png', 'b.jpg', 'c.png', 'd.png']
    for sample in data:
        peer = LoadAnnotations().transform(dict(sample, seg_fields=[]))
        assert sample['gt_seg_map'].dtype == np.uint8 and sample['seg_fields'] == peer['seg_fields']
        assert np.array_equal(sample['gt_seg_map'], peer['gt_seg_map'])
        assert sample['gt_seg_map'][0, :2].tolist() == ([255, 255] if reduced else [255, 0])


def test_classes_from_anywhere(root):
    (root / 'names.txt').write_text('sky\nroad\ntree\n')
    (root / 'table.txt').write_text('Idx\tRatio\tName\n1\t0.5\tsky\n2\t0.3\troad, way\n3\t0.1\ttree\n')
    for file in (str(root / 'names.txt'), 'names.txt'):
        assert dataset(root, classes=file).metainfo['classes'] == tuple(CLASSES)
    assert dataset(root, classes='table.txt').metainfo['classes'] == ('sky', 'road, way', 'tree')
    ade = dataset(root, classes='mmseg.ADE20KDataset').metainfo
    assert len(ade['classes']) == len(ade['palette']) == 150
    assert (ade['classes'][0], ade['palette'][:2]) == ('wall', [[120, 120, 120], [180, 120, 120]])
    refused(ValueError, "'no.txt'; no such file, .* and no registered dataset", root, classes='no.txt')
    refused(ValueError, '255 classes; expected 1 to 254', root, classes=[str(i) for i in range(255)])


def test_colours_can_be_told_apart(root):
    """CamVid has eleven classes; its sky and its cars once had nearly the same red."""
    colours = np.array(dataset(root, classes=[str(i) for i in range(11)]).metainfo['palette'])
    difference = np.abs(colours[:, None] - colours).sum(axis=2)
    assert difference[~np.eye(11, dtype=bool)].min() >= 100
    assert len({*map(tuple, distinct_colours(254))}) == 254


def test_missing_annotations_are_found_at_the_start(root):
    (root / 'annotations/deep/c.png').unlink()
    missing = r"no annotation '\S+deep/c.png' for '\S+images/deep/c.png'; 1 of 4 images have none"
    refused(FileNotFoundError, missing, root)
    nowhere = dict(img_path='images', seg_map_path='nowhere')
    refused(FileNotFoundError, r"no folder '\S+nowhere'; expected a folder of annot", root, data_prefix=nowhere)
    sample = dataset(root, data_prefix=dict(img_path='images'))[0]  # none at all: a test server's
    assert 'gt_seg_map' not in sample and sample['img'].shape == (12, 16, 3)


def test_wrong_sizes_name_both_files(root):
    save(root / 'annotations/a.png', np.zeros((16, 12), dtype=np.uint8))
    message = r'annotations/a.png is 12 x 16 pixels, its image \S+images/a.png is 16 x 12; expected the same size'
    refused(ValueError, message, root)
    exif = Image.Exif()
    exif[0x0112] = 6
    Image.new('RGB', (12, 16)).save(root / 'images/b.jpg', exif=exif)  # shown with 16 x 12 pixels
    assert dataset(root)[1]['gt_seg_map'].shape == (12, 16)
    save(root / 'annotations/b.png', np.zeros((16, 12), dtype=np.uint8))
    refused(ValueError, "the image's EXIF orientation turns it upright: turn the annotation likewise", root, 1)


def test_labels_without_a_class(root):
    path = root / 'annotations/a.png'
    save_label(path, 4)
    refused(ValueError, 'a.png holds label 4; .* 3 classes, expected 1 to 3, 255 for ignored, 0 for unlabelled', root)
    save_label(path, 3)
    assert dataset(root)[0]['gt_seg_map'].max() == 2
    message = 'holds label 3; .* expected 0 to 2, 255 for ignored; where 0 marks .* set reduce_zero_label=True'
    refused(ValueError, message, root, reduce_zero_label=False)
    save_label(path, 1000, np.uint16)  # it would be 232 in eight bits
    refused(ValueError, 'holds label 1000', root)
    load = TRANSFORMS.build(dict(type='beit_mm.LoadAnnotation'))
    with pytest.raises(ValueError, match='holds label 1000; expected 0 to 254'):  # another dataset than ours
        load(dict(seg_map_path=str(path), img_path='x', ori_shape=(12, 16)))


def test_files_that_are_no_annotations(root):
    save(root / 'annotations/a.png', np.zeros((12, 16, 3), dtype=np.uint8))
    refused(ValueError, 'a.png: an image of mode RGB; expected one number a pixel', root)
    (root / 'annotations/a.png').write_bytes((root / 'annotations/b.png').read_bytes()[:60])
    refused(OSError, r'annotations/a.png: cannot be read as an image', root)
    assert dataset(root, on_error='skip')[0]['unreadable'].endswith('annotations/a.png')  # another pair stands in
    Image.fromarray(np.eye(4, dtype=bool)).save(root / 'one_bit.png')
    assert np.array_equal(read_labels(str(root / 'one_bit.png')), np.eye(4))
