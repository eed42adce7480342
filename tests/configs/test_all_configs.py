"""What holds for every config: it builds, says what it is, and stays in its own folder."""

import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from helpers import ROOT, build_on_meta, check_all, header_of, list_configs, load_config, model_on_meta, with_options
from mmengine import registry as mmengine_registries
from mmengine.config import Config
from mmengine.registry import init_default_scope

from beit_mm.registry import HOOKS, METRICS, TRANSFORMS

ROWS = list_configs()
ALL = list_configs(demo=True)
REGISTRIES = [value for name, value in vars(mmengine_registries).items() if name.isupper()]
SECTIONS = ('Command', 'Batch', 'Steps', 'Writes', 'Model', 'Result', 'Time', 'Shorter', 'Differs')


def types_in(value: object) -> set[str]:
    """Every `type` in nested dicts and lists."""
    if isinstance(value, dict):
        own = {value['type']} if isinstance(value.get('type'), str) else set()
        return own.union(*map(types_in, value.values()))
    return set().union(*map(types_in, value)) if isinstance(value, (list, tuple)) else set()


def options_in(text: str) -> list[list[str]]:
    """What stands behind each --cfg-options, continued on the lines below it."""
    return [match.split() for match in re.findall(r'--cfg-options((?:\s+[\w.]+=[^\s,;)]+)+)', text)]


def build(cfg: Config) -> None:
    """The model, the transforms, and the hooks and metrics that options name."""
    model_on_meta(cfg)
    init_default_scope(cfg.default_scope)
    for loader in filter(None, (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader)):
        for transform in loader.dataset.pipeline:
            TRANSFORMS.build(transform)
    if cfg.val_evaluator:  # ImageNet-22K has no validation images
        METRICS.build(cfg.val_evaluator)


def test_every_model_and_pipeline_builds_and_every_type_is_registered():
    known: set[tuple[str, str]] = set()

    def check(name: str) -> None:
        cfg = load_config(name)
        build(cfg)
        scope = cfg.default_scope
        for type_name in types_in({key: value for key, value in cfg.to_dict().items() if key != 'model'}):
            for registry in REGISTRIES if (scope, type_name) not in known else ():
                with registry.switch_scope_and_registry(scope) as scoped:
                    if scoped.get(type_name) is not None:
                        known.add((scope, type_name))
            assert (scope, type_name) in known, type_name

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
        cfg, model = load_config(name), build_on_meta(name)
        if 'large' in name or cfg.model.type in ('beit_mm.MultiScaleTTA', 'beit_mm.DiscreteVAE') or id(model) in shown:
            return
        shown.add(id(model.train()))
        with torch.device('meta'):
            sum(losses_of(model)).backward()
        assert not [part for part, value in model.named_parameters() if value.requires_grad and value.grad is None]
        assert not cfg.model_wrapper_cfg.get('find_unused_parameters')
        model.zero_grad()

    check_all(ROWS, check)
    assert len(shown) > 10


def test_no_two_configs_write_to_one_folder():
    folders = [load_config(name).get('work_dir', f'work_dirs/{Path(name).stem}') for name in ALL]
    assert len(set(folders)) == len(folders)


def test_headers_say_everything_and_name_files_that_exist():
    recipe = r'(?<![\w/])((?:[a-z_.]+/)?(?:pretrain|finetune|setr|upernet(?!_beit)|discrete)\w+\.py)'

    def check(name: str) -> None:
        header, beside = header_of(name), ROOT / 'configs' / Path(name).parent
        assert [key for key in SECTIONS if not re.search(rf'^{key}: ', header, re.M)] == []
        assert len(header.splitlines()[0]) > 20
        for path in re.findall(r'configs/([\w./]+\.py)', header) + re.findall(recipe, header):
            assert (beside / path).is_file() or (ROOT / 'configs' / path).is_file(), path

    check_all(ROWS, check)


def test_demos_start_from_the_last_file_that_another_demo_writes():
    written_to = {'caltech101_dvae': 'dvae'}  # --work-dir of the headers: config; else the folder has its name

    def check(name: str) -> None:
        text = (ROOT / 'configs' / name).read_text()
        for folder, file in re.findall(r'work_dirs/(\w+)/((?:iter|epoch)_\d+\.pth)', text):
            loop = load_config(f'demo/{written_to.get(folder, folder)}.py').train_cfg
            last = f'iter_{loop.max_iters}.pth' if 'max_iters' in loop else f'epoch_{loop.max_epochs}.pth'
            assert file == last, f'work_dirs/{folder}/{file}, but {last} is the last one'

    check_all([name for name in ALL if name.startswith('demo/')], check)


def test_options_in_headers_build_and_end_where_their_schedules_end():
    def check(name: str) -> None:
        if name.startswith('demo/'):  # the others' are those of tests/facts.py
            assert_schedule_ends(load_config(name))
        for options in options_in(header_of(name)):
            build(cfg := with_options(name, options))
            if any(option.startswith('train_cfg.') for option in options):
                assert_schedule_ends(cfg)

    check_all(ALL, check)


def assert_schedule_ends(cfg: Config) -> None:
    """With the training; PolyLR arrives one step before its `end`."""
    loop, last = cfg.train_cfg, cfg.param_scheduler[-1]
    assert last.end == (loop.get('max_epochs') or loop.max_iters + (last.type == 'PolyLR'))


def test_hooks_stand_where_they_act():
    common = 'FitCheck StepSeed Throughput UnreadableImages CheckpointMeta BadStep Interruption'.split()

    def check(name: str) -> None:
        cfg = load_config(name)
        teaches = cfg.model.type == 'beit_mm.DINOPretrainer'
        reconstructs = cfg.model.type in ('beit_mm.BEiTPretrainer', 'beit_mm.BEiTV2Pretrainer', 'beit_mm.DiscreteVAE')
        reconstructs |= teaches and cfg.model.head is not None
        ours = [hook.type for hook in cfg.custom_hooks if hook.type.startswith('beit_mm.')]
        wanted = common + ['Reconstruction'] * reconstructs + ['DINO'] * teaches
        assert ours == [f'beit_mm.{hook}Hook' for hook in wanted]
        assert cfg.default_hooks.checkpoint.type == 'beit_mm.CheckpointHook'

    check_all(ALL, check)


def documented_options() -> Iterator[tuple[str, str]]:
    """Each row of the table of options, and a config that it is meant for."""
    of_key = {
        'model.layers': 'beit/linear_probe_in1k_50e.py',
        'model.test_cfg': 'beit/setr_pup_512_ade20k_160k.py',
        'model.': 'beit/finetune_in1k_100e.py',
        'default_hooks.ema': 'beit/finetune_in1k_100e.py',
    }
    for row in re.findall(r'^\| .* \| `(\w+\..*)`.*\|$', (ROOT / 'configs/beit/README.md').read_text(), re.M):
        yield row, next((of_key[key] for key in of_key if row.startswith(key)), 'beit/pretrain_300e.py')


@pytest.mark.parametrize(('row', 'name'), list(documented_options()))
def test_options_of_the_readme_are_taken(row, name):
    for options in map(str.split, re.split('`, `', row)):
        options = [option for option in options if '=' in option]
        build(cfg := with_options(name, [re.sub(r'[`(].*', '', option) for option in options]))
        for hook in (cfg.custom_hooks[3], cfg.default_hooks.get('ema')):  # accepted rates, moving average
            assert hook is None or HOOKS.build(hook)


def test_snippets_of_the_readme_build(tmp_path):
    text = (ROOT / 'configs/beit/README.md').read_text().replace("'./", f"'{ROOT}/configs/beit/")
    neighbours, confusion = re.findall(r'```python\n(.*?)```', text, re.S)
    (tmp_path / 'neighbours.py').write_text(neighbours)
    (tmp_path / 'confusion.py').write_text(confusion)
    cfg = Config.fromfile(tmp_path / 'neighbours.py')
    init_default_scope(cfg.default_scope)
    hook = HOOKS.build(cfg.default_hooks.knn)
    assert [config.dataset.data_root for config in hook.configs] == ['data/imagenet/train', 'data/imagenet/val']
    for built in (*hook.configs[0].dataset.pipeline, *Config.fromfile(tmp_path / 'confusion.py').test_evaluator):
        (TRANSFORMS if built in hook.configs[0].dataset.pipeline else METRICS).build(built)
