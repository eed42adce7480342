"""From the official archives of data sets to class folders: safe, and going on where it was stopped."""
import os
import re
import shutil
import tarfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from gzip import BadGzipFile
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mmengine.utils import ProgressBar

SYNSET = re.compile(r'n\d{8}')  # a class of ImageNet
DAMAGED = (tarfile.TarError, EOFError, zlib.error, BadGzipFile, LZMAError)  # what reading half a download raises


class ArchiveError(ValueError):
    """An archive that is not the one expected; the message begins with its path."""


def unpack_classes(source: Path, target: Path, num_classes: int) -> None:
    """Unpacks one archive a class into one folder a class. Finished classes are skipped, an interrupted one is redone.

    Args:
        source: a tar archive of `n########.tar`, or a folder of these.
        target: folder for the class folders.
        num_classes: how many there should be, for the progress bar.

    Raises:
        ArchiveError: no or something else in the archive, or it is damaged.
        OSError: no such archive, or the disk is full.
    """
    archives = 0
    with intact(source), progress_bar(num_classes) as update:
        for name, open_class in _class_archives(source):
            if not SYNSET.fullmatch(name):
                raise ArchiveError(f'{source} holds {name!r}, expected n########.tar for each class: is it another '
                                   'archive?')
            if not (target / name).exists():
                _unpack_class(source, open_class, target / name)
            archives += 1
            update()
        if not archives:
            raise ArchiveError(f'{source} holds no archive of a class, expected n########.tar for each: is it another '
                               f'{"folder" if source.is_dir() else "archive"}?')


def unpack_files(source: Path, target: Path, class_of: Mapping[str, str]) -> None:
    """Unpacks an archive of images into class folders. Files that are there already are skipped.

    Args:
        source: a tar archive.
        target: folder for the class folders.
        class_of: name of a file -> its class.

    Raises: as `unpack_classes`.
    """
    with intact(source), progress_bar(len(class_of)) as update, open_tar(source) as archive:
        for member in archive:
            if not (name := plain_name(member, source)):
                continue
            if name not in class_of:
                raise ArchiveError(f'{source} holds {name!r}, of which the labels know nothing: is it another archive?')
            path = target / class_of[name] / name
            if not path.exists() or path.stat().st_size != member.size:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(archive.extractfile(member), path)
            update()


@contextmanager
def intact(source: Path, *errors: type[Exception]) -> Iterator[None]:
    """Turns what a damaged archive raises, and `errors`, into an ArchiveError of one line that names it."""
    try:
        yield
    except (*DAMAGED, *errors) as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        raise ArchiveError(f'{source}: damaged or incomplete ({reason}); download it again') from error


@contextmanager
def progress_bar(steps: int) -> Iterator[Callable[[], None]]:
    """A bar and what moves it one step on; its line is ended whatever happens, so that an error begins a new one."""
    bar = ProgressBar(steps)
    try:
        yield bar.update
    finally:
        print()


class WholeMember(tarfile.TarInfo):
    """A member of an archive; tarfile itself takes a damaged header, but for the first, for the archive's end."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> 'WholeMember':
        """The next member."""
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(str(error)) from None


def open_tar(path: Path) -> tarfile.TarFile:
    """Opens a tar archive; a compressed one as a stream, in which going back would begin anew."""
    try:
        return tarfile.open(path, 'r:', tarinfo=WholeMember)
    except tarfile.ReadError:
        return tarfile.open(path, 'r|*', tarinfo=WholeMember)


def plain_name(member: tarfile.TarInfo, archive: Path) -> str | None:
    """File name of a member without its folders, None for a folder.

    Raises:
        ArchiveError: a link, a device, or a path that leads out of the archive.
    """
    path = PurePosixPath(member.name)
    if member.isdir():
        return None
    if not member.isfile() or path.is_absolute() or '..' in path.parts or '\\' in path.name or not path.name:
        raise ArchiveError(f'{archive} holds {member.name!r}, which is no plain file inside of it; it was not written')
    return path.name


def write_file(content: BinaryIO, path: Path) -> None:
    """Writes a file whole or not at all."""
    part = path.with_name(f'.{path.name}.part')
    with content, part.open('wb') as file:
        shutil.copyfileobj(content, file)
    os.replace(part, path)


def _unpack_class(source: Path, open_class: Callable[[], BinaryIO], folder: Path) -> None:
    """Makes the folder of a class, whole or not at all."""
    part = folder.with_name(f'.{folder.name}.part')  # hidden: whoever lists the classes meanwhile does not see it
    shutil.rmtree(part, ignore_errors=True)
    part.mkdir(parents=True)
    source = source / f'{folder.name}.tar' if source.is_dir() else source
    with intact(source), open_class() as file:
        with tarfile.open(fileobj=file, mode='r|', tarinfo=WholeMember) as archive:
            for member in archive:
                if name := plain_name(member, source):
                    write_file(archive.extractfile(member), part / name)
    part.rename(folder)


def _class_archives(source: Path) -> Iterator[tuple[str, Callable[[], BinaryIO]]]:
    """Name of each class, and what opens its archive."""
    if source.is_dir():
        for path in sorted(source.glob('*.tar')):
            yield path.stem, lambda path=path: path.open('rb')
        return
    with open_tar(source) as archive:
        for member in archive:
            if name := plain_name(member, source):
                yield name.removesuffix('.tar'), lambda member=member: archive.extractfile(member)
