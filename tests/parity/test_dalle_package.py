"""Our DALL-E networks beside those of the `DALL-E` package, with the same random weights."""

import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import NO_WORKERS, ROOT, load_config, run_tool
from peers import assert_equal, read

from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.read import UnsafeCheckpointError
from beit_mm.models import DALLETokenizer
from beit_mm.models.tokenizers.base import map_pixels, unmap_pixels
from beit_mm.registry import DATASETS

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


def pictures(decoder, code: torch.Tensor) -> torch.Tensor:
    """The package's own, of probabilities (B, V, h, w)."""
    return dall_e.unmap_pixels(torch.sigmoid(decoder(code)[:, :3]))


def one_hot(tokens: torch.Tensor) -> torch.Tensor:
    return F.one_hot(tokens, VOCAB).permute(0, 3, 1, 2).float()


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
    torch.testing.assert_close(tokenizer.decode(tokens), pictures(decoder, one_hot(tokens)), atol=1e-4, rtol=0)


@torch.no_grad()
def test_reconstruction_error_of_the_two_files_by_one_command(networks, images):
    """tools/test.py with OpenAI's files named in the config, against the package's own functions."""
    options = [
        'model.checkpoint=encoder.pkl',
        'model.decoder_checkpoint=decoder.pkl',
        'model.hidden=64',
        f'model.vocab_size={VOCAB}',
        *(f'{split}_dataloader.dataset.data_root={images}' for split in ('train', 'val', 'test')),
        'test_dataloader.dataset.data_prefix=',
        'test_dataloader.dataset.pipeline.1.size=32',
    ]
    config = 'dvae/dalle_8k_in1k.py'
    run_tool('test.py', ROOT / 'configs' / config, '--out', 'metrics.json', '--cfg-options', *NO_WORKERS, *options)
    with open('metrics.json') as file:
        found = json.load(file)

    dataset = load_config(config).test_dataloader.dataset.to_dict()
    dataset.update(data_root=str(images), data_prefix='')
    dataset['pipeline'][1]['size'] = 32
    dataset = DATASETS.build(dataset)
    pixels = torch.stack([torch.as_tensor(dataset[i]['inputs']['images']) for i in range(len(dataset))])
    pixels = pixels.permute(0, 3, 1, 2) / 255
    encoder, decoder = networks
    posterior = encoder(dall_e.map_pixels(pixels)).softmax(dim=1)
    tokens = posterior.argmax(dim=1)
    hard, soft = ((pictures(decoder, code) - pixels).abs().mean().item() for code in (one_hot(tokens), posterior))
    assert tokens.shape == (12, 4, 4)
    assert found['tokenizer/recon_mae_01'] == pytest.approx(hard, rel=1e-5)
    assert found['tokenizer/recon_mae_pm1'] == pytest.approx(2 * hard, rel=1e-5)
    assert found['tokenizer/recon_mae_01_soft'] == pytest.approx(soft, rel=1e-5)
    assert found['tokenizer/codes_used'] == len(np.unique(tokens))


@pytest.mark.filterwarnings('ignore:Couldn.t retrieve source code')
def test_pickled_modules_in_the_form_before_torch_1_6_are_refused(tmp_path):
    """torch's own reader of weights does not read them either."""
    torch.save(dall_e.Encoder(n_hid=8, vocab_size=16), tmp_path / 'encoder.pkl', _use_new_zipfile_serialization=False)
    with pytest.raises(UnsafeCheckpointError, match=r'before torch 1.6.* save tensors instead'):
        DALLETokenizer(str(tmp_path / 'encoder.pkl'), hidden=8, vocab_size=16)
