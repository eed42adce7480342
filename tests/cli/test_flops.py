"""tools/dev/flops.py, against the formulas of a Transformer's arithmetic."""

import runpy

import pytest
from helpers import ROOT, load_config, run_tool

count_config = runpy.run_path(str(ROOT / 'tools/dev/flops.py'))['count_config']
WIDTH, DEPTH, PATCH = 768, 12, 16 * 16 * 3
TABLE = (2 * 14 - 1) ** 2 + 3  # rows of a relative position bias


def count(config: str, *shape: int) -> dict[str, tuple[int, float]]:
    """Part -> parameters and millions of MAC, of a config."""
    numbers, flops, _ = count_config(load_config(config), shape or None)
    return {part: (number, flops[part] / 2e6) for part, number in (*numbers.items(), ('total', numbers.total()))}


def attention(tokens: int, queries: int | None = None) -> float:
    """Millions of MAC of a block's attention: keys and values, queries and output, scores and their sums."""
    queries = queries or tokens
    return (2 * tokens * WIDTH**2 + 2 * queries * WIDTH**2 + 2 * queries * tokens * WIDTH) / 1e6


def mlp(tokens: int) -> float:
    return 2 * tokens * WIDTH * 4 * WIDTH / 1e6


@pytest.mark.parametrize('shape', [(224, 224), (160, 320)])
def test_a_classifier_is_counted_by_the_formulas_at_any_size(shape):
    tokens = 1 + shape[0] * shape[1] // 256
    found = count('beit/finetune_in1k_100e.py', *shape)
    assert found['patch embedding'][1] == pytest.approx((tokens - 1) * PATCH * WIDTH / 1e6)
    assert found['attention'][1] == pytest.approx(DEPTH * attention(tokens))
    assert found['MLP'][1] == pytest.approx(DEPTH * mlp(tokens))
    assert found['head'][1] == pytest.approx(WIDTH * 1000 / 1e6) and found['total'][0] == 86_558_440


def test_a_pretraining_has_its_tokenizer_and_a_last_block_of_masked_patches():
    plain, plus = (count(f'{folder}/pretrain_300e.py') for folder in ('beit', 'beit_plus'))
    for found in (plain, plus):
        assert found['tokenizer'] == (53_786_240, pytest.approx(24_029, abs=1))
        assert found['attention'][1] == pytest.approx(11 * attention(197) + attention(197, queries=75))
        assert found['MLP'][1] == pytest.approx(11 * mlp(197) + mlp(75))
        assert found['head'][1] == pytest.approx(75 * WIDTH * 8192 / 1e6)
    assert plus['attention'][0] - plain['attention'][0] == TABLE * 12  # one table for all blocks
    assert plain['total'][0] == 92_089_856 + 53_786_240


def test_segmentors_have_auxiliary_heads():
    pytest.importorskip('mmseg')
    plain = count('beit/upernet_512_ade20k_160k.py')
    # two transposed convolutions of 2 x 2 at the grid's resolution and twice it, and one transposed one
    assert plain['neck'][1] == pytest.approx(WIDTH**2 * 4 * (1024 + 4 * 1024 + 1024) / 1e6)
    assert plain['auxiliary heads'][1] == pytest.approx(1024 * (WIDTH * 9 * 256 + 256 * 150) / 1e6)
    setr = count('beit/setr_pup_512_ade20k_160k.py')
    convolutions = 9 * 1024 * (768 * 256 + 4 * 256**2 + 16 * 256**2 + 64 * 256**2) + 64 * 1024 * 256 * 150
    assert setr['head'][1] == pytest.approx(convolutions / 1e6)


def test_the_tool_prints_a_table_and_mistakes_are_one_line(capsys):
    config = ROOT / 'configs/demo/caltech101_beit_dino.py'
    run_tool('dev/flops.py', config)
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[1] == ['parameters', 'GMAC', 'GFLOP'] and 'teacher' in [row[0] for row in rows]
    with pytest.raises(SystemExit, match='error: --shape 2 48: expected at least a patch'):
        run_tool('dev/flops.py', config, '--shape', 2, 48)
    with pytest.raises(SystemExit, match='error: the model is a DiscreteVAE without a BEiTBackbone'):
        run_tool('dev/flops.py', ROOT / 'configs/demo/dvae.py')
