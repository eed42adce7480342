"""From the official archives of data sets to class folders: safe, and going on where it was stopped."""
import os
import re
import shutil
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from mmengine.utils import ProgressBar

SYNSET = re.compile(r'n\d{8}')  # a class of ImageNet


class ArchiveError(ValueError):
    """An archive that is not the one expected; the message begins with its path."""


def unpack_classes(source: Path, target: Path, num_classes: int) -> None:
    """Unpacks one archive a class into one folder a class. Finished classes are skipped, an interrupted one is redone.

    Args:
        source: a tar archive of `n########.tar`, or a folder of these.
        target: folder for the class folders.
        num_classes: how many there should be, for the progress bar.

    Raises:
        ArchiveError: something else in the archive.
        tarfile.TarError, OSError: it is damaged, or the disk is full.
    """
    target.mkdir(parents=True, exist_ok=True)
    progress = ProgressBar(num_classes)
    for name, open_class in _class_archives(source):
        if not SYNSET.fullmatch(name):
            raise ArchiveError(f'{source} holds {name!r}, expected n########.tar for each class: is it another '
                               'archive?')
        if not (target / name).exists():
            part = target / f'.{name}.part'  # hidden: whoever lists the classes meanwhile does not see it
            shutil.rmtree(part, ignore_errors=True)
            part.mkdir()
            with open_class() as file, tarfile.open(fileobj=file, mode='r|') as archive:
                for member in archive:
                    if file_name := plain_name(member, source):
                        write_file(archive.extractfile(member), part / file_name)
            part.rename(target / name)
        progress.update()
    print()


def unpack_files(source: Path, target: Path, class_of: Mapping[str, str]) -> None:
    """Unpacks an archive of photos into class folders. Files that are there already are skipped.

    Args:
        source: a tar archive.
        target: folder for the class folders.
        class_of: name of a file -> its class.

    Raises: as `unpack_classes`.
    """
    progress = ProgressBar(len(class_of))
    with open_tar(source) as archive:
        for member in archive:
            if not (name := plain_name(member, source)):
                continue
            if name not in class_of:
                raise ArchiveError(f'{source} holds {name!r}, of which the labels know nothing: is it another archive?')
            path = target / class_of[name] / name
            if not path.exists() or path.stat().st_size != member.size:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(archive.extractfile(member), path)
            progress.update()
    print()


def open_tar(path: Path) -> tarfile.TarFile:
    """Opens a tar archive; a compressed one as a stream, in which going back would begin anew."""
    try:
        return tarfile.open(path, 'r:')
    except tarfile.ReadError:
        return tarfile.open(path, 'r|*')


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


def _class_archives(source: Path) -> Iterator[tuple[str, object]]:
    """Name of each class, and what opens its archive."""
    if source.is_dir():
        for path in sorted(source.glob('*.tar')):
            yield path.stem, lambda path=path: path.open('rb')
        return
    with open_tar(source) as archive:
        for member in archive:
            if name := plain_name(member, source):
                yield name.removesuffix('.tar'), lambda member=member: archive.extractfile(member)
