"""tools/analysis/token_histogram.py: tokens whose frequencies are known from the pixels."""

import math
import runpy

import numpy as np
import pytest
import torch
from helpers import ROOT, run_tool
from PIL import Image

from beit_mm.models import DiscreteVAE, Tokenizer
from beit_mm.registry import MODELS

TOOL = 'analysis/token_histogram.py'
LEVELS = [0] * 8 + [1] * 4 + [2] * 2 + [3] * 2  # of 16 patches: an entropy of 1.75 bits


@MODELS.register_module(force=True)
class LevelTokenizer(Tokenizer):
    """Tokens of 8 x 8 pixels: their gray level, in eighths."""

    def __init__(self):
        super().__init__()
        self.vocab_size, self.stride, self.provenance = 8, 8, dict(path='nothing')

    def encode(self, images):
        return (images.mean(dim=1)[:, 4::8, 4::8] * 8).long()


@pytest.fixture
def folder(tmp_path):
    """Six images of 32 x 32 pixels, of LEVELS in another order each, and one that cannot be read."""
    rng = np.random.default_rng(0)
    (tmp_path / 'images').mkdir()
    for index in range(6):
        levels = rng.permutation(LEVELS).reshape(4, 4).repeat(8, 0).repeat(8, 1)
        Image.fromarray((levels * 32 + 16).astype(np.uint8)).save(tmp_path / f'images/{index}.png')
    (tmp_path / 'images/broken.png').write_bytes(b'no image')
    return tmp_path / 'images'


@pytest.fixture
def config(tmp_path):
    (tmp_path / 'config.py').write_text(
        "default_scope = 'mmpretrain'\n"
        "model = dict(target_generator=dict(type='beit_mm.LevelTokenizer'), data_preprocessor=dict())\n"
        "steps = [dict(type='beit_mm.LoadImage'), dict(type='beit_mm.TwoViewCenterCrop', size=64, second_size=32)]\n"
        'val_dataloader = dict(dataset=dict(pipeline=steps))\n'
    )
    return tmp_path / 'config.py'


def test_frequencies_and_entropy_are_those_of_the_pixels(config, folder, tmp_path, capsys):
    run_tool(TOOL, config, folder, '--out', tmp_path / 'deep/tokens.png')
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ['LevelTokenizer, nothing', '6 images of 32 x 32 pixels, 96 tokens']
    assert out[2].split(maxsplit=1)[1] == '4 of 8 tokens of the vocabulary (50.0%)'
    nats = 1.75 * math.log(2)
    assert out[3].split(maxsplit=1)[1] == f'{nats:.3f} nats, at most {math.log(8):.3f}'
    assert out[4].split() == ['perplexity', f'{math.exp(nats):.1f}']
    assert out[5].startswith('most frequent: 0 (50.0%), 1 (25.0%), ')
    assert Image.open(tmp_path / 'deep/tokens.png').size == (1700, 900)
    run_tool(TOOL, config, folder, '--out', tmp_path / 'few.png', '--max-images', 2, '--size', 64)
    assert capsys.readouterr().out.splitlines()[1].startswith('2 images of 64 x 64 pixels, 128')


def test_patches_are_those_of_their_token():
    tokens = torch.tensor(LEVELS).view(1, 4, 4)
    views = (tokens * 32 + 16).repeat_interleave(8, 1).repeat_interleave(8, 2)[:, None].expand(1, 3, 32, 32)
    tool = runpy.run_path(str(ROOT / 'tools' / TOOL))
    figure = tool['draw'](views, tokens, tokens.flatten().bincount(minlength=8), 8)
    curve, sheet = figure.axes
    assert curve.lines[0].get_ydata().tolist() == [0.5, 0.25, 0.125, 0.125]
    picture = np.asarray(sheet.images[0].get_array())
    side, gap = tool['SIDE'], tool['GAP']
    middles = picture[gap + side // 2 :: side + gap, gap + side // 2 :: side + gap, 0]
    for row, number in zip(middles, (8, 4, 2, 2), strict=True):
        level = row[0] * 255
        assert np.allclose(row[:number] * 255, level) and np.allclose(row[number:], tool['GRAY'])
    assert (middles[:2, 0] * 255).round().tolist() == [16, 48]
    assert [label.get_text() for label in sheet.get_yticklabels()][:2] == ['0: 50.0%', '1: 25.0%']


def test_a_tokenizer_and_its_checkpoint_have_the_same_tokens(folder, tmp_path, capsys):
    torch.manual_seed(0)
    sizes = dict(hidden=8, vocab_size=16, embed_dims=8, num_levels=2, bottleneck_blocks=1)
    model = dict(type='beit_mm.DiscreteVAE', **sizes, kl_weight=0.1, data_preprocessor=None)
    meta = dict(config_dict=dict(model=model))
    torch.save(dict(state_dict=DiscreteVAE(**sizes).state_dict(), meta=meta), tmp_path / 'dvae.pth')
    options = [f'model.{key}={value}' for key, value in dict(sizes, checkpoint=tmp_path / 'dvae.pth').items()]
    config = ROOT / 'configs/demo/dvae.py'
    for words in ([tmp_path / 'dvae.pth'], [config, '--cfg-options', *options]):
        run_tool(TOOL, words[0], folder, '--size', 32, '--out', tmp_path / 'tokens.png', *words[1:])
    first, second = np.split(np.array(capsys.readouterr().out.splitlines()), 2)
    assert first.tolist() == second.tolist() and '384 tokens' in first[1]


def test_mistakes_are_one_line(config, folder, tmp_path):
    (tmp_path / 'empty').mkdir()
    for words, message in (
        ([config, tmp_path / 'empty'], 'no images in'),
        ([ROOT / 'configs/demo/finetune_folder.py', folder], 'ImageClassifier gives no visual tokens'),
        ([tmp_path / 'none.pth', folder], "none.pth' does not exist; expected a checkpoint"),
    ):
        with pytest.raises(SystemExit) as end:
            run_tool(TOOL, *words)
        assert str(end.value.code).startswith('error: ') and message in end.value.code, end.value.code
