"""The numbers of the papers and of the released code, typed from those and not from the configs.

Paper: arXiv 2106.08254, its tables of settings and of results. Released: the commands, configs and tables of
microsoft/unilm `beit` and `beit2`.
"""

import ast
import fnmatch
from types import SimpleNamespace


def read(table: str, **same: object) -> dict[str, SimpleNamespace]:
    """Config -> its row, with what is the same in all; a dash is None."""
    header, *lines = (line.split() for line in table.strip().splitlines())
    rows: dict[str, SimpleNamespace] = {}
    for name, *words in lines:
        values = [None if word == '-' else ast.literal_eval(word) if word[0].isdigit() else word for word in words]
        rows[f'{name}.py'] = SimpleNamespace(**same, **dict(zip(header[1:], values, strict=True)))
    return rows


# With 2048 images at 1.5e-3; warm-up in epochs or, if it is in the thousands, in steps. `second`: pixels of the
# tokenizer's view; `early`: the block that BEiT v2's two additional ones start from. Parameters of the rows that no
# source counts: a block has 12 width^2 + 14 width, LayerScale 24 width, pixels 768 outputs in place of 8192 tokens,
# features of CLIP 512 or 768, of a ViT-Base 768.
PRETRAINING = """
config                                      parameters     ep   warm clip drop  beta scale   bias   mask second early
beit/pretrain_800e                          92_089_856    800     10    3  0.1 0.999     -      - blocks    112     -
beit/pretrain_300e                          92_089_856    300     10    3  0.1 0.999     -      - blocks    112     -
beit/pretrain_large_800e                   311_674_880    800     10    1  0.1 0.999     -      - blocks    112     -
beit/pretrain_features_clip_300e            86_183_936    300     10    3  0.1 0.999     -      - blocks      -     -
beit/pretrain_features_dinov2_300e          86_380_800    300     10    3  0.1 0.999     -      - blocks      -     -
beit/pretrain_features_ema_300e             86_380_800    300     10    3  0.1 0.999     -      - blocks      -     -
beit/pretrain_large_features_clip_300e     304_065_280    300     10    1  0.1 0.999     -      - blocks      -     -
beit_plus/pretrain_300e                     91_965_776    300     10    3  0.1 0.999   0.1 shared blocks    112     -
beit_plus/pretrain_in22k_150e               91_965_776    150 10_000    3  0.1 0.999   0.1 shared blocks    112     -
beit_plus/pretrain_large_in22k_150e        311_534_016    150 10_000    1  0.1 0.999  1e-5 shared blocks    112     -
beit_v2/pretrain_1600e                     106_143_056   1600     10    3  0.1 0.999   0.1 shared blocks      -     9
beit_v2/pretrain_large_1600e               336_728_512   1600     10    3  0.1 0.999  1e-5 shared blocks      -    21
beit_v2/pretrain_300e                      106_143_056    300     10    3    0  0.98   0.1 shared blocks      -     9
beit_v2/pretrain_large_300e                336_728_512    300     10    3    0  0.98  1e-5 shared blocks      -    21
ablation/pretrain_random_mask_300e          92_089_856    300     10    3  0.1 0.999     -      - random    112     -
ablation/pretrain_pixels_300e               86_380_800    300     10    3  0.1 0.999     -      - blocks      -     -
ablation/pretrain_pixels_random_mask_300e   86_380_800    300     10    3  0.1 0.999     -      - random      -     -
ablation/pretrain_recover_all_300e          92_089_856    300     10    3  0.1 0.999     -      - blocks    112     -
ablation/pretrain_no_mask_recover_all_300e  92_089_088    300     10    3  0.1 0.999     -      -      -    112     -
ablation/pretrain_layer_scale_300e          92_108_288    300     10    3  0.1 0.999   0.1      - blocks    112     -
ablation/pretrain_own_dvae_300e             92_089_856    300     10    3  0.1 0.999     -      - blocks    112     -
"""
# The paper takes the best rate of a sweep from 2e-3 to 5e-3, and goes on at 384 pixels as DeiT does, whose defaults
# are those of scratch too. `min`: of the rate; `mix`: mixup and cutmix; `rep`: times that augmentation is repeated.
FINETUNING = """
config                                            parameters    lr  min  ep batch warm decay   wd drop scale mix rep  px
beit/finetune_in1k_100e                             86558440 sweep 1e-6 100  1024   20  0.65 0.05  0.1     - yes   3 224
beit/finetune_large_in1k_50e                       304302056 sweep 1e-6  50  1024    5  0.75 0.05  0.1     - yes   1 224
beit/finetune_384_in1k_10e                          86850280  5e-6 5e-6  10   512    5     1 1e-8  0.1     - yes   3 384
beit/finetune_large_384_in1k_10e                   304691176  5e-6 5e-6  10   512    5     1 1e-8  0.1     - yes   1 384
beit/finetune_cifar100_150e                         85866340 sweep 1e-6 150   512   20  0.65  0.3  0.1     - yes   3 224
beit_plus/finetune_in1k_100e                        86530984  4e-3 1e-6 100  1024   20  0.65 0.05  0.1   0.1 yes   1 224
beit_plus/finetune_large_in1k_50e                  304430568  1e-3 1e-6  50  1024    5  0.75 0.05  0.2  1e-5 yes   1 224
beit_plus/finetune_in22k_90e                       102557713  3e-3 1e-6  90  4096    5  0.65 0.05  0.2   0.1   -   1 224
beit_plus/finetune_large_in22k_90e                 325792593  2e-3 1e-6  90  2048    5  0.75 0.05  0.2  1e-5   -   1 224
beit_plus/finetune_in1k_30e_after_in22k             86530984  2e-5 1e-6  30   512    5  0.85 1e-8  0.1   0.1   -   1 224
beit_plus/finetune_384_in1k_30e_after_in22k         86744104  2e-5 1e-6  30   512    5  0.85 1e-8  0.1   0.1   -   1 384
beit_plus/finetune_large_in1k_30e_after_in22k      304430568  2e-5 1e-6  30   512    5   0.9 1e-8  0.4  1e-5   -   1 224
beit_plus/finetune_large_384_in1k_30e_after_in22k  304998888  2e-5 1e-6  30   512    5   0.9 1e-8  0.4  1e-5   -   1 384
beit_plus/finetune_large_512_in1k_30e_after_in22k  305674728  2e-5 1e-6  30   512    5   0.9 1e-8  0.4  1e-5   -   1 512
beit_v2/finetune_in1k_100e                          86530984  5e-4 1e-6 100  1024   20   0.6 0.05  0.2   0.1 yes   1 224
beit_v2/finetune_in1k_100e_after_300e               86530984  5e-4 1e-6 100  1024   20  0.65 0.05  0.1   0.1 yes   1 224
beit_v2/finetune_in1k_30e_after_in22k               86530984  5e-5 1e-6  30  1024   20  0.75 0.05  0.1   0.1   -   1 224
beit_v2/finetune_large_in1k_50e                    304430568  2e-4 1e-6  50  1024    5   0.8 0.05  0.2  1e-5 yes   1 224
beit_v2/finetune_large_in1k_50e_after_300e         304430568  5e-4 1e-6  50  1024    5   0.8 0.05  0.2  1e-5 yes   1 224
beit_v2/finetune_large_in1k_20e_after_in22k        304430568  7e-5 1e-6  20  1024    5   0.8 0.05 0.25  1e-5   -   1 224
beit_v2/finetune_in22k_90e                         102557713  6e-4 1e-6  90  4096   20  0.75 0.05  0.1   0.1 yes   1 224
beit_v2/finetune_large_in22k_90e                   325792593  6e-4 1e-6  90  4096   20  0.75 0.05  0.2  1e-5 yes   1 224
ablation/finetune_layer_scale_in1k_100e             86576872 sweep 1e-6 100  1024   20  0.65 0.05  0.1   0.1 yes   3 224
ablation/finetune_layer_scale_rel_pos_in1k_100e     86530984 sweep 1e-6 100  1024   20  0.65 0.05  0.1   0.1 yes   3 224
ablation/scratch_in1k_300e                          86558440  1e-3 1e-5 300  1024    5     1 0.05  0.1     - yes   3 224
"""
# Learning of each layer decays; an update takes `acc` batches. `bias`: a table in each block and no position embedding.
SEGMENTATION = """
config                                                parameters   lr decay drop scale bias     blocks size batches acc
beit/setr_pup_512_ade20k_160k                         97_245_166 1e-3  0.65  0.1     -    -   4,7,9,11  512   160e3   1
beit/setr_pup_three_aux_512_ade20k_160k               97_206_104 1e-3  0.65  0.1     -    -   4,7,9,11  512   160e3   1
beit/upernet_512_ade20k_160k                         163_277_612 7e-4  0.65  0.1     -    -   3,5,7,11  512   160e3   1
ablation/upernet_layer_scale_512_ade20k_160k         163_296_044 7e-4  0.65  0.1   0.1    -   3,5,7,11  512   160e3   1
ablation/upernet_layer_scale_rel_pos_512_ade20k_160k 163_080_812 7e-4  0.65  0.1   0.1 each   3,5,7,11  512   160e3   1
beit_plus/upernet_512_ade20k_160k                    163_080_812 7e-4  0.65  0.1   0.1 each   3,5,7,11  512   160e3   1
beit_plus/upernet_512_ade20k_160k_after_in22k        163_080_812 3e-5   0.9  0.1   0.1 each   3,5,7,11  512   160e3   1
beit_plus/upernet_640_ade20k_160k_after_in22k        163_407_980 3e-5   0.9  0.1   0.1 each   3,5,7,11  640   160e3   1
beit_plus/upernet_large_512_ade20k_160k_after_in22k  440_398_636 2e-5  0.95  0.2  1e-6 each 7,11,15,23  512   160e3   1
beit_plus/upernet_large_640_ade20k_160k_after_in22k  441_271_084 2e-5  0.95  0.2  1e-6 each 7,11,15,23  640   320e3   2
beit_v2/upernet_512_ade20k_160k                      163_080_812 5e-5  0.75 0.15   0.1 each   3,5,7,11  512   160e3   1
beit_v2/upernet_512_ade20k_160k_after_in22k          163_080_812 5e-5  0.85 0.15   0.1 each   3,5,7,11  512   160e3   1
beit_v2/upernet_large_512_ade20k_160k                440_398_636 4e-5   0.9  0.2  1e-6 each 7,11,15,23  512   160e3   1
beit_v2/upernet_large_512_ade20k_160k_after_in22k    440_398_636 3e-5   0.9  0.2  1e-6 each 7,11,15,23  512   160e3   1
"""

# What the others start from: the last checkpoint of a config; the first pattern that fits counts.
STARTS = """
*_after_in22k                     {folder}/finetune_{large}in22k_90e
*_after_300e                      {folder}/pretrain_{large}300e
beit/finetune_384_in1k_10e        beit/finetune_in1k_100e
beit/finetune_large_384_in1k_10e  beit/finetune_large_in1k_50e
beit/upernet_*                    beit/pretrain_300e
beit/*                            beit/pretrain_{large}800e
beit_plus/*                       beit_plus/pretrain_{large}in22k_150e
beit_v2/*                         beit_v2/pretrain_{large}1600e
ablation/*_layer_scale_rel_pos_*  beit_plus/pretrain_300e
ablation/*_layer_scale_*          ablation/pretrain_layer_scale_300e
"""


def start_of(config: str) -> str | None:
    """The config that one starts from; None for what starts from nothing."""
    folder, _, name = config.partition('/')
    if not name.startswith('pretrain_'):
        for pattern, start in map(str.split, STARTS.strip().splitlines()):
            if fnmatch.fnmatch(config, f'{pattern}.py'):
                return f'{start}.py'.format(folder=folder, large='large_' * ('large' in name))
    return None


# The paper's tables of results: figures from left to right and top to bottom, a dash where it has one or a picture.
FROM_PAPER = {
    'cls': '77.9 76.5 81.8 83.1 84.0 85.2 66.5 79.9 83.2 84.1 82.8 83.2 84.6 85.2 86.3',
    'seg': '45.3 44.1 45.6 47.7',
    'ablation': '82.86 44.65 82.77 42.93 81.04 41.38 80.50 37.09 82.59 40.93 81.67 36.73 83.19 45.58',
    'arch_variants': '82.86 44.86 83.00 45.43 83.22 45.70',
    'supervised_cls': '84.0 - 85.2 85.30 85.1 - 84.2 - 87.1 87.76 88.0 88.55 86.6 - 88.5 - 86.8 - 88.4 88.6 89.3 89.5',
    'supervised_seg': '50.0 51.7 52.1 53.5 53.6 54.2 56.7 57.0 57.9 58.4',
    'tokenizer': '0.0856 82.86 0.0880 82.70',
    'linear_probe': '78.2 76.7 77.6 65.2 68.7 72.0 56.7 73.5',
    'multitask_dino': '82.8 44.08 - 82.9 44.65 4.2x 82.9 46.85 1.0x',
    'cifar100': '48.5 87.1 90.8 91.7 87.1 90.1 91.8',
    'convergence': '- -',
}
