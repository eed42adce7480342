"""tools/dev/gpu: on a CPU the rehearsal runs every part; what a part has measured is never lost; cuDNN's attention."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers import ROOT
from torch import Tensor

CHECK = ROOT / 'tools/dev/gpu/check.sh'
SETTINGS = ('PARTS', 'BUDGET', 'BATCH', 'WORKERS', 'PHOTOS', 'LABEL_MAPS', 'SMALL_IMAGES', 'TEACHER', 'STEPS')
# Stands in for Python: one part writes a figure and hangs, the next one fails, all else succeeds.
PYTHON = """#!/bin/bash
case "$*" in
  *sched_getaffinity*) echo 4 ;;
  *'parts.py facts') echo '{"figure": 1}' >> "$RESULTS"; echo measured; exec sleep 60 ;;
  *'parts.py images'*) mkdir -p "$STATE/images" ;;
  *'parts.py resume'*) echo why it failed >&2; exit 3 ;;
esac
"""


def check(folder: Path, *options: str, **settings: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
    """The finished process and the lines of its results."""
    environment = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    environment |= dict(PYTHON=sys.executable, STATE=str(folder / 'state')) | settings
    out = folder / f'out_{len([*folder.glob("out_*")])}'
    command = ['bash', str(CHECK), str(out), *options]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    results = out / 'results.jsonl'
    return done, [json.loads(line) for line in results.read_text().splitlines()] if results.exists() else []


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_rehearsal_runs_every_part(tmp_path):
    done, lines = check(tmp_path, '--rehearse')
    assert done.returncode == 0, done.stdout[-8000:]
    exits = {line['part']: line['exit'] for line in lines if 'title' not in line}
    wide = {'lora', 'dinov2'}  # only on a GPU
    parts = {*re.findall(r'\b(?:part|alone) (\w+) \d', CHECK.read_text())} - wide
    named = {'head_upernet', 'head_masks_decoder', 'start_none_tokens', 'start_demo_ema'}  # in loops
    assert exits == dict.fromkeys(parts | named, 0)
    summary = (tmp_path / 'out_0/summary.txt').read_text()
    assert 'beit_mm compiled' in summary and 'resumed: equal True' in summary
    kinds = 'pretrain_beit_mm', 'pretrain_beit_mm_compiled', 'finetune_beit_mm', 'finetune_beit_mm_compiled'
    traces = {file.name.removesuffix('_2.json.gz') for file in (tmp_path / 'out_0/traces').iterdir()}
    assert traces == {*kinds, 'finetune_beit_mm_waiting'}  # for each loss, as an ordinary loop would


@pytest.mark.slow
def test_what_was_measured_before_a_part_failed_or_ran_out_of_time_is_kept(tmp_path):
    python = tmp_path / 'python'
    python.write_text(PYTHON)
    python.chmod(0o755)
    done, lines = check(tmp_path, PYTHON=str(python), BUDGET='24', PARTS='fac')
    assert done.returncode == 1 and lines[0] == {'figure': 1} and lines[1]['exit'] == 124
    assert 'measured' in done.stdout and 'step_pretrain' not in done.stdout
    done, lines = check(tmp_path, PYTHON=str(python), PARTS='resume train_')
    assert {line['part']: line['exit'] for line in lines} == dict(
        images=0, resume=3, train_paper=0, train_compiled=0, train_features=0, train_features_compiled=0
    )
    assert done.returncode == 1 and 'why it failed' in done.stdout
    done, lines = check(tmp_path, PYTHON=str(python), PARTS='train', BUDGET='30')
    assert done.returncode == 1 and not lines and 'left out' in done.stdout
    python.write_text(PYTHON.replace('mkdir -p', 'false'))
    done, lines = check(tmp_path, PYTHON=str(python), STATE=str(tmp_path / 'other'), PARTS='resume facts')
    assert [line['part'] for line in lines if 'part' in line] == ['facts', 'images'] and done.returncode == 1


@pytest.mark.parametrize('wrong', [dict(PARTS='zzz'), dict(BUDGET='soon'), dict(PYTHON='no_python')])
def test_wrong_settings_are_refused(tmp_path, wrong):
    python = tmp_path / 'python'
    python.write_text(PYTHON)
    python.chmod(0o755)
    done, lines = check(tmp_path, **(dict(PYTHON=str(python)) | wrong))
    assert done.returncode == 1 and not lines and next(iter(wrong.values())) in done.stderr


def test_a_folder_with_results_and_an_unknown_option_are_refused(tmp_path):
    (tmp_path / 'out_0').mkdir()
    (tmp_path / 'out_0/results.jsonl').write_text('{"figure": 1}\n')
    done = subprocess.run(['bash', str(CHECK), str(tmp_path / 'out_0')], capture_output=True, text=True)
    assert done.returncode == 1 and str(tmp_path / 'out_0') in done.stderr
    assert (tmp_path / 'out_0/results.jsonl').read_text()
    assert subprocess.run(['bash', str(CHECK), 'out', '--rehears'], capture_output=True).returncode == 2


@pytest.fixture
def by_cudnn(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / 'tools/dev/gpu')
    import cudnn_attention

    return cudnn_attention


def qkv_and_bias() -> list[Tensor]:
    """As a block hands them over: parts of one product, and a bias whose rows are padded."""
    torch.manual_seed(0)
    q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in torch.randn(2, 5, 72).chunk(3, dim=-1))
    return [x.detach().requires_grad_() for x in (q, k, v, torch.randn(1, 3, 5, 8)[..., :5])]


def test_attention_by_cudnn_has_the_gradients_of_the_formula_in_one_graph(by_cudnn):
    inputs, exact = qkv_and_bias(), [x.detach().double().requires_grad_() for x in qkv_and_bias()]
    torch.library.opcheck(by_cudnn.attention, tuple(inputs))
    q, k, v, bias = exact
    expected = (q @ k.transpose(2, 3) / 8**0.5 + bias).softmax(dim=3) @ v
    compiled = torch.compile(by_cudnn.attend, backend='aot_eager', fullgraph=True)
    for attend in (by_cudnn.attend, compiled):
        out = attend(*inputs)
        torch.testing.assert_close(out.double(), expected, rtol=0, atol=1e-5)
        assert out.transpose(1, 2).is_contiguous()
        grad = torch.randn_like(out)
        truth = torch.autograd.grad(expected, exact, grad.double(), retain_graph=True)
        for found, wanted in zip(torch.autograd.grad(out, inputs, grad), truth, strict=True):
            torch.testing.assert_close(found.double(), wanted, rtol=0, atol=1e-5)


def test_cudnn_accepts_both_graphs(by_cudnn):
    """It checks shapes, strides and types without a GPU; the package is optional."""
    pytest.importorskip('cudnn')
    q, k, v, bias = (x.detach().bfloat16() for x in qkv_and_bias())
    out, stats = by_cudnn.empty_by_token(q), by_cudnn.empty_stats(q)
    forward = dict(q=q, k=k, v=v, bias=bias, O=out, Stats=stats)
    backward = dict(q=q, k=k, v=v, bias=bias, o=out, dO=out, stats=stats, dQ=out, dK=out, dV=out, dBias=bias)
    for name, tensors, outputs in (
        ('sdpa', forward, ('O', 'Stats')),
        ('sdpa_backward', backward, ('dQ', 'dK', 'dV', 'dBias')),
    ):
        kinds = tuple((key, tuple(x.shape), x.stride(), x.dtype) for key, x in tensors.items())
        _, handles = by_cudnn.described(name, kinds, outputs)
        assert handles.keys() == tensors.keys()
