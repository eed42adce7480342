"""A process that dies ends the run, and is named."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers import run_ranks

from beit_mm.engine.checkpoints import in_main_process

SCRIPT = 'import os, signal\nif os.environ["RANK"] == "1":\n    os.kill(os.getpid(), 9)\nsignal.pause()\n'


def test_a_killed_process_is_named_by_torchrun(tmp_path):
    """And ends the others at once, which would wait for ever."""
    (tmp_path / 'script.py').write_text(SCRIPT)
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    result = subprocess.run([*command, tmp_path / 'script.py'], capture_output=True, text=True)
    assert result.returncode == 1
    assert re.search(r'rank\s*: 1 .*exitcode\s*: -9', result.stderr, re.S)


def test_a_file_that_the_main_process_cannot_read_ends_all(tmp_path):
    def read(rank: int) -> str:
        with pytest.raises(FileNotFoundError) as error:
            in_main_process(Path(tmp_path, 'gone').read_text)
        return str(error.value)

    said, *others = run_ranks(read, tmp_path)
    assert 'No such file' in said and others == [said]
