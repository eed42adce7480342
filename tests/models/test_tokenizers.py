"""Tokenizers: images and tokens, DALL-E's weights and errors, the dVAE's training, figures of merit."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmengine.registry import MODELS
from scipy import stats

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.metrics import TokenizerMetric
from beit_mm.models.tokenizers import DALLETokenizer, DiscreteVAE
from beit_mm.models.tokenizers.base import logit_laplace_nll, map_pixels
from beit_mm.models.tokenizers.dalle import DALLEDecoder, DALLEEncoder
from beit_mm.models.tokenizers.discrete_vae import gumbel_softmax

SMALL_DALLE = dict(hidden=8, vocab_size=32)
SMALL_VAE = dict(hidden=8, vocab_size=32, embed_dims=16)


def tokenizers():
    torch.manual_seed(0)
    return [
        DALLETokenizer(random_weights=True, **SMALL_DALLE),
        DiscreteVAE('conv', **SMALL_VAE).eval(),
        DiscreteVAE('dalle', loss='laplace', **SMALL_VAE).eval(),
    ]


# --- the contract --------------------------------------------------------------------------------


@pytest.mark.parametrize('tokenizer', tokenizers(), ids=['dalle', 'conv', 'dvae-dalle'])
def test_every_tokenizer_keeps_the_contract(tokenizer):
    images = torch.rand(2, 3, 24, 40)
    tokens = tokenizer.encode(images)
    assert tokens.dtype == torch.int64 and tokens.shape == (2, *tokenizer.grid_size(24, 40))
    assert tokens.min() >= 0 and tokens.max() < tokenizer.vocab_size
    decoded = tokenizer.decode(tokens)
    assert decoded.shape == images.shape and decoded.dtype == torch.float32
    assert decoded.min() >= 0 and decoded.max() <= 1
    one_hot = torch.nn.functional.one_hot(tokens, tokenizer.vocab_size).float().permute(0, 3, 1, 2)
    torch.testing.assert_close(tokenizer.decode(one_hot), decoded)

    positions = torch.tensor([[3, 0, 14, -1], [7, 7, -1, -1]])
    expected = tokens.flatten(1).gather(1, positions.clamp(min=0)).masked_fill(positions < 0, -1)
    assert torch.equal(tokenizer.encode_at(images, positions), expected)

    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(tokenizer.encode(images), tokens)
        assert torch.equal(tokenizer.decode(tokens), decoded)
    with pytest.raises(ValueError, match='multiple of 8 pixels a side, got 20 x 24'):
        tokenizer.encode(torch.rand(1, 3, 20, 24))


# --- DALL-E --------------------------------------------------------------------------------------


def test_random_weights_do_not_depend_on_the_seed_nor_change_it():
    torch.manual_seed(1)
    first = DALLETokenizer(random_weights=True, **SMALL_DALLE)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn
    second = DALLETokenizer(random_weights=True, **SMALL_DALLE)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other)
    assert not any(p.requires_grad for p in first.parameters())


def test_weights_from_files(tmp_path):
    source, path = DALLETokenizer(random_weights=True, **SMALL_DALLE), tmp_path / 'encoder.pth'
    state = {name: p + 0.01 for name, p in source.encoder.state_dict().items()}
    torch.save({'state_dict': state}, path)
    tokenizer = DALLETokenizer(str(path), **SMALL_DALLE)
    assert all(torch.equal(tokenizer.encoder.state_dict()[name], p) for name, p in state.items())
    assert tokenizer.provenance['path'] == str(path)
    assert len(tokenizer.provenance['sha256']) == 64
    with pytest.raises(ValueError, match='has no decoder'):
        tokenizer.decode(torch.zeros(1, 2, 2, dtype=torch.int64))
    with pytest.raises(CheckpointError, match='SHA-256'):
        DALLETokenizer(str(path), sha256='0' * 64, **SMALL_DALLE)
    message = 'encoder.* does not hold the weights of this DALLEEncoder: .*size mismatch for blocks.output.conv.w'
    with pytest.raises(ValueError, match=message):
        DALLETokenizer(str(path), hidden=8, vocab_size=64)


def test_a_missing_file_says_where_and_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError) as caught:
        DALLETokenizer(str(tmp_path / 'none.pth'))
    first, second = str(caught.value).splitlines()
    assert str(tmp_path / 'none.pth') in first
    for word in ('https://', 'target_generator.checkpoint', 'random_weights'):
        assert word in second
    with pytest.raises(FileNotFoundError, match='configs/dvae'):
        DiscreteVAE('conv', checkpoint=str(tmp_path / 'none.pth'), **SMALL_VAE)


def test_a_url_is_looked_up_in_the_folder_and_the_cache_and_is_downloaded(tmp_path, monkeypatch):
    """Without a network; the error names both."""
    folder, cache = tmp_path / 'weights', tmp_path / 'hub/checkpoints'
    monkeypatch.setenv('BEIT_MM_WEIGHTS', str(folder))
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    url = 'http://127.0.0.1:1/dalle_encoder.pth'  # nobody listens there
    with pytest.raises(FileNotFoundError, match='cannot be downloaded') as caught:
        DALLETokenizer(url)
    assert all(str(place) in str(caught.value) for place in (folder, cache, url))
    folder.mkdir()
    torch.save(DALLETokenizer(random_weights=True, **SMALL_DALLE).encoder.state_dict(), folder / 'dalle_encoder.pth')
    assert DALLETokenizer(url, **SMALL_DALLE).provenance['path'] == str(folder / 'dalle_encoder.pth')

    remote = (folder / 'dalle_encoder.pth').rename(tmp_path / 'remote.pth')
    urlopen = torch.hub.urlopen
    with monkeypatch.context() as answering:
        answering.setattr('torch.hub.urlopen', lambda request: urlopen(remote.as_uri()))
        DALLETokenizer(url, **SMALL_DALLE)
    assert DALLETokenizer(url, **SMALL_DALLE).provenance['path'] == str(cache / 'dalle_encoder.pth')
    assert [p.name for p in cache.iterdir()] == ['dalle_encoder.pth']  # no partial file beside it


def test_half_precision_is_that_of_the_original():
    images = torch.rand(1, 3, 16, 16)
    fp32 = DALLETokenizer(random_weights=True, precision='fp32', **SMALL_DALLE)
    fp16 = DALLETokenizer(random_weights=True, precision='fp16', **SMALL_DALLE)
    assert torch.equal(fp16.encode(images), fp32.encode(images))  # on a CPU, the original's rule
    assert fp16.encoder.blocks.input.w.dtype == torch.float32
    bf16 = DALLETokenizer(random_weights=True, precision='bf16', **SMALL_DALLE)
    bf16.encode(images)
    assert bf16.encoder.blocks.input.w.dtype == torch.bfloat16
    assert bf16.encoder.blocks.output.conv.w.dtype == bf16.encoder(images).dtype == torch.float32
    assert bf16.decode(torch.zeros(1, 2, 2, dtype=torch.int64)).dtype == torch.float32
    with pytest.raises(ValueError, match="got 'int8'"):
        DALLETokenizer(random_weights=True, precision='int8')


# --- the discrete VAE ----------------------------------------------------------------------------


@pytest.mark.parametrize('loss', ['laplace', 'mse'])
@pytest.mark.parametrize('arch', ['dalle', 'conv'])
def test_losses_reach_every_parameter(arch, loss):
    torch.manual_seed(0)
    model = MODELS.build(dict(type='beit_mm.DiscreteVAE', arch=arch, loss=loss, kl_steps=1, **SMALL_VAE)).train()
    model.steps += 1
    losses = model(dict(images=torch.rand(2, 3, 16, 16)), mode='loss')
    assert set(losses) == {'loss_recon', 'loss_kl', 'temperature', 'codes_used', 'perplexity'}
    (losses['loss_recon'] + losses['loss_kl']).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert 1 <= losses['perplexity'] <= losses['codes_used'] + 1e-4


def test_kl_is_that_of_torch_per_pixel_value():
    model = DiscreteVAE('conv', kl_weight=6.6, kl_steps=1, **SMALL_VAE).eval()
    model.steps += 1
    images = torch.rand(2, 3, 16, 24)
    logits = model.encoder(model.to_input(images))
    q = torch.distributions.Categorical(logits=logits.permute(0, 2, 3, 1))
    uniform = torch.distributions.Categorical(logits=torch.zeros(32))
    kl = torch.distributions.kl_divergence(q, uniform)
    found = model(dict(images=images), mode='loss')['loss_kl']
    torch.testing.assert_close(found, 6.6 / 192 * kl.mean())  # 8 x 8 x 3 = 192 values a token


@pytest.mark.parametrize('arch, loss', [('dalle', 'laplace'), ('conv', 'mse')])
@pytest.mark.parametrize('channels', [1, 6])
def test_images_of_any_number_of_channels(arch, loss, channels):
    model = DiscreteVAE(arch, loss=loss, in_channels=channels, **SMALL_VAE)
    images = torch.rand(2, channels, 16, 24)
    losses = model(dict(images=images), mode='loss')
    assert losses['loss_recon'].isfinite()
    tokens = model.eval().encode(images)
    assert tokens.shape == (2, 2, 3) and model.decode(tokens).shape == images.shape


def test_straight_through_decodes_one_hot_samples_with_the_gradient_of_the_relaxed_ones():
    torch.manual_seed(0)
    images = dict(images=torch.rand(2, 3, 16, 16))
    relaxed = DiscreteVAE('conv', **SMALL_VAE).eval()
    hard = DiscreteVAE('conv', straight_through=True, **SMALL_VAE).eval()
    hard.load_state_dict(relaxed.state_dict())
    samples, weights = [], torch.rand(2, 32, 2, 2)
    for model in (relaxed, hard):
        model.decoder.register_forward_pre_hook(lambda decoder, inputs: samples.append(inputs[0]))
        torch.manual_seed(1)  # the same Gumbel noise
        model(images, mode='loss')
        (samples[-1] * weights).sum().backward()
    soft, one_hot = samples
    assert set(one_hot.round(decimals=5).flatten().tolist()) == {0.0, 1.0} and soft.max() < 0.99
    assert torch.equal(one_hot.argmax(dim=1), soft.argmax(dim=1))
    for one, other in zip(hard.encoder.parameters(), relaxed.encoder.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_samples_have_the_frequencies_that_the_logits_say():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0])
    torch.manual_seed(0)
    samples = gumbel_softmax(logits.view(1, 4, 1, 1).expand(100, 4, 20, 20), tau=0.5, hard=False)
    torch.testing.assert_close(samples.sum(dim=1), torch.ones(100, 20, 20))
    counts = samples.argmax(dim=1).flatten().bincount(minlength=4)
    expected = 40_000 * logits.double().softmax(dim=0)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001
    reference = F.gumbel_softmax(logits.expand(40_000, 4), tau=0.5)
    for index in range(4):  # how far from one-hot
        assert stats.ks_2samp(samples[:, index].flatten(), reference[:, index]).pvalue > 0.001


def test_schedules_follow_the_saved_step():
    model = DiscreteVAE('conv', temperature=(1.0, 0.2), temperature_steps=4, **SMALL_VAE)
    images = dict(images=torch.rand(1, 3, 8, 8))
    temperatures = [model(images, mode='loss')['temperature'].item() for _ in range(6)]
    expected = [0.2 + 0.4 * (1 + math.cos(math.pi * min(step / 4, 1))) for step in range(6)]
    assert temperatures == pytest.approx(expected)
    resumed = DiscreteVAE('conv', temperature=(1.0, 0.2), temperature_steps=40, **SMALL_VAE)
    resumed.load_state_dict(model.state_dict())
    assert resumed.steps == 6
    resumed.eval()(images, mode='loss')
    assert resumed.steps == 6  # evaluation does not move them


def test_trains_becomes_a_tokenizer_and_is_measured(tmp_path):
    """Eight flat colours: different colours get different codes, and codes their colours."""
    torch.manual_seed(0)
    model = DiscreteVAE('conv', temperature=(1.0, 0.1), temperature_steps=300, kl_weight=0.5, kl_steps=40, **SMALL_VAE)
    images = torch.rand(8, 3, 1, 1).expand(8, 3, 16, 16)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(300):
        losses = model(dict(images=images), mode='loss')
        optimizer.zero_grad()
        (losses['loss_recon'] + losses['loss_kl']).backward()
        optimizer.step()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, tmp_path / 'run.pth')
    tokenizer = DiscreteVAE('conv', checkpoint=str(tmp_path / 'run.pth'), **SMALL_VAE)
    assert torch.equal(tokenizer.encode(images), model.encode(images))
    assert tokenizer.provenance['path'] == str(tmp_path / 'run.pth')

    metric = TokenizerMetric()
    metric.process({}, tokenizer(dict(images=images), mode='predict'))
    result = metric.evaluate(size=8)
    error_of_one_colour = (images - images.mean(dim=0)).abs().mean().item()
    # one code for all gives 1; the noise that torch 2.6 draws ends at 0.84, that of 2.11 below 0.75
    assert result['tokenizer/recon_mae_01'] < 0.9 * error_of_one_colour
    assert result['tokenizer/recon_mae_pm1'] == pytest.approx(2 * result['tokenizer/recon_mae_01'])
    assert result['tokenizer/codes_used'] >= 3
    assert 1 < result['tokenizer/perplexity'] <= result['tokenizer/codes_used'] + 1e-6


def test_the_metric_counts_over_the_whole_set():
    metric = TokenizerMetric()
    for i, grid in enumerate([[[0, 0], [1, 1]], [[2, 2], [3, 3]]], start=1):
        sample = dict(recon_mae_01=0.1 * i, recon_mae_01_soft=0.2 * i, posterior_entropy=1.0 * i)
        sample = {name: torch.tensor(value) for name, value in sample.items()}
        metric.process({}, [dict(sample, tokens=torch.tensor(grid), vocab_size=32)])
    expected = dict(recon_mae_01=0.15, recon_mae_pm1=0.3, recon_mae_01_soft=0.3, recon_mae_pm1_soft=0.6)
    expected |= dict(codes_used=4, codes_share=4 / 32, perplexity=4, posterior_entropy=1.5)
    assert metric.evaluate(size=2) == {f'tokenizer/{name}': pytest.approx(value) for name, value in expected.items()}


@pytest.mark.parametrize('arch, loss', [('dalle', 'laplace'), ('conv', 'mse')])
@torch.no_grad()
def test_hard_and_soft_reconstructions_are_measured_image_by_image(arch, loss):
    model = DiscreteVAE(arch, loss=loss, **SMALL_VAE).eval()
    images = torch.rand(2, 3, 16, 24)
    pixels = 0.8 * images + 0.1 if loss == 'laplace' else 2 * images - 1
    posterior = torch.distributions.Categorical(logits=model.encoder(pixels).permute(0, 2, 3, 1))  # B, h, w, V
    codes = F.one_hot(posterior.probs.argmax(-1), 32).float(), posterior.probs
    found = model(dict(images=images), mode='predict')
    for name, code in zip(('recon_mae_01', 'recon_mae_01_soft'), codes, strict=True):
        output = model.decoder(code.permute(0, 3, 1, 2))
        decoded = (output[:, :3].sigmoid() - 0.1) / 0.8 if loss == 'laplace' else (output + 1) / 2
        errors = (decoded.clamp(0, 1) - images).abs().mean(dim=(1, 2, 3))
        torch.testing.assert_close(torch.stack([sample[name] for sample in found]), errors)
    entropies = torch.stack([sample['posterior_entropy'] for sample in found])
    torch.testing.assert_close(entropies, posterior.entropy().mean(dim=(1, 2)))


@torch.no_grad()
def test_the_loss_of_pixels_is_scipys_logit_laplace_density():
    images = torch.randint(256, (2, 3, 16, 24)) / 255
    location, log_scale = torch.randn(2, 2, 3, 16, 24)
    mapped = 0.8 * images.double().numpy() + 0.1
    # Change of variables: of logit(y) a Laplace distribution, of y = 0.8 x + 0.1 that of x.
    density = stats.laplace.logpdf(np.log(mapped / (1 - mapped)), location.numpy(), log_scale.exp().numpy())
    density -= np.log(mapped * (1 - mapped))
    np.testing.assert_allclose(
        -logit_laplace_nll(map_pixels(images), location, log_scale), density, rtol=1e-4, atol=1e-5
    )


# --- DALL-E's two files as a model that is tested ------------------------------------------------


@pytest.fixture
def dalle_files(tmp_path):
    """An encoder and a decoder in files of their own, as DALL-E's."""
    torch.manual_seed(1)
    networks = dict(encoder=DALLEEncoder(8, 32), decoder=DALLEDecoder(8, 32, 16))
    for name, network in networks.items():
        torch.save(network.state_dict(), tmp_path / f'{name}.pkl')
    return {name: str(tmp_path / f'{name}.pkl') for name in networks}


def test_encoder_and_decoder_of_their_own_files(dalle_files):
    encoder, decoder = dalle_files['encoder'], dalle_files['decoder']
    settings = dict(arch='dalle', loss='laplace', **SMALL_VAE)
    model = DiscreteVAE(checkpoint=encoder, decoder_checkpoint=decoder, **settings).eval()
    for network, path in ((model.encoder, encoder), (model.decoder, decoder)):
        state = torch.load(path, weights_only=True)
        assert all(torch.equal(tensor, state[name]) for name, tensor in network.state_dict().items())
    assert (model.provenance['path'], model.provenance['decoder_path']) == (encoder, decoder)
    with pytest.raises(ValueError, match="one of DALL-E's two networks; name .* in decoder_checkpoint"):
        DiscreteVAE(checkpoint=encoder, **settings)
    with pytest.raises(ValueError, match='name the file of its encoder in checkpoint'):
        DiscreteVAE(decoder_checkpoint=decoder, **settings)
    with pytest.raises(ValueError, match='encoder.pkl does not hold the weights of this DALLEDecoder'):
        DiscreteVAE(checkpoint=encoder, decoder_checkpoint=encoder, **settings)


@pytest.mark.parametrize(
    ('kwargs', 'said'),
    [
        (dict(arch='vit'), "'dalle' or 'conv', got 'vit'"),
        (dict(loss='l1'), "got 'l1'"),
        (dict(arch='dalle', num_levels=4), 'num_levels=4'),
    ],
)
def test_impossible_settings(kwargs, said):
    with pytest.raises(ValueError, match=said):
        DiscreteVAE(**{**SMALL_VAE, **kwargs})
