"""Images with annotations: what is read equals mmseg's own reading, and what does not fit is refused by name."""

from pathlib import Path

import numpy as np
import pytest
from mmseg.datasets.transforms import LoadAnnotations
from PIL import Image
from tifffile import imwrite

from beit_mm.datasets import segmentation_folder
from beit_mm.datasets.reading import UnreadableImageError
from beit_mm.datasets.segmentation_folder import (
    LoadAnnotation,
    class_line,
    distinct_colours,
    named_classes,
    read_labels,
)
from beit_mm.errors import UserError
from beit_mm.registry import DATASETS

CLASSES = ['sky', 'road', 'tree']
PREFIX = dict(img_path='images', seg_map_path='annotations')


def save(path: Path, labels: np.ndarray, palette: bool = False, **options) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image = Image.fromarray(labels)
    if palette:
        image.putpalette([7 * i % 256 for i in range(768)])
    image.save(path, **options)


def full(label: int, *size: int, dtype: type = np.uint8) -> np.ndarray:
    return np.full(size or (12, 16), label, dtype)


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
    settings = dict(classes=CLASSES, reduce_zero_label=True, data_prefix=PREFIX)
    pipeline = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]
    settings = dict(settings, type='beit_mm.SegmentationFolder', data_root=str(root), pipeline=pipeline)
    return DATASETS.build(settings | changes)


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
    save(root / 'one_bit.png', np.eye(4, dtype=bool))
    assert np.array_equal(read_labels(str(root / 'one_bit.png')), np.eye(4))


@pytest.mark.parametrize('reduced', [False, True])
def test_labels_of_mmsegs_datasets_that_choose_among_their_classes(root, reduced):
    chosen = dict(metainfo=dict(classes=('low_vegetation', 'building')), reduce_zero_label=reduced)
    data = DATASETS.build(dict(chosen, type='mmseg.ISPRSDataset', data_root=str(root), data_prefix=PREFIX))
    for sample in data:
        ours = LoadAnnotation().transform(dict(sample, ori_shape=(12, 16)))
        assert np.array_equal(ours['gt_seg_map'], LoadAnnotations().transform(sample)['gt_seg_map'])
        assert {*ours['gt_seg_map'].flat} <= {0, 1, 255}


def test_classes_from_anywhere(root):
    (root / 'names.txt').write_text('sky\nroad\ntree\n')
    (root / 'table.txt').write_text('Idx\tRatio\tName\n1\t0.5\tsky\n2\t0.3\troad, way\n3\t0.1\ttree\n')
    for file, second in (('names.txt', 'road'), (str(root / 'names.txt'), 'road'), ('table.txt', 'road, way')):
        assert dataset(root, classes=file).metainfo['classes'] == ('sky', second, 'tree')
    given = dict(classes=CLASSES[::-1], palette=[[1, 2, 3], [4, 5, 6], [7, 8, 9]])  # as to mmseg's datasets
    assert dataset(root, metainfo=given).metainfo == dict(
        given, classes=('tree', 'road', 'sky'), reduce_zero_label=True
    )
    assert len({*map(tuple, distinct_colours(254))}) == 254
    ade = dataset(root, classes='mmseg.ADE20KDataset').metainfo
    assert len(ade['classes']) == len(ade['palette']) == 150
    assert (ade['classes'][0], ade['palette'][:2]) == ('wall', [[120, 120, 120], [180, 120, 120]])
    colours = [[1, 2, 3]] * 150
    assert dataset(root, classes='mmseg.ADE20KDataset', metainfo=dict(palette=colours)).metainfo['palette'] == colours


def test_a_test_servers_images_have_no_annotations_and_a_broken_one_costs_its_image(root):
    assert 'gt_seg_map' not in dataset(root, data_prefix=dict(img_path='images'))[0]
    (root / 'annotations/a.png').write_bytes((root / 'annotations/b.png').read_bytes()[:60])
    with pytest.raises(OSError, match=r'annotations/a.png: cannot be read as an image'):
        dataset(root)[0]
    assert dataset(root, on_error='skip')[0]['unreadable'].endswith('annotations/a.png')  # another pair stands in


@pytest.mark.parametrize(
    ('labels', 'changes', 'message'),
    [
        (None, {}, r"no label map '\S+annotations/a.png' for '\S+images/a.png'; 1 of 4 images have none"),
        (full(0, 16, 12), {}, r'/a.png is 12 x 16 pixels, its image \S+/a.png is 16 x 12.*same size'),
        (full(4), {}, 'a.png holds label 4; .* 1 to 3 .* 255'),
        (full(3), dict(reduce_zero_label=False), 'label 3; .* 0 to 2 .*reduce_zero_label=True'),
        (full(1), dict(pipeline=[dict(type='mmseg.LoadAnnotations')]), 'LoadAnnotations .*beit_mm.LoadAnnotation'),
        (full(1000, dtype=np.uint16), {}, 'holds label 1000'),  # it would be 232 in eight bits
        (full(0, 12, 16, 3) + np.uint8([1, 2, 3]), {}, r'a.png holds .* 1 2 3 \(192 pixels\); .*name R G B'),
    ],
)
def test_what_does_not_fit_is_named(root, labels, changes, message):
    path = root / 'annotations/a.png'
    path.unlink() if labels is None else save(path, labels)
    with pytest.raises((ValueError, FileNotFoundError), match=f'^.*{message}.*$'):
        dataset(root, **changes)[0]


def test_a_label_map_without_an_image_is_named_unless_a_list_chose(root, warnings):
    (root / 'images/a.png').unlink()
    assert len(dataset(root)) == 3
    assert len(warnings()) == 1 and '1 label maps' in warnings()[0] and 'annotations/a.png' in warnings()[0]
    (root / 'list.txt').write_text('b.jpg\n')
    assert len(dataset(root, ann_file='list.txt')) == 1 and len(warnings()) == 1


def test_annotations_of_turned_images(root):
    exif = Image.Exif()
    exif[0x0112] = 6
    save(root / 'images/b.jpg', full(0, 16, 12, 3), exif=exif)
    assert dataset(root)[1]['gt_seg_map'].shape == (12, 16)
    save(root / 'annotations/b.png', full(0, 16, 12))
    with pytest.raises(ValueError, match='b.png .*EXIF'):
        dataset(root)[1]


def test_the_limit_of_an_image_is_that_of_its_annotation(root, monkeypatch):
    monkeypatch.setattr(segmentation_folder, 'MAX_PIXELS', 12)  # LoadImage has a higher one
    assert dataset(root)[1]['gt_seg_map'].shape == (12, 16)
    save(root / 'annotations/b.png', full(0, 13, 16))
    with pytest.raises(UnreadableImageError, match='annotations.b.png'):
        dataset(root)[1]


@pytest.mark.parametrize('name', ['sky', 'zone 1 2 3', ' spaced ', '"quoted"', 'B 12', 'line\nend'])
def test_any_name_of_a_class_survives_its_line(name, tmp_path):
    """Also one that ends as a colour does, and beside lines with colours."""
    (tmp_path / 'plain.txt').write_text(f'{class_line(name)}\nother\n')
    assert named_classes(str(tmp_path / 'plain.txt')) == ((name, 'other'), None)
    (tmp_path / 'colours.txt').write_text(f'{class_line(name)} 1 2 3\nother 4 5 6\n')
    assert named_classes(str(tmp_path / 'colours.txt')) == ((name, 'other'), [[1, 2, 3], [4, 5, 6]])


def test_numbers_are_read_however_they_are_stored(tmp_path):
    labels = np.arange(12).reshape(3, 4) % 3
    gray = Image.fromarray(labels.astype(np.uint8))
    opaque = Image.new('L', gray.size, 255)
    Image.merge('LA', [gray, opaque]).save(tmp_path / 'la.png')
    Image.merge('RGBA', [gray, gray, gray, opaque]).save(tmp_path / 'rgba.png')
    for name, options in dict(clear=dict(transparency=0), bits=dict(bits=2)).items():
        palette = gray.copy()
        palette.putpalette([0, 0, 0, 200, 0, 0, 0, 200, 0])
        palette.save(tmp_path / f'{name}.png', **options)
    for dtype in ('uint32', 'int64', 'uint64', 'float16', 'float64'):
        imwrite(tmp_path / f'{dtype}.tif', labels.astype(dtype))
    files = [*tmp_path.iterdir()]
    assert len(files) == 9 and all(np.array_equal(read_labels(str(file)), labels) for file in files)
    Image.merge('LA', [opaque, gray]).save(tmp_path / 'cut_out.png')
    with pytest.raises(UserError, match='cut_out.png .*transparency'):
        read_labels(str(tmp_path / 'cut_out.png'))
    imwrite(tmp_path / 'bands.tif', np.zeros((3, 4, 5)), photometric='minisblack', planarconfig='contig')
    with pytest.raises(UnreadableImageError, match='bands.tif'):
        read_labels(str(tmp_path / 'bands.tif'))
