"""What a terminal shows: messages that a user can act on.

Only the standard library is imported at the top, so that `--help` answers at once.
"""

import argparse
import contextlib
import contextvars
import importlib
import inspect
import io
import logging
import os
import re
import shlex
import sys
import sysconfig
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from beit_mm.errors import UserError, log
from beit_mm.files import printable

SCRIPT = 'beit-mm'  # the command that pyproject.toml names
NOISE = re.compile(  # mmengine's warnings about itself, and about tensors that our load report names
    r'"(?:FileClient|HardDiskBackend)"|The prefix is not set|Failed to search registry|do not match exactly'
    '|is skipped since its requires_grad'
)
WORKER = re.compile(r'Caught \S+ in DataLoader worker process[\s\S]*\n\S+: (?=.*$)')
UNKNOWN_TYPE = re.compile(r"[\"']?(\S+) is not in the .+? registry")  # the message of mmengine's registries
LOST = re.compile('gloo.*(by peer|Broken pipe)')  # the process at the other end is gone
SECONDS_TO_BE_ENDED = 3.0
LESS_MEMORY = 'A smaller batch needs less: --cfg-options train_dataloader.batch_size=... (test_dataloader in tests)'
ADVICE = {  # what to do about errors of libraries that a config causes, by their messages
    'is not a subset of classes': 'give all data sets the same metainfo=dict(classes=...)',
    'in(?:formation of)? the .*-th dataset': 'give the data sets of a ConcatDataset the same classes',
    'Do not support sampling function|Scale must be a number or tuple': 'write scale as a tuple, (width, height)',
    'base_wd should not be None': 'set optim_wrapper.optimizer.weight_decay, which paramwise_cfg multiplies',
    'is only available training on gpu': 'use beit_mm.AutocastOptimWrapper instead of AmpOptimWrapper',
    'weight tensor should be defined either for all or no classes': 'give class_weight a number for each class',
    'more than 1 value per channel when training': 'set train_dataloader.batch_size=2 or more, or --batch of finetune',
    'persistent_workers option needs': 'with num_workers=0 set persistent_workers=False too',
    'Cannot infer the rule for key': "set rule='greater' or 'less' in default_hooks.checkpoint",
}
CODE_OF_OTHERS = (sysconfig.get_path('stdlib'), sysconfig.get_path('purelib'), os.path.dirname(__file__), '<')
LIBRARIES = ('mmengine', 'mmcv', 'mmpretrain', 'mmseg')
importing = threading.RLock()
is_hushed = contextvars.ContextVar('is_hushed', default=False)  # each thread begins with the default
BUILDERS = ('build_from_cfg', 'build_scheduler_from_cfg')  # mmengine's, which hand a config's keys to a class


def program() -> str:
    """The words before the verb, as the user typed them."""
    return SCRIPT if Path(sys.argv[0]).stem == SCRIPT else 'python -m beit_mm'


def typed() -> str | None:
    """The command line that called a verb or tools/train.py; None for a call in Python."""
    if program() == SCRIPT:
        return shlex.join([SCRIPT, *sys.argv[1:]])
    is_program = Path(sys.argv[0]).absolute().parts[-2:] in (('beit_mm', '__main__.py'), ('tools', 'train.py'))
    return shlex.join(sys.orig_argv) if is_program else None


def say(text: object) -> None:
    r"""Prints one line; escapes special characters, which names of files and classes, and URLs, may hold."""
    print(printable(str(text)).replace('\n', r'\n'), flush=True)


class Parser(argparse.ArgumentParser):
    """Escapes words of the command line that its messages repeat: a pattern can stand for any file name."""

    def error(self, message: str) -> NoReturn:
        if re.fullmatch(r'unrecognized arguments: [^-]\S*', message):
            message += f'; if results go there, type --out {message.split()[-1]}'
        super().error(printable(message))


class Shared:
    """Makes threads share a context that changes the process: the first one enters it, the last one leaves it.

    A context that others have been entered on top of is left after these, because each restores what it found.
    """

    changing = threading.Lock()
    entered: list['Shared'] = []  # all kinds, in their order

    def __init__(self, context: Callable[[], contextlib.AbstractContextManager]) -> None:
        self.context, self.stack, self.inside = context, contextlib.ExitStack(), 0

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        with self.changing:
            if self not in self.entered:
                self.stack.enter_context(self.context())
                self.entered.append(self)
            self.inside += 1
        try:
            yield
        finally:
            with self.changing:
                self.inside -= 1
                while self.entered and not self.entered[-1].inside:
                    self.entered.pop().stack.close()


@Shared
@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Inside, Python's warnings are those of user code, and mmengine's logger shows only warnings."""
    with warnings.catch_warnings():
        warnings.simplefilter('default')
        warnings.showwarning = log_warning  # type: ignore[assignment]
        from mmengine.logging import MMLogger

        logger = MMLogger.get_current_instance()
        before = [(each, each.level, each.formatter, [*each.filters]) for each in logger.handlers]
        hush(logger)
        try:
            yield
        finally:
            for handler, level, formatter, filters in before:
                handler.level, handler.formatter, handler.filters = level, formatter, filters


def quiet_import(name: str) -> Any:
    """Imports a module, one thread at a time: in a circular import another thread would get a module half loaded."""
    with importing, without_output():
        return importlib.import_module(name)


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Hides warnings, and what this thread prints: mmpretrain and mmseg do when they are imported."""
    with output_by_thread():
        before = is_hushed.set(True)
        try:
            yield
        finally:
            is_hushed.reset(before)


class Output:
    """Standard output, less what hushed threads print."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def write(self, text: str) -> int:
        return len(text) if is_hushed.get() else self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@Shared
@contextlib.contextmanager
def output_by_thread() -> Iterator[None]:
    with warnings.catch_warnings(), contextlib.redirect_stdout(Output(sys.stdout)):  # type: ignore[type-var]
        warnings.simplefilter('ignore')
        yield


def log_warning(message: Any, category: type, filename: str, lineno: int, *_: Any) -> None:
    """Replaces `warnings.showwarning`: warnings of libraries, except mmengine's hooks, are logged but not shown."""
    is_shown = not filename.startswith(CODE_OF_OTHERS) or 'mmengine/hooks' in filename
    text = f'{filename}:{lineno}: {category.__name__}: {message}'
    log(text, logging.WARNING if is_shown else logging.INFO)


class TrainingOutput(Output):
    """Standard output of a training: all of it is logged, and shown unless a library's print_log prints it."""

    line = ''  # not complete yet

    def write(self, text: str) -> int:
        from mmengine.logging import MMLogger

        frame: Any = inspect.currentframe().f_back  # type: ignore[union-attr]
        printing, caller = (each.f_globals['__name__'] if each else '' for each in (frame, frame.f_back))
        if printing != 'mmengine.logging.logger' or caller.partition('.')[0] not in LIBRARIES:
            self.stream.write(text)
        if printing == 'logging':  # a logger that writes to this stream; mmengine's has the record in its file
            return len(text)
        self.line += text
        if text.endswith('\n'):
            record = dict(name='print', levelno=logging.INFO, levelname='INFO', msg=self.line.rstrip('\n'))
            for handler in MMLogger.get_current_instance().handlers:
                if isinstance(handler, logging.FileHandler):
                    handler.handle(logging.makeLogRecord(record))
            self.line = ''
        return len(text)


training_output = Shared(lambda: contextlib.redirect_stdout(TrainingOutput(sys.stdout)))  # type: ignore[type-var]


def hush(logger: logging.Logger) -> list[logging.Handler]:
    """Lets a logger write to the terminal only what a user can act on; returns the handlers that write there."""
    handlers = [handler for handler in logger.handlers if not isinstance(handler, logging.FileHandler)]
    for handler in handlers:
        handler.setLevel(max(handler.level, logging.WARNING))  # on other ranks mmengine shows only errors
        handler.addFilter(worth_reading)
        handler.setFormatter(logging.Formatter('warning: %(message)s'))
    return handlers


def worth_reading(record: logging.LogRecord) -> bool:
    return printable_record(record) and not NOISE.search(record.msg)


def printable_record(record: logging.LogRecord) -> bool:
    """Makes a record's message printable: a filter for handlers that lets every record pass."""
    record.msg, record.args = printable(record.getMessage()), ()
    return True


def with_bar(results: Iterable[Any], number: int) -> Iterator[Any]:
    """Passes results on; a bar counts them if standard error is a terminal."""
    from rich.console import Console
    from rich.progress import track

    yield from track(results, '', number, console=Console(stderr=True), disable=not sys.stderr.isatty())


def run(main: Callable[[], None]) -> None:
    """Calls the main function of a command; a user's mistake ends it with one line, a bug with a traceback."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors='backslashreplace')  # names of files may be any bytes
    # Pillow logs some errors of files before it raises them; without a handler they are printed for each file
    logging.getLogger('PIL').addHandler(logging.NullHandler())
    try:
        main()
    except KeyboardInterrupt:
        print('stopped', file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if LOST.search(str(error)):  # meanwhile the launcher ends this process, so the real cause is printed last
            time.sleep(SECONDS_TO_BE_ENDED)
        if (message := message_for_user(error)) is None:
            raise
        sys.exit(f'error: {printable(message)}')


def message_for_user(error: BaseException) -> str | None:
    """The message for the user in a chain of errors; None for a bug."""
    message: str | None = None
    cause: BaseException | None = error
    while message is None and cause:
        message = message_of_user_error(cause)
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    if message is None and isinstance(error, OSError):
        message = str(error)
    return message and WORKER.sub('', message.rstrip())


def message_of_user_error(error: BaseException) -> str | None:
    """The message of an error that the user, the machine or another process caused; else None."""
    text, raised_in = str(error), [frame.name for frame in traceback.extract_tb(error.__traceback__)][-1:]
    if isinstance(error, UserError):
        return text
    if isinstance(error, ImportError):
        return text if 'pip install' in text else None  # as of wandb's backend
    if isinstance(error, KeyError):
        unknown = UNKNOWN_TYPE.match(text)
        if raised_in == ['_save_best_checkpoint']:  # of mmengine's CheckpointHook
            return f'save_best is {text}, which the validation does not measure'
        return f'no registry has the type {unknown[1]!r}' if unknown else None
    if isinstance(error, TypeError) and 'unexpected keyword' in text:
        return text if {*raised_in} & {*BUILDERS} else None
    if type(error).__name__ == 'OutOfMemoryError' or 'DefaultCPUAllocator' in text:  # torch's, on a GPU and a CPU
        return f'{". ".join(text.split(". ")[:2])}. {LESS_MEMORY}, or --batch of pretrain and finetune'
    for message, advice in ADVICE.items():
        if re.search(message, text):
            return f'{WORKER.sub("", text.rstrip()):.300}; {advice}'
    if LOST.search(text):
        return f'another process has ended, or can no longer be reached ({text})'
    return None
