"""What a folder holds, laid out as public data sets are: images, classes or label maps, and what is held out."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import beit_mm
from beit_mm.datasets.segmentation_folder import SegmentationFolder, check_images_alone, role_of
from beit_mm.errors import UserError
from beit_mm.own_images import images as finding
from beit_mm.own_images import layouts
from beit_mm.own_images.images import find_images, write_lists
from beit_mm.own_images.label_maps import find_label_maps

RNG = np.random.default_rng(0)
SHAPE = (16, 24)


def photo(path: Path) -> None:
    save(path, RNG.integers(0, 256, (*SHAPE, 3)))


def label_map(path: Path, values: tuple[int, ...] = (0, 1)) -> None:
    save(path, np.array(values)[np.arange(SHAPE[0]) * len(values) // SHAPE[0]][:, None].repeat(SHAPE[1], 1))


def save(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path)


def classes(*folders: str, number: int = 12) -> Callable[[Path], None]:
    """Photos with the same names in each folder."""

    def build(root: Path) -> None:
        for folder in folders:
            for index in range(number):
                photo(root / folder / f'{index}.jpg')

    return build


def pairs(images: str, *maps: str, number: int = 20, values: tuple[int, ...] = (0, 1)) -> Callable[[Path], None]:
    """Photos and label maps; the patterns take a number."""

    def build(root: Path) -> None:
        for index in range(number):
            photo(root / images.format(index))
            for pattern in maps:
                label_map(root / pattern.format(index), values)

    return build


def both(*builders: Callable[[Path], None]) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        for builder in builders:
            builder(root)

    return build


def voc(root: Path) -> None:
    folder = root / 'VOCdevkit/VOC2012'
    maps = 'SegmentationClass/{}.png', 'SegmentationObject/{}.png'
    both(pairs('JPEGImages/{}.jpg', *maps, values=(0, 5, 255)), classes('JPEGImages', number=30))(folder)
    for name, numbers in dict(train=range(12), val=range(12, 20)).items():
        path = folder / f'ImageSets/Segmentation/{name}.txt'
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('\n'.join(map(str, numbers)))


def cityscapes(*kinds: str) -> Callable[[Path], None]:
    def build(root: Path) -> None:
        for split, number in dict(train=12, val=3).items():
            maps = [f'gtFine/{split}/ulm/ulm_{{}}_000019_gtFine_{kind}.png' for kind in kinds]
            images = f'leftImg8bit/{split}/ulm/ulm_{{}}_000019_leftImg8bit.png'
            pairs(images, *maps, number=number, values=(7, 8, 255))(root)

    return build


def split_pairs(images: str, maps: str, *parts: str) -> Callable[[Path], None]:
    numbers = zip(parts, (12, 3, 3), strict=False)
    return both(*(pairs(images.format(part), maps.format(part), number=number) for part, number in numbers))


MASKS, CITY = ['background', 'foreground'], ['road', 'sidewalk', 'building']
AB, ABC = ['a', 'b'], ['a', 'b', 'c']
LAYOUTS = {  # how it is built -> first classes, images to learn from, images held out, words of the notes
    'one map held out': (
        both(pairs('train/{}.jpg', 'train/{}_mask.png'), pairs('val/{}.jpg', 'val/{}_mask.png', number=1)),
        MASKS,
        20,
        1,
        '',
    ),
    'Kaggle': (classes('Training/a', 'Training/b', 'Testing/a', 'Testing/b'), AB, 22, 2, 'Testing'),
    'capitals': (classes('Train/a', 'Train/b', 'Valid/a', 'Valid/b'), AB, 24, 24, ''),
    'Intel': (
        both(
            classes('seg_train/seg_train/a', 'seg_train/seg_train/b', 'seg_test/seg_test/a', 'seg_test/seg_test/b'),
            classes('seg_pred/seg_pred', number=3),
        ),
        AB,
        22,
        2,
        'seg_test seg_pred',
    ),
    'an archive': (classes('data/data/a', 'data/data/b'), AB, 22, 2, ''),
    'a disk station': (classes('a', 'b', 'a/@eaDir/0.jpg', '@eaDir', '$RECYCLE.BIN/S-1'), AB, 22, 2, ''),
    'test beside classes': (classes('a', 'b', 'test/a', 'test/b'), AB, 22, 2, 'test'),
    'val inside train': (classes('train/a', 'train/b', 'train/val/a', 'train/val/b'), AB, 24, 24, 'val'),
    'ImageNet': (classes('train/a', 'train/b', 'val'), AB, 22, 2, 'val'),
    'Tiny ImageNet': (classes('train/a/images', 'train/b/images', 'val/images'), AB, 22, 2, 'val'),
    'a hierarchy': (classes('b/oak', 'b/fern', 'a/cat'), AB, 32, 4, 'a/cat'),
    'a class called train': (classes('train', 'plane', 'test/train', 'test/plane'), ['plane', 'train'], 22, 2, 'test'),
    'mmseg': (split_pairs('img_dir/{}/{{}}.jpg', 'ann_dir/{}/{{}}.png', 'train', 'val'), MASKS, 12, 3, ''),
    'gt': (pairs('images/{}.jpg', 'gt/{}.png'), MASKS, 18, 2, ''),
    'years': (split_pairs('images/{}/{{}}.jpg', 'labels/{}/{{}}.png', 'train2017', 'val2017'), MASKS, 12, 3, ''),
    'splits above': (split_pairs('{}/image/{{}}.tif', '{}/label/{{}}.tif', 'Train', 'Val', 'Test'), MASKS, 12, 3, ''),
    'SegNet': (split_pairs('{}/{{}}.png', '{}annot/{{}}.png', 'train', 'val', 'test'), MASKS, 12, 3, ''),
    'Carvana': (both(pairs('train/{}.jpg', 'train_masks/{}_mask.gif'), classes('test')), MASKS, 18, 2, ''),
    'GlaS': (pairs('{}.bmp', '{}_anno.bmp'), MASKS, 18, 2, ''),
    'DeepGlobe': (
        both(pairs('train/{}_sat.jpg', 'train/{}_mask.png'), classes('valid', 'test')),
        MASKS,
        18,
        2,
        'valid',
    ),
    'CHASE': (pairs('{}.jpg', '{}_1stHO.png', '{}_2ndHO.png'), MASKS, 18, 2, '_2ndHO'),
    'DRIVE': (pairs('training/images/{}_training.tif', 'training/1st/{}_manual.gif'), MASKS, 18, 2, '1st'),
    'Pets': (pairs('images/a_{}.jpg', 'annotations/trimaps/a_{}.png', values=(1, 2)), ['1', '2'], 18, 2, ''),
    'tiles': (pairs('2_Ortho/p_{}_RGB.tif', '5_Labels/p_{}_label.tif'), MASKS, 18, 2, '5_Labels --classes'),
    'masks below': (pairs('{}.jpg', 'masks/{}.png'), MASKS, 18, 2, 'masks'),
    'Cityscapes': (cityscapes('color', 'instanceIds', 'labelTrainIds', 'labelIds'), CITY, 12, 3, '_labelTrainIds.png'),
    'VOC': (voc, ['background', 'aeroplane'], 12, 8, 'SegmentationObject'),
}
QUESTIONS = {  # what cannot be told -> options that settle it, with the classes that they lead to
    'a flat test': (classes('a', 'b', 'test'), {'--classes a,b,test': ['a', 'b', 'test'], '--classes a,b': AB}),
    'a flat train': (classes('a', 'b', 'train'), {'--classes a,b,train': ['a', 'b', 'train'], '--classes a,b': AB}),
    'two folders of JPEG': (
        pairs('x/{}.jpg', 'y/{}.jpg'),
        {'--classes x,y': ['x', 'y'], '--maps y': 'end in .jpg, whose compression'},
    ),
    'two kinds of maps': (
        pairs('images/{}.jpg', 'mask/{}.png', 'other/{}.png'),
        {'--maps mask': MASKS, '--maps other': MASKS, '--classes images,mask,other': ['images', 'mask', 'other']},
    ),
    'maps in numbers and in colours': (
        both(pairs('original/{}.jpg', 'labels/{}.png'), pairs('Z/{}.jpg', 'RGB_masks/{}.png')),
        {'--maps labels': MASKS},
    ),
    'areas': (classes('x/a', 'x/b', 'y/a', 'y/b'), {'--classes x,y': ['x', 'y']}),
    'images without maps': (classes('images', 'other'), {'--classes images,other': ['images', 'other']}),
    'dates': (classes('2024-01-05', '2024-01-06'), {'--classes 2024-01-05,2024-01-06': ['2024-01-05', '2024-01-06']}),
    'years': (classes('2021/05', '2022/01'), {'--classes 2021,2022': ['2021', '2022']}),
    'parts': (classes('all_part_1', 'all_part_2'), {'--classes all_part_1,all_part_2': ['all_part_1', 'all_part_2']}),
    'no train': (classes('val', 'test'), {'--classes test,val': ['test', 'val']}),
}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)


def understood(folder: Path, option: str = '') -> finding.Images:
    name, _, value = option.partition(' ')
    maps = None if name == '--classes' else find_label_maps(folder, maps=value or None)
    return maps or find_images(folder, value.split(',') if name == '--classes' else None)


@pytest.mark.parametrize('kind', LAYOUTS)
def test_layouts_of_public_data_sets(kind, tmp_path):
    build, names, train, held_out, noted = LAYOUTS[kind]
    build(tmp_path)
    found = understood(tmp_path)
    assert (found.classes[: len(names)], len(found.train.names), len(found.held_out.names)) == (names, train, held_out)
    assert all(word in ' '.join(found.notes) for word in noted.split()), found.notes
    assert not {*found.train.names} & {*found.held_out.names} or found.train.root != found.held_out.root
    if noted == '':
        assert all('not used' not in note for note in found.notes)


@pytest.mark.parametrize('kind', QUESTIONS)
def test_what_cannot_be_told_is_asked_with_options_that_settle_it(kind, tmp_path):
    build, answers = QUESTIONS[kind]
    build(tmp_path)
    with pytest.raises(UserError) as asked:
        understood(tmp_path)
    assert '\n' not in str(asked.value)
    for option, expected in answers.items():
        assert option in str(asked.value)
        if isinstance(expected, str):
            with pytest.raises(UserError, match=expected):
                understood(tmp_path, option)
        else:
            assert understood(tmp_path, option).classes == expected


def test_lists_of_voc_may_hold_paths_and_may_not_overlap(tmp_path):
    voc(tmp_path)
    folder = tmp_path / 'VOCdevkit/VOC2012/ImageSets/Segmentation'
    (folder / 'train.txt').write_text('\n'.join(f'/JPEGImages/{n}.jpg /SegmentationClass/{n}.png' for n in range(11)))
    (folder / 'val.txt').write_text('\n'.join(f'{number}.jpg' for number in range(12, 20)))
    found = find_label_maps(tmp_path)
    assert (len(found.train.names), len(found.held_out.names)) == (11, 8)
    assert any(note.startswith('1 images left out, which no list') for note in found.notes)
    (folder / 'val.txt').write_text('10\n11')
    with pytest.raises(UserError, match='train.txt and val.txt both name 10; keep one'):
        find_label_maps(tmp_path)


def test_lists_of_a_split_that_are_not_read_are_named(tmp_path):
    for kind, build in dict(food=classes('images/a', 'images/b'), tiles=pairs('images/{}.tif', 'masks/{}.tif')).items():
        build(tmp_path / kind)
        (tmp_path / kind / 'meta').mkdir()
        (tmp_path / kind / 'meta/train.txt').touch()
        assert any('meta/train.txt is not read' in note for note in understood(tmp_path / kind).notes)


def test_the_maps_of_cityscapes_are_read_by_their_names(tmp_path):
    cityscapes('color', 'instanceIds', 'labelIds')(tmp_path)
    found = find_label_maps(tmp_path)
    write_lists(found, tmp_path / 'lists')
    pipeline = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]
    data = SegmentationFolder(**found.dataset(tmp_path / 'lists', 'train'), pipeline=pipeline)
    assert len(found.classes) == 19 and len(data) == 12
    for sample in data:
        assert sample['seg_map_path'] == sample['img_path'].replace('leftImg8bit', 'gtFine', 1).replace(
            '_leftImg8bit', '_gtFine_labelIds'
        )
        numbers = np.asarray(Image.open(sample['seg_map_path']))
        assert np.array_equal(sample['gt_seg_map'], np.select([numbers == 7, numbers == 8], [0, 1], 255))


def test_folders_that_are_not_there_are_named_with_those_that_are(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    classes('Photos/a', 'Photos/b', 'a_run/pictures')(tmp_path)
    for name in ('plan.json', 'run.lock'):
        (tmp_path / 'a_run' / name).touch()
    for option, named in {'--classes a,crow': 'crow.*a, b', '--maps crows': 'crows.*a, b'}.items():
        with pytest.raises(UserError, match=named):
            understood(tmp_path / 'Photos', option)
    for folder, named in {
        'Fotos': 'Fotos.*Photos',
        'xyz': 'xyz.*expected',
        'Photos/a/0.jpg': '0.jpg is a file',
        'a_run': 'a_run is the folder of a run',
    }.items():
        with pytest.raises(UserError, match=named):
            beit_mm.finetune(folder, 'run')


@pytest.mark.parametrize('kind', ['mmseg', 'gt', 'splits above', 'SegNet', 'tiles', 'VOC'])
def test_pretraining_learns_from_no_label_maps(kind, tmp_path):
    LAYOUTS[kind][0](tmp_path / 'data')
    with pytest.raises(UserError, match='label maps, which would count as images'):
        beit_mm.pretrain(tmp_path / 'data', tmp_path / 'run', steps=20)
    assert not (tmp_path / 'run').exists()


def test_classes_of_any_layout_are_images_alone(tmp_path):
    classes('train/a', 'train/b', 'test/a', 'labels/a')(tmp_path)
    (tmp_path / 'train/images').mkdir()
    (tmp_path / 'train/labels.png').write_bytes(b'')  # a file, though its name is that of a folder of maps
    check_images_alone(tmp_path)


def test_names_of_folders():
    names = 'Training train_val img_dir Ground-Truth train_masks masks_val images_png test2017'.split()
    names += ['trains', 'trainer', 'valley']
    roles = 'train/ train/ /images /maps train/maps val/maps /images test/ / / /'.split()
    assert [*map(role_of, names)] == [tuple(role.split('/')) for role in roles]


def test_the_time_grows_with_the_number_of_folders_not_of_their_pairs(tmp_path, monkeypatch):
    names = [f'class {number}' for number in range(60)]
    classes(*names, number=1)(tmp_path)
    asked = []
    monkeypatch.setattr(layouts, 'role_of', lambda name: asked.append(name) or ('', ''))
    assert layouts.find_map_folders(tmp_path) is None and 0 < len(asked) < 20 * len(names)


def test_the_plan_names_classes_and_what_was_assumed(tmp_path, monkeypatch, capsys):
    from beit_mm.own_images.run import Run

    monkeypatch.setattr(Run, 'train', lambda run, stage: (_ for _ in ()).throw(KeyboardInterrupt))
    classes('Training/cat', 'Training/a dog', 'Testing/cat')(tmp_path / 'data')
    for options in (dict(classes=['cat', 'a dog']), {}):
        with pytest.raises(SystemExit):
            beit_mm.finetune(tmp_path / 'data', tmp_path / 'run', epochs=5, **options)
    said = capsys.readouterr().out
    assert 'a dog (11), cat (11)' in said and 'Testing' in said
    with pytest.raises(UserError, match='classes'):
        beit_mm.finetune(tmp_path / 'data', tmp_path / 'run', classes=['cat'])


def test_images_and_maps_in_each_folder_are_asked_about(tmp_path):
    for part in ('a train', 'b_2'):
        pairs(f'{part}/images_png/{{}}.jpg', f'{part}/masks_png/{{}}.png')(tmp_path)
    with pytest.raises(UserError, match='a train.* of its own'):
        understood(tmp_path)
    assert understood(tmp_path / 'b_2').classes == MASKS
