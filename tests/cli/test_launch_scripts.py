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
from collections.abc import Callable
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / 'tools'
ECHO = f"""#!{sys.executable}
import json, os, sys
print(json.dumps(dict(argv=sys.argv[1:], threads=os.environ.get('OMP_NUM_THREADS'),
                     port=os.environ.get('MASTER_PORT'), command=os.environ.get('BEIT_MM_COMMAND'),
                     own_store=os.environ.get('TORCH_DISABLE_SHARE_RDZV_TCP_STORE'))))
sys.exit(int(os.environ.get('FAKE_EXIT', 0)))
"""
SQUEUE = '#!/bin/sh\necho "$FAKE_STATE"\n'
SCONTROL = '#!/bin/sh\necho "$@" > scontrol.said\nexit "${FAKE_REFUSAL:-0}"\n'
TORCH = """
import os
os.sched_getaffinity = lambda pid: range({cores})
class cuda:
    device_count = staticmethod(lambda: {gpus})
"""
Start = Callable[..., subprocess.CompletedProcess]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Runs a script on a machine with so many `gpus` and `cores`; keywords are its environment."""
    torch = tmp_path / 'torch'
    (torch / 'distributed').mkdir(parents=True)
    (torch / 'distributed/__init__.py').touch()
    (torch / 'distributed/run.py').write_text(ECHO)
    for name, text in dict(srun=ECHO, squeue=SQUEUE, scontrol=SCONTROL).items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    ours = ('NNODES', 'NODE_RANK', 'MASTER_ADDR', 'PORT', 'GPUS', 'OMP_NUM_THREADS', 'DRY_RUN', 'SRUN_ARGS')
    ours += ('MAX_RESTARTS', 'SLURM_JOB_ID')

    def run(script: str, *arguments: str, gpus: int = 0, cores: int = 4, cwd: Path = tmp_path, **variables: str):
        (torch / '__init__.py').write_text(TORCH.format(gpus=gpus, cores=cores))
        env = {k: v for k, v in os.environ.items() if k not in ours}
        env |= {'PYTHON': sys.executable, 'PYTHONPATH': str(tmp_path), 'PATH': f'{tmp_path}:{env["PATH"]}'}
        return subprocess.run(
            ['bash', str(TOOLS / script), *arguments], env=env | variables, cwd=cwd, capture_output=True, text=True
        )

    return run


def started(result: subprocess.CompletedProcess) -> dict:
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def torchrun(gpus: int, nodes: int = 1, rank: int = 0, host: str = '127.0.0.1', port: int = 29500) -> list[str]:
    return [
        f'--nnodes={nodes}',
        f'--node_rank={rank}',
        f'--master_addr={host}',
        f'--master_port={port}',
        f'--nproc_per_node={gpus}',
    ]


def test_train_on_one_node(start):
    result = start('dist_train.sh', 'c.py', '8', '--cfg-options', 'a=dict(b=1, c="x y")', gpus=8)
    assert started(result)['argv'] == torchrun(8) + [
        str(TOOLS / 'train.py'),
        'c.py',
        '--cfg-options',
        'a=dict(b=1, c="x y")',
        '--launcher',
        'pytorch',
    ]
    assert result.stderr == ''


def test_test_on_fewer_gpus_than_there_are(start):
    result = start('dist_test.sh', 'c.py', 'k.pth', '2', '--tta', gpus=8)
    assert started(result)['argv'] == torchrun(2) + [
        str(TOOLS / 'test.py'),
        'c.py',
        'k.pth',
        '--tta',
        '--launcher',
        'pytorch',
    ]


def test_several_nodes(start):
    result = start(
        'dist_train.sh', 'c.py', '8', gpus=8, NNODES='2', NODE_RANK='1', MASTER_ADDR='10.0.0.1', PORT='29511'
    )
    assert started(result)['argv'][:5] == torchrun(8, nodes=2, rank=1, host='10.0.0.1', port=29511)


def test_dry_run_prints_the_command(start):
    arguments = ('dist_train.sh', 'c.py', '2', '--cfg-options', 'a="x y"')
    printed = shlex.split(start(*arguments, gpus=2, DRY_RUN='1').stdout)
    assert printed[:2] == [sys.executable, str(TOOLS / '_torchrun.py')]
    assert printed[2:] == started(start(*arguments, gpus=2))['argv']


@pytest.mark.parametrize('asked, visible, nodes', [(16, 8, 2), (16, 6, 4), (3, 2, 3), (2, 1, 2), (9, 8, 3)])
def test_too_few_gpus(start, asked, visible, nodes):
    result = start('dist_train.sh', 'c.py', str(asked), '--amp', gpus=visible)
    assert result.returncode == 1 and result.stdout == ''
    assert f'{asked} GPUs asked for on this node, {visible} visible' in result.stderr
    for rank in (0, 1):
        # The printed line, typed on a node, starts a node's share.
        line = re.search(rf'NNODES={nodes} NODE_RANK={rank} MASTER_ADDR=<host> PORT=29500 (.+)', result.stderr)[1]
        script, *arguments = shlex.split(line)
        again = start(
            Path(script).name, *arguments, gpus=visible, NNODES=str(nodes), NODE_RANK=str(rank), MASTER_ADDR='h'
        )
        argv = started(again)['argv']
        assert argv[:5] == torchrun(asked // nodes, nodes=nodes, rank=rank, host='h')
        assert argv[6:] == ['c.py', '--amp', '--launcher', 'pytorch']


def test_too_few_gpus_on_each_of_two_nodes(start):
    result = start('dist_test.sh', 'c.py', 'k.pth', '16', gpus=8, NNODES='2', MASTER_ADDR='10.0.0.1')
    assert result.returncode == 1
    assert 'NNODES=4 NODE_RANK=0 MASTER_ADDR=10.0.0.1 PORT=29500' in result.stderr
    assert 'dist_test.sh c.py k.pth 8' in result.stderr


@pytest.mark.parametrize('processes, threads', [(1, '4'), (2, '2'), (3, '1'), (4, '1')])
def test_cpu(start, processes, threads):
    result = start('dist_train.sh', 'c.py', str(processes), cores=4)
    assert started(result)['argv'][:5] == torchrun(processes)
    assert started(result)['threads'] == threads
    assert 'No GPU is visible' in result.stderr and 'gloo' in result.stderr


def test_cpu_keeps_the_threads_of_the_environment(start):
    assert started(start('dist_train.sh', 'c.py', '1', cores=4, OMP_NUM_THREADS='3'))['threads'] == '3'


def test_more_processes_than_cores(start):
    result = start('dist_train.sh', 'c.py', '16', cores=2)
    assert result.returncode == 1 and result.stdout == ''
    assert '16 GPUs asked for on this node, none visible, and only 2 cores' in result.stderr
    here = shlex.split(re.search('This node has room for 2: (.+)', result.stderr)[1])
    assert here[1:] == ['c.py', '2'] and started(start('dist_train.sh', *here[1:], cores=2))['argv'][:5] == torchrun(2)
    assert re.search(r'NNODES=8 NODE_RANK=0 MASTER_ADDR=<host> PORT=29500 \S*dist_train.sh c.py 2\b', result.stderr)


def test_the_last_line_is_which_process_failed(monkeypatch):
    """What that said stands right above it, and no traceback of torchrun's below."""
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    def fail() -> None:
        raise ChildFailedError('train.py', {1: ProcessFailure(local_rank=1, pid=9, exitcode=-9, error_file='')})

    monkeypatch.setattr(run, 'main', fail)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(TOOLS / '_torchrun.py'), run_name='__main__')
    assert end.value.code == 'Rank 1 has ended with exit code -9; what it said stands above.'


@pytest.mark.parametrize('gpus', ['0', '-1', 'two', ''])
def test_gpus_is_a_number(start, gpus):
    result = start('dist_train.sh', 'c.py', gpus, gpus=8)
    assert result.returncode == 2 and f"not '{gpus}'" in result.stderr


@pytest.mark.parametrize(
    'script, arguments',
    [
        ('dist_train.sh', ['c.py']),
        ('dist_test.sh', ['c.py', 'k.pth']),
        ('slurm_train.sh', ['p', 'j']),
        ('slurm_test.sh', ['p', 'j', 'c.py']),
    ],
)
def test_missing_arguments(start, script, arguments):
    result = start(script, *arguments, gpus=8)
    assert result.returncode == 2 and result.stderr.startswith('Usage: ') and script in result.stderr


def test_nothing_is_imported_from_the_current_folder(start, tmp_path):
    """It may be somebody's folder of images."""
    images = tmp_path / 'images'
    images.mkdir()
    for name in ('torch', 'yapf', 'json'):
        (images / f'{name}.py').write_text('open("imported", "w").close()\n')
    started(start('dist_train.sh', 'config.py', '1', gpus=1, cwd=images))
    assert not (images / 'imported').exists()


def test_python_without_torch(start, tmp_path):
    broken = tmp_path / 'no_torch'
    broken.write_text('#!/bin/sh\nexit 1\n')
    broken.chmod(0o755)
    result = start('dist_train.sh', 'c.py', '1', PYTHON=str(broken))
    assert result.returncode == 1 and 'cannot import torch' in result.stderr


def test_slurm_train_on_two_nodes(start):
    result = start(
        'slurm_train.sh',
        'part',
        'job',
        'c.py',
        '--resume',
        GPUS='16',
        CPUS_PER_TASK='5',
        SRUN_ARGS='--no-kill --time=3',
    )
    assert started(result)['argv'] == [
        '--partition=part',
        '--job-name=job',
        '--ntasks=16',
        '--ntasks-per-node=8',
        '--gres=gpu:8',
        '--cpus-per-task=5',
        '--kill-on-bad-exit=1',
        '--signal=USR1@120',
        '--no-kill',
        '--time=3',
        sys.executable,
        '-u',
        str(TOOLS / 'train.py'),
        'c.py',
        '--resume',
        '--launcher',
        'slurm',
    ]


def test_slurm_test_on_part_of_a_node(start):
    done = started(start('slurm_test.sh', 'part', 'job', 'c.py', 'k.pth', GPUS='4', PORT='29511'))
    assert {'--ntasks=4', '--ntasks-per-node=4', '--gres=gpu:4'} <= set(done['argv'])
    assert done['argv'][-5:] == [str(TOOLS / 'test.py'), 'c.py', 'k.pth', '--launcher', 'slurm']
    assert done['port'] == '29511'


def test_restarts(start):
    nodes = dict(NNODES='2', MASTER_ADDR='10.0.0.1', PORT='29511')
    for place, environment in (('127.0.0.1:29500', {}), ('10.0.0.1:29511', nodes)):
        done = started(start('dist_train.sh', 'c.py', '2', gpus=2, MAX_RESTARTS='3', **environment))
        meeting = ['--rdzv-backend=c10d', '--rdzv-id=beit_mm', f'--rdzv-endpoint={place}', '--max-restarts=3']
        assert done['argv'][1:6] == [*meeting, '--nproc_per_node=2']
        assert done['own_store'] == '1'


def test_the_command_to_go_on_with(start):
    done = started(start('slurm_train.sh', 'part', 'job', 'a b.py', GPUS='4', SRUN_ARGS='--time=3 --exclusive'))
    assert done['command'] == rf'GPUS=4 SRUN_ARGS=--time=3\ --exclusive {TOOLS}/slurm_train.sh part job a\ b.py'
    done = started(start('dist_train.sh', 'c.py', '2', gpus=2, PORT='29511'))
    assert done['command'] == f'PORT=29511 {TOOLS}/dist_train.sh c.py 2'


@pytest.mark.parametrize(
    'code, state, refusal, requeued',
    [('75', 'RUNNING', '0', True), ('75', 'RUNNING', '1', False), ('75', 'COMPLETING', '0', False)]
    + [('1', 'RUNNING', '0', False), ('130', 'RUNNING', '0', False)],
)
def test_slurm_train_requeues_its_job(code, state, refusal, requeued, start, tmp_path):
    """When the training was told to stop and has saved; not when it failed, or when the job was cancelled."""
    environment = dict(SLURM_JOB_ID='12', FAKE_EXIT=code, FAKE_STATE=state, FAKE_REFUSAL=refusal)
    result = start('slurm_train.sh', 'part', 'job', 'c.py', **environment)
    assert result.returncode == int(code)
    said = tmp_path / 'scontrol.said'
    assert said.exists() == (code == '75' and state == 'RUNNING')
    assert not said.exists() or said.read_text() == 'requeue 12\n'
    assert ('job 12 is requeued' in result.stderr) == requeued
    assert ('job 12 is not requeued' in result.stderr) == (code == '75' and not requeued)


def test_slurm_train_outlives_the_signal(start, tmp_path):
    """It is there to requeue when the tasks have saved."""
    (tmp_path / 'srun').write_text('#!/bin/sh\nkill -TERM $PPID\nkill -USR1 $PPID\nsleep 0.2\nexit 75\n')
    result = start('slurm_train.sh', 'part', 'job', 'c.py', SLURM_JOB_ID='12', FAKE_STATE='RUNNING')
    assert result.returncode == 75 and (tmp_path / 'scontrol.said').exists()


def test_without_a_job_of_its_own_nothing_is_requeued(start, tmp_path):
    """srun alone: its job ends with it."""
    assert start('slurm_train.sh', 'part', 'job', 'c.py', FAKE_EXIT='75').returncode == 75
    assert not (tmp_path / 'scontrol.said').exists()


def test_without_slurm(start, tmp_path):
    (tmp_path / 'srun').unlink()
    result = start('slurm_train.sh', 'part', 'job', 'c.py', PATH='/usr/bin:/bin')
    assert result.returncode == 1 and 'without Slurm use dist_*.sh' in result.stderr


def test_scripts_behind_a_symbolic_link_know_their_repository(tmp_path):
    (tmp_path / 'tools').symlink_to(TOOLS)
    for file in ('_launch.sh', '_environment.sh'):
        command = ['bash', '-c', f'source {tmp_path / "tools" / file}; echo "$root"']
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert said.splitlines()[-1] == str(TOOLS.parent)
