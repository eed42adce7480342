"""The model index has every config with the published numbers of its row, and claims no result as ours."""

import re

import pytest
import yaml
from helpers import ROOT, list_configs

ENTRIES = {
    entry['Config'].removeprefix('configs/'): entry
    for path in sorted((ROOT / 'configs').glob('*/metafile.yml'))
    for entry in yaml.load(path.read_text(), yaml.BaseLoader)['Models']
}

# The paper's tables; ImageNet-1K top-1, then ADE20K mIoU
ABLATION = {  # with SETR-PUP
    'baseline': ('82.86', '44.65'),
    'random_mask': ('82.77', '42.93'),
    'pixels': ('81.04', '41.38'),
    'pixels_random_mask': ('80.50', '37.09'),
    'recover_all': ('82.59', '40.93'),
    'no_mask_recover_all': ('81.67', '36.73'),
}
PUBLISHED = {  # config -> the paper's figures and then the released code's, as they are printed
    'beit/pretrain_800e.py': '83.2 45.6 56.7',
    'beit/pretrain_300e.py': '82.86 44.65 44.86',
    'beit/pretrain_large_800e.py': '85.2 86.3 73.5',
    'beit/finetune_in1k_100e.py': '83.2 83.19',  # table of results, ablations
    'beit/finetune_384_in1k_10e.py': '84.6',
    'beit/finetune_large_in1k_50e.py': '85.2',
    'beit/finetune_large_384_in1k_10e.py': '86.3',
    'beit/finetune_cifar100_150e.py': '90.1',
    'beit/finetune_cifar100_150e_after_in1k.py': '91.8',
    'beit/linear_probe_in1k_50e.py': '56.7',
    'beit/linear_probe_large_in1k_50e.py': '73.5',
    'beit/setr_pup_512_ade20k_160k.py': '45.6 45.58',
    'beit/setr_pup_512_ade20k_160k_after_in1k.py': '47.7',
    'beit/setr_pup_512_ade20k_160k_supervised.py': '45.3',
    'beit/setr_pup_512_ade20k_160k_released_dino.py': '44.1 44.08',  # segmentation table, multi-task table
    'beit/upernet_512_ade20k_160k.py': '44.86',
    'beit_plus/pretrain_300e.py': '83.22 45.70 6.2994 0.04961',  # the last two: log of the released code
    'beit_plus/pretrain_in22k_150e.py': '83.7 96.6',
    'beit_plus/pretrain_large_in22k_150e.py': '86.0 97.6',
    'beit_plus/intermediate_in22k_90e.py': '85.2 86.8',
    'beit_plus/intermediate_large_in22k_90e.py': '87.396 88.4 88.6',
    'beit_plus/finetune_pt22k_in1k_100e.py': '83.7 96.6',
    'beit_plus/finetune_large_pt22k_in1k_50e.py': '86.0 97.6',
    'beit_plus/finetune_224_in1k.py': '85.2 97.6',
    'beit_plus/finetune_384_in1k.py': '86.8 86.820 98.124',
    'beit_plus/finetune_large_224_in1k.py': '87.396 98.282',
    'beit_plus/finetune_large_384_in1k.py': '88.4 88.408 98.602',
    'beit_plus/finetune_large_512_in1k.py': '88.6 88.600 98.658',
    'beit_plus/upernet_640_ade20k_160k.py': '53.6 53.61 54.2 54.26',
    'beit_plus/upernet_640_ade20k_160k_ms.py': '54.2 54.26',
    'beit_plus/upernet_large_640_ade20k_160k.py': '56.7 56.7 57.0 57.0',
    'beit_plus/upernet_large_640_ade20k_160k_ms.py': '57.0 57.0',
    'beit_v2/pretrain_300e.py': '85.0',
    'beit_v2/pretrain_1600e.py': '85.5 97.5 53.1',
    'beit_v2/pretrain_large_300e.py': '86.6',
    'beit_v2/pretrain_large_1600e.py': '87.3 98.2 56.7',
    'beit_v2/intermediate_in22k_90e.py': '86.5',
    'beit_v2/intermediate_large_in22k_90e.py': '88.4',
    'beit_v2/finetune_in1k_100e.py': '85.5 97.5',
    'beit_v2/finetune_pt300e_in1k_100e.py': '85.0',
    'beit_v2/finetune_after_in22k_in1k_30e.py': '86.5 98.0 86.458 97.978',
    'beit_v2/finetune_large_in1k_50e.py': '87.3 98.2',
    'beit_v2/finetune_large_pt300e_in1k_50e.py': '86.6',
    'beit_v2/finetune_large_after_in22k_in1k_20e.py': '88.4 98.6 88.370 98.578',
    'beit_v2/upernet_512_ade20k_160k.py': '53.1',
    'beit_v2/upernet_512_ade20k_160k_after_in22k.py': '53.5',
    'beit_v2/upernet_large_512_ade20k_160k.py': '56.7',
    'beit_v2/upernet_large_512_ade20k_160k_after_in22k.py': '57.5 57.54',
    **{f'ablation/finetune_{row}_in1k_100e.py': top1 for row, (top1, _) in ABLATION.items()},
    **{f'ablation/setr_pup_{row}_512_ade20k_160k.py': miou for row, (_, miou) in ABLATION.items()},
    **{f'ablation/pretrain_{row}_300e.py': ' '.join(both) for row, both in ABLATION.items() if row != 'baseline'},
    'ablation/pretrain_layer_scale_300e.py': '83.00 45.43',
    'ablation/finetune_layer_scale_in1k_100e.py': '83.00',
    'ablation/finetune_layer_scale_rel_pos_in1k_100e.py': '83.22',
    'ablation/upernet_layer_scale_512_ade20k_160k.py': '45.43',
    'ablation/upernet_layer_scale_rel_pos_512_ade20k_160k.py': '45.70',
    'ablation/pretrain_own_dvae_300e.py': '82.70',
    'ablation/finetune_own_dvae_in1k_100e.py': '82.70',
    'beit_dino/pretrain_beit_dino_300e.py': '82.9 46.85 4.2',
    'beit_dino/pretrain_dino_400e.py': '82.8 44.08 78.2 91.7',
    'beit_dino/finetune_beit_dino_in1k_100e.py': '82.9',
    'beit_dino/finetune_dino_in1k_100e.py': '82.8',
    'beit_dino/setr_pup_beit_dino_512_ade20k_160k.py': '46.85',
    'beit_dino/setr_pup_dino_512_ade20k_160k.py': '44.08 44.1',
    'dvae/dalle_8k_in1k.py': '0.0856',
    'dvae/discrete_vae_8k_in1k.py': '0.0880 82.70',
}
OTHERS = {  # mmpretrain's and mmsegmentation's metafiles
    'beit_plus/pretrain_300e.py': '83.1',
    'beit_plus/finetune_224_in1k.py': '85.28 97.59',
    'beit_plus/finetune_pt22k_in1k_100e.py': '83.1',
    'beit_plus/upernet_640_ade20k_160k.py': '53.08 53.84',
    'beit_plus/upernet_640_ade20k_160k_ms.py': '53.84',
    'beit_plus/upernet_large_640_ade20k_160k.py': '56.33 56.84',
    'beit_plus/upernet_large_640_ade20k_160k_ms.py': '56.84',
    'beit_v2/pretrain_300e.py': '85.0',
    'beit_v2/finetune_pt300e_in1k_100e.py': '85.0',
    'beit_v2/finetune_after_in22k_in1k_30e.py': '86.47 97.99',
}


def test_every_config_has_one_entry():
    assert list(ENTRIES) == list_configs()


def test_published_figures_are_those_of_the_tables():
    found, others = {}, {}
    for config, entry in ENTRIES.items():
        for row in entry['Published Results']:
            group = others if row['Source'].startswith('mm') else found
            group.setdefault(config, []).append(row['Value'])
    assert {config: ' '.join(values) for config, values in found.items()} == PUBLISHED
    assert {config: ' '.join(values) for config, values in others.items()} == OTHERS


def test_what_others_measured_is_marked_as_theirs():
    for config, entry in ENTRIES.items():
        assert set(entry) <= {'Name', 'In Collection', 'Config', 'Metadata', 'Published Results', 'Released Weights'}
        rows = entry['Published Results']
        for row in rows:
            assert list(row) == ['Task', 'Value', 'Source'], config
            assert row['Source'].startswith(
                ('paper, ', 'microsoft/unilm', 'mmpretrain', 'mmsegmentation', "the authors' log")
            ), config
        assert len({tuple(row.values()) for row in rows}) == len(rows), config


def test_released_weights_stand_once():
    weights = [weights for entry in ENTRIES.values() for weights in entry.get('Released Weights', ())]
    assert all(list(w) == ['URL', 'Holds', 'Fits', 'Source'] for w in weights)
    assert all(re.fullmatch(r'https://\S+\.(pth|pkl)', w['URL']) for w in weights)
    assert len({w['URL'] for w in weights}) == len(weights)
    names = {w['URL'].rsplit('/', 1)[1] for w in weights if w['Source'] == 'microsoft/unilm'}
    assert names == {
        'beit_base_patch16_224_pt1k_800ep.pth',
        'beit_base_patch16_384_pt22k_ft22kto1k.pth',
        'beit_large_patch16_384_pt22k_ft22kto1k.pth',
        'beit_large_patch16_512_pt22k_ft22kto1k.pth',
        'beit_base_patch16_640_pt22k_ft22ktoade20k.pth',
        'beit_large_patch16_640_pt22k_ft22ktoade20k.pth',
        *(
            f'beit_{size}_patch16_224_pt22k{step}.pth'
            for size in ('base', 'large')
            for step in ('', '_ft22k', '_ft1k', '_ft22kto1k')
        ),
        *(
            f'beitv2_{size}_patch16_224_pt1k{step}.pth'
            for size in ('base', 'large')
            for step in (
                *('', '_300e', '_ft1k', '_300e_ft1k'),
                *('_ft21k', '_ft21kto1k', '_ftade20k', '_ft21ktoade20k'),
            )
        ),
        'vqkd_encoder_base_decoder_3x768x12_clip-d5036aa7.pth',
        'vqkd_encoder_base_decoder_1x768x12_clip-d93179da.pth',
        'vqkd_encoder_base_decoder_1x768x12_dino-663c55d7.pth',
    }


def test_model_index_is_read_without_an_error():
    load = pytest.importorskip('modelindex.load_model_index').load
    index = load(str(ROOT / 'model-index.yml'))
    assert not index.check(silent=True)
    assert [collection.name for collection in index.collections] == ['BEiT', 'BEiTv2']
    assert sorted(model.name for model in index.models) == sorted(entry['Name'] for entry in ENTRIES.values())
    assert all(model.results is None and model.weights is None for model in index.models)


def test_mim_makes_its_table_of_it():
    load = pytest.importorskip('modelindex.load_model_index').load
    search = pytest.importorskip('mim.commands.search')
    table = search.convert2df(load(str(ROOT / 'model-index.yml')))
    assert table.loc['beit_pretrain_800e', 'parameters'] == 92_089_856
    assert list(search.filter_by_conditions(table, 'epochs>500').index) == [
        'beit_pretrain_800e',
        'beit_pretrain_large_800e',
        'beit_v2_pretrain_1600e',
        'beit_v2_pretrain_large_1600e',
    ]
    assert not [column for column in table.columns if '/' in column]  # where mim shows measured results
