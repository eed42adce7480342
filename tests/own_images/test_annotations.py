"""Polygons and boxes are drawn as label maps: pixels against counts by hand and COCO's own rules."""

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from beit_mm.errors import UserError
from beit_mm.own_images.annotations import find_annotations, mask_of
from beit_mm.own_images.images import write_lists
from beit_mm.own_images.label_maps import LabelMaps, find_label_maps

NUMBER, HEIGHT, WIDTH = 12, 40, 60
CAR = [10, 5, 30, 5, 30, 25, 10, 25]  # x, y: 20 x 20 pixels
SIGN = (40, 10, 12, 6)  # x, y, width, height
ON_CAR = (12, 7, 4, 4)


def make_photos(folder: Path, number: int = NUMBER) -> list[str]:
    folder.mkdir(parents=True)
    for index in range(number):
        Image.new('RGB', (WIDTH, HEIGHT), (index, 0, 0)).save(folder / f'{index}.jpg')
    return [f'{index}.jpg' for index in range(number)]


def expected() -> np.ndarray:
    """1: car, 2: sign, which lies on the car too."""
    labels = np.zeros((HEIGHT, WIDTH), np.uint8)
    labels[5:25, 10:30] = 1
    for left, top, width, height in (SIGN, ON_CAR):
        labels[top : top + height, left : left + width] = 2
    return labels


def coco_objects(image: int) -> list[dict]:
    sign = [dict(image_id=image, category_id=9, bbox=box, iscrowd=0) for box in (SIGN, ON_CAR)]
    return [*sign, dict(image_id=image, category_id=4, segmentation=[CAR], bbox=[10, 5, 20, 20], iscrowd=0)]


def coco(folder: Path, names: list[str], **changes: object) -> dict:
    """Content of a COCO file, whose sign comes before the car."""
    images = [dict(id=index, file_name=name, width=WIDTH, height=HEIGHT) for index, name in enumerate(names)]
    objects = [each for index in range(len(names)) for each in coco_objects(index)]
    return (
        dict(images=images, annotations=objects, categories=[dict(id=4, name='car'), dict(id=9, name='sign')]) | changes
    )


def make_coco(folder: Path) -> None:
    for split, number in (('train', NUMBER), ('val', 2)):
        names = make_photos(folder / f'{split}2017', number)
        file = folder / f'annotations/instances_{split}2017.json'
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(coco(folder, names)))
    (folder / 'annotations/captions_val2017.json').write_text('{"images": [], "annotations": []}')


def make_yolo(folder: Path) -> None:
    box = ' '.join(str(number) for number in (1, 46 / WIDTH, 13 / HEIGHT, 12 / WIDTH, 6 / HEIGHT))
    small = ' '.join(str(number) for number in (1, 14 / WIDTH, 9 / HEIGHT, 4 / WIDTH, 4 / HEIGHT))
    outline = ' '.join(str(number / side) for number, side in zip(CAR, [WIDTH, HEIGHT] * 4, strict=True))
    for split, number in (('train', NUMBER), ('valid', 2)):
        names = make_photos(folder / split / 'images', number)
        (folder / split / 'labels').mkdir()
        for name in names:
            (folder / split / 'labels' / name.replace('jpg', 'txt')).write_text(f'{box}\n0 {outline}\n{small}\n')
    (folder / 'data.yaml').write_text('names: [car, sign, never]\nnc: 3\n')


def make_labelme(folder: Path) -> None:
    shapes = [dict(label='car', points=np.reshape(CAR, (4, 2)).tolist(), shape_type='polygon')]
    for left, top, width, height in (SIGN, ON_CAR):
        corners = [[left, top], [left + width, top + height]]
        shapes.append(dict(label='sign', points=corners, shape_type='rectangle'))
    for name in make_photos(folder):
        content = dict(shapes=shapes, imagePath=f'..\\photos\\{name}', imageWidth=WIDTH, imageHeight=HEIGHT)
        (folder / name.replace('jpg', 'json')).write_text(json.dumps(content))


def make_voc(folder: Path) -> None:
    (folder / 'Annotations').mkdir(parents=True)
    for name in make_photos(folder / 'JPEGImages'):
        boxes = [('car', 10, 5, 20, 20), ('sign', *SIGN), ('sign', *ON_CAR)]
        objects = ''.join(
            f'<object><name>{label}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + width}</xmax>'
            f'<ymax>{y + height}</ymax></bndbox></object>'
            for label, x, y, width, height in boxes
        )
        (folder / 'Annotations' / name.replace('jpg', 'xml')).write_text(f'<annotation>{objects}</annotation>')


def drawn(found: LabelMaps, lists: Path, name: str) -> dict[str, np.ndarray]:
    """The label maps that a dataset would read, by image."""
    write_lists(found, lists)
    options = found.dataset(lists, name)
    images = [
        line.rsplit(' ', 1)[0] if ' ' in line else line for line in Path(options['ann_file']).read_text().split('\n')
    ]
    maps = Path(options['data_prefix']['seg_map_path'])
    return {image: np.asarray(Image.open((maps / image).with_suffix('.png'))) for image in images if image}


@pytest.mark.parametrize(('make', 'held_out'), [(make_coco, 2), (make_yolo, 2), (make_labelme, 1), (make_voc, 1)])
def test_each_format_gives_the_same_pixels(tmp_path, make, held_out):
    make(tmp_path / 'data')
    found = find_label_maps(tmp_path / 'data')
    assert found.classes == ['background', 'car', 'sign'] and found.values == [0, 1, 2]
    assert len(found.held_out.names) == held_out
    for name, number in (('train', len(found.train.names)), ('held_out', held_out)):
        maps = drawn(found, tmp_path / 'lists', name)
        assert len(maps) == number
        for labels in maps.values():
            np.testing.assert_array_equal(labels, expected())
    assert any('boxes' in note for note in found.notes)
    assert not [*(tmp_path / 'data').rglob('*.png')]


def described(folder: Path, **changes: object) -> list[np.ndarray]:
    """Maps of the only image of a COCO file with these changes, and the notes on it."""
    names = make_photos(folder, 1)
    (folder / 'a.json').write_text(json.dumps(coco(folder, names, **changes)))
    return find_annotations(folder)


def test_discs_of_the_size_of_cells_keep_their_area(tmp_path):
    angles = np.linspace(0, 2 * np.pi, 60)
    disc = np.stack([20.3 + 5.5 * np.cos(angles), 20.6 + 5.5 * np.sin(angles)], axis=1)
    objects = [dict(image_id=0, category_id=4, segmentation=[disc.ravel().tolist()])]
    labels = described(tmp_path / 'a', annotations=objects).draw('0.jpg', HEIGHT, WIDTH)
    y, x = np.mgrid[:HEIGHT, :WIDTH] + 0.5
    inside = np.hypot(x - 20.3, y - 20.6) < 5.5
    assert ((labels == 1) & inside).sum() / ((labels == 1) | inside).sum() > 0.95


def test_crowds_are_ignored_and_shapes_end_at_the_border(tmp_path):
    run_lengths = dict(size=[HEIGHT, WIDTH], counts=[0, 2 * HEIGHT, (WIDTH - 2) * HEIGHT])
    objects = [
        dict(image_id=0, category_id=4, segmentation=[[-50, 30, 900, 30, 900, 1e30, -50, 1e30]]),
        dict(image_id=0, category_id=9, segmentation=run_lengths, iscrowd=1),
        dict(image_id=0, category_id=9, segmentation=[[1, 1, 5, 5]]),
    ]
    found = described(tmp_path / 'a', annotations=objects)
    assert found.classes == ['background', 'car']
    labels = found.draw('0.jpg', HEIGHT, WIDTH)
    assert (labels[:, :2] == 255).all() and (labels[30:, 2:] == 1).all() and not labels[:30, 2:].any()
    assert any('1 shapes without an area' in note for note in found.notes)


def test_compressed_run_lengths():
    # made by pycocotools 2.0.11 from a rectangle of 3 x 4 pixels in 6 x 9
    mask = np.zeros((6, 9), bool)
    mask[1:4, 2:6] = True
    np.testing.assert_array_equal(mask_of(dict(size=[6, 9], counts='=3300000a0')), mask)
    with pytest.raises(ValueError, match='run lengths'):
        mask_of(dict(size=[6, 9], counts=[10**12, 5]))


def test_what_does_not_fit_is_named(tmp_path):
    images = [dict(id=0, file_name='0.jpg'), dict(id=1, file_name='lost.jpg')]
    found = described(tmp_path / 'a', images=images, annotations=coco_objects(0) + coco_objects(1))
    assert any('lost.jpg' in note for note in found.notes)
    other = described(tmp_path / 'b', images=[dict(id=0, file_name='0.jpg', width=WIDTH + 1, height=HEIGHT)])
    assert other.draw('0.jpg', HEIGHT, WIDTH) is None  # drawn for another size
    with pytest.raises(UserError, match='a.json is damaged'):
        described(tmp_path / 'c', annotations=[dict(image_id=0, category_id=5)])
    with pytest.raises(UserError, match='both have'):
        (tmp_path / 'a/b.json').write_text((tmp_path / 'a/a.json').read_text())
        find_annotations(tmp_path / 'a')


def test_yolo_in_pixels_is_refused_and_images_without_a_file_are_background(tmp_path):
    make_yolo(tmp_path / 'data')
    (tmp_path / 'data/train/labels/3.txt').unlink()
    found = find_label_maps(tmp_path / 'data')
    assert not drawn(found, tmp_path / 'lists', 'train')['train/images/3.jpg'].any()
    assert any('1 images have no shapes' in note for note in found.notes)
    (tmp_path / 'data/train/labels/3.txt').write_text('0 30 20 10 10\n')
    with pytest.raises(UserError, match='3.txt is damaged'):
        find_label_maps(tmp_path / 'data')


def test_other_files_beside_images_mean_nothing_and_label_maps_come_first(tmp_path):
    make_photos(tmp_path / 'a')
    for name, text in {
        'a.json': '{',
        'b.json': '[]',
        'c.yaml': '{',
        '0.txt': 'a photo of 2 dogs',
        '0.xml': '<x/>',
        '0.regions.txt': '1 1 1 1 1 1',  # label maps as text
    }.items():
        (tmp_path / 'a' / name).write_text(text)
    assert find_annotations(tmp_path / 'a') is None
    make_coco(tmp_path / 'b')
    assert find_annotations(tmp_path / 'b')
    make_photos(tmp_path / 'b/masks')
    assert find_annotations(tmp_path / 'b') is None


def test_images_that_would_share_a_map_are_refused(tmp_path):
    make_yolo(tmp_path)
    Image.new('RGB', (9, 9)).save(tmp_path / 'train/images/3.png')
    with pytest.raises(UserError, match='3.jpg, .*3.png'):
        find_annotations(tmp_path)


def test_a_later_call_draws_only_what_is_missing(tmp_path):
    make_labelme(tmp_path / 'data')
    found = find_label_maps(tmp_path / 'data')
    name, other = [*found.train.names][:2]
    drawn(found, tmp_path / 'lists', 'train')
    files = [(tmp_path / 'lists/label_maps' / image).with_suffix('.png') for image in (name, other)]
    files[0].unlink()
    Image.new('L', (WIDTH, HEIGHT), 1).save(files[1])
    maps = drawn(found, tmp_path / 'lists', 'train')
    np.testing.assert_array_equal(maps[name], expected())
    assert (maps[other] == 1).all()
