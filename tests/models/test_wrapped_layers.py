"""LoRA, pruning, parametrisations, hooks: what is put around or into a layer of the backbone has its effect."""

import copy

import pytest
import torch
from mmpretrain.models.peft.lora import LoRALinear
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.utils.flop_counter import FlopCounterMode

from beit_mm.models import BEiTBackbone, vit
from beit_mm.positions import take_tokens

BACKBONE = dict(arch=dict(embed_dims=32, num_layers=2, num_heads=4), img_size=32, patch_size=8, rel_pos_bias='shared')
LAYERS = ('attn.qkv', 'attn.proj', 'mlp.fc1', 'mlp.fc2')
IMAGES = torch.randn(2, 3, 32, 32, dtype=torch.float64)
POSITIONS = torch.tensor([[0, 5, 15], [3, -1, -1]])


class Scaled(nn.Module):
    def forward(self, weight):
        return 1.5 * weight


def lora(layer):
    wrapped = LoRALinear(layer, alpha=8, rank=4).double()
    nn.init.normal_(wrapped.lora_up.weight)
    return wrapped


def parametrized(layer):
    return parametrize.register_parametrization(layer, 'weight', Scaled(), unsafe=True)


def pruned(layer):
    """The mask is applied to what an optimizer, here the next line, makes of the weight."""
    prune.l1_unstructured(layer, 'weight', amount=0.5)
    layer.weight_orig.data.add_(0.1)
    return layer


def hooked(layer):
    layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 1.1,))
    return layer


WRAPPERS = (lora, parametrized, pruned, hooked)


def make_backbone():
    torch.manual_seed(0)
    backbone = BEiTBackbone(**BACKBONE).double().eval()
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.2)
    return backbone


@pytest.mark.parametrize('wrap', WRAPPERS)
@pytest.mark.parametrize('name', LAYERS)
def test_a_wrapped_layer_computes_what_it_does_when_called(wrap, name, monkeypatch):
    """Also at chosen positions. Truth: all layers are called, which changes nothing of a plain backbone."""
    plain = make_backbone()
    wrapped = copy.deepcopy(plain)
    for block in wrapped.blocks:
        block.set_submodule(name, wrap(block.get_submodule(name)))
    (few,) = wrapped(IMAGES, positions=POSITIONS)
    found = [model(IMAGES)[0] for model in (plain, wrapped)]
    monkeypatch.setattr(vit, 'is_plain', lambda layer: False)
    expected = [model(IMAGES)[0] for model in (plain, wrapped)]
    torch.testing.assert_close(found, expected)
    assert (expected[1] - expected[0]).abs().max() > 1e-3
    torch.testing.assert_close(few, take_tokens(expected[1], POSITIONS + 1))
    few.square().sum().backward()
    assert all(parameter.grad.any() for parameter in wrapped.blocks[-1].get_submodule(name).parameters())


@pytest.mark.parametrize('wrapped', [False, True])
def test_only_a_wrapped_layer_makes_queries_that_nobody_wants(wrapped):
    layer = make_backbone().blocks[-1].attn
    if wrapped:
        hooked(layer.qkv)
    tokens, queries = torch.randn(1, 17, 32, dtype=torch.float64), torch.tensor([[0, 4, 9]])
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        layer(tokens, (4, 4), None, queries)
    counts = counter.get_flop_counts()['Global']
    products = counts.get(torch.ops.aten.mm, 0) + counts[torch.ops.aten.addmm]
    num_queries = 17 if wrapped else 3
    assert products == 2 * 32 * 32 * (17 + 17 + num_queries + 3)  # keys, values, queries, output


def test_autocast_reaches_a_wrapped_layer():
    backbone, seen = make_backbone().float(), []
    backbone.blocks[0].attn.qkv.register_forward_hook(lambda module, inputs, output: seen.append(output))
    backbone.blocks[0].attn.proj.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.autocast('cpu', torch.bfloat16):
        backbone(IMAGES.float())
    assert [tensor.dtype for tensor in seen] == [torch.bfloat16] * 2


class OnGPU(torch.Tensor):
    is_cuda = True


def test_a_wrapped_patch_embedding_is_called_on_a_gpu_too():
    embed = make_backbone().patch_embed
    plain = embed(IMAGES.as_subclass(OnGPU))[0].as_subclass(torch.Tensor)
    torch.testing.assert_close(plain, embed(IMAGES)[0])
    hooked(embed.proj)
    expected = embed(IMAGES)[0]
    assert (expected - plain).abs().max() > 1e-2
    torch.testing.assert_close(embed(IMAGES.as_subclass(OnGPU))[0].as_subclass(torch.Tensor), expected)


@pytest.mark.parametrize('name', LAYERS)
def test_a_wrapped_backbone_loads_its_own_state_dict(name):
    backbones = [make_backbone(), make_backbone()]
    for backbone in backbones:
        for block in backbone.blocks:
            parametrized(block.get_submodule(name))
    state = {key: torch.randn_like(tensor) for key, tensor in backbones[0].state_dict().items()}
    for backbone in backbones:
        backbone.load_state_dict(state)
    assert torch.equal(*(backbone(IMAGES)[0] for backbone in backbones))
    assert all(torch.equal(tensor, state[key]) for key, tensor in backbones[0].state_dict().items())
