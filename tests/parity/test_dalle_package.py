"""Our DALL-E networks beside those of the `DALL-E` package, with the same random weights."""

import sys

import pytest
import torch
import torch.nn.functional as F
from peers import assert_equal, read

from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.models import DALLETokenizer
from beit_mm.models.tokenizers.base import map_pixels, unmap_pixels

dall_e = pytest.importorskip('dall_e')
VOCAB = 512


@pytest.fixture
def networks(tmp_path, monkeypatch):
    """Encoder and decoder, saved as OpenAI's encoder.pkl and decoder.pkl are: whole modules."""
    monkeypatch.chdir(tmp_path)
    networks = dall_e.Encoder(n_hid=64, vocab_size=VOCAB), dall_e.Decoder(n_hid=64, vocab_size=VOCAB)
    for network, name in zip(networks, ('encoder', 'decoder'), strict=True):
        torch.save(network.requires_grad_(False), f'{name}.pkl')
    return networks


@pytest.mark.parametrize('suffix', ['.pkl', '.pth', '.safetensors'])
def test_pickled_modules_give_equal_tokens_and_images(suffix, networks, monkeypatch):
    """Read, or converted to state dicts, where their package cannot be imported."""
    encoder, decoder = networks
    with monkeypatch.context() as without_package:
        for name in [name for name in sys.modules if name.split('.')[0] == 'dall_e']:
            without_package.setitem(sys.modules, name, None)
        for name, network in zip(('encoder', 'decoder') if suffix != '.pkl' else (), networks, strict=False):
            conversion = convert_checkpoint(f'{name}.pkl', f'{name}{suffix}')
            assert conversion.task == 'tokenizer' and conversion.tensors == len(network.state_dict())
            assert_equal(read(f'{name}{suffix}'), network.state_dict())
        tokenizer = DALLETokenizer(f'encoder{suffix}', f'decoder{suffix}', hidden=64, vocab_size=VOCAB)
    images = torch.rand(2, 3, 16, 24)
    assert torch.equal(map_pixels(images), dall_e.map_pixels(images))
    assert torch.equal(unmap_pixels(images), dall_e.unmap_pixels(images))
    tokens = encoder(dall_e.map_pixels(images)).argmax(1)
    torch.testing.assert_close(tokenizer.encoder(map_pixels(images)), encoder(map_pixels(images)), atol=1e-4, rtol=0)
    assert torch.equal(tokenizer.encode(images), tokens)
    codes = F.one_hot(tokens, VOCAB).permute(0, 3, 1, 2).float()
    pictures = dall_e.unmap_pixels(torch.sigmoid(decoder(codes)[:, :3]))
    torch.testing.assert_close(tokenizer.decode(tokens), pictures, atol=1e-4, rtol=0)
