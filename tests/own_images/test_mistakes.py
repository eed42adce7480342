"""Which labels may be wrong, and which classes are confused."""

import csv
import os
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from label_maps import make_label_maps
from labelled import make_images
from PIL import Image

import beit_mm
from beit_mm.features.evaluation import cross_fit
from beit_mm.own_images import classification, mistakes, segmentation
from beit_mm.own_images import images as finding
from beit_mm.pictures import CHARACTER, TITLE_HEIGHT, sheet, shortened

pytestmark = pytest.mark.long


def rows_of(run: Path) -> list[dict[str, str]]:
    with (run / 'mistakes.csv').open(encoding='utf-8-sig', newline='') as file:
        return [*csv.DictReader(file)]


@pytest.fixture
def few_images(monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)


@pytest.mark.parametrize('options', [dict(epochs=1), dict(freeze='all', minutes=1)])
def test_wrong_labels_among_all_images_come_first(options, few_images, tmp_path):
    """One image to learn from and a held-out one, in folders of another class; one that cannot be read."""
    images, run = make_images(tmp_path / 'images', 12), tmp_path / 'run'
    wrong = [Path('train/red/=1.png'), Path('val/blue/lost.png')]
    for source, file in zip(('train/green/0.png', 'val/red/0.png'), wrong, strict=True):
        os.rename(images / source, images / file)
    (images / 'train/red/3.png').write_bytes(b'nothing')
    beit_mm.finetune(images, run, 'demo', workers=0, **options)
    first, second, *others = rows_of(run)
    assert {row['file'] for row in (first, second)} == {*map(str, wrong)}
    assert {(row['label'], row['predicted']) for row in (first, second)} == {('red', 'green'), ('blue', 'red')}
    assert [row['rank'] for row in (first, second, *others)] == [str(number) for number in range(1, 72)]
    shares = [float(row['probability of the label']) for row in (first, second, *others)]
    assert shares == sorted(shares) and shares[1] < 0.3 < 0.5 < shares[4]
    for name in ('report.md', 'report.html'):
        text = (run / name).read_text()
        assert 'mistakes.csv' in text and 'lost.png' in text and '71 of 72 images' in text
        assert '(1 cannot be read' in text and 'more minutes' not in text


def test_the_label_map_that_the_segmentor_contradicts_most_comes_first(base, few_images, tmp_path, monkeypatch):
    """All classes of one map are exchanged; the shares are those of what `segment` writes. Each image is asked once."""
    folder, run = make_label_maps(tmp_path / 'maps', 12), tmp_path / 'run'
    wrong = folder / 'annotations/training/5.png'
    numbers = np.asarray(Image.open(wrong))
    Image.fromarray(np.array([0, 2, 3, 1], np.uint8)[numbers]).save(wrong)
    asked, answer = Counter(), segmentation.SegmentationInferencer.__call__
    monkeypatch.setattr(
        segmentation.SegmentationInferencer, '__call__', lambda self, path: asked.update([path]) or answer(self, path)
    )
    beit_mm.finetune(folder, run, base, epochs=1, freeze='all', short_side=117, batch=4, workers=0)
    monkeypatch.undo()
    assert len(asked) == 24 and asked.total() <= 24 + 3  # three are drawn
    first, *others = rows_of(run)
    assert first['file'] == 'images/training/5.png' and len(others) == 23
    assert float(first['contradicted, %']) > 60 > 40 > float(others[0]['contradicted, %'])
    beit_mm.segment(run, folder / 'images/training/5.png', tmp_path / 'found')
    found, given = (
        np.asarray(Image.open(tmp_path / 'found/labels/5.png')).astype(int) + 1,
        np.asarray(Image.open(wrong)),
    )
    assert float(first['contradicted, %']) == pytest.approx(100 * (found != given)[given > 0].mean(), abs=0.06)
    assert float(first['of green, %']) == pytest.approx(100 * (found != given)[given == 2].mean(), abs=0.06)
    assert first['labelled pixels'] == str((given > 0).sum())
    assert '24 of 24 images' in (run / 'report.md').read_text()


@pytest.mark.parametrize('tested', [4, 20])
def test_maps_to_learn_from_are_checked_even_without_time(tested, base, few_images, tmp_path, monkeypatch):
    """Of 12 to learn from, one of which has no label, and 12 held-out ones, one of which cannot be read."""
    folder, run = make_label_maps(tmp_path / 'maps', 12), tmp_path / 'run'
    broken = folder / 'images/validation/3.png'
    broken.write_bytes(broken.read_bytes()[:2000])
    Image.new('L', (56, 40)).save(folder / 'annotations/training/3.png')
    monkeypatch.setattr(segmentation, 'MIN_TESTED', tested)
    report = segmentation.Segmentation.make_report
    monkeypatch.setattr(
        segmentation.Segmentation,
        'make_report',
        lambda self, weights, metrics, *_: report(self, weights, metrics, 0, 0),
    )
    beit_mm.finetune(folder, run, base, epochs=1, freeze='all', short_side=117, batch=4, workers=0)
    found = Counter(Path(row['file']).parent.name for row in rows_of(run))
    said = (run / 'report.md').read_text()
    assert 'including those to learn from' in said and f'{found.total()} of 24 images' in said
    # of each part, one may be among the ones tried that has no label or cannot be read
    assert min(tested, 12) - 1 <= found['validation'] <= 11 and 1 <= found['training'] <= 11


def test_an_image_does_not_speak_for_its_own_label():
    """Features of no use: fitted to all, a layer would know most labels by heart."""
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.randn(60, 100, generator=generator), torch.randint(3, (60,), generator=generator)
    shares = cross_fit(features, labels, 3)
    assert torch.allclose(shares.sum(dim=1), torch.ones(60)) and (shares.argmax(dim=1) == labels).float().mean() < 0.55


def test_where_time_is_short_mistakes_and_others_are_checked_and_a_line_says_it(
    few_images, tmp_path, monkeypatch, capsys
):
    images = make_images(tmp_path / 'images', 12)
    os.rename(images / 'val/red/0.png', wrong := images / 'val/blue/lost.png')
    monkeypatch.setattr(mistakes, 'MIN_CHECKED', 20)
    monkeypatch.setattr(classification, 'FITTED_PER_SECOND', 0)
    beit_mm.finetune(images, tmp_path / 'run', 'demo', workers=0, epochs=1)
    rows = rows_of(tmp_path / 'run')
    assert len(rows) == 20 and str(wrong.relative_to(images)) in [row['file'] for row in rows]
    assert '20 of 72 images' in capsys.readouterr().out
    report = (tmp_path / 'run/report.md').read_text()
    assert '20 of 72 images' in report and 'more minutes' in report


def test_titles_lose_their_middle_and_have_several_lines():
    assert shortened('Haliaeetus albicilla', 10) == 'Hali..illa' and shortened('short', 5) == 'short'
    assert shortened('abcdefgh', 7) == 'ab..fgh'
    tile = torch.zeros(3, 8, 8)
    heights = [sheet([[(title, tile)]]).height for title in ('', 'one', 'one\ntwo\nthree')]
    assert np.diff(heights).tolist() == [TITLE_HEIGHT, 2 * TITLE_HEIGHT]


def test_the_surest_mistakes_are_drawn_first(tmp_path, monkeypatch):
    """With the name of the file and both classes whole, each in a line."""
    classes, answers, drawn = ['right', 'a wrong class of a long name'], [], []
    for index, (label, probability) in enumerate([(1, 0.6), (0, 0.99), (1, 0.9), (1, 0.7)]):
        Image.new('RGB', (40, 30), (index * 60, 0, 0)).save(path := tmp_path / f'{index}.png')
        answers.append(dict(path=str(path), truth=0, label=label, scores=[[label, probability]]))
    monkeypatch.setattr(mistakes, 'TILES', 2)
    monkeypatch.setattr(mistakes, 'sheet', lambda rows, side: drawn.extend(rows) or sheet(rows, side))
    (picture,) = mistakes.draw_mistakes(answers, classes, tmp_path / 'mistakes.png')
    assert '2' in picture.caption and '3 ' in picture.caption and '4 ' in picture.caption
    ((first, second),) = drawn
    assert [round(255 * float(image[0].mean())) for _, image in (first, second)] == [120, 180]
    file, truth, predicted = first[0].splitlines()
    assert file == '2.png' and truth.endswith(classes[0]) and predicted.endswith('0.90')
    assert len(predicted) * CHARACTER > 240 - 2 * CHARACTER  # so it may lose its middle
    assert Image.open(tmp_path / picture.file).width > 480
    assert mistakes.draw_mistakes(answers[1:2], classes, tmp_path / 'none.png') == []


def test_confused_classes_are_the_pairs_with_the_highest_share_of_a_class():
    """Shares are of the class's own pixels. Right answers, and pairs that never occur, are left out."""
    counts = torch.diag(torch.full((4,), 80.0))  # sky is rare, sea is never taken for something else
    counts[0, 1], counts[1, 0], counts[1, 2] = 20, 120, 200
    said = mistakes.confused(counts, ('sky', 'road', 'tree', 'sea'))
    assert said == 'Confused: 50 % of road as tree; 30 % of road as sky; 20 % of sky as road.'
    assert mistakes.confused(torch.eye(2), ('sky', 'road')) == ''
    said = mistakes.confused(torch.tensor([[0.0, 1], [1, 3]]), ('a\nb', 'car'), of_images=True)
    assert said == r'Confused: 1 of 1 "a\nb" as car; 1 of 4 car as "a\nb".'


def test_long_names_that_differ_in_the_middle_are_told_apart(tmp_path, monkeypatch):
    drawn, figure = [], mistakes.Figure
    monkeypatch.setattr(mistakes, 'Figure', lambda **options: drawn.append(figure(**options)) or drawn[-1])
    names = [f'a long name in which only {word} differs in the middle' for word in ('this', 'that')]
    mistakes.draw_confusion(torch.ones(3, 3), [*names, 'short'], tmp_path / 'a.png')
    shown = [label.get_text() for label in drawn[0].axes[0].get_yticklabels()]
    assert len({*shown}) == 3 and shown[2] == 'short' and max(map(len, shown)) < 30


def test_up_to_thirty_classes_are_drawn_and_pairs_of_more_are_listed(tmp_path):
    counts = torch.ones(31, 31)
    names = [f'${number}_' for number in range(31)]  # which would be formulas
    picture = mistakes.draw_confusion(counts[:30, :30], names[:30], tmp_path / 'a.png')
    assert min(Image.open(tmp_path / picture.file).size) > 1000
    assert mistakes.draw_confusion(counts, names, tmp_path / 'b.png') == '' and not (tmp_path / 'b.png').exists()
    assert mistakes.confused(counts, names).count(' as ') > mistakes.confused(counts[:30, :30], names[:30]).count(
        ' as '
    )
