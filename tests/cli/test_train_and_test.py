"""tools/train.py, tools/test.py, dist_train.sh and mim as a user runs them, on a CPU."""

import copy
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from helpers import NO_WORKERS, ROOT, interrupt_after, load_config, run_ranks, run_tool
from labelled import classifier_config, make_images
from mmengine.config import Config

import beit_mm
from beit_mm.apis import commands
from beit_mm.apis.configs import config_text
from beit_mm.checkpoint.read import read_checkpoint
from beit_mm.engine.resuming import settings_by_name
from beit_mm.errors import UserError

CONFIG = ROOT / 'configs/demo/pretrain.py'
# The demo's model on twelve images of 48 x 64 pixels: three steps.
OPTIONS = ['model.target_generator.checkpoint=None', 'train_cfg.max_iters=3', 'train_cfg.val_interval=3']
OPTIONS += ['default_hooks.logger.interval=1', 'default_hooks.checkpoint.interval=1', 'train_dataloader.batch_size=4']


def run(*command: object, cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    words, environment = [*map(str, command)], environment_with(**environment)
    return subprocess.run(words, cwd=cwd, capture_output=True, text=True, timeout=240, env=environment)


def environment_with(**variables: str) -> dict[str, str]:
    variables |= dict(OMP_NUM_THREADS='1', PYTHON=sys.executable, PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES='')
    return os.environ | variables | dict(PATH=f'{Path(sys.executable).parent}:{os.environ["PATH"]}')


def config_of(verb: str, *words: object) -> Config:
    """The config that a command line asks for."""
    args = getattr(commands, f'{verb}_parser')().parse_args([*map(str, words)])
    return getattr(commands, f'{verb}_config')(args)


@pytest.fixture
def options(images, tmp_path, monkeypatch) -> list[str]:
    """--cfg-options for the twelve images; the test's folder is the current one."""
    monkeypatch.chdir(tmp_path)
    folders = [f'{split}_dataloader.dataset.data_prefix=' for split in ('train', 'val', 'test')]
    return ['--cfg-options', *OPTIONS, f'data_root={images}', *folders]


def test_help_needs_the_standard_library_alone():
    left_out = {'dev', 'doctor.py', 'convert_checkpoint.py', 'reproduce_table.py', 'draw_images.py', 'draw_bands.py'}
    left_out |= {'onnx_predict.py'}  # needs numpy
    tools = [path for path in (ROOT / 'tools').rglob('*.py') if '__main__' in path.read_text()]
    tools = [path for path in tools if not left_out & {*path.parts}]
    assert len(tools) > 11
    for tool in [*tools, ROOT / 'beit_mm/__main__.py']:
        done = run(sys.executable, '-S', tool, '--help', cwd=ROOT, PYTHONNOUSERSITE='1')
        assert done.returncode == 0 and 'usage: ' in done.stdout, f'{tool}: {done.stderr}'


def test_train_stop_resume_and_test_give_the_same_numbers(options, tmp_path, capfd, monkeypatch):
    options += NO_WORKERS
    monkeypatch.setenv('COLUMNS', '120')
    run_tool('train.py', CONFIG, *options)
    out, err = capfd.readouterr()  # no terminal: a few lines too
    lines = out.splitlines()
    assert len(lines) + len(err.splitlines()) < 20 and max(map(len, lines)) <= 120, lines
    progress = r'^pretrain 3/3  loss [\d.]+  mim_acc [\d.]+  lr \S+  [\d,]+ images/s  data \S+ s  \d:\d\d:\d\d left$'
    assert re.search(progress, out, flags=re.M) and 'work_dirs/pretrain: checkpoints' in out
    assert re.search(r'pretrain 3, held-out images:  mim_loss [\d.]+ ', out) and 'Iter(train)' not in out + err
    work = tmp_path / 'work_dirs/pretrain'  # the default: the config's name
    log = next(work.glob('*/*.log')).read_text()
    assert 'eta: ' in log and 'images_per_second: ' in log

    interrupt_after(monkeypatch, 'pretrain', 1)
    with pytest.raises(SystemExit, match='130'):
        run_tool('train.py', 'demo/pretrain', '--work-dir', 'again', *options)
    assert re.search(r'^Stopped after step 2\. Resume with: .* --resume$', capfd.readouterr().out, flags=re.M)
    run_tool('train.py', CONFIG, '--work-dir', 'again', '--resume', '--no-validate', '--verbose', *options)
    assert 'Iter(train)' in ''.join(capfd.readouterr())
    states = [torch.load(folder / 'iter_3.pth', weights_only=True)['state_dict'] for folder in (work, Path('again'))]
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])

    run_tool('test.py', CONFIG, work / 'iter_3.pth', '--out', 'metrics.json', *options)
    metrics = json.loads((tmp_path / 'metrics.json').read_text())
    assert f'{metrics["mim_loss"]:.4f}' == re.search(r'Iter\(val\).* mim_loss: ([\d.]+)', log)[1]


def test_a_run_that_a_hook_ends_says_so_and_the_weights_are_saved(options, capfd):
    hook = dict(type='EarlyStoppingHook', monitor='mim_loss', rule='less', stopping_threshold=100.0)
    hooks = [f'custom_hooks={json.dumps([hook])}', 'train_cfg.val_interval=1', 'default_hooks.checkpoint.interval=2']
    run_tool('train.py', CONFIG, *options, *NO_WORKERS, *hooks, 'optim_wrapper.accumulative_counts=2')
    end = re.search(r'ended by a hook after step 1 of 3.* (\S+)$', capfd.readouterr().out.strip())
    assert read_checkpoint(end[1])['meta']['iter'] == 1


@pytest.mark.parametrize(
    'name, steps, expected',
    [
        # of 800 epochs 10 are the warm-up, which is never one step
        ('beit/pretrain_800e', 1600, 'LinearLR 0 20, CosineAnnealingLR 20 1600'),
        ('beit/pretrain_800e', 2, 'LinearLR 0 2, CosineAnnealingLR 2 3'),  # which begins after the run
        ('beit/pretrain_800e', 1, 'LinearLR 0 1, CosineAnnealingLR 1 2'),
        # 1501 and 160,001 of 160,000: mmengine's PolyLR arrives one step before its end
        ('beit/upernet_512_ade20k_160k', 1600, 'LinearLR 0 15, PolyLR 0 1601'),
        ('demo/pretrain', 300, 'LinearLR 0 12, CosineAnnealingLR 12 300 288'),  # T_max
        ('dvae/dalle_8k_in1k', 3000, 'CosineAnnealingLR 0 1200'),
        # an epoch's length is not known, but the schedule's is: 10,000 of 1,039,800 steps
        ('beit_plus/pretrain_in22k_150e', 1040, 'LinearLR 0 10, CosineAnnealingLR 10 1040'),
        ('beit_dino/pretrain_dino_400e', 8, 'LinearLR 0 2, CosineAnnealingWeightDecay 0 8, CosineAnnealingLR 2 8'),
    ],
)
def test_a_config_is_shortened_as_a_whole(name, steps, expected):
    cfg = copy.deepcopy(load_config(f'{name}.py'))
    commands.scale_to_steps(cfg, steps)
    found = [[each[key] for key in ('type', 'begin', 'end', 'T_max') if key in each] for each in cfg.param_scheduler]
    assert ', '.join(' '.join(map(str, each)) for each in found) == expected
    assert not any({'convert_to_iter_based'} & {*each} or each.by_epoch for each in cfg.param_scheduler)
    before = {key: load_config(f'{name}.py').train_cfg.get(key) for key in ('max_epochs', 'max_iters')}
    length = dict(max_iters=steps, val_interval=steps, shortened_from={key: n for key, n in before.items() if n})
    assert cfg.train_cfg == dict(type='beit_mm.IterLoop', **length)
    checkpoint, logger = cfg.default_hooks.checkpoint, cfg.default_hooks.logger
    assert not checkpoint.by_epoch and checkpoint.interval <= steps and logger.interval <= max(1, steps // 10)
    assert not cfg.log_processor.by_epoch
    assert 'dvae' not in name or (cfg.model.temperature_steps, cfg.model.kl_steps) == (150, 5)
    assert 'dino' not in name or cfg.custom_hooks[-1].warmup_epochs == cfg.custom_hooks[-1].freeze_last_layer == 0


def test_what_options_say_of_a_shortened_run_holds():
    options = {
        'default_hooks.checkpoint.interval': 7,
        'default_hooks.checkpoint.by_epoch': True,
        'default_hooks.logger.interval': 50,
        'log_processor.by_epoch': True,
        'train_cfg.val_interval': 30,
        'train_cfg.shortened_from': None,
        'param_scheduler.0.end': 5,
        'param_scheduler.1.begin': 5,
        'model.temperature_steps': 60,
        'model.kl_steps': 6,
    }
    words = [f'{key}={value}' for key, value in options.items()]
    cfg = config_of('train', 'demo/dvae', '--steps', 100, '--cfg-options', *words)
    found = settings_by_name(cfg.to_dict())
    assert {key: found[key] for key in options} == {key: repr(value) for key, value in options.items()}
    assert cfg.train_cfg.max_iters == 100
    # also of a schedule that so short a run never reaches
    cfg = config_of('train', 'beit/pretrain_800e', '--steps', 1, '--cfg-options', 'param_scheduler.1.eta_min_ratio=0.5')
    assert cfg.param_scheduler[1].eta_min_ratio == 0.5
    for name, length in (('demo/dvae', 'train_cfg.max_iters=9'), ('beit/pretrain_800e', 'train_cfg.max_epochs=9')):
        with pytest.raises(UserError, match=f'--steps 100 .*{length}'):
            config_of('train', name, '--steps', 100, '--cfg-options', length)


@pytest.mark.long
def test_two_processes_agree_and_a_signal_to_the_launcher_ends_them_in_our_sentence_alone(options, tmp_path):
    saved = 'default_hooks.checkpoint.'
    options += [*NO_WORKERS, 'train_dataloader.batch_size=2', f'{saved}interval=3', f'{saved}max_keep_ckpts=-1']
    words = ['bash', str(ROOT / 'tools/dist_train.sh'), str(CONFIG), '2', *options, 'train_cfg.max_iters=9999']
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    # also where there is one core
    started = subprocess.Popen(words, cwd=tmp_path, env=environment_with(OVERSUBSCRIBE='1'), **pipes)
    found = []
    while not found:
        assert started.poll() is None, started.stderr.read()
        time.sleep(0.1)
        logs = [path.read_text() for path in tmp_path.glob('work_dirs/pretrain/*/*.log')]
        found = [number for log in logs for number in re.findall(r'Iter\(val\).* mim_loss: ([\d.]+)', log)]
    started.terminate()
    output, errors = started.communicate(timeout=60)
    assert started.returncode == 75 and (tmp_path / 'work_dirs/pretrain/interrupted.pth').exists()
    assert re.match(r'Stopped after step \d+\. Resume with: .*dist_train.sh .* --resume$', output.splitlines()[-1])
    before, *warnings = errors.splitlines()
    assert '2 process(es) on the CPU with gloo' in before and all(line.startswith('warning: ') for line in warnings)
    said = 'warning: Effective batch: 2 processes x 2 images x 1 accumulated = 4; the recipe has 64'
    assert [line.startswith(said) for line in warnings].count(True) == 1
    # the weights that the two agreed on give the same number in one process
    run_tool('test.py', CONFIG, 'work_dirs/pretrain/iter_3.pth', '--out', 'metrics.json', *options)
    alone = json.loads((tmp_path / 'metrics.json').read_text())['mim_loss']
    assert float(found[0]) == pytest.approx(alone, abs=1e-3)


def test_two_processes_without_a_gpu_train_a_config_that_names_no_wrapper(tmp_path):
    """As mmpretrain's and mmseg's do not: mmengine's own would name a GPU."""
    config = classifier_config(make_images(tmp_path), tmp_path / 'work')
    config.pop('model_wrapper_cfg')
    config.dump(tmp_path / 'config.py')

    def train(rank: int) -> None:
        with patch('torch.distributed.init_process_group'):  # run_ranks has called it
            run_tool('train.py', tmp_path / 'config.py', '--launcher', 'pytorch')

    run_ranks(train, tmp_path)
    assert (tmp_path / 'work/epoch_2.pth').exists()


@pytest.mark.long
def test_mim_trains_from_the_config_alone(options, tmp_path):
    """Our tools are not in that process: everything comes from the registries, also what reads a safetensors file."""
    weights = f'load_from={ROOT}/beit_mm/weights/pretrained.safetensors'
    splits = ('train', 'val', 'test')
    roots = [f'{split}_dataloader.dataset.{options[7]}' for split in splits]  # mmpretrain's tool takes each by itself
    command = ['mim', 'train', 'mmpretrain', CONFIG, *'--gpus 0 --launcher none --work-dir run'.split(), *options[:7]]
    done = run(*command, *roots, *options[8:], weights, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert re.search(r'pretrained.safetensors \(.*\): \d+ matched', done.stdout + done.stderr)
    assert (tmp_path / 'run/iter_3.pth').exists()


@pytest.mark.parametrize(
    ('option', 'message'),
    [
        ('model.target_generator.checkpoint=nowhere.pth', 'looked for nowhere.pth'),
        ('train_dataloader.dataset.data_root=https://example.org/images', 'expected a local folder of images'),
        ('train_dataloader.batch_size', "'train_dataloader.batch_size' is not KEY=VALUE"),
        ('train_dataloader.shuffle=False', 'shuffle'),
        ('train_dataloader.batchsize=4', 'did you mean train_dataloader.batch_size?'),
        ('model.backbone.type=BEiTBackbone', "'BEiTBackbone'"),
        ('lr=1e-3', 'lr is not '),
        ('launcher=pytorch', "launcher=pytorch: another argument makes it 'none'"),
        ('train_dataloader.num_workers=0', 'set persistent_workers=False too'),
        ('train_cfg.val_interval=0', 'error: train_cfg.val_interval is 0; expected a number from 1'),
        ("optim_wrapper.clip_grad={'max_norm': 1}", 'optim_wrapper.clip_grad holds dicts but is not JSON'),
        ('param_scheduler.2.end=9', 'param_scheduler.2.end'),
    ],
)
def test_a_mistake_is_one_line(options, option, message):
    with pytest.raises(SystemExit) as end:
        run_tool('train.py', CONFIG, *options, option)
    assert end.value.code.startswith('error: ') and message in end.value.code


def test_processes_that_would_train_alone_are_refused(options, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')  # by torchrun
    with pytest.raises(SystemExit, match='WORLD_SIZE=2.*--launcher pytorch'):
        run_tool('train.py', CONFIG, *options)


def test_a_config_that_is_not_python_is_named(tmp_path):
    (tmp_path / 'base.py').write_text('x = dict(')
    (tmp_path / 'config.py').write_text("_base_ = 'base.py'")
    path = tmp_path / 'config.py'
    for read in (
        lambda: config_of('train', path),
        lambda: config_text(str(path)),
        lambda: beit_mm.export('demo', tmp_path / 'x.onnx', config=path),
    ):
        with pytest.raises(UserError, match=r'config.py.* line 1: .* never closed: x = dict\('):
            read()


def test_launchers_that_need_gpus_say_so(monkeypatch):
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: False)
    with pytest.raises(UserError, match='--launcher slurm needs GPUs'):
        config_of('train', CONFIG, '--launcher', 'slurm')


@pytest.mark.parametrize(
    ('config', 'key', 'nearest'),
    [
        ('demo/camvid_upernet', 'model.decode_head.loss_decode.class_weight', None),
        ('demo/camvid_upernet', 'model.decode_head.ignore_index', None),  # of the base of its class
        ('demo/camvid_upernet', 'train_dataloader.dataset.max_refetch', None),
        ('demo/camvid_upernet', 'default_hooks.logger.priority', None),  # which a builder reads
        ('demo/camvid_upernet', 'model.decode_head.loss_decode.class_wieghts', 'loss_decode.class_weight?'),
        ('demo/camvid_upernet', 'optim_wrapper.optimizer.epsilon', 'optimizer.eps?'),
        ('demo/finetune_folder', 'train_dataloader.sampler.rounds', 'SeededSampler'),
    ],
)
def test_a_new_key_beside_a_type_is_an_argument_of_its_class(config, key, nearest):
    if nearest is None:
        assert config_of('train', config, '--cfg-options', f'{key}=[1,2]').to_dict()
        return
    with pytest.raises(UserError) as refused:
        config_of('train', config, '--cfg-options', f'{key}=[1,2]')
    assert key in str(refused.value) and nearest in str(refused.value)


def test_a_part_is_emptied_and_gets_its_type_before_arguments_of_it_whatever_the_order_of_options():
    options = ['model.head.type=beit_mm.PixelRegressionHead', 'model.head.patch_size=8', 'model.head._delete_=True']
    for order in (options, options[::-1]):
        cfg = config_of('train', 'beit/pretrain_300e', '--cfg-options', *order)
        assert cfg.model.head == dict(type='beit_mm.PixelRegressionHead', patch_size=8)
    with pytest.raises(UserError, match='patch_size'):
        config_of('train', 'beit/pretrain_300e', '--cfg-options', options[1])


def test_an_element_of_a_list_is_named_by_its_type_where_only_one_has_it():
    pipeline = 'train_dataloader.dataset.pipeline'
    given = Config.fromfile(ROOT / 'configs/beit/pretrain_300e.py')
    given.train_dataloader.dataset.pipeline[3].variant = 'exact'
    for name in ('BlockwiseMask', 'beit_mm.BlockwiseMask', '3'):
        cfg = config_of('train', 'beit/pretrain_300e', '--cfg-options', f'{pipeline}.{name}.variant=exact')
        assert cfg.train_dataloader.to_dict() == given.train_dataloader.to_dict()
    with pytest.raises(UserError, match='did you mean .*pipeline.BlockwiseMask'):
        config_of('train', 'beit/pretrain_300e', '--cfg-options', f'{pipeline}.BlokwiseMask.variant=exact')
    key = f'{pipeline}.RandomFlip'
    for refused, reason in ((f'{key}.prob=1', 'RandomFlip'), (f'{pipeline}.BlockwiseMask.variannt=exact', 'variant')):
        with pytest.raises(UserError, match=reason):
            config_of('train', 'beit/pretrain_300e', '--cfg-options', refused)
    hooks = 'custom_hooks=[{"type": "EmptyCacheHook"}, {"type": "EmptyCacheHook"}]'
    with pytest.raises(UserError, match='2 times'):
        config_of('train', 'beit/pretrain_300e', '--cfg-options', hooks, 'custom_hooks.EmptyCacheHook.after_epoch=True')


def test_options_may_fill_what_a_config_leaves_empty():
    name = 'beit_plus/linear_512_ade20k_39k_after_in22k'
    for option in ('optim_wrapper.clip_grad={"max_norm": 1}', 'optim_wrapper.clip_grad.max_norm=1'):
        filled = config_of('train', name, '--cfg-options', option)
        assert filled.optim_wrapper.clip_grad == dict(max_norm=1)
    mixup = ['model.train_cfg.augments.type=Mixup', 'model.train_cfg.augments.alpha=0.8']
    filled = config_of('train', 'demo/finetune_folder', '--cfg-options', *mixup)
    assert filled.model.train_cfg == dict(augments=dict(type='Mixup', alpha=0.8))


def test_missing_files_are_one_line(options):
    dalle = ['target_generator.checkpoint=dalle_encoder.pth', 'backbone.arch=tiny', 'head.embed_dims=192']
    dalle = [*options, *(f'model.{option}' for option in dalle)]
    for words, message in (
        (['train.py', 'gone.py'], '^error: .*gone.py'),
        (['test.py', CONFIG, 'gone.pth', *options], '^error: .*gone.pth'),
        (['test.py', CONFIG, 'gone.pth', '--out', '.'], '^error: .*directory'),
        (['train.py', 'beit/pretrain_300e', *dalle], '(?s)^error: .*dalle_encoder.pth.*https://.*random_weights=True'),
    ):
        with pytest.raises(SystemExit, match=message):
            run_tool(*words)


def test_the_arguments_of_train(tmp_path):
    (folder := tmp_path / 'a folder, of mine').mkdir()
    words = ['--amp', '--auto-scale-lr', '--no-validate', '--resume', 'x.pth', '--cfg-options', f'data_root={folder}']
    template = 'experiment_name={{$HOME:none}}'  # which mmengine fills in when it reads a config's text
    cfg = config_of('train', 'demo/bands_dvae', *words, 'randomness.seed=3', '--cfg-options', 'model.loss=l1', template)
    cfg.dump(str(tmp_path / 'dumped.py'))
    assert Config.fromfile(str(tmp_path / 'dumped.py')).experiment_name == cfg.experiment_name == template[16:]
    found = cfg.work_dir, cfg.optim_wrapper.dtype, cfg.auto_scale_lr.enable, cfg.val_cfg, cfg.resume, cfg.load_from
    assert found == ('work_dirs/bands_dvae', 'bfloat16', True, None, True, 'x.pth')
    assert (cfg.train_dataloader.dataset.data_root, cfg.randomness.seed, cfg.model.loss) == (str(folder), 3, 'l1')
    cfg = config_of('train', 'demo/pretrain', '--resume', '--cfg-options', 'load_from=x.pth')
    assert (cfg.resume, cfg.load_from) == ('auto', 'x.pth')
    assert cfg.model_wrapper_cfg.get('find_unused_parameters') is None
    cfg = config_of('train', 'demo/bands_dvae', '--cfg-options', 'find_unused_parameters=True')
    assert cfg.model_wrapper_cfg.find_unused_parameters is True
    pipeline = '[{"type": "LoadImage"}, {"type": "Crop", "size": [4, 5], "pad": null}]'
    roots = ['data_root=a', 'test_dataloader.dataset.data_root=other']
    options = [*roots, f'test_dataloader.dataset.pipeline={pipeline}', 'optim_wrapper.clip_grad={ "max_norm": 2}']
    cfg = config_of('train', 'beit/pretrain_300e', '--compile', '--cfg-options', *options)
    assert cfg.optim_wrapper.clip_grad == dict(max_norm=2)
    found = [cfg[f'{split}_dataloader'].dataset.data_root for split in ('train', 'val', 'test')]
    assert found == ['a/train', 'a/val', 'other'] and cfg.custom_hooks[-1] == dict(type='beit_mm.CompileHook')
    assert cfg.test_dataloader.dataset.pipeline == json.loads(pipeline)
    assert cfg.test_dataloader.dataset.pipeline[0].type == 'LoadImage'  # as in any config
    foreign = config_of('train', ROOT / 'docs/examples/mmseg_ade20k.py', '--steps', 20)  # names few hooks
    assert foreign.default_hooks.logger.interval == 2 and not foreign.log_processor.by_epoch
    mixed = tmp_path / 'mixed.py'
    mixed.write_text("train_cfg, param_scheduler = dict(max_epochs=3), [dict(type='LinearLR', by_epoch=False)]")
    with pytest.raises(UserError, match='LinearLR does not count by max_epochs'):
        config_of('train', mixed, '--steps', 10)


def test_the_arguments_of_test(tmp_path):
    one_scale = 'beit_plus/upernet_640_ade20k_160k_after_in22k'
    cfg = config_of('test', one_scale, 'x.pth', '--tta', '--show-dir', 'drawn')
    assert cfg.model.type == 'beit_mm.MultiScaleTTA' and cfg.model.module.type == 'beit_mm.SlidingSegmentor'
    assert cfg.test_dataloader.dataset.pipeline[-1].type == 'beit_mm.MultiScaleViews'
    assert cfg.default_hooks.visualization.draw and cfg.visualizer.save_dir == 'drawn'
    of_options = {'precision=float16': 'float16', 'stride=(9,9)': None}
    for word, precision in of_options.items():
        cfg = config_of('test', one_scale, 'x.pth', '--amp', '--tta', '--cfg-options', f'model.test_cfg.{word}')
        assert cfg.model.module.test_cfg.get('precision') == precision and not cfg.test_cfg.get('fp16')
    assert config_of('test', 'demo/finetune_folder', 'x.pth', '--amp').test_cfg.fp16
    scoped = 'test_dataloader.dataset.pipeline.3.type=mmpretrain.PackInputs'
    for word in ('--tta', '--show-dir=x'):
        assert config_of('test', 'demo/finetune_folder', 'x.pth', word, '--cfg-options', scoped)
    for name in ('AmpOptimWrapper', 'mmengine.AmpOptimWrapper'):  # without a dtype it is float16
        wrapper = f"dict(_delete_=True, type='{name}', optimizer=dict(type='AdamW', lr=1e-3))"
        Path(tmp_path, 'amp.py').write_text(f"_base_ = '{ROOT}/configs/demo/pretrain.py'\noptim_wrapper = {wrapper}")
        assert config_of('train', tmp_path / 'amp.py', '--amp').optim_wrapper.type == name
    exact = tmp_path / 'exact.py'
    text = f"_base_ = '{ROOT}/configs/demo/camvid_upernet.py'\nmodel = dict(test_cfg=dict(precision='float32'))"
    exact.write_text(text)
    assert config_of('test', exact, 'x.pth', '--amp').model.test_cfg.precision == 'bfloat16'
    for name, word, message in (
        ('demo/pretrain', '--tta', '--tta is for a classifier'),
        ('demo/linear_probe_folder', '--tta', 'model.layers='),
        ('beit/attentive_probe_in1k_90e', '--tta --cfg-options model.layers=[1,2]', 'model.layers='),
        ('demo/pretrain', '--show-dir=x', 'classifiers and segmentors'),
    ):
        with pytest.raises(UserError, match=message):
            config_of('test', name, 'x.pth', *word.split())


@pytest.mark.parametrize(
    ('verb', 'words', 'option'),
    [
        ('train', ['demo/pretrain', '--amp'], 'optim_wrapper.dtype=float32'),
        ('train', ['demo/pretrain', '--resume', 'a.pth'], 'load_from=b.pth'),
        ('test', ['demo/finetune_folder', 'a.pth'], 'load_from=b.pth'),
        ('test', ['demo/camvid_upernet', 'a.pth', '--tta'], 'test_dataloader.dataset.pipeline.1.scale=(9,9)'),
    ],
)
def test_an_option_that_another_argument_would_override_is_named(verb, words, option):
    with pytest.raises(UserError, match='.'.join(option.partition('=')[0].split('.')[:3])):
        config_of(verb, *words, '--cfg-options', option)
