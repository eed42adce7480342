"""A table of images and labels makes class folders unnecessary; what cannot be told is asked."""

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from calls import call_of, task_of
from PIL import Image

from beit_mm.apis.inference import link_images, write_results
from beit_mm.datasets.image_folder import ImageFolder, MultiLabelFolder
from beit_mm.errors import UserError
from beit_mm.own_images import images as finding
from beit_mm.own_images.classification import Classification
from beit_mm.own_images.images import write_lists
from beit_mm.own_images.tables import find_table, separator_of

LABELS = dict(zip([f'i{index}' for index in range(30)], ['cat', 'dog', 'owl'] * 10, strict=True))


@pytest.fixture(autouse=True)
def few(monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)


def make(folder: Path, below: str = 'images', **files: str) -> Path:
    (folder / below).mkdir(parents=True)
    for name in LABELS:
        Image.fromarray(np.full((4, 4, 3), len(name), np.uint8)).save(folder / below / f'{name}.jpg')
    for name, text in files.items():
        (folder / name.replace('_csv', '.csv').replace('_tsv', '.tsv')).write_text(text)
    return folder


def lines(row: Callable[[str, str], str], header: str) -> str:
    return '\n'.join([header, *(row(name, label) for name, label in LABELS.items())]) + '\n'


FORMS = {
    'ending': lines('{}.jpg,{}'.format, 'image,label'),
    'no ending': lines('{},{}'.format, 'id,breed'),
    'path': lines('images/{}.jpg,{}'.format, 'file,class'),
    'known name among others': lines('{0}.jpg,7,{1},{0}'.format, 'image,age,Label,note'),
    'semicolons': lines('{}.jpg;{}'.format, 'image;label'),
    'bars': lines('{}.jpg|{}'.format, 'image|label'),
    'commas at the ends': lines('{}.jpg,{}'.format, 'image,breed,').replace('i0.jpg,cat', 'i0.jpg,cat,,'),
    'tabs': lines('{}.jpg\t{}'.format, 'image\tlabel'),
    'one column a class': lines(
        lambda name, label: ','.join([name, *(str(int(label == other)) for other in ('owl', 'dog', 'cat'))]),
        'filename,owl,dog,cat',
    ),
    'true or false for each class': lines(
        lambda name, label: ','.join([name, *(str(label == other) for other in ('owl', 'dog', 'cat'))]),
        'filename,owl,dog,cat',
    ),
    'no header': lines('{}.jpg,{}'.format, '').lstrip(),
}


@pytest.mark.parametrize('form', FORMS)
def test_images_get_the_labels_of_the_table(tmp_path, form):
    found = find_table(make(tmp_path / 'data', any_csv=FORMS[form]))
    assert found.classes == ['cat', 'dog', 'owl']
    assert len(found.train.names) == 27 and Counter(found.held_out.names.values()).total() == 3
    write_lists(found, tmp_path / 'lists')
    for name in ('train', 'held_out'):
        dataset = ImageFolder(**found.dataset(tmp_path / 'lists', name), classes=str(tmp_path / 'lists/classes.txt'))
        for sample in dataset:
            assert found.classes[sample['gt_label']] == LABELS[Path(sample['img_path']).stem]


def test_splits_by_column_and_by_file(tmp_path):
    part = {name: 'test' if index > 26 else 'Val' if index > 20 else 'train' for index, name in enumerate(LABELS)}
    text = lines(lambda name, label: f'{name},{label},{part[name]}', 'image,label,split')
    found = find_table(make(tmp_path / 'a', any_csv=text))
    assert {Path(path).stem for path in found.held_out.names} == {name for name in part if part[name] == 'Val'}
    assert len(found.train.names) == 21 and any('3 images of the test' in note for note in found.notes)
    columns = dict(is_valid=lambda split: str(split == 'Val'), Usage=lambda split: f'Public{split.title()}')
    for column, value in columns.items():
        text = lines(lambda name, label: f'{name},{label},{value(part[name])}', f'image,label,{column}')  # noqa: B023
        names = find_table(make(tmp_path / column, any_csv=text)).held_out.names
        assert {Path(path).stem for path in names} == {name for name in part if part[name] == 'Val'}
    rows = FORMS['ending'].splitlines(keepends=True)
    files = dict(
        train_csv=''.join(rows[:21]), val_csv=''.join([rows[0], *rows[21:26]]), test_csv=''.join(rows[:1] + rows[26:])
    )
    found = find_table(make(tmp_path / 'b', **files))
    assert (len(found.train.names), len(found.held_out.names)) == (20, 5)


def test_what_is_left_out_is_named(tmp_path):
    text = FORMS['ending'].replace('i3.jpg,cat', 'i3.jpg,').replace('i8.jpg,owl\n', '') + 'gone.jpg,cat\n'
    text = '\n'.join(f'{line},{fold}' for line, fold in zip(text.split(), ['fold', *'12345' * 7], strict=False))
    notes = '; '.join(find_table(make(tmp_path, any_csv=text)).notes)
    assert '1 rows left out, because their images' in notes and '2 images left out, because no row' in notes
    assert 'images/i3.jpg, images/i8.jpg' in notes
    assert 'column fold is not used' in notes


ASKED = {
    'two columns': (lines('{0}.jpg,{1},{1}'.format, 'image,dx,site'), 'dx, site'),
    'two columns of one name': (lines('{},{},x'.format, 'image,label,label'), 'two columns that are called label'),
    'two names of an image': (FORMS['ending'] + 'other/i3.jpg,dog\n', 'i3.jpg, dog, .* cat'),
    'two known columns of 0 and 1': (lines(lambda name, _: f'{name},0,1', 'image,label,target'), 'label, target'),
    'lists of Python': (FORMS['ending'].replace('3.jpg,cat', '''3.jpg,"['cat', 'dog']"'''), r'write .* cat\|dog'),
    'lists of JSON': (FORMS['ending'].replace('3.jpg,cat', '''3.jpg,"[""cat""]"'''), r'write .* cat\|dog'),
    'lists of numbers': (FORMS['ending'].replace('3.jpg,cat', '''3.jpg,"[1, 2]"'''), r'write .* cat\|dog'),
    'commas without quotes': (
        FORMS['ending'].replace('3.jpg,cat', '3.jpg,cat,dog'),
        r'row i3.jpg, cat, dog; .* cat\|dog',
    ),
    'the same in the first row': (FORMS['ending'].replace('0.jpg,cat', '0.jpg,cat,dog'), 'row i0.jpg, cat, dog;'),
    'the same with the ends of a spreadsheet': (
        lines('{},{},'.format, 'image,label,').replace('i3,cat,', 'i3,cat,dog'),
        'row i3, cat, dog;',
    ),
    'the same in a table without a header of labels': (lines('{},{}'.format, 'image'), 'row i0, cat;'),
    'measurements': (lines(lambda name, _: f'{name},{name[1:]}.5', 'image,score'), 'score has measurements'),
    'numbers to predict': (lines('{0}.jpg,{0}'.format, 'image,age'), 'several images of each'),
}


@pytest.mark.parametrize('kind', ASKED)
def test_what_cannot_be_told_is_asked(tmp_path, kind):
    text, message = ASKED[kind]
    with pytest.raises(UserError, match=message):
        find_table(make(tmp_path, any_csv=text))


def test_the_column_may_be_given(tmp_path):
    folder = make(tmp_path, any_csv=ASKED['two columns'][0])
    assert find_table(folder, 'site').classes == ['cat', 'dog', 'owl']
    with pytest.raises(UserError, match='--labels COLUMN'):
        find_table(folder, 'other')
    (folder / 'b.csv').write_text(FORMS['ending'])
    with pytest.raises(UserError, match='any.csv, b.csv'):
        find_table(folder)


def test_other_tables_and_tables_beside_label_maps_mean_nothing(tmp_path):
    folder = make(tmp_path)
    boxes = lines('{}.jpg,{},1,1,3,3'.format, 'filename,class,xmin,ymin,xmax,ymax')
    for text in (boxes, 'a,b\n1,2\n', '', 'image\ni1.jpg\n', f'image,label\ni1.jpg,"{"x" * 200_000}"\n'):
        (folder / 'any.csv').write_text(text)
        assert find_table(folder) is None
    (folder / 'any.csv').write_text(FORMS['ending'])
    assert find_table(make(folder, 'masks')) is None


def test_a_head_is_fitted_to_as_few_images_of_a_table_as_of_class_folders(tmp_path, monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 100)
    folder = make(tmp_path / 'data', any_csv=FORMS['ending'])
    with pytest.raises(UserError, match='27 images of 3 classes .* 100'):
        find_table(folder)
    assert len(find_table(folder, fits_head=True).train.names) == 27
    many = make(tmp_path / 'single', any_csv=FORMS['ending'].replace('i0.jpg,cat', 'i0.jpg,fox'))
    with pytest.raises(UserError, match='100'):  # nothing would be held out of a class with one image
        find_table(many, fits_head=True)


NUMBERS = {str(number): str(number % 3 + 1) for number in range(30, 0, -1)}  # of images and of their classes
NUMBERED = {  # header, and a row of the number of the row, an image and its class
    'index of pandas': (',image,label', '{0},{1}.jpg,{2}'),
    'index of pandas, without endings': (',id,breed', '{0},{1},{2}'),
    'index of pandas, read and written': ('Unnamed: 0,id,breed', '{0},{1},{2}'),
    'numbers of rows': ('row,image,label', '{0},{1}.jpg,{2}'),
    'numbers of rows, without endings': ('index,id,label', '{0},{1},{2}'),
    'numbers that are no names': ('age,id,label', '{0},{1},{2}'),
    'labels first': ('label,image', '{2},{1}'),
    'labels first, an image lost': ('label,image', '{2},{1}\n{2},{1}000'),
}


@pytest.mark.parametrize('form', NUMBERED)
def test_numbers_beside_numbered_images_are_not_taken_for_their_names(tmp_path, form):
    head, line = NUMBERED[form]
    for name in NUMBERS:
        Image.new('L', (4, 4)).save(tmp_path / f'{name}.jpg')
    rows = [line.format(row, name, label) for row, (name, label) in enumerate(NUMBERS.items(), 1)]
    (tmp_path / 'any.csv').write_text('\n'.join([head, *rows]))
    found = find_table(tmp_path)
    named = {Path(path).stem: label for path, label in (found.train.names | found.held_out.names).items()}
    assert named == NUMBERS


def test_class_folders_that_classify_made_may_be_corrected(tmp_path):
    """Two cameras give images the same names; the user moves a link."""
    results = [
        dict(path=str(tmp_path / f'new/{camera}/{name}.jpg'), name=label, label=0, scores=[[0, 0.9], [1, 0.1]])
        for camera in 'ab'
        for name, label in LABELS.items()
    ]
    make(tmp_path / 'new', 'a')
    (tmp_path / 'pseudo').mkdir()
    write_results(tmp_path / 'pseudo/classes.csv', results, ['cat', 'dog'])
    link_images(tmp_path / 'pseudo', results, 0.5)
    (tmp_path / 'pseudo/cat/i0_2.jpg').rename(tmp_path / 'pseudo/dog/i0.jpg')
    assert find_table(tmp_path / 'pseudo') is None
    write_results(tmp_path / 'new/answers.csv', results[:30], ['cat', 'dog'])
    assert find_table(tmp_path / 'new').classes == ['cat', 'dog', 'owl']  # without class folders


def test_folders_may_be_called_like_other_classes_of_a_table(tmp_path):
    """Such as folders 0 to 4, and classes 0 and 1."""
    rows = ['image,label']
    for number in range(30):
        (tmp_path / f'data/{number % 5}').mkdir(parents=True, exist_ok=True)
        (tmp_path / f'data/{number % 5}/i{number}.jpg').touch()
        rows.append(f'i{number},{number % 2}')
    (tmp_path / 'data/any.csv').write_text('\n'.join(rows))
    found = find_table(tmp_path / 'data')
    write_lists(found, tmp_path)
    _, settings = task_of(found, 'finetune', device='cpu').settings('finetune', tmp_path, 100, {})
    datasets = [settings[f'{part}_dataloader']['dataset'] for part in ('train', 'val')]
    samples = [each for dataset in datasets for each in ImageFolder(**dataset | dict(pipeline=[]))]
    assert len(samples) == 30
    assert all(sample['gt_label'] == int(Path(sample['img_path']).stem[1:]) % 2 for sample in samples)


def test_classes_are_those_of_folders_or_of_a_table(tmp_path):
    folder = make(tmp_path / 'data', any_csv=FORMS['ending'])
    call = call_of('finetune', folder, classes=['cat', 'dog'])
    with pytest.raises(UserError, match='any.csv: .* --classes .* leave it out'):
        Classification.find(call, find_table(folder))


UNUSUAL = {  # header, cells of an image, classes
    'a class called as a split is': ('image,bus,train', ['1,0', '0,1'], ['bus', 'train']),
    'a class called as row numbers are': ('image,no,yes', ['1,0', '0,1'], ['no', 'yes']),
    'classes called as columns of splits': ('image,phase', ['G1', 'M'], ['G1', 'M']),
    'half grades': ('image,label', ['0', '0.5', '1'], ['0', '0.5', '1']),
    '-1 for 0': ('image,Smiling,Young', ['-1,1', '1,-1'], ['Smiling', 'Young']),
    'commas in names': (
        'image,label',
        ['cat', '"other, unknown"', 'fox', 'cow'],
        ['cat', 'cow', 'fox', 'other, unknown'],
    ),
    'a column twice that is not used': ('image,label,note,note', ['a,x,y', 'b,x,y'], ['a', 'b']),
}


@pytest.mark.parametrize('form', UNUSUAL)
def test_unusual_tables(tmp_path, form):
    head, cells, classes = UNUSUAL[form]
    rows = [f'{name}.jpg,{cells[index % len(cells)]}' for index, name in enumerate(LABELS)]
    assert find_table(make(tmp_path, any_csv='\n'.join([head, *rows]))).classes == classes


def test_minus_one_beside_0_and_1_is_not_taken_for_0(tmp_path):
    rows = [f'{name},{index % 3 - 1},1' for index, name in enumerate(LABELS)]
    with pytest.raises(UserError, match='--labels COLUMN'):
        find_table(make(tmp_path, any_csv='\n'.join(['image,edema,fracture', *rows])))


def test_folders_of_splits_do_not_compete_with_a_table(tmp_path):
    folder = make(tmp_path / 'data', 'train_images', any_csv=lines('{},{}'.format, 'id_code,diagnosis'))
    make(tmp_path / 'other', 'test_images')
    for index, file in enumerate((tmp_path / 'other/test_images').iterdir()):
        (folder / 'test_images').mkdir(exist_ok=True)
        file.rename(folder / f'test_images/t{index}.jpg')
    found = find_table(folder)
    assert found.classes == ['cat', 'dog', 'owl'] and len(found.train.names) == 27


def test_a_column_that_may_be_anything_does_not_replace_class_folders(tmp_path):
    make(tmp_path / 'data', 'cat', any_csv=lines('{}.jpg,{}'.format, 'image,photographer'))
    make(tmp_path / 'data', 'dog')
    for name in [*LABELS][::2]:
        (tmp_path / f'data/cat/{name}.jpg').rename(tmp_path / f'data/cat/c_{name}.jpg')
    with pytest.raises(UserError, match='photographer, and folders are cat, dog; give --labels photographer'):
        find_table(tmp_path / 'data')
    assert find_table(tmp_path / 'data', 'photographer').classes == ['cat', 'dog', 'owl']


@pytest.mark.parametrize('encoding', ['cp1252', 'utf-16', 'utf-8'])
def test_tables_are_read_as_programs_save_them(tmp_path, encoding):
    folder = make(tmp_path)
    (folder / 'any.csv').write_bytes(('sep=,\n' + FORMS['ending'].replace('cat', 'Bär')).encode(encoding))
    assert find_table(folder).classes == ['Bär', 'dog', 'owl']


def test_lines_of_json_are_a_table(tmp_path):
    rows = [dict(file_name=f'images/{name}.jpg', label=label) for name, label in LABELS.items()]
    rows[3]['label'] = None
    folder = make(tmp_path)
    (folder / 'metadata.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    found = find_table(folder)
    assert found.classes == ['cat', 'dog', 'owl'] and len(found.train.names) + len(found.held_out.names) == 29
    (folder / 'metadata.jsonl').write_text('{"file_name": 3}\n[1]')
    with pytest.raises(UserError, match='not understood: metadata.jsonl'):
        Classification.find(call_of('finetune', folder), find_table(folder))


def test_two_tables_are_refused(tmp_path):
    assert find_table(make(tmp_path / 'a', a_csv=FORMS['ending'], sample_submission_csv=FORMS['ending']))
    with pytest.raises(UserError, match='a.csv, b.csv'):
        find_table(make(tmp_path / 'b', a_csv=FORMS['ending'], b_csv=FORMS['ending']))


SEVERAL = {  # labels of i3 to i5
    'bars': lambda table: table.replace('i3.jpg,cat', 'i3.jpg,cat|dog').replace('i5.jpg,owl', 'i5.jpg,'),
    'semicolons': lambda table: table.replace('i3.jpg,cat', 'i3.jpg,cat; dog').replace('i5.jpg,owl', 'i5.jpg,'),
    'commas': lambda table: table.replace('i3.jpg,cat', 'i3.jpg,"cat, dog"').replace('i5.jpg,owl', 'i5.jpg,'),
    'words': lambda table: table.replace('i3.jpg,cat', 'i3.jpg,cat dog').replace('i5.jpg,owl', 'i5.jpg,'),
    'the same twice': lambda table: table.replace('i3.jpg,cat', 'i3.jpg,cat|dog|cat').replace('i5.jpg,owl', 'i5.jpg,'),
    'columns': lambda _: FORMS['one column a class'].replace('i3,0,0,1', 'i3,0,1,1').replace('i5,1,0,0', 'i5,0,0,0'),
}


@pytest.mark.parametrize('form', SEVERAL)
def test_images_may_have_several_labels_or_none(tmp_path, form):
    found = find_table(make(tmp_path / 'data', any_csv=SEVERAL[form](FORMS['ending'])))
    assert found.classes == ['cat', 'dog', 'owl'] and len(found.train.names) == 27
    write_lists(found, tmp_path / 'lists')
    expected = {name: {label} for name, label in LABELS.items()} | dict(i3={'cat', 'dog'}, i5=set())
    for name in ('train', 'held_out'):
        options = found.dataset(tmp_path / 'lists', name)
        assert options.pop('type') == 'beit_mm.MultiLabelFolder'
        dataset = MultiLabelFolder(**options, classes=str(tmp_path / 'lists/classes.txt'))
        for index, sample in enumerate(dataset):
            held = {found.classes[label] for label, score in enumerate(sample['gt_score']) if score}
            assert held == expected[Path(sample['img_path']).stem]
            assert {found.classes[label] for label in dataset.get_cat_ids(index)} == held
    assert found.learned['dog'] >= 9


@pytest.mark.parametrize('seed', range(4))
def test_a_tenth_is_held_out_of_images_with_many_combinations_of_labels(tmp_path, seed):
    draw, rows = np.random.default_rng(seed), ['image,labels', '0,rare', '1,rare', '2,single', '3,']
    for index in range(300):
        (tmp_path / f'{index}.jpg').touch()
        labels = [f'l{label}' for label in np.flatnonzero(draw.random(30) < 0.2)]
        rows += [f'{index},{"|".join(labels)}'] * (index > 3)
    (tmp_path / 'any.csv').write_text('\n'.join(rows))
    found = find_table(tmp_path)
    held_out = Counter(label for joined in found.held_out.names.values() for label in joined.split('|'))
    assert len(found.held_out.names) == 30 and len(held_out) > 28
    assert {*found.classes} == {'rare', 'single', *(f'l{label}' for label in range(30))}  # of images to learn from


def test_rows_of_an_image_are_joined_unless_few_images_have_several(tmp_path):
    more = ''.join(f'{name}.jpg,dog\n' for name in [*LABELS][:6])
    found = find_table(make(tmp_path / 'many', any_csv=FORMS['ending'].rstrip('\n') + '\n' + more))
    cats = sum(label == 'cat' for label in [*LABELS.values()][:6])
    joined = [names for names in (found.train.names | found.held_out.names).values() if names == 'cat|dog']
    assert len(joined) == cats > 0 and any('several rows' in note for note in found.notes)
    with pytest.raises(UserError, match=r'any.csv.*1 of 30.*i3.jpg'):
        find_table(make(tmp_path / 'slip', any_csv=FORMS['ending'].rstrip('\n') + '\ni3.jpg,dog\n'))


def test_names_of_several_words_are_one_label_unless_their_parts_are_few(tmp_path):
    spaced = FORMS['ending'].replace('cat', 'tabby cat').replace('owl', 'barn, owl'.replace(',', ''))
    assert find_table(make(tmp_path / 'a', any_csv=spaced)).classes == ['barn owl', 'dog', 'tabby cat']
    kinds = ['in situ', 'benign', 'normal', 'invasive']
    rows = [f'{name},{kinds[index % 4]}' for index, name in enumerate(LABELS)]
    assert find_table(make(tmp_path / 'kinds', any_csv='\n'.join(['image,label', *rows]))).classes == sorted(kinds)
    assert separator_of(Counter(f'{how} {what}' for how in 'abcd' for what in 'wxyz')) == ''  # such as fresh apple
    tags = ['a b', 'a c', 'a b c', 'b c', 'c b', 'b a']
    many = 'image,tags\n' + ''.join(f'{name},{tags[index % 6]}\n' for index, name in enumerate(LABELS))
    assert find_table(make(tmp_path / 'b', any_csv=many)).classes == ['a', 'b', 'c']


def test_a_list_with_wrong_digits_is_refused(tmp_path):
    make(tmp_path)
    for digits in ('012', '1111', 'cat'):
        (tmp_path / 'list.txt').write_text(f'i3.jpg {digits}')
        with pytest.raises(UserError, match='list.txt, line 1: .* 3 digits'):
            MultiLabelFolder(
                str(tmp_path), classes=['a', 'b', 'c'], data_prefix='images', ann_file='list.txt'
            ).full_init()


def test_lists_of_paths_and_numbers_are_read_where_no_folder_is_a_class(tmp_path):
    numbers = dict(cat=0, dog=1, owl=2)
    rows = [f'images/{name}.jpg {numbers[label]}\n' for name, label in LABELS.items()]
    lists = {'train.txt': ''.join(rows[:20]), 'val.txt': ''.join(rows[20:])}
    found = find_table(make(tmp_path / 'a', **lists))
    assert found.classes == ['0', '1', '2'] and (len(found.train.names), len(found.held_out.names)) == (20, 10)
    assert all(str(numbers[LABELS[Path(path).stem]]) == label for path, label in found.train.names.items())
    make(tmp_path / 'b', 'one', **lists)
    assert find_table(make(tmp_path / 'b', 'two')) is None


def numbered(folder: Path, *words: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index in range(24):
        Image.new('L', (4, 4)).save(folder / f'{words[index % len(words)]}{index}.png')
    return folder


def test_classes_in_the_names_of_files(tmp_path):
    numbered(tmp_path / 'a/train', 'cat.', 'large_dog-')
    numbered(tmp_path / 'a/test1', '')
    found = find_table(tmp_path / 'a')
    assert found.classes == ['cat', 'large_dog'] and any('cat, large_dog' in note for note in found.notes)
    assert all(Path(path).name.startswith(label) for path, label in found.train.names.items())
    assert len(found.train.names) + len(found.held_out.names) == 24
    assert find_table(numbered(tmp_path / 'b', 'left_', 'right_', 'up_')).classes == ['left', 'right', 'up']
    for index, words in enumerate(
        (['cat'], ['left_', 'right_'], ['IMG_', 'DSC_'], ['train_', 'cat_'], ['cat', 'dog', ''], ['a1_', 'b2_'])
    ):
        assert find_table(numbered(tmp_path / str(index), *words)) is None


def test_a_column_named_as_labels_are_comes_before_columns_of_0_and_1(tmp_path):
    for name in ('label', 'Target'):
        text = lines(lambda name, label: f'{name},{int(label == "cat")},1', f'image,{name},verified')
        found = find_table(make(tmp_path / name, any_csv=text))
        assert found.classes == ['0', '1'] and Counter(
            [*found.train.names.values(), *found.held_out.names.values()]
        ) == {'0': 20, '1': 10}
    found = find_table(make(tmp_path / 'each', any_csv=FORMS['one column a class']))
    assert any('owl, dog, cat' in note for note in found.notes)


def test_each_table_has_its_own_separator_and_unknown_labels_are_counted(tmp_path):
    rows = SEVERAL['bars'](FORMS['ending']).splitlines(keepends=True)
    train, val = ''.join(rows[:21]), rows[0] + ''.join(rows[21:])
    files = dict(train_csv=train, val_csv=val.replace('i21.jpg,cat', 'i21.jpg,owl;cat;fox'))
    found = find_table(make(tmp_path / 'a', **files))
    assert found.held_out.names['images/i21.jpg'] == 'cat|fox|owl' and found.digits('cat|fox|owl') == [1, 0, 1]
    assert any(note.startswith('1 held-out images') and 'fox' in note for note in found.notes)
    singles = ''.join([rows[0], *FORMS['ending'].splitlines(keepends=True)[1:21]])
    for index, text in enumerate((train, singles)):
        other = val.replace('cat', 'Cat').replace('dog', 'Dog').replace('owl', 'Owl')
        with pytest.raises(UserError, match='Cat .* cat, dog, owl'):
            find_table(make(tmp_path / str(index), train_csv=text, val_csv=other))
