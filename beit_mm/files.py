"""Writes files completely or not at all, hashes them, and makes text safe to print and to store."""

import hashlib
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def file_sha256(path: str | Path) -> str:
    """SHA-256 of a file, 64 lower-case hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open('rb') as file:
        while piece := file.read(1 << 20):  # bytes
            digest.update(piece)
    return digest.hexdigest()


def size_of_file(path: str | Path) -> int:
    """Bytes of a file; OSError for a pipe or device, which may have no end."""
    status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise OSError(f'{quoted(str(path))} is a pipe, device or folder; expected a file')
    return status.st_size


def quoted(name: str) -> str:
    """A name that fits one line of a file or message: a JSON string if spaces, line ends or other bytes require it."""
    plain = name.isprintable() and name == name.strip() and not name.startswith('"')
    return name if plain else json.dumps(name)


def unquoted(text: str) -> str:
    """The inverse of `quoted`."""
    try:
        return os.fsdecode(os.fsencode(json.loads(text))) if text.startswith('"') else text
    except ValueError:  # a name that begins with a quote
        return text


def inert(text: str) -> str:
    r"""Writes `{\x7b` for `{{` in a config's strings, because mmengine fills in templates before Python reads it."""
    return text.replace('{{', '{\\x7b')


def printable(text: str) -> str:
    r"""Escapes what a terminal would obey, as Python does (such as \x1b); line ends stay."""
    return ''.join(char if char.isprintable() or char == '\n' else repr(char)[1:-1] for char in text)


@contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """Opens a file that gets its name only once the block has ended without an error and all bytes are on the disk.

    Creates the folders above it. A process that is killed earlier leaves `NAME.<8 hexadecimal digits>.part`.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'{path.name}.{secrets.token_hex(4)}.part')  # the same folder, because it is renamed
    try:
        with partial.open('xb') as file:
            yield file
            file.flush()
        with partial.open('r+b') as file:  # opened again: a download may have replaced it
            os.fsync(file.fileno())  # otherwise a power cut could leave an empty file with the name
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    if os.name == 'nt':  # Windows cannot open a folder
        return
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name too
    finally:
        os.close(folder)


def write_lines(path: str | Path, lines: Iterable[str]) -> None:
    with atomic_file(path) as file:
        file.write(('\n'.join(lines) + '\n').encode())


def unlinked(path: str | Path) -> Path:
    """A path to write to, at which nothing is any more: what is written to a link would change another file."""
    Path(path).unlink(missing_ok=True)
    return Path(path)


def remove_leftovers(folder: Path) -> None:
    """Removes the half-written files of killed processes."""
    for path in folder.glob(f'*.{"[0-9a-f]" * 8}.part'):
        path.unlink(missing_ok=True)


def config_folders() -> list[Path]:
    """The folders that hold configs: in the checkout, and in the installed package."""
    package = Path(__file__).resolve().parent
    return [folder for folder in (package.parent / 'configs', package / '.mim/configs') if folder.is_dir()]
