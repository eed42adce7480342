"""dist_*.sh and slurm_*.sh start the right command, or stop and say what to do.

A made-up torch stands before the real one: it sees as many GPUs and cores as a test wants, and its
torch.distributed.run and the made-up srun print what they were started with.
"""

import json
import os
import re
import runpy
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from helpers import ROOT
from torch.distributed import run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

TOOLS = ROOT / 'tools'
ECHO = f'#!{sys.executable}\nimport json, os, sys\nprint(json.dumps(dict(os.environ, argv=sys.argv[1:])))\nsys.exit()\n'
PROGRAMS = dict(
    srun=ECHO,
    squeue='#!/bin/sh\necho "$FAKE_STATE"\n',
    scontrol='#!/bin/sh\necho "$@" > scontrol.said\nexit "${FAKE_REFUSAL:-0}"\n',
)
TORCH = """
import os
os.sched_getaffinity = lambda pid: range({cores})
class cuda:
    device_count = staticmethod(lambda: {gpus})
"""
OURS = 'NNODES NODE_RANK MASTER_ADDR PORT GPUS OMP_NUM_THREADS DRY_RUN SRUN_ARGS MAX_RESTARTS SLURM_JOB_ID'.split()
Start = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a script with its words on a machine with so many `gpus` and `cores`; keywords are its environment.

    It stands behind a symbolic link, and is called from somebody's folder of images, from which nothing is imported.
    """
    images, torch = tmp_path / 'images', tmp_path / 'torch'
    (torch / 'distributed').mkdir(parents=True)
    (torch / 'distributed/__init__.py').touch()
    (torch / 'distributed/run.py').write_text(ECHO)
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    images.mkdir()
    for name in ('torch', 'yapf', 'json'):
        (images / f'{name}.py').write_text('open("imported", "w").close()\n')
    (tmp_path / 'tools').symlink_to(TOOLS)

    def call(line: str, gpus: int = 0, cores: int = 4, **variables: str):
        script, *words = shlex.split(line)
        (torch / '__init__.py').write_text(TORCH.format(gpus=gpus, cores=cores))
        env = {key: value for key, value in os.environ.items() if key not in OURS}
        env |= {'PYTHON': sys.executable, 'PYTHONPATH': str(tmp_path), 'PATH': f'{tmp_path}:{env["PATH"]}'}
        command = ['bash', str(tmp_path / 'tools' / Path(script).name), *words]
        return subprocess.run(command, env=env | variables, cwd=images, capture_output=True, text=True)

    yield call
    assert not (images / 'imported').exists()


def meeting(gpus: int, nodes: int = 1, rank: int = 0, host: str = '127.0.0.1', port: int = 29500) -> list[str]:
    place = [f'--nnodes={nodes}', f'--node_rank={rank}', f'--master_addr={host}', f'--master_port={port}']
    return [*place, f'--nproc_per_node={gpus}']


NODE_1 = dict(NNODES='2', NODE_RANK='1', MASTER_ADDR='10.0.0.1', PORT='29511')
RESTARTS = '--nnodes=1 --rdzv-backend=c10d --rdzv-id=beit_mm --rdzv-endpoint=127.0.0.1:29500 --max-restarts=3'.split()
SLURM = '--partition=p --job-name=j --ntasks={0} --ntasks-per-node={1} --gres=gpu:{1} --cpus-per-task=5'


@pytest.mark.parametrize(
    'line, gpus, variables, launcher, threads',
    [
        ('dist_train.sh c.py 8 --cfg-options "a=dict(b=1, c=\\"x y\\")"', 8, {}, meeting(8), None),
        ('dist_test.sh c.py k.pth 2 --tta', 8, {}, meeting(2), None),  # fewer than there are
        ('dist_train.sh c.py 8', 8, NODE_1, meeting(8, nodes=2, rank=1, host='10.0.0.1', port=29511), None),
        ('dist_train.sh c.py 2', 2, dict(MAX_RESTARTS='3'), [*RESTARTS, '--nproc_per_node=2'], None),
        # on a CPU with four cores, which they share
        ('dist_train.sh c.py 3', 0, {}, meeting(3), '1'),
        ('dist_train.sh c.py 1', 0, dict(OMP_NUM_THREADS='3'), meeting(1), '3'),
        ('dist_train.sh c.py 9', 0, dict(OVERSUBSCRIBE='1'), meeting(9), '1'),
        ('slurm_train.sh p j c.py --resume', 0, dict(GPUS='16', SRUN_ARGS='--no-kill --time=3'), (16, 8), None),
        ('slurm_test.sh p j c.py k.pth', 0, dict(GPUS='4', PORT='29511'), (4, 4), None),  # part of a node
    ],
)
def test_the_tool_is_started_with_all_its_words(line, gpus, variables, launcher, threads, start, tmp_path):
    script, *words = shlex.split(line)
    tool = TOOLS / script.split('_')[1].replace('.sh', '.py')
    result = start(line, gpus=gpus, CPUS_PER_TASK='5', **variables)
    done = json.loads(result.stdout)
    if script.startswith('dist'):
        words = [word for word in words if word not in '12389']
        assert done['argv'] == [*launcher, str(tool), *words, '--launcher', 'pytorch']
        assert done.get('OMP_NUM_THREADS') == threads and ('No GPU is visible' in result.stderr) == (gpus == 0)
        assert ('TORCH_DISABLE_SHARE_RDZV_TCP_STORE' in done) == ('MAX_RESTARTS' in variables)
        printed = shlex.split(start(line, gpus=gpus, DRY_RUN='1', **variables).stdout)
        assert printed == [sys.executable, str(TOOLS / '_torchrun.py'), *done['argv']]
    else:
        options = [*SLURM.format(*launcher).split(), '--kill-on-bad-exit=1', '--signal=USR1@120']
        options += variables.get('SRUN_ARGS', '').split()
        assert done['argv'] == [*options, sys.executable, '-u', str(tool), *words[2:], '--launcher', 'slurm']
        assert done['MASTER_PORT'] == variables.get('PORT', '29500')
    given = {f'{key}={value}' for key, value in variables.items() if key != 'OMP_NUM_THREADS'} | {'CPUS_PER_TASK=5'}
    again = shlex.split(done['BEIT_MM_COMMAND'])  # what an interrupted run says
    assert {*again[: len(given)]} == given
    assert again[len(given) :] == [str(tmp_path / 'tools' / script), *shlex.split(line)[1:]]


@pytest.mark.parametrize('visible, cores', [(6, 4), (0, 2)])
def test_too_few_gpus_or_cores_print_the_line_that_fits(start, visible, cores):
    result = start('dist_train.sh c.py 16 --amp', gpus=visible, cores=cores)
    assert result.returncode == 1 and result.stdout == ''
    here = re.search(r'This node has room for \d: (.+)', result.stderr)[1]
    argv = json.loads(start(here, gpus=visible, cores=cores).stdout)['argv']
    assert argv[:5] == meeting(visible or cores) and argv[6:] == ['c.py', '--amp', '--launcher', 'pytorch']


@pytest.mark.parametrize(
    'line, variables, code, said',
    [
        ('dist_train.sh c.py', {}, 2, 'Usage: '),
        ('dist_train.sh c.py 0', {}, 2, "not '0'"),
        ('slurm_train.sh p j c.py', dict(PYTHON='/bin/false'), 1, 'cannot import torch'),
        ('slurm_train.sh p j c.py', dict(PATH='/usr/bin:/bin'), 1, 'without Slurm use dist_*.sh'),
    ],
)
def test_what_cannot_be_started_says_why(line, variables, code, said, start):
    result = start(line, gpus=8, **variables)
    assert result.returncode == code and said in result.stderr and not result.stdout


def test_the_last_line_is_which_process_failed(monkeypatch):
    """What that said stands right above it, and no traceback of torchrun's below."""
    failure = ProcessFailure(local_rank=1, pid=9, exitcode=-9, error_file='')
    monkeypatch.setattr(run, 'main', lambda: (_ for _ in ()).throw(ChildFailedError('train.py', {1: failure})))
    with pytest.raises(SystemExit, match='^Rank 1 has ended with exit code -9; what it said stands above.$'):
        runpy.run_path(str(TOOLS / '_torchrun.py'), run_name='__main__')


@pytest.mark.parametrize(
    'code, state, refusal, said',
    [(75, 'RUNNING', '0', 'is'), (75, 'RUNNING', '1', 'is not'), (75, 'DONE', '0', 'is not'), (1, 'RUNNING', '0', '')],
)
def test_slurm_requeues_a_job_that_was_told_to_stop_and_has_saved(code, state, refusal, said, start, tmp_path):
    """Not when it failed or the job was cancelled. It outlives the signals that end its tasks."""
    (tmp_path / 'srun').write_text(f'#!/bin/sh\nkill -TERM $PPID\nkill -USR1 $PPID\nsleep 0.2\nexit {code}\n')
    result = start('slurm_train.sh part job c.py', FAKE_REFUSAL=refusal, SLURM_JOB_ID='12', FAKE_STATE=state)
    asked = [path.read_text() for path in tmp_path.glob('images/scontrol.said')]
    assert asked == ['requeue 12\n'] * (code == 75 and state == 'RUNNING') and result.returncode == code
    assert re.findall(r'job 12 (.+) requeued', result.stderr) == [said] * bool(said)
