"""A server's threads build and use models at once: each gets its own result, and the process stays as it was."""

import json
import subprocess
import sys
import threading
import warnings

import pytest
from helpers import ROOT
from mmengine.logging import MMLogger

from beit_mm import terminal

pytestmark = pytest.mark.long

# In a process of its own, whose threads import the package too. Prints what differs, and the process before and after.
SERVER = r"""
import json, os, sys, threading, warnings
from concurrent.futures import ThreadPoolExecutor
import numpy as np, torch
from mmengine.logging import MMLogger
from mmengine.registry import DefaultScope
import beit_mm

def state():
    scope, logger = DefaultScope.get_current_instance(), MMLogger.get_current_instance()
    handlers = [(str(each), each.level, str(each.formatter), len(each.filters)) for each in logger.handlers]
    return [scope and scope.scope_name, id(sys.stdout), torch.get_num_threads(), handlers]

def imported():
    return [str(each) for each in warnings.filters], dict(os.environ)  # libraries change these when they are imported

def answer(model, image):
    if isinstance(model, beit_mm.FeatureExtractor):
        return next(model([image], ['mean']))['mean'].tolist()
    return model([image])[0]['scores'] if model.task == 'classifier' else next(model([image]))['confidence'].tolist()

def build(number):
    barrier.wait()
    return getattr(beit_mm, NAMES[number % 3])('demo', device='cpu')

NAMES = 'ClassificationInferencer', 'SegmentationInferencer', 'FeatureExtractor'
image = np.random.default_rng(0).integers(0, 256, (48, 64, 3), dtype=np.uint8)
barrier, before = threading.Barrier(6), state()
with ThreadPoolExecutor(6) as pool:
    models = [*pool.map(build, range(6))]
    then = imported()
    truth = [answer(model, image) for model in models[:3]]
    jobs = [pool.submit(answer, models[number % 6], image) for number in range(60)]
    more = [*pool.map(build, range(12))]
    answers = [job.result() for job in jobs] + [answer(model, image) for model in more]
wrong = sum(found != truth[number % 3] for number, found in enumerate(answers))
same = before == state() and then == imported()
print(json.dumps([len(answers), wrong, same]))
"""


def test_threads_that_build_and_use_models_get_what_one_gets():
    command = [sys.executable, '-W', 'ignore', '-c', SERVER]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout.splitlines()[-1]) == [72, 0, True]


QUIET, HUSHED, TRAINING = 'quiet', 'without_output', 'training_output'


@pytest.mark.parametrize(
    'contexts',
    [
        (QUIET, QUIET, QUIET),
        (HUSHED, HUSHED, HUSHED),
        (QUIET, HUSHED, QUIET),
        (HUSHED, QUIET, HUSHED),
        (TRAINING, HUSHED, QUIET),
        (HUSHED, TRAINING, HUSHED),
        (QUIET, TRAINING, HUSHED),
    ],
    ids=' '.join,
)
def test_contexts_of_threads_that_overlap_leave_nothing_changed(contexts, capsys):
    """The first to enter leaves first, when a third has come."""

    def enter(context: str, inside: threading.Event, leave: threading.Event) -> None:
        with getattr(terminal, context)():
            inside.set()
            leave.wait(60)

    def state() -> tuple:
        levels = [each.level for each in MMLogger.get_current_instance().handlers]
        return sys.stdout, [*warnings.filters], warnings.showwarning, levels

    before = state()
    events = [(threading.Event(), threading.Event()) for _ in range(3)]
    threads = [threading.Thread(target=enter, args=(name, *pair)) for name, pair in zip(contexts, events, strict=True)]
    for thread, (inside, _) in zip(threads[:2], events, strict=False):
        thread.start()
        inside.wait(60)
    events[0][1].set()
    threads[0].join()
    print('from another thread')
    threads[2].start()
    events[2][0].wait(60)
    for (_, leave), thread in zip(events[1:], threads[1:], strict=True):
        leave.set()
        thread.join()
    assert before == state()
    assert capsys.readouterr().out == 'from another thread\n'
