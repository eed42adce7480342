"""The confusion matrix: counted right, drawn, and silent where there are no classes."""
from types import SimpleNamespace

import numpy as np
import torch
from mmpretrain.structures import DataSample
from PIL import Image

from beit_mm.visualization.confusion import ConfusionHook, class_rows, draw_confusion


def test_rows_by_class():
    rows = class_rows(np.array([[3, 1, 0], [0, 0, 0], [0, 4, 4]]), ['a', 'b', 'c'])
    assert rows[0] == {'class': 'a', 'images': 4, 'accuracy': 75.0, 'most_taken_for': 'b', 'times': 1}
    assert rows[1]['accuracy'] is None and rows[1]['most_taken_for'] == ''
    assert rows[2]['accuracy'] == 50.0


def test_the_picture_shows_shares_of_rows(tmp_path):
    draw_confusion(np.array([[90, 10], [0, 1]]), ['many', 'one'], tmp_path / 'few.png')
    draw_confusion(np.eye(400, dtype=int), [str(i) for i in range(400)], tmp_path / 'many.png')
    for name in ('few', 'many'):
        with Image.open(tmp_path / f'{name}.png') as picture:
            assert min(picture.size) > 300


def test_images_that_fill_the_last_batch_count_once(tmp_path):
    runner = SimpleNamespace(work_dir=tmp_path, test_dataloader=SimpleNamespace(
        dataset=SimpleNamespace(metainfo=dict(classes=('a', 'b')))))
    hook = ConfusionHook()
    for index, label, score in ((0, 0, [0.9, 0.1]), (1, 1, [0.8, 0.2]), (0, 0, [0.9, 0.1])):
        sample = DataSample(metainfo=dict(sample_idx=index)).set_gt_label(label).set_pred_score(torch.tensor(score))
        hook.after_test_iter(runner, 0, {}, [sample])
    hook.after_test_epoch(runner)
    assert (tmp_path / 'per_class_accuracy.csv').read_text().splitlines() == [
        'class,images,accuracy,most_taken_for,times', 'a,1,100.0,,0', 'b,1,0.0,a,1']


def test_a_pretraining_is_let_pass(tmp_path):
    runner = SimpleNamespace(work_dir=tmp_path, test_dataloader=SimpleNamespace(dataset=SimpleNamespace(metainfo={})))
    hook = ConfusionHook()
    hook.after_test_iter(runner, 0, {}, [dict(loss=1.0)])
    hook.after_test_epoch(runner)
    assert not list(tmp_path.iterdir())
