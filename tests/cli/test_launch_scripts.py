"""dist_*.sh and slurm_*.sh start the right command, or stop and say what to do.

A made-up torch stands before the real one: it sees as many GPUs and cores as a test wants, and its
torch.distributed.run and the made-up srun print what they were started with. How a launched run ends is seen with
the real torchrun, which starts a short script in place of train.py.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from helpers import ROOT, run_tool

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


ALONE = ['--standalone', '--local-addr=127.0.0.1']  # at a port that torchrun draws
GIVEN = ['--nnodes=1', '--node_rank=0', '--master_addr=127.0.0.1', '--master_port=29511']
SECOND = ['--nnodes=2', '--node_rank=1', '--master_addr=10.0.0.1', '--master_port=29500']
NODE_1 = dict(NNODES='2', NODE_RANK='1', MASTER_ADDR='10.0.0.1')
RESTARTS = '--nnodes=2 --rdzv-backend=c10d --rdzv-id=beit_mm --rdzv-endpoint=10.0.0.1:29500 --max-restarts=3'.split()
SLURM = '--partition=p --job-name=j --ntasks={0} --ntasks-per-node={1} --gres=gpu:{1} --cpus-per-task=5'


@pytest.mark.parametrize(
    'line, gpus, variables, launcher, threads',
    [
        ('dist_train.sh c.py 8 --cfg-options "a=dict(b=1, c=\\"x y\\")"', 8, {}, ALONE, None),
        ('dist_test.sh c.py k.pth 2 --tta', 8, {}, ALONE, None),  # fewer than there are
        ('dist_train.sh c.py 8', 8, dict(PORT='29511'), GIVEN, None),
        ('dist_train.sh c.py 8', 8, NODE_1, SECOND, None),
        ('dist_train.sh c.py 2', 2, dict(MAX_RESTARTS='3'), [*ALONE, '--max-restarts=3'], None),
        ('dist_train.sh c.py 2', 2, dict(NODE_1, MAX_RESTARTS='3'), RESTARTS, None),
        # on a CPU with four cores, which they share
        ('dist_train.sh c.py 3', 0, {}, ALONE, '1'),
        ('dist_train.sh c.py 1', 0, dict(OMP_NUM_THREADS='3'), ALONE, '3'),
        ('dist_train.sh c.py 9', 0, dict(OVERSUBSCRIBE='1'), ALONE, '1'),
        ('slurm_train.sh p j c.py --resume', 0, dict(GPUS='16', SRUN_ARGS='--no-kill --time=3'), (16, 8), None),
        ('slurm_train.sh p j c.py', 0, dict(GPUS='16', GPUS_PER_NODE='4'), (16, 4), None),
        ('slurm_test.sh p j c.py k.pth', 0, dict(GPUS='4', PORT='29511'), (4, 4), None),  # part of a node
    ],
)
def test_the_tool_is_started_with_all_its_words(line, gpus, variables, launcher, threads, start, tmp_path):
    script, *words = shlex.split(line)
    tool = TOOLS / script.split('_')[1].replace('.sh', '.py')
    result = start(line, gpus=gpus, CPUS_PER_TASK='5', **variables)
    done = json.loads(result.stdout)
    if script.startswith('dist'):
        processes = next(word for word in words if word in '12389')
        words.remove(processes)
        started = [*launcher, f'--nproc_per_node={processes}', str(tool)]
        assert done['argv'] == [*started, *words, '--launcher', 'pytorch']
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


@pytest.mark.parametrize(
    ('variables', 'lost'), [(NODE_1, False), (dict(NODE_RANK='1'), True), (dict(NODE_RANK='0'), False)]
)
def test_a_node_that_would_train_alone_is_told(variables, lost, start):
    result = start('dist_train.sh c.py 8', gpus=8, **variables)
    assert result.returncode == 0 and ('NNODES' in result.stderr) == lost


BATCH = '--cfg-options train_dataloader.batch_size='


@pytest.mark.parametrize(
    'gpus, cores, words, suggested',
    [
        (6, 4, '--amp', '--amp'),
        (0, 2, '--amp', f'--amp {BATCH}2'),  # a GPU's batch has had processes on a CPU killed
        (0, 2, f'{BATCH}4 --amp', f'{BATCH}4 --amp'),
    ],
)
def test_too_few_gpus_or_cores_print_the_line_that_fits(start, gpus, cores, words, suggested):
    result = start(f'dist_train.sh c.py 16 {words}', gpus=gpus, cores=cores)
    assert result.returncode == 1 and result.stdout == ''
    here = re.search(r'This node has room for \d.*: (.+)', result.stderr)[1]
    assert ('two images' in result.stderr) == (words != suggested)
    argv = json.loads(start(here, gpus=gpus, cores=cores).stdout)['argv']
    assert f'--nproc_per_node={gpus or cores}' in argv
    assert argv[argv.index('c.py') :] == ['c.py', *suggested.split(), '--launcher', 'pytorch']


@pytest.mark.parametrize(
    'line, variables, code, said',
    [
        ('dist_train.sh c.py', {}, 2, 'Usage: '),
        ('dist_train.sh c.py 0', {}, 2, "GPUS is '0'"),
        ('dist_train.sh c.py 8', dict(NNODES='2', NODE_RANK='1'), 2, 'needs MASTER_ADDR'),
        ('slurm_train.sh p j c.py', dict(PYTHON='/bin/false'), 1, 'cannot import torch'),
        ('slurm_train.sh p j c.py', dict(PATH='/usr/bin:/bin'), 1, 'without Slurm use dist_*.sh'),
    ],
)
def test_what_cannot_be_started_says_why(line, variables, code, said, start):
    result = start(line, gpus=8, **variables)
    assert result.returncode == code and said in result.stderr and not result.stdout


SCRIPT = """
import os, signal, sys, time
from beit_mm.terminal import run
rank, restarts = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']
def main():
{}
run(main)
"""
Launch = Callable[..., subprocess.Popen]


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    """Starts what dist_train.sh starts, the real torchrun with two processes, in which lines stand for train.py."""

    def call(*lines: str, options: Sequence[str] = ALONE, **variables: str) -> subprocess.Popen:
        (tmp_path / 'train.py').write_text(SCRIPT.format('\n'.join(f'    {line}' for line in lines)))
        env = {key: value for key, value in os.environ.items() if key not in OURS}
        env |= dict(PYTHONPATH=str(ROOT), CUDA_VISIBLE_DEVICES='', OMP_NUM_THREADS='1')
        command = [sys.executable, TOOLS / '_torchrun.py', *options, '--nproc_per_node=2', tmp_path / 'train.py']
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return subprocess.Popen(command, env=env | variables, cwd=tmp_path, **pipes)

    return call


def end_of(run: subprocess.Popen) -> tuple[int, list[str]]:
    """Exit code, and what was said."""
    output, errors = run.communicate(timeout=60)
    assert not output
    return run.returncode, errors.splitlines()


@pytest.fixture
def port_in_use() -> Iterator[str]:
    """The default one; somebody else's use of it serves as well."""
    with socket.socket() as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # for tests beside this one
        with contextlib.suppress(OSError):
            server.bind(('', 29500))
            server.listen()
        yield '29500'


@pytest.mark.slow
def test_a_free_port_is_drawn_again_where_all_start_again(launch, port_in_use):
    options, variables = [*ALONE, '--max-restarts=1'], dict(MAX_RESTARTS='1', TORCH_DISABLE_SHARE_RDZV_TCP_STORE='1')
    run = launch('sys.exit(7 if int(restarts) < 1 else 0)', options=options, **variables)
    code, (said,) = end_of(run)
    assert code == 0 and 'exitcode: 7' in said


def test_a_port_that_is_given_and_in_use_is_one_line(port_in_use, monkeypatch):
    monkeypatch.setenv('PORT', port_in_use)
    with pytest.raises(SystemExit, match=rf'^error: PORT={port_in_use} .*choose another: PORT=\.\.\.$'):
        run_tool('_torchrun.py')


def test_a_process_that_is_killed_is_named_with_what_needs_less_memory(launch):
    """Also where the other, which has lost it, has ended too before torchrun looks."""
    hold = 'os.kill(os.getppid(), signal.SIGSTOP)', 'os.system(f"(sleep 1; kill -CONT {os.getppid()}) &")'
    code, (said,) = end_of(launch(*hold, 'os.kill(os.getpid(), signal.SIGKILL) if rank == "1" else sys.exit(1)'))
    assert code == 1 and 'rank 1 was killed' in said and 'memory' in said
    assert 'train_dataloader.batch_size=' in said and 'train_dataloader.num_workers=' in said


def test_the_first_process_to_fail_has_the_last_word(launch):
    """Others lose their connection before it has ended: they say nothing, and torchrun nothing below."""
    lost = 'raise RuntimeError("[gloo/transport/tcp/pair.cc:538] Connection closed by peer [127.0.0.1]:9640")'
    code, said = end_of(launch(f'if rank == "0": {lost}', 'time.sleep(0.5)', 'sys.exit("error: no such image")'))
    assert code == 1 and said[0] == 'error: no such image'
    assert len(said) == 2 and 'Rank 1' in said[1] and 'exit code 1' in said[1]


@pytest.mark.slow
@pytest.mark.parametrize('number, code', [(signal.SIGTERM, 75), (signal.SIGINT, 130), (signal.SIGUSR1, 75)])
def test_a_signal_to_the_launcher_reaches_the_processes_and_says_nothing(number, code, launch, tmp_path):
    numbers = '{signal.SIGTERM, signal.SIGINT}'
    wait = f'signal.pthread_sigmask(signal.SIG_BLOCK, {numbers})', 'open(f"begun{rank}", "w").close()'
    run = launch(*wait, f'signal.sigwait({numbers})', 'open(f"saved{rank}", "w").close()')
    while len([*tmp_path.glob('begun*')]) < 2:
        assert run.poll() is None
        time.sleep(0.05)
    run.send_signal(number)
    assert end_of(run) == (code, []) and len([*tmp_path.glob('saved*')]) == 2


@pytest.mark.parametrize(
    'code, state, refusal, said',
    [
        (75, 'RUNNING', '0', 'is'),
        (75, 'RUNNING', '1', 'is not'),
        (75, 'DONE', '0', 'is not'),
        (1, 'RUNNING', '0', ''),
        (130, 'RUNNING', '0', ''),
    ],
)
def test_slurm_requeues_a_job_that_was_told_to_stop_and_has_saved(code, state, refusal, said, start, tmp_path):
    """Not when it failed or the job was cancelled. It outlives the signals that end its tasks."""
    signals = ''.join(f'kill -{name} $PPID\n' for name in ('TERM', 'USR1', 'INT'))
    (tmp_path / 'srun').write_text(f'#!/bin/sh\n{signals}sleep 0.2\nexit {code}\n')
    result = start('slurm_train.sh part job c.py', FAKE_REFUSAL=refusal, SLURM_JOB_ID='12', FAKE_STATE=state)
    asked = [path.read_text() for path in tmp_path.glob('images/scontrol.said')]
    assert asked == ['requeue 12\n'] * (code == 75 and state == 'RUNNING') and result.returncode == code
    assert re.findall(r'job 12 (.+) requeued', result.stderr) == [said] * bool(said)
