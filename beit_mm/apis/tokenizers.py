"""Which tokenizer the visual tokens of a checkpoint are of, and where its weights lie."""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from beit_mm.apis.configs import own_config
from beit_mm.apis.stored_config import RefusedError, check_part
from beit_mm.checkpoint.checkpoint import Checkpoint
from beit_mm.checkpoint.find import WEIGHTS_VARIABLE
from beit_mm.checkpoint.read import CheckpointError
from beit_mm.models.tokenizers.dalle import DECODER_URL, GET_ENCODER, STRIDE
from beit_mm.registry import MODELS

TOKENIZERS = ('beit_mm.DiscreteVAE', 'beit_mm.DALLETokenizer')  # that a checkpoint's config may name
TOKENIZER = 'demo/dvae.py'  # the config of own tokenizers
OWN_KEYS = ('type', 'arch', 'hidden', 'vocab_size', 'embed_dims', 'num_levels', 'bottleneck_blocks')
DALLE_VOCABULARY = 8192
FILES = ('checkpoint', 'decoder_checkpoint')  # arguments of tokenizers


def tokenizer_of(checkpoint: Checkpoint) -> dict[str, Any]:
    """The config of the tokenizer that a checkpoint was trained with, and its files.

    Of a checkpoint that does not say it, as the released ones, it is DALL-E's where the vocabulary fits, but for
    BEiT v2. What a checkpoint says is data: types, arguments and files are checked.

    Raises:
        CheckpointError: it cannot be known, or is no tokenizer of ours.
        FileNotFoundError: its file is gone.
    """
    model = (checkpoint.meta.get('config_dict') or {}).get('model') or {}
    if stored := model.get('target_generator'):
        return stored_tokenizer(checkpoint, stored)
    weights = checkpoint.converted.state_dict
    message = f'{checkpoint} does not say which tokenizer its visual tokens are of'
    if len(weights.get('head.lm_head.weight', ())) != DALLE_VOCABULARY:
        raise CheckpointError(message)
    if any(name.startswith('patch_aggregation.') for name in weights):
        raise CheckpointError(f"{message}; BEiT v2's cannot be drawn: VQ-KD decodes them into features")
    if dalle := find_dalle():
        return dalle
    folder = f'${WEIGHTS_VARIABLE} or {Path(torch.hub.get_dir(), "checkpoints")}'
    advice = f'{GET_ENCODER} and {DECODER_URL}, and put both into {folder}'
    raise CheckpointError(f"{message}; those of released files are DALL-E's. {advice}")


def stored_tokenizer(checkpoint: Checkpoint, stored: Mapping[str, Any]) -> dict[str, Any]:
    files = {key: Path(str(stored[key])) for key in FILES if stored.get(key)}
    try:
        described = {key: value for key, value in stored.items() if key not in (*FILES, 'sha256')}
        config = check_part(described, TOKENIZERS, 'target_generator')
    except RefusedError as error:
        raise CheckpointError(f'The config in {checkpoint} asks for {error}, which is no tokenizer of ours') from None
    beside = checkpoint.path.resolve().parent  # the run may have been moved
    for key, path in files.items():
        places = [path, *(beside / folder / path.name for folder in ('tokenizer', '../tokenizer', '.'))]
        # files of /proc have no size, and reading one may wait for ever
        file = next((place for place in places if place.is_file() and place.stat().st_size), None)
        if file is None:
            looked = ' and '.join(map(str, places))
            raise FileNotFoundError(f'the tokenizer of {checkpoint} is gone: looked for {looked}')
        config[key] = str(file)
    if config['type'] == 'beit_mm.DiscreteVAE' and 'checkpoint' not in files:
        raise CheckpointError(f'{checkpoint} does not name the file of its tokenizer')
    known = checkpoint.meta.get('tokenizer')
    if 'checkpoint' in files and isinstance(known, dict) and (digest := known.get('sha256')):
        if not isinstance(digest, str) or not re.fullmatch('[0-9a-f]{64}', digest):
            raise CheckpointError(f'{checkpoint} gives no SHA-256 of its tokenizer, but {ascii(digest)[:80]}')
        config['sha256'] = digest
    return config


def own_tokenizer(checkpoint: Path) -> dict[str, Any]:
    """The config of a tokenizer that was trained by TOKENIZER."""
    model = own_config(TOKENIZER).model
    return dict({key: model[key] for key in OWN_KEYS}, checkpoint=str(checkpoint))


def find_dalle() -> dict[str, Any] | None:
    """Arguments of the DALLETokenizer whose weights lie in $BEIT_MM_WEIGHTS or torch hub's cache; None without."""
    named = os.environ.get(WEIGHTS_VARIABLE)
    folders = [*([Path(named)] if named else []), Path(torch.hub.get_dir(), 'checkpoints')]
    for encoder in (folder / name for folder in folders for name in ('dalle_encoder.pth', 'encoder.pkl')):
        if encoder.is_file():
            decoder = encoder.with_name('decoder.pkl')
            dalle = dict(type='beit_mm.DALLETokenizer', checkpoint=str(encoder.resolve()))
            return dict(dalle, decoder_checkpoint=str(decoder.resolve())) if decoder.is_file() else dalle
    return None


def stride_and_vocab(tokenizer: Mapping[str, Any]) -> tuple[int, int]:
    """Pixels of a visual token's side, and how many different tokens there are, by a tokenizer's config."""
    if tokenizer['type'] == 'beit_mm.DALLETokenizer':
        return STRIDE, tokenizer.get('vocab_size', DALLE_VOCABULARY)
    with torch.device('meta'):
        built = MODELS.build({key: value for key, value in tokenizer.items() if key not in (*FILES, 'sha256')})
    return built.stride, built.vocab_size
