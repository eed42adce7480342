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
from beit_mm.own_images.images import Images, find_images
from beit_mm.own_images.report import Metric, Metrics
from beit_mm.pictures import MARGIN, SIDE, TITLE_HEIGHT

IMAGES = SimpleNamespace(train=SimpleNamespace(root=Path('my data')), classes=['a class'])


def gains(thumbnails: tuple[float, float], most_frequent: tuple[float, float], error: float) -> dict[str, Metrics]:
    """Gains of a classifier over two baselines, over all images and averaged over the classes, in %."""
    names = classification.BASELINES
    pairs = {names['thumbnails']: thumbnails, names['most_frequent']: most_frequent}
    parts = enumerate(('images', 'classes'))
    return {part: {of: Metric(values[index], error) for of, values in pairs.items()} for index, part in parts}


def answers_on(images: Images, wrong: int) -> list[dict]:
    """What a classifier answers on held-out images, the first ones `wrong`."""
    named = [(str(images.held_out.root / path), images.classes.index(of)) for path, of in images.held_out.names.items()]
    return [dict(path=path, truth=of, label=(of + (row < wrong)) % 3) for row, (path, of) in enumerate(named)]


def test_colours_are_told_apart_without_training(tmp_path):
    """Three classes that differ by colour; a file that cannot be read counts for nobody."""
    make_images(tmp_path, per_class=40)
    (tmp_path / 'val/red/0.png').write_bytes(b'nothing')
    images = find_images(tmp_path)
    answers = [answer for answer in answers_on(images, 20) if 'red/0.png' not in answer['path']]
    found, gained, learned = classification.compare_classifier(images, answers, 60)
    for part in gained.values():
        assert part['thumbnails'].sign == reports.WORSE and part['the most frequent class'].sign == reports.BETTER
    assert gained['images']['thumbnails'].value == pytest.approx(-100 * 20 / 119)
    assert gained['classes']['thumbnails'].value == pytest.approx(-100 * 20 / 40 / 3)  # all of one class
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
    of_pairs = [100 * ((each + 2) / 7 / 4 - (each / 7) ** 2 / 4) ** 0.5 for each in (2, 0)]  # each right once
    assert (
        of_end[1:] == [f'80.0 +- {error:.1f}'] * 2
        and of_start[1].startswith('40.0')
        and of_pixels[2].startswith('80.0')
    )
    assert difference[1:] == [f'+40.0 +- {of_pairs[0]:.1f}', f'+0.0 +- {of_pairs[1]:.1f}']


def of_pairs(only_one: int, only_other: int, number: int, weights: torch.Tensor | None = None) -> str:
    gained = torch.zeros(number, dtype=torch.float64)
    gained[:only_one], gained[only_one : only_one + only_other] = 1, -1
    return Metric.of_pairs(gained, weights).sign


def test_pairs_decide_where_two_errors_overlap():
    """28 and 20 right of the same 37: 75.7 and 54.1 %."""
    assert of_pairs(12, 4, 37) == reports.BETTER and of_pairs(4, 12, 37) == reports.WORSE
    separate = [Metric.share(100 * right / 37, 37) for right in (28, 20)]
    assert separate[0].value - separate[1].value < 2 * (separate[0].error ** 2 + separate[1].error ** 2) ** 0.5
    few = (1, 0, 1), (2, 0, 2), (3, 0, 3), (4, 0, 37), (0, 0, 37), (300, 300, 900)
    assert {of_pairs(*counts) for counts in few} == {reports.TOO_CLOSE}
    assert of_pairs(45, 0, 45) == reports.BETTER
    # two images are one of two classes, the classifier is right on both: 50 % of the mean, by two images
    weights = torch.tensor([1 / 4] * 2 + [1 / 2000] * 1000, dtype=torch.float64)
    assert of_pairs(2, 0, 1002, weights) == reports.TOO_CLOSE
    many = torch.tensor([1 / 80] * 40 + [1 / 2000] * 1000, dtype=torch.float64)
    assert of_pairs(20, 0, 1040, many) == reports.BETTER


@pytest.mark.parametrize('classes', [1, 12])
def test_two_hundred_pairs_without_a_difference(classes):
    """A classifier and a baseline that are right on 60 % of 37 images, independently of each other."""
    generator, signs = torch.Generator().manual_seed(1), []
    for _ in range(200):
        right = (torch.rand(2, 37, generator=generator) < 0.6).double()
        of = torch.randint(classes, (37,), generator=generator)
        number = of.bincount()
        signs.append(Metric.of_pairs(right[0] - right[1], 1 / (number[of] * (number > 0).sum()).double()).sign)
    assert signs.count(reports.TOO_CLOSE) >= 184


def test_a_classifier_without_mistakes_has_a_verdict(tmp_path):
    """45 right of 45, as mmpretrain's Accuracy counts in float32."""
    (percent,) = Accuracy.calculate(torch.eye(45), torch.arange(45))[0]
    assert percent > 100 and Metric.share(float(percent), 45).value == 100
    images = find_images(make_images(tmp_path, per_class=40))
    _, gained, _ = classification.compare_classifier(images, answers_on(images, 0), 60)
    verdict, _ = classification.judge(gained, Path('run/finetuned.pth'), False)
    assert 'better than the most frequent' in verdict and 'close to tell from thumbnails' in verdict


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
    ('thumbnails', 'most_frequent', 'beats'),  # gains over all images, and averaged over the classes
    [
        ((0.0, -2.0), (0.0, 0.0), False),  # always the largest of three classes
        ((4.0, 10.0), (4.0, 12.0), True),
        ((4.0, -1.0), (4.0, 1.0), False),  # the largest class alone is better known
        ((-8.0, 25.0), (-8.0, 27.0), False),  # and small classes alone
        ((0.0, 25.0), (0.0, 27.0), True),
    ],
)
def test_a_classifier_that_answers_the_largest_class_is_not_good(thumbnails, most_frequent, beats):
    run = Path('a run/finetuned.pth')
    for unequal in (True, False):
        verdict, said = classification.judge(gains(thumbnails, most_frequent, 1.0), run, unequal)
        found = [command.parser().parse_args(shlex.split(words)[1:]) for words in re.findall('beit-mm [^;]*', said)]
        assert [each.verb for each in found] == (['classify', 'export'] if beats else ['models'])
        assert not beats or {each.checkpoint for each in found} == {'a run'}
        assert ('--balance' in said) == (unequal and not beats) and ('--init' in said) == (not beats)
    assert ('better than' in verdict.split('averaged over the classes')[-1]) == (most_frequent[1] > 5)


def test_the_worst_classes_are_in_the_table_of_a_classifier(tmp_path, monkeypatch):
    images = find_images(make_images(tmp_path, per_class=40))  # blue, green, red
    counts = torch.tensor([[4, 0, 0], [3, 1, 0], [0, 0, 0]], dtype=torch.float64)
    head, *rows = classification.table_of_classes(counts, images)
    of = dict(green=['40', '4', '25.0', '100.0'], blue=['40', '4', '100.0', '57.1'], red=['40', '0', '-', '-'])
    assert rows == [[name, *cells] for name, cells in of.items()] and len(head) == 5
    monkeypatch.setattr(classification, 'MAX_CLASSES', 1)
    assert [row[0] for row in classification.table_of_classes(counts, images)[1:]] == ['green']


def test_a_report_shows_any_name_as_it_is(tmp_path):
    name = '<script>alert(1)</script> `a` [b](c) | \udcff\n# x'
    link = reports.Link('mistakes.csv', f'lists {name}')
    paragraphs = [name, '', [('head', name), ('1', '2')], reports.Picture('loss.png', 'Curves'), link]
    Image.new('RGB', (30, 20), 'red').save(tmp_path / 'loss.png')
    path = reports.write_report(tmp_path, f'of {name}', paragraphs)
    page = (tmp_path / 'report.html').read_text()
    shown = '<script>alert(1)</script> `a` [b](c) | \\udcff\\n# x'
    assert html.unescape(re.sub('<.*?>', '', page)).count(shown) == 5  # title, heading, paragraph, table, link
    assert '<a href="mistakes.csv">' in page and '[mistakes.csv](mistakes.csv) ' in path.read_text()
    assert '<script' not in page and page.count('<th>') == 2 and page.count('<td>') == 2
    (inside,) = re.findall('<img src="data:image/png;base64,([^"]+)" alt="Curves">', page)
    assert Image.open(io.BytesIO(base64.b64decode(inside))).getcolors() == [(600, (255, 0, 0))]
    lines = path.read_text().split('\n\n')
    assert '<' not in path.read_text() and '![Curves](loss.png)' in lines[3] and len(lines) == 5
    table = lines[2].splitlines()
    assert len(table) == 3 and all(line.replace('\\|', '').count('|') == 3 for line in table)
