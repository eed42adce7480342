"""DINO: its loss against loops in numpy, the teacher, the center, what shows a collapse, and its checkpoints.

The center of several processes: tests/promises/test_world_size.py; the moving teacher: tests/engine/test_dino_hook.py.
"""

import itertools
import math

import numpy as np
import pytest
import torch
from helpers import narrow_batch, narrow_dino_model, narrow_model
from peers import randomise
from scipy.special import log_softmax

from beit_mm.checkpoint.checkpoint import drop_task_parts
from beit_mm.checkpoint.names import convert_state_dict
from beit_mm.engine.optim import parameter_groups
from beit_mm.models import BEiTPretrainer
from beit_mm.models.dino import DINOHead, MultiCropDataPreprocessor, dino_loss, entropies
from beit_mm.models.provenance import target_provenance
from beit_mm.registry import MODELS

ALONE = dict(head=None, target_generator=None)
BACKBONE = narrow_dino_model()['backbone']
WITH_REGISTERS = dict(dino_on_masked=True, backbone=dict(BACKBONE, num_registers=2))


def make_inputs(num_local: int = 2) -> dict:
    """Random crops of three images."""
    local = torch.randn(num_local * 3, 3, 16, 16) if num_local else None
    return dict(narrow_batch(), second_images=torch.randn(3, 3, 32, 32), local_images=local)


def make_model(**changes: object) -> torch.nn.Module:
    """A model whose teacher differs from its student, with a center that is not 0."""
    model = MODELS.build(narrow_dino_model(**changes))
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
        model.center.normal_(std=0.1)
    model.teacher_temperature = 0.05
    return model


def plain_dino_loss(student: np.ndarray, teacher: np.ndarray, center: np.ndarray) -> float:
    """The formula of the paper of DINO, image by image and pair by pair, at temperatures 0.1 and 0.05."""
    terms = []
    for taught, seen, image in itertools.product(range(2), range(len(student)), range(student.shape[1])):
        if seen != taught:
            target = np.exp(log_softmax((teacher[taught, image] - center) / 0.05))
            terms.append(-(target * log_softmax(student[seen, image] / 0.1)).sum())
    return float(np.mean(terms))


@torch.no_grad()
def plain_outputs(model: torch.nn.Module, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    """Student (V, B, P) and teacher (2, B, P), crop by crop, all tokens of every block."""
    first_mask = inputs['mask'] if model.dino_on_masked else None
    views = [(inputs['images'], first_mask), (inputs['second_images'], None)]
    if inputs['local_images'] is not None:
        views += [(local, None) for local in inputs['local_images'].split(len(inputs['images']))]
    student = [model.dino_head(model.backbone(images, mask)[0][:, 0]) for images, mask in views]
    teacher = [
        model.teacher['dino_head'](model.teacher['backbone'](inputs[name])[0][:, 0])
        for name in ('images', 'second_images')
    ]
    return torch.stack(student), torch.stack(teacher)


@pytest.mark.parametrize('num_local', [0, 3])
@pytest.mark.parametrize('changes', [{}, dict(dino_on_masked=True, dino_weight=0.5), ALONE, WITH_REGISTERS])
def test_losses_of_a_batch_equal_loops_in_numpy(changes, num_local):
    model, inputs = make_model(**changes), make_inputs(num_local=num_local)
    student, teacher = (outputs.double().numpy() for outputs in plain_outputs(model, inputs))
    expected = plain_dino_loss(student, teacher, model.center.double().numpy())
    losses = model(inputs, mode='loss')
    assert losses['loss_dino'].item() == pytest.approx(expected * changes.get('dino_weight', 1), rel=1e-4)
    names = {'loss_dino', 'teacher_entropy', 'teacher_mean_entropy'}
    assert set(losses) == (names if changes == ALONE else names | {'loss_mim', 'mim_acc'})
    if changes != ALONE:
        torch.testing.assert_close(losses['loss_mim'], BEiTPretrainer.loss(model, inputs)['loss'])
    sum(value for name, value in losses.items() if 'loss' in name).backward()
    assert not [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert all(p.grad is None for p in model.teacher.parameters())


def test_the_loss_is_in_float32_under_autocast():
    student, targets = torch.randn(3, 4, 9), torch.randn(2, 4, 9).softmax(-1)
    with torch.autocast('cpu', torch.bfloat16):
        inside = dino_loss(student, targets)
    assert torch.equal(inside, dino_loss(student, targets))


def test_center_is_a_moving_average_of_the_teachers_outputs():
    model, inputs = make_model(), make_inputs()
    expected = 0.9 * model.center + 0.1 * plain_outputs(model, inputs)[1].flatten(0, 1).mean(0)
    model.train()(inputs, mode='loss')
    torch.testing.assert_close(model.center, expected)
    model.eval()(inputs, mode='loss')
    torch.testing.assert_close(model.center, expected)  # an evaluation changes nothing


def test_teacher_starts_as_the_student(tmp_path):
    """Also where the student starts from a file; without drop path, mask token and decay."""
    torch.save(randomise(MODELS.build(BACKBONE)).state_dict(), tmp_path / 'beit.pth')
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'beit.pth'))
    for changes in ({}, dict(init_cfg=init_cfg)):
        model = MODELS.build(narrow_dino_model(backbone=dict(BACKBONE, drop_path_rate=0.5, **changes))).train()
        if changes:
            model.init_weights()
        student = {name: model.get_parameter(name) for name, _ in model.teacher.named_parameters()}
        assert all(torch.equal(weight, student[name]) for name, weight in model.teacher.named_parameters())
    assert model.backbone.cls_token.abs().max() > 0.1  # from the file
    assert 'backbone.cls_token' in student and 'dino_head.mlp.0.weight' in student
    assert 'backbone.mask_token' not in student and model.teacher['backbone'].mask_token is None
    assert [block.drop_path.p for block in model.teacher['backbone'].blocks] == [0.0, 0.0]
    grouped = {name for group in parameter_groups(model) for name in group['names']}
    assert grouped == {name for name, p in model.named_parameters() if p.requires_grad}
    assert not any(name.startswith('teacher') for name in grouped)


def test_the_head_has_rows_of_length_one():
    head = DINOHead(8, num_prototypes=5, hidden_dims=16, bottleneck_dims=4)
    with torch.no_grad():
        head.last_layer.parametrizations.weight.original1.mul_(7)
    torch.testing.assert_close(head.last_layer.weight.norm(dim=1), torch.ones(5))
    x = torch.randn(6, 8)
    rows = torch.nn.functional.normalize(head.mlp(x), dim=1)
    torch.testing.assert_close(head(x), rows @ head.last_layer.weight.T)
    with torch.autocast('cpu', torch.bfloat16):
        assert head(x).dtype == torch.float32  # not rounded before it is divided by a temperature


def test_entropies_tell_a_collapse():
    uniform = torch.full((2, 8, 16), 1 / 16)
    one = torch.eye(16)[torch.zeros(2, 8, dtype=torch.long)]
    different = torch.eye(16)[:8].expand(2, 8, 16)
    for targets, entropy, mean_entropy in (
        (uniform, math.log(16), math.log(16)),  # all prototypes alike
        (one, 0, 0),  # one prototype for all images
        (different, 0, math.log(8)),  # healthy: each image its own
    ):
        found = entropies(targets)
        assert found['teacher_entropy'].item() == pytest.approx(entropy, abs=1e-5)
        assert found['teacher_mean_entropy'].item() == pytest.approx(mean_entropy, abs=1e-5)


def test_checkpoint_holds_student_teacher_and_center_and_other_formats_get_the_student():
    model = make_model()
    state = model.state_dict()
    assert {name.split('.')[0] for name in state} == {'backbone', 'head', 'dino_head', 'teacher', 'center'}
    MODELS.build(narrow_dino_model()).load_state_dict(state, strict=True)
    assert target_provenance(model) == model.target_generator.provenance
    converted = convert_state_dict(state, target='unilm')
    assert {name.split('.')[0] for name in converted.dropped_keys} == {'dino_head', 'teacher', 'center'}
    assert torch.equal(converted.state_dict['pos_embed'], model.backbone.pos_embed)
    assert 'lm_head.weight' in converted.state_dict


@pytest.mark.parametrize('heads', [(), ('dino_head.',)])
def test_a_teacher_starts_at_the_weights_of_a_file_without_one(heads):
    given = {name: torch.randn_like(tensor) for name, tensor in make_model().state_dict().items()}
    given = {name: tensor for name, tensor in given.items() if name.startswith(('backbone.', 'head.', *heads))}
    model = make_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert not model.load_state_dict(given, strict=False).unexpected_keys
    for name, tensor in model.teacher.state_dict().items():
        assert torch.equal(tensor, given.get(name, before[f'teacher.{name}']))


def test_student_or_teacher_is_fine_tuned(tmp_path):
    model, path = make_model(), str(tmp_path / 'epoch_1.pth')
    torch.save(dict(state_dict=model.state_dict()), path)
    config = dict(narrow_model()['backbone'], masked_input=False, out_type='avg_featmap')
    parts = {None: model.backbone, 'backbone.': model.backbone, 'teacher.backbone.': model.teacher['backbone']}
    for prefix, part in parts.items():
        backbone = MODELS.build(dict(config, init_cfg=dict(type='Pretrained', checkpoint=path, prefix=prefix)))
        backbone.init_weights()
        assert not drop_task_parts(backbone.load_report.missing_keys + backbone.load_report.unexpected_keys)
        assert torch.equal(backbone.pos_embed, part.pos_embed)
        assert torch.equal(backbone.blocks[1].attn.qkv.weight, part.blocks[1].attn.qkv.weight)


def test_preprocessor_normalises_all_crops():
    preprocessor = MultiCropDataPreprocessor([100.0, 110.0, 120.0], [50.0, 60.0, 70.0])
    levels = torch.arange(2 * 3, dtype=torch.uint8).view(2, 3, 1, 1, 1).expand(-1, -1, 4, 4, 3)
    inputs = dict(images=levels[:, 0], second_images=levels[:, 1], local_images=levels, unreadable=['', ''])
    prepared = preprocessor(dict(inputs=inputs))['inputs']
    assert prepared['mask'] is None and prepared['positions'] is None and prepared['tokenizer_images'] is None
    mean, std = torch.tensor([100.0, 110.0, 120.0]), torch.tensor([50.0, 60.0, 70.0])
    assert prepared['second_images'].shape == (2, 3, 4, 4) and prepared['local_images'].shape == (6, 3, 4, 4)
    torch.testing.assert_close(prepared['second_images'][1, :, 0, 0], (4 - mean) / std)
    # the first local crops of both images, then the second ones
    order = prepared['local_images'][:, 0, 0, 0] * 50 + 100
    torch.testing.assert_close(order, torch.tensor([0.0, 3, 1, 4, 2, 5]))


def test_wrong_combinations_are_refused():
    model = make_model()
    with pytest.raises(ValueError, match='MultiCrop'):
        model(dict(make_inputs(), second_images=None), mode='loss')
    model.teacher_temperature = None
    with pytest.raises(ValueError, match='DINOHook'):
        model(make_inputs(), mode='loss')
