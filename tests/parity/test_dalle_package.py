"""Our DALL-E networks beside those of the `DALL-E` package, with the same random weights."""

import sys

import pytest
import torch
import torch.nn.functional as F

from beit_mm.checkpoint.io import UnsafeCheckpointError
from beit_mm.models import DALLETokenizer
from beit_mm.models.tokenizers.base import map_pixels, unmap_pixels
from beit_mm.models.tokenizers.dalle import DALLEDecoder, DALLEEncoder

dall_e = pytest.importorskip('dall_e')


@pytest.mark.parametrize(('hidden', 'vocab_size', 'size'), [(64, 512, (24, 32)), (256, 8192, (56, 56))])
@torch.no_grad()
def test_encoder(hidden, vocab_size, size):
    torch.manual_seed(0)
    theirs = dall_e.Encoder(n_hid=hidden, vocab_size=vocab_size)
    ours = DALLEEncoder(hidden, vocab_size)
    ours.load_state_dict(theirs.state_dict())
    images = dall_e.map_pixels(torch.rand(1, 3, *size))
    logits = theirs(images)
    torch.testing.assert_close(ours(images), logits, atol=1e-4, rtol=0)
    assert torch.equal(ours(images).argmax(1), logits.argmax(1))


@torch.no_grad()
def test_decoder():
    torch.manual_seed(0)
    theirs = dall_e.Decoder(n_hid=64, vocab_size=512)
    ours = DALLEDecoder(64, 512)
    ours.load_state_dict(theirs.state_dict())
    tokens = torch.randint(512, (2, 4, 5))
    stats = theirs(F.one_hot(tokens, 512).permute(0, 3, 1, 2).float())
    images = dall_e.unmap_pixels(torch.sigmoid(stats[:, :3]))
    mine = unmap_pixels(ours.from_tokens(tokens)[:, :3].sigmoid())
    torch.testing.assert_close(mine, images, atol=1e-4, rtol=0)


def test_pickled_modules_give_equal_tokens_and_images(tmp_path, monkeypatch):
    """The form of OpenAI's encoder.pkl and decoder.pkl: whole modules, read where their package cannot be imported."""
    torch.manual_seed(0)
    encoder = dall_e.Encoder(n_hid=64, vocab_size=512)
    decoder = dall_e.Decoder(n_hid=64, vocab_size=512)
    paths = tmp_path / 'encoder.pkl', tmp_path / 'decoder.pkl'
    for module, path in zip((encoder, decoder), paths, strict=True):
        torch.save(module, path)
    with monkeypatch.context() as without_package:
        for name in [name for name in sys.modules if name.split('.')[0] == 'dall_e']:
            without_package.setitem(sys.modules, name, None)
        tokenizer = DALLETokenizer(*map(str, paths), hidden=64, vocab_size=512)
    images = torch.rand(2, 3, 16, 24)
    with torch.no_grad():
        tokens = encoder(dall_e.map_pixels(images)).argmax(1)
        stats = decoder(F.one_hot(tokens, 512).permute(0, 3, 1, 2).float())
    assert torch.equal(tokenizer.encode(images), tokens)
    pictures = dall_e.unmap_pixels(torch.sigmoid(stats[:, :3]))
    torch.testing.assert_close(tokenizer.decode(tokens), pictures, atol=1e-4, rtol=0)


@pytest.mark.filterwarnings('ignore:Couldn.t retrieve source code')
def test_pickled_modules_in_the_form_before_torch_1_6_are_refused(tmp_path):
    """torch's own reader of weights does not read them either."""
    torch.save(dall_e.Encoder(n_hid=8, vocab_size=16), tmp_path / 'encoder.pkl', _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeCheckpointError, match=r'before torch 1.6.* save tensors instead'):
        DALLETokenizer(str(tmp_path / 'encoder.pkl'), hidden=8, vocab_size=16)


def test_pixel_maps():
    images = torch.rand(2, 3, 4, 4)
    assert torch.equal(map_pixels(images), dall_e.map_pixels(images))
    assert torch.equal(unmap_pixels(images), dall_e.unmap_pixels(images))
