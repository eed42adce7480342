"""Where a weight file lies: a path, a folder of the user's, torch's cache, or the network."""
import os
import shutil
import urllib.request
import warnings
from pathlib import Path

import torch
from mmengine import dist

WEIGHTS_VARIABLE = 'BEIT_MM_WEIGHTS'  # a folder with weight files, for machines without a network
TIMEOUT = 30                          # seconds without an answer


def locate_weights(source: str, advice: str) -> Path:
    """Finds a weight file, downloading it once for each node when `source` is a URL.

    A path is taken as it is. A URL's file is looked for by name in the folder $BEIT_MM_WEIGHTS,
    then in torch hub's cache, and is downloaded into that cache by the first process of each node;
    every process of the job must make this call.

    Args:
        source: path, or http(s) URL.
        advice: second line of the error: where to get the file and which config key names it.

    Raises:
        FileNotFoundError: with all places looked at.
    """
    if not source.startswith(('http://', 'https://')):
        places = [Path(source).expanduser()]
    else:
        name = source.rsplit('/', 1)[-1]
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
        os.replace(partial, target)
    except OSError as error:  # the caller says what to do; URLError and timeouts are OSErrors
        warnings.warn(f'download of {url} failed: {error}', stacklevel=3)
    finally:
        partial.unlink(missing_ok=True)
