"""Frozen features: figures against plain loops and other libraries, and the dense k-NN in a pretraining run."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import make_runner, narrow_model, run_ranks
from label_maps import CLASSES, make_label_maps, options
from labelled import TEST_PIPELINE, loader, make_images, save_backbone
from mmengine.registry import DefaultScope
from mmengine.runner import Runner
from scipy.optimize import minimize

from beit_mm.engine.metrics import DenseKNNHook
from beit_mm.features.evaluation import (
    accuracy,
    choose_penalty,
    class_shares,
    confusion,
    evaluate_images,
    evaluate_patches,
    fit_linear,
    knn_predict,
    knn_shares,
    knn_votes,
    pixel_scores,
    sample_patches,
    standardiser,
)
from beit_mm.features.extractor import FeatureExtractor
from beit_mm.registry import MODELS


def test_the_usual_layer_ends_two_thirds():
    for depth, last in ((1, 0), (2, 0), (3, 1), (6, 3), (12, 7), (24, 15)):
        extractor = SimpleNamespace(backbone=SimpleNamespace(num_layers=depth))
        assert FeatureExtractor.layer(extractor, None) == last


@pytest.mark.parametrize(('size', 'grid'), [((12, 8), (3, 2)), ((13, 9), (3, 4)), ((3, 2), (5, 4))])
def test_shares_of_classes_are_those_of_counting_pixels(size, grid):
    labels = torch.randint(0, 5, size).to(torch.uint8)  # 3 and 4 are no classes
    expected = np.zeros((*grid, 3))
    pixels = np.zeros(grid)
    for y in range(size[0]):
        for x in range(size[1]):
            cell = int((y + 0.5) / size[0] * grid[0]), int((x + 0.5) / size[1] * grid[1])
            pixels[cell] += 1
            if labels[y, x] < 3:
                expected[(*cell, labels[y, x])] += 1
    expected /= np.maximum(pixels, 1)[..., None]
    np.testing.assert_allclose(class_shares(labels, grid, 3), expected, atol=1e-6)


def maps() -> list:
    """Random features (4, 6, 8), each with its place in the last two channels, and labels of 3 classes."""
    found = []
    for image in range(5):
        features = torch.randn(4, 6, 8)
        features[..., 6] = image
        features[..., 7] = torch.arange(24.0).view(4, 6)
        labels = torch.randint(0, 3, (16, 24)).to(torch.uint8)
        labels[torch.rand(16, 24) < 0.5] = 255
        found.append((features, labels))
    return found


def test_patches_of_the_bank_have_the_shares_of_their_own_pixels():
    images = maps()
    bank, targets, numbers = sample_patches(iter(images), 3, len(images), 40, seed=1)
    assert len(bank) == 40 and torch.equal(bank[:, 6].long(), numbers)
    assert numbers.bincount().max() <= 8  # 40 of 5 images
    assert len({(int(row[6]), int(row[7])) for row in bank}) == 40  # none twice
    for row, target in zip(bank, targets, strict=True):
        top, left = divmod(int(row[7]), 6)
        pixels = images[int(row[6])][1][4 * top : 4 * top + 4, 4 * left : 4 * left + 4].flatten()
        known = pixels[pixels < 3].long()
        assert len(known) >= 8  # at least half
        torch.testing.assert_close(target, known.bincount(minlength=3) / len(known))
    again, other = (sample_patches(iter(images), 3, len(images), 40, seed=seed)[0] for seed in (1, 2))
    assert torch.equal(bank, again) and not torch.equal(bank, other)


def test_scores_are_the_mean_of_the_neighbours_answers():
    features, bank = np.random.default_rng(0).normal(size=(2, 30, 6)).astype(np.float32)
    targets = np.random.default_rng(1).dirichlet(np.ones(4), size=30).astype(np.float32)
    found = knn_shares(*map(torch.from_numpy, (features, bank, targets)), k=7)
    for row, x in zip(found, features, strict=True):
        cosines = [x @ y / np.sqrt(x @ x) / np.sqrt(y @ y) for y in bank]
        nearest = sorted(range(30), key=lambda i: -cosines[i])[:7]
        np.testing.assert_allclose(row, np.mean([targets[i] for i in nearest], axis=0), atol=1e-6)


@pytest.mark.parametrize('soft', [False, True])
def test_a_linear_layer_is_the_minimum_that_scipy_finds(soft):
    features = torch.randn(40, 3)
    targets = torch.rand(40, 4).softmax(dim=1) if soft else torch.randint(0, 4, (40,))
    shares = targets if soft else F.one_hot(targets, 4).float()

    def objective(flat: np.ndarray) -> float:
        weight, bias = flat[:12].reshape(4, 3), flat[12:]
        logits = features.numpy() @ weight.T + bias
        log_sum = np.log(np.exp(logits).sum(axis=1))
        return float((log_sum - (shares.numpy() * logits).sum(axis=1)).mean() + 0.05 / 2 * (weight**2).sum())

    best = minimize(objective, np.zeros(16), method='BFGS', tol=1e-10)
    layer = fit_linear(features, targets, 4, penalty=0.05)
    np.testing.assert_allclose(layer.weight.numpy().ravel(), best.x[:12], atol=2e-3)


def test_the_penalty_is_the_best_on_images_that_were_held_out():
    labels = torch.randint(0, 2, (60,)).repeat_interleave(4)
    features = torch.randn(60, 50).repeat_interleave(4, 0)  # tell an image apart, but nothing of its class
    images = torch.arange(60).repeat_interleave(4)
    layer, found = choose_penalty(features, labels, 2, images, by_class=False)
    penalty, figures = found['penalty'], found['held_out']
    assert figures[penalty] == max(figures.values()) < 90  # copies of one image on both sides would give 100
    torch.testing.assert_close(layer.weight, fit_linear(features, labels, 2, penalty).weight, atol=1e-3, rtol=1e-3)


def test_standardised_channels_have_mean_0_and_variance_1_and_constants_stay_finite():
    bank = torch.cat([torch.randn(50, 3) * 7 + 2, torch.full((50, 1), 3.0)], dim=1)
    out = standardiser(bank)(bank)
    np.testing.assert_allclose(out.mean(dim=0), 0, atol=1e-5)
    np.testing.assert_allclose(out[:, :3].numpy().std(axis=0), 1, atol=1e-5)
    assert torch.equal(out[:, 3], torch.zeros(50))


def test_shares_count_as_so_many_parts_of_a_patch_and_scores_lie_at_its_centre():
    predicted, shares = torch.tensor([0, 2, 2]), torch.tensor([[0.5, 0.5, 0], [0, 0, 1], [0.25, 0, 0.75]])
    counts = confusion(predicted, shares, 3)
    assert counts.tolist() == [[0.5, 0, 0.25], [0.5, 0, 0], [0, 0, 1.75]]
    assert accuracy(counts) == pytest.approx(2.25 / 3)
    assert pixel_scores(torch.tensor([[[0.0], [1]]]), (1, 4)).tolist() == [[[0, 0.25, 0.75, 1]]]


def test_a_pretraining_logs_both_after_each_validation(pretrain_config, tmp_path):
    root, images = make_label_maps(tmp_path / 'maps'), make_images(tmp_path / 'labelled')
    train, val = options(root, 'training'), options(root, 'validation')
    drop_last = dict(loader(images, 'train'), drop_last=True)  # 18 images, 4 a batch: two are left out
    knn = dict(type='beit_mm.KNNHook', train_dataloader=drop_last, val_dataloader=loader(images, 'val'), k=3)
    pretrain_config.custom_hooks += [knn, dict(type='beit_mm.DenseKNNHook', train=train, val=val, k=3, max_images=3)]
    pretrain_config.default_hooks.checkpoint.update(save_best=['dense_knn_miou', 'knn_accuracy'])
    pretrain_config.default_hooks.ema = dict(type='EMAHook', momentum=0.01)  # checkpoints hold the average
    pretrain_config.optim_wrapper.optimizer.lr = 0.1
    pretrain_config.train_cfg.max_epochs = 1
    runner = make_runner(pretrain_config)
    runner.train()
    rows = [json.loads(line) for line in (Path(runner.log_dir) / 'vis_data/scalars.json').open()]
    (row,) = [row for row in rows if 'mim_loss' in row]
    # colours show in any features; one class everywhere has 17 and 33 at most
    assert row['dense_knn_miou'] > 60 and row['knn_accuracy'] > 60
    assert len(list(Path(pretrain_config.work_dir).glob('best_*knn_*'))) == 2
    # the same figure as from the checkpoint
    extractor = FeatureExtractor(Path(pretrain_config.work_dir, 'epoch_1.pth'), 'cpu', whole=True)
    found = evaluate_patches(extractor, *(dict(folder, max_images=3) for folder in (train, val)), k=3)
    assert found['miou'] == pytest.approx(row['dense_knn_miou'], abs=1e-4) and found['images'] == [3, 3]


def test_classes_that_differ_show_before_the_first_step(tmp_path):
    root = make_label_maps(tmp_path / 'maps')
    train, val = options(root, 'training'), options(root, 'validation')
    hook = DenseKNNHook(train, dict(val, classes=CLASSES[::-1]))
    with pytest.raises(ValueError, match='their names differ; expected the same'):
        hook.before_train(SimpleNamespace(model=MODELS.build(narrow_model())))


def plain_loop(features, known, labels, num_classes, k, temperature=0.07):
    """DINO's vote, one image and one neighbour at a time."""
    for x in features.tolist():
        lengths = [math.hypot(*x) * math.hypot(*y) for y in known.tolist()]
        cosines = [np.dot(x, y) / length for y, length in zip(known.tolist(), lengths, strict=True)]
        votes = [0.0] * num_classes
        for cosine, label in sorted(zip(cosines, labels.tolist(), strict=True), reverse=True)[:k]:
            votes[label] += math.exp(cosine / temperature)
        yield [vote / sum(votes) for vote in votes]


def test_votes_as_a_plain_loop_does():
    known, features = torch.randn(60, 8), torch.randn(40, 8)
    labels = torch.randint(0, 5, (60,))
    for k, *temperature in ((1,), (7,), (60,), (20, 1.0), (80, 1.0)):  # of 60
        expected = torch.tensor([*plain_loop(features, known, labels, 5, k, *temperature)])
        votes = torch.cat([*knn_votes(features, known, labels, 5, k, *temperature)])
        torch.testing.assert_close(votes / votes.sum(dim=1, keepdim=True), expected, atol=1e-5, rtol=1e-4)
        found = knn_predict(features, known, labels, 5, k, *temperature)
        assert found.tolist() == expected.argmax(dim=1).tolist()


def test_folders_that_are_joined_count_whole_however_many_processes_read_them(tmp_path):
    """Also where PackInputs leaves the numbers of the images out, which begin anew in each folder."""
    images = make_images(tmp_path, per_class=5)
    extractor = FeatureExtractor(save_backbone(tmp_path / 'ours.pth'), 'cpu')
    pipeline = [*TEST_PIPELINE[:-1], dict(type='PackInputs', meta_keys=('img_path',))]

    def evaluate(rank: int) -> dict:
        configs = [loader(images, 'val', pipeline=pipeline) for _ in range(2)]
        for config, number in zip(configs, (2, 3), strict=True):
            config['dataset'] = dict(type='ConcatDataset', datasets=[config['dataset']] * number)
        with DefaultScope.overwrite_default_scope('mmpretrain'):
            loaders = [Runner.build_dataloader(config, seed=0) for config in configs]
            return evaluate_images(extractor, *loaders, k=1)

    alone, ranks = evaluate(0), run_ranks(evaluate, tmp_path)
    assert alone['images'] == [30, 45] and alone['top1'] == 100
    assert ranks == [alone, alone]  # 45 images are not equally many for two processes
