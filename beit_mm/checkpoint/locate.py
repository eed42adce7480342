"""Where a weight file lies: a path, a folder of the user's, torch's cache, or the network."""
import hashlib
import os
import re
import shutil
import urllib.parse
import urllib.request
import warnings
from pathlib import Path

import torch
from mmengine import dist

from beit_mm.checkpoint.content import HUB_FILES
from beit_mm.checkpoint.reader import file_sha256

WEIGHTS_VARIABLE = 'BEIT_MM_WEIGHTS'  # a folder with weight files, for machines without a network
HASH_IN_NAME = re.compile(r'-([0-9a-f]{8,64})\.\w+$')  # as published by OpenMMLab, torchvision and ourselves
TIMEOUT = 30                          # seconds without an answer


def locate_weights(source: str, advice: str) -> Path:
    """Finds a weight file, downloading it once for each node when `source` is a URL.

    A path is taken as it is; of a folder of transformers' or timm's the weights in it. A URL's file is looked for by
    name (see `name_of_url`) in the folder $BEIT_MM_WEIGHTS, then in torch hub's cache, and is downloaded into that
    cache by the first process of each node; every process of the job must make this call.

    Args:
        source: path, or http(s) URL.
        advice: second line of the error: where to get the file and which config key names it.

    Raises:
        FileNotFoundError: with all places looked at.
    """
    if not source.startswith(('http://', 'https://')):
        places = [weights_in(Path(source).expanduser())]
    else:
        name = name_of_url(source)
        cached = Path(torch.hub.get_dir(), 'checkpoints', name)
        folder = os.environ.get(WEIGHTS_VARIABLE)
        places = ([Path(folder, name)] if folder else []) + [cached]
        first_of_node = int(os.environ.get('LOCAL_RANK', dist.get_rank())) == 0
        if first_of_node and not any(place.is_file() for place in places):
            _download(source, cached)
        dist.barrier()  # always: whether a file is there differs between nodes and moments
    for place in places:
        if place.is_file():
            return place
    looked = ' and '.join(str(place) for place in places)
    if source.startswith('http'):
        looked += (f' (${WEIGHTS_VARIABLE} is {folder or "not set"}), and {source} cannot be '
                   'downloaded')
    raise FileNotFoundError(f'weight file not found: looked for {looked}.\n{advice}')


def name_of_url(url: str) -> str:
    """Name under which a URL's file is kept: its own, with a hash before it where all files of a site have one name."""
    name = Path(urllib.parse.urlsplit(url).path).name
    return f'{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}' if name in HUB_FILES else name


def weights_in(path: Path) -> Path:
    """The weight file of a folder of transformers' or timm's; any other path as it is.

    Raises:
        FileNotFoundError: the folder has none, or has it in pieces.
    """
    if not path.is_dir():
        return path
    if found := [path / name for name in HUB_FILES if (path / name).is_file()]:
        return found[0]
    if list(path.glob('*.index.json')):
        raise FileNotFoundError(f'{path} has its weights in pieces; save them with transformers in one: '
                                "model.save_pretrained(folder, max_shard_size='100GB')")
    raise FileNotFoundError(f'{path} is a folder without {" or ".join(HUB_FILES)}')


def _download(url: str, target: Path) -> None:
    """Fetches a file; `target` exists afterwards only if all of it came."""
    partial = target.with_name(f'{target.name}.{os.getpid()}.part')
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer, partial.open('wb') as file:
            print(f'downloading {url} to {target}')
            shutil.copyfileobj(answer, file)
            expected = answer.headers.get('Content-Length')
        if expected is not None and partial.stat().st_size != int(expected):
            raise OSError(f'it ended after {partial.stat().st_size} of {expected} bytes')
        if (said := HASH_IN_NAME.search(target.name)) and not file_sha256(partial).startswith(said[1]):
            raise OSError(f'its SHA-256 does not begin with {said[1]}, as its name says')
        os.replace(partial, target)
    except OSError as error:  # the caller says what to do; URLError and timeouts are OSErrors
        warnings.warn(f'download of {url} failed: {error}', stacklevel=3)
    finally:
        partial.unlink(missing_ok=True)
