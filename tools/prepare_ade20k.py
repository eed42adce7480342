"""Unpacks ADE20K's scene parsing benchmark (150 classes) from its official archive.

    python tools/prepare_ade20k.py ADEChallengeData2016.zip data/ade20k

The archive is at http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip. It makes
images/{training,validation}/*.jpg, annotations/{training,validation}/*.png and objectInfo150.txt, the table of the
classes; run again after an interruption, it goes on where it was.
"""
import argparse
import sys
import zipfile
from pathlib import Path, PurePosixPath

from mmengine.utils import ProgressBar

from beit_mm.datasets.archives import ArchiveError, write_file
from beit_mm.datasets.image_folder import list_images

COUNTS = dict(training=20_210, validation=2_000)
KINDS = dict(images='.jpg', annotations='.png')
TABLE = 'objectInfo150.txt'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='ADEChallengeData2016.zip')
    parser.add_argument('target', type=Path, help='folder to make images/ and annotations/ in')
    args = parser.parse_args()
    try:
        unpack(args.source, args.target)
    except zipfile.BadZipFile as error:
        sys.exit(f'error: {args.source}: {error}; it is another file or incomplete, download it again')
    except (ArchiveError, OSError) as error:
        sys.exit(f'error: {error}')
    for split, expected in COUNTS.items():
        found = {kind: len(list_images(str(args.target / kind / split))) for kind in KINDS}
        print(f'{args.target}: {split}: {found["images"]:,} images, {found["annotations"]:,} annotations')
        if set(found.values()) != {expected}:
            sys.exit(f'error: expected {expected:,} of each in {split}; the archive is incomplete, or files of another '
                     'kind lie there')


def unpack(source: Path, target: Path) -> None:
    """Unpacks what belongs to the benchmark. Files that are there already are skipped, damaged ones written again.

    Raises:
        ArchiveError: another archive, or a path that leads out of it.
        zipfile.BadZipFile, OSError: it is damaged, or the disk is full.
    """
    with zipfile.ZipFile(source) as archive:
        wanted = {member: path for member in archive.infolist() if (path := place(member, source))}
        if not wanted:
            raise ArchiveError(f'{source} holds none of images/training/*.jpg, annotations/training/*.png, ...: is '
                               'it another archive?')
        progress = ProgressBar(len(wanted))
        for member, path in wanted.items():
            file = target / path
            if not file.exists() or file.stat().st_size != member.file_size:
                file.parent.mkdir(parents=True, exist_ok=True)
                write_file(archive.open(member), file)
            progress.update()
    print()


def place(member: zipfile.ZipInfo, archive: Path) -> PurePosixPath | None:
    """Where a member belongs below the target; None for what is left out (folders, the table of scenes).

    Raises:
        ArchiveError: a path that leads out of the archive.
    """
    path = PurePosixPath(member.filename)
    if path.is_absolute() or '..' in path.parts or '\\' in member.filename:
        raise ArchiveError(f'{archive} holds {member.filename!r}, which is no plain file inside of it; nothing was '
                           'written')
    match path.parts[-3:]:
        case kind, split, name if split in COUNTS and name.endswith(KINDS.get(kind, '/')):
            return PurePosixPath(kind, split, name)
        case [*_, name] if name == TABLE:
            return PurePosixPath(name)
    return None


if __name__ == '__main__':
    main()
