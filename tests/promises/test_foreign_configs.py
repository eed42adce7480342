"""What is asked for takes effect in mmseg's and mmpretrain's own configs too, with our backbone in them.

Each of the lines that docs/mixing.md names matters: without it, what the page says of it does not hold.
"""

import io
import re
import signal
import sys
import warnings
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from helpers import ROOT, library_tools, make_runner, run_tool
from label_maps import make_label_maps
from labelled import make_images
from mmcv.transforms import BaseTransform
from mmengine.config import Config
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.registry import HOOKS, METRICS, TRANSFORMS
from PIL import Image

from beit_mm import ClassificationInferencer
from beit_mm.checkpoint.read import read_checkpoint
from beit_mm.engine.optim import AutocastOptimWrapper
from beit_mm.engine.resuming import settings_by_name, values_in
from beit_mm.errors import UserError

pytestmark = pytest.mark.long

PAGE = re.findall(r'^```python\n(_base_ = .*?)^```$', (ROOT / 'docs/mixing.md').read_text(), re.M | re.S)
SIZE = (32, 32)
NARROW = dict(arch=dict(embed_dims=32, num_layers=12, num_heads=4), img_size=32, patch_size=8, init_cfg=None)
SEGMENTOR = {
    'model.data_preprocessor.size': SIZE,
    'model.neck': dict(in_channels=[32] * 4, out_channels=32),
    'model.decode_head': dict(in_channels=[32] * 4, channels=16, norm_cfg=dict(type='BN')),
    'model.auxiliary_head': dict(in_channels=32, channels=16, norm_cfg=dict(type='BN')),
    'train_cfg': dict(max_iters=4, val_interval=4),
}
CLASSIFIER = {
    'model.head': dict(num_classes=3, in_channels=32),
    'data_preprocessor.num_classes': 3,
    'train_cfg': dict(max_epochs=2, val_interval=2),
}


def narrow(text: str, folder: Path) -> Config:
    """A config of the page, narrow and on a few images: without workers, four steps."""
    (folder / 'page.py').write_text(text)
    config = Config.fromfile(folder / 'page.py')
    segments = config.default_scope == 'mmseg'
    config.merge_from_dict(SEGMENTOR if segments else CLASSIFIER)
    config.model.backbone.update(NARROW)
    config.visualizer.pop('name', None)  # else all runs of a process write to the first one's folder
    if segments and not (folder / 'data').exists():
        make_label_maps(folder / 'data')
        for image in (folder / 'data/images').rglob('*.png'):
            Image.open(image).save(image.with_suffix('.jpg'))
    elif not segments and not (folder / 'data').exists():
        make_images(folder / 'data', per_class=4)
    for split in ('train', 'val', 'test'):
        loader = config[f'{split}_dataloader']
        loader.update(batch_size=2 if segments else 6, num_workers=0, persistent_workers=False)
        loader.dataset.update(data_root=str(folder / 'data'))
        if not segments:
            loader.dataset.pop('split')
            loader.dataset.update(type='CustomDataset', data_prefix='train' if split == 'train' else 'val')
        for step in loader.dataset.pipeline:
            step.update({key: value for key, value in dict(scale=(99, 40), crop_size=SIZE).items() if key in step})
            if step['type'] in ('RandomResizedCrop', 'ResizeEdge', 'CenterCrop'):
                step.update({key: 32 for key in ('scale', 'crop_size') if key in step})
    if not segments:
        config.train_dataloader.dataset.pipeline = config.test_dataloader.dataset.pipeline
        config.val_evaluator.topk = config.test_evaluator.topk = (1,)
    config.model.pop('train_cfg', None)
    config.param_scheduler = [dict(type='PolyLR', power=1.0, eta_min=0.0, by_epoch=False, end=4)]
    config.default_hooks.logger.interval = 1
    config.default_hooks.checkpoint.update(by_epoch=False, interval=2)
    config.work_dir = str(folder / 'work')
    return config


def without(text: str, number: int) -> str:
    """The page's config without the lines that have a number."""
    return '\n'.join(line for line in text.splitlines() if f'# {number}' not in line)


def trained(config: Config, folder: str, **changes: object) -> dict:
    """What the last checkpoint of a training holds."""
    config = Config(config.to_dict())
    config.merge_from_dict(changes)
    config.work_dir = str(Path(config.work_dir) / folder)
    runner = make_runner(config)
    runner.train()
    return read_checkpoint(next(Path(config.work_dir).glob(f'*_{runner.iter}.pth')))


@pytest.mark.parametrize('text', PAGE, ids=['mmseg', 'mmpretrain'])
class TestPage:
    def test_all_of_it_trains_and_validates(self, text, tmp_path):
        config = narrow(text, tmp_path)
        assert trained(config, 'all')['meta']['iter'] == 4

    def test_1_out_type(self, text, tmp_path):
        with pytest.raises(UserError, match='out_type'):
            trained(narrow(without(text, 1), tmp_path), 'none')
        config = narrow(without(without(text, 1), 2), tmp_path)
        config.pop('custom_hooks')
        with pytest.raises(Exception) as failed:
            trained(config, 'none')
        assert not isinstance(failed.value, UserError)

    @pytest.mark.parametrize('tool, line', [('ours', False), ('theirs', True), ('theirs', False)])
    def test_2_a_resumed_run_follows_its_config(self, text, tool, line, tmp_path, capfd):
        """With mmengine's CheckpointHook: the optimizer and schedules of a run that had the config from its start."""
        config = narrow(without(without(text, 5), 0 if line else 2), tmp_path)
        config.custom_hooks = config.get('custom_hooks', [])
        folder = ROOT / 'tools' if tool == 'ours' else library_tools(config.default_scope)
        words = ['--no-persistent-workers'] * ('mmpretrain' in str(folder))

        def states(name: str, *more: str) -> dict:
            config.dump(tmp_path / 'mine.py')
            run_tool('train.py', tmp_path / 'mine.py', '--work-dir', tmp_path / name, *more, *words, folder=folder)
            content = read_checkpoint(tmp_path / name / 'iter_4.pth')
            groups = [{**group, 'params': len(group['params'])} for group in content['optimizer']['param_groups']]
            return dict(groups=groups, schedules=content['param_schedulers'])

        train_cfg = config.train_cfg
        config.train_cfg = {
            key: value if key in ('type', 'by_epoch') else value // 2 for key, value in train_cfg.items()
        }
        with suppress(FileNotFoundError):  # it has half of the steps
            states('rest')
        config.train_cfg = train_cfg
        config.optim_wrapper.optimizer.update(lr=0.5, weight_decay=0.3, betas=(0.8, 0.9))
        config.param_scheduler[0].power = 2.0
        whole, _ = states('whole'), capfd.readouterr()
        is_followed = tool == 'ours' or line
        assert (states('rest', '--resume') == whole) == is_followed
        lines = ''.join(capfd.readouterr())
        named = re.findall(r'optimizer.lr 0.5, was \S+|param_scheduler.0.power 2.0, was 1.0', lines)
        assert len(named) == 2 * is_followed

    def test_3_constructor(self, text, tmp_path):
        def groups(text: str) -> list[dict]:
            config = narrow(text, tmp_path)
            runner = make_runner(config)
            return runner.build_optim_wrapper(runner.optim_wrapper).optimizer.param_groups

        rates = {group['lr'] for group in groups(text)}
        decays = [group['weight_decay'] for group in groups(text) for one in group['params'] if one.dim() < 2]
        assert len(rates) == 14 and not any(decays)  # patches, twelve blocks, the rest
        without_it = groups(re.sub(r'.*layer_decay_rate.*\n', '', without(text, 3)))
        assert len({group['lr'] for group in without_it}) == 1
        assert any(group['weight_decay'] for group in without_it for one in group['params'] if one.dim() < 2)

    def test_4_optimizer_wrapper(self, text, tmp_path):
        for lines, is_kept in ((text, True), (without(text, 4), False)):
            runner = make_runner(narrow(lines, tmp_path))
            wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
            assert isinstance(wrapper, AutocastOptimWrapper) == is_kept
            wrapper.update_params(next(runner.model.parameters()).sum() * torch.nan)
            assert all(parameter.isfinite().all() for parameter in runner.model.parameters()) == is_kept

    def test_5_runtime(self, text, tmp_path):
        config = narrow(text, tmp_path)
        with pytest.raises(SystemExit, match='75'):
            trained(config, 'ended', custom_hooks=[*config.custom_hooks, dict(type='Terminate')])
        assert (tmp_path / 'work/ended/interrupted.pth').exists()
        (tmp_path / 'bare').mkdir()
        bare = narrow(without(text, 5), tmp_path)
        with pytest.raises(KeyboardInterrupt):  # stands for the end of the process
            trained(bare, 'bare', custom_hooks=[*bare.custom_hooks, dict(type='Terminate', number=signal.SIGINT)])
        assert not [*(tmp_path / 'work/bare').glob('*.pth')]
        for each in (config, bare):
            (each.model.get('data_preprocessor') or each.data_preprocessor).mean = [30.0] * 3
        whole = trained(config, 'whole')['meta']
        assert whole['preprocessing']['mean'] == [30] * 3 and 'preprocessing' not in trained(bare, 'bare')['meta']
        if config.default_scope == 'mmpretrain':
            config.dump(tmp_path / 'mine.py')
            image, mine = next((tmp_path / 'data').rglob('*.png')), str(tmp_path / 'mine.py')
            for folder, is_known in (('whole', True), ('bare', False)):
                path = str(tmp_path / f'work/{folder}/iter_4.pth')
                (alone,), (right,) = (ClassificationInferencer(path, config=given)(image) for given in (None, mine))
                assert (alone['scores'] == right['scores']) == is_known


@HOOKS.register_module()
class Terminate(Hook):
    """A signal in the first step."""

    def __init__(self, number: int = signal.SIGTERM):
        self.number = number

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None) -> None:
        if runner.iter == 0:
            if self.number == signal.SIGINT:  # which is ignored where the tests run in the background
                signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.raise_signal(self.number)


@TRANSFORMS.register_module()
class Talking(BaseTransform):
    def transform(self, results: dict) -> dict:
        print('a transform prints')
        return results


@METRICS.register_module()
class Warning_(BaseMetric):
    def process(self, data_batch: dict, data_samples: list) -> None:
        self.results.append(0)

    def compute_metrics(self, results: list) -> dict[str, float]:
        warnings.warn('a metric warns', stacklevel=1)
        return dict(zero=0.0)


@HOOKS.register_module()
class Asking(Hook):
    def before_train(self, runner) -> None:
        print('a hook has', input('a debugger asks> '))


def test_what_user_code_prints_and_warns_of_is_on_the_terminal_and_in_the_log(tmp_path, monkeypatch, capsys):
    """So are a debugger's prompt and the table of mmengine's ProfilerHook; what libraries print is in the log alone."""
    config = narrow(PAGE[1], tmp_path)
    trained(config, 'first')
    config.load_from = str(tmp_path / 'work/first/iter_4.pth')
    table = dict(type='log_trace', sort_by='self_cpu_time_total', row_limit=2)
    profiler = dict(
        type='ProfilerHook', by_epoch=False, profile_times=1, activity_with_cuda=False, on_trace_ready=table
    )
    config.custom_hooks += [dict(type='Asking'), profiler]
    config.val_evaluator = dict(type='Warning_')
    loader = config.train_dataloader
    loader.dataset.pipeline = [dict(type='Talking'), *loader.dataset.pipeline]
    loader.update(num_workers=1)
    config.dump(tmp_path / 'mine.py')
    monkeypatch.setattr(sys, 'stdin', io.StringIO('an answer\n'))
    run_tool('train.py', tmp_path / 'mine.py')
    shown = ''.join(capsys.readouterr())
    log = next((tmp_path / 'work').glob('2*/*.log')).read_text()
    for text in (
        'a debugger asks> a hook has an answer',
        'Self CPU time total',
        'a metric warns',
        'a transform prints',
    ):
        assert text in log and (text in shown or text == 'a transform prints')  # a worker's output is not captured
    assert 'Loads checkpoint by' in log and 'Loads checkpoint by' not in shown


def test_the_text_of_a_config_is_read_without_being_run(tmp_path):
    for name in ('demo/segment_masks.py', 'beit/pretrain_800e.py', 'demo/finetune_folder.py'):
        config = Config.fromfile(ROOT / 'configs' / name)
        config.odd = {'a-b': (1, dict(c=[dict(d=None)])), 'e': float('inf')}
        config.model.odd = {}
        read, expected = values_in(config.pretty_text), config.to_dict()
        expected['odd']['e'] = 'inf'
        assert settings_by_name(read) == settings_by_name(expected)
    hostile = f"a = dict(b=open({str(tmp_path / 'ran')!r}, 'w'))"
    assert values_in(hostile)['a']['b'].startswith('open(') and not (tmp_path / 'ran').exists()
    assert values_in('a = (') == {} and values_in('(' * 100_000) == {}
