"""What `look` finds in a folder of images, and the page it writes."""

import html
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, HEADLESS
from label_maps import make_label_maps
from PIL import Image

import beit_mm
from beit_mm.__main__ import main
from beit_mm.errors import UserError
from beit_mm.own_images import look
from beit_mm.own_images.images import find_images

MARK = (1, 254, 3)  # colour of a bar that a script draws if the browser has laid out what it should
CHECK = """<script>onload = () => {
    const loaded = [...document.images].every(image => image.complete && image.naturalWidth > 0)
    if (loaded && document.images.length > 5 && document.documentElement.scrollWidth <= innerWidth)
        document.body.style.borderTop = '40px solid rgb(1, 254, 3)'
}</script>"""


def photo(seed: int, size: tuple[int, int] = (80, 60)) -> Image.Image:
    """A smooth picture, unlike those of other seeds."""
    pixels = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(pixels).resize(size, Image.Resampling.BICUBIC)


def save_classes(folder: Path, number: int, classes: Sequence[str]) -> None:
    for seed in range(number):
        path = folder / classes[seed % len(classes)] / f'{seed}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        photo(seed, (30, 20) if seed % 8 else (90, 60)).save(path)


@pytest.fixture(scope='module')
def planted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Class folders of images with ten faults."""
    folder = tmp_path_factory.mktemp('planted') / 'images'
    for number in range(120):
        name, part = ('Cat', 'cat ', 'dog', 'owl')[number % 4], 'val' if number % 11 == 9 else 'train'
        (folder / part / name).mkdir(parents=True, exist_ok=True)
        photo(number).save(folder / part / name / f'{number}.jpg', quality=95)
    train = folder / 'train'
    shutil.copy(train / 'dog/2.jpg', train / 'owl/contradiction.jpg')
    photo(6).save(folder / 'val/dog/leak.jpg', quality=30)
    whole = (train / 'dog/2.jpg').read_bytes()
    (train / 'dog/truncated.jpg').write_bytes(whole[: len(whole) // 2])
    (train / 'dog/text.jpg').write_text('no image')
    Image.fromarray(np.array([[[200, 10, 10]]], np.uint8)).save(train / 'dog/tiny.png')
    Image.new('RGB', (80, 60), 'blue').save(train / 'dog/blue.png')
    turned = Image.Exif()
    turned[0x0112] = 6
    photo(200).save(train / 'dog/turned.jpg', exif=turned)
    deep = np.random.default_rng(0).integers(0, 65536, (60, 80)).astype(np.uint16)
    Image.fromarray(deep).save(train / 'dog/deep.png')
    photo(201).save(train / 'dog/lies.png', 'JPEG')
    photo(204, (4000, 40)).save(train / 'dog/long.png')
    (train / 'two').mkdir()
    for seed in (202, 203):
        photo(seed).save(train / f'two/{seed}.jpg')
    (folder / 'notes.txt').write_text('notes')
    return folder


def found_by(folder: Path, out: Path, capsys: pytest.CaptureFixture) -> tuple[list[str], str, str]:
    """What `beit-mm look` says: what may be wrong, all of it, and the text of its page."""
    main(['look', str(folder), '--out', str(out)])
    said, page = capsys.readouterr().out, out.read_text()
    found = [line for line in said.splitlines() if line.startswith('found')]
    return found, said, html.unescape(re.sub('<style>.*?</style>|<.*?>', ' ', page, flags=re.DOTALL))


def test_ten_planted_faults_are_found_and_nothing_else(planted, tmp_path, capsys):
    found, said, page = found_by(planted, tmp_path / 'look.html', capsys)
    faults = {
        'train/dog/2.jpg = train/owl/contradiction.jpg': 'class',
        'val/dog/leak.jpg = train/dog/6.jpg': 'split',
        'train/dog/truncated.jpg': 'read',
        'train/dog/text.jpg': 'read',
        'train/dog/long.png': 'read',
        'train/dog/tiny.png': '32',
        'train/dog/blue.png': 'colour',
        'train/dog/turned.jpg': 'EXIF',
        'train/dog/deep.png': '16-bit',
        'train/dog/lies.png': 'format',
        'two (2)': 'fewer',
        "'Cat' = 'cat '": 'case',
    }
    for name, word in faults.items():
        assert any(name in line and word in line for line in found), name
        assert name in page and word in page
    named = {*re.findall(r'[\w-]+/[\w ]+/\w+\.\w+', ' '.join(found))}
    assert named == {*re.findall(r'[\w-]+/[\w ]+/\w+\.\w+', ' '.join(faults))}
    assert 'notes' not in said and '.txt (1)' in said
    for following in (f'beit-mm finetune {planted}', 'run/mistakes.csv'):
        assert following in said and following in page


def test_the_page_names_all_files_and_the_terminal_the_first(tmp_path, capsys):
    save_classes(tmp_path / 'images', 120, ('a', 'b'))
    names = [f'images/a/broken{number}.jpg' for number in range(7)]
    for name in names:
        (tmp_path / name).write_text('no image')
    found, _, page = found_by(tmp_path / 'images', tmp_path / 'look.html', capsys)
    (said,) = (line for line in found if 'cannot be read' in line)
    assert said.count('broken') == 4 < 7 and ': 7 (' in said
    assert all(Path(name).name in page for name in names)


def test_without_imagehash_equal_files_are_found_and_a_line_says_so(planted, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(look, 'phash', None)
    found, said, _ = found_by(planted, tmp_path / 'look.html', capsys)
    assert 'contradiction.jpg' in ' '.join(found) and 'leak.jpg' not in ' '.join(found)
    assert "pip install 'beit_mm[look]'" in said


def test_each_image_is_compared_with_all_others(monkeypatch):
    """Also across blocks of rows; the nearest comes first, and pairs beyond the limit do not count."""
    monkeypatch.setattr(look, 'ROWS', 2)
    monkeypatch.setattr(look, 'side_by_side', lambda *_: None)
    monkeypatch.setattr(look, 'read_small', lambda *_: [None])
    base = np.where(np.random.default_rng(0).integers(0, 2, (3, 64)), 1, -1)
    cases = [(0, 0, 'a', False), (1, 0, 'a', False), (2, 0, 'b', False), (0, 4, 'a', False)]
    cases += [(1, 5, 'a', False), (1, 2, 'a', True), (2, 0, 'a', False)]  # a row of `base`, how many bits differ
    seen = []
    for number, (row, changed, name, held_out) in enumerate(cases):
        bits = base[row] * np.where(np.arange(64) < changed, -1, 1)
        text = str(number)
        seen.append(look.Seen(text, None, text, name, held_out, (64, 64), 'colour', [], bits.astype(np.float32)))
    found = {finding.text: finding.names for finding in look.lookalikes(seen)}
    assert found == {text: [pair] for text, pair in zip(look.LOOKALIKES, ('2 = 6', '1 = 5', '0 = 3'), strict=True)}


def test_label_maps_are_described(tmp_path, capsys):
    """Shares, and sizes of objects that are not misled by specks."""
    folder = tmp_path / 'maps'
    for part in ('images', 'annotations'):
        (folder / part).mkdir(parents=True)
    labels = np.zeros((100, 200), np.uint8)
    labels[10:50, 10:50] = labels[10:30, 100:120] = 1
    labels[80, ::4] = 1  # specks
    for number in range(12):
        photo(number, (200, 100)).save(folder / f'images/{number}.jpg')
        Image.fromarray(labels).save(folder / f'annotations/{number}.png')
    (folder / 'classes.txt').write_text('ground\n<b>cell</b>\n')
    _, said, page = found_by(folder, tmp_path / 'look.html', capsys)
    share = 100 * (labels == 1).mean()
    assert re.search(rf'<b>cell</b>\s+1\s+{share:.2f}\s+40\s', page)
    assert '<b>' not in (tmp_path / 'look.html').read_text()
    assert '200 x 100' in said and 'beit-mm segment' in said


def test_no_command_follows_that_would_be_refused(tmp_path, capsys):
    (tmp_path / 'few').mkdir()
    for number in range(12):
        photo(number).save(tmp_path / f'few/{number}.png')
    beit_mm.look(tmp_path / 'few', tmp_path / 'look.html')
    assert 'beit-mm' not in capsys.readouterr().out
    for name in 'abc':
        (tmp_path / f'broken/{name}').mkdir(parents=True)
        for number in range(40):
            (tmp_path / f'broken/{name}/{number}.png').write_bytes(b'nothing')
    beit_mm.look(tmp_path / 'broken', tmp_path / 'look.html')
    assert 'beit-mm' not in capsys.readouterr().out
    with pytest.raises(UserError, match='a folder; expected the name of a file'):
        beit_mm.look(tmp_path, tmp_path)
    with pytest.raises(UserError, match="''"):  # a variable of the shell without a value
        beit_mm.look('', tmp_path / 'look.html')


def test_what_finetune_refuses_comes_first_with_the_commands_that_settle_it(tmp_path, capsys):
    folder = make_label_maps(tmp_path / 'maps', number=12)
    (folder / 'classes.txt').unlink()
    with pytest.raises(UserError) as refusal:
        look.find_label_maps(folder)
    _, said, page = found_by(folder, tmp_path / 'look.html', capsys)
    first, *_ = said.splitlines()
    assert str(refusal.value) in first and page.index(str(refusal.value)) < page.index('12 images')
    for option in ('--reduce-zero-label', '--keep-zero-label'):
        assert f'beit-mm finetune {folder} {option}' in said

    save_classes(tmp_path / 'few', 6, ('0', '1'))
    _, said, page = found_by(tmp_path / 'few', tmp_path / 'look.html', capsys)
    assert '100' in said.splitlines()[0] and f'--labelled {tmp_path / "few"}' in said
    assert '--freeze all' in said and '--minutes' not in said


def test_the_labels_of_a_table_are_its_classes(tmp_path, capsys):
    rows = ['image,label']
    (tmp_path / 'data').mkdir()
    for number in range(120):
        photo(number).save(tmp_path / f'data/{number}.jpg')
        rows.append(f'{number}.jpg,{"ab"[number % 2]}')
    (tmp_path / 'data/labels.csv').write_text('\n'.join(rows))
    beit_mm.look(tmp_path / 'data', tmp_path / 'look.html')
    assert '2 classes' in capsys.readouterr().out


def test_bands_are_seen_as_rgb(tmp_path, capsys):
    tifffile = pytest.importorskip('tifffile')
    folder = make_label_maps(tmp_path / 'maps', number=12)
    for path in folder.glob('images/*/*.png'):
        pixels = np.array(Image.open(path)).astype(np.uint16)
        bands = np.concatenate([pixels[..., ::-1], pixels[..., :2]], axis=2) * 10 + 3000
        tifffile.imwrite(path.with_suffix('.tif'), bands, photometric='minisblack', planarconfig='contig')
        path.unlink()
    _, said, _ = found_by(folder, tmp_path / 'look.html', capsys)
    assert '5 bands (24)' in said
    found, _ = look.find(folder)
    seen, broken = look.examine_all(folder, found)
    mean = np.mean([np.asarray(each.image).mean(axis=(0, 1)) for each in seen], axis=0)
    assert not broken and all(60 < level < 200 for level in mean)


def test_the_plan_of_a_run_tells_the_sizes(tmp_path):
    save_classes(tmp_path, 112, ('0', '1'))
    assert look.sizes_of(find_images(tmp_path)).startswith('30 x 20 to 90 x 60, median 30 x 20')
    assert look.sizes([(5, 4)] * 3) == 'all 5 x 4' and look.sizes([]) == ''


def test_only_classes_are_said_to_contradict_each_other(tmp_path, capsys):
    """The same photo in the folders of two days; two labels in a table."""
    save_classes(tmp_path / 'days', 110, ('2024-01-05', '2024-01-06'))
    shutil.copy(tmp_path / 'days/2024-01-05/0.png', tmp_path / 'days/2024-01-06/again.png')
    found, said, _ = found_by(tmp_path / 'days', tmp_path / 'look.html', capsys)
    assert any('again.png' in line for line in found) and not any('another class' in line for line in found)
    assert 'beit-mm pretrain' in said
    rows = [f'{path.name},{("cat", "dog")[number % 2]}' for number, path in enumerate(tmp_path.glob('days/*/*.png'))]
    (tmp_path / 'days/labels.csv').write_text('\n'.join(['file,label', *rows]))
    _, said, _ = found_by(tmp_path / 'days', tmp_path / 'look.html', capsys)
    assert re.search(r'classes +cat \(', said) and 'beit-mm finetune' in said


@pytest.mark.long
@pytest.mark.skipif(CHROMIUM is None, reason='no Chromium')
@pytest.mark.parametrize('width', [375, 1280])
def test_a_browser_shows_all_of_the_page(planted, tmp_path, width):
    page = beit_mm.look(planted, tmp_path / 'look.html')
    text = page.read_text()
    assert not re.search(r'(src|href)="(?!data:)', text) and '<script' not in text
    page.write_text(text + CHECK)
    picture = tmp_path / 'page.png'
    options = [f'--user-data-dir={tmp_path / "browser"}', f'--screenshot={picture}', f'--window-size={width},6000']
    subprocess.run([CHROMIUM, *HEADLESS, *options, f'file://{page}'], check=True, capture_output=True, timeout=200)
    pixels = np.asarray(Image.open(picture).convert('RGB'))
    assert pixels.shape[1] == width
    assert (pixels == MARK).all(axis=2).any(), 'pictures are missing, or the page is wider than the window'
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 1000  # the pictures
