"""The report of a run: its verdict, the figures beside it, and the same text as Markdown and HTML."""

import base64
import html
import io
import re
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from labelled import make_images, save_backbone
from mmpretrain.evaluation import Accuracy
from peers import randomise
from PIL import Image
from timm.models.vision_transformer import VisionTransformer

from beit_mm import __main__ as command
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.features.evaluation import mean_and_error
from beit_mm.models.vit import BEiTBackbone
from beit_mm.own_images import classification, pretraining
from beit_mm.own_images import report as reports
from beit_mm.own_images.images import find_images
from beit_mm.own_images.report import Metric, Metrics
from beit_mm.pictures import CHARACTER, MARGIN, SIDE, TITLE_HEIGHT, sheet

IMAGES = SimpleNamespace(train=SimpleNamespace(root=Path('my data')), classes=['a class'])


def metrics_of(
    top1: float, class_mean: float, number: int = 100, error: float = 5.0, **others: tuple[float, float]
) -> Metrics:
    """Of a classifier and of what needs no network: right over all images, and averaged over the classes, in %."""
    metrics = {'accuracy/top1': Metric.share(top1, number), 'class_mean': Metric(class_mean, error)}
    for name, (right, mean) in others.items():
        metrics |= {name: Metric.share(right, number), f'{name}_class_mean': Metric(mean, 0.0)}
    return metrics


def judged(metrics: Metrics) -> str:
    verdict, _ = classification.judge(metrics, Path('run/finetuned.pth'), False)
    return verdict


def test_colours_are_told_apart_without_training(tmp_path):
    """Three classes that differ by colour; a file that cannot be read counts for nobody."""
    make_images(tmp_path, per_class=40)
    (tmp_path / 'val/red/0.png').write_bytes(b'nothing')
    images = find_images(tmp_path)
    found, learned = classification.compare_classifier(images, 60)
    thumbnails = found['thumbnails']
    assert thumbnails.value == found['thumbnails_class_mean'].value == 100
    assert (thumbnails.number, learned) == (119, 120)
    assert 0 < thumbnails.error < 100 / 119  # less than one image in all, but not certain
    assert found['most_frequent'].value == pytest.approx(100 * 40 / 119)
    assert found['most_frequent_class_mean'] == Metric(pytest.approx(100 / 3), 0)
    trained = Checkpoint.open(save_backbone(tmp_path / 'x.pth'))
    answers, neighbours = pretraining.compare_features(trained, images, 60, trained.path)
    assert [*answers] == ['knn', 'linear']
    for right in answers.values():
        assert right.pop('thumbnails').all()
        assert [*right] == ['end', 'start', 'random'] and {len(each) for each in right.values()} == {30}
        assert torch.equal(right['end'], right['start'])
    assert answers['linear']['end'].all()
    width = MARGIN + 6 * (SIDE + MARGIN)  # six images, each beside five others
    assert neighbours.size == (width, width + 6 * TITLE_HEIGHT)
    assert mean_and_error(torch.tensor([1, 0, 1, 1])) == (75, pytest.approx(100 * (0.75 * 0.25 / 4) ** 0.5))


def test_neighbours_have_the_names_of_their_classes_in_any_folder(tmp_path, monkeypatch):
    """A link to an image elsewhere, as among pseudo labels, and one in a folder of its class."""
    folder, drawn = make_images(tmp_path / 'data', per_class=34), []
    (folder / 'train/red/deep').mkdir()
    shutil.move(folder / 'train/red/0.png', folder / 'train/red/deep/0.png')
    shutil.move(folder / 'train/red/1.png', tmp_path)
    (folder / 'train/red/1.png').symlink_to(tmp_path / '1.png')
    monkeypatch.setattr(pretraining, 'draw_neighbours', lambda queries, bank, names: drawn.append(names))
    monkeypatch.setattr(pretraining, 'METHODS', {})
    pretraining.compare_features(Checkpoint.open(save_backbone(tmp_path / 'x.pth')), find_images(folder), 102)
    assert {Path(path).relative_to(folder).parts[1] == name for path, name in drawn[0].items()} == {True}
    assert len(drawn[0]) == 102 + 51


def test_did_it_help_has_the_errors_of_pairs():
    end, start = torch.tensor([1, 1, 1, 0, 1.0]), torch.tensor([1, 0, 1, 0, 0.0])
    answers = dict(knn=dict(end=end, start=start, thumbnails=start), linear=dict(end=end, start=end, thumbnails=end))
    _, of_end, of_start, of_pixels, difference = pretraining.did_it_help(answers)
    error = 100 * (5 / 7 * 2 / 7 / 5) ** 0.5  # as if two more images had been asked, one right
    assert (
        of_end[1:] == [f'80.0 +- {error:.1f}'] * 2
        and of_start[1].startswith('40.0')
        and of_pixels[2].startswith('80.0')
    )
    assert difference[1:] == [f'+40.0 +- {100 * (0.4 * 0.6 / 5) ** 0.5:.1f}', '+0.0 +- 0.0']


def test_a_difference_is_as_uncertain_as_both_measurements_together():
    assert Metric(50, 3.0) - Metric(46, 4.0) == Metric(4, 5.0)
    assert (Metric(50) - Metric(46, 4.0)).error == (Metric(50, 4.0) - Metric(46)).error == 4.0


def test_a_classifier_without_mistakes_has_a_verdict():
    """45 right of 45, as mmpretrain's Accuracy counts in float32."""
    (percent,) = Accuracy.calculate(torch.eye(45), torch.arange(45))[0]
    metrics = metrics_of(float(percent), 100, thumbnails=(50.0, 50), most_frequent=(10.0, 10), number=45)
    assert percent > 100 and metrics['accuracy/top1'].value == 100 and 'better than' in judged(metrics)
    alike = metrics | dict(thumbnails=Metric.share(100, 45), thumbnails_class_mean=Metric(100, 1.0))
    assert 'better than thumbnails' not in judged(alike)


@pytest.mark.parametrize(
    'loss, expected',
    [(5.88, 'nothing learned yet'), (5.5, 'no more than where things'), (5.3, 'from what surrounds them')],
)
def test_the_verdict_of_a_pretraining(loss, expected):
    metrics = dict(mim_loss=Metric(loss), token_entropy=Metric(5.9), position_entropy=Metric(5.49))

    def verdict(metrics: Metrics, gains: Metrics) -> str:
        return pretraining.judge(metrics, gains, Path('run'), IMAGES, None)[0]

    said = verdict(metrics, {})
    assert expected in said and 'features' not in said and 'initial' not in said
    gains = dict(random=Metric(5.4, 1.0), thumbnails=Metric(-2.9, 1.3), start=Metric(0.1, 0.5))
    said = verdict(metrics, gains)
    assert 'better than random weights, worse than thumbnails, too close to tell from the initial weights' in said
    for gain, words in ((0.1, 'better than'), (-0.1, 'worse than'), (-0.028, 'too close to tell from')):
        said = verdict(metrics | dict(mim_loss_start=Metric(loss + gain)), gains)
        assert f'; the loss is {words} that of the initial weights' in said


@pytest.mark.parametrize(
    ('explained', 'at_position', 'expected', 'begins_with'),
    [
        (0.01, -0.2, 'nothing learned yet', 'demo'),
        (0.4, -0.1, 'no more than where things', 'run'),
        (0.4, 0.1, 'from what surrounds them', 'run'),
    ],
)
def test_the_verdict_of_a_pretraining_on_features(explained, at_position, expected, begins_with):
    metrics = dict(mim_loss=Metric(0.1), explained=Metric(explained), explained_at_position=Metric(at_position))
    said, following = pretraining.judge(metrics, {}, Path('run'), IMAGES, None)
    assert expected in said and f'--init {begins_with} ' in following
    # how well features are predicted does not tell whether the initial weights were worse
    _, following = pretraining.judge(metrics, {}, Path('run'), IMAGES, 'a start')
    assert "--init 'a start'" in following and '--init run' in following
    _, following = pretraining.judge(metrics, dict(start=Metric(9, 1)), Path('run'), IMAGES, 'a start')
    assert '--init run ' in following


@pytest.mark.parametrize(
    ('loss', 'accuracy', 'start', 'begins_with'),  # before 5.3 nats and 60 % with a standard error of 1
    [
        (5.2, None, 'a start', 'run'),
        (5.4, None, 'a start', 'a start'),
        (5.4, 65.0, 'a start', 'run'),
        (5.2, 55.0, 'a start', 'a start'),
        (5.2, 61.0, 'a start', 'run'),
        (5.4, 65.0, None, 'run'),
        (5.4, 55.0, None, 'demo'),
        (5.89, 61.0, None, 'demo'),
        (5.4, None, None, 'run'),
    ],
)
def test_what_comes_next_begins_with_the_better_weights(loss, accuracy, start, begins_with):
    metrics = dict(mim_loss=Metric(loss), token_entropy=Metric(5.9), position_entropy=Metric(5.8))
    metrics |= dict(mim_loss_start=Metric(5.3)) if start else {}
    gains = {'start' if start else 'random': Metric(accuracy - 60.0, 1.0)} if accuracy else {}
    _, said = pretraining.judge(metrics, gains, Path('run'), IMAGES, start)
    words = shlex.split(said[said.index('beit-mm') :])
    options = command.parser().parse_args(words[1:])
    assert (options.init, Path(options.images)) == (begins_with, IMAGES.train.root)
    assert ('skip this pretraining' in said) == (begins_with != 'run')


def test_the_weights_of_a_better_start_take_the_place_of_those_of_the_end(tmp_path, warnings):
    peer = randomise(VisionTransformer(img_size=32, patch_size=8, embed_dim=64, depth=1, num_heads=1, num_classes=0))
    torch.save(peer.state_dict(), tmp_path / 'start.pth')
    (tmp_path / 'pretrained.pth').write_bytes(b'of the end')
    said = pretraining.keep_start(tmp_path / 'pretrained.pth', str(tmp_path / 'start.pth'))
    assert all(name in said for name in ('pretrained.pth', 'start.pth', 'pretrain/')) and warnings()
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        found = BEiTBackbone.from_checkpoint(tmp_path / 'pretrained.pth')(images)[0]
        torch.testing.assert_close(found, peer.forward_features(images), atol=1e-5, rtol=1e-5)


def of_counts(*rows: list[int]) -> tuple[float, float]:
    metric = classification.class_mean(torch.tensor(rows, dtype=torch.float64))
    return metric.value, metric.error


def test_the_mean_of_the_classes_and_its_error():
    assert of_counts([15, 0, 0], [1, 0, 0], [1, 0, 0])[0] == pytest.approx(100 / 3)
    assert of_counts([15, 5, 0], [2, 2, 0], [0, 0, 0])[0] == pytest.approx((75 + 50) / 2)  # nothing of the third
    # of many images the usual one: variances of shares of 80 and 50 % in 1000 and 500 images
    mean, error = of_counts([800, 200], [250, 250])
    assert mean == 65 and error == pytest.approx(100 * (0.8 * 0.2 / 1000 + 0.25 / 500) ** 0.5 / 2, rel=0.01)
    assert 10 < of_counts([1, 0], [0, 1])[1] < 50  # two images that are right do not prove that all are


@pytest.mark.parametrize(
    ('top1', 'class_mean', 'number', 'beats'),
    [
        (88.2, 33.3, 17, False),  # always the largest of three classes
        (88.2, 33.3, 10_000, False),
        (92.0, 45.0, 10_000, True),
        (92.0, 34.0, 10_000, False),  # the largest class alone is better known
        (80.0, 60.0, 10_000, False),  # and small classes alone
        (88.2, 60.0, 10_000, True),
    ],
)
def test_a_classifier_that_answers_the_largest_class_is_not_good(top1, class_mean, number, beats):
    trivial = dict(thumbnails=(88.2, 35), most_frequent=(88.2, 33.3), number=number, error=3.0)
    metrics, run = metrics_of(top1, class_mean, **trivial), Path('a run/finetuned.pth')
    for unequal in (True, False):
        verdict, said = classification.judge(metrics, run, unequal)
        found = [command.parser().parse_args(shlex.split(words)[1:]) for words in re.findall('beit-mm [^;]*', said)]
        assert [each.verb for each in found] == (['classify', 'export'] if beats else ['models'])
        assert not beats or {each.checkpoint for each in found} == {'a run'}
        assert ('--balance' in said) == (unequal and not beats) and ('--init' in said) == (not beats)
    assert ('better than' in verdict.split('averaged over the classes')[-1]) == (class_mean > 40)


def test_the_worst_classes_are_in_the_table_of_a_classifier(tmp_path, monkeypatch):
    images = find_images(make_images(tmp_path, per_class=40))  # blue, green, red
    counts = torch.tensor([[4, 0, 0], [3, 1, 0], [0, 0, 0]], dtype=torch.float64)
    head, *rows = classification.table_of_classes(counts, images)
    of = dict(green=['40', '4', '25.0', '100.0'], blue=['40', '4', '100.0', '57.1'], red=['40', '0', '-', '-'])
    assert rows == [[name, *cells] for name, cells in of.items()] and len(head) == 5
    monkeypatch.setattr(classification, 'MAX_CLASSES', 1)
    assert [row[0] for row in classification.table_of_classes(counts, images)[1:]] == ['green']


def test_the_surest_mistakes_are_drawn_first(tmp_path, monkeypatch):
    classes, answers, drawn = ['right', 'a wrong class of a long name'], [], []
    for index, (label, probability) in enumerate([(1, 0.6), (0, 0.99), (1, 0.9), (1, 0.7)]):
        Image.new('RGB', (40, 30), (index * 60, 0, 0)).save(path := tmp_path / f'{index}.png')
        answers.append(dict(path=str(path), truth=0, label=label, scores=[[label, probability]]))
    monkeypatch.setattr(classification, 'MISTAKES', 2)
    monkeypatch.setattr(classification, 'sheet', lambda rows, side: drawn.extend(rows) or sheet(rows, side))
    (picture,) = classification.draw_mistakes(answers, classes, tmp_path / 'mistakes.png')
    assert '2' in picture.caption and '3 ' in picture.caption and '4 ' in picture.caption
    ((first, second),) = drawn
    assert [round(255 * float(image[0].mean())) for _, image in (first, second)] == [120, 180]
    assert first[0].startswith('right') and first[0].endswith('0.90') and len(first[0]) * CHARACTER <= 240
    assert Image.open(tmp_path / picture.file).width > 480
    assert classification.draw_mistakes(answers[1:2], classes, tmp_path / 'none.png') == []


def test_a_report_shows_any_name_as_it_is(tmp_path):
    name = '<script>alert(1)</script> `a` [b](c) | \udcff\n# x'
    paragraphs = [name, '', [('head', name), ('1', '2')], reports.Picture('loss.png', 'Curves')]
    Image.new('RGB', (30, 20), 'red').save(tmp_path / 'loss.png')
    path = reports.write_report(tmp_path, f'of {name}', paragraphs)
    page = (tmp_path / 'report.html').read_text()
    shown = '<script>alert(1)</script> `a` [b](c) | \\udcff\\n# x'
    assert html.unescape(re.sub('<.*?>', '', page)).count(shown) == 4  # title, heading, paragraph and table
    assert '<script' not in page and page.count('<th>') == 2 and page.count('<td>') == 2
    (inside,) = re.findall('<img src="data:image/png;base64,([^"]+)" alt="Curves">', page)
    assert Image.open(io.BytesIO(base64.b64decode(inside))).getcolors() == [(600, (255, 0, 0))]
    lines = path.read_text().split('\n\n')
    assert '<' not in path.read_text() and '![Curves](loss.png)' in lines[3] and len(lines) == 4
    table = lines[2].splitlines()
    assert len(table) == 3 and all(line.replace('\\|', '').count('|') == 3 for line in table)
