"""Trainings and tests that need each other's results: what is finished, running them, going on after a stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from beit_mm.terminal import UserError

ROOT = Path(__file__).resolve().parents[1]
RECORD = 'reproduce_table.json'  # in a run's folder: what it was started with
POLL = 0.2  # seconds
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class StoppedError(Exception):
    """A signal asks for the end."""


@dataclass(eq=False)
class Step:
    """One command of a table: a training or a test.

    Args:
        title: what is printed of it.
        command: its words, as typed in the repository's root.
        result: the file that is there when it is finished.
        after: steps that it needs.
        weight: expected cost, in seconds of one core at demo scale, in images at full scale.
        recorded: what a run may not be resumed without, such as its options; empty for a test.
    """

    title: str
    command: list[str]
    result: Path
    after: list[Step] = field(default_factory=list)
    weight: float = 1.0
    recorded: list[str] = field(default_factory=list)

    @property
    def log(self) -> Path:
        return self.result.parent / ('train.log' if self.recorded else 'test.log')

    def finished(self) -> bool:
        """Whether its result is there."""
        if self.recorded or not self.result.exists():
            return self.result.exists()
        try:  # a test that was killed may have left half a file
            return bool(json.loads(self.result.read_text()))
        except ValueError:
            return False

    def record(self) -> dict:
        """What the run is made with: options, and which runs it starts from."""
        runs = {str(step.result): read(step.result.parent / 'run_id') for step in self.after}
        return dict(run=self.recorded, starts_from=runs)

    def check(self) -> None:
        """Raises ValueError where the folder holds a run that was made in another way."""
        if not self.recorded or not (text := read(self.result.parent / RECORD)):
            return
        known, wanted = json.loads(text), self.record()
        if known['run'] != wanted['run']:
            changed = ' '.join(sorted(set(known['run']) ^ set(wanted['run']))) or 'their order'
            raise UserError(f'{self.result.parent} holds a run with other options ({changed}); move it away')
        if all(step.finished() for step in self.after) and known != wanted:
            sources = ', '.join(wanted['starts_from'])
            raise UserError(f'{self.result.parent} started from another {sources}; move it away to run it again')


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ''


def with_predecessors(steps: list[Step]) -> list[Step]:
    """The steps and all that they need, each once, behind what it needs."""
    found: dict[Step, None] = {}
    for step in steps:
        for needed in (*with_predecessors(step.after), step):
            found.setdefault(needed)
    return list(found)


class Execution:
    """Runs steps, some at a time, each as soon as those before it are finished.

    Args:
        steps: all of them.
        jobs: processes at a time.
        clock: the weights are seconds, so that there is an estimate before anything is finished.
    """

    def __init__(self, steps: list[Step], jobs: int, clock: bool):
        self.steps, self.jobs, self.clock = steps, jobs, clock
        self.waiting = [step for step in steps if not step.finished()]
        self.running: dict[subprocess.Popen, tuple[Step, float]] = {}
        self.failed: list[Step] = []
        self.weight = self.seconds = 0.0  # of what is finished here
        self.began = time.monotonic()
        # Longest way to the end first, so that no long run stands alone at the end.
        self.rank: dict[Step, float] = {}
        for step in reversed(steps):  # a step stands behind those that it needs
            followers = (self.rank[other] for other in steps if step in other.after)
            self.rank[step] = step.weight + max(followers, default=0.0)

    def run(self) -> None:
        """Until all is done, or all that did not fail; a signal is passed on and raises StoppedError."""
        handlers = {number: signal.signal(number, self.stop) for number in STOPS}
        try:
            while self.waiting or self.running:
                self.start()
                if not self.running:
                    return  # what waits needs what failed
                time.sleep(POLL)
                for process in [process for process in self.running if process.poll() is not None]:
                    self.end(process)
        except StoppedError:
            for process in self.running:
                process.send_signal(signal.SIGTERM)  # which saves where it is
            for process in self.running:
                process.wait()
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    @staticmethod
    def stop(number: int, frame: object) -> None:
        for other in STOPS:
            signal.signal(other, signal.SIG_IGN)
        raise StoppedError

    def start(self) -> None:
        """Starts what can be."""
        ready = [step for step in self.waiting if all(other.finished() for other in step.after)]
        if self.jobs > 1:
            ready.sort(key=lambda step: -self.rank[step])
        for step in ready[: self.jobs - len(self.running)]:
            self.waiting.remove(step)
            step.check()
            step.result.parent.mkdir(parents=True, exist_ok=True)
            if step.recorded:
                (step.result.parent / RECORD).write_text(json.dumps(step.record(), indent=2) + '\n')
            self.say('starts', step, f'log in {step.log}')
            environment = dict(os.environ)
            if self.jobs > 1:
                environment.setdefault('OMP_NUM_THREADS', str(max(1, (os.cpu_count() or 1) // self.jobs)))
            with step.log.open('a') as log:
                process = subprocess.Popen(
                    executable(step.command),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    start_new_session=True,  # Ctrl-C comes to this process alone, which passes it on once
                )
            self.running[process] = step, time.monotonic()

    def end(self, process: subprocess.Popen) -> None:
        """Counts a process that has ended."""
        step, began = self.running.pop(process)
        if process.returncode or not step.finished():
            self.failed.append(step)
            lines = step.log.read_text(errors='replace').splitlines() or ['nothing was printed']
            self.say(f'FAILED with {process.returncode}:', step, f'{lines[-1]} (see {step.log})')
            return
        self.weight += step.weight
        self.seconds += time.monotonic() - began
        self.say('finished', step, f'in {clock(time.monotonic() - began)}')

    def say(self, what: str, step: Step, rest: str) -> None:
        number = len(self.steps) - len(self.waiting) - len(self.running) - len(self.failed)
        left = self.estimate()
        ending = '' if left is None else f', about {clock(left)} left'
        spent = clock(time.monotonic() - self.began)
        print(f'[{number}/{len(self.steps)}] {what} {step.title}: {rest}; {spent} so far{ending}', flush=True)

    def estimate(self) -> float | None:
        """Seconds that are left, by the speed of what was finished here."""
        if not self.weight and not self.clock:
            return None
        speed = self.weight / self.seconds if self.weight else 1.0
        now = time.monotonic()
        parts = [max(0.0, step.weight / speed - (now - began)) for step, began in self.running.values()]
        work = sum(parts) + sum(step.weight for step in self.waiting) / speed
        longest = max((self.rank[step] / speed for step in self.waiting), default=0.0)
        return max([work / self.jobs, longest, *parts])


def executable(command: list[str]) -> list[str]:
    """The command from wherever this tool was called: scripts and configs are the repository's."""
    words = [str(ROOT / word) if word.startswith(('tools/', 'configs/')) else word for word in command]
    return [sys.executable if words[0] == 'python' else words[0], *words[1:]]


def clock(seconds: float) -> str:
    return f'{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}'
