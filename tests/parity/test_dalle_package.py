"""Our DALL-E networks beside those of the `DALL-E` package, with the same random weights."""

import json
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from helpers import NO_WORKERS, ROOT, load_config, run_tool

from beit_mm.checkpoint.read import UnsafeCheckpointError
from beit_mm.models import DALLETokenizer
from beit_mm.models.tokenizers.base import map_pixels, unmap_pixels
from beit_mm.models.tokenizers.dalle import DALLEDecoder, DALLEEncoder
from beit_mm.registry import DATASETS

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


@torch.no_grad()
@pytest.mark.parametrize('size', [16, 32])
def test_reconstruction_error_of_the_two_files_by_one_command(size, images, tmp_path, monkeypatch):
    """tools/test.py with OpenAI's files named in the config, against the package's own functions."""
    monkeypatch.chdir(tmp_path)
    encoder, decoder = dall_e.Encoder(n_hid=64, vocab_size=512), dall_e.Decoder(n_hid=64, vocab_size=512)
    torch.save(encoder, 'encoder.pkl')
    torch.save(decoder, 'decoder.pkl')
    run_tool(
        'test.py',
        ROOT / 'configs/dvae/dalle_8k_in1k.py',
        '--out',
        'metrics.json',
        '--cfg-options',
        *NO_WORKERS,
        'model.checkpoint=encoder.pkl',
        'model.decoder_checkpoint=decoder.pkl',
        'model.hidden=64',
        'model.vocab_size=512',
        f'train_dataloader.dataset.data_root={images}',
        f'val_dataloader.dataset.data_root={images}',
        f'test_dataloader.dataset.data_root={images}',
        'test_dataloader.dataset.data_prefix=',
        f'test_dataloader.dataset.pipeline.1.size={size}',
    )
    found = json.loads((tmp_path / 'metrics.json').read_text())

    config = load_config('dvae/dalle_8k_in1k.py').test_dataloader.dataset.to_dict()
    config.update(data_root=str(images), data_prefix='')
    config['pipeline'][1]['size'] = size
    dataset = DATASETS.build(config)
    pixels = torch.stack([torch.as_tensor(dataset[i]['inputs']['images']) for i in range(len(dataset))])
    pixels = pixels.permute(0, 3, 1, 2) / 255
    posterior = encoder(dall_e.map_pixels(pixels)).softmax(dim=1)
    tokens = posterior.argmax(dim=1)
    errors = []
    for code in (F.one_hot(tokens, 512).permute(0, 3, 1, 2).float(), posterior):
        decoded = dall_e.unmap_pixels(torch.sigmoid(decoder(code)[:, :3]))
        errors.append((decoded - pixels).abs().mean().item())
    assert len(pixels) == 12 and tokens.shape[1:] == (size // 8, size // 8)
    assert found['tokenizer/recon_mae_01'] == pytest.approx(errors[0], rel=1e-5)
    assert found['tokenizer/recon_mae_pm1'] == pytest.approx(2 * errors[0], rel=1e-5)
    assert found['tokenizer/recon_mae_01_soft'] == pytest.approx(errors[1], rel=1e-5)
    assert found['tokenizer/codes_used'] == len(np.unique(tokens))


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
