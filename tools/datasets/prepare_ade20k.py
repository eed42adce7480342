"""Unpacks ADE20K's scene parsing benchmark (150 classes) from its official archive.

    python tools/datasets/prepare_ade20k.py ADEChallengeData2016.zip data/ade20k

The archive is at http://data.csail.mit.edu/places/ADEchallenge/ADEChallengeData2016.zip. It makes
images/{training,validation}/*.jpg, annotations/{training,validation}/*.png and objectInfo150.txt, the table of the
classes; run again after an interruption, it goes on where it was.
"""

import argparse
import re
import sys
import zipfile
from pathlib import Path

from _archives import ArchiveError, Budget, one_line_errors, write_file

NUM_IMAGES = dict(training=20_210, validation=2_000)
MEMBER = re.compile(
    r'ADEChallengeData2016/(images/(?:training|validation)/\w+\.jpg'
    r'|annotations/(?:training|validation)/\w+\.png|objectInfo150\.txt)'
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='ADEChallengeData2016.zip')
    parser.add_argument('target', type=Path, help='folder to make images/ and annotations/ in')
    args = parser.parse_args()
    with one_line_errors(args.source):
        unpack(args.source, args.target)
    for split, expected in NUM_IMAGES.items():
        counts = [sum(1 for _ in (args.target / folder / split).iterdir()) for folder in ('images', 'annotations')]
        print(f'{args.target}: {split}: {counts[0]:,} images, {counts[1]:,} annotations')
        if counts != [expected, expected]:
            sys.exit(
                f'error: expected {expected:,} of each in {split}; the archive is incomplete, or other files lie there'
            )


def unpack(source: Path, target: Path) -> None:
    """Unpacks what belongs to the benchmark and leaves the rest; finished files are skipped.

    Raises:
        ArchiveError: another archive, or far more than its size in it.
        zipfile.BadZipFile: it is damaged.
    """
    from rich.progress import track

    budget = Budget(source)
    with zipfile.ZipFile(source) as archive:
        # A whole name of this pattern cannot lead out of the target.
        members = [(member, match[1]) for member in archive.infolist() if (match := MEMBER.fullmatch(member.filename))]
        if not members:
            raise ArchiveError(f'{source} holds no ADEChallengeData2016/images/...: is it another archive?')
        for member, name in track(members, 'files'):
            path = target / name
            if not path.exists() or path.stat().st_size != member.file_size:
                write_file(archive.open(member), path, budget)


if __name__ == '__main__':
    main()
