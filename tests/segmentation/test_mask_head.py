"""MaskClassificationHead: matching, gradients, what counts, masked attention, and what an image of little holds."""

import copy
import itertools

import pytest
import torch
from helpers import run_ranks
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from narrow_segmentors import SEGMENTOR, UPERNET, WIDTH, build_segmentor, narrow_config
from peers import randomise
from torch import Tensor, nn

from beit_mm.errors import UserError
from beit_mm.models.lora import merge_lora, with_lora
from beit_mm.models.vit import Block
from beit_mm.registry import MODELS
from beit_mm.segmentation import MaskClassificationHead
from beit_mm.segmentation.mask_head import (
    IGNORED,
    assign,
    class_scores,
    hidden_tokens,
    masking_probability,
    objects_of,
    targets_at,
)

CLASSES, QUERIES, DIMS = 5, 6, 32


def head(**changes: object) -> MaskClassificationHead:
    sizes = dict(in_channels=DIMS, num_classes=CLASSES, num_queries=QUERIES, num_blocks=2, num_points=50)
    return MODELS.build(dict(dict(type='beit_mm.MaskClassificationHead', **sizes), **changes))


def samples(labels: Tensor) -> list[SegDataSample]:
    return [SegDataSample(gt_sem_seg=PixelData(data=image[None])) for image in labels]


def losses(model: MaskClassificationHead, labels: Tensor) -> dict[str, Tensor]:
    torch.manual_seed(0)
    features = [torch.randn(len(labels), DIMS, 3, 4) for _ in model.in_index]
    return model.loss(features, samples(labels), None)


def learn(model: nn.Module) -> nn.Module:
    """Takes the gradients of a batch."""
    images, labels = torch.randn(2, 3, 64, 64), torch.randint(0, CLASSES, (2, 64, 64))
    sum(model.train().loss(images, samples(labels)).values()).backward()
    return model


def test_costs_that_are_not_finite_end_no_training():
    costs = torch.zeros(1, 1, 3, 2)
    costs[0, 0, 0], costs[0, 0, 1] = torch.nan, torch.inf
    assert assign(costs, torch.tensor([1]))[0].tolist() == [[0], [2], [0]]


def test_objects_are_the_most_frequent_labels_and_what_is_ignored_is_none():
    labels = torch.tensor([[[3, 3, 3, 1, 1, 4]], [[IGNORED] * 6], [[2] * 6]])
    objects, number = objects_of(labels, 5, 2)
    assert number.tolist() == [2, 0, 1]
    assert objects.shape == (3, 2) and objects[0].tolist() == [3, 1] and objects[2, 0] == 2
    many, number = objects_of(labels[:1], 20_000, 100)
    assert many.shape == (1, 100) and many[0, :3].tolist() == [3, 1, 4] and number.tolist() == [3]


@pytest.mark.parametrize('label', [5, 6, 11, -2])
def test_labels_that_are_not_classes_are_refused(label):
    """Neither ignored, as 5 would be, nor counted for the next image, as 6 and 11 would be."""
    labels = torch.zeros(3, 2, 2, dtype=torch.int64)
    labels[1, 0, 0] = label
    _, number = objects_of(labels, 5, 2)
    with pytest.raises(UserError, match='label map 1 of the batch .* num_classes'):
        assign(torch.zeros(1, 3, 2, 2), number)


def test_points_count_where_no_pixel_that_they_read_is_ignored():
    """At the centre of a pixel that is this pixel alone."""
    labels = torch.randint(0, 3, (1, 4, 8))
    ignored = torch.rand(1, 4, 8) < 0.3
    labels[ignored] = IGNORED
    y, x = torch.meshgrid((torch.arange(4) + 0.5) / 4, (torch.arange(8) + 0.5) / 8, indexing='ij')
    centres = torch.stack([x, y], dim=-1).flatten(0, 1)
    points, images, objects = torch.cat([centres, torch.rand(60, 2)])[None], torch.tensor([0]), torch.tensor([[2, 0]])
    targets, counts = targets_at(labels, images, objects, points)
    read = nn.functional.grid_sample(ignored[None].float(), 2 * points[:, None] - 1, align_corners=False)[:, 0, 0]
    assert counts.equal((read == 0).float()) and 32 < counts.sum() + ignored.sum() < 92
    assert counts[0, :32].equal(1 - ignored.flatten().float())
    assert targets[0, :32, 0].equal((labels == 2).flatten().float()) and not targets[counts == 0].any()


def test_what_is_ignored_changes_nothing(monkeypatch):
    """Neither what the network says there, nor whether more of it is added."""
    labels = torch.randint(0, 3, (2, 12, 16))
    labels[:, 6:] = 255
    model, masks = head(), torch.randn(2, QUERIES, 12, 16)
    classes, other = torch.randn(2, QUERIES, CLASSES + 1), masks.clone()
    other[:, :, 7:] = 5
    other[:, :, 7:, ::2] = -5
    monkeypatch.setattr('beit_mm.segmentation.mask_head.IMPORTANCE', 0.0)  # points by certainty would be others
    found = []
    for logits in (masks, other):
        torch.manual_seed(0)
        found.append([value.item() for value in model.mask_losses([(logits, classes)], labels).values()])
    assert found[0] == pytest.approx(found[1], rel=1e-6)


@pytest.mark.parametrize('num_classes', [1, 150, 20_000])
@pytest.mark.parametrize('held', [[255], [0], [0, 255]], ids=['no object', 'one class', 'one class and nothing'])
def test_images_that_hold_little(held, num_classes):
    """Losses are finite, all parameters have a gradient, and those of masks are 0 where there is none."""
    model = head(num_classes=num_classes).train()
    labels = torch.tensor(held).repeat(6).view(2, 3, -1)
    found = losses(model, labels)
    sum(found.values()).backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    assert found['loss_class'] > 0 and (found['loss_mask'].item() == found['loss_dice'].item() == 0) == (0 not in held)


def test_losses_in_bfloat16_are_computed_in_float32():
    model = head().train()
    labels = torch.randint(0, 3, (2, 12, 16))
    exact = losses(model, labels)
    with torch.autocast('cpu', torch.bfloat16):
        found = losses(model, labels)
    for name, value in exact.items():
        assert found[name].dtype == torch.float32
        assert found[name].item() == pytest.approx(value.item(), rel=0.05), name


@pytest.mark.parametrize('table', [None, (3, 4)], ids=['no bias', 'bias'])
def test_a_masked_query_does_not_see_what_is_hidden_and_all_else_does(table):
    block, x = Block(DIMS, 4, 64, 0.0, None, table), torch.randn(2, 5 + 12, DIMS)
    if table:
        nn.init.normal_(block.attn.relative_position_bias_table)
    hidden = torch.zeros(2, 3, 17, dtype=torch.bool)
    hidden[0, 1, 5:], hidden[1, 2, 8] = True, True  # one sees no patch at all
    found, plain = block(x, (3, 4), hidden=hidden), block(x, (3, 4))
    assert found.isfinite().all()
    differs = (found - plain).abs().amax(dim=2) > 1e-6
    assert differs.nonzero().tolist() == [[0, 1], [1, 2]]
    other = x.clone()
    other[1, 8] = torch.randn(DIMS)
    changed = (block(other, (3, 4), hidden=hidden) - found).abs().amax(dim=2)[1] > 1e-6
    assert not changed[2] and changed[[0, 1, 3, 4]].all()


def test_hidden_is_what_is_outside_of_the_mask():
    masks = torch.tensor([[1.0, -1.0], [-1.0, 2.0]]).repeat(1, 2, 1, 1)
    found = hidden_tokens(masks, (2, 2), 5, 1.0)
    assert found.equal(torch.tensor([False, False, True, True, False]).expand(1, 2, 5))  # a token, four patches
    assert hidden_tokens(masks, (2, 2), 5, 0.0) is None
    many = hidden_tokens(masks.expand(1000, -1, -1, -1), (2, 2), 5, 0.25)
    assert many[..., 2].float().mean().item() == pytest.approx(0.25, abs=0.04)
    assert many[..., 2].equal(many[..., 3])  # a query is masked or not


ANNEALING = [  # where, steps of the run, the first and the last step in which the masking of each block falls
    ('backbone', 88_692, [14782, 36955, 59128], [29564, 51737, 73910]),  # EoMT: COCO, base and small
    ('backbone', 39_120, [6520, 13040, 19560, 26080], [13040, 19560, 26080, 32600]),  # ADE20K, large
    ('backbone', 39_120, [6520, 11410, 16300, 21190, 26080], [13040, 17930, 22820, 27710, 32600]),  # ADE20K, giant
    ('decoder', 20_192, [0, 5384, 7403, 9422, 11442, 13461], [3000, 8749, 10769, 12788, 14807, 16826]),  # PMT: ADE20K
    ('backbone', 600, [100], [200]),
    ('decoder', 600, [0], [90]),
]


@pytest.mark.parametrize(('where', 'steps', 'begins', 'ends'), ANNEALING)
def test_masking_ends_block_by_block_as_in_the_authors_configs(where, steps, begins, ends):
    for block, (begin, end) in enumerate(zip(begins, ends, strict=True)):
        middle = (begin + end) / 2
        at = [masking_probability(block, len(begins), x / steps, where) for x in (0, begin, middle, end, steps)]
        assert at == pytest.approx([1, 1, 0.5**0.9, 0, 0], abs=0.02)


def test_scores_are_sums_of_probabilities():
    masks, classes = torch.randn(2, 3, 4, 5), torch.randn(2, 3, CLASSES + 1)
    expected = torch.zeros(2, CLASSES, 4, 5)
    for image, query, label in itertools.product(range(2), range(3), range(CLASSES)):
        expected[image, label] += classes[image, query].softmax(0)[label] * masks[image, query].sigmoid()
    torch.testing.assert_close(class_scores(masks, classes), expected)


def test_masks_are_resized_before_their_probabilities_are_added(monkeypatch):
    """However many queries are resized together; a model's scores have the size of its windows."""
    masks, classes, size = 9 * torch.randn(2, 5, 4, 5), torch.randn(2, 5, CLASSES + 1), (13, 11)
    pixels = nn.functional.interpolate(masks, size, mode='bilinear').sigmoid()
    expected = (classes.softmax(2)[:, :, :-1, None, None] * pixels[:, :, None]).sum(dim=1)
    for number in (2, 16):
        monkeypatch.setattr('beit_mm.segmentation.mask_head.QUERIES_AT_ONCE', number)
        torch.testing.assert_close(class_scores(masks, classes, size), expected)
    model, images = build_segmentor(narrow_config('bias', 'decoder')), torch.randn(2, 3, 50, 64)
    padded = nn.functional.pad(images, (0, 0, 0, 14))
    with torch.no_grad():
        expected = class_scores(*model.decode_head.predictions(model.extract_feat(padded))[-1], (64, 64))[:, :, :50]
        torch.testing.assert_close(model.inference(images), expected)


def test_two_processes_learn_what_one_learns(tmp_path, monkeypatch):
    """The mean of their losses and gradients is that on the joined batch, also where one has more objects."""
    labels = torch.tensor([[0] * 16, [0, 1, 2, 3] * 4, [255] * 16, [4] * 16]).view(4, 4, 4)
    features, points = torch.randn(4, DIMS, 3, 4), torch.rand(200, 2)
    model = head().eval()  # without masks, which are drawn
    monkeypatch.setattr(torch, 'rand', lambda *shape, **_: points[: shape[1]].expand(*shape).clone())

    def step(images: slice) -> list[Tensor]:
        model.zero_grad()
        found = model.loss([features[images]], samples(labels[images]), None)
        sum(found.values()).backward()
        return [*found.values(), *(p.grad for p in model.parameters() if p.grad is not None)]

    ranks = run_ranks(lambda rank: [t.detach() for t in step(slice(2 * rank, 2 * rank + 2))], tmp_path)
    for alone, *of_ranks in zip(step(slice(4)), *ranks, strict=True):
        torch.testing.assert_close(sum(of_ranks) / 2, alone.detach(), atol=1e-6, rtol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize('variant', ['per_layer', 'shared', 'rotary'])
def test_a_query_in_the_backbone_stands_where_the_class_token_does(variant):
    """One that is the class token when it joins is it in the end, also on another grid than the tables'."""
    config = narrow_config('rotary' if variant == 'rotary' else 'bias', 'backbone')
    if variant != 'rotary':
        config.backbone.rel_pos_bias = variant
    model = build_segmentor(config)
    backbone, head = model.backbone, model.decode_head
    inputs = model.extract_feat(torch.randn(1, 3, 48, 80))
    head.queries.copy_(inputs[0][:, :1].expand(-1, head.num_queries, -1))
    x, grid, shared = head.sequence(inputs)
    for block in backbone.blocks[-2:]:
        x = block(x, grid, shared)
    assert x.std() > 0.1
    for place in range(head.num_queries):
        torch.testing.assert_close(x[:, place], x[:, head.num_queries], atol=1e-5, rtol=1e-5)


def test_queries_join_a_backbone_that_has_the_blocks_and_nothing_behind_it():
    for changes, key in [
        (dict(decode_head=dict(num_blocks=0)), 'num_blocks'),
        (dict(decode_head=dict(num_blocks=5)), 'num_blocks'),
        (dict(neck=SEGMENTOR['neck']), 'neck'),
        (dict(auxiliary_head=dict(UPERNET, type='mmseg.FCNHead', in_channels=WIDTH, in_index=0)), 'auxiliary_head'),
    ]:
        config = narrow_config('bias', 'backbone')
        for part, settings in changes.items():
            config[part] = dict(config.get(part, {}), **settings)
        with pytest.raises(UserError, match=key):
            build_segmentor(config)
    config = narrow_config('bias', 'backbone')
    config.decode_head.num_blocks = 4
    model = build_segmentor(config)
    assert model.decode_head.joined == [*model.backbone.blocks]


@pytest.mark.parametrize('variant', ['bias', 'rotary'])
@pytest.mark.parametrize(('where', 'frozen'), [('decoder', -1), ('decoder', 4), ('backbone', -1)])
def test_every_parameter_learns_unless_it_is_frozen_and_a_copy_has_blocks_of_its_own(variant, where, frozen):
    config = narrow_config(variant, where)
    config.backbone.frozen_stages = frozen
    model = build_segmentor(config)
    copied = learn(copy.deepcopy(model))
    for name, parameter in copied.named_parameters():
        assert (parameter.grad is None) == (frozen == 4 and name.startswith('backbone.')), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_joined_blocks_are_computed_twice_if_the_backbone_saves_memory_and_learn_the_same():
    runs, gradients = [], []
    for frugal in (False, True):
        config = narrow_config('bias', 'backbone')
        config.backbone.with_cp = frugal
        torch.manual_seed(0)
        model = build_segmentor(config)
        block = model.backbone.blocks[-1]
        block.norm1.register_forward_hook(lambda *_, frugal=frugal: runs.append(frugal))
        learn(model)
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert runs == [False, True, True]
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-6, rtol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize('variant', ['bias', 'rotary'])
def test_queries_are_read_behind_the_final_norm_of_the_backbones_file(variant, tmp_path):
    config = narrow_config(variant, 'backbone')
    backbone = randomise(MODELS.build(dict(config.backbone, out_type='raw', out_indices=-1)))
    nn.init.normal_(backbone.norm.weight)
    torch.save(backbone.state_dict(), tmp_path / 'vit.pth')
    config.backbone.init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))
    model, images = build_segmentor(config), torch.randn(1, 3, 64, 64)
    model.init_weights()
    assert not any(name.startswith('backbone.norm') for name in model.state_dict())  # the head has it, under one name
    queries = model.decode_head.sequence(model.extract_feat(images))[0][:, :8]
    tokens = backbone.embed(images, None)
    x = torch.cat([queries, backbone.run_blocks(backbone.blocks[:2], *tokens)], dim=1)
    x = copy.deepcopy(model).backbone.run_blocks(backbone.blocks[2:], x, *model.extract_feat(images)[1:])
    classes = model.decode_head.class_predictor(backbone.norm(x)[:, :8])
    torch.testing.assert_close(model.eval().decode_head.predictions(model.extract_feat(images))[-1][1], classes)


def test_queries_join_a_backbone_with_low_rank_matrices():
    config = narrow_config('bias', 'backbone')
    config.backbone = with_lora(config.backbone, 2)
    model, images = learn(build_segmentor(config)), torch.randn(2, 3, 64, 64)
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    matrices = {name for name, _ in model.backbone.named_parameters() if 'lora_' in name}
    assert len(matrices) == 4 * 4 * 2
    assert trained == {f'backbone.{name}' for name in matrices} | {
        f'decode_head.{name}' for name, _ in model.decode_head.named_parameters()
    }
    with torch.no_grad():
        expected = model.eval().logits(images)
        torch.testing.assert_close(merge_lora(copy.deepcopy(model)).logits(images), expected, atol=1e-5, rtol=1e-4)
