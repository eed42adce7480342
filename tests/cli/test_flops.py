"""tools/dev/flops.py, against the formulas of a Transformer's arithmetic."""

import pytest
from helpers import ROOT, run_tool

WIDTH, DEPTH, PATCH = 768, 12, 16 * 16 * 3
TABLE = (2 * 14 - 1) ** 2 + 3  # rows of a relative position bias


@pytest.fixture
def table(capsys):
    """Part -> parameters and millions of MAC, of a config."""

    def read(config: str, *arguments: object) -> dict[str, tuple[int, float]]:
        run_tool('dev/flops.py', ROOT / 'configs' / config, *arguments)
        lines = [line.rsplit(maxsplit=3) for line in capsys.readouterr().out.splitlines()[2:-2]]
        return {name: (int(n.replace(',', '')), 1e3 * float(macs.replace(',', ''))) for name, n, macs, _ in lines}

    return read


def attention(tokens: int, queries: int | None = None) -> float:
    """Millions of MAC of a block's attention: keys and values, queries and output, scores and their sums."""
    queries = queries or tokens
    return (2 * tokens * WIDTH**2 + 2 * queries * WIDTH**2 + 2 * queries * tokens * WIDTH) / 1e6


def mlp(tokens: int) -> float:
    return 2 * tokens * WIDTH * 4 * WIDTH / 1e6


def test_a_classifier_is_counted_by_the_formulas_at_any_size(table):
    for size, grid in ((224, (14, 14)), (160, (10, 20))):
        tokens = 1 + grid[0] * grid[1]
        found = table('beit/finetune_in1k_100e.py', '--shape', size, grid[1] * 16)
        macs = {name: value for name, (_, value) in found.items()}
        assert macs['patch embedding'] == pytest.approx((tokens - 1) * PATCH * WIDTH / 1e6, abs=1)
        assert macs['attention'] == pytest.approx(DEPTH * attention(tokens), abs=1)
        assert macs['MLP'] == pytest.approx(DEPTH * mlp(tokens), abs=1)
        assert macs['head'] == pytest.approx(WIDTH * 1000 / 1e6, abs=0.5)
        assert macs['total'] == pytest.approx(sum(macs.values()) - macs['total'], abs=3)
        assert found['total'][0] == 86_558_440
        if size == 224:
            assert macs['total'] == pytest.approx(17_564, abs=1)


def test_a_pretraining_has_its_tokenizer_and_a_last_block_of_masked_patches(table):
    plain, plus = (table(f'{folder}/pretrain_300e.py') for folder in ('beit', 'beit_plus'))
    for found in (plain, plus):
        assert found['tokenizer'] == (53_786_240, pytest.approx(24_029, abs=1))
        assert found['attention'][1] == pytest.approx(11 * attention(197) + attention(197, queries=75), abs=1)
        assert found['MLP'][1] == pytest.approx(11 * mlp(197) + mlp(75), abs=1)
        assert found['head'][1] == pytest.approx(75 * WIDTH * 8192 / 1e6, abs=1)
    assert plus['attention'][0] - plain['attention'][0] == TABLE * 12  # one table for all blocks
    assert plain['total'][0] == 92_089_856 + 53_786_240


def test_segmentors_have_auxiliary_heads_and_the_bias_costs_no_products(table):
    pytest.importorskip('mmseg')
    plain, plus = (table(f'{folder}/upernet_512_ade20k_160k.py') for folder in ('beit', 'beit_plus'))
    assert plain['attention'][1] == plus['attention'][1] == pytest.approx(DEPTH * attention(1025), abs=1)
    assert plus['attention'][0] - plain['attention'][0] == DEPTH * 12 * ((2 * 32 - 1) ** 2 + 3)
    # two transposed convolutions of 2 x 2 at the grid's resolution and twice it, and one transposed one
    assert plain['neck'][1] == pytest.approx(WIDTH**2 * 4 * (1024 + 4 * 1024 + 1024) / 1e6, abs=1)
    assert plain['auxiliary heads'][1] == pytest.approx(1024 * (WIDTH * 9 * 256 + 256 * 150) / 1e6, abs=1)
    setr = table('beit/setr_pup_512_ade20k_160k.py')
    convolutions = 9 * 1024 * (768 * 256 + 4 * 256**2 + 16 * 256**2 + 64 * 256**2) + 64 * 1024 * 256 * 150
    assert setr['head'][1] == pytest.approx(convolutions / 1e6, abs=1)


def test_multi_crop_is_counted_and_mistakes_are_one_line(table):
    dino = table('demo/caltech101_beit_dino.py')
    assert dino['teacher'][0] > 0 and dino['teacher'][1] > 0
    for config, words, message in (
        ('demo/dvae.py', [], 'the model is a DiscreteVAE without a BEiTBackbone'),
        ('demo/caltech101_dino.py', ['--shape', 2, 48], '--shape 2 48: expected at least a patch'),
    ):
        with pytest.raises(SystemExit, match=f'error: {message}'):
            table(config, *words)
