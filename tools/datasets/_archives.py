"""What the preparation scripts share: unpacking class archives, and errors of one line."""

import lzma
import re
import shutil
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from beit_mm.terminal import UserError

MAX_GROWTH = 8  # bytes unpacked for each of an archive's: images hardly shrink
MIN_UNPACKED = 1 << 30  # bytes that any archive may unpack to
MAX_MEMORY = 1 << 30  # bytes that reading a table of classes may take
PIECE = 1 << 20  # bytes copied at a time
BLOCK = tarfile.BLOCKSIZE  # that a member takes in an archive even when it is empty
SYNSET = re.compile(r'n\d{8}')  # name of an ImageNet class
DAMAGED = (tarfile.TarError, zipfile.BadZipFile, EOFError, zlib.error, lzma.LZMAError, MemoryError)


class ArchiveError(UserError):
    """An archive that is not the one expected."""


class Budget:
    """Bytes that an archive may still unpack to: a few kilobytes could otherwise fill a disk.

    Sparse members claim what they do not hold, compressed ones shrink a thousandfold.
    """

    def __init__(self, source: Path):
        size = sum(path.stat().st_size for path in source.glob('*.tar')) if source.is_dir() else source.stat().st_size
        self.source, self.left = source, max(MAX_GROWTH * size, MIN_UNPACKED)

    def spend(self, size: int) -> None:
        """Raises ArchiveError when more is unpacked than there may be."""
        self.left -= size
        if self.left < 0:
            raise ArchiveError(f'{self.source} unpacks to more than {MAX_GROWTH} times its size: another archive?')


@contextmanager
def one_line_errors(source: Path) -> Iterator[None]:
    """Ends the script with one line where the archive `source` is missing, damaged or another one."""
    try:
        yield
    except DAMAGED as error:
        reason = f'{type(error).__name__}: {error}'.splitlines()[0]
        sys.exit(f'error: {source}: damaged or incomplete ({reason}); download it again')
    except (ArchiveError, OSError) as error:
        sys.exit(f'error: {error}')


@contextmanager
def memory_limit() -> Iterator[None]:
    """Lets the process take at most MAX_MEMORY more bytes, then MemoryError; on Linux, elsewhere as much as there is.

    MATLAB's arrays take whatever a few bytes of a file say. Not for code with threads: one that cannot start is waited
    for without end.
    """
    pages = Path('/proc/self/statm')
    if not pages.exists():
        yield
        return
    import resource

    before = resource.getrlimit(resource.RLIMIT_AS)
    limit = int(pages.read_text().split()[0]) * resource.getpagesize() + MAX_MEMORY
    if before[0] != resource.RLIM_INFINITY:
        limit = min(limit, before[0])
    resource.setrlimit(resource.RLIMIT_AS, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


class Member(tarfile.TarInfo):
    """A member of an archive. tarfile takes a damaged header for the end of the archive; here it is an error."""

    @classmethod
    def fromtarfile(cls, archive: tarfile.TarFile) -> 'Member':
        try:
            return super().fromtarfile(archive)
        except (tarfile.InvalidHeaderError, tarfile.TruncatedHeaderError) as error:
            raise tarfile.ReadError(str(error)) from None


def open_tar(source: Path) -> tarfile.TarFile:
    """Opens a tar archive; a compressed one as a stream, because going back in it would begin anew."""
    try:
        return tarfile.open(source, 'r:', tarinfo=Member)
    except tarfile.ReadError:
        return tarfile.open(source, 'r|*', tarinfo=Member)


def unpack_classes(source: Path, target: Path) -> None:
    """Unpacks one archive a class, `n########.tar`, into one folder a class.

    Finished classes are skipped; an interrupted one is unpacked again.

    Args:
        source: a tar archive of the class archives, or a folder of them.
        target: folder to make the class folders in.

    Raises:
        ArchiveError: no class archive, something else, or far more than the archive's size in `source`.
        tarfile.TarError, EOFError, zlib.error: damaged; a member that leads out of its class folder.
    """
    from rich.progress import track

    name, budget = None, Budget(source)
    for name, open_file in track(class_archives(source), 'classes', total=None):
        if not SYNSET.fullmatch(name):
            raise ArchiveError(f'{source} holds {name!r}, expected n########.tar for each class: another archive?')
        folder = target / name
        if folder.exists():
            continue
        part = target / f'.{name}.part'  # hidden: whoever lists the classes meanwhile does not see it
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        with tarfile.open(fileobj=open_file(), mode='r|', tarinfo=Member) as archive:
            for member in archive:
                budget.spend(BLOCK + member.size)
                if not (member.isfile() or member.isdir()):
                    raise ArchiveError(f'{source} holds {member.name!r}, which is no file: another archive?')
                archive.extract(member, part, filter='data')  # nothing is written outside of the folder
        part.rename(folder)
    if name is None:
        raise ArchiveError(f'{source} holds no archive of a class, expected n########.tar for each')


def class_archives(source: Path) -> Iterator[tuple[str, Callable[[], BinaryIO]]]:
    """Name of each class, and what opens its archive."""
    if source.is_dir():
        for path in sorted(source.glob('*.tar')):
            yield path.stem, lambda path=path: path.open('rb')
        return
    with open_tar(source) as archive:
        for member in archive:
            if member.isfile():
                yield Path(member.name).stem, lambda member=member: archive.extractfile(member)


def write_file(content: BinaryIO, path: Path, budget: Budget) -> None:
    """Writes a file whole or not at all, as far as the budget goes."""
    part = path.with_name(f'.{path.name}.part')
    path.parent.mkdir(parents=True, exist_ok=True)
    with content, part.open('wb') as file:
        while piece := content.read(PIECE):
            budget.spend(len(piece))
            file.write(piece)
    part.replace(path)
