"""Copies a folder of images at a smaller size, so that they can be read fast enough for a GPU.

    python tools/datasets/resize_images.py data/imagenet22k/train data/imagenet22k_256/train --short-side 256

Folders and names stay the same, so lists of files still work. Larger images become upright RGB JPEGs with the given
short side. The extension stays too: a.png can hold a JPEG, because images are recognised by their content. Other images
are copied byte for byte. After an interruption the same command continues. Images that cannot be read are skipped and
listed at the end, and the exit code is 1.
"""

import argparse
import hashlib
import io
import os
import signal
from functools import partial
from pathlib import Path

from make_shards import images_of

from beit_mm.errors import UserError
from beit_mm.terminal import run, with_bar

MAX_SIDE = 65_500  # pixels, the limit of JPEG


def copy(path: str, args: argparse.Namespace) -> str:
    """Copies an image unless the copy exists; returns '' or the reason why it cannot be read."""
    from beit_mm.datasets.reading import UnreadableImageError

    target = args.target / path
    try:
        if not target.is_file() or not target.stat().st_size:  # a power cut can leave an empty file
            content = resized(str(args.source / path), args.short_side, args.quality)
            target.parent.mkdir(parents=True, exist_ok=True)
            # hidden, so that it is not listed as an image; the next run overwrites what a killed run has left
            part = target.with_name(f'.{hashlib.md5(os.fsencode(target.name)).hexdigest()}.part')
            part.write_bytes(content)
            part.replace(target)
    except UnreadableImageError as error:
        return str(error)
    return ''


def resized(path: str, short_side: int, quality: int) -> bytes:
    """Content of the resized file: a JPEG, or the original bytes if the image is not larger."""
    from PIL import Image

    from beit_mm.datasets.reading import MAX_PIXELS, open_file, read_image, unreadable
    from beit_mm.datasets.transforms import resize_bicubic

    pixels = read_image(path)
    height, width = pixels.shape[:2]
    scale = short_side / min(height, width)
    size = tuple(max(short_side, round(side * scale)) for side in (height, width))
    if scale >= 1 or max(size) > MAX_SIDE:
        with unreadable(path, OSError), open_file(path, MAX_PIXELS) as file:
            return file.read()
    content = io.BytesIO()
    Image.fromarray(resize_bicubic(pixels, size)).save(content, 'JPEG', quality=quality)
    return content.getvalue()


def check_earlier(path: str, args: argparse.Namespace) -> None:
    """Raises UserError if an earlier run has made a copy of another size."""
    from beit_mm.datasets.reading import open_image

    with open_image(str(args.source / path)) as image, open_image(str(args.target / path)) as made:
        if min(made.size) not in (args.short_side, min(image.size)):
            raise UserError(
                f'{args.target / path} has a short side of {min(made.size)} pixels; expected {args.short_side}: '
                'choose another folder for another size'
            )


def ignore_interrupts(_: int) -> None:
    """Leaves Ctrl-C to the main process, which ends its workers."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='folder of images, to any depth')
    parser.add_argument('target', type=Path, help='folder to make, a different one for each size')
    parser.add_argument('--short-side', type=int, required=True, help='short side in pixels, for example 256')
    parser.add_argument('--quality', type=int, default=90, help='JPEG quality, 1 to 95 (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=os.cpu_count(), help='processes (default: one for each core)')
    args = parser.parse_args()
    if args.short_side < 1 or not 1 <= args.quality <= 95 or args.workers < 0:
        parser.error('expected --short-side above 0, --quality 1 to 95, --workers 0 (this process) or more')
    from torch.utils.data import DataLoader

    paths, options = images_of(args.source, args.target), dict(batch_size=None, worker_init_fn=ignore_interrupts)
    # a power cut can leave an empty file
    if (earlier := args.target / paths[0]).is_file() and earlier.stat().st_size:
        check_earlier(paths[0], args)
    # the workers copy the images in collate_fn, one image in each batch
    loader = DataLoader(paths, num_workers=args.workers, collate_fn=partial(copy, args=args), **options)
    unreadable = [reason for reason in with_bar(loader, len(paths)) if reason]
    print(f'{args.target}: {len(paths) - len(unreadable):,} images')
    if unreadable:
        print(*unreadable, sep='\n')
        raise UserError(f'{len(unreadable):,} of {len(paths):,} images cannot be read, see above; the others are done')


if __name__ == '__main__':
    run(main)
