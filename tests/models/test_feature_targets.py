"""Features as targets: a step against the published formulas, teachers, what checkpoints hold, and the metric."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import narrow_feature_pretraining
from helpers import make_runner, narrow_batch, narrow_feature_model, run_ranks
from peers import save_clip
from torch import Tensor, nn

import beit_mm
from beit_mm.datasets.transforms import TwoViewCenterCrop
from beit_mm.engine.checks import check_views
from beit_mm.engine.metrics import FeatureMetric
from beit_mm.errors import CheckpointError
from beit_mm.models import BEiTBackbone, FeatureTargets
from beit_mm.pictures import reconstructed
from beit_mm.registry import MODELS

EMA = 'target_generator.ema.backbone.'
LEVELS = dict(mean=[100.0, 110.0, 120.0], std=[50.0, 60.0, 70.0])


@pytest.fixture(scope='module')
def teacher(tmp_path_factory) -> str:
    """A checkpoint of a ViT with patches of 4 pixels: the students' have 8."""
    backbone = BEiTBackbone(dict(embed_dims=24, num_layers=3, num_heads=2), img_size=16, patch_size=4)
    for parameter in backbone.parameters():
        nn.init.normal_(parameter, std=0.3)
    path = tmp_path_factory.mktemp('teacher') / 'teacher.pth'
    weights = {f'backbone.{name}': weight for name, weight in backbone.state_dict().items()}
    torch.save(dict(state_dict=weights, meta=dict(beit_mm_format=1, architecture=dict(num_heads=2))), path)
    return str(path)


def model_of(teacher: str, head: dict | None = None, **options: object) -> nn.Module:
    config = dict(type='beit_mm.BEiTTeacher', checkpoint=teacher, **LEVELS)
    model = narrow_feature_model(head=dict(target_dims=24) | (head or {}), teacher=config, **options)
    return MODELS.build(model).train()


def plain_features(path: str, images: Tensor) -> list[Tensor]:
    """Outputs (B, 16, 24) of the blocks, before the last norm, of images that give the student's 4 x 4 patches."""
    backbone = BEiTBackbone.from_checkpoint(path)
    mean, std = (torch.tensor(LEVELS[name]).view(3, 1, 1) for name in ('mean', 'std'))
    small = F.interpolate(images, (16, 16), mode='bicubic', antialias=True).clamp(0, 1)
    x, grid, _ = backbone.embed((255 * small - mean) / std, None)
    outputs = []
    for block in backbone.blocks:
        outputs.append(x := block(x, grid))
    return [output[:, 1:] for output in outputs]


def standardized(features: Tensor) -> Tensor:
    """`forward_loss` of dBOT's models_mae.py."""
    return (features - features.mean(-1, keepdim=True)) / (features.var(-1, keepdim=True) + 1e-6) ** 0.5


def smooth_l1(difference: Tensor, beta: float = 2.0) -> Tensor:
    size = difference.abs()
    return torch.where(size < beta, 0.5 * size**2 / beta, size - 0.5 * beta)


def plain_loss(model: nn.Module, inputs: dict, target: Tensor, cosine: bool = False) -> Tensor:
    mask = inputs['mask'].flatten(1)
    hidden = model.backbone(inputs['images'], inputs['mask'])[0][:, 1:]
    weight, bias = model.head.feature_head.weight, model.head.feature_head.bias
    predicted, target = (hidden @ weight.T + bias)[mask], target[mask]
    if cosine:
        return (1 - (predicted * target).sum(-1) / (predicted.norm(dim=-1) * target.norm(dim=-1))).mean()
    return smooth_l1(predicted - target).mean()


OPTIONS = [
    (dict(), {}),
    (dict(layers=[0, -1]), {}),
    (dict(layers=1), {}),
    (dict(normalize=False), {}),
    (dict(), dict(loss='cosine')),
]


@pytest.mark.parametrize(('options', 'head'), OPTIONS)
def test_a_step_is_that_of_the_published_formulas(options, head, teacher):
    model, inputs = model_of(teacher, head, **options), narrow_batch()
    with torch.no_grad():
        outputs = plain_features(teacher, (inputs['images'] + 1) / 2)
        layers = options.get('layers', -1)
        chosen = [outputs[layer] for layer in (layers if isinstance(layers, list) else [layers])]
        if options.get('normalize', True):
            chosen = [standardized(features) for features in chosen]
        else:
            chosen = [BEiTBackbone.from_checkpoint(teacher).norm(chosen[0])]
        target = sum(chosen) / len(chosen)
    losses = model(inputs, mode='loss')
    expected = plain_loss(model, inputs, target, cosine='loss' in head)
    assert set(losses) == {'loss'} and losses['loss'] > 0.01
    torch.testing.assert_close(losses['loss'], expected, atol=1e-6, rtol=1e-6)
    trained = [p for p in model.parameters() if p.requires_grad]
    found, wanted = (torch.autograd.grad(loss, trained) for loss in (losses['loss'], expected))
    torch.testing.assert_close(found, wanted, atol=1e-6, rtol=1e-5)
    assert not any(p.requires_grad for p in model.target_generator.frozen[0].parameters())


def test_the_average_sees_the_image_without_its_mask():
    model, inputs = MODELS.build(narrow_feature_model(backbone=dict(drop_path_rate=0.5))).train(), narrow_batch()
    with torch.no_grad():
        for parameter in model.target_generator.parameters():
            nn.init.normal_(parameter, std=0.3)
        x, grid, _ = model.target_generator.ema['backbone'].embed(inputs['images'], None)
        for block in model.target_generator.ema['backbone'].blocks:
            x = block(x, grid)
        target = standardized(x[:, 1:])
        found = model.target_generator.targets(inputs, None)
    torch.testing.assert_close(found, target, atol=1e-5, rtol=1e-5)


def test_the_last_layer_runs_only_where_it_is_predicted(teacher):
    """And gives the same there as over the whole image, padding aside."""
    inputs = narrow_batch()
    for model in (model_of(teacher, layers=[0, -1]), MODELS.build(narrow_feature_model())):
        rows = []
        generator = model.target_generator
        network = generator.frozen[0].network if generator.frozen else generator.ema['backbone']
        network.blocks[-1].mlp.register_forward_hook(lambda _, args, output, rows=rows: rows.append(output.shape[1]))
        some, every = (model.target_generator.targets(inputs, positions) for positions in (inputs['positions'], None))
        real = inputs['positions'] >= 0
        chosen = every.gather(1, inputs['positions'].clamp(min=0)[..., None].expand(-1, -1, every.shape[-1]))
        torch.testing.assert_close(some[real], chosen[real], atol=1e-5, rtol=1e-5)
        assert rows == [inputs['positions'].shape[1], 17]


def test_clip_is_a_teacher_in_the_compiled_step(tmp_path):
    """Its features are the library's: tests/models/test_vqkd_training.py."""
    save_clip(tmp_path / 'clip')
    clip = dict(type='beit_mm.CLIPTeacher', name=str(tmp_path / 'clip'))
    model = MODELS.build(narrow_feature_model(teacher=clip, head=dict(target_dims=12))).train()
    inputs = narrow_batch()
    (teacher,) = model.target_generator.frozen
    (features,) = teacher((inputs['images'] + 1) / 2, (4, 4))
    loss = model.loss(inputs)['loss']
    torch.testing.assert_close(loss, plain_loss(model, inputs, standardized(features)), atol=1e-6, rtol=1e-5)
    assert model.target_generator.provenance['path'] == str(tmp_path / 'clip')
    if torch.__version__.startswith('2.6.'):
        pytest.skip('torch 2.6 cannot compile a decorator of transformers')
    torch._dynamo.reset()
    compiled = torch.compile(model.loss, backend='eager', fullgraph=True, dynamic=False)
    torch.testing.assert_close(compiled(inputs)['loss'], loss, atol=1e-6, rtol=1e-5)
    torch._dynamo.reset()


def test_a_teacher_of_colours_sees_the_bands_that_it_is_given(teacher):
    backbone = dict(in_channels=5)
    levels = dict(data_preprocessor=dict(mean=[127.5] * 5, std=[127.5] * 5))
    model = model_of(teacher, channels=[3, 0, 4], backbone=backbone, **levels)
    bands, colours, inputs = torch.rand(3, 5, 32, 32), model_of(teacher), narrow_batch()
    inputs.update(images=bands)
    found = model.target_generator.targets(inputs, inputs['positions'])
    rgb = dict(inputs, images=bands[:, [3, 0, 4]])
    assert torch.equal(found, colours.target_generator.targets(rgb, inputs['positions']))


def test_what_does_not_fit_is_said(teacher, tmp_path):
    with pytest.raises(ValueError, match='target_dims is 32; .* 24'):
        model_of(teacher, dict(target_dims=32)).loss(narrow_batch())
    with pytest.raises(ValueError, match='FeatureTargets .*predicts features'):
        MODELS.build(narrow_feature_model() | dict(head=dict(type='beit_mm.PixelRegressionHead', embed_dims=32)))
    with pytest.raises(ValueError, match="loss.*'l2'"):
        MODELS.build(dict(type='beit_mm.FeatureRegressionHead', embed_dims=32, target_dims=24, loss='l2'))
    with pytest.raises(TypeError, match="CLIPTeacher.*'layer'"):
        FeatureTargets(dict(type='beit_mm.CLIPTeacher', name='x'), layers=1)
    for name, value in dict(channels=[0], mean=127.5, std=[1.0, 1.0, 1.0]).items():
        with pytest.raises(ValueError, match=f'{name}.*ema'):
            FeatureTargets('ema', **{name: value})
    with pytest.raises(ValueError, match='features need no second view'):
        check_views(model_of(teacher), [TwoViewCenterCrop(32, 32)])
    check_views(model_of(teacher), [TwoViewCenterCrop(32, None)])


def test_checkpoints_hold_the_average_and_nothing_of_a_frozen_teacher(teacher, tmp_path):
    frozen, model = model_of(teacher), MODELS.build(narrow_feature_model())
    state = frozen.state_dict()
    assert {name.split('.')[0] for name in state} == {'backbone', 'head'}
    frozen.load_state_dict(state, strict=True)
    provenance = frozen.target_generator.provenance
    assert provenance['path'] == teacher and len(provenance['sha256']) == 64

    with torch.no_grad():
        for parameter in model.parameters():
            nn.init.normal_(parameter)
    state = model.state_dict()
    averaged = {name.removeprefix(EMA) for name in state if name.startswith(EMA)}
    own = {name.removeprefix('backbone.') for name in state if name.startswith('backbone.')}
    assert own - averaged == {'mask_token', 'norm.weight', 'norm.bias'} and averaged < own
    other = MODELS.build(narrow_feature_model())
    other.load_state_dict(state, strict=True)
    assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    meta = dict(beit_mm_format=1, architecture=dict(num_heads=4))
    torch.save(dict(state_dict=state, meta=meta), tmp_path / 'run.pth')
    loaded = BEiTBackbone.from_checkpoint(str(tmp_path / 'run.pth'))  # the model, not its average
    assert torch.equal(loaded.blocks[0].mlp.fc1.weight, state['backbone.blocks.0.mlp.fc1.weight'])


def test_an_average_starts_at_the_weights_of_a_file_without_one(teacher):
    model, frozen = MODELS.build(narrow_feature_model()), model_of(teacher, dict(target_dims=32))
    with torch.no_grad():
        for parameter in frozen.parameters():
            nn.init.normal_(parameter)
    missing, unexpected = model.load_state_dict(frozen.state_dict(), strict=False)
    assert not missing and not unexpected
    for name, value in model.state_dict().items():
        assert torch.equal(value, frozen.state_dict()[name.replace('target_generator.ema.', '')])


def test_the_average_follows_the_model_and_needs_its_hook(images, tmp_path):
    """The hook's schedule: tests/engine/test_dino_hook.py."""
    model = MODELS.build(narrow_feature_model())
    averages = dict(model.target_generator.ema.named_parameters())
    assert all(torch.equal(average, model.get_parameter(name)) for name, average in averages.items())
    with torch.no_grad():
        for parameter in model.backbone.parameters():
            parameter.add_(1)
    model.update_teacher(0.9)
    for name, average in averages.items():
        torch.testing.assert_close(average, model.get_parameter(name) - 0.9)
    config = narrow_feature_pretraining(images, tmp_path)
    config.custom_hooks = [hook for hook in config.custom_hooks if hook['type'] != 'beit_mm.TeacherMomentumHook']
    with pytest.raises(ValueError, match='TeacherMomentumHook'):
        make_runner(config).train()


def test_the_share_that_is_explained_at_a_position():
    """About the mean there in the other images; about the mean of all where only one image has it masked."""
    random, metric = np.random.default_rng(0), FeatureMetric()
    features = random.normal(size=(6, 4)) + random.normal(size=(9, 6, 4))
    masked = random.random((9, 6)) < 0.5
    masked[:, 5] = np.arange(9) == 0
    variance = 0.0
    for image, position in zip(*masked.nonzero(), strict=True):
        others = masked[:, position] & (np.arange(9) != image)
        mean = (features[others, position] if others.any() else features[masked]).mean(axis=0)
        variance += np.square(features[image, position] - mean).sum()
    for image, mask in zip(features, masked, strict=True):
        positions = torch.tensor([*mask.nonzero()[0], -1])  # padding
        sample = dict(loss=1.0, squared_error=2.0, count=mask.sum(), positions=positions)
        metric.process({}, [dict(sample, features=torch.tensor(image))])
    assert metric.evaluate(9)['explained_at_position'] == pytest.approx(1 - 9 * 2 / variance)


@pytest.mark.parametrize('number', [1, 4, 5])
def test_an_image_that_two_processes_measure_counts_once(number, tmp_path):
    drawn = np.random.default_rng(0).normal(size=(number, 6, 4))
    samples = [dict(loss=i, squared_error=i, features=torch.tensor(image)) for i, image in enumerate(drawn, start=1)]

    def measured(dealt: list[dict]) -> dict:
        metric = FeatureMetric()
        for sample in dealt:
            metric.process({}, [sample])
        return metric.evaluate(number)

    alone = measured(samples)
    for found in run_ranks(lambda rank: measured([*samples, samples[0]][rank : number + number % 2 : 2]), tmp_path):
        assert found == pytest.approx(alone)


@pytest.mark.parametrize('loss', ['smooth_l1', 'cosine'])
def test_predictions_sum_up_to_the_loss_and_to_what_is_explained(loss, teacher):
    model, inputs = model_of(teacher, dict(loss=loss)).eval(), narrow_batch()
    results, metric = model(inputs, mode='predict'), FeatureMetric()
    metric.process({}, results)
    found = metric.evaluate(3)
    assert found['mim_loss'] == pytest.approx(model.loss(inputs)['loss'].item(), rel=1e-5)
    mask = inputs['mask'].flatten(1)
    with torch.no_grad():
        targets = model.target_generator.targets(inputs, None)[mask]
        guesses = model.head(model.backbone(inputs['images'], inputs['mask'])[0][:, 1:])[mask]
        if loss == 'cosine':
            guesses = F.normalize(guesses, dim=-1) * targets.norm(dim=-1, keepdim=True)
    expected = 1 - (guesses - targets).square().sum() / (targets - targets.mean(0)).square().sum()
    assert found['explained'] == pytest.approx(expected.item(), rel=1e-4)


@pytest.mark.parametrize(
    'change',
    [
        lambda values: values | dict(layers='x'),
        lambda values: values | dict(layers=1e30),
        lambda values: values | dict(foo=1),
        lambda values: values | dict(teacher='\x1b[31m\n' * 40),
    ],
)
def test_what_a_file_says_of_its_teacher_is_one_line_if_it_does_not_fit(change, teacher, tmp_path):
    built = MODELS.build(narrow_feature_model(teacher=teacher, head=dict(target_dims=24)))
    weights = built.state_dict()
    stored = change(dict(type='beit_mm.FeatureTargets', teacher=teacher))
    meta = dict(beit_mm_format=1, architecture=dict(num_heads=built.backbone.num_heads))
    meta |= dict(LEVELS, config_dict=dict(model=dict(target_generator=stored)))
    path = tmp_path / 'features.pth'
    torch.save(dict(state_dict=weights, meta=meta), path)
    with pytest.raises((CheckpointError, FileNotFoundError)) as error:
        beit_mm.reconstruct(path, out=tmp_path / 'x.png', **LEVELS)
    assert str(path) in str(error.value) and '\n' not in str(error.value) and '\x1b' not in str(error.value)


@pytest.mark.parametrize('size', [32, 29])  # the backbone pads
def test_masked_patches_are_drawn_as_the_masked_ones_with_the_nearest_features(size, monkeypatch):
    """Features are one-hot, and what all share; the model predicts a little of the next masked patch's."""
    model, inputs = MODELS.build(narrow_feature_model()).eval(), narrow_batch()
    inputs['images'] = inputs['images'][:, :, :size, :size]
    mask = inputs['mask'].flatten(1)
    known = 9 + torch.diag(torch.linspace(1, 9, mask.numel())).unflatten(0, mask.shape)
    predicted, mean = torch.zeros_like(known), known[mask].mean(dim=0)
    predicted[mask] = mean + 0.1 * (known[mask].roll(-1, 0) - mean)
    monkeypatch.setattr(model.target_generator, 'targets', lambda *_: known)
    monkeypatch.setattr(model.head, 'forward', lambda _: predicted)
    pictures = reconstructed(model, inputs)
    assert [*pictures] == ['image', 'masked', 'nearest masked patch']

    def patches(images: Tensor) -> Tensor:
        """(B, 16, 3, side, side), of which those at the lower and right edge may be cut."""
        side = 8 if size == 32 else 5
        padded = F.pad(images, (0, 32 - size, 0, 32 - size))
        return F.pixel_unshuffle(padded, 8).flatten(2).mT.unflatten(2, (3, 8, 8))[..., :side, :side]

    image, drawn = patches(pictures['image']), patches(pictures['nearest masked patch'])
    assert torch.equal(drawn[mask], image[mask].roll(-1, 0)) and torch.equal(drawn[~mask], image[~mask])
