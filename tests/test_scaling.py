"""The arithmetic of docs/scaling.md gives the table below it, for the configs' own models."""

import re
from contextlib import redirect_stdout
from io import StringIO

from helpers import ROOT, header_of


def test_the_table_is_what_the_snippet_prints():
    text = (ROOT / 'docs/scaling.md').read_text()
    code, table = re.search(r'```python\n(.*?)```\n\n(.*?)\n\n', text, re.S).groups()
    printed, names = StringIO(), {}
    with redirect_stdout(printed):
        exec(code, names)
    assert printed.getvalue().strip() == table
    for size, config in (('base', 'beit/pretrain_800e.py'), ('large', 'beit/pretrain_large_800e.py')):
        assert f'{names["PARAMETERS"][size]:,} parameters' in header_of(config)  # generated from the model
    # Of two GPUs each sends its gradients once: four bytes for each of 92 million parameters.
    assert round(1e9 * names['times']('base', 2, 1, 8)[0]) == 368_359_424
