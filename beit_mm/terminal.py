"""What a terminal gets to see: nothing of the libraries that a user cannot act on, and one line for a mistake.

Only the standard library is imported before somebody asks for more, so that `--help` answers at once.
"""

import contextlib
import importlib
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

LIBRARIES = ('mmpretrain.datasets', 'mmseg.datasets')  # print and warn when they are imported
NOISE = re.compile(  # warnings of mmengine about itself, and of tensors that our load report names
    r'"(?:FileClient|HardDiskBackend)"|The prefix is not set|Failed to search registry|do not match exactly'
)
WORKER = re.compile(r'Caught \S+ in DataLoader worker process[\s\S]*\n\S+: (?=.*$)')
UNKNOWN_TYPE = re.compile(r"[\"']?(\S+) is not in the \S+ registry")  # of mmengine's registries


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Imports the libraries silently; inside, Python's warnings are off and mmengine's logger says warnings only."""
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        with without_output():
            for name in LIBRARIES:
                with contextlib.suppress(ImportError):  # mmseg may be missing; who needs a library will say so
                    importlib.import_module(name)
        from mmengine.logging import MMLogger

        before = hush(MMLogger.get_current_instance())
        try:
            yield
        finally:
            for handler, (level, formatter) in before.items():
                handler.setLevel(level)
                handler.setFormatter(formatter)
                handler.removeFilter(worth_reading)


@contextlib.contextmanager
def without_output() -> Iterator[None]:
    """Lets nothing through that is printed: mmengine prints which files it reads."""
    with open(os.devnull, 'w') as nothing, contextlib.redirect_stdout(nothing):
        yield


def hush(logger: logging.Logger) -> dict[logging.Handler, tuple[int, logging.Formatter | None]]:
    """Lets a logger write to the terminal only what a user can act on; its files get everything.

    Returns:
        The handlers that were changed, each with the level and the formatter that it had.
    """
    handlers = [handler for handler in logger.handlers if not isinstance(handler, logging.FileHandler)]
    before = {handler: (handler.level, handler.formatter) for handler in handlers}
    for handler in handlers:
        handler.setLevel(logging.WARNING)
        handler.addFilter(worth_reading)
        handler.setFormatter(logging.Formatter('warning: %(message)s'))
    return before


def worth_reading(record: logging.LogRecord) -> bool:
    """Whether a record is more than noise."""
    return not NOISE.search(record.getMessage())


def with_bar(items: Sequence[Any]) -> Iterator[Any]:
    """The items; where the standard error output is a terminal, a bar shows how many have been taken."""
    if not sys.stderr.isatty():
        yield from items
        return
    from mmengine.utils import ProgressBar

    bar = ProgressBar(len(items), file=sys.stderr)
    for item in items:
        yield item
        bar.update()
    print(file=sys.stderr)


def folder_of_images(path: str | Path) -> Path:
    """An existing folder, without links and `~`.

    Raises:
        FileNotFoundError: there is none such.
    """
    folder = Path(path).expanduser().resolve()
    if not folder.is_dir():
        what = 'is a file' if folder.exists() else 'does not exist'
        raise FileNotFoundError(f'{str(path)!r} {what}; expected a folder of images')
    return folder


def run(main: Callable[[], None], *folders: str) -> None:
    """Calls the main function of a command; a user's mistake ends it with one line, a fault of ours with a traceback.

    Args:
        main: without arguments.
        folders: of code that counts as ours, beside the package.
    """
    try:
        main()
    except KeyboardInterrupt:
        print('stopped', file=sys.stderr)
        sys.exit(130)
    except Exception as error:
        if (message := message_for_user(error, *folders)) is None:
            raise
        sys.exit(f'error: {message}')


def message_for_user(error: BaseException, *folders: str) -> str | None:
    """The message that was written for the user: of the first error in the chain that code of ours raised.

    mmengine raises errors of what it builds again, with the class before the message. Of other code only errors of the
    operating system count, such as a file that is missing.

    Args:
        error: that ended a command.
        folders: of code that counts as ours, beside the package.

    Returns:
        The message; None where the error is none of the user's.
    """
    own = (str(Path(__file__).parent), *folders)
    chain = [error]
    while following := chain[-1].__cause__ or (not chain[-1].__suppress_context__ and chain[-1].__context__):
        chain.append(following)
    for link in chain:
        frame = traceback.extract_tb(link.__traceback__)[-1]
        if frame.filename.startswith(own) and (frame.line or '').startswith('raise'):
            return str(link)
        if isinstance(link, KeyError) and (missing := UNKNOWN_TYPE.match(str(link))):
            return unknown_type(missing[1])
    if isinstance(error, OSError):
        # of a process that reads images torch hands on the whole traceback, which ends with "class: message"
        return WORKER.sub('', str(error).rstrip()) if WORKER.match(str(error)) else str(error)
    return None


def unknown_type(name: str) -> str:
    """What to say of a `type` that no registry has."""
    from difflib import get_close_matches
    from importlib.util import find_spec

    from mmengine.registry import Registry

    from beit_mm import registry

    ours = [child for child in vars(registry).values() if isinstance(child, Registry)]
    full = {f'beit_mm.{own}' for child in ours for own in (child.import_from_location(), *child.module_dict)[1:]}
    near = get_close_matches(f'beit_mm.{name.rpartition(".")[2]}', full, n=1, cutoff=0.8)
    message = f'no registry has the type {name!r}'
    if near:
        message += f'; did you mean {near[0]!r}?'
    if find_spec('mmseg') is None:
        message += ' What belongs to segmentation needs mmsegmentation, which is not installed.'
    return message
