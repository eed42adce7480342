"""The user's mistakes, and lines in the log."""

import logging
from collections.abc import Collection
from pathlib import Path


class UserError(ValueError):
    """A mistake that the user can fix; the message says what was found, what was expected and what to do."""


class CheckpointError(UserError):
    """The file is not a checkpoint, or not the one expected."""


def check_choice(name: str, value: object, choices: Collection) -> None:
    """Raises UserError for a setting that is not one of the choices."""
    if value not in choices:
        raise UserError(f'{name} is {value!r}; expected {" or ".join(map(repr, choices))}')


def check_no_folder(name: str, path: str | Path | None) -> None:
    """Raises UserError before any work is done if a file is to be written where a folder is."""
    if path is not None and Path(path).expanduser().is_dir():
        raise UserError(f'{name} is {str(path)!r}, a folder; expected the name of a file in it')


def log(message: str, level: int = logging.INFO) -> None:
    """Writes a line into the log of the run."""
    from mmengine.logging import print_log

    print_log(message, logger='current', level=level)


def warn(message: str) -> None:
    log(message, logging.WARNING)
