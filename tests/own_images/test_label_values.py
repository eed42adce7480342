"""What the numbers in label maps mean: soft masks, grays, negative numbers and no data, maps of turned images."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFilter, ImageOps
from tifffile import TiffWriter, imwrite
from torchvision.datasets import Cityscapes

from beit_mm.datasets.segmentation_folder import SegmentationFolder
from beit_mm.errors import UserError
from beit_mm.own_images.images import write_lists
from beit_mm.own_images.label_maps import LabelMaps, find_label_maps
from beit_mm.own_images.label_values import Meaning, meaning_of_dataset, unlabelled

NUMBER, SIZE = 12, (48, 64)
NODATA = (42113, 's', 0, '7', True)  # GDAL_NODATA


def discs(values: list[int], seed: int = 0) -> np.ndarray:
    """A map of the first value with a disc of each other one, uint8."""
    rng, (rows, columns) = np.random.default_rng(seed), np.indices(SIZE)
    labels = np.full(SIZE, values[0], np.uint8)
    for value in values[1:]:
        row, column = rng.integers(12, SIZE[0] - 12), rng.integers(12, SIZE[1] - 12)
        labels[(rows - row) ** 2 + (columns - column) ** 2 < 100] = value
    return labels


@pytest.fixture
def make(tmp_path) -> Callable[..., Path]:
    def make_folder(save: Callable[[np.ndarray, Path], object], values: list[int], names: str = '') -> Path:
        """12 images, and maps that `save` writes to a path without an ending."""
        for part in ('images', 'masks'):
            (tmp_path / part).mkdir()
        for index in range(NUMBER):
            Image.new('RGB', SIZE[::-1], (index, 9, 9)).save(tmp_path / f'images/{index}.jpg')
            save(discs(values, index), tmp_path / f'masks/{index}')
        if names:
            (tmp_path / 'classes.txt').write_text(names)
        return tmp_path

    return make_folder


def learned(found: LabelMaps, lists: Path) -> dict[int, np.ndarray]:
    """What a training sees, by the number of the image."""
    write_lists(found, lists)
    pipeline = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.LoadAnnotation')]
    both = [SegmentationFolder(**found.dataset(lists, name), pipeline=pipeline) for name in ('train', 'held_out')]
    return {int(Path(sample['img_path']).stem): sample['gt_seg_map'] for data in both for sample in data}


def save_png(labels: np.ndarray, path: Path) -> None:
    Image.fromarray(labels).save(f'{path}.png')


def save_soft(labels: np.ndarray, path: Path) -> None:
    Image.fromarray(labels).filter(ImageFilter.GaussianBlur(0.7)).save(f'{path}.png')


def save_jpeg(labels: np.ndarray, path: Path) -> None:
    Image.fromarray(labels).save(f'{path}.jpg', quality=80)


@pytest.mark.parametrize('save', [save_soft, save_jpeg])
@pytest.mark.parametrize('names', ['', 'crack', 'ground\ncrack'])
def test_masks_with_soft_borders_have_two_classes_by_the_nearer_value(make, tmp_path, save, names):
    found = find_label_maps(make(save, [0, 255], names))
    assert found.values == [0, 255] and len(found.classes) == 2 and found.classes[1] == (names[-5:] or 'foreground')
    assert 'soft borders' in found.notes[0]
    for index, labels in learned(found, tmp_path / 'lists').items():
        stored = np.asarray(Image.open(tmp_path / found.maps[0] / f'{index}{found.suffixes.maps}'))
        assert np.array_equal(labels, stored > 127)
        assert (labels != (discs([0, 255], index) > 0)).mean() < 0.02
    with pytest.raises(UserError, match='soft borders.*--reduce-zero-label'):
        find_label_maps(tmp_path, reduce_zero_label=True)


@pytest.mark.parametrize(
    'values',
    [
        [0, 255, *range(60, 200, 20)],  # classes that cover more than soft borders would
        [0, *range(1, 60), 255, 255],  # many classes, and 255 for what is ignored
        [0, 1, 2, 3, 4, 5, 6, 7, 8, 9],
    ],
)
def test_classes_are_not_soft_borders(make, values):
    found = find_label_maps(make(save_png, values), reduce_zero_label=False)
    occurring = {number for index in range(NUMBER) for number in np.unique(discs(values, index)).tolist()}
    assert found.values == sorted(occurring - {255}) and 'soft' not in found.notes[0]
    assert ('255 (' in found.notes[0]) == (255 in values)


def test_shades_are_not_unlabelled_where_they_stand_for_the_nearer_value():
    pixels, masks = Counter({-1: 500, 0: 100, 4: 900, 90: 500, 255: 2000}), Meaning(['a', 'b'], [4, 255], '')
    assert unlabelled(pixels, masks._replace(nearest=True), False) == '12 % of the pixels are unlabelled: -1 (12 %)'
    assert unlabelled(pixels, masks, False).startswith('28 % of the pixels are unlabelled: ')


def test_the_image_with_a_number_beyond_the_names_is_named(make):
    folder = make(save_png, [0, 1], 'a\nb\nc')
    save_png(discs([0, 1, 9], 7), folder / 'masks/7')
    with pytest.raises(UserError, match=r'label map of .*\b7\.jpg contains 9'):
        find_label_maps(folder)


def test_the_numbers_of_cityscapes_are_those_that_torchvision_has():
    meaning = meaning_of_dataset('', '_gtFine_labelIds.png', set())
    learned_from = [each for each in Cityscapes.classes if not each.ignore_in_eval]
    assert [*zip(meaning.classes, meaning.values, strict=True)] == [(each.name, each.id) for each in learned_from]


def test_a_third_class_in_lossy_maps_is_refused(make):
    with pytest.raises(UserError, match='.jpg.*PNG'):
        find_label_maps(make(save_jpeg, [0, 128, 255]), reduce_zero_label=False)


@pytest.mark.parametrize(
    ('names', 'reduced', 'classes', 'labels'),
    [
        ('', False, ['0', '128', '255'], [0, 1, 2]),
        ('', True, ['128', '255'], [255, 0, 1]),
        ('a\nb\nc', None, ['a', 'b', 'c'], [0, 1, 2]),
        ('b\nc', None, ['b', 'c'], [255, 0, 1]),
    ],
)
def test_evenly_spread_grays_are_classes_255_too(make, tmp_path, names, reduced, classes, labels):
    found = find_label_maps(make(save_png, [0, 128, 255], names), reduced)
    assert found.classes == classes
    for index, seen in learned(found, tmp_path / 'lists').items():
        drawn = discs([0, 128, 255], index)
        assert np.array_equal(seen, np.array(labels)[np.searchsorted([0, 128, 255], drawn)])


def test_what_to_do_with_zero_beside_128_and_255_is_asked_unless_the_names_say_so(make, tmp_path):
    folder = make(save_png, [0, 128, 255])
    with pytest.raises(UserError, match='128, 255.*--reduce-zero-label'):
        find_label_maps(folder)
    (folder / 'classes.txt').write_text('a\nb\nc')
    with pytest.raises(UserError, match='names 3 .*leave out --reduce-zero-label'):
        find_label_maps(folder, reduce_zero_label=True)


def save_tif(dtype: str, **options) -> Callable[[np.ndarray, Path], None]:
    """Numbers 7 become -1, or stay where a tag says that they mean no data; in floats the first row is NaN."""

    def save(labels: np.ndarray, path: Path) -> None:
        numbers = labels.astype(dtype)
        if not options.get('extratags'):
            numbers[labels == 7] = -1
        if dtype == 'float32':
            numbers[0] = np.nan
        imwrite(f'{path}.tif', numbers, **options)

    return save


@pytest.mark.parametrize(
    'save',
    [save_tif('int16'), save_tif('int32'), save_tif('float32'), save_tif('int16', byteorder='>')]
    + [save_tif(dtype, extratags=[NODATA]) for dtype in ('uint8', 'uint16', 'float32')],
)
def test_negative_numbers_and_no_data_are_unlabelled_in_the_plan_and_in_the_training(make, tmp_path, save):
    found = find_label_maps(make(save, [0, 1, 2, 7], 'a\nb\nc'))
    assert found.values == [0, 1, 2] and ('-1 (' in found.notes[0] or 'no data (' in found.notes[0])
    for index, labels in learned(found, tmp_path / 'lists').items():
        drawn = discs([0, 1, 2, 7], index)
        rows = slice(save.__closure__[0].cell_contents == 'float32', None)
        assert np.array_equal(labels[rows], np.where(drawn == 7, 255, drawn)[rows])
        assert (labels[: rows.start] == 255).all()


def test_fractions_in_a_label_map_are_refused_by_name(make, tmp_path):
    folder = make(lambda labels, path: imwrite(f'{path}.tif', labels / np.float32(2)), [0, 1])
    with pytest.raises(UserError, match='0.tif holds 0.5; .*whole'):
        find_label_maps(folder)


def turn(folder: Path, tags: list[int], upright: bool) -> None:
    """Gives images an EXIF orientation, and draws their maps on the pixels as stored, or upright."""
    for index, tag in enumerate(tags):
        exif = Image.Exif()
        exif[0x0112] = tag
        Image.open(folder / f'images/{index}.jpg').save(folder / f'images/{index}.jpg', exif=exif)
        with_tag = Image.open(folder / f'images/{index}.jpg').convert('L')
        with_tag.paste(Image.fromarray(discs([0, 1], index)))
        if upright:
            ImageOps.exif_transpose(with_tag).save(folder / f'masks/{index}.png')


@pytest.mark.parametrize('upright', [False, True])
def test_maps_of_turned_images_are_turned_where_the_sizes_say_so(make, tmp_path, upright):
    folder, tags = make(save_png, [0, 1]), [6, 8, 5, 7, 3, 2, 4, 1, 6, 6, 6, 6]
    turn(folder, tags, upright)
    found = find_label_maps(folder)
    assert any('11 images are turned by EXIF' in note for note in found.notes) == (not upright)
    for index, labels in learned(found, tmp_path / 'lists').items():
        exif = Image.Exif()
        exif[0x0112] = tags[index]
        stored = Image.fromarray(discs([0, 1], index))
        stored.info['exif'] = exif.tobytes()
        assert np.array_equal(labels, np.asarray(ImageOps.exif_transpose(stored)))


def test_turned_images_whose_sizes_cannot_tell_are_counted_and_a_mixture_is_refused(make):
    folder = make(save_png, [0, 1])
    turn(folder, [3] * 5, upright=True)
    assert '5 images are turned by EXIF' in find_label_maps(folder).notes[1]
    turn(folder, [6] * 5, upright=True)
    save_png(discs([0, 1]), folder / 'masks/2')
    with pytest.raises(UserError, match='1 .*as stored, 4 as EXIF'):
        find_label_maps(folder)


@pytest.mark.parametrize(
    ('file', 'text'),
    {
        'class_dict.csv': 'name, r, g, b\nvoid, 0, 0, 0\ntraffic light, 9, 8, 7\n',
        'label_colors.txt': '0 0 0\t\tvoid\n9 8 7\t\ttraffic light\n',
        'labelmap.txt': '# label:color_rgb:parts:actions\nvoid:0,0,0::\ntraffic light:9,8,7::\n',
        'train/_classes.csv': 'Pixel Value, Class\n0, void\n200, traffic light\n',
        'labels.txt': 'void\ntraffic light\n',
        'label_list.txt': '1.png 0\n2.png 0\n',
    }.items(),
)
def test_legends_of_other_data_sets(make, tmp_path, file, text):
    in_colours = file in ('class_dict.csv', 'label_colors.txt', 'labelmap.txt')
    shown = np.array([[0, 0, 0], [9, 8, 7]] if in_colours else [0, 200], np.uint8)
    folder = make(lambda labels, path: save_png(shown[labels], path), [0, 1])
    (folder / file).parent.mkdir(exist_ok=True)
    (folder / file).write_text(text)
    if 'void' not in text or file == 'labels.txt':
        with pytest.raises(UserError, match='keep-zero-label'):
            find_label_maps(folder)
        return
    found = find_label_maps(folder)
    assert found.classes == ['void', 'traffic light'] and file.split('/')[-1] in found.notes[0]
    for index, labels in learned(found, tmp_path / 'lists').items():
        assert np.array_equal(labels, discs([0, 1], index))


@pytest.mark.parametrize('names', ['Void\nroad\ncar\n', 'road 1 1 1\ncar 2 2 2\nunlabelled 0 0 0\n'])
def test_pixels_whose_class_is_called_unlabelled_are_not_learned_unless_0_is_kept(make, tmp_path, names):
    in_colours = '1 1 1' in names
    shown = np.repeat(np.arange(3, dtype=np.uint8)[:, None], 3, axis=1) if in_colours else np.arange(3, dtype=np.uint8)
    folder = make(lambda labels, path: save_png(shown[labels], path), [0, 1, 2], names)
    found = find_label_maps(folder)
    assert found.classes == ['road', 'car'] and 'is not learned' in found.notes[0]
    for index, labels in learned(found, tmp_path / 'lists').items():
        assert np.array_equal(labels, np.array([255, 0, 1])[discs([0, 1, 2], index)])
    if not in_colours:
        assert find_label_maps(folder, reduce_zero_label=False).classes == ['Void', 'road', 'car']
        assert find_label_maps(folder, merge='other=Void,car').classes == ['other', 'road']


COLOURS = 'a 9 9 9\nb 200 0 0\n'


def save_in_turn(labels: np.ndarray, path: Path) -> None:
    """With a palette that every other map has in another order."""
    order = [0, 1] if int(path.name) % 2 else [1, 0]
    image = Image.fromarray(np.array(order, np.uint8)[labels], 'P')
    colours = [[9, 9, 9], [200, 0, 0]]
    image.putpalette([level for index in order for level in colours[index]])
    image.save(f'{path}.png')


def test_palettes_that_differ_are_read_by_colour_or_refused(make, tmp_path):
    folder = make(save_in_turn, [0, 1])
    with pytest.raises(UserError, match='index 0 is .* name the colours'):
        find_label_maps(folder)
    for file, text in {'labelmap.txt': 'a:9,9,9::\nb:200,0,0::\n', 'classes.txt': COLOURS}.items():
        (folder / file).write_text(text)
        for index, labels in learned(find_label_maps(folder), tmp_path / file[:-4]).items():
            assert np.array_equal(labels, discs([0, 1], index))


def save_pages(labels: np.ndarray, path: Path, **options: object) -> None:
    with TiffWriter(f'{path}.tif') as file:
        file.write(labels)
        file.write(labels if options else labels[::2, ::2], **options)


def save_mask(labels: np.ndarray, path: Path) -> None:
    """As GDAL writes the mask of valid pixels: NewSubfileType 4."""
    mask = Image.new('L', labels.shape[::-1], 255)
    Image.fromarray(labels).save(f'{path}.tif', save_all=True, append_images=[mask], tiffinfo={254: 4})


def layered(alpha: Callable[[np.ndarray], np.ndarray], hidden: int, shown: int = 255) -> Callable[..., None]:
    """Saves a map with transparent pixels, which have the value `hidden`."""

    def save(labels: np.ndarray, path: Path) -> None:
        opaque = alpha(labels)
        values = np.where(opaque, shown * labels, hidden).astype(np.uint8)
        Image.fromarray(np.dstack([values] * 3 + [255 * opaque.astype(np.uint8)])).save(f'{path}.png')

    return save


def corner(labels: np.ndarray) -> np.ndarray:
    return np.indices(labels.shape).sum(axis=0) > 6


@pytest.mark.parametrize(
    ('save', 'message'),
    {
        'pages': (partial(save_pages, subfiletype=0), 'has several pages'),
        'a smaller copy': (save_pages, ''),
        'a mask of what is valid': (save_mask, ''),
        'black cut off a black background': (layered(corner, hidden=0), ''),
        'drawn on nothing': (layered(lambda labels: labels > 0, hidden=0), ''),
        'black, drawn on nothing': (layered(lambda labels: labels > 0, hidden=255, shown=0), 'transparent'),
        'erased': (layered(corner, hidden=255), 'transparent'),
    }.values(),
)
def test_pages_and_transparency_are_refused_where_they_hide_labels(make, tmp_path, save, message):
    folder = make(save, [0, 1], 'ground\ncell\n')
    if message:
        with pytest.raises(UserError, match=message):
            find_label_maps(folder)
        return
    for index, labels in learned(find_label_maps(folder), tmp_path / 'lists').items():
        assert np.array_equal(labels, discs([0, 1], index))


@pytest.mark.parametrize(
    ('first', 'others', 'names'),
    [((255,), 1, ''), ((1,), 255, ''), ((1, 255), 255, ''), ((3,), 2, 'ground\nroad\ncar\n')],
)
def test_a_slip_in_few_maps_does_not_decide_what_all_mean(make, first, others, names):
    """In the first two maps, or in the first one alone."""

    def save(labels: np.ndarray, path: Path) -> None:
        here = first if path.name in ('0', '1')[: 3 - len(first) - bool(names)] else (others,)
        labels[labels == 1] = here[-1]
        labels[:3, 0] = *here, *[2 * bool(names)] * (3 - len(here))
        save_png(labels, path)

    folder = make(save, [0, 1], names)
    with pytest.raises(UserError, match=rf'that of .*0\.jpg.* --{"reduce" if names else "keep"}-zero-label'):
        find_label_maps(folder)
    found = find_label_maps(folder, reduce_zero_label=bool(names))
    assert found.classes == (['ground', 'road', 'car'] if names else ['background', 'foreground'])


def test_borders_beside_masks_and_a_rare_class_are_usual(make):
    """Of 12 maps, a third have no foreground; two have the last class."""

    def save_borders(labels: np.ndarray, path: Path) -> None:
        labels[0], labels[1:] = 255, np.where(int(path.name) % 3, labels[1:], 0)
        save_png(labels, path)

    assert find_label_maps(make(save_borders, [0, 1])).classes == ['background', 'foreground']


def test_a_rare_last_class_is_learned(make):
    def save(labels: np.ndarray, path: Path) -> None:
        labels[0, 0] = 2 + (int(path.name) < 2)
        save_png(labels, path)

    assert find_label_maps(make(save, [0, 1], 'a\nb\nc\n')).classes == ['a', 'b', 'c']


@pytest.mark.parametrize(
    ('file', 'text'),
    [
        ('classes.txt', '2: car\n0: ground\n1: road\n'),
        ('classes.txt', '1: ground\n2: road\n3: car\n'),
        ('class_names.txt', 'ground\nroad\ncar\n'),
    ],
)
def test_names_may_have_numbers_or_be_those_of_labelme(make, tmp_path, file, text):
    folder = make(save_png, [0, 1, 2])
    (folder / file).write_text(text)
    found = find_label_maps(folder)
    names = np.array(['ground', 'road', 'car'])
    for index, labels in learned(found, tmp_path / 'lists').items():
        assert np.array_equal(np.array(found.classes)[labels], names[discs([0, 1, 2], index)])


def test_names_that_are_not_in_utf_8_are_refused_before_the_training(make):
    folder = make(save_png, [0, 1], 'ground\ncell\n')
    (folder / 'classes.txt').write_bytes('ground\nStraße\n'.encode('cp1252'))
    with pytest.raises(UserError, match='Stra.* not in UTF-8'):
        find_label_maps(folder)
