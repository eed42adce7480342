"""Which images are held out, and what a plan says as a config."""

import math
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch
from calls import call_of, described, task_of
from helpers import load_config
from label_maps import make_label_maps
from labelled import make_images, save_backbone
from mmengine.config import Config
from peers import dinov2_layout

import beit_mm
from beit_mm.apis import configs, rebuild
from beit_mm.apis.commands import merge_options
from beit_mm.apis.configs import write_config
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import plain_vits
from beit_mm.datasets.image_folder import ImageFolder, UnlabeledImages
from beit_mm.errors import UserError
from beit_mm.own_images import images as finding
from beit_mm.own_images import segmentation, task
from beit_mm.own_images.classification import Classification
from beit_mm.own_images.images import find_images, write_lists
from beit_mm.own_images.label_maps import find_label_maps
from beit_mm.own_images.segmentation import HEADS
from beit_mm.own_images.task import Task
from beit_mm.registry import MODELS


def make_folder(root: Path, **classes: int) -> Path:
    """Empty files that are listed as images: <class>/<number>.jpg, or <number>.jpg for the class `_`."""
    for name, number in classes.items():
        folder = root if name == '_' else root / name
        folder.mkdir(parents=True, exist_ok=True)
        for index in range(number):
            (folder / f'{index}.jpg').touch()
    return root


def test_a_tenth_of_each_class_is_held_out_and_learned_from_never(tmp_path):
    images = find_images(make_folder(tmp_path / 'all', cat=80, dog=50, bird=1))
    names = {*images.held_out.names}
    assert Counter(images.held_out.names.values()) == dict(cat=8, dog=5) and not names & {*images.train.names}
    assert len(images.train.names) == 131 - 13 and images.classes == ['bird', 'cat', 'dog']
    assert find_images(tmp_path / 'all') == images
    assert names != {*(f'cat/{i}.jpg' for i in range(8)), *(f'dog/{i}.jpg' for i in range(5))}
    images = finding.list_folder(make_folder(tmp_path / 'odd', **{f'c{i}': 1 + i % 2 for i in range(20)}))
    train, _ = finding.hold_out(images)
    assert {*train.names.values()} == {*images.names.values()}  # one image of each class is learned from


def test_even_choices_leave_as_much_out_at_both_ends_as_between_any_two():
    assert finding.evenly(iter(range(9)), 3) == [1, 4, 7] and finding.evenly(range(10), 3) == [1, 5, 8]
    assert finding.evenly(range(5), 20) == [*range(5)] and finding.evenly([], 3) == []


@pytest.mark.parametrize(
    ('folders', 'held_out'),
    [
        (('train', 'val'), 'val'),
        (('train', 'valid', 'test'), 'valid'),  # as Roboflow names them
        (('training', 'validation'), 'validation'),
        (('train', 'test'), None),
        (('train', '.cache'), None),
    ],
)
def test_parts_of_a_dataset_are_no_classes(tmp_path, folders, held_out):
    for name in folders:
        make_folder(tmp_path / name, cat=70, dog=50)
    images = find_images(tmp_path)
    assert images.classes == ['cat', 'dog'] and images.train.root == tmp_path / folders[0]
    assert images.held_out.root == tmp_path / (held_out or folders[0])
    assert len(images.train.names) == (120 if held_out else 108) and find_images(tmp_path / folders[0]) == images


def test_folders_that_are_classes(tmp_path):
    for number, (folders, classes, held_out) in enumerate(
        (
            (dict(_=120, cat=10), 0, 13),  # not all in folders
            ({'0': 60, '1': 60}, 2, 12),
            (dict(train=150), 0, 15),  # nothing but that folder
            ({f'c{i}': 1 for i in range(150)}, 0, 15),  # of a class there would be none to learn from
        )
    ):
        images = find_images(make_folder(tmp_path / str(number), **folders))
        assert (len(images.classes), len(images.held_out.names)) == (classes, held_out)
    with pytest.raises(ValueError, match='45 .* 5 held out.* 100'):
        find_images(make_folder(tmp_path / 'few', _=50))


def test_processes_that_would_plan_the_same_run_are_refused(monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '2')  # by torchrun
    with pytest.raises(UserError, match='^pretrain .*one process.*dist_train'):
        call_of('pretrain', 'images')


def test_classes_that_nothing_would_be_learned_of_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_folder(tmp_path / 'each', **{f'c{i}': 1 for i in range(150)})
    make_folder(tmp_path / 'val/train', cat=60, dog=60)
    make_folder(tmp_path / 'val/val', cat=2, bird=2)
    for folder, named in dict(each='c0, c1, .* held-out images: c', val='cat, dog; .* held-out images: bird;').items():
        with pytest.raises(UserError, match=named):
            beit_mm.finetune(folder, 'run')


def test_a_class_without_images_is_said(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(finding, 'warn', said.append)
    make_folder(tmp_path, cat=60, dog=60, bird=0)
    assert find_images(tmp_path).classes == ['cat', 'dog']
    assert len(said) == 1 and 'bird' in said[0] and 'dog' not in said[0]


def test_lists_are_read_back_by_our_datasets_with_any_name(tmp_path):
    """Spaces, digits at the end, quotes, line ends, and bytes that are no UTF-8."""
    names = ('a class', ' cats ', 'b 7', '"q" 1', '"q\\u0041"', '#c', 'a\x85\nb\r', '\ufeffx', os.fsdecode(b'caf\xe9'))
    root = make_folder(tmp_path / 'images', **dict.fromkeys(names, 20))
    images = find_images(root)
    write_lists(images, tmp_path / 'lists')
    for name, listed in (('train', images.train), ('held_out', images.held_out)):
        settings = images.dataset(tmp_path / 'lists', name)
        labelled = ImageFolder(**settings, classes=str(tmp_path / 'lists/classes.txt'), pipeline=[])
        found = [(labelled[i]['img_path'], labelled.CLASSES[labelled[i]['gt_label']]) for i in range(len(labelled))]
        assert found == [(str(root / path), of) for path, of in listed.names.items()]
        unlabelled = UnlabeledImages(**settings, pipeline=[])
        assert [unlabelled[i]['img_path'] for i in range(len(unlabelled))] == [path for path, _ in found]
    assert f'\na class/0.jpg {images.classes.index("a class")}\n' in (tmp_path / 'lists/train.txt').read_text()


@pytest.fixture
def images(tmp_path):
    return find_images(make_folder(tmp_path / 'images', cat=80, dog=80))


def by_type(pipeline: list[dict]) -> dict[str, dict]:
    return {step['type']: step for step in pipeline}


def written(task: Task, folder: Path) -> tuple[Config, dict[str, dict]]:
    """The config of 400 steps of pretraining, and its transforms."""
    base, settings = task.settings('pretrain', folder, 400, {})
    write_config(folder / 'config.py', 'Text.', base, settings)
    cfg = Config.fromfile(folder / 'config.py')
    return cfg, by_type(cfg.train_dataloader.dataset.pipeline)


def test_a_written_config_is_an_ordinary_one(images, tmp_path):
    """A mask for each patch, a token for each patch, a schedule to the last step."""
    task = task_of(images, 'pretrain', device='cpu', workers=3)
    task.plan.targets = rebuild.trained_tokenizer(tmp_path / 'tokenizer.pth')
    cfg, steps = written(task, tmp_path)
    # validated before the first step too: the packaged weights predict tokens already
    assert cfg.train_cfg == dict(type='beit_mm.IterLoop', max_iters=400, val_interval=400, val_begin=0)
    assert cfg.param_scheduler[1]['end'] == 400 and cfg.param_scheduler[0]['end'] == 20
    assert cfg.train_dataloader.num_workers == 3 and cfg.train_dataloader.batch_size <= 144 / 8
    rows = cfg.model.backbone.img_size[0] // cfg.model.backbone.patch_size
    assert steps['beit_mm.BlockwiseMask']['grid'] == (rows, rows)
    stride = 2**cfg.model.target_generator.num_levels
    assert steps['beit_mm.TwoViewRandomResizedCrop']['second_size'] == (stride * rows, stride * rows)
    assert cfg.model.target_generator.checkpoint == str(tmp_path / 'tokenizer.pth')
    assert cfg.optim_wrapper.type == 'beit_mm.AutocastOptimWrapper'  # of the base


def test_a_gpu_gets_the_papers_config_and_dalles_tokens_where_they_lie(images, tmp_path, monkeypatch):
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    monkeypatch.setattr('torch.cuda.mem_get_info', lambda: (24 * 2**30, 24 * 2**30))
    plan = task_of(images, 'pretrain', device='cuda').plan
    assert plan.base == 'beit/pretrain_300e.py' and plan.targets is None and plan.size == (224, 224)
    assert math.log2(plan.batch).is_integer()
    (tmp_path / 'encoder.pkl').touch()
    task = task_of(images, 'pretrain', device='cuda')
    assert task.plan.targets == dict(type='beit_mm.DALLETokenizer', checkpoint=str(tmp_path / 'encoder.pkl'))
    cfg, steps = written(task, tmp_path)
    assert steps['beit_mm.TwoViewRandomResizedCrop']['second_size'] == (112, 112)  # as the paper's
    assert steps['beit_mm.BlockwiseMask'] == dict(type='beit_mm.BlockwiseMask', grid=(14, 14), num_masked=75)
    assert (cfg.model.backbone.arch, cfg.model.head.embed_dims, cfg.model.head.vocab_size) == ('small', 384, 8192)


def test_features_of_a_teacher_need_one_view_and_a_head_of_its_width(images, tmp_path, monkeypatch):
    monkeypatch.setattr('torch.cuda.mem_get_info', lambda: (24 * 2**30, 24 * 2**30))
    teacher = save_backbone(tmp_path / 'teacher.pth')  # of width 32
    for device, width in (('cpu', 128), ('cuda', 384)):
        recipe, _ = written(task_of(images, 'pretrain', 'none', tokenizer='demo', device=device), tmp_path)
        for name, outputs in ((None, 128), (teacher, 32), ('ema', width)):
            task = task_of(images, 'pretrain', targets='features', teacher=name, device=device)
            cfg, steps = written(task, tmp_path)
            assert steps['beit_mm.TwoViewRandomResizedCrop']['second_size'] is None and not task.plan.keeps_head
            assert (cfg.model.head.embed_dims, cfg.model.head.target_dims) == (width, outputs)
            assert cfg.model.target_generator == dict(type='beit_mm.FeatureTargets', teacher=name or 'demo')
            assert {cfg.val_evaluator.type, cfg.test_evaluator.type} == {'beit_mm.FeatureMetric'}
            hooks = [hook.type for hook in cfg.custom_hooks]
            assert hooks.count('beit_mm.TeacherMomentumHook') == (name == 'ema') and 'beit_mm.FitCheckHook' in hooks
            assert cfg.optim_wrapper == recipe.optim_wrapper


def test_a_strong_start_predicts_its_own_features_unless_told_otherwise(images, tmp_path, monkeypatch):
    monkeypatch.setattr('beit_mm.own_images.pretraining.NARROW', 16)
    start, other = save_backbone(tmp_path / 'start.pth'), save_backbone(tmp_path / 'other.pth')
    features = dict(targets='features')
    for options, teacher in (({}, start), (features, start), (features | dict(teacher=other), other)):
        task = task_of(images, 'pretrain', start, device='cpu', batch=64, **options)
        assert task.plan.teacher == teacher and task.stages == ['head', 'pretrain']
        assert task.decided()['targets'] == 'features' and task.decided()['teacher'] == teacher
        assert written(task, tmp_path)[0].optim_wrapper.optimizer.lr == 5e-6  # the rate that was tried
        again = task_of(images, 'pretrain', device='cpu', **task.decided())  # as a resumed run is planned
        assert again.plan.targets == task.plan.targets and again.most_steps == task.most_steps
        assert task.most_steps.get('pretrain') == (180 if teacher == start else None)
    for options in (dict(targets='tokens'), dict(tokenizer='demo')):
        assert task_of(images, 'pretrain', start, device='cpu', **options).plan.teacher is None
    assert task_of(images, 'pretrain', 'demo', device='cpu').plan.keeps_head  # which knows its tokens
    weights = dict(Checkpoint.open(start).state_dict)
    weights['head.lm_head.weight'] = torch.zeros(8192, 32)  # for tokens of DALL-E, which is not there
    torch.save(dict(state_dict=weights, meta=dict(architecture=dict(num_heads=4))), tmp_path / 'beit.pth')
    task = task_of(images, 'pretrain', tmp_path / 'beit.pth', device='cpu')
    assert task.plan.predicts_start and 'head' in described(task, 'advice')[0]
    assert 'pretrain' not in task_of(images, 'pretrain', start, device='cpu', steps=400).most_steps


def test_the_copy_of_a_start_is_a_file_and_sees_what_the_start_sees(images, tmp_path, monkeypatch):
    monkeypatch.setattr('beit_mm.own_images.pretraining.NARROW', 16)
    monkeypatch.setattr('torch.hub.get_dir', lambda: str(tmp_path))
    (tmp_path / 'checkpoints').mkdir()
    stored = save_backbone(tmp_path / 'stored.pth')
    monkeypatch.setattr('beit_mm.checkpoint.find.download', lambda url, path: shutil.copy(stored, path))
    given = dict(mean=[100.0] * 3, std=[50.0] * 3)
    task = task_of(images, 'pretrain', 'https://example.org/start.pth', device='cpu', **given)
    assert Path(task.plan.teacher).read_bytes() == Path(stored).read_bytes()
    model = MODELS.build(written(task, tmp_path)[0].model)
    for seen_by in (model.target_generator.frozen[0], model.data_preprocessor):
        assert (seen_by.mean.flatten().tolist(), seen_by.std.flatten().tolist()) == tuple(given.values())


LARGE, SMALL = 'dinov2_vitb14_reg4_pretrain', 'dinov2_vits14_reg4_pretrain'


@pytest.mark.parametrize(
    ('gib', 'stored', 'expected', 'tried'),
    [
        (24, [LARGE, SMALL], LARGE, 0),
        (24, [SMALL], SMALL, 1),  # the network does not have the first
        (1.5, [LARGE, SMALL], SMALL, 0),
        (24, [], 'demo', 1),
        (0.5, [LARGE, SMALL], 'demo', 0),
    ],
)
def test_a_fine_tuning_on_a_gpu_begins_with_a_released_model_that_fits(
    images, tmp_path, monkeypatch, gib, stored, expected, tried
):
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(tmp_path))
    monkeypatch.setattr('torch.hub.get_dir', lambda: str(tmp_path / 'hub'))
    monkeypatch.setattr('torch.cuda.mem_get_info', lambda: (gib * 2**30, 24 * 2**30))
    urls = []

    def unreachable(url: str, path: Path) -> None:
        urls.append(url)
        raise OSError('no route')

    monkeypatch.setattr('beit_mm.checkpoint.find.download', unreachable)
    for name in stored:
        shutil.copy(save_backbone(tmp_path / 'other.pth'), tmp_path / f'{name}.pth')
    task = task_of(images, 'finetune', device='cuda')
    assert Path(task.plan.init).stem == expected and len(urls) == tried
    said = described(task, 'advice')
    named = [LARGE, 'no route'] if expected == 'demo' else ['Apache-2.0', plain_vits()[expected]['figures']]
    assert bool(said) == (expected != 'demo' or tried == 1)
    assert not said or (all(text in said[0] for text in named) and '\n' not in said[0])
    assert task_of(images, 'finetune', 'demo', device='cuda').plan.init == 'demo' and len(urls) == tried
    taught = task_of(images, 'pretrain', device='cuda', targets='features').plan
    assert Path(taught.targets['teacher']).stem == expected and taught.init is None
    assert taught.advice == task.plan.advice
    monkeypatch.setattr('beit_mm.own_images.pretraining.NARROW', 16)  # the stand-ins have a width of 32
    going_on = task_of(images, 'pretrain', device='cuda').plan
    assert going_on.init == going_on.teacher == (None if expected == 'demo' else task.plan.init)
    assert going_on.advice == task.plan.advice
    assert task_of(images, 'pretrain', device='cuda', tokenizer='demo').plan.init is None


def test_a_teacher_by_address_is_kept_as_a_file_that_a_later_call_finds(tmp_path, monkeypatch):
    monkeypatch.setattr('torch.hub.get_dir', lambda: str(tmp_path))
    (tmp_path / 'checkpoints').mkdir()
    stored = save_backbone(tmp_path / 'stored.pth')
    monkeypatch.setattr('beit_mm.checkpoint.find.download', lambda url, path: shutil.copy(stored, path))
    teacher = call_of('pretrain', targets='features', teacher='https://example.org/teacher.pth').options['teacher']
    assert Path(teacher).is_absolute() and Path(teacher).read_bytes() == Path(stored).read_bytes()


def test_a_cpu_begins_with_the_packaged_weights_unless_told_otherwise(images):
    for init, tokenizer, *expected in (
        (None, None, 'demo', True, 'demo'),
        ('demo', 'demo', 'demo', True, 'demo'),
        (None, 'new', 'demo', False, None),
        ('none', 'demo', None, False, 'demo'),
        ('none', None, None, False, None),
    ):
        plan = task_of(images, 'pretrain', init, tokenizer=tokenizer, device='cpu').plan
        assert [plan.init, plan.keeps_head, (plan.targets or {}).get('checkpoint')] == expected
        assert plan.size == (96, 96)


def test_the_backbone_of_a_written_config_begins_with_the_weights_that_an_option_names(images, tmp_path):
    own, other = Checkpoint.open('demo').state_dict, MODELS.build(load_config('demo/pretrain.py').model.backbone)
    torch.save(other.state_dict(), tmp_path / 'other.pth')
    cfg, _ = written(task_of(images, 'pretrain', 'demo', device='cpu'), tmp_path)
    changed = Config(cfg.to_dict())
    merge_options(changed, [f'model.backbone.init_cfg.checkpoint={tmp_path}/other.pth'])
    for config, weights in ((cfg, own), (changed, other.state_dict(prefix='backbone.'))):
        model = MODELS.build(config.model)
        model.init_weights()
        name = 'backbone.blocks.4.mlp.fc2.weight'
        assert torch.equal(model.state_dict()[name], weights[name])
        assert torch.equal(model.head.lm_head.weight, own['head.lm_head.weight'])  # which the option does not name


def test_the_batch_of_a_new_tokenizer_is_said(images, tmp_path):
    for batch, expected in ((64, 16), (8, 8)):
        task = task_of(images, 'pretrain', tokenizer='new', device='cpu', batch=batch)
        _, settings = task.settings('tokenizer', tmp_path, 100, {})
        (said,) = described(task, 'tokenizer')
        assert settings['train_dataloader']['batch_size'] == expected and f' {expected} ' in said


@pytest.mark.parametrize('batch', [-1, 0, 145])
def test_a_batch_without_images_is_refused(images, batch):
    with pytest.raises(UserError, match='1 to 144'):
        task_of(images, 'pretrain', device='cpu', batch=batch)


def test_layers_that_begin_anew_learn_alike(images, tmp_path):
    for init, decay in ((None, 0.8), ('none', 1.0)):
        _, settings = task_of(images, 'finetune', init, device='cpu').settings('finetune', tmp_path, 100, {})
        assert settings['optim_wrapper']['paramwise_cfg']['layer_decay_rate'] == decay


def test_fine_tuning_pipelines_keep_the_ratio_of_edge_and_crop():
    base = load_config('demo/finetune_folder.py')
    steps = by_type(configs.pipeline_for_size(base.test_pipeline, (128, 128)))
    assert steps['ResizeEdge']['scale'] == 144 and steps['CenterCrop']['crop_size'] == (128, 128)  # 108 and 96
    steps = by_type(configs.pipeline_for_size(base.train_pipeline, (128, 96)))
    assert steps['beit_mm.RandomResizedCrop']['size'] == (128, 96) and base.test_pipeline[1].scale == 108


def test_a_narrow_segmentor_has_a_linear_layer(tmp_path):
    images = find_label_maps(make_label_maps(tmp_path / 'data', 12))
    wide = dinov2_layout(tmp_path / 'wide.pth', 256)
    plan, of_wide, of_call = (
        task_of(images, 'finetune', device='cpu', **options).plan
        for options in ({}, dict(init=wide), dict(head='setr_pup'))
    )
    assert [plan.head, of_wide.head, of_call.head] == ['linear', 'upernet', 'setr_pup']
    assert [plan.batch, of_wide.batch] == [4, 2]  # of 12 images; a wide one takes seconds for each


@pytest.mark.parametrize('patch_size', [8, 16])
def test_heads_see_four_pixels_at_the_finest_and_end_at_the_size_of_the_image(patch_size, tmp_path):
    images = find_label_maps(make_label_maps(tmp_path / 'data', 12))
    for head in ('upernet', 'setr_pup'):
        plan = task_of(images, 'finetune', 'none', device='cpu', head=head).plan
        plan.backbone['patch_size'] = patch_size
        found = HEADS[head].parts(plan, dict(in_channels=192))
        if head == 'upernet':
            assert [patch_size / scale for scale in found['neck']['rescales']] == [4, 8, 16, 32]
        else:
            assert 2 ** found['decode_head']['num_convs'] == patch_size


def test_a_pretraining_of_few_images_is_told_what_pays(images):
    told = [bool(described(task_of(images, 'pretrain', init, device='cpu'), 'pays')) for init in ('demo', 'none')]
    assert told == [True, False]


def sizes(width: int, depth: int = 12) -> dict[str, int]:
    return dict(embed_dims=width, num_layers=depth)


def test_the_batch_follows_from_memory_width_patches_and_images(images, monkeypatch):
    monkeypatch.setattr('torch.cuda.mem_get_info', lambda: (24 * 2**30, 24 * 2**30))
    for width, patches, most in ((768, 196, 120), (384, 392, 120), (768, 98, 240), (192, 49, 512)):  # 0.2 GiB for base
        assert task.largest_batch('cuda', sizes(width), patches) == pytest.approx(most)
    # GiB that autograd keeps for an image, in bfloat16, of a training step of the ADE20K configs
    for head, (width, depth), kept in (
        ('upernet', (384, 12), 0.63),
        ('upernet', (768, 12), 0.94),
        ('upernet', (1024, 24), 1.90),
        ('linear', (768, 12), 0.57),
        ('setr_pup', (768, 12), 1.71),
        ('masks', (768, 12), 1.36),
        ('masks_decoder', (768, 12), 1.75),
    ):
        free = 24 - 16 * (12 * width**2 * depth + 1e8) / 2**30
        most = segmentation.largest_batch_of_head(sizes(width, depth), 1024, head)
        assert free / (2 * kept) < most < free / (1.08 * kept)
    assert [task.largest_batch('cpu', sizes(width), 196) for width in (192, 768)] == [64, 16]
    assert task_of(images, 'pretrain', device='cpu').plan.batch == 16  # of 144 images: an epoch has several steps


@pytest.mark.parametrize(
    ('cat', 'dog', 'bird', 'balance', 'named', 'advised'),  # of these a tenth is held out
    [
        (100, 10, 50, False, ('9', 'dog', '90', 'cat'), True),
        (100, 10, 50, True, ('9', 'dog', '90', 'cat'), False),
        (20, 120, 50, False, ('18', 'cat', '108', 'dog'), True),  # 6 times as many
        (10, 8, 9, False, ('7', 'dog', '9', 'cat'), False),  # few, but equal
        (100, 25, 50, False, (), False),
    ],
)
def test_few_images_of_a_class_are_said(tmp_path, monkeypatch, cat, dog, bird, balance, named, advised):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)
    images = find_images(make_folder(tmp_path / 'images', cat=cat, dog=dog, bird=bird))
    said = ' '.join(described(task_of(images, 'finetune', device='cpu', balance=balance), 'balance'))
    assert [word for word in re.findall(r'\w+', said) if word.isdigit() or word in ('cat', 'dog')] == [*named]
    assert ('--balance' in said) == advised
    assert not described(task_of(images, 'pretrain', device='cpu'), 'balance')


def test_classes_without_a_held_out_image_and_images_beside_the_folders_are_named(tmp_path, monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)
    folder = make_folder(tmp_path / 'images', cat=90, dog=90, bird=2)
    said = described(task_of(find_images(folder), 'finetune', device='cpu'), 'untested')
    assert 'bird' in ' '.join(said) and 'dog' not in ' '.join(said)
    (folder / 'cat/0.jpg').rename(folder / 'sample.jpg')
    with pytest.raises(UserError, match='beside them, such as sample.jpg'):
        Classification.find(call_of('finetune', folder))


def test_class_folders_are_merged(tmp_path, monkeypatch):
    monkeypatch.setattr(finding, 'MIN_IMAGES', 10)
    make_images(tmp_path, per_class=12)
    images = Classification.find(call_of('finetune', tmp_path / 'train', merge='cold=blue,green')).images
    assert images.classes == ['cold', 'red']
    assert {path.split('/')[0]: name for path, name in (images.train.names | images.held_out.names).items()} == dict(
        blue='cold', green='cold', red='red'
    )
    write_lists(images, tmp_path / 'lists')
    settings = dict(images.dataset(tmp_path / 'lists', 'train'), classes=str(tmp_path / 'lists/classes.txt'))
    labels = {
        (sample['img_path'].split('/')[-2], sample['gt_label']) for sample in ImageFolder(**settings, pipeline=[])
    }
    assert labels == {('blue', 0), ('green', 0), ('red', 1)}
