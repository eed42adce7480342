"""A folder of images and label maps becomes a segmentor in one call; a line for each mistake."""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from helpers import refused, run_tool
from label_maps import CLASSES, make_label_maps
from PIL import Image

import beit_mm
from beit_mm import __main__ as command
from beit_mm.datasets import segmentation_folder
from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.errors import UserError
from beit_mm.own_images import report as reports
from beit_mm.own_images import run as runs
from beit_mm.own_images.images import write_lists
from beit_mm.own_images.label_maps import LabelMaps, find_label_maps


@pytest.fixture(scope='module')
def example(tmp_path_factory) -> Path:
    """12 pairs to learn from and 3 held out: three classes by colour, 0 unlabelled, classes.txt."""
    folder = make_label_maps(tmp_path_factory.mktemp('example') / 'maps', 12)
    removed(*(file for file in folder.glob('*/validation/*') if int(file.stem) > 2))
    return folder


@pytest.fixture
def folder(example, tmp_path) -> Path:
    return Path(shutil.copytree(example, tmp_path / 'maps'))


def change(folder: Path, new: Callable[[np.ndarray], np.ndarray], pattern: str = '*', ending: str = '.png') -> None:
    """Writes annotations anew."""
    for file in sorted(folder.glob(f'annotations/{pattern}/*.png')):
        labels = new(np.asarray(Image.open(file)))
        file.unlink()
        Image.fromarray(labels).save(file.with_suffix(ending))


def rename(folder: Path, new: Callable[[str], str]) -> None:
    for file in sorted(folder.glob('annotations/*/*')):
        file.rename(file.with_name(new(file.name)))


def colour_too(folder: Path) -> None:
    """Each map a second time, in colours, beside the first, as Cityscapes has them."""
    for file in folder.glob('annotations/*/*'):
        Image.open(file).convert('RGB').save(file.with_stem(f'{file.stem}_color'))


def classes(folder: Path, *names: str) -> None:
    (folder / 'classes.txt').write_text('\n'.join(names))


def only(folder: Path, kept: int) -> None:
    removed(*(file for file in folder.glob('annotations/*/*') if int(file.stem) >= kept))


def removed(*paths: Path) -> None:
    for path in paths:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


# what somebody did, and what is said of it
WITHOUT = 'images left out, without a map: '
MISTAKES: dict[str, tuple[Callable[[Path], object], str]] = {
    'no maps': (lambda f: removed(f / 'annotations'), 'images/training has 12 images to learn from.* needs 100'),
    'other names': (lambda f: rename(f, 'map{}'.format), "no label map has the name .*: 'map0.png' in .*'0.png' in"),
    'two kinds of maps': (colour_too, 'end in .*.png and in .*.png; keep the kind to'),
    'few pairs': (lambda f: only(f, 9), f'9 images .* held out, .*; expected at least 10; 3 of 12 {WITHOUT}.*/10.png'),
    'few images': (
        lambda f: removed(*(file for file in f.glob('images/*/*') if int(file.stem) >= 9)),
        '9 images .* held out, in .*; 3 label maps left out, without an image: .*/10.png',
    ),
    'other sizes': (lambda f: change(f, lambda a: a[:20]), '0 images .*; 12 of 12 images left out, whose map has'),
    'colours': (lambda f: change(f, lambda a: np.stack([a * 80, a, a], 2)), '.png holds .* 240 3 3 .*name R G B'),
    'other colours': (lambda f: classes(f, 'red 200 0 0', 'green 0 200 0'), 'no map of .*by colour; .*has: .*3 3 3 '),
    'one colour twice': (lambda f: classes(f, 'red 1 1 1', 'green 2 2 2', 'blue 1 1 1'), 'classes.txt: .*colour once'),
    'no such colour': (lambda f: classes(f, 'red 1 1 1', 'green 2 2 256'), 'classes.txt: .* 0 to 255'),
    'JPEG': (lambda f: change(f, lambda a: a, ending='.jpg'), 'end in .jpg, whose compression .*; save them as PNG'),
    'damaged': (
        lambda f: [file.write_bytes(b'') for file in f.glob('annotations/*/*')],
        '12 .* left out, unreadable: .*/annotations/training/0.png: cannot .*unknown format',
    ),
    'fewer names': (lambda f: classes(f, 'red', 'green'), 'contains 3, .* names 2 classes; expected 0 to 1, or 1 to 2'),
    'more names': (lambda f: classes(f, *'abcdefgh'), 'contain 0 to 3, .* names 8 classes.* --reduce-zero'),
    'no 0, which may be a class': (
        lambda f: (change(f, lambda a: np.maximum(a, 1)), classes(f, *'abcd')),
        'contain 1 to 3, .* names 4 classes.* --reduce-zero',
    ),
    'no names, and a 0': (lambda f: removed(f / 'classes.txt'), '0, 1, 2, 3, .* no classes.txt.* --reduce-zero'),
    'one class': (lambda f: (removed(f / 'classes.txt'), change(f, np.ones_like)), r'1 classes in .*expected 2 to'),
    'all ignored': (lambda f: change(f, lambda a: a * 0 + 255), 'every pixel is 255'),
    'empty classes.txt': (lambda f: classes(f), 'classes.txt is empty'),
    'a short row': (lambda f: classes(f, 'Idx\tName', '1\ta', '4'), 'classes.txt.* 2 columns'),
    'no number': (lambda f: classes(f, 'Number\tName', '1\ta', 'two\tb'), 'classes.txt.*Number'),
    'no labelled pixel to learn from': (lambda f: change(f, lambda a: a * 0 + 255, 'training'), 'no map of .*training'),
    'no labelled pixel held out': (lambda f: change(f, lambda a: a * 0 + 255, 'validation'), 'no map of .*validation'),
}


@pytest.mark.parametrize('kind', MISTAKES)
def test_each_mistake_has_an_answer_of_a_line(folder, kind, tmp_path):
    spoil, answer = MISTAKES[kind]
    spoil(folder)
    with pytest.raises((UserError, OSError)) as refused:
        beit_mm.finetune(folder, tmp_path / 'run', 'none', epochs=1)
    message = str(refused.value)
    assert re.search(answer, message) and '\n' not in message, message
    assert len(message.replace(str(tmp_path), '')) < 400, message
    assert not (tmp_path / 'run').exists()


def pairs(found: LabelMaps, lists: Path) -> dict[str, list]:
    """Names of images, and their labels as they are trained on."""
    write_lists(found, lists)
    pipeline = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]
    read = {}
    for name in ('train', 'held_out'):
        data = SegmentationFolder(**found.dataset(lists, name), pipeline=pipeline)
        read[name] = [(Path(sample['img_path']).name, sample['gt_seg_map']) for sample in data]
    return read


LAYOUTS = {  # of images, and of their maps
    'splits above': ('{split}/images/{stem}.png', '{split}/masks/{stem}.png'),
    'no validation': ('imgs/deep/{stem}.png', 'labels/deep/{stem}.png'),
    'an ending': ('images/{split}/{stem}.png', 'annotations/{split}/{stem}_gtFine.png'),
    'side by side': ('{split}/{stem}.png', '{split}/{stem}_mask.png'),
}


@pytest.mark.parametrize('kind', LAYOUTS)
def test_layouts_hold_the_same_pairs(folder, tmp_path, kind):
    expected = {}
    for split, read in zip(
        ('training', 'validation'), pairs(find_label_maps(folder), tmp_path / 'a').values(), strict=True
    ):
        for name, labels in read:
            expected[f'{split}{name}'] = labels
            for part, pattern in zip(('images', 'annotations'), LAYOUTS[kind], strict=True):
                new = tmp_path / 'new' / pattern.format(split=split, stem=f'{split}{Path(name).stem}')
                new.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(folder / part / split / name, new)
    shutil.copy(folder / 'classes.txt', tmp_path / 'new')
    found = find_label_maps(tmp_path / 'new')
    read = pairs(found, tmp_path / 'b')
    assert [*map(len, read.values())] == ([13, 2] if kind == 'no validation' else [12, 3])
    for name, labels in sum(read.values(), []):
        assert np.array_equal(labels, expected.pop(name))
    assert not expected and found.classes == CLASSES


@pytest.mark.parametrize(
    ('values', 'names', 'options', 'expected'),
    [  # numbers 0 to 3 in the maps become `values`; what each is afterwards, and what the classes are called
        ([0, 1, 2, 3], CLASSES, {}, ([255, 0, 1, 2], CLASSES)),
        ([255, 0, 1, 2], CLASSES, {}, ([255, 0, 1, 2], CLASSES)),
        ([0, 1, 2, 3], ['sky', *CLASSES], {}, ([0, 1, 2, 3], ['sky', *CLASSES])),
        ([0, 1, 2, 3], [*CLASSES, 'more'], dict(reduce_zero_label=True), ([255, 0, 1, 2], [*CLASSES, 'more'])),
        ([0, 7, 2000, 31], None, dict(reduce_zero_label=True), ([255, 0, 2, 1], ['7', '31', '2000'])),
        ([0, 7, 8, 31], None, dict(reduce_zero_label=False), ([0, 1, 2, 3], ['0', '7', '8', '31'])),
        ([0, 1, 1, 1], None, {}, ([0, 1, 1, 1], ['background', 'foreground'])),
        ([0, 255, 255, 255], ['crack'], {}, ([0, 1, 1, 1], ['background', 'crack'])),
        ([0, 1, 1, 255], ['crack'], {}, ([0, 1, 1, 255], ['background', 'crack'])),
        # a table says it where the highest class, or all but one, is nowhere
        ([255, 0, 1, 1], ['Number\tName', '0\ta', '1\tb', '2\tc'], {}, ([255, 0, 1, 1], ['a', 'b', 'c'])),
        ([255, 0, 0, 0], ['Number\tName', '0\ta', '1\tb'], {}, ([255, 0, 0, 0], ['a', 'b'])),
        # and other numbers are ignored
        ([0, 1, 2, 3], ['Number\tName', '0\ta', '1\tb'], {}, ([0, 1, 255, 255], ['a', 'b'])),
        ([0, 1, 2, 300], ['Number\tName', '1\ta', '2\tb'], {}, ([255, 0, 1, 255], ['a', 'b'])),
        ([0, 31, 7, 2000], ['Name\tNumber', 'a\t7', 'b\t31'], {}, ([255, 1, 0, 255], ['a', 'b'])),
    ],
)
def test_numbers_mean_what_the_names_say(folder, tmp_path, values, names, options, expected):
    before = pairs(find_label_maps(folder), tmp_path / 'before')['held_out']
    table = np.array(values, np.uint16 if max(values) > 255 else np.uint8)
    change(folder, lambda labels: table[labels])
    removed(folder / 'classes.txt') if names is None else classes(folder, *names)
    found = find_label_maps(folder, **options)
    numbers, called = expected
    assert found.classes == called
    for (_, old), (_, new) in zip(before, pairs(found, tmp_path / 'lists')['held_out'], strict=True):
        place = np.where(old == 255, 0, old.astype(int) + 1)
        assert np.array_equal(new, np.array(numbers)[place])


PALETTE = np.array([[0, 0, 0], [200, 0, 0], [0, 200, 0], [128, 128, 128]], np.uint8)
MODES = {  # how maps by colour may be stored
    'RGB': lambda labels: Image.fromarray(PALETTE[labels]),
    'RGBA': lambda labels: Image.fromarray(np.dstack([PALETTE[labels], labels * 80])),
    'P': lambda labels: Image.fromarray(PALETTE[labels]).quantize(4),
}
GRAYS = {'RGB': lambda gray: gray.convert('RGB'), 'LA': lambda gray: gray.convert('LA'), 'L': lambda gray: gray}


def test_maps_may_be_arrays_of_numpy(folder, tmp_path):
    expected = pairs(find_label_maps(folder), tmp_path / 'a')
    for file in folder.glob('annotations/*/*.png'):
        np.save(file.with_suffix('.npy'), np.asarray(Image.open(file)).astype(np.int64))
        file.unlink()
    read = pairs(find_label_maps(folder), tmp_path / 'b')
    for (name, labels), (known, truth) in zip(sum(read.values(), []), sum(expected.values(), []), strict=True):
        assert name == known and np.array_equal(labels, truth)


def store(folder: Path, new: Callable[[np.ndarray], Image.Image]) -> None:
    for file in folder.glob('annotations/*/*.png'):
        new(np.asarray(Image.open(file))).save(file)


@pytest.mark.parametrize('mode', MODES)
def test_maps_by_colour_are_those_by_number(folder, tmp_path, mode):
    before = pairs(find_label_maps(folder), tmp_path / 'before')
    store(folder, MODES[mode])
    classes(folder, 'red 200 0 0', 'green 0 200 0', 'blue\t128 128 128', '"a line" 9 9 9')
    found = find_label_maps(folder)
    assert found.classes == [*CLASSES, 'a line'] and 'never seen: a line' in found.notes[0]
    black = sum((labels == 255).sum() for part in before.values() for _, labels in part)
    assert f'0 0 0 ({black:,} pixels)' in found.notes[0]
    after = pairs(found, tmp_path / 'after')
    for old, new in zip(sum(before.values(), []), sum(after.values(), []), strict=True):
        assert old[0] == new[0] and np.array_equal(old[1], new[1])
    assert SegmentationFolder(**found.dataset(tmp_path / 'after', 'train')).metainfo['palette'][1] == [0, 200, 0]
    with pytest.raises(UserError, match='has colours'):
        find_label_maps(folder, reduce_zero_label=True)


@pytest.mark.parametrize('mode', GRAYS)
def test_gray_maps_hold_numbers_or_grays_whatever_their_channels(folder, tmp_path, mode):
    before = sum(pairs(find_label_maps(folder), tmp_path / 'before').values(), [])
    store(folder, lambda labels: GRAYS[mode](Image.fromarray(labels)))
    for number, names in enumerate((CLASSES, [f'{name} {n} {n} {n}' for n, name in enumerate(CLASSES, start=1)])):
        classes(folder, *names)
        after = sum(pairs(find_label_maps(folder), tmp_path / f'after_{number}').values(), [])
        assert all(np.array_equal(old, new) for (_, old), (_, new) in zip(before, after, strict=True))


def test_a_config_says_which_colours_no_class_has(folder, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(segmentation_folder, 'warn', said.append)
    monkeypatch.setattr(segmentation_folder, 'WARNED', set())
    store(folder, MODES['RGB'])
    classes(folder, 'red 200 0 0', 'green 0 200 0')
    prefix = dict(img_path='images/training', seg_map_path='annotations/training')
    pipeline = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]
    settings = dict(classes='classes.txt', data_prefix=prefix, pipeline=pipeline)
    read = [*SegmentationFolder(str(folder), **settings)]
    assert {*np.unique([sample['gt_seg_map'] for sample in read])} == {0, 1, 255}
    assert all(sum(colour in line for line in said) == 1 for colour in ('128 128 128 (', '0 0 0 ('))
    with pytest.raises(UserError, match='colours.*reduce_zero_label'):
        SegmentationFolder(str(folder), reduce_zero_label=True, **settings)


def test_a_run_whose_classes_were_renamed_says_so(folder, tmp_path, monkeypatch):
    classes(folder, 'zone 1', '"zone 1 2 3"', 'blue')
    interrupted(folder, tmp_path / 'run', monkeypatch)
    classes(folder, 'zone 1', '"zone 1 2 3"', 'navy')
    with pytest.raises(UserError, match=r'new classes: 1 \(navy\), missing classes: 1 \(blue\)'):
        beit_mm.finetune(folder, tmp_path / 'run')


def interrupted(folder: Path, out: Path, monkeypatch) -> Path:
    """A run that stops before its first step."""
    monkeypatch.setattr(runs.Run, 'train', Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(SystemExit):
        beit_mm.finetune(folder, out, epochs=1)
    return out


def test_maps_that_were_corrected_are_named_and_maps_that_were_saved_anew_are_not(
    folder, tmp_path, monkeypatch, capsys
):
    run = interrupted(folder, tmp_path / 'run', monkeypatch)
    change(folder, lambda labels: labels)
    removed(folder / 'images/training/7.png')
    interrupted(folder, run, monkeypatch)
    assert '1 of its images are gone (7.png)' in capsys.readouterr().out
    change(folder, lambda labels: labels[::-1], 'validation')
    removed(folder / 'images/training/8.png')
    with pytest.raises(UserError, match=r'missing images: 2 .*begin another run: beit-mm'):
        beit_mm.finetune(folder, run)
    run = interrupted(folder, tmp_path / 'other', monkeypatch)
    change(folder, lambda labels: labels[::-1], 'validation')
    with pytest.raises(UserError, match=r'images with other labels: 3 \(0.png, 1.png, 2.png\)'):
        beit_mm.finetune(folder, run)
    for name in ('report.md', 'finetuned.pth'):
        (run / name).touch()  # as if it had finished
    beit_mm.finetune(folder, run)
    said = capsys.readouterr().out
    assert 'other labels: 3' in said and f'go on from these weights: beit-mm finetune {folder} --init {run} ' in said


def test_polygons_that_were_corrected_are_noticed(folder, tmp_path, monkeypatch):
    for file in (folder / 'images/training').iterdir():
        corners = [[0, 0], [20.0, 0], [20.0, 20.0], [0, 20.0]]
        content = dict(shapes=[dict(label='car', points=corners)], imageWidth=56, imageHeight=40)
        file.with_suffix('.json').write_text(json.dumps(content))
    run = interrupted(folder / 'images/training', tmp_path / 'run', monkeypatch)
    file = folder / 'images/training/3.json'
    file.write_text(file.read_text().replace('20.0', '21.0'))
    with pytest.raises(UserError, match=r'images with other labels: 1 \(3.png\)'):
        beit_mm.finetune(folder / 'images/training', run)


def test_classes_that_only_held_out_maps_hold_are_named(folder):
    change(folder, lambda labels: np.where(labels == 2, 0, labels), 'training')
    found = find_label_maps(folder)
    assert 'only in held-out maps: green;' in found.notes[0] and 'never' not in found.notes[0]
    classes(folder, *map(str, range(300)))
    with pytest.raises(UserError, match='300 classes in .*expected 2 to 254'):
        find_label_maps(folder, reduce_zero_label=False)


def test_a_segmentor_its_report_and_its_labels_in_one_call(example, tmp_path, capsys):
    """From label maps to label maps by the command line; the figures are those of the label maps that it writes."""
    run, maps = tmp_path / 'run', tmp_path / 'maps'
    lines = [['finetune', example, '--out', run, '--epochs', 4, '--batch', 4, '--workers', 0]]
    lines += [['segment', run / 'finetuned.pth', example / 'images/validation', '--out', maps]]
    for words in lines:
        command.main([*map(str, words)])
    said, report = capsys.readouterr().out, (run / 'report.md').read_text()
    assert '0 is unlabelled' in said and 'Verdict: the segmentor is ' in said
    better = 'better than the nearest frozen patches and naive Bayes' in report
    assert ('beit-mm export' in report) == better
    hits, unions = np.zeros(3), np.zeros(3)
    for file in sorted((example / 'annotations/validation').iterdir()):
        truth, found = (np.asarray(Image.open(path)).astype(int) for path in (file, maps / 'labels' / file.name))
        for label in range(3):
            right, said_so = truth == label + 1, (found == label) & (truth > 0)
            hits[label] += (right & said_so).sum()
            unions[label] += (right | said_so).sum()
    ious = 100 * hits / unions
    for name, iou in zip(CLASSES, ious, strict=True):
        assert f'| {name} | {iou:.1f} |' in report
    assert f'| mIoU on held-out images, % | {ious.mean():.1f} +- ' in report
    (row,) = [line for line in report.splitlines() if reports.ROWS['patches'] in line]
    assert 0 < float(row.split('|')[2].split()[0]) < 100
    for name in ('overlays', 'loss'):
        assert f'({name}.png)' in report and Image.open(run / f'{name}.png').width > 100


def test_label_maps_are_not_taken_as_images(folder, tmp_path):
    answer, out = 'annotations has label maps, which would count as images', tmp_path / 'out'
    with pytest.raises(UserError, match=answer):
        beit_mm.pretrain(folder, out, steps=20)
    with pytest.raises(UserError, match=answer):
        beit_mm.embed('demo', folder, out / 'features.npz')
    refused(answer, 'make_shards', folder, out)
    refused(answer, 'resize_images', folder, out, '--short-side', 16)
    assert not out.exists()
    removed(folder / 'annotations')
    run_tool('datasets/resize_images.py', folder, out, '--short-side', 16, '--workers', 0)
    assert len([*out.rglob('*.png')]) == 15


def test_colours_that_look_like_numbers_from_one_are_colours(folder, tmp_path):
    """`0 0 1` and `0 0 2` are encoded as 1 and 2, as the classes of maps with 0 for unlabelled pixels would be."""
    change(folder, lambda labels: np.stack([labels * 0, labels * 0, np.minimum(labels, 2)], axis=-1))
    classes(folder, 'first 0 0 1', 'second 0 0 2')
    read = pairs(find_label_maps(folder), tmp_path / 'lists')
    assert {*np.unique([labels for _, labels in read['train']])} == {0, 1, 255}


def test_classes_are_merged_by_their_numbers_or_names(folder, tmp_path):
    found = find_label_maps(folder, merge='warm=red;cold=2,blue')
    assert found.classes == ['warm', 'cold'] and found.named_classes() == 'warm (1), cold (2 3)'
    before, after = (pairs(each, tmp_path / name) for each, name in ((find_label_maps(folder), 'a'), (found, 'b')))
    for (_, labels), (_, merged) in zip(before['train'], after['train'], strict=True):
        assert np.array_equal(merged, np.array([0, 1, 1, *[255] * 253])[labels])
    for merge, named in (('warm', 'NEW=OLD'), ('warm=pink', 'pink'), ('all=red,green,blue', '1 class')):
        with pytest.raises(UserError, match=named):
            find_label_maps(folder, merge=merge)
