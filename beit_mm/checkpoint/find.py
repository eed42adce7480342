"""Resolves a path, URL, Hub repository or model name to a local file."""

import functools
import hashlib
import http.client
import os
import re
import socket
import threading
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch
from mmengine import dist
from mmengine.fileio import load

from beit_mm.checkpoint.read import read_checkpoint
from beit_mm.errors import UserError, warn
from beit_mm.files import atomic_file, config_folders

WEIGHTS_VARIABLE = 'BEIT_MM_WEIGHTS'  # a folder with weight files, for machines without a network
HUB_SCHEME = 'hf://'  # a repository of the Hugging Face Hub
HUB_FILES = ('model.safetensors', 'pytorch_model.bin', 'model.pt')  # of transformers, timm and LingBot-Vision
DEMO, PACKAGED = 'demo', Path(__file__).resolve().parents[1] / 'weights'  # a name, and the folder of its files
PHOTOS, SCENES = PACKAGED / 'photos', PACKAGED / 'scenes'  # images for users who have none at hand
RUN_FILES = ('finetuned.pth', 'pretrained.pth')  # weights in a run folder of python -m beit_mm
# names that many trainers use, so files of different sites share them
GENERIC_NAME = re.compile('(epoch|iter|checkpoint|(pytorch_)?model|best|last|latest|pretrained|finetuned)(?![a-z])')
# the hash at the end of file names by OpenMMLab, torchvision and us; digits alone may be a date
HASH_IN_NAME = re.compile(r'-((?=\d*[a-f])[0-9a-f]{8,64})\.\w+$')
STALLED = 60.0  # seconds without data after which a download fails
REACHED = 10.0  # the same for a download that the user did not ask for
FITS_WHOLE_MODEL = 'this config'  # in a metafile: the weights fill the config's whole model
_downloading = threading.RLock()  # sockets have one default timeout for all threads
ADVICE = 'Put the file there, or name another file, the folder of a run, or a URL.'


def locate_weights(source: str, advice: str) -> Path:
    """Finds the weight file of a path, folder, http(s) URL or hf://owner/name; else FileNotFoundError with `advice`.

    A file given by URL is looked for by name (see `name_of_url`) in the folder $BEIT_MM_WEIGHTS, then in torch hub's
    cache, into which a node's first process downloads it if missing. So all processes of a job must make this call.
    """
    if not source.startswith(('http://', 'https://')):
        path = fetch_hub_folder(source, advice) if source.startswith(HUB_SCHEME) else Path(source).expanduser()
        places = [path / name for name in (*HUB_FILES, *RUN_FILES)] if path.is_dir() else [path]
        if found := [place for place in places if place.is_file()]:
            return found[0]
        newest = max(path.glob('*.pth'), key=os.path.getmtime, default=None)  # of a run of tools/train.py
        advice = f'The folder has {newest.name}: name the file.' if newest else advice
        raise FileNotFoundError(f'weight file not found: looked for {", ".join(map(str, places))}.\n{advice}')
    folder, places = os.environ.get(WEIGHTS_VARIABLE), places_of_url(source)
    reason = ''  # known only to the first process of a node
    first_of_node = int(os.environ.get('LOCAL_RANK', dist.get_rank())) == 0
    if first_of_node and not any(place.is_file() for place in places):
        try:
            with _downloading:
                if not places[-1].is_file():  # another thread may have downloaded it
                    download(source, places[-1])
        except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
            reason = f' ({" ".join(str(error).split()):.300})'
    dist.barrier()  # unconditional: one node may have the file, another may not
    if found := [place for place in places if place.is_file()]:
        return found[0]
    raise FileNotFoundError(
        f'weight file not found: looked for {" and ".join(map(str, places))} (${WEIGHTS_VARIABLE} '
        f'is {folder or "not set"}), and {source} cannot be downloaded{reason}.\n{advice}'
    )


def places_of_url(url: str) -> list[Path]:
    """Where the file of an http(s) URL may be; torch hub's cache is the last."""
    folders = filter(None, (os.environ.get(WEIGHTS_VARIABLE), f'{torch.hub.get_dir()}/checkpoints'))
    return [Path(folder, name_of_url(url)) for folder in folders]


def fetch_hub_folder(source: str, advice: str) -> Path:
    """The folder with weights and JSON files of hf://owner/name or hf://owner/name@revision.

    That is $BEIT_MM_WEIGHTS/owner/name if it exists and no revision is given, else one in huggingface_hub's cache.
    """
    name, _, revision = source.removeprefix(HUB_SCHEME).partition('@')
    folder = os.environ.get(WEIGHTS_VARIABLE)
    if folder and not revision and Path(folder, name).is_dir():
        return Path(folder, name)
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

        def fetch(file: str) -> str | None:
            """A file of the repository; None if it has no such file, which the cache knows without a network too."""
            try:
                return hf_hub_download(name, file, revision=revision or None)
            except EntryNotFoundError as error:
                unknown = try_to_load_from_cache(name, file, revision=revision or None) is None
                if unknown and isinstance(error, LocalEntryNotFoundError):  # the network failed
                    raise
            return None

        path = next(filter(None, map(fetch, HUB_FILES)), None)
        if path is None:
            raise FileNotFoundError(f'it has none of {", ".join(HUB_FILES)}')
        for about in ('config.json', 'preprocessor_config.json'):
            fetch(about)
    except (ImportError, OSError, ValueError) as error:
        raise FileNotFoundError(f'{source} cannot be fetched: {" ".join(str(error).split()):.200}\n{advice}') from None
    return Path(path).parent


def download(url: str, path: Path) -> None:
    """Downloads a checkpoint. It gets its name only if it can be read and has the hash in that name, if any."""
    digits = HASH_IN_NAME.search(path.name)
    seconds = socket.getdefaulttimeout()
    socket.setdefaulttimeout(seconds or STALLED)  # torch sets no timeout
    try:
        with atomic_file(path) as file:
            torch.hub.download_url_to_file(url, file.name, digits and digits[1])  # moves another file to this name
            read_checkpoint(file.name)
    finally:
        socket.setdefaulttimeout(seconds)


def name_of_url(url: str) -> str:
    """The file name in a URL, with a hash of the URL in front if many sites use this name."""
    name = Path(urlsplit(url).path).name
    return f'{hashlib.sha256(url.encode()).hexdigest()[:8]}-{name}' if GENERIC_NAME.match(name) else name


class Released(NamedTuple):
    config: Path  # of the model that the weights belong to
    url: str
    fits: str  # the part of the model that the weights fill
    about: dict[str, str] = {}  # model, licence and figures, as of `plain_vits`


@functools.cache
def released() -> dict[str, Released]:
    """'demo' and the released weights that the configs' metafiles list, by file name."""
    configs = config_folders()[0]
    about = dict(model='BEiT, for a first try, 1 M parameters', licence='Apache-2.0', figures='')
    packaged = str(PACKAGED / 'pretrained.safetensors')
    found = {DEMO: Released(configs / 'demo/pretrain.py', packaged, FITS_WHOLE_MODEL, about)}
    for file in sorted(configs.glob('*/metafile.yml')):
        for entry in load(file)['Models']:
            for weights in entry.get('Released Weights') or ():
                if weights['Fits'] in (FITS_WHOLE_MODEL, 'the backbone and head of this config'):
                    config = file.parents[1].parent / entry['Config']
                    name = Path(weights['URL']).stem
                    found[name] = Released(config, weights['URL'], weights['Fits'], about_released(entry, weights))
    return found


def about_released(entry: Mapping[str, Any], weights: Mapping[str, str]) -> dict[str, str]:
    """Model, licence and figures of the weights in an entry of a metafile."""
    model, parameters = entry['Metadata']['Architecture'].partition(',')[0], entry['Metadata']['Parameters']
    # ', by ' begins the name of another config, which a figure of a pretraining belongs to
    figures = [f'{row["Task"]} {row["Value"]}' for row in entry['Published Results'] if ', by ' not in row['Task']]
    return dict(
        model=f'BEiT, {model}, {parameters // 10**6} M parameters',
        licence='MIT' if weights['Source'] == 'microsoft/unilm' else 'Apache-2.0',
        figures=', '.join(figures[:1]),
    )


@functools.cache
def plain_vits() -> dict[str, dict[str, str]]:
    """Released weights of plain ViTs by file name: url, model, licence, normalisation and figures."""
    return load(config_folders()[0] / 'plain_vits.yml')


def list_models(pattern: str = '*', details: bool = False) -> Any:
    """Names of released BEiTs and plain ViTs, which can be given wherever a checkpoint can.

    Args:
        pattern: as for file names: '*ade20k', 'beitv2_large*', 'dinov2*'.
        details: also return what is known about each.

    Returns:
        A sorted list of names; with details, a dict from name to dict(url=..., model=..., licence=..., figures=...),
        these as reported. A BEiT also has its config, a plain ViT its normalisation.
    """
    known = {name: dict(entry.about, url=entry.url, config=str(entry.config)) for name, entry in released().items()}
    known |= plain_vits()
    found = {name: known[name] for name in sorted(known) if fnmatch(name, pattern)}
    return found if details else list(found)


def is_at_hand(url: str) -> bool:
    """Whether the file of a released model is on this machine."""
    if not url.startswith(HUB_SCHEME):
        return any(place.is_file() for place in (Path(url), *places_of_url(url)))
    name, folder = url.removeprefix(HUB_SCHEME), os.environ.get(WEIGHTS_VARIABLE)
    if folder and Path(folder, name).is_dir():
        return True
    with suppress(ImportError):
        from huggingface_hub import try_to_load_from_cache

        return any(isinstance(try_to_load_from_cache(name, file), str) for file in HUB_FILES)
    return False


def path_of_checkpoint(source: str | Path, part: str = 'pretrained') -> Path:
    """Resolves 'demo', a path, a URL or one of `list_models`, in this order; else FileNotFoundError.

    `part` chooses among the packaged weights 'demo': 'pretrained', 'classifier', 'segmentor' or 'tokenizer'.
    """
    if str(source) == DEMO:  # even if a folder has this name, as in many repositories
        if any(Path(DEMO, name).is_file() for name in RUN_FILES):
            raise UserError('demo means the packaged weights; for the run in the folder of this name, write ./demo')
        return PACKAGED / f'{part}.safetensors'
    if '://' in str(source) or Path(source).expanduser().exists():
        return locate_weights(str(source), ADVICE)
    if known := list_models(details=True).get(str(source)):
        if 'forbids' in known.get('licence', '') or 'bring your own' in known.get('licence', ''):
            warn(f'{source}: its licence is {known["licence"]}')
        return locate_weights(known['url'], ADVICE)
    raise FileNotFoundError(
        f'{str(source)!r} does not exist; expected a checkpoint, the folder of a finished run, demo or a released model'
        + (nearest(Path(source).stem) or ' (beit-mm models lists them)')
    )


def names_of_file(path: Path) -> list[str]:
    """What a weight file may be called: its own name, or those of the folders of a repository or the Hub's cache."""
    # the Hub's cache has models--OWNER--NAME/snapshots/REVISION/FILE
    names = path.absolute().parts[-4:-1] if path.name in HUB_FILES else [path.stem]
    return [name.rpartition('--')[2] for name in names]


def first_at_hand(names: Iterable[str]) -> tuple[Path | None, str]:
    """The first of these `plain_vits` at hand or downloaded, or None and why; tries no download after a failed one."""
    reason = ''
    with _downloading:
        timeout = socket.getdefaulttimeout()
        socket.setdefaulttimeout(REACHED)
        try:
            for name in names:
                if not reason or any(place.is_file() for place in places_of_url(plain_vits()[name]['url'])):
                    try:
                        return path_of_checkpoint(name), ''
                    except FileNotFoundError as error:
                        reason = str(error).partition('\n')[0]
        finally:
            socket.setdefaulttimeout(timeout)
    return None, reason


def nearest(name: str) -> str:
    """The end of an error message, which suggests released models with similar names; empty if there are none."""
    names, word = list_models(), name.lower()
    near = sorted((known for known in names if len(word) > 2 and word in known), key=lambda known: known.find(word))
    near = near[:3] or get_close_matches(word, names, n=3, cutoff=0.6)
    return f'; did you mean {" or ".join(map(repr, near))}?' if near else ''
