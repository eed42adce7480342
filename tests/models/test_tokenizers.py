"""Tokenizers: images and tokens, networks, weights and errors, the dVAE's training, figures of merit, VQ-KD."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from peers import assert_equal
from scipy import stats

from beit_mm.checkpoint.read import CheckpointError
from beit_mm.engine.metrics import TokenizerMetric
from beit_mm.models.tokenizers import DALLETokenizer, DiscreteVAE, VQKDTokenizer
from beit_mm.models.tokenizers.base import logit_laplace_nll, map_pixels
from beit_mm.models.tokenizers.dalle import DALLEDecoder, DALLEEncoder, convolve_few_channels, multiply_pixels
from beit_mm.models.tokenizers.discrete_vae import ConvDecoder, ConvEncoder, gumbel_softmax

SMALL_DALLE = dict(hidden=8, vocab_size=32)
SMALL_VAE = dict(hidden=8, vocab_size=32, embed_dims=16)


@pytest.mark.parametrize(
    ('kind', 'channels', 'settings'),
    [
        (DALLETokenizer, 3, dict(random_weights=True, hidden=8, vocab_size=32)),
        (DiscreteVAE, 6, dict(arch='conv', in_channels=6, **SMALL_VAE)),
        (DiscreteVAE, 3, dict(arch='conv', bottleneck_blocks=1, **SMALL_VAE)),
        (DiscreteVAE, 1, dict(arch='dalle', loss='laplace', in_channels=1, **SMALL_VAE)),
    ],
)
def test_every_tokenizer_keeps_the_contract(kind, channels, settings):
    tokenizer, images = kind(**settings).eval(), torch.rand(2, channels, 96, 160)
    tokens = tokenizer.encode(images)
    assert tokens.dtype == torch.int64 and tokens.shape == (2, 12, 20) == (2, *tokenizer.grid_size(96, 160))
    assert torch.equal(tokenizer.encoder(tokenizer.to_input(images)).argmax(dim=1), tokens)
    decoded = tokenizer.decode(tokens)
    assert decoded.shape == images.shape and decoded.dtype == torch.float32
    assert decoded.min() >= 0 and decoded.max() <= 1
    one_hot = F.one_hot(tokens, 32).float().permute(0, 3, 1, 2)
    torch.testing.assert_close(tokenizer.decode(one_hot), decoded)

    positions = torch.stack([torch.randperm(240), torch.arange(240) - 5]).clamp(min=-1)
    picked = tokens.flatten(1).gather(1, positions.clamp(min=0)).masked_fill(positions < 0, -1)
    assert torch.equal(tokenizer.encode_at(images, positions), picked)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert torch.equal(tokenizer.encode(images), tokens)
        assert torch.equal(tokenizer.encode_at(images, positions), picked)
        assert torch.equal(tokenizer.decode(tokens), decoded)
    with pytest.raises(ValueError, match='20 x 24 .* 8'):
        tokenizer.encode(images[:, :, :20, :24])


@pytest.mark.parametrize(
    ('network', 'arguments', 'published'),
    [(ConvEncoder, (256, 8192, 3, 2), 6_707_456), (ConvDecoder, (256, 8192, 512, 3, 2, 3), 9_964_803)],
)
def test_parameter_counts_are_the_published_ones(network, arguments, published):
    """Those of DALL-E and of the released class: tests/configs; of VQ-KD: tests/parity/test_beit_v2_peers.py."""
    with torch.device('meta'):
        model = network(*arguments)
    assert sum(p.numel() for p in model.parameters()) == published


def test_small_networks_compute_as_the_released_class():
    """microsoft/unilm `beit/modeling_discrete_vae.py`, written out from its layers."""
    encoder, decoder = ConvEncoder(24, 40, 3, None), ConvDecoder(24, 40, 48, 3, None, 3)

    def residual(weights: dict, x: torch.Tensor) -> torch.Tensor:
        y = F.conv2d(x, weights['net.0.weight'], weights['net.0.bias'], padding=1).relu()
        y = F.conv2d(y, weights['net.2.weight'], weights['net.2.bias'], padding=1).relu()
        return F.conv2d(y, weights['net.4.weight'], weights['net.4.bias']) + x

    x = images = torch.rand(2, 3, 24, 32)
    for level in range(3):
        x = F.conv2d(x, *encoder.levels[2 * level][0].parameters(), stride=2, padding=1).relu()
        x = residual(encoder.levels[2 * level + 1].state_dict(), x)
    logits = F.conv2d(x, *encoder.output.parameters())
    torch.testing.assert_close(encoder(images), logits)

    soft = logits.softmax(dim=1)
    x = torch.stack([(image.flatten(1).t() @ decoder.codebook.weight).t().unflatten(1, (3, 4)) for image in soft])
    for level in range(3):
        x = F.conv_transpose2d(x, *decoder.levels[2 * level][0].parameters(), stride=2, padding=1).relu()
        x = residual(decoder.levels[2 * level + 1].state_dict(), x)
    torch.testing.assert_close(decoder(soft), F.conv2d(x, *decoder.output.parameters()))


def test_random_weights_do_not_depend_on_the_seed_nor_change_it():
    torch.manual_seed(1)
    first = DALLETokenizer(random_weights=True, **SMALL_DALLE)
    drawn = torch.rand(1)
    torch.manual_seed(1)
    assert torch.rand(1) == drawn
    second = DALLETokenizer(random_weights=True, **SMALL_DALLE)
    for one, other in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(one, other) and not one.requires_grad


def test_weights_from_files(tmp_path):
    """One network a file, as OpenAI's, and both in the file of a run."""
    networks = dict(encoder=DALLEEncoder(8, 32), decoder=DALLEDecoder(8, 32))
    encoder, decoder = (str(tmp_path / f'{name}.pkl') for name in networks)
    for path, network in zip((encoder, decoder), networks.values(), strict=True):
        torch.save(dict(state_dict=network.state_dict()), path)
    settings = dict(SMALL_VAE, arch='dalle', loss='laplace', embed_dims=128)
    vae = DiscreteVAE(checkpoint=encoder, decoder_checkpoint=decoder, **settings).eval()
    of_run = {**vae.state_dict(), 'steps': torch.tensor(7), 'data_preprocessor.mean': torch.zeros(3)}
    torch.save(dict(state_dict=of_run, meta={}), tmp_path / 'run.pth')
    trained = DiscreteVAE(checkpoint=str(tmp_path / 'run.pth'), **settings)
    assert trained.steps == 7 and trained.provenance['path'] == str(tmp_path / 'run.pth')
    dalle = DALLETokenizer(encoder, decoder, **SMALL_DALLE)
    for model in (dalle, vae, trained):
        for name, network in networks.items():
            assert_equal(getattr(model, name).state_dict(), network.state_dict())
    for model in (dalle, vae):
        assert (model.provenance['path'], model.provenance['decoder_path']) == (encoder, decoder)
        assert len(model.provenance['sha256']) == 64

    with pytest.raises(ValueError, match='no decoder; give it decoder_checkpoint'):
        DALLETokenizer(encoder, **SMALL_DALLE).decode(torch.zeros(1, 2, 2, dtype=torch.int64))
    with pytest.raises(CheckpointError, match='SHA-256'):
        DALLETokenizer(encoder, sha256='0' * 64, **SMALL_DALLE)
    for decoder_file, network in ((None, 'DALLEEncoder'), (encoder, 'DALLEDecoder')):
        with pytest.raises(ValueError, match=f'does not hold the weights of this {network}'):
            DiscreteVAE(checkpoint=encoder, decoder_checkpoint=decoder_file, **settings)


def test_half_precision_is_that_of_the_original():
    images = torch.rand(1, 3, 16, 16)
    fp32, fp16, bf16 = (
        DALLETokenizer(random_weights=True, precision=precision, **SMALL_DALLE)
        for precision in ('fp32', 'fp16', 'bf16')
    )
    assert torch.equal(fp16.encode(images), fp32.encode(images))  # on a CPU, the original's rule
    assert fp16.encoder.blocks.input.w.dtype == torch.float32
    bf16.encode(images)
    assert bf16.encoder.blocks.input.w.dtype == torch.bfloat16
    assert bf16.encoder.blocks.output.conv.w.dtype == bf16.encoder(images).dtype == torch.float32
    assert bf16.decode(torch.zeros(1, 2, 2, dtype=torch.int64)).dtype == torch.float32
    assert bf16.decoder.blocks.output.conv.w.dtype == torch.bfloat16 != bf16.decoder.blocks.input.w.dtype


@pytest.mark.parametrize('arch, loss', [('dalle', 'laplace'), ('conv', 'mse')])
def test_losses_reach_every_parameter_and_are_those_of_torch(arch, loss):
    """The reconstruction of a given sample, the KL divergence of a pixel value, the figures of the log."""
    model = DiscreteVAE(arch, loss=loss, kl_weight=6.6, kl_steps=1, **SMALL_VAE).train()
    model.steps += 1
    images, seen = torch.rand(2, 3, 16, 24), []
    model.decoder.register_forward_hook(lambda decoder, inputs, output: seen.append(output))
    losses = model(dict(images=images), mode='loss')
    pixels = 0.8 * images + 0.1 if loss == 'laplace' else 2 * images - 1
    expected = (seen[0] - pixels).square().mean() if loss == 'mse' else logit_laplace_nll(pixels, *seen[0].chunk(2, 1))
    torch.testing.assert_close(losses['loss_recon'], expected.mean())
    logits = model.encoder(pixels)
    q = torch.distributions.Categorical(logits=logits.permute(0, 2, 3, 1))
    kl = torch.distributions.kl_divergence(q, torch.distributions.Categorical(logits=torch.zeros(32)))
    torch.testing.assert_close(losses['loss_kl'], 6.6 / 192 * kl.mean())  # 8 x 8 x 3 = 192 values a token
    shares = logits.argmax(dim=1).flatten().bincount() / 12
    assert losses['codes_used'] == (shares > 0).sum()
    assert losses['perplexity'].item() == pytest.approx(math.exp(stats.entropy(shares)), rel=1e-4)
    (losses['loss_recon'] + losses['loss_kl']).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


def test_straight_through_decodes_one_hot_samples_with_the_gradient_of_the_relaxed_ones():
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
    samples = gumbel_softmax(logits.view(1, 4, 1, 1).expand(100, 4, 20, 20), tau=0.5, hard=False)
    torch.testing.assert_close(samples.sum(dim=1), torch.ones(100, 20, 20))
    counts = samples.argmax(dim=1).flatten().bincount(minlength=4)
    expected = 40_000 * logits.double().softmax(dim=0)
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 0.001
    reference = F.gumbel_softmax(logits.expand(40_000, 4), tau=0.5)
    for index in range(4):  # how far from one-hot
        assert stats.ks_2samp(samples[:, index].flatten(), reference[:, index]).pvalue > 0.001


def test_schedules_follow_the_saved_step():
    model = DiscreteVAE('conv', temperature=(1.0, 0.2), temperature_steps=4, kl_steps=3, **SMALL_VAE)
    images = dict(images=torch.rand(1, 3, 8, 8))
    losses = [model(images, mode='loss') for _ in range(6)]
    expected = [0.2 + 0.4 * (1 + math.cos(math.pi * min(step / 4, 1))) for step in range(6)]
    assert [loss['temperature'].item() for loss in losses] == pytest.approx(expected)
    share = [(loss['loss_kl'] / losses[-1]['loss_kl']).item() for loss in losses]
    assert share == pytest.approx([(1 - math.cos(math.pi * min(step / 3, 1))) / 2 for step in range(6)], abs=1e-6)
    assert model.steps == 6
    model.temperature_steps = model.kl_steps = 0  # begins at the end
    found = model.eval()(images, mode='loss')
    assert model.steps == 6  # evaluation does not move them
    torch.testing.assert_close(found['loss_kl'], losses[-1]['loss_kl'])
    assert found['temperature'].item() == pytest.approx(0.2)


def test_the_metric_counts_over_the_whole_set():
    metric = TokenizerMetric()
    for i, grid in enumerate([[[0, 0], [1, 1]], [[2, 2], [3, 3]]], start=1):
        sample = dict(recon_mae_01=0.1 * i, recon_mae_01_soft=0.2 * i, posterior_entropy=1.0 * i)
        sample = {name: torch.tensor(value) for name, value in sample.items()}
        metric.process({}, [dict(sample, tokens=torch.tensor(grid), vocab_size=32)])
    expected = dict(recon_mae_01=0.15, recon_mae_pm1=0.3, recon_mae_01_soft=0.3, recon_mae_pm1_soft=0.6)
    expected |= dict(codes_used=4, codes_share=4 / 32, perplexity=4, posterior_entropy=1.5)
    assert metric.evaluate(size=2) == {f'tokenizer/{name}': pytest.approx(value) for name, value in expected.items()}


@torch.no_grad()
def test_hard_and_soft_reconstructions_are_measured_image_by_image():
    """Those of the 'laplace' loss: tests/parity/test_dalle_package.py."""
    model, images = DiscreteVAE('conv', **SMALL_VAE).eval(), torch.rand(2, 3, 16, 24)
    posterior = torch.distributions.Categorical(logits=model.encoder(2 * images - 1).permute(0, 2, 3, 1))
    codes = F.one_hot(posterior.probs.argmax(-1), 32).float(), posterior.probs
    found = model(dict(images=images), mode='predict')
    for name, code in zip(('recon_mae_01', 'recon_mae_01_soft'), codes, strict=True):
        decoded = (model.decoder(code.permute(0, 3, 1, 2)) + 1) / 2
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


# --- VQ-KD; see tests/parity/test_beit_v2_peers.py --------------------------------------------------

SMALL_VQKD = dict(arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=64, code_dims=8, vocab_size=64)


# in the released names: what trains a tokenizer, and statistics of the training
LEFT_OVER = [f'quantize.{name}' for name in ('cluster_size', 'embedding.cluster_size', 'embedding.embed_avg')]
LEFT_OVER += ['quantize.embedding.initted', 'decoder.cls_token', 'decode_task_layer.0.weight']
LEFT_OVER += ['teacher_model.visual.proj', 'scaling_layer.shift', 'scaling_layer.scale']


def test_vqkds_released_file_is_read_with_what_encoding_does_not_need(tmp_path):
    own, path = VQKDTokenizer(random_weights=True, **SMALL_VQKD).state_dict(), str(tmp_path / 'vqkd.pth')
    weights = {name: torch.randn_like(tensor) * 0.3 for name, tensor in own.items()}
    names = {name: name.replace('codebook', 'quantize.embedding.weight').replace('.norm.', '.fc_norm.') for name in own}
    released = {names[name]: tensor for name, tensor in weights.items()}
    torch.save(dict(model=released | {name: torch.ones(3) for name in LEFT_OVER}), path)
    tokenizer = VQKDTokenizer(path, **SMALL_VQKD)
    assert_equal(tokenizer.state_dict(), weights)
    assert tokenizer.provenance['path'] == path and len(tokenizer.provenance['sha256']) == 64
    assert not any(p.requires_grad for p in tokenizer.parameters())


def test_a_token_is_the_nearest_vector_of_the_codebook():
    """Of any length; the released ones have length one, where it is that of the largest cosine."""
    tokenizer = VQKDTokenizer(random_weights=True, **SMALL_VQKD)
    torch.testing.assert_close(tokenizer.codebook.norm(dim=-1), torch.ones(64))
    torch.nn.init.normal_(tokenizer.codebook, 0, 0.5)
    images = torch.rand(4, 3, 64, 64)
    vectors = tokenizer.encode_task_layer(tokenizer.encoder(2 * images - 1)[0][:, 1:])  # B, N, D
    vectors = vectors / vectors.norm(dim=-1, keepdim=True)
    expected = torch.cdist(vectors.double(), tokenizer.codebook.double()).argmin(dim=-1).view(4, 4, 4)
    assert torch.equal(tokenizer.encode(images), expected) and len(expected.unique()) > 5
    with torch.autocast('cpu', torch.bfloat16):
        assert torch.equal(tokenizer.encode(images), expected)  # fp16 is fp32 on a CPU, as the original
    assert not tokenizer.can_decode


def test_half_precision_of_vqkd_is_that_of_the_encoder():
    outputs, images = [], torch.rand(16, 3, 64, 64)
    for precision in ('fp32', 'bf16'):
        tokenizer = VQKDTokenizer(random_weights=True, precision=precision, **SMALL_VQKD)
        tokenizer.encoder.register_forward_hook(lambda _module, _inputs, features: outputs.append(features[0].float()))
        outputs.append(tokenizer.encode(images))
    features, tokens, of_rounded, rounded = outputs
    assert (tokens != rounded).float().mean() < 0.2
    error = (features - of_rounded).norm() / features.norm()
    assert 1e-4 < error < 0.05  # bfloat16 has 8 bits, float32 24


@pytest.mark.parametrize('channels', [1, 3, 6])
def test_few_channels_are_convolved_alike_on_a_gpu(channels):
    images, weight, bias = torch.randn(2, channels, 12, 20), torch.randn(5, channels, 7, 7), torch.randn(5)
    expected = F.conv2d(images.double(), weight.double(), bias.double(), padding=3)
    torch.testing.assert_close(convolve_few_channels(images.double(), weight.double(), bias.double()), expected)
    expected = F.conv2d(images, weight[..., :1, :1], bias)
    torch.testing.assert_close(multiply_pixels(images, weight[..., :1, :1], bias), expected)
