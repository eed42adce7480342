"""What a config trains on and how: samples, masks and schedules, against the pixels, the law and the formulas."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import narrow_dino_pretraining
from helpers import ROOT, run_tool
from label_maps import make_label_maps
from mmengine.config import Config
from mmengine.registry import init_default_scope
from PIL import Image

from beit_mm.datasets.samplers import SampleKey
from beit_mm.datasets.segmentation_folder import distinct_colours
from beit_mm.models.tokenizers.base import Tokenizer
from beit_mm.visualization.pictures import MARGIN, SIDE, TITLE_HEIGHT
from beit_mm.visualization.training import (
    draw_masks,
    draw_schedules,
    draw_training_samples,
    run_schedules,
    token_column,
    training_dataset,
)


@pytest.fixture
def cfg(pretrain_config):
    init_default_scope(pretrain_config.default_scope)
    return pretrain_config


def tile(picture: Image.Image, row: int, column: int) -> np.ndarray:
    left, top = MARGIN + column * (SIDE + MARGIN), TITLE_HEIGHT + MARGIN + row * (SIDE + MARGIN)
    return np.asarray(picture.crop((left, top, left + SIDE, top + SIDE)))


def test_samples_are_those_of_the_run_with_their_masks_gray(cfg):
    picture = draw_training_samples(cfg, number=3, seed=5)
    dataset = training_dataset(cfg)
    for row, index in enumerate((0, 4, 8)):
        inputs = dataset[SampleKey(5, 0, index)]['inputs']
        scale = SIDE // 32
        image = inputs['images'].numpy().repeat(scale, 0).repeat(scale, 1)
        mask = inputs['mask'].numpy().repeat(SIDE // 4, 0).repeat(SIDE // 4, 1)
        assert np.abs(tile(picture, row, 0).astype(int) - image).max() <= 1
        masked = tile(picture, row, 1)
        assert (np.abs(masked[mask].astype(int) - 127) <= 1).all() and mask.any()
        assert np.array_equal(masked[~mask], tile(picture, row, 0)[~mask])
    width = picture.size[0]
    without = draw_training_samples(cfg, number=3, seed=5, tokens=False)
    assert width - without.size[0] == SIDE + MARGIN  # the tokens' column
    assert np.array_equal(tile(without, 1, 0), tile(picture, 1, 0))


def test_tokens_are_decoded_or_have_a_colour_each():
    class Thresholds(Tokenizer):
        vocab_size, stride, can_decode = 3, 8, False

        def encode(self, images):
            return (images.mean(dim=1)[:, ::8, ::8] * 3).long().clamp(max=2)

    images = torch.tensor([0.1, 0.5, 0.9]).view(3, 1, 1, 1).expand(3, 3, 16, 16)
    (colours,) = token_column(Thresholds(), images).values()
    assert colours.shape == (3, 3, 2, 2)
    assert len({tuple(colour) for colour in colours.permute(0, 2, 3, 1).flatten(0, 2).tolist()}) == 3
    tokenizer = Thresholds()
    tokenizer.can_decode, tokenizer.decode = True, lambda tokens: tokens[:, None].float() / 2
    assert token_column(tokenizer, images)['tokens, decoded'].flatten(1)[:, 0].tolist() == [0, 0.5, 1]


def test_dinos_crops_are_drawn_too(images, tmp_path):
    cfg = narrow_dino_pretraining(images, tmp_path)
    init_default_scope(cfg.default_scope)
    picture = draw_training_samples(cfg, number=1, tokens=False)
    assert picture.size[0] == MARGIN + 6 * (SIDE + MARGIN)  # two views, the mask, a second crop and two local ones


def test_label_maps_are_drawn_beside_their_images(tmp_path):
    root = make_label_maps(tmp_path)
    run_tool(
        'visualization/browse_dataset.py',
        ROOT / 'configs/demo/camvid_setr_pup.py',
        *('--number', 2, '--out', tmp_path / 'out.png', '--cfg-options', f'train_dataloader.dataset.data_root={root}'),
    )
    picture = Image.open(tmp_path / 'out.png')
    assert picture.size == (MARGIN + 2 * (SIDE + MARGIN), TITLE_HEIGHT + MARGIN + 2 * (SIDE + MARGIN))
    image, labels = tile(picture, 0, 0).astype(int), tile(picture, 0, 1)
    seen = 0
    for channel, colour in enumerate(distinct_colours(3)):  # the classes are red, green and blue
        inside = image[(labels == colour).all(axis=2)]
        if len(inside) > 50:
            seen += 1
            assert inside.mean(axis=0).argmax() == channel  # whatever the augmentation
    assert seen > 1


def test_every_patch_is_masked_as_often_at_random(cfg):
    step = dict(type='beit_mm.RandomMask', grid=(4, 4), num_masked=6)
    position = next(i for i, s in enumerate(cfg.train_dataloader.dataset.pipeline) if s['type'].endswith('Mask'))
    cfg.train_dataloader.dataset.pipeline[position] = step
    frequency, counts = draw_masks(cfg, number=4000)
    assert set(counts) == {6}
    assert np.abs(frequency - 6 / 16).max() < 4 * math.sqrt(6 / 16 * 10 / 16 / 4000)  # four standard deviations


def test_the_released_masks_have_their_known_mean():
    cfg = Config.fromfile(ROOT / 'configs/beit/pretrain_800e.py')
    frequency, counts = draw_masks(cfg, number=2000)
    assert counts.mean() == pytest.approx(74.47, abs=0.15) and counts.max() == 75
    assert frequency.sum() == pytest.approx(counts.mean())
    assert frequency[6:8, 6:8].min() > 4 * frequency[0, 0]  # blocks overlap in the middle


def schedule_config(**changes) -> Config:
    cfg = Config.fromfile(ROOT / 'configs/beit/finetune_in1k_100e.py')
    cfg.merge_from_dict(changes)
    cfg.model.backbone.arch = dict(embed_dims=32, num_layers=3, num_heads=4)
    cfg.model.head.in_channels = 32
    cfg.model.train_cfg = None
    init_default_scope(cfg.default_scope)
    return cfg


def test_rates_are_those_of_the_formulas():
    cfg = schedule_config(**{'train_cfg.max_epochs': 5})
    cfg.param_scheduler = [
        dict(type='LinearLR', start_factor=1e-9, begin=0, end=2, convert_to_iter_based=True),
        dict(type='CosineAnnealingLR', eta_min_ratio=1e-3, begin=2, end=5, T_max=3, convert_to_iter_based=True),
    ]
    cfg.optim_wrapper.paramwise_cfg.layer_decay_rate = 0.5
    cfg.optim_wrapper.optimizer.lr = 2e-3
    found = run_schedules(cfg, num_images=20 * 1024 + 5)  # 20 steps an epoch
    assert found.total == 100 and found.steps.tolist() == list(range(100))
    assert list(found.lr) == ['embeddings', 'block 0', 'block 1', 'block 2', 'head, norms']
    for depth, curve in enumerate(found.lr.values()):
        peak = 2e-3 * 0.5 ** (4 - depth)
        for step, rate in enumerate(curve):
            if step < 39:  # arrives one step before the end
                expected = peak * (1e-9 + (1 - 1e-9) * step / 39)
            else:
                low = 1e-3 * peak
                expected = low + (peak - low) * (1 + math.cos(math.pi * max(step - 40, 0) / 60)) / 2
            assert rate == pytest.approx(expected, rel=2e-3, abs=1e-9)
    assert set(found.weight_decay) == {0.05}
    assert not len(found.momentum)


def test_schedules_of_epochs_step_at_their_ends():
    cfg = schedule_config(**{'train_cfg.max_epochs': 4})
    cfg.param_scheduler = [dict(type='MultiStepLR', milestones=[1, 3], gamma=0.1)]
    cfg.optim_wrapper.paramwise_cfg = None
    (curve,) = run_schedules(cfg, num_images=5 * 1024).lr.values()
    lr = cfg.optim_wrapper.optimizer.lr
    np.testing.assert_allclose(curve, [lr] * 5 + [lr / 10] * 10 + [lr / 100] * 5)
    cfg.train_cfg = dict(type='beit_mm.IterLoop', max_iters=20)  # which has no such ends
    (curve,) = run_schedules(cfg, num_images=5 * 1024).lr.values()
    np.testing.assert_allclose(curve, [lr] * 20)


def test_a_run_is_noted_at_some_steps_only_and_ends_at_its_last():
    found = run_schedules(schedule_config(**{'train_cfg.max_epochs': 5}), num_images=2000 * 1024, points=50)
    assert found.total == 10_000 and len(found.steps) == 50
    assert found.steps[0] == 0 and found.steps[-1] == 9999


def test_dinos_schedules_are_those_of_its_paper(images, tmp_path):
    cfg = narrow_dino_pretraining(images, tmp_path)
    init_default_scope(cfg.default_scope)
    cfg.train_cfg.max_epochs = 4
    cfg.param_scheduler = [
        dict(type='CosineAnnealingWeightDecay', by_epoch=False, begin=0, end=12, T_max=12, eta_min=0.4)
    ]
    cfg.optim_wrapper.optimizer.weight_decay = 0.04
    found = run_schedules(cfg)  # 12 images, 4 a step
    assert found.total == 12
    for step in range(12):
        cosine = (1 + math.cos(math.pi * step / 12)) / 2
        assert found.momentum[step] == pytest.approx(1 - 0.1 * cosine)
        assert found.weight_decay[step] == pytest.approx(0.4 + (0.04 - 0.4) * cosine, rel=1e-6)
    assert found.temperature.tolist() == [0.04] * 3 + [0.07] * 9
    assert len(draw_schedules(found).axes) == 4


def test_the_tools_write_pictures_and_mistakes_are_one_line(images, tmp_path, capsys):
    config = ROOT / 'configs/demo/caltech101_dino.py'
    run_tool('visualization/schedule.py', config, '--images', 320, '--out', tmp_path / 'deep/a.png')
    run_tool(
        'visualization/mask_heat_map.py', ROOT / 'configs/demo/pretrain.py', '--number', 50, '--out', tmp_path / 'b.png'
    )
    assert min(Path(tmp_path, name).stat().st_size for name in ('deep/a.png', 'b.png')) > 5000
    assert '400 steps' in capsys.readouterr().out
    no_tokenizer = f'data_root={images.parent}', f'train_dataloader.dataset.data_prefix={images.name}'
    mistakes = [
        ('mask_heat_map', [config], 'the training pipeline has no beit_mm.BlockwiseMask'),
        ('schedule', [config, '--cfg-options', 'data_root=nowhere'], 'or say how many images there are: --images N'),
        ('schedule', [config, '--images', '3'], '3 images are less than the batch of 32'),
        ('browse_dataset', [config, '--cfg-options', 'data_root=nowhere'], "no folder 'nowhere"),
        ('browse_dataset', [ROOT / 'configs/demo/pretrain.py', '--cfg-options', *no_tokenizer], 'iter_2000.pth'),
    ]
    for tool, words, message in mistakes:
        with pytest.raises(SystemExit) as end:
            run_tool(f'visualization/{tool}.py', *words)
        assert str(end.value.code).startswith('error: ') and message in end.value.code, end.value.code
