"""One process or two, no workers or two: the same samples, masks and tokens in each step, and equal losses."""

import contextlib
import copy
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
from conftest import narrow_dino_pretraining, narrow_feature_pretraining, narrow_pretraining
from helpers import ROOT, run_ranks
from helpers import train as train_run
from labelled import BACKBONE, classifier_config, make_images
from mmengine.config import Config
from mmengine.dist import all_gather
from mmengine.hooks import Hook
from PIL import Image

from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.engine.checkpoints import in_main_process
from beit_mm.engine.steps import unwrap
from beit_mm.errors import UserError
from beit_mm.registry import MODELS

pytestmark = pytest.mark.long


@pytest.fixture
def config(request: pytest.FixtureRequest, images: Path, tmp_path: Path) -> Config:
    """Two epochs of three steps of four images, with masks of equally many patches and no noise of the model's."""
    config = getattr(request, 'param', narrow_pretraining)(images, tmp_path)
    config.val_cfg = config.val_dataloader = config.val_evaluator = None
    for transform in config.train_dataloader.dataset.pipeline:
        if transform.type == 'beit_mm.BlockwiseMask':
            transform.variant = 'exact'
    config.param_scheduler = [dict(type='LinearLR', start_factor=0.1, end=4, by_epoch=False)]
    config.optim_wrapper.update(dtype='float32')
    return config


class Notes(Hook):
    """Notes what all processes together were given in each step, and the mean of their losses."""

    priority = 'LOWEST'

    def before_train(self, runner):
        self.steps = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        model = unwrap(runner)
        views = model.data_preprocessor(copy.deepcopy(data_batch))['inputs']
        shown = dict(data_batch['inputs'])
        if 'tokenizer_images' in shown:
            shown['tokens'] = model.target_generator.encode(views['tokenizer_images'])
        # dealt like cards: the samples of a step are those of all ranks in turn
        tensors = {key: value for key, value in shown.items() if torch.is_tensor(value)}
        step = {key: torch.stack(all_gather(value), 1).flatten(0, 1) for key, value in tensors.items()}
        self.steps.append((step, torch.stack(all_gather(outputs['loss'].detach())).mean()))


def train(config: Config, **changes: object) -> tuple[list, dict[str, torch.Tensor]]:
    """What was shown in each step with its loss, and the weights at the end."""
    notes = Notes()
    runner = train_run(config, notes, **changes)
    return notes.steps, unwrap(runner).state_dict()


def check_equal(one: tuple, two: tuple) -> None:
    assert len(one[0]) == len(two[0]) > 0
    for (shown, loss), (others, other) in zip(one[0], two[0], strict=True):
        assert shown.keys() == others.keys() >= {'images', 'mask'}
        for key, values in shown.items():
            assert torch.equal(values, others[key]), key
        assert loss.item() == pytest.approx(other.item(), abs=1e-6)
    for name, tensor in one[1].items():
        assert torch.allclose(tensor, two[1][name], atol=1e-6), name


TWO_RANKS = {'launcher': 'pytorch', 'train_dataloader.batch_size': 2}


def check_two_processes(config: Config, folder: Path) -> tuple[list, dict[str, torch.Tensor]]:
    """Two processes see and learn what one does, which is returned."""
    ranks = run_ranks(lambda rank: train(config, work_dir=f'{folder}/two', **TWO_RANKS), folder)
    alone = train(config)
    for rank in ranks:
        check_equal(alone, rank)
    return alone


@pytest.mark.parametrize('config', [narrow_dino_pretraining], indirect=True)
def test_two_processes_and_two_workers_see_and_learn_the_same(config, tmp_path):
    alone = check_two_processes(config, tmp_path)
    workers = {'train_dataloader.num_workers': 2, 'train_dataloader.persistent_workers': True}
    check_equal(alone, train(config, **workers))


def test_two_processes_take_the_steps_of_one_on_the_joined_batch(config, tmp_path):
    """With SGD, whose step is as long as the gradient: AdamW's would not show a sum in the place of the mean."""
    config.optim_wrapper.optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
    config.optim_wrapper.update(accumulative_counts=2, clip_grad=dict(max_norm=4.0))  # of norms 5.2, 4.9, 2.1
    config.model.backbone.update(with_cp=True, rel_pos_bias='shared', layer_scale_init=0.1)
    _, weights = check_two_processes(config, tmp_path)
    assert weights['head.lm_head.bias'].abs().max() > 1e-2  # it was 0; the tolerance is 1e-6


@pytest.mark.parametrize('config', [narrow_feature_pretraining], indirect=True)
def test_two_processes_have_the_moving_average_of_one(config, tmp_path):
    config.optim_wrapper.optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
    _, weights = check_two_processes(config, tmp_path)
    name = 'backbone.blocks.1.mlp.fc1.weight'
    assert (weights[name] - weights[f'target_generator.ema.{name}']).abs().max() > 1e-5  # the tolerance is 1e-6


def test_two_processes_need_half_the_batches_where_one_accumulated_two(config, tmp_path):
    config.default_hooks.checkpoint.update(by_epoch=False, interval=2, max_keep_ckpts=-1)
    config.merge_from_dict({'train_dataloader.batch_size': 3, 'optim_wrapper.accumulative_counts': 2})
    config.param_scheduler = []  # counted in batches: the rate of a step is that of another half of it
    steps, weights = train(config)
    changes = {'launcher': 'pytorch', 'optim_wrapper.accumulative_counts': 1, 'resume': True}
    changes |= dict(load_from=f'{config.work_dir}/iter_2.pth', work_dir=f'{tmp_path}/two')
    others, other_weights = run_ranks(lambda rank: train(config, **changes), tmp_path)[0]
    pairs = list(zip(steps[2::2], steps[3::2], strict=True))
    assert len(others) == len(pairs) == 3
    for (shown, _), ((first, _), (second, _)) in zip(others, pairs, strict=True):
        for key in ('images', 'mask', 'tokens'):
            assert torch.equal(shown[key], torch.cat([first[key], second[key]])), key
    for name, tensor in weights.items():
        assert torch.allclose(tensor, other_weights[name], atol=1e-6), name


def test_gradients_in_bfloat16_are_half_the_bytes_and_learn_alike(config, tmp_path):
    def trained(rank: int) -> tuple[list, int]:
        exchange, sent = torch.distributed.all_reduce, []
        torch.distributed.all_reduce = lambda tensor, *args, **kwargs: (
            sent.append(tensor) or exchange(tensor, *args, **kwargs)
        )
        steps, _ = train(config, work_dir=f'{tmp_path}/two', **TWO_RANKS, **hook)
        return [loss.item() for _, loss in steps], sum(
            2 * each.numel() for each in sent if each.dtype == torch.bfloat16
        )

    hook: dict = {}
    (losses, nothing), _ = run_ranks(trained, tmp_path)
    hook = {'default_hooks.gradients': dict(type='beit_mm.CompressGradientsHook')}
    (others, sent), _ = run_ranks(trained, tmp_path)
    parameters = MODELS.build(config.model).parameters()
    assert nothing == 0 and sent == 2 * len(losses) * sum(each.numel() for each in parameters if each.requires_grad)
    assert others == pytest.approx(losses, abs=1e-3) and others != losses


def test_all_processes_validate_the_batch_norm_that_is_saved(tmp_path):
    """Each has seen other images; averaged weights bring their own statistics."""
    config = classifier_config(make_images(tmp_path), tmp_path / 'work')
    config.model = dict(type='beit_mm.AttentiveProbe', backbone=BACKBONE, layers=-1, num_classes=3)
    config.model.data_preprocessor = dict(type='ClsDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3)
    config.default_hooks.ema = dict(type='EMAHook', momentum=0.5)
    name = 'heads.2.1.running_mean'

    class Validated(Hook):
        def before_val_iter(self, runner, batch_idx, data_batch=None):
            self.mean = unwrap(runner).state_dict()[name].clone()

    def validated(rank: int) -> torch.Tensor:
        train_run(config, noted := Validated(), **TWO_RANKS, **{'train_dataloader.drop_last': True})
        return noted.mean

    one, other = run_ranks(validated, tmp_path)
    assert one.abs().max() > 0 and torch.equal(one, other)
    assert torch.equal(one, Checkpoint.open(tmp_path / 'work/epoch_2.pth').state_dict[name])


@pytest.mark.slow
def test_sixteen_processes_that_are_killed_take_the_steps_of_one(tmp_path):
    """Of a narrow model of the paper's pretraining, by the launcher, on whatever cores there are; SGD as above."""
    (tmp_path / 'images').mkdir()
    for index in range(32):
        pixels = np.random.default_rng(index).integers(0, 256, (40, 48, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f'images/{index:02}.png')
    config = narrow_pretraining(tmp_path / 'images', tmp_path, 'beit/pretrain_800e.py')
    config.train_dataloader.dataset.pipeline[3].variant = 'exact'
    config.optim_wrapper.dtype, config.env_cfg.dist_cfg.backend = 'float32', 'gloo'
    config.optim_wrapper.optimizer = dict(type='SGD', lr=0.1, momentum=0.9)
    config.train_cfg, config.log_processor.by_epoch = dict(type='beit_mm.IterLoop', max_iters=20), False
    config.default_hooks.checkpoint.update(by_epoch=False, interval=10)
    config.dump(tmp_path / 'config.py')
    words = [str(tmp_path / 'config.py'), '--no-validate']

    def start(work_dir: str, *more: str) -> subprocess.Popen:
        command = ['bash', str(ROOT / 'tools/dist_train.sh'), words[0], '16', *words[1:], '--work-dir', work_dir, *more]
        environment = dict(os.environ, OVERSUBSCRIBE='1')
        return subprocess.Popen([*command, '--cfg-options', 'train_dataloader.batch_size=1'], env=environment)

    many, one = tmp_path / 'many', tmp_path / 'one'
    begun = start(str(many))
    while not (many / 'iter_10.pth').exists():
        assert begun.poll() is None
        time.sleep(0.1)
    while subprocess.run(['pkill', '-KILL', '-f', str(many)], check=False).returncode == 0:  # torchrun and its workers
        time.sleep(0.1)
    assert begun.wait() and not (many / 'iter_20.pth').exists()
    assert start(str(many), '--resume').wait() == 0
    assert any(re.search('Resuming from .*iter_10.pth', log.read_text()) for log in many.glob('*/*.log'))
    alone = [sys.executable, str(ROOT / 'tools/train.py'), *words, '--work-dir', str(one)]
    subprocess.run([*alone, '--cfg-options', 'train_dataloader.batch_size=16'], check=True)
    found, expected = (Checkpoint.open(folder / 'iter_20.pth').state_dict for folder in (many, one))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.allclose(found[name], tensor, rtol=0, atol=1e-6), name
    assert expected['head.lm_head.bias'].abs().max() > 1e-2  # it was 0


def test_another_effective_batch_is_refused(config, tmp_path):
    train(config)
    changes = {'load_from': f'{config.work_dir}/epoch_1.pth', 'resume': True, 'train_dataloader.batch_size': 2}
    with pytest.raises(ValueError, match=' 4 images .* 2; change'):
        train(config, work_dir=f'{tmp_path}/other', **changes)


def test_a_work_directory_that_another_node_does_not_see_is_named(config, tmp_path):
    train(config)

    def resumed(rank: int) -> str:
        elsewhere = patch.object(Path, 'is_file', lambda path: False) if rank else contextlib.nullcontext()
        with elsewhere, pytest.raises(UserError) as error:
            train(config, resume='auto', **TWO_RANKS)
        return str(error.value)

    said, other = run_ranks(resumed, tmp_path)
    assert said == other and 'epoch_2.pth is not on all nodes; put --work-dir' in said


def test_what_the_main_process_cannot_read_ends_all(tmp_path):
    def read(rank: int) -> str:
        with pytest.raises(FileNotFoundError) as error:
            in_main_process((tmp_path / 'gone').read_text)
        return str(error.value)

    said, *others = run_ranks(read, tmp_path)
    assert 'No such file' in said and others == [said]
