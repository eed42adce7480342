"""Polygons and boxes are drawn as label maps: pixels against counts by hand and COCO's own rules."""

import json
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tifffile import imwrite

from beit_mm.datasets.image_folder import read_list
from beit_mm.errors import UserError
from beit_mm.own_images.annotations import Annotations, Files, find_annotations, mask_of
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
    categories = [dict(id=4, name='car'), dict(id=9, name='sign')]
    return dict(images=images, annotations=objects, categories=categories) | changes


def make_coco(folder: Path) -> None:
    for split, number in (('train', NUMBER), ('val', 2)):
        names = make_photos(folder / f'{split}2017', number)
        file = folder / f'annotations/instances_{split}2017.json'
        file.parent.mkdir(exist_ok=True)
        file.write_text(json.dumps(coco(folder, names)))
    (folder / 'annotations/captions_val2017.json').write_text('{"images": [], "annotations": []}')


def make_yolo(folder: Path) -> None:
    boxes = [
        f'1 {(x + w / 2) / WIDTH} {(y + h / 2) / HEIGHT} {w / WIDTH} {h / HEIGHT}' for x, y, w, h in (SIGN, ON_CAR)
    ]
    outline = ' '.join(str(number / side) for number, side in zip(CAR, [WIDTH, HEIGHT] * 4, strict=True))
    for split, number in (('train', NUMBER), ('valid', 2)):
        names = make_photos(folder / split / 'images', number)
        (folder / split / 'labels').mkdir()
        for name in names:
            (folder / split / 'labels' / name.replace('jpg', 'txt')).write_text('\n'.join([*boxes, f'0 {outline}']))
    (folder / 'data.yaml').write_text('names: [car, sign, never]\nnc: 3\n')


def make_labelme(folder: Path) -> None:
    shapes = [dict(label='car', points=np.reshape(CAR, (4, 2)).tolist(), shape_type='polygon')]
    for left, top, width, height in (SIGN, ON_CAR):
        corners = [[left, top], [left + width, top + height]]
        shapes.append(dict(label='sign', points=corners, shape_type='rectangle'))
    for name in make_photos(folder):
        content = dict(shapes=shapes, imagePath=f'..\\photos\\{name}', imageWidth=WIDTH, imageHeight=HEIGHT)
        (folder / name.replace('jpg', 'json')).write_text(json.dumps(content))


BOXES = [('car', 10, 5, 20, 20), ('sign', *SIGN), ('sign', *ON_CAR)]  # class, x, y, width, height
CAR_POINTS = np.reshape(CAR, (4, 2)).tolist()
SIDES = 'x', 'y', 'width', 'height'


def make_via(folder: Path) -> None:
    """Regions as a list in one file, as a dict in another."""
    shapes = [dict(name='polygon', all_points_x=CAR[::2], all_points_y=CAR[1::2])]
    shapes += [dict(zip(SIDES, box, strict=True), name='rect') for box in (SIGN, ON_CAR)]
    pairs = zip(shapes, ('car', 'sign', 'sign'), strict=True)
    regions = [dict(shape_attributes=shape, region_attributes=dict(kind=name)) for shape, name in pairs]
    for split, number, held in (('train', NUMBER, regions), ('val', 2, dict(enumerate(regions)))):
        content = {f'{name}99': dict(filename=name, regions=held) for name in make_photos(folder / split, number)}
        content = content if split == 'val' else {'_via_img_metadata': content}
        (folder / split / 'via.json').write_text(json.dumps(content))


def make_supervisely(folder: Path) -> None:
    (folder / 'ds/ann').mkdir(parents=True)
    shapes = [('sign', 'rectangle', [[x, y], [x + w, y + h]]) for x, y, w, h in (SIGN, ON_CAR)]
    shapes += [('car', 'bitmap', []), ('car', 'polygon', CAR_POINTS)]
    objects = [dict(classTitle=name, geometryType=kind, points=dict(exterior=xy)) for name, kind, xy in shapes]
    for name in make_photos(folder / 'ds/img'):
        content = dict(size=dict(height=HEIGHT, width=WIDTH), objects=objects)
        (folder / 'ds/ann' / f'{name}.json').write_text(json.dumps(content))


def make_label_studio(folder: Path) -> None:
    percent = np.array([100 / WIDTH, 100 / HEIGHT] * 2)
    values = [('polygonlabels', dict(points=(CAR_POINTS * percent[:2]).tolist(), polygonlabels=['car']))]
    for box in (SIGN, ON_CAR):
        values.append(('rectanglelabels', dict(zip(SIDES, box * percent, strict=True), rectanglelabels=['sign'])))
    results = [dict(type=kind, value=value) for kind, value in (*values, ('choices', dict(choices=['sunny'])))]
    names = [f'/data/upload/1/0a1b2c3d-{name}' for name in make_photos(folder / 'photos')]
    tasks = [dict(data=dict(image=name), annotations=[dict(result=results)]) for name in names]
    (folder / 'project.json').write_text(json.dumps(tasks))


def make_createml(folder: Path) -> None:
    places = [dict(x=x + w / 2, y=y + h / 2, width=w, height=h) for _, x, y, w, h in BOXES]
    shapes = [dict(label=box[0], coordinates=place) for box, place in zip(BOXES, places, strict=True)]
    content = [dict(image=name, annotations=shapes) for name in make_photos(folder)]
    (folder / '_annotations.createml.json').write_text(json.dumps(content))


def make_cvat(folder: Path) -> None:
    box = '<box label="sign" xtl="{}" ytl="{}" xbr="{}" ybr="{}"/>'
    boxes = ''.join(box.format(x, y, x + w, y + h) for x, y, w, h in (SIGN, ON_CAR))
    car = '<tag label="sunny"/><polygon label="car" points="10,5;30,5;30,25;10,25"/>'
    image = f'<image name="photos/{{}}" width="{WIDTH}" height="{HEIGHT}">{boxes}{car}</image>'
    images = ''.join(map(image.format, make_photos(folder / 'photos')))
    (folder / 'annotations.xml').write_text(f'<annotations>{images}</annotations>')


def make_box_table(folder: Path) -> None:
    rows = ['filename,width,height,class,xmin,ymin,xmax,ymax']
    for name in make_photos(folder):
        rows += [f'{name},{WIDTH},{HEIGHT},{label},{x},{y},{x + w},{y + h}' for label, x, y, w, h in BOXES]
    (folder / '_annotations.csv').write_text('\n'.join(rows))


def make_dota(folder: Path) -> None:
    rows = [f'{x} {y} {x + w} {y} {x + w} {y + h} {x} {y + h} {label} 0' for label, x, y, w, h in BOXES]
    (folder / 'labelTxt').mkdir(parents=True)
    for name in make_photos(folder / 'images'):
        (folder / 'labelTxt' / name.replace('jpg', 'txt')).write_text('\n'.join(['gsd:0.14', *rows]))


MAKERS = [(make_coco, 2), (make_yolo, 2), (make_via, 2)]  # with the number of held-out images
MAKERS += [(make, 1) for make in (make_supervisely, make_label_studio, make_createml, make_cvat, make_box_table)]


def make_voc(folder: Path) -> None:
    (folder / 'Annotations').mkdir(parents=True)
    for name in make_photos(folder / 'JPEGImages'):
        objects = ''.join(
            f'<object><name>{label}</name><bndbox><xmin>{x + 1}</xmin><ymin>{y + 1}</ymin><xmax>{x + width}</xmax>'
            f'<ymax>{y + height}</ymax></bndbox></object>'
            for label, x, y, width, height in BOXES
        )
        (folder / 'Annotations' / name.replace('jpg', 'xml')).write_text(f'<annotation>{objects}</annotation>')


def drawn(found: LabelMaps, lists: Path, name: str) -> dict[str, np.ndarray]:
    """The label maps that a dataset would read, by image."""
    write_lists(found, lists)
    options = found.dataset(lists, name)
    maps = Path(options['data_prefix']['seg_map_path'])
    images = [path for _, path, _ in read_list(options['ann_file'])]
    return {image: np.asarray(Image.open((maps / image).with_suffix('.png'))) for image in images}


@pytest.mark.parametrize(('make', 'held_out'), [*MAKERS, (make_labelme, 1), (make_voc, 1), (make_dota, 1)])
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
    assert make is make_dota or any('boxes' in note for note in found.notes)
    assert not [*(tmp_path / 'data').rglob('*.png')]


YOLO = [f'{split}/{kind} {kind}/{{}}' for split in ('train', 'valid') for kind in ('images', 'labels')]
BELOW = [  # folders that are moved, images to learn from and held out
    (make_coco, ['train2017 images/train2017', 'val2017 images/val2017'], (NUMBER, 2)),
    (make_yolo, [move.format(move.split('/')[0]) for move in YOLO], (NUMBER, 2)),
    (make_yolo, [move.format(f'{move[0]}_town/7') for move in YOLO], (NUMBER + 1, 1)),
    (make_voc, ['JPEGImages x', 'x JPEGImages/rome', 'Annotations x', 'x Annotations/rome'], (NUMBER - 1, 1)),
]


@pytest.mark.parametrize(('make', 'moves', 'numbers'), BELOW)
@pytest.mark.parametrize('around', ['.', 'test set/test set'])
def test_annotations_lie_beside_the_only_folder_of_images(tmp_path, make, moves, numbers, around):
    """Whose folders would be classes without them; what an archive is called means nothing."""
    data = tmp_path / 'data' / around
    make(data)
    for old, new in map(str.split, moves):
        (data / new).parent.mkdir(parents=True, exist_ok=True)
        (data / old).rename(data / new)
    found = find_label_maps(tmp_path / 'data')
    assert found and (len(found.train.names), len(found.held_out.names)) == numbers
    for labels in drawn(found, tmp_path / 'lists', 'train').values():
        np.testing.assert_array_equal(labels, expected())


# An image, {}/{}/{} of numbers; where it is named, and how
NUMBERED = [
    ('images/{}/{}/{}.png', 'labels/{}/{}', '{}.txt'),
    ('images/cam_{}_{}/{}.png', 'labels/cam_{}_{}', '{}.txt'),
    ('cam_{}/{}/images/{}.png', 'cam_{}/{}/labels', '{}.txt'),
    ('{}/{}/{}.png', '{}/{}', '{}.json'),
    ('patient_{}/{}/{}.png', 'list_2.csv', 'patient_{}/{}/{}.png'),
    ('{}/{}/{}.png', '{}/{}/list.json', '{}.png'),
    ('images/{}/{}/{}.png', 'annotations/list_2.json', '/home/me/images/{}/{}/{}.png'),
]


@pytest.mark.parametrize(('image', 'place', 'name'), NUMBERED)
def test_each_name_has_its_image_where_folders_and_files_are_numbers(tmp_path, image, place, name):
    numbers = [*product('12', '123', '1234')]
    for each in numbers:
        (tmp_path / image.format(*each)).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / image.format(*each)).touch()
    files = Files(tmp_path)
    for each in numbers:
        named = name.format(*each[3 - name.count('{}') :])
        assert files.image_of(named, place.format(*each)) == image.format(*each)


def test_an_exact_path_comes_before_a_longer_one(tmp_path):
    (tmp_path / 'a/2').mkdir(parents=True)
    (tmp_path / '2').mkdir()
    for image in ('0.jpg', '2/0.jpg', 'a/2/0.jpg', 'a/2/1.jpg'):
        (tmp_path / image).touch()
    files = Files(tmp_path)
    assert files.image_of('0.jpg', 'list.csv') == '0.jpg' and files.image_of('./0.jpg', '2/list.csv') == '2/0.jpg'
    assert files.image_of('2/0.jpg', 'a.csv') == '2/0.jpg' and files.image_of('2/0.jpg', 'a/2.csv') == 'a/2/0.jpg'
    assert files.image_of('2\\1.jpg', 'a.csv') == 'a/2/1.jpg' and files.image_of('/', 'a.csv') is None


def test_the_lists_of_voc_say_which_boxes_are_held_out(tmp_path):
    make_voc(tmp_path)
    main = tmp_path / 'ImageSets/Main'
    main.mkdir(parents=True)
    (main / 'train.txt').write_text('\n'.join(map(str, range(10))))
    assert any('Main/train.txt is not read' in note for note in find_label_maps(tmp_path).notes)
    (main / 'val.txt').write_text('10\n11\n')
    found = find_label_maps(tmp_path)
    assert [*found.held_out.names] == ['JPEGImages/10.jpg', 'JPEGImages/11.jpg'] and len(found.train.names) == 10
    assert not any('not read' in note for note in found.notes)


def described(folder: Path, **changes: object) -> Annotations:
    """What a COCO file of one image, with these changes, says."""
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
    assert found.classes == ['background', 'car'] and any(note.startswith('1 shapes left') for note in found.notes)
    assert any('1 shapes are of crowds' in note for note in found.notes)
    labels = found.draw('0.jpg', HEIGHT, WIDTH)
    assert (labels[:, :2] == 255).all() and (labels[30:, 2:] == 1).all() and not labels[:30, 2:].any()


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
    for index, wrong in enumerate(
        (dict(category_id=5), dict(category_id=4, segmentation=dict(size=[2, 2], counts=[9])))
    ):
        with pytest.raises(UserError, match='a.json is damaged.* 771'):  # among many the damaged one is named
            described(tmp_path / str(index), annotations=[*coco_objects(0), dict(id=771, image_id=0, **wrong)])
    with pytest.raises(UserError, match='both have'):
        (tmp_path / 'a/b.json').write_text((tmp_path / 'a/a.json').read_text())
        find_annotations(tmp_path / 'a')


@pytest.mark.parametrize('encoding', ['utf-8', 'utf-16'])
def test_entities_and_deep_brackets_are_not_expanded(encoding, tmp_path, warnings):
    """Ten entities of ten of the one before are ten billion characters."""
    make_photos(tmp_path / 'xml')
    entities = [f'<!ENTITY a{number} "{f"&a{number - 1};" * 10}">' for number in range(1, 11)]
    text = f'<!DOCTYPE x [<!ENTITY a0 "aaaaaaaaaa">{"".join(entities)}]><annotation>&a10;</annotation>'
    (tmp_path / 'xml/0.xml').write_text(f'<?xml version="1.0" encoding="{encoding}"?>{text}', encoding)
    assert find_annotations(tmp_path / 'xml') is None
    assert '0.xml' in ''.join(warnings())
    make_photos(tmp_path / 'json')
    (tmp_path / 'json/instances.json').write_text(100_000 * '[' + 100_000 * ']')
    assert find_annotations(tmp_path / 'json') is None
    assert 'instances.json' in ''.join(warnings())


def test_yolo_with_other_rows_is_refused_and_images_without_a_file_are_background(tmp_path):
    data = tmp_path / 'data'
    make_yolo(data)
    file = data / 'train/labels/3.txt'
    file.unlink()
    found = find_label_maps(data)
    assert not drawn(found, tmp_path / 'lists', 'train')['train/images/3.jpg'].any()
    assert any('1 images have no shapes' in note for note in found.notes)
    for row in ('0 30 20 10 10', '1 0.5', '-1 0.5 0.5 0.1 0.1'):  # in pixels; a classifier's; no class
        file.write_text(row)
        with pytest.raises(UserError, match='3.txt is damaged'):
            find_annotations(data)
    file.unlink()
    Image.new('RGB', (9, 9)).save(data / 'train/images/3.png')
    with pytest.raises(UserError, match='3.jpg, .*3.png'):  # would share a map
        find_annotations(data)
    (data / 'data.yaml').write_text('names: [car]\nkpt_shape: [2, 3]\n')
    with pytest.raises(UserError, match='data.yaml: key points'):
        find_annotations(data)


def test_other_files_beside_images_mean_nothing_and_label_maps_come_first(tmp_path):
    make_photos(tmp_path / 'a')
    others = {'a.json': '{', 'b.json': '[]', 'c.yaml': '{', '0.txt': '3 0.97', '0.xml': '<x/>'}
    others |= {'1.txt': 'a photo of 2 dogs', '0.regions.txt': '1 1 1 1 1 1'}  # the last are label maps as text
    for name, text in others.items():
        (tmp_path / 'a' / name).write_text(text)
    assert find_annotations(tmp_path / 'a') is None
    make_coco(tmp_path / 'b')
    make_photos(tmp_path / 'b/masks')
    assert find_annotations(tmp_path / 'b') is None


def test_images_that_are_only_called_test_are_learned_from_and_bands_are_kept(tmp_path):
    data = tmp_path / 'data'
    make_labelme(data)
    for index in range(NUMBER):
        (data / f'{index}.jpg').unlink()
        (data / f'{index}.json').rename(data / f'test_{index}.json')
        bands = np.full((HEIGHT, WIDTH, 5), index, np.uint16)
        imwrite(data / f'test_{index}.tif', bands, photometric='minisblack', planarconfig='contig')
    found = find_label_maps(data)
    assert len(found.train.names) == NUMBER - 1 and len(found.bands['mean']) == 5
    for labels in drawn(found, tmp_path / 'lists', 'train').values():
        np.testing.assert_array_equal(labels, expected())


def test_a_later_call_draws_only_what_is_missing(tmp_path):
    make_labelme(tmp_path / 'data')
    found = find_label_maps(tmp_path / 'data')
    drawn(found, tmp_path / 'lists', 'train')
    kept, missing = sorted((tmp_path / 'lists/label_maps').iterdir())[:2]
    missing.unlink()
    Image.new('L', (WIDTH, HEIGHT), 1).save(kept)
    write_lists(found, tmp_path / 'lists')
    np.testing.assert_array_equal(Image.open(missing), expected())
    assert (np.asarray(Image.open(kept)) == 1).all()


def test_shapes_that_are_not_drawn_are_counted_and_their_kinds_asked_about(tmp_path):
    make_supervisely(tmp_path / 'a')
    assert any(note.startswith(f'{NUMBER} shapes left out') for note in find_annotations(tmp_path / 'a').notes)
    make_via(tmp_path / 'b')
    file = tmp_path / 'b/val/via.json'
    unnamed = file.read_text().replace('"kind": "car"', '')
    file.write_text(unnamed)
    assert 'object' in find_annotations(tmp_path / 'b').classes
    file.write_text(unnamed.replace('"kind"', '"colour": "red", "kind"'))
    with pytest.raises(UserError, match='via.json: regions have colour, kind'):
        find_annotations(tmp_path / 'b')


BAD = {  # of the first image
    make_via: ('train/via.json', '"all_points_x": [10, ', '"all_points_x": ["?", '),
    make_label_studio: ('project.json', '"rectanglelabels": ["sign"]', '"rectanglelabels": []'),
    make_createml: ('_annotations.createml.json', '"label"', '"name"'),
    make_cvat: ('annotations.xml', 'xtl="40"', 'xtl="?"'),
    make_box_table: ('_annotations.csv', 'car,10', 'car,'),
}


def test_files_with_points_alone_are_refused(tmp_path):
    make_labelme(folder := tmp_path / 'data')
    for file in folder.rglob('*.json'):
        content = json.loads(file.read_text())
        content['shapes'] = [dict(label='car', points=[[3, 4]], shape_type='point')]
        file.write_text(json.dumps(content))
    with pytest.raises(UserError, match='shapes of 0 classes in files of '):
        find_label_maps(folder)


@pytest.mark.parametrize('make', BAD)
def test_a_bad_entry_in_a_file_of_all_images_is_counted_and_its_image_left_out(tmp_path, make):
    name, old, new = BAD[make]
    make(tmp_path / 'data')
    whole = find_annotations(tmp_path / 'data')
    file = tmp_path / 'data' / name
    file.write_text(file.read_text().replace(old, new, 1))
    found = find_annotations(tmp_path / 'data')
    assert {Path(image).name for image in whole.of.keys() - found.of.keys()} == {'0.jpg'}
    assert any(note.startswith('1 entries left out') for note in found.notes)
    assert all(found.of[image].shapes for image in found.of)


def test_skipped_annotations_of_label_studio_are_not_read(tmp_path):
    make_label_studio(tmp_path)
    tasks = json.loads((tmp_path / 'project.json').read_text())
    result = tasks[0]['annotations'][0]
    tasks[0]['annotations'] = [dict(result, was_cancelled=True)]
    tasks[1]['annotations'] = [dict(result, was_cancelled=False), dict(result=[], was_cancelled=True)]
    tasks[2]['annotations'] = [dict(result=[])]
    (tmp_path / 'project.json').write_text(json.dumps(tasks))
    found = find_annotations(tmp_path)
    assert len(found.of) == NUMBER - 1 and 'photos/0.jpg' not in found.of
    assert [len(found.of[f'photos/{index}.jpg'].shapes) for index in (1, 2)] == [3, 0]


def test_attributes_of_via_that_are_empty_or_check_boxes(tmp_path):
    make_via(tmp_path)
    file = tmp_path / 'train/via.json'
    text = file.read_text()
    (tmp_path / 'val/via.json').unlink()
    file.write_text(text.replace('"kind": "car"', '"kind": ""'))
    assert find_annotations(tmp_path).classes == ['background', 'object', 'sign']
    file.write_text(text.replace('"kind": "car"', '"kind": {"bus": true}', 1))
    with pytest.raises(UserError, match='via.json: regions have kind; .* check boxes'):
        find_annotations(tmp_path)
    file.write_text(text.replace('"kind"', '"colour": "red", "kind"'))  # in all regions of the only file
    with pytest.raises(UserError, match='via.json: regions have colour, kind; keep the class alone'):
        find_annotations(tmp_path)
