"""How a file's images are normalised: by its user, the file, its layout, or ImageNet. Truth: timm's own configs."""

import argparse
import re
from pathlib import Path

import mmpretrain
import numpy as np
import pytest
import timm
import torch
from calls import task_of
from labelled import classifier_config, make_images
from mmengine.config import Config
from mmengine.registry import DefaultScope
from peers import HEADS, ours, timm_peer
from timm.models import beit, save_for_hf

from beit_mm import ClassificationInferencer, FeatureExtractor
from beit_mm import __main__ as command
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.errors import UserError
from beit_mm.models import BEiTBackbone
from beit_mm.models.tokenizers.vqkd_training import BEiTTeacher
from beit_mm.own_images.images import find_images
from beit_mm.registry import MODELS

CONFIGS = {f'{name}.{tag}': cfg for name, of_name in beit.default_cfgs.items() for tag, cfg in of_name.cfgs.items()}
BEIT, BEIT_V2 = 'beit_base_patch16_224.in22k_ft_in22k', 'beitv2_base_patch16_224.in1k_ft_in22k'
LEVELS = dict(mean=[90.0, 100.0, 110.0], std=[40.0, 50.0, 60.0])


def truth_of(cfg) -> object:
    """Mean and std of timm's config, in pixels 0-255."""
    return pytest.approx([255 * value for value in (*cfg.mean, *cfg.std)], rel=1e-4)


def narrow(name: str, **options):
    return timm.create_model(name, embed_dim=64, depth=2, num_heads=1, **options)


def normalisation(path: Path, **mean_std) -> tuple[list[float], str]:
    found, warning = Checkpoint.open(path, **mean_std).normalisation
    return [*found['mean'], *found['std']], warning


@pytest.mark.parametrize('name', CONFIGS)
def test_timms_beits_say_it_by_their_names(name, tmp_path, warnings):
    """Those of BEiT v2 have the layout of BEiT's and other statistics."""
    torch.save(timm_peer('classification', 'per_layer').state_dict(), tmp_path / f'{name}.pth')
    mean_std, warning = normalisation(tmp_path / f'{name}.pth')
    assert mean_std == truth_of(CONFIGS[name]) and not warning and not warnings()


@pytest.mark.parametrize('name', [BEIT, BEIT_V2, 'deit_small_patch16_224', 'vit_base_patch16_224.augreg_in21k'])
def test_what_timm_writes_beside_the_weights_is_believed(name, tmp_path, warnings):
    model = narrow(name)
    save_for_hf(model, tmp_path / 'hub')
    mean_std, _ = normalisation(tmp_path / 'hub')
    truth = timm.data.resolve_model_data_config(model)
    assert mean_std == truth_of(argparse.Namespace(**truth)) and not warnings()


@pytest.mark.parametrize('name', [BEIT, 'vit_base_patch16_224.mae', 'deit3_small_patch16_224'])
def test_under_another_name_the_layout_shows_it_and_a_warning_says_so(name, tmp_path, warnings):
    """BEiT's with bias tables 0.5; plain ViTs, also those with LayerScale, ImageNet's."""
    model = narrow(name)
    torch.save(model.state_dict(), tmp_path / 'weights.pth')
    mean_std, warning = normalisation(tmp_path / 'weights.pth')
    assert mean_std == truth_of(argparse.Namespace(**model.pretrained_cfg))
    assert warnings() == [warning] and str(tmp_path / 'weights.pth') in warning
    # fine-tuned weights of BEiT v2 have BEiT's layout
    advice = '--mean 123.675,116.28,103.53 --std 58.395,57.12,57.375' if name == BEIT else '--mean'
    assert advice in warning


@pytest.mark.parametrize('part', ['cls_pt_layers.0.norm1.weight', 'decode_head'])
def test_pretrained_beit_v2_and_segmentors_have_imagenets_in_spite_of_the_layout(part, tmp_path):
    """As microsoft/unilm's `beit2/run_beitv2_pretraining.py` and all of its ADE20K configs."""
    weights = timm_peer('features', 'shared').state_dict() | {part: torch.ones(32)}
    if part == 'decode_head':
        weights = ours('segmentation', 'per_layer').state_dict()
    torch.save(weights, tmp_path / 'weights.pth')
    mean_std, warning = normalisation(tmp_path / 'weights.pth')
    assert mean_std == truth_of(CONFIGS[BEIT_V2]) and warning


def test_openmmlabs_files_say_it_by_their_config_or_their_name(tmp_path, warnings):
    weights = ours('classification', 'per_layer').state_dict()
    preprocessor = dict(LEVELS, bgr_to_rgb=True, second_mean=[1, 2, 3], second_std=[4, 5, 6], size=(512, 512))
    for config in (dict(data_preprocessor=preprocessor), dict(model=dict(data_preprocessor=preprocessor))):
        config['train_dataloader'] = dict(dataset=dict(pipeline=[dict(type='Normalize', mean=[7] * 3, std=[8] * 3)]))
        meta = dict(cfg=Config(config).pretty_text, epoch=3)
        torch.save(dict(state_dict=weights, meta=meta), tmp_path / 'epoch_3.pth')
        assert normalisation(tmp_path / 'epoch_3.pth') == (LEVELS['mean'] + LEVELS['std'], '')
    name = 'beit-base_3rdparty_in1k_20221114-c0a4df23.pth'
    torch.save(dict(state_dict=weights, meta={}), tmp_path / name)
    configs = Path(mmpretrain.__file__).parent / '.mim/configs/beit/benchmarks'
    truth = Config.fromfile(configs / 'beit-base-p16_8xb64_in1k.py').data_preprocessor
    mean_std, _ = normalisation(tmp_path / name)
    assert mean_std == [*truth.mean, *truth.std] and not warnings()


def test_a_file_that_is_called_demo_is_not_the_packaged_one(tmp_path, warnings):
    torch.save(timm_peer('features', 'per_layer').state_dict(), tmp_path / 'demo.pth')
    mean_std, warning = normalisation(tmp_path / 'demo.pth')
    assert mean_std == [127.5] * 6 and warnings() == [warning]


@pytest.mark.parametrize('given', [False, True])
def test_all_that_read_a_file_agree_and_warn_once(given, tmp_path, warnings):
    """Truth where nothing is given: timm's config of the model."""
    weights = narrow(BEIT, num_classes=3).state_dict()
    torch.save(weights, file := tmp_path / 'weights.pth')
    images = make_images(tmp_path / 'images', per_class=40)
    options = LEVELS if given else {}
    found = [
        FeatureExtractor(file, 'cpu', **options),
        ClassificationInferencer(file, 'cpu', **options).model.data_preprocessor,
        BEiTTeacher(file, **options),
    ]
    plan = task_of(find_images(images), 'finetune', str(file), device='cpu', **options).plan
    mean_std = [one.mean.flatten().tolist() + one.std.flatten().tolist() for one in found]
    for read in (*mean_std, plan.preprocessing['mean'] + plan.preprocessing['std']):
        assert read == (LEVELS['mean'] + LEVELS['std'] if given else truth_of(CONFIGS[BEIT]))
    assert len(warnings()) == (0 if given else 4) and plan.assumed == ('' if given else warnings()[0])


def test_a_backbone_knows_what_its_file_said(tmp_path, warnings):
    meta = dict(preprocessing=dict(LEVELS, size=[48, 48]), architecture=dict(num_heads=HEADS))
    torch.save(dict(state_dict=timm_peer('features', 'vit').state_dict(), meta=meta), tmp_path / 'weights.pth')
    backbone = BEiTBackbone.from_checkpoint(tmp_path / 'weights.pth')
    assert FeatureExtractor(backbone).mean.flatten().tolist() == LEVELS['mean'] and not warnings()
    backbone.load_report = None
    assert FeatureExtractor(backbone).mean[0].item() == pytest.approx(123.675) and len(warnings()) == 1


def test_the_users_hold_in_place_of_a_stored_config(tmp_path):
    config = classifier_config(tmp_path, tmp_path)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        state = MODELS.build(config.model).state_dict()
    stored = dict(model=config.model.to_dict(), test_dataloader=config.test_dataloader.to_dict())
    stored['test_dataloader']['dataset']['pipeline'] = config.test_dataloader.dataset.pipeline
    torch.save(
        dict(state_dict=state, meta=dict(config_dict=stored, architecture=dict(num_heads=4))), tmp_path / 'c.pth'
    )
    for path, expected in ((dict(), [127.5] * 3), (dict(mean=LEVELS['mean']), LEVELS['mean'])):
        preprocessor = ClassificationInferencer(tmp_path / 'c.pth', 'cpu', **path).model.data_preprocessor
        assert preprocessor.mean.flatten().tolist() == expected and preprocessor.std.flatten().tolist() == [127.5] * 3
    with pytest.raises(UserError, match='3 channels; mean has 2'):
        ClassificationInferencer(tmp_path / 'c.pth', 'cpu', mean=[1.0, 2.5])


READERS = dict(
    embed='x.jpg', classify='x.jpg', segment='x.jpg', reconstruct='x.jpg', attention='x.jpg', export='x.onnx'
)


@pytest.mark.parametrize('verb', READERS)
def test_the_options_of_every_verb_reach_its_checkpoint(verb, monkeypatch):
    def opened(source, part='pretrained', **mean_std):
        raise UserError(f'opened with {mean_std}')

    monkeypatch.setattr(Checkpoint, 'open', opened)
    with pytest.raises(UserError, match=re.escape("{'mean': [1.0, 2.5, 3.0], 'std': [50.0]}")):
        command.main([verb, 'weights.pth', READERS[verb], '--mean', '1,2.5,3', '--std', '50'])


@pytest.mark.parametrize(
    'mean_std', [dict(mean=[0.485, 0.456, 0.406]), dict(std=0.5), dict(std=[50, 0, 50]), dict(mean=np.nan)]
)
def test_numbers_that_pixels_up_to_255_cannot_have_are_refused(mean_std, tmp_path):
    with pytest.raises(UserError, match='0-255'):
        Checkpoint.open('demo', **mean_std)
    assert Checkpoint.open('demo', mean=0, std=255).normalisation[0] == dict(mean=[0.0] * 3, std=[255.0] * 3)


def test_bands_have_no_usual_statistics(tmp_path):
    backbone = dict(ours('features', 'per_layer', in_channels=5)['backbone'].state_dict())
    meta = dict(architecture=dict(num_heads=HEADS))
    torch.save(dict(state_dict=backbone, meta=meta), tmp_path / 'bands.pth')
    for mean_std in ({}, dict(mean=[1.5] * 5), dict(mean=[2.5] * 3, std=[2.5] * 3)):
        with pytest.raises(UserError, match='5 channels'):
            FeatureExtractor(tmp_path / 'bands.pth', **mean_std)
    assert len(FeatureExtractor(tmp_path / 'bands.pth', mean=[2.5] * 5, std=4.5).std) == 5
