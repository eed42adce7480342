"""Without what only Linux and macOS have, runs of one process and the verbs work; this hides it on Linux."""

import subprocess
import sys

import pytest
from helpers import ROOT
from labelled import make_images

pytestmark = pytest.mark.long

# Hidden once the libraries are imported, which have their own ways
HIDDEN = """
import os, signal, sys
import filelock, torch, mmengine.runner, mmpretrain.datasets
from beit_mm.own_images import images
for name in ('fcntl', 'termios', 'pwd', 'grp'):  # and resource, which mmengine imports except on Windows
    sys.modules[name] = None
for name in ('SIGHUP', 'SIGUSR1', 'SIGUSR2', 'sigwaitinfo', 'pthread_sigmask'):
    delattr(signal, name)
for name in ('EX_TEMPFAIL', 'pread', 'fork'):
    delattr(os, name)
images.MIN_IMAGES = 10
import beit_mm
folder, run = sys.argv[1:]
beit_mm.finetune(folder, run, epochs=0.5, batch=4, workers=0)
assert len(beit_mm.classify(run, folder)) == 36
beit_mm.segment('demo', folder + '/red', run + '_maps')
beit_mm.embed('demo', folder, run + '.npz', device='cpu')
"""


def test_verbs_and_a_training_need_no_fcntl_and_no_signals_of_posix(tmp_path):
    images = make_images(tmp_path / 'images', 12) / 'train'
    command = [sys.executable, '-W', 'ignore', '-c', HIDDEN, images, tmp_path / 'run']
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / 'run/report.md').is_file() and (tmp_path / 'run.npz').is_file()
