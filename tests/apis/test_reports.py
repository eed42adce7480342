"""The report of a run: its verdict, the figures beside it, and the same text as Markdown and HTML."""

import html
import re
import shlex
from pathlib import Path

import pytest
import torch
from labelled import make_images, save_backbone
from mmpretrain.evaluation import Accuracy

from beit_mm import __main__ as command
from beit_mm.apis import reports
from beit_mm.apis.split import find_images
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.features.evaluation import mean_and_error


def test_colours_are_told_apart_without_training(tmp_path):
    """Three classes that differ by colour; a file that cannot be read counts for nobody."""
    make_images(tmp_path, per_class=40)
    (tmp_path / 'val/red/0.png').write_bytes(b'nothing')
    images = find_images(tmp_path)
    found = reports.compare_classifier(images, 60)
    assert found == dict(thumbnails=100, most_frequent=pytest.approx(100 * 40 / 119), compared=119, compared_with=120)
    numbers, figure = reports.compare_features(Checkpoint.open(save_backbone(tmp_path / 'x.pth')), images, 60)
    assert numbers['knn_accuracy_thumbnails'] == 100 and 30 <= numbers['knn_images'] <= 60
    assert len(figure.axes) == 6 * (1 + 5) and figure.axes[0].get_title('left') == 'blue'
    assert mean_and_error(torch.tensor([1, 0, 1, 1])) == (75, pytest.approx(100 * (0.75 * 0.25 / 4) ** 0.5))


def test_a_classifier_without_mistakes_has_a_verdict():
    """45 right of 45, as mmpretrain's Accuracy counts in float32."""
    (percent,) = Accuracy.calculate(torch.eye(45), torch.arange(45))[0]
    numbers = {
        'accuracy/top1': float(percent),
        'held_out': 45,
        'thumbnails': 50.0,
        'most_frequent': 10.0,
        'compared': 45,
    }
    assert numbers['accuracy/top1'] > 100 and 'better than' in reports.verdict_of_finetuning(numbers)


@pytest.mark.parametrize(
    'loss, expected',
    [(5.88, 'nothing learned yet'), (5.5, 'no more is shown than where things'), (5.3, 'from what surrounds them')],
)
def test_the_verdict_of_a_pretraining(loss, expected):
    numbers = dict(mim_loss=loss, token_entropy=5.9, position_entropy=5.49)
    said = reports.verdict_of_pretraining(numbers)
    assert expected in said and 'features' not in said and 'began with' not in said
    numbers |= dict(knn_images=1000, knn_accuracy=12.1, knn_accuracy_random=6.7, knn_accuracy_thumbnails=15.0)
    numbers |= dict(knn_error_random=1.0, knn_error_thumbnails=1.3, knn_accuracy_start=12.0, knn_error_start=0.5)
    said = reports.verdict_of_pretraining(numbers)
    assert 'better than random weights, worse than thumbnails, too close to tell from those of its start' in said
    for gain, words in ((0.1, 'better than'), (-0.1, 'worse than'), (-0.028, 'too close to tell from')):
        said = reports.verdict_of_pretraining(numbers | dict(mim_loss_start=loss + gain))
        assert f'; the loss is {words} that of the weights' in said


@pytest.mark.parametrize(
    ('loss', 'accuracy', 'start', 'begins_with'),  # before 5.3 nats and 60 % with a standard error of 1
    [
        (5.2, None, 'a start', 'run'),
        (5.4, None, 'a start', 'a start'),
        (5.33, None, 'a start', 'a start'),  # too close
        (5.4, 65.0, 'a start', 'run'),
        (5.2, 55.0, 'a start', 'a start'),
        (5.2, 61.0, 'a start', 'run'),
        (5.4, 65.0, None, 'run'),
        (5.4, 55.0, None, 'demo'),
        (5.89, 61.0, None, 'demo'),
        (5.4, None, None, 'run'),
    ],
)
def test_what_comes_next_begins_with_the_better_weights(tmp_path, loss, accuracy, start, begins_with):
    numbers = dict(mim_loss=loss, token_entropy=5.9, position_entropy=5.8)
    numbers |= dict(mim_loss_start=5.3) if start else {}
    if accuracy:
        name = 'start' if start else 'random'
        numbers |= {'knn_images': 99, 'knn_accuracy': accuracy, f'knn_accuracy_{name}': 60.0, f'knn_error_{name}': 1.0}
    images = find_images(make_images(tmp_path / 'my data', per_class=40))
    said = reports.next_after_pretraining(numbers, Path('run'), images, start)
    words = shlex.split(said[said.index('beit-mm') :])
    options = command.parser().parse_args(words[1:])
    assert (options.init, Path(options.images)) == (begins_with, images.train.root)
    assert ('skip this pretraining' in said) == (begins_with != 'run')


def test_the_verdict_of_a_fine_tuning():
    # of 100 images: standard errors of 60 and 50 % are 4.9 and 5.0, together 7.0
    numbers = {'accuracy/top1': 60.0, 'held_out': 100, 'thumbnails': 50.0, 'most_frequent': 20.0, 'compared': 100}
    said = reports.verdict_of_finetuning(numbers)
    assert said.endswith('better than the most frequent class, too close to tell from thumbnails.')
    assert ('classified right, %', '60.0 +- 4.9') in reports.rows_of(numbers)


def test_a_report_shows_any_name_as_it_is(tmp_path):
    name = '<script>alert(1)</script> `a` [b](c) | \udcff\n# x'
    paragraphs = [name, '', [('head', name), ('1', '2')], reports.Picture('loss.png', 'Curves')]
    path = reports.write_report(tmp_path, f'of {name}', paragraphs)
    page = (tmp_path / 'report.html').read_text()
    shown = '<script>alert(1)</script> `a` [b](c) | \\xff\\n# x'
    assert html.unescape(re.sub('<.*?>', '', page)).count(shown) == 4  # title, heading, paragraph and table
    assert '<script' not in page and '<img src="loss.png" alt="Curves">' in page
    lines = path.read_text().split('\n\n')
    assert '<' not in path.read_text() and '![Curves](loss.png)' in lines[3] and len(lines) == 4
    table = lines[2].splitlines()
    assert len(table) == 3 and all(line.replace('\\|', '').count('|') == 3 for line in table)
