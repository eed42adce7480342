"""What holds for every config: it builds, says what it is, and stays in its own folder."""

import ast
import re
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import ROOT, build_on_meta, check_all, header_of, list_configs, load_config
from mmengine import registry as mmengine_registries
from mmengine.config import Config
from mmengine.registry import init_default_scope

from beit_mm.registry import HOOKS, METRICS, MODELS, TRANSFORMS
from tools._cli import parse_options

ROWS = list_configs()
ALL = list_configs(demo=True)
REGISTRIES = [value for name, value in vars(mmengine_registries).items() if name.isupper()]
SECTIONS = ('Command', 'Batch', 'Steps', 'Writes', 'Model', 'Result', 'Time', 'Shorter', 'Differs')


def bases_of(path: Path) -> list[Path]:
    match = re.search(r'^_base_ = (\[.*?\]|\'.*?\')', path.read_text(), re.M | re.S)
    bases = ast.literal_eval(match[1]) if match else []
    return [(path.parent / base).resolve() for base in ([bases] if isinstance(bases, str) else bases)]


def types_in(value: object) -> set[str]:
    """Every `type` in nested dicts and lists."""
    if isinstance(value, dict):
        own = {value['type']} if isinstance(value.get('type'), str) else set()
        return own.union(*map(types_in, value.values()))
    return set().union(*map(types_in, value)) if isinstance(value, (list, tuple)) else set()


def options_in(header: str) -> list[str]:
    """What stands behind each --cfg-options, continued on the lines below it."""
    return [' '.join(match.split()) for match in re.findall(r'--cfg-options((?:\s+[\w.]+=[^\s,;)]+)+)', header)]


def test_inheritance_is_at_most_two_deep():
    """A leaf on a leaf at most, and a base on a base."""

    def depth(path: Path, inside: bool) -> int:
        bases = [base for base in bases_of(path) if ('_base_' in base.parts) == inside]
        return max((1 + depth(base, inside) for base in bases), default=0)

    def check(name: str) -> None:
        path = ROOT / 'configs' / name
        assert depth(path, inside=False) <= 1
        assert depth(path, inside=True) <= 2

    check_all(ALL, check)


def test_demos_start_from_the_last_file_that_another_demo_writes():
    written_to = {'caltech101_dvae': 'dvae'}  # --work-dir of the headers: config; else the folder has its name
    named = 0
    for name in list_configs(demo=True):
        if not name.startswith('demo/'):
            continue
        text = (ROOT / 'configs' / name).read_text()
        for folder, file in re.findall(r'work_dirs/(\w+)/((?:iter|epoch)_\d+\.pth)', text):
            loop = load_config(f'demo/{written_to.get(folder, folder)}.py').train_cfg
            last = f'iter_{loop.max_iters}.pth' if 'max_iters' in loop else f'epoch_{loop.max_epochs}.pth'
            assert file == last, f'{name}: work_dirs/{folder}/{file}, but {last} is the last one'
            named += 1
    assert named


def test_every_type_is_registered():
    """Each once; what the models name was looked up when they were built."""
    users = {}  # (scope, type) -> config
    for name in ROWS:
        cfg = load_config(name)
        for type_name in types_in({key: value for key, value in cfg.to_dict().items() if key != 'model'}):
            users[cfg.default_scope, type_name] = name

    def check(user: tuple[str, str]) -> None:
        scope, type_name = user
        for registry in REGISTRIES:
            with registry.switch_scope_and_registry(scope) as scoped:
                if scoped.get(type_name) is not None:
                    return
        raise KeyError(f'in {users[user]}')

    for scope in ('mmpretrain', 'mmseg'):
        init_default_scope(scope)
        check_all([user for user in users if user[0] == scope], check)


def test_every_model_and_pipeline_builds():

    def check(name: str) -> None:
        cfg = load_config(name)
        build_on_meta(name)
        init_default_scope(cfg.default_scope)
        for loader in filter(None, (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader)):
            for transform in loader.dataset.pipeline:
                TRANSFORMS.build(transform)
        if cfg.val_evaluator:  # ImageNet-22K has no validation images
            METRICS.build(cfg.val_evaluator)

    check_all(ALL, check)


def losses_of(model: torch.nn.Module) -> list[torch.Tensor]:
    """What depends on all that a model on the meta device trains: its losses, or without labels its logits."""
    images = torch.zeros(2, 3, 224, 224)
    if hasattr(model, 'decode_head'):
        features = model.extract_feat(images)
        auxiliary = getattr(model, 'auxiliary_head', [])  # none, one or several
        heads = auxiliary if isinstance(auxiliary, (list, torch.nn.ModuleList)) else [auxiliary]
        return [head(features).sum() for head in (model.decode_head, *heads)]
    if not hasattr(model, 'target_generator'):
        logits = model(images)
        return [scores.sum() for scores in (logits if isinstance(logits, tuple) else [logits])]
    model.teacher_temperature = 0.04  # as DINOHook does
    second = images if hasattr(model, 'early_layers') else torch.zeros(2, 3, 112, 112)
    inputs = dict(images=images, second_images=images, local_images=torch.zeros(4, 3, 96, 96), tokenizer_images=second)
    mask = None if model.backbone.mask_token is None else torch.zeros(2, 14, 14, dtype=torch.bool)
    inputs |= dict(mask=mask, positions=torch.zeros(2, 75, dtype=torch.int64))
    return [value for name, value in model.loss(inputs).items() if 'loss' in name]


@pytest.mark.slow
def test_every_trained_parameter_gets_a_gradient(monkeypatch):
    """DistributedDataParallel waits for the gradient of each, and is not asked to look for unused ones."""
    monkeypatch.setattr(torch, 'autocast', lambda *args, **kwargs: nullcontext())  # knows no meta device
    shown = set()

    def check(name: str) -> None:
        cfg = load_config(name)
        heads = [str((cfg.model.get(head) or {}).get('type')) for head in ('head', 'decode_head', 'target_generator')]
        backbone = cfg.model.get('backbone') or {}
        options = [backbone.get(key) for key in ('abs_pos_embed', 'rel_pos_bias', 'out_type', 'masked_input')]
        kind = str([cfg.model.type, heads, options, cfg.model.get('auxiliary_head'), 'layer_scale_init' in backbone])
        if kind in shown or cfg.model.type in ('beit_mm.MultiScaleTTA', 'beit_mm.DiscreteVAE'):
            return
        shown.add(kind)
        model = build_on_meta(name).train()
        with torch.device('meta'):
            sum(losses_of(model)).backward()
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        assert not [name for name, parameter in trained.items() if parameter.grad is None]
        model.zero_grad()

    check_all(ROWS, check)
    assert len(shown) > 10
    assert not load_config('beit/pretrain_800e.py').model_wrapper_cfg.get('find_unused_parameters')


def test_no_two_configs_write_to_one_folder():
    folders = {}
    for name in ALL:
        folders.setdefault(load_config(name).get('work_dir', f'work_dirs/{Path(name).stem}'), []).append(name)
    assert not [names for names in folders.values() if len(names) > 1]


def test_headers_say_everything():

    def check(name: str) -> None:
        header = header_of(name)
        keys = ('Command', 'Scales', 'Model', 'Result') if name.endswith('_ms.py') else SECTIONS
        assert [key for key in keys if not re.search(rf'^{key}: ', header, re.M)] == []
        assert len(header.splitlines()[0]) > 20
        for path in re.findall(r'configs/[\w./]+\.py', header):
            assert (ROOT / path).is_file(), path
        for path in re.findall(
            r'(?<![\w/])((?:[a-z_.]+/)?(?:pretrain|finetune|setr|upernet(?!_beit)|discrete)\w+\.py)', header
        ):  # upernet_beit_*.py are the released code's
            beside, above = ROOT / 'configs' / Path(name).parent / path, ROOT / 'configs' / path
            assert beside.is_file() or above.is_file(), path

    check_all(ROWS, check)


def test_options_in_headers_name_what_exists():
    """A key that nobody reads is merged without a word."""
    new = {
        'model.test_cfg.precision',
        'model.backbone.with_cp',
        'model.backbone.init_cfg.checkpoint',
        'optim_wrapper.accumulative_counts',
        'model.checkpoint',
        'model.decoder_checkpoint',
    }

    def check(name: str) -> None:
        cfg = load_config(name)
        for options in options_in(header_of(name)):
            for option in options.split():
                key = option.partition('=')[0]
                value = cfg
                for part in () if key in new else key.split('.'):
                    assert isinstance(value, list) or part in value, key
                    value = value[int(part) if isinstance(value, list) else part]

    check_all(ROWS, check)


@pytest.mark.parametrize('line', ['Shorter', 'Options'])
def test_shorter_runs_end_where_their_schedules_end(line):

    def check(name: str) -> None:
        section = re.search(rf'^{line}: (.*?)(?=^\w+: |\Z)', header_of(name), re.M | re.S)
        for options in options_in(section[1]) if section else ():
            if 'train_cfg' not in options:
                continue
            cfg = Config(load_config(name).to_dict())
            cfg.merge_from_dict(parse_options(options.split()))
            loop, last = cfg.train_cfg, cfg.param_scheduler[-1]
            # PolyLR arrives one step before its `end`.
            assert last.end == (loop.get('max_epochs') or loop.max_iters + (last.type == 'PolyLR'))

    check_all([name for name in ROWS if not name.startswith('dvae')], check)


def test_schedules_of_the_demo_end_where_training_ends():

    def check(name: str) -> None:
        cfg = load_config(name)
        last = cfg.param_scheduler[-1]
        # PolyLR arrives one step before its `end`.
        assert last.end == (cfg.train_cfg.get('max_epochs') or cfg.train_cfg.max_iters + (last.type == 'PolyLR'))

    check_all(sorted(set(ALL) - set(ROWS)), check)


def test_hooks_stand_where_they_act():
    common = [
        'FitCheckHook',
        'StepSeedHook',
        'ThroughputHook',
        'UnreadableImagesHook',
        'CheckpointMetaHook',
        'BadStepHook',
        'InterruptionHook',
    ]

    def check(name: str) -> None:
        cfg = load_config(name)
        teaches = cfg.model.type == 'beit_mm.DINOPretrainer'
        reconstructs = cfg.model.type in ('beit_mm.BEiTPretrainer', 'beit_mm.BEiTV2Pretrainer', 'beit_mm.DiscreteVAE')
        reconstructs |= teaches and cfg.model.head is not None
        ours = [hook.type.removeprefix('beit_mm.') for hook in cfg.custom_hooks if hook.type.startswith('beit_mm.')]
        assert ours == common + ['ReconstructionHook'] * reconstructs + ['DINOHook'] * teaches
        assert cfg.default_hooks.checkpoint.type == 'beit_mm.CheckpointHook'

    check_all(ALL, check)


def test_moving_average_is_two_options():
    text = (ROOT / 'configs/_base_/schedules/finetune_adamw_bs1024_100e.py').read_text()
    cfg = Config(load_config('beit/finetune_in1k_100e.py').to_dict())
    options = re.findall(r'default_hooks\.ema\.\w+=\S+', text)
    cfg.merge_from_dict(parse_options(options))
    assert cfg.default_hooks.ema == dict(type='EMAHook', momentum=0.0001)  # the released code's decay of 0.9999
    assert HOOKS.get(cfg.default_hooks.ema.type) is not None


def test_options_of_the_readme_are_taken():
    """Each is merged into a config that it is meant for, and what it changes is built."""
    configs = {
        'train_dataloader': 'beit/pretrain_300e.py',
        'custom_hooks': 'beit/pretrain_300e.py',
        'optim_wrapper': 'beit/pretrain_300e.py',
        'model.backbone': 'beit/finetune_in1k_100e.py',
        'model.layers': 'beit/linear_probe_in1k_50e.py',
        'model.feature': 'beit/linear_probe_in1k_50e.py',
        'model.test_cfg': 'beit/setr_pup_512_ade20k_160k.py',
        'default_hooks': 'beit/finetune_in1k_100e.py',
    }
    rows = re.findall(r'^\| .* \| `(\w+\..*)`.*\|$', (ROOT / 'configs/beit/README.md').read_text(), re.M)
    assert len(rows) > 10

    def check(row: str) -> None:
        options = re.findall(r'[\w.]+=[\w.-]+', row)
        cfg = Config(load_config(next(config for key, config in configs.items() if row.startswith(key))).to_dict())
        for option in options:
            cfg.merge_from_dict(parse_options([option]))
        init_default_scope(cfg.default_scope)
        if row.startswith('model'):
            with torch.device('meta'):
                MODELS.build(cfg.model)
        for transform in cfg.train_dataloader.dataset.pipeline:
            TRANSFORMS.build(transform)
        for hook in cfg.custom_hooks:
            if 'max_rate' in hook:
                HOOKS.build(hook)
        assert cfg.optim_wrapper.dtype in ('bfloat16', 'float16')

    check_all(rows, check)


def test_snippets_of_the_readme_are_configs(tmp_path):
    text = (ROOT / 'configs/beit/README.md').read_text().replace("'./", f"'{ROOT}/configs/beit/")
    neighbours, confusion = re.findall(r'```python\n(.*?)```', text, re.S)
    (tmp_path / 'neighbours.py').write_text(neighbours)
    cfg = Config.fromfile(tmp_path / 'neighbours.py')
    init_default_scope(cfg.default_scope)
    hook = HOOKS.build(cfg.default_hooks.knn)
    assert [config.dataset.data_root for config in hook.configs] == ['data/imagenet/train', 'data/imagenet/val']
    for transform in hook.configs[0].dataset.pipeline:
        TRANSFORMS.build(transform)
    (tmp_path / 'confusion.py').write_text(confusion)
    for metric in Config.fromfile(tmp_path / 'confusion.py').test_evaluator:
        METRICS.build(metric)
