"""Class folders and lists: the right labels, mistakes named in one line, samples that depend on their key only."""

import numpy as np
import pytest
from labelled import CLASSES, TEST_PIPELINE, make_images
from PIL import Image

from beit_mm.datasets.image_folder import quoted, unquoted
from beit_mm.datasets.samplers import SampleKey
from beit_mm.registry import DATASETS


@pytest.fixture
def folder(tmp_path):
    return make_images(tmp_path, per_class=2)


def build(folder, data_prefix='train', **kwargs):
    return DATASETS.build(dict(type='beit_mm.ImageFolder', data_root=str(folder), data_prefix=data_prefix, **kwargs))


def found(dataset):
    infos = [dataset.get_data_info(i) for i in range(len(dataset))]
    return [('/'.join(info['img_path'].split('/')[-2:]), info['gt_label']) for info in infos]


def test_labels_are_the_sorted_folders(folder):
    (folder / 'train/red/deep').mkdir()
    (folder / 'train/red/0.png').rename(folder / 'train/red/deep/0.png')
    (folder / 'train/.hidden').mkdir()
    (folder / 'train/notes.txt').write_text('no class')
    dataset = build(folder)
    assert dataset.CLASSES == dataset.metainfo['classes'] == CLASSES
    assert found(dataset) == [
        ('blue/0.png', 0),
        ('blue/1.png', 0),
        ('green/0.png', 1),
        ('green/1.png', 1),
        ('red/1.png', 2),
        ('deep/0.png', 2),
    ]
    assert dataset.get_cat_ids(4) == [2]


def test_same_order_as_mmpretrain_and_torchvision(folder):
    from mmpretrain.datasets import CustomDataset
    from torchvision.datasets import ImageFolder as TorchvisionFolder

    (folder / 'train/Zebra').mkdir()  # capitals sort first
    (folder / 'train/red/0.png').rename(folder / 'train/Zebra/0.png')
    ours, mmpretrain = build(folder), CustomDataset(data_root=str(folder), data_prefix='train')
    torchvision = TorchvisionFolder(str(folder / 'train'))
    assert list(ours.CLASSES) == list(mmpretrain.CLASSES) == torchvision.classes
    assert found(ours) == found(mmpretrain)
    assert [info[1] for info in found(ours)] == torchvision.targets


def test_given_classes_are_matched_by_name(folder):
    assert found(build(folder, classes=['red', 'blue'])) == [
        ('red/0.png', 0),
        ('red/1.png', 0),
        ('blue/0.png', 1),
        ('blue/1.png', 1),
    ]
    (folder / 'names.txt').write_text('red\nblue\n\n')
    assert build(folder, classes=str(folder / 'names.txt')).CLASSES == ('red', 'blue')


def test_quotes_of_others_are_part_of_a_name(folder):
    """Only what is a JSON string of a possible name was quoted by us."""
    for text in ('"', '"a', '"a" b"', '"\\ud800"', '"\\u0000"', '"\\x"'):
        assert unquoted(text) == text
    assert unquoted(quoted('"a"')) == '"a"' and quoted('a "b"') == 'a "b"'


def test_lists_with_and_without_labels(folder):
    (folder / 'few.txt').write_text('red/1.png\nblue/0.png 0\n\n')
    assert found(build(folder, ann_file='few.txt')) == [('red/1.png', 2), ('blue/0.png', 0)]
    (folder / 'flat').mkdir()  # as ImageNet's validation images come: no class folders
    Image.new('RGB', (8, 8)).save(folder / 'flat/my image.png')
    (folder / 'flat.txt').write_text('my image.png 1\n')
    assert found(build(folder, 'flat', ann_file='flat.txt', classes=CLASSES)) == [('flat/my image.png', 1)]


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('red/0.png 2\nred/1.png 3', r"few.txt, line 2: 'red/1.png' has label 3; there are 3 classes, expected 0 to 2"),
        ('red/0.png -1', 'has label -1'),
        ('red/0.png 0', "has label 0, which is class 'blue'; expected 2"),
        ('0.png', 'has no label and lies in no class folder'),
    ],
)
def test_wrong_labels_name_file_and_line(folder, text, message):
    (folder / 'few.txt').write_text(text)
    with pytest.raises(ValueError, match=message) as error:
        build(folder, ann_file='few.txt')
    assert '\n' not in str(error.value)


def test_missing_and_empty_folders_are_named(folder):
    (folder / 'train/empty').mkdir()
    (folder / 'none').mkdir()
    for prefix, kwargs, message in (
        ('gone', {}, "no folder '.*gone"),
        ('none', {}, "no class folders in '.*none"),
        ('train', {}, "no images in '.*train/empty'"),
        ('train', dict(classes=['pink']), "no folder '.*train/pink'"),
        ('train', dict(classes='gone.txt'), "no file 'gone.txt'"),
        ('train', dict(ann_file='gone.txt'), 'gone.txt'),
    ):
        with pytest.raises(FileNotFoundError, match=message) as error:
            build(folder, prefix, **kwargs)
        assert '\n' not in str(error.value)
    with pytest.raises(ValueError, match="holds 'red' twice"):
        build(folder, classes=['red', 'red'])


def test_library_transforms_draw_by_the_key_alone(folder):
    random = [
        TEST_PIPELINE[0],
        dict(type='mmpretrain.RandomResizedCrop', scale=16, backend='pillow'),
        dict(type='mmpretrain.RandomFlip', prob=0.5),
        TEST_PIPELINE[-1] | dict(type='mmpretrain.PackInputs'),
    ]
    dataset = build(folder, pipeline=random)

    def draw(*key):
        return dataset[SampleKey(*key)]['inputs'].numpy()

    first = draw(1, 0, 3)
    np.random.rand(7)
    draw(1, 0, 2)
    assert np.array_equal(draw(1, 0, 3), first)
    assert not np.array_equal(draw(1, 1, 3), first) and not np.array_equal(draw(2, 0, 3), first)
