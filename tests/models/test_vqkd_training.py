"""VQ-KD in training: the codebook's moving averages, its losses, its teachers, and what a tokenizer reads of it."""

import math

import pytest
import torch
import torch.nn.functional as F
from helpers import run_ranks
from mmpretrain.models.utils import NormEMAVectorQuantizer
from peers import save_clip
from torch import Tensor, nn

from beit_mm.checkpoint.read import write_checkpoint
from beit_mm.engine import AutocastOptimWrapper
from beit_mm.models import VQKD, BEiTBackbone, VQKDTokenizer
from beit_mm.models.tokenizers import CLIPTeacher
from beit_mm.pictures import reconstructed

ARCH = dict(embed_dims=32, num_layers=2, num_heads=4)
SIZES = dict(arch=ARCH, img_size=32, patch_size=8, code_dims=6, vocab_size=24)
PIXELS = dict(hidden=8, width=8, bottleneck_blocks=1)


@pytest.fixture(scope='module')
def teacher(tmp_path_factory) -> dict:
    torch.manual_seed(5)
    backbone = BEiTBackbone(ARCH, 32, 8, rel_pos_bias='shared', layer_scale_init=0.1)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.3)
    path = tmp_path_factory.mktemp('teacher') / 'beit.pth'
    write_checkpoint(path, dict(state_dict=backbone.state_dict()))
    return dict(type='beit_mm.BEiTTeacher', checkpoint=str(path))


def vqkd(teacher: dict, **changes: object) -> VQKD:
    torch.manual_seed(0)
    return VQKD(teacher=teacher, teacher_dims=32, decoder_layers=1, **{**SIZES, **changes})


def images_of(seed: int, number: int = 4) -> Tensor:
    return torch.rand(number, 3, 32, 32, generator=torch.Generator().manual_seed(seed))


def test_codes_and_both_losses_are_those_of_the_released_quantizer(teacher):
    """mmpretrain's copy of it: k-means on the first batch, then four steps, the last one in evaluation."""
    model = vqkd(teacher).train()
    theirs = NormEMAVectorQuantizer(24, 6, beta=1.0, decay=0.99, kmeans_init=True).train()
    for step in range(5):
        images = images_of(step)
        if step == 4:
            model.eval(), theirs.eval()
        hidden = model.encoder(2 * images - 1)[0][:, 1:]
        z = model.encode_task_layer(hidden).transpose(1, 2).unflatten(2, (4, 4))
        torch.manual_seed(7)  # k-means begins with vectors that are drawn
        codes, commit, tokens = theirs(z)
        assert step == 0 or torch.equal(model.encode(images).flatten(), tokens)  # before the codes move
        torch.manual_seed(7)
        losses = model(dict(images=images))
        decoded = model.decode_task_layer(model.decoder(codes)[0][:, 1:])
        (target,) = model.teacher[0](images, (4, 4))
        feature = 1 - (F.normalize(decoded, dim=-1) * F.normalize(target, dim=-1)).sum(-1).mean()
        assert losses['loss_commit'].item() == pytest.approx(commit.item(), abs=1e-6)
        assert losses['loss_feature'].item() == pytest.approx(feature.item(), abs=1e-6)
        assert losses['codes_used'] == len(tokens.unique())
        torch.testing.assert_close(model.codebook, theirs.embedding.weight, rtol=0, atol=1e-6)
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        expected = torch.autograd.grad(feature + commit, parameters)
        found = torch.autograd.grad(losses['loss_feature'] + losses['loss_commit'], parameters)
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(('options', 'std'), [({}, 0.02), (dict(init_bound=0.02), 0.02 * 0.5396)])
def test_weights_start_as_in_the_released_code(teacher, options, std):
    """Normal with sigma 0.02, output matrices by their depth; patch embeddings as torch's; biases of 0. Or cut."""
    arch = dict(embed_dims=256, num_layers=3, num_heads=4)
    model = vqkd(teacher, arch=arch, code_dims=64, **options)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad or 'norm' in name or name.endswith('patch_embed.proj.bias'):
            continue
        expected = 0.02 if 'task_layer' in name else std
        if name.endswith('bias'):
            expected = 0.0
        elif 'patch_embed' in name:
            expected = 1 / math.sqrt(3 * parameter[0].numel())
        elif name.endswith(('attn.proj.weight', 'mlp.fc2.weight')):
            expected /= math.sqrt(2 * (int(name.split('.')[2]) + 1))
        spread = 4 / math.sqrt(2 * parameter.numel())  # of the deviation of so few draws, four standard errors
        assert parameter.square().mean().sqrt().item() == pytest.approx(expected, rel=max(0.06, spread)), name


def test_codes_that_are_not_used_begin_anew_where_that_is_wanted(teacher):
    used, restarted = [], []
    for restart_below in (None, 0.5):
        model = vqkd(teacher, kmeans_init=False, restart_below=restart_below, decay=0.9).train()
        model.codebook[1:] = model.codebook[:1]  # all the same: one or few take everything
        for step in range(12):
            losses = model(dict(images=images_of(step)))
            restarted.append(losses.get('codes_restarted', torch.zeros(())).item())
        used.append(losses['codes_used'].item())
    assert used[0] < 8 and used[1] > 12 and sum(restarted[:12]) == 0 < sum(restarted[12:])


def test_a_skipped_step_moves_no_code_and_undoes_k_means(teacher):
    model = vqkd(teacher, restart_below=0.5).train()
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    wrapper = AutocastOptimWrapper('float32', optimizer=torch.optim.AdamW(parameters, 1e-3))
    for step, factor in enumerate((math.nan, 1.0, math.nan, 1.0)):
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        with wrapper.optim_context(model):
            losses = model(dict(images=images_of(step)))
        wrapper.update_params(factor * (losses['loss_feature'] + losses['loss_commit']))
        moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
        assert {'codebook', 'usage'} <= moved if factor == 1 else not moved
    assert model.started


def test_a_tokenizer_reads_what_was_trained(teacher, tmp_path):
    model = vqkd(teacher, pixel_decoder=PIXELS).train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    for _ in range(3):
        losses = model(dict(images=images_of(0)))
        assert losses.keys() >= {'loss_feature', 'loss_commit', 'loss_pixels'}
        optimizer.zero_grad()
        sum(value for name, value in losses.items() if name.startswith('loss')).backward()
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)  # DistributedDataParallel waits
        optimizer.step()
    state = model.state_dict()
    assert not any('teacher' in name for name in state)
    write_checkpoint(tmp_path / 'run.pth', dict(state_dict=state))
    resumed = vqkd(teacher, pixel_decoder=PIXELS)
    resumed.load_state_dict(state)
    images = images_of(9)
    for trained in (model.eval(), resumed.eval()):
        tokens = trained.encode(images)
        results = trained(dict(images=images), mode='predict')
        for pixel_decoder in (PIXELS, None):
            tokenizer = VQKDTokenizer(str(tmp_path / 'run.pth'), pixel_decoder=pixel_decoder, **SIZES)
            assert torch.equal(tokenizer.encode(images), tokens) and tokenizer.can_decode == bool(pixel_decoder)
            if pixel_decoder:
                error = (tokenizer.decode(tokens) - images).abs().mean(dim=(1, 2, 3))
                torch.testing.assert_close(torch.stack([row['recon_mae_01'] for row in results]), error)
        assert torch.equal(torch.stack([row['tokens'] for row in results]).long(), tokens)
    assert resumed.started and tokens.shape == (4, 4, 4) and len(tokens.unique()) > 2
    drawn = reconstructed(model, dict(images=images))['tokens, decoded']
    assert drawn.shape == images.shape and drawn.min() >= 0 and drawn.max() <= 1


@pytest.mark.parametrize('kmeans_init', [False, True])
def test_two_processes_have_the_same_codes_those_of_one_where_nothing_is_drawn(teacher, tmp_path, kmeans_init):
    def codes_of(rank: int | None) -> Tensor:
        model = vqkd(teacher, kmeans_init=kmeans_init, restart_below=0.5 if kmeans_init else None).train()
        for step in range(3):
            images = images_of(step)
            torch.manual_seed(step + 100 * bool(rank))  # each process draws its own
            model(dict(images=images if rank is None else images[rank::2].contiguous()))
        return model.codebook.detach().clone()

    first, second = run_ranks(codes_of, tmp_path)
    assert torch.equal(first, second) and first.unique(dim=0).shape == first.shape
    if not kmeans_init:  # nothing is drawn
        torch.testing.assert_close(first, codes_of(None), rtol=0, atol=1e-6)


def test_clip_gives_the_features_of_its_library(tmp_path):
    """A plain ViT: tests/models/test_feature_targets.py, tests/parity/test_plain_vits.py."""
    images, network = images_of(1), save_clip(tmp_path / 'clip')
    clip = CLIPTeacher(str(tmp_path / 'clip'))
    with torch.no_grad():  # the projection of all patches; the class token's is the library's own
        small = F.interpolate(images, (28, 28), mode='bicubic', antialias=True).clamp(0, 1)
        normalised = (255 * small - clip.mean) / clip.std
        tokens = network.vision_model(normalised).last_hidden_state
        expected = network.visual_projection(network.vision_model.post_layernorm(tokens))
        own = network(normalised).image_embeds
    torch.testing.assert_close(expected[:, 0], own)
    torch.testing.assert_close(clip(images, (4, 4)), [expected[:, 1:]], rtol=1e-4, atol=1e-4)
    assert not any(parameter.requires_grad for parameter in clip.parameters())


def test_a_released_file_is_trained_further(teacher):
    """In the names that the released quantizer and its Transformers have."""
    model, other = vqkd(teacher).train(), vqkd(teacher).train()
    nn.init.normal_(model.decoder.norm.weight)
    model(dict(images=images_of(0)))
    state = {
        name.replace('codebook', 'quantize.embedding.weight').replace('.norm.', '.fc_norm.'): tensor.clone()
        for name, tensor in model.state_dict().items()
        if name not in ('usage', 'started')
    }
    missing, unexpected = other.load_state_dict(state, strict=False)
    assert missing == ['usage'] and not unexpected
    found, expected = (each(dict(images=images_of(1))) for each in (other, model))
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_features_of_another_width_are_refused(teacher):
    model = vqkd(teacher)
    model.teacher_dims = 31
    with pytest.raises(ValueError, match='teacher_dims is 31.* 32'):
        model(dict(images=images_of(0)))
