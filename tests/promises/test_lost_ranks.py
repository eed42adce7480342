"""A process that dies ends the run, and is named."""

import re
import subprocess
import sys


def test_a_killed_process_is_named_by_torchrun(tmp_path):
    """And ends the others at once."""
    (tmp_path / 'script.py').write_text(
        'import os, time\nif os.environ["RANK"] == "1":\n    os.kill(os.getpid(), 9)\ntime.sleep(60)\n'
    )
    command = [sys.executable, '-m', 'torch.distributed.run', '--standalone', '--nproc_per_node=2']
    result = subprocess.run([*command, tmp_path / 'script.py'], capture_output=True, text=True, timeout=50)
    assert result.returncode == 1
    assert re.search(r'rank\s*: 1 .*exitcode\s*: -9', result.stderr, re.S)
