"""Unpacks CIFAR-100 from its official archive into class folders of PNGs.

    python tools/prepare_cifar100.py cifar-100-python.tar.gz data/cifar100

The archive is at https://www.cs.toronto.edu/~kriz/cifar.html. It makes train/<class>/*.png (50,000) and
val/<class>/*.png (the 10,000 of its test set).
"""
import argparse
import hashlib
import io
import pickle
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from beit_mm.datasets.archives import progress_bar

MD5 = 'eb9058c3a382ffc7106e4002c42a8d85'
SPLITS = dict(train='train', test='val')  # of the archive -> folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('source', type=Path, help='cifar-100-python.tar.gz')
    parser.add_argument('target', type=Path, help='folder to make train/ and val/ in')
    args = parser.parse_args()
    try:
        unpack(args.source, args.target)
    except (OSError, ValueError, pickle.UnpicklingError) as error:
        sys.exit(f'error: {error}')


def unpack(source: Path, target: Path, md5: str = MD5) -> None:
    """Writes the class folders; a finished split is left as it is.

    Raises:
        FileNotFoundError: no such archive.
        ValueError: another archive than the official one.
    """
    found = hashlib.md5(source.read_bytes()).hexdigest()
    if found != md5:
        raise ValueError(f'{source} has MD5 {found}, expected {md5}: it is another file or incomplete, download it '
                         'again')
    with tarfile.open(source) as archive:
        content = {Path(member.name).name: Unpickler(archive.extractfile(member)).load() for member in archive
                   if Path(member.name).name in ('meta', *SPLITS)}
    classes = [name.decode() for name in content['meta'][b'fine_label_names']]
    for split, folder in SPLITS.items():
        write_split(content[split], classes, target / folder)


def write_split(content: dict[bytes, Any], classes: list[str], folder: Path) -> None:
    """Writes the images of a split, `data` (N, 3 * 32 * 32) in planes of red, green and blue."""
    if folder.exists():
        print(f'{folder} is there already')
        return
    part = folder.with_name(f'.{folder.name}.part')
    shutil.rmtree(part, ignore_errors=True)
    for name in classes:
        (part / name).mkdir(parents=True)
    images = content[b'data'].pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
    with progress_bar(len(images)) as update:
        for image, label, name in zip(images, content[b'fine_labels'], content[b'filenames'], strict=True):
            Image.fromarray(image).save(part / classes[label] / Path(name.decode()).name)
            update()
    part.rename(folder)
    print(f'{folder}: {len(images):,} images')


class Array:
    """Stands where the archive names numpy.ndarray, and keeps its bytes."""

    def __setstate__(self, state: tuple) -> None:
        _, shape, _, columns_first, data = state
        self.pixels = np.frombuffer(data, dtype=np.uint8).reshape(shape, order='F' if columns_first else 'C')


class Type:
    """Stands where the archive names numpy.dtype."""

    def __init__(self, *_: Any) -> None:
        pass

    def __setstate__(self, state: tuple) -> None:
        pass


class Unpickler(pickle.Unpickler):
    """Reads the archive's pickles, in which a program could be, with nothing that they can call."""

    def __init__(self, file: io.BufferedIOBase) -> None:
        super().__init__(file, encoding='bytes')

    def find_class(self, module: str, name: str) -> Any:
        match module.split('.')[0], name:
            case 'numpy', '_reconstruct':
                return lambda *_: Array()
            case 'numpy', 'ndarray':
                return Array
            case 'numpy', 'dtype':
                return Type
        raise pickle.UnpicklingError(f'the archive asks for {module}.{name}; nothing of it was run')


if __name__ == '__main__':
    main()
