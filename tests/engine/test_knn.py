"""k-NN accuracy of frozen features: against a plain loop, and in a pretraining run."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import make_runner
from labelled import loader, make_images

from beit_mm.features.evaluation import knn_predict


def plain_loop(features, known, labels, num_classes, k, temperature):
    """The same vote, one image and one neighbour at a time."""
    for x in features.tolist():
        lengths = [math.hypot(*x) * math.hypot(*y) for y in known.tolist()]
        cosines = [np.dot(x, y) / length for y, length in zip(known.tolist(), lengths, strict=True)]
        votes = [0.0] * num_classes
        for cosine, label in sorted(zip(cosines, labels.tolist(), strict=True), reverse=True)[:k]:
            votes[label] += math.exp(cosine / temperature)
        yield votes.index(max(votes))


def test_votes_as_a_plain_loop_does():
    known, features = torch.randn(60, 8), torch.randn(40, 8)
    labels = torch.randint(0, 5, (60,))
    for k, temperature in ((1, 0.07), (7, 0.07), (20, 1.0), (80, 1.0)):  # of 60
        found = knn_predict(features, known, labels, 5, k, temperature)
        assert found.tolist() == [*plain_loop(features, known, labels, 5, k, temperature)]


def test_the_temperature_is_dinos():
    """Two neighbours at a distance outvote one at the place itself where 2 exp(-(1 - cosine) / 0.07) > 1."""
    limit = 0.07 * math.log(2)
    for distance, winner in ((0.98 * limit, 1), (1.02 * limit, 0)):
        cosine = 1 - distance
        near = [cosine, math.sqrt(1 - cosine**2)]
        bank = torch.tensor([[1.0, 0.0], near, near], dtype=torch.float64)
        found = knn_predict(bank[:1], bank, torch.tensor([0, 1, 1]), 2, k=3)
        assert found.tolist() == [winner]


def test_a_pretraining_logs_it_after_each_validation(pretrain_config, tmp_path):
    images = make_images(tmp_path / 'labelled')
    train = loader(images, 'train')
    train['drop_last'] = True  # 18 images, 4 a batch: two are left out
    hook = dict(type='beit_mm.KNNHook', train_dataloader=train, val_dataloader=loader(images, 'val'), k=3)
    pretrain_config.custom_hooks.append(hook)
    pretrain_config.default_hooks.checkpoint.update(save_best='knn_accuracy')
    runner = make_runner(pretrain_config)
    runner.train()
    rows = [json.loads(line) for line in (Path(runner.log_dir) / 'vis_data/scalars.json').open()]
    found = [row['knn_accuracy'] for row in rows if 'knn_accuracy' in row]
    assert len(found) == 2 and found[-1] > 60  # colours show in any features; chance is 33
    assert all('mim_loss' in row for row in rows if 'knn_accuracy' in row)
    assert list(Path(pretrain_config.work_dir).glob('best_knn_accuracy*'))


def test_two_sets_of_classes_are_refused_before_the_first_step(pretrain_config, tmp_path):
    images = make_images(tmp_path / 'labelled', per_class=1)
    loaders = dict(train_dataloader=loader(images, 'train'))
    loaders['val_dataloader'] = loader(images, 'val', classes=['red', 'blue'])
    pretrain_config.custom_hooks.append(dict(type='beit_mm.KNNHook', **loaders))
    with pytest.raises(ValueError, match='have 3 classes, the validation images 2'):
        make_runner(pretrain_config).train()
