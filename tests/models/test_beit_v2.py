"""BEiT v2's pretrainer: its two losses written out, its blocks, the released file, a run of it."""

import json
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import narrow_pretraining
from helpers import RELEASED_BLOCK, make_runner, narrow_model, positions_of
from mmengine.config import Config
from mmengine.runner.checkpoint import load_checkpoint
from peers import assert_equal

from beit_mm.checkpoint.convert import convert_checkpoint
from beit_mm.checkpoint.names import convert_state_dict, describe_source
from beit_mm.datasets.masking import RandomMask
from beit_mm.datasets.transforms import TwoViewCenterCrop
from beit_mm.engine.checks import check_views
from beit_mm.models import BEiTBackbone, TwoViewDataPreprocessor
from beit_mm.registry import MODELS

ARCH = dict(embed_dims=32, num_layers=4, num_heads=4)
SIZES = dict(img_size=32, patch_size=8)
SHARED = dict(abs_pos_embed=False, rel_pos_bias='shared', layer_scale_init=0.1)
VQKD = dict(type='beit_mm.VQKDTokenizer', random_weights=True, arch=dict(ARCH, num_layers=1), **SIZES)
PREPROCESSOR = dict(type='beit_mm.TwoViewDataPreprocessor', mean=[127.5] * 3, std=[127.5] * 3, tokenizer_scale=1)


def narrow_v2(backbone: dict | None = None, **changes: object) -> dict:
    """Config of a pretrainer with four blocks, two of them early, and two that aggregate."""
    network = dict(type='beit_mm.BEiTBackbone', arch=ARCH, masked_input=True, **SIZES, **SHARED)
    changes = dict(early_layers=2, data_preprocessor=PREPROCESSOR, backbone=network | (backbone or {})) | changes
    tokenizer = dict(VQKD, code_dims=8, vocab_size=32)
    return narrow_model(type='beit_mm.BEiTV2Pretrainer', target_generator=tokenizer, **changes)


def make_inputs() -> dict:
    """Images with 5, 2 and 0 masked patches of 16."""
    mask = (torch.rand(3, 16).argsort(dim=1) < torch.tensor([[5], [2], [0]])).view(3, 4, 4)
    images = torch.randn(3, 3, 32, 32)
    return dict(images=images, tokenizer_images=torch.rand(3, 3, 32, 32), mask=mask, positions=positions_of(mask))


def all_hidden(model, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Both hidden states of all patches, one block after the other."""
    net = model.backbone
    x, grid = net.patch_embed(inputs['images'])
    x = torch.where(inputs['mask'].flatten(1)[..., None], net.mask_token, x)
    x = torch.cat([net.cls_token.expand(3, 1, -1), x], dim=1)
    bias = net.rel_pos_bias(grid, torch.float32)
    early = net.blocks[1](net.blocks[0](x, grid, bias), grid, bias)
    last = net.blocks[3](net.blocks[2](early, grid, bias), grid, bias)
    mixed = torch.cat([last[:, :1], early[:, 1:]], dim=1)
    for block in model.patch_aggregation:
        mixed = block(mixed, grid, bias)
    return net.norm(last)[:, 1:], net.norm(mixed)[:, 1:]


@pytest.mark.parametrize('with_cp', [False, True])
def test_losses_and_gradients_equal_the_plain_formula(with_cp):
    model, inputs = MODELS.build(narrow_v2(dict(with_cp=with_cp))), make_inputs()
    losses = model(inputs, mode='loss')
    tokens = model.target_generator.encode(inputs['tokenizer_images']).flatten(1)
    where = inputs['mask'].flatten(1)
    expected = [F.cross_entropy(model.head(hidden[where]), tokens[where]) for hidden in all_hidden(model, inputs)]
    assert set(losses) == {'loss_mim', 'loss_aggregation', 'mim_acc', 'aggregation_acc'}
    torch.testing.assert_close(losses['loss_mim'], expected[0])
    torch.testing.assert_close(losses['loss_aggregation'], expected[1])
    total, _ = model.parse_losses(losses)
    torch.testing.assert_close(total, expected[0] + expected[1])
    trained = [p for p in model.parameters() if p.requires_grad]
    got, wanted = torch.autograd.grad(total, trained), torch.autograd.grad(sum(expected), trained)
    for one, two in zip(got, wanted, strict=True):  # every parameter has a part in the losses
        torch.testing.assert_close(one, two, atol=1e-6, rtol=1e-4)


def test_recover_all_counts_every_patch():
    model, inputs = MODELS.build(narrow_v2(recover='all')), make_inputs()
    tokens = model.target_generator.encode(inputs['tokenizer_images']).flatten()
    losses = model(inputs, mode='loss')
    for name, hidden in zip(('loss_mim', 'loss_aggregation'), all_hidden(model, inputs), strict=True):
        torch.testing.assert_close(losses[name], F.cross_entropy(model.head(hidden).flatten(0, 1), tokens))


def test_the_second_loss_sees_the_late_blocks_through_the_class_token_only():
    model, inputs = MODELS.build(narrow_v2()), make_inputs()
    late = [p for block in model.backbone.blocks[2:] for p in block.parameters()]
    without_class = all_hidden(model, inputs)[1]
    assert any(g.abs().sum() > 0 for g in torch.autograd.grad(without_class.square().sum(), late))
    # with a class token that does not know the image, the late blocks have no part in it
    model.backbone.blocks[3].register_forward_hook(lambda block, args, x: torch.cat([x[:, :1].detach(), x[:, 1:]], 1))
    second = model(inputs, mode='loss')['loss_aggregation']
    gradients = torch.autograd.grad(second, late, allow_unused=True)
    assert all(g is None or g.abs().sum() == 0 for g in gradients)


def test_held_out_images_have_the_loss_of_the_last_block():
    model, inputs = MODELS.build(narrow_v2()).eval(), make_inputs()
    results = model(inputs, mode='predict')
    count = sum(result['count'] for result in results)
    loss = model(inputs, mode='loss')['loss_mim'].item()
    assert sum(result['loss'] for result in results) / count == pytest.approx(loss, rel=1e-5)
    assert list(model.pictures(inputs)) == ['image', 'masked']  # VQ-KD cannot draw its tokens


def test_additional_blocks_begin_as_in_the_released_code():
    """There they are made after the network was initialised: torch's own numbers, output matrices by their depth."""
    torch.manual_seed(0)
    model = MODELS.build(narrow_v2(dict(arch=dict(ARCH, embed_dims=256), drop_path_rate=0.3)))
    twins = zip(model.patch_aggregation, model.backbone.blocks[2:], strict=True)
    for depth, (block, twin) in enumerate(twins, start=3):
        assert block.drop_path.p == twin.drop_path.p == pytest.approx(0.3 * (depth - 1) / 3)
        for name, parameter in block.named_parameters():
            own, layer = parameter.detach(), block.get_submodule(name.rpartition('.')[0])
            if not isinstance(layer, torch.nn.Linear):
                assert torch.equal(own, twin.get_parameter(name))
                continue
            bound = 1 / math.sqrt(layer.in_features)
            bound /= math.sqrt(2 * depth) if name in ('attn.proj.weight', 'mlp.fc2.weight') else 1
            assert own.abs().max() <= bound
            assert own.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.02 if own.ndim == 2 else 0.2)


def test_wrong_numbers_of_layers_are_refused():
    for early, layers in ((3, 2), (0, 2), (2, 0), (5, 1)):
        with pytest.raises(ValueError, match=f'4 blocks, early_layers is {early} and aggregation_layers {layers}'):
            MODELS.build(narrow_v2(early_layers=early, aggregation_layers=layers))


def test_one_view_serves_both_networks():
    preprocessor = TwoViewDataPreprocessor([123.675, 116.28, 103.53], [58.395, 57.12, 57.375], tokenizer_scale=1)
    pixels = torch.randint(0, 256, (2, 16, 24, 3), dtype=torch.uint8)
    inputs = preprocessor(dict(inputs=dict(images=pixels)))['inputs']
    torch.testing.assert_close(inputs['tokenizer_images'], pixels.permute(0, 3, 1, 2) / 255, atol=1e-6, rtol=0)
    model = MODELS.build(narrow_v2())
    check_views(model, [TwoViewCenterCrop(32, None), RandomMask((4, 4), 2)])
    with pytest.raises(ValueError, match='set one of them to None'):
        check_views(model, [TwoViewCenterCrop(32, 32)])
    with pytest.raises(ValueError, match=r'a view of 36 x 36 pixels for the tokenizer .* set second_size to 40 x 40'):
        check_views(model, [TwoViewCenterCrop(36, None)])


NETWORK = ['cls_token', 'mask_token', 'norm.weight', 'norm.bias', 'patch_embed.proj.weight', 'patch_embed.proj.bias']
NETWORK += ['rel_pos_bias.relative_position_bias_table']
BLOCK = [*RELEASED_BLOCK, 'gamma_1', 'gamma_2']
INDEX = 'rel_pos_bias.relative_position_index'  # which is computed
RELEASED = {  # every name of beitv2_base_patch16_224_pt1k.pth, narrow, of 4 + 2 blocks, and ours
    **{name: f'backbone.{name}' for name in NETWORK},
    **{f'lm_head.{part}': f'head.lm_head.{part}' for part in ('weight', 'bias')},
    **{f'blocks.{i}.{name}': f'backbone.blocks.{i}.{name}' for i in range(4) for name in BLOCK},
    **{f'cls_pt_layers.{i}.{name}': f'patch_aggregation.{i}.{name}' for i in range(2) for name in BLOCK},
}


@pytest.fixture
def released(tmp_path) -> tuple[str, dict[str, torch.Tensor]]:
    own = MODELS.build(narrow_v2()).state_dict()
    weights = {theirs: torch.randn_like(own[ours]) for theirs, ours in RELEASED.items()}
    path = tmp_path / 'beitv2_base_patch16_224_pt1k.pth'
    index = torch.zeros(17, 17, dtype=torch.int64)
    torch.save(dict(model={**weights, INDEX: index}, optimizer={}, epoch=1599), path)
    return str(path), weights


def test_every_tensor_of_a_released_file_has_its_place(released, tmp_path):
    path, weights = released
    model = MODELS.build(narrow_v2())
    load_checkpoint(model, path, strict=True)
    state = model.state_dict()
    assert_equal(state, {ours: weights[theirs] for theirs, ours in RELEASED.items()})
    assert model.backbone.load_report.preprocessing['mean'] == [123.675, 116.28, 103.53]
    back = convert_state_dict(state, target='unilm')
    assert set(back.state_dict) == {*weights, INDEX} and not back.dropped_keys
    # what other libraries have no place for is said
    conversion = convert_checkpoint(path, tmp_path / 'timm.pth', 'timm')
    assert {name.split('.')[0] for name in conversion.dropped_keys} == {'backbone', 'head', 'patch_aggregation'}


def test_a_released_file_starts_a_fine_tuning(released):
    path, weights = released
    options = dict(SIZES, **SHARED, out_type='avg_featmap', init_cfg=dict(type='Pretrained', checkpoint=path))
    backbone = BEiTBackbone(ARCH, **dict(options, rel_pos_bias='per_layer'))
    backbone.init_weights()
    report = backbone.load_report
    assert (len(report.expanded), report.missing_keys) == (4, ['fc_norm.weight', 'fc_norm.bias'])
    assert sorted(report.unexpected_keys) == ['mask_token', 'norm.bias', 'norm.weight']
    assert torch.equal(backbone.blocks[3].attn.qkv.weight, weights['blocks.3.attn.qkv.weight'])


@pytest.mark.parametrize(
    ('name', 'size'), [('pt1k_300e_ft1k', 224), ('pt1k_ft21kto1k', 224), ('pt1k_ft21ktoade20k', 512)]
)
def test_names_of_released_files_say_how_their_images_were_prepared(name, size):
    path = Path(f'beitv2_large_patch16_224_{name}.pth')
    preprocessing = describe_source({}, path)['preprocessing']
    assert (preprocessing['mean'], preprocessing['size']) == ([123.675, 116.28, 103.53], [size, size])


@pytest.fixture
def run(images, tmp_path) -> Config:
    """A short run of the narrow model through the pipeline of configs/beit_v2."""
    cfg = narrow_pretraining(images, tmp_path)
    cfg.model = narrow_v2()
    for loader in (cfg.train_dataloader, cfg.val_dataloader, cfg.test_dataloader):
        for transform in loader.dataset.pipeline:
            if 'size' in transform:
                transform.second_size = None
    cfg.train_cfg.max_epochs = 1
    return cfg


def test_a_run_trains_saves_and_says_its_tokenizer(run):
    runner = make_runner(run)
    runner.train()
    checkpoint = torch.load(Path(run.work_dir, 'epoch_1.pth'), weights_only=False)
    state = checkpoint['state_dict']
    assert {name.split('.')[0] for name in state} == {'backbone', 'head', 'patch_aggregation'}
    assert checkpoint['meta']['tokenizer']['type'] == 'VQKDTokenizer'
    log = Path(runner.log_dir, 'vis_data', 'scalars.json').read_text().splitlines()
    steps = [json.loads(line) for line in log if 'loss_aggregation' in line]
    assert len(steps) == 3
    assert steps[0]['loss_mim'] == pytest.approx(math.log(32), abs=0.2)
    assert steps[0]['loss'] == pytest.approx(steps[0]['loss_mim'] + steps[0]['loss_aggregation'], rel=1e-4)
