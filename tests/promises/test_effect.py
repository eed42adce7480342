"""Options of verbs and keys of the docs change what they should and nothing else: a config, a plan or a model."""

import json
from pathlib import Path
from typing import Any

import pytest
from helpers import load_config, model_on_meta, with_options
from label_maps import make_label_maps
from labelled import make_images
from mmengine.config import Config

from beit_mm import __main__ as command
from beit_mm.apis import commands
from beit_mm.engine.resuming import settings_by_name
from beit_mm.own_images import images as finding
from beit_mm.own_images.run import Run, find_task
from beit_mm.registry import HOOKS, TRANSFORMS

PRETRAINING, CLASSIFIER, SEGMENTOR = 'beit/pretrain_800e', 'beit/finetune_in1k_100e', 'demo/camvid_upernet'


def differing(before: dict, after: dict) -> set[str]:
    return {name for name in {**before, **after} if before.get(name) != after.get(name)}


def check_changed(names: set[str], expected: str) -> None:
    """Each name lies below an expected one, and each of these has changed."""
    below = {one: {name for name in names if f'{name}.'.startswith(f'{one}.')} for one in expected.split()}
    assert all(below.values()) and names == set().union(*below.values()), (names, expected)


# --- train and test: what changes in the config

CONFIGS = [
    ('train', PRETRAINING, '--work-dir a', 'work_dir'),
    ('train', 'docs/examples/mmpretrain_folder.py', '--amp', 'optim_wrapper.type optim_wrapper.dtype'),
    ('train', PRETRAINING, '--amp', ''),  # it has mixed precision
    ('train', PRETRAINING, '--cfg-options randomness.seed=3', 'randomness.seed'),
    ('train', PRETRAINING, '--resume', 'resume'),
    ('train', PRETRAINING, '--resume a.pth', 'resume load_from'),
    ('train', PRETRAINING, '--no-validate', 'val_cfg val_dataloader val_evaluator'),
    ('train', PRETRAINING, '--auto-scale-lr', 'auto_scale_lr.enable'),
    ('train', PRETRAINING, '--compile', 'custom_hooks.7'),
    ('test', CLASSIFIER, '--work-dir a', 'work_dir'),
    ('test', CLASSIFIER, '--amp', 'test_cfg.fp16'),
    ('test', CLASSIFIER, '--cfg-options model.head.topk=1', 'model.head.topk'),
    ('test', CLASSIFIER, '--tta', 'model tta_model tta_pipeline test_dataloader.dataset.pipeline'),
    ('test', CLASSIFIER, '--show-dir a', 'default_hooks.visualization visualizer'),
    ('test', SEGMENTOR, '--show-dir a', 'default_hooks.visualization visualizer'),
]


@pytest.mark.parametrize(('verb', 'config', 'words', 'expected'), CONFIGS)
def test_an_option_of_train_and_test(verb, config, words, expected):
    def settings(*words: str) -> dict[str, str]:
        given = [config, *(['x.pth'] if verb == 'test' else []), *words]
        args = getattr(commands, f'{verb}_parser')().parse_args(given)
        return settings_by_name(getattr(commands, f'{verb}_config')(args).to_dict())

    check_changed(differing(settings(), settings(*words.split())), expected)


# --- pretrain and finetune: what changes in the plan and in the config that follows

LOADERS = ['train_dataloader', 'val_dataloader', 'test_dataloader']
WORKERS = ' '.join(f'config.{loader}.num_workers' for loader in LOADERS) + ' workers'
BATCH = ' '.join(f'config.{loader}.batch_size' for loader in LOADERS) + ' batch config.optim_wrapper.optimizer.lr'
BATCH += ' config.train_cfg.val_interval config.auto_scale_lr.base_batch_size'
NEW = 'config.model.head.init_cfg config.model.target_generator config.optim_wrapper.optimizer.lr'
NEW += ' config.train_cfg.val_begin stages.tokenizer predicts'
FEATURES = 'targets teacher predicts config.model.head config.model.target_generator config.train_cfg.val_begin'
FEATURES += ' config.optim_wrapper.optimizer.lr config.train_dataloader config.val_dataloader config.test_dataloader'
BACKBONE = 'init config.model.backbone config.optim_wrapper'
HEAD = 'config.model.head.init_cfg stages.head'  # fitted first to the features of trained weights
PLANS = [
    *((verb, '--seed 3', 'seed config.randomness.seed') for verb in ('pretrain', 'finetune')),
    *((verb, '--workers 3', WORKERS) for verb in ('pretrain', 'finetune')),
    *((verb, '--batch 8', BATCH) for verb in ('pretrain', 'finetune')),
    *((verb, '--minutes 3', 'length') for verb in ('pretrain', 'finetune')),
    *((verb, '--mean 9', 'mean config.model.data_preprocessor.mean') for verb in ('pretrain', 'finetune')),
    *((verb, '--std 9', 'std config.model.data_preprocessor.std') for verb in ('pretrain', 'finetune')),
    ('pretrain', '--init none', f'{NEW} {BACKBONE}'),
    ('pretrain', '--tokenizer new', f'{NEW} tokenizer'),
    ('pretrain', '--targets features', FEATURES),
    ('pretrain', '--teacher ema --targets features', f'{FEATURES} config.custom_hooks'),
    ('pretrain', '--steps 50', 'length'),
    ('finetune', '--init none', f'{BACKBONE} {HEAD}'),
    ('finetune', '--epochs 2', 'length'),
    ('finetune', '--lora 4', 'lora config.model.backbone config.optim_wrapper'),
    ('finetune maps', '--lora 4', 'lora config.model.backbone config.optim_wrapper'),
    (
        'finetune maps',
        '--head upernet',
        'head config.model.backbone.out_indices config.model.neck config.model.decode_head '
        'config.optim_wrapper.optimizer.lr',
    ),
    ('finetune', '--freeze 2', 'freeze config.model.backbone.frozen_stages'),
    (
        'finetune',
        '--freeze all',
        f'freeze {HEAD} config.model.backbone.frozen_stages config.train_dataloader '
        'config.val_dataloader.persistent_workers config.test_dataloader.persistent_workers',
    ),
    (
        'finetune maps',
        '--freeze all',
        'freeze config.model.backbone config.optim_wrapper.optimizer.lr config.train_dataloader',
    ),
    ('finetune', '--balance', 'balance config.train_dataloader.dataset'),
    ('finetune maps', '--reduce-zero-label', 'reduce_zero_label'),  # as classes.txt shows already
    ('finetune maps', '--keep-zero-label', 'an error'),
]


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp('effect')
    return {'': make_images(root / 'images', 12) / 'train', 'maps': make_label_maps(root / 'maps', number=12)}


@pytest.mark.long
@pytest.mark.parametrize(('verb', 'words', 'expected'), PLANS)
def test_an_option_of_pretrain_and_finetune(verb, words, expected, folders, tmp_path, monkeypatch):
    verb, _, kind = verb.partition(' ')

    def facts(run: Run) -> dict[str, str]:
        run.task = find_task(run.record)
        run.plan_or_resume()
        for stage in run.record.stages.values():
            stage['steps'] = 100
        config = run.settings(verb, 100)[1]
        found = dict(vars(run.record), config=config, length=list(vars(run.record.length).values()))
        found |= found.pop('options')
        del found['seconds']
        found = json.loads(json.dumps(found, default=str).replace(str(run.folder), 'OUT'))
        return {name: value for name, value in settings_by_name(found).items() if value != 'None'}

    runs: list[Run] = []
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)
    monkeypatch.setattr(Run, 'run', lambda run: runs.append(run))
    for number, given in enumerate(([], words.split())):
        command.main([verb, str(folders[kind]), '--out', str(tmp_path / str(number)), *given])
    if expected == 'an error':
        with pytest.raises(ValueError, match='classes.txt names 3 classes'):
            facts(runs[1])
    else:
        check_changed(differing(*map(facts, runs)), expected)


# --- keys of --cfg-options: what changes in what is built of the config

OWN_PAST, TEACHER = 'beit/pretrain_features_ema_300e', 'custom_hooks.7'
LAYERS, NORMALIZE = (
    f'model.target_generator.{key} model.target_generator.provenance' for key in ('layers', 'normalize')
)
MASK = 'train_dataloader.dataset.pipeline.3'
TRAINABLE = 'cls_token patch_embed pos_embed frozen_stages ' + ' '.join(f'blocks.{block}' for block in range(6))
KEYS = [
    (PRETRAINING, f'{MASK}.variant=exact', f'{MASK}.variant'),
    (PRETRAINING, f'{MASK}.variant=paper {MASK}.num_masked=78.4', f'{MASK}.variant {MASK}.num_masked'),
    (PRETRAINING, f'{MASK}.min_block=8', f'{MASK}.min_block'),
    (PRETRAINING, 'train_dataloader.dataset.pipeline.1.flip_prob=0', 'train_dataloader.dataset.pipeline.1.flip_prob'),
    (PRETRAINING, 'train_dataloader.dataset.pipeline.2.device=model', 'train_dataloader.dataset.pipeline.2.device'),
    ('dvae/dalle_8k_in1k', 'test_dataloader.dataset.pipeline.1.size=112', 'test_dataloader.dataset.pipeline.1.size'),
    (PRETRAINING, 'custom_hooks.3.max_rate=0.2', 'custom_hooks.3.max_rate'),
    (PRETRAINING, 'model.backbone.with_cp=True', 'model.backbone.with_cp'),
    (CLASSIFIER, 'model.backbone.frozen_stages=6', ' '.join(f'model.backbone.{name}' for name in TRAINABLE.split())),
    (
        CLASSIFIER,
        'model.backbone.out_type=cls_token',
        'model.backbone.out_type model.backbone.norm model.backbone.fc_norm',
    ),
    ('demo/finetune_folder', 'model.head.num_classes=7', 'model.head.num_classes model.head.fc'),
    ('demo/finetune_folder', 'model.data_preprocessor.num_classes=7', 'model.data_preprocessor.num_classes'),
    ('demo/linear_probe_folder', 'model.num_classes=7', 'model.num_classes model.heads'),
    ('demo/linear_probe_folder', 'model.feature=cls_mean', 'model.feature model.heads'),
    (SEGMENTOR, 'model.decode_head.loss_decode.class_weight=[1,2]', 'model.decode_head.loss_decode.class_weight'),
    (SEGMENTOR, 'model.test_cfg.precision=float32', 'model.test_cfg'),
    (SEGMENTOR, 'model.test_cfg.windows_per_batch=1', 'model.test_cfg'),
    ('beit_dino/pretrain_beit_dino_300e', 'model.dino_on_masked=True', 'model.dino_on_masked'),
    ('beit_dino/pretrain_beit_dino_300e', 'model.dino_weight=0.5', 'model.dino_weight'),
    ('demo/vqkd', 'model.restart_below=0.5', 'model.restart_below'),
    (OWN_PAST, 'model.target_generator.layers=8', f'{LAYERS} model.target_generator.ema.backbone.out_indices'),
    (OWN_PAST, 'model.target_generator.normalize=False', f'{NORMALIZE} model.target_generator.ema.backbone.norm'),
    (OWN_PAST, 'model.head.loss=cosine', 'model.head.kind'),
    (OWN_PAST, f'{TEACHER}.momentum=0.9998', f'{TEACHER}.momentum'),
]
SHOWN = (bool, int, float, str, list, tuple, dict, type(None))


def built(cfg: Config, part: str) -> dict[str, str]:
    """Plain attributes of the model, of a transform or of a hook; shapes of parameters, and whether they learn."""
    if part == 'model':
        model = model_on_meta(cfg)
        found: dict[str, Any] = dict(model.named_modules(prefix='model'))
        parameters = model.named_parameters(prefix='model')
    else:
        entry, registry = cfg, HOOKS if part.startswith('custom_hooks') else TRANSFORMS
        for name in part.split('.'):
            entry = entry[int(name) if name.isdecimal() else name]
        found, parameters = {part: registry.build(entry)}, iter(())
    values = {name: f'{tuple(each.shape)} {each.requires_grad}' for name, each in parameters}
    for name, one in found.items():
        plain = {key: value for key, value in vars(one).items() if isinstance(value, SHOWN)}
        values |= {f'{name}.{key}': repr(value) for key, value in plain.items() if key[0] != '_' and key != 'init_cfg'}
    return values


@pytest.mark.parametrize(('config', 'options', 'expected'), KEYS)
def test_a_key_of_the_docs(config, options, expected):
    before, after = load_config(f'{config}.py'), with_options(f'{config}.py', options.split())
    keys = [option.partition('=')[0] for option in options.split()]
    check_changed(differing(*(settings_by_name(cfg.to_dict()) for cfg in (before, after))), ' '.join(keys))
    part = 'model' if keys[0].startswith('model.') else keys[0].rpartition('.')[0]
    check_changed(differing(built(before, part), built(after, part)), expected)
