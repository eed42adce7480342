"""The file that a path, an address, a repository of the Hugging Face Hub or the name of a released model stands for."""

import functools
import glob
import hashlib
import http.client
import os
import re
import socket
import time
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import torch
from mmengine import dist
from mmengine.fileio import load

from beit_mm.checkpoint.read import CheckpointError, read_checkpoint
from beit_mm.errors import UserError
from beit_mm.files import atomic_file, config_folders

WEIGHTS_VARIABLE = 'BEIT_MM_WEIGHTS'  # a folder with weight files, for machines without a network
HUB_SCHEME = 'hf://'  # a repository of the Hugging Face Hub
HUB_FILES = ('model.safetensors', 'pytorch_model.bin')  # transformers' and timm's weights in a folder
DEMO, PACKAGED = 'demo', Path(__file__).resolve().parents[1] / 'weights'  # a name, and the folder of its files
PHOTOS, SCENES = PACKAGED / 'photos', PACKAGED / 'scenes'  # folders of images for who has none at hand
RUN_FILES = ('finetuned.pth', 'pretrained.pth')  # the weights in the folder of a run of python -m beit_mm
# as published by OpenMMLab, torchvision and ourselves; digits alone may be a date
# what trainers call their files, so that many sites have them
GENERIC_NAME = re.compile('(epoch|iter|checkpoint|(pytorch_)?model|best|last|latest|pretrained|finetuned)(?![a-z])')
HASH_IN_NAME = re.compile(r'-((?=\d*[a-f])[0-9a-f]{8,64})\.\w+$')
STALLED = 60.0  # seconds in which a server sends nothing
ABANDONED = 3600  # seconds since something was written to a partial download


def locate_weights(source: str, advice: str) -> Path:
    """Finds a weight file; raises FileNotFoundError with all places looked at.

    A URL's file is looked for by name (see `name_of_url`) in the folder $BEIT_MM_WEIGHTS, then in torch hub's cache,
    and is downloaded into that cache by the first process of each node; every process of the job must make this call.

    Args:
        source: path, folder of transformers' or timm's or of a run, http(s) URL, or hf://owner/name (see
            `fetch_hub_folder`).
        advice: second line of the error: where to get the file and which config key names it.
    """
    if not source.startswith(('http://', 'https://')):
        path = fetch_hub_folder(source, advice) if source.startswith(HUB_SCHEME) else Path(source).expanduser()
        for file in [path / name for name in (*HUB_FILES, *RUN_FILES)] if path.is_dir() else [path]:
            if file.is_file():
                return file
        if path.is_dir():
            raise FileNotFoundError(
                f'{path} is a folder without {", ".join((*HUB_FILES, *RUN_FILES))}: of a run that is not finished name '
                "a checkpoint; transformers saves in one piece by model.save_pretrained(folder, max_shard_size='100GB')"
            )
        raise FileNotFoundError(f'weight file not found: looked for {path}.\n{advice}')
    if (name := name_of_url(source)) in ('', '..'):
        raise FileNotFoundError(f'{source} ends without the name of a file.\n{advice}')
    cached = Path(torch.hub.get_dir(), 'checkpoints', name)
    folder = os.environ.get(WEIGHTS_VARIABLE)
    places = [Path(folder, cached.name), cached] if folder else [cached]
    reason = ''  # which the first process of a node knows
    first_of_node = int(os.environ.get('LOCAL_RANK', dist.get_rank())) == 0
    if first_of_node and not any(place.is_file() for place in places):
        try:
            download(source, cached)
        except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
            reason = f' ({" ".join(str(error).split()):.300})'
    dist.barrier()  # always: whether a file is there differs between nodes and moments
    for place in places:
        if place.is_file():
            return place
    raise FileNotFoundError(
        f'weight file not found: looked for {" and ".join(map(str, places))} (${WEIGHTS_VARIABLE} '
        f'is {folder or "not set"}), and {source} cannot be downloaded{reason}.\n{advice}'
    )


def fetch_hub_folder(source: str, advice: str) -> Path:
    """The folder with the weights and JSON files of a repository on the Hugging Face Hub; else FileNotFoundError.

    That of hf://owner/name is looked for in $BEIT_MM_WEIGHTS/owner/name first. It and hf://owner/name@revision are
    fetched into huggingface_hub's cache, where later calls find them without a network.
    """
    name, _, revision = source.removeprefix(HUB_SCHEME).partition('@')
    folder = os.environ.get(WEIGHTS_VARIABLE)
    if folder and not revision and Path(folder, name).is_dir():
        return Path(folder, name)
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError:
        raise UserError(f'{source} is fetched by huggingface_hub: pip install huggingface_hub') from None
    try:
        try:
            path = hf_hub_download(name, HUB_FILES[0], revision=revision or None)
        except EntryNotFoundError:
            path = hf_hub_download(name, HUB_FILES[1], revision=revision or None)
        for about in ('config.json', 'preprocessor_config.json'):
            with suppress(EntryNotFoundError):
                hf_hub_download(name, about, revision=revision or None)
    except (OSError, ValueError, EntryNotFoundError) as error:
        text = ' '.join(str(error).split())
        raise FileNotFoundError(f'{source} cannot be fetched: {text:.200}\n{advice}') from None
    return Path(path).parent


def download(url: str, path: Path) -> None:
    """Fetches a checkpoint, which gets its name when it could be read to its end and has the hash in its name, if any.

    An answer that is cut, or a page to log in, would otherwise stay in the cache.
    """
    for killed in path.parent.glob(f'{glob.escape(path.name)}.*.part*'):
        if time.time() - killed.stat().st_mtime > ABANDONED:  # another node may be at work on the same disk
            killed.unlink(missing_ok=True)
    digits = HASH_IN_NAME.search(path.name)
    seconds = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds or STALLED)  # torch gives none
    try:
        with atomic_file(path) as file:
            torch.hub.download_url_to_file(url, file.name, digits and digits[1])  # replaces the file of this name
            try:
                read_checkpoint(file.name)
            except CheckpointError as error:
                raise UserError(str(error).replace(file.name, 'what came')) from None
    finally:
        socket.setdefaulttimeout(seconds)


def name_of_url(url: str) -> str:
    """Name under which a URL's file is kept: its own, with a hash before it where others' files have it too."""
    name = Path(urlsplit(url).path).name
    return f'{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}' if GENERIC_NAME.match(name) else name


WHOLE = 'this config'  # what the metafile says of weights that have a value for every tensor of the config's model


class Released(NamedTuple):
    """Released weights."""

    config: Path  # whose model they belong to
    url: str
    fits: str  # the part of the model that they are for


@functools.cache
def released() -> dict[str, Released]:
    """'demo', and all released weights in the configs' metafiles, by the names of their files."""
    configs = config_folders()[0]
    found = {DEMO: Released(configs / 'demo/pretrain.py', str(PACKAGED / 'pretrained.safetensors'), WHOLE)}
    for file in sorted(configs.glob('*/metafile.yml')):
        for entry in load(file)['Models']:
            for weights in entry.get('Released Weights') or ():
                if weights['Fits'] in (WHOLE, 'the backbone and head of this config'):
                    config = file.parents[1].parent / entry['Config']
                    name = Path(weights['URL']).stem
                    found[name] = Released(config, weights['URL'], weights['Fits'])
    return found


def list_models(pattern: str = '*') -> list[str]:
    """Sorted names of released weights, for `get_model`; `pattern` as of file names: '*ade20k', 'beitv2_large*'."""
    return sorted(name for name in released() if fnmatch(name, pattern))


def path_of_checkpoint(source: str | Path, part: str = 'pretrained') -> Path:
    """The weights that 'demo', a path, an address or one of `list_models` stands for, in this order.

    Args:
        part: which of the packaged weights 'demo' is: 'pretrained', 'classifier', 'segmentor' or 'tokenizer'.

    Raises:
        FileNotFoundError: none of them; names released models of nearly that name.
    """
    advice = 'Name a file, the folder of a run, or an address.'
    if str(source) == DEMO:  # also where a folder has this name: many repositories have one
        if any(Path(DEMO, name).is_file() for name in RUN_FILES):
            raise UserError('demo is the packaged weights, but a run lies in a folder of this name: say ./demo')
        return PACKAGED / f'{part}.safetensors'
    if '://' in str(source) or Path(source).expanduser().exists():
        return locate_weights(str(source), advice)
    if known := released().get(str(source)):
        return locate_weights(known.url, advice)
    raise FileNotFoundError(
        f'{str(source)!r} does not exist; expected a checkpoint, the folder of a finished run, demo or a released model'
        + (nearest(Path(source).stem) or ' (see list_models())')
    )


def nearest(name: str) -> str:
    """A question that ends an error: the released models of nearly this name; empty without any."""
    near = get_close_matches(name.lower(), released(), n=3, cutoff=0.6)
    return f'; did you mean {" or ".join(map(repr, near))}?' if near else ''
