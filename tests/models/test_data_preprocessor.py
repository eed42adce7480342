"""From batches of levels, RGB or up to 16 bands, to the inputs of a pretrainer or a classifier."""

import numpy as np
import pytest
import torch
from helpers import narrow_model
from mmengine.dataset import default_collate, pseudo_collate
from mmengine.registry import TRANSFORMS
from mmpretrain.models import ClsDataPreprocessor
from PIL import Image

from beit_mm.models import TwoViewDataPreprocessor
from beit_mm.pictures import reconstructed
from beit_mm.registry import MODELS

MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]
TOKENIZER = dict(type='beit_mm.DiscreteVAE', hidden=8, vocab_size=32, embed_dims=8, bottleneck_blocks=1)


def prepare(inputs: dict, mean=MEAN, std=STD, **settings) -> dict:
    return TwoViewDataPreprocessor(mean, std, **settings)(dict(inputs=inputs))['inputs']


@pytest.mark.parametrize(('bands', 'dtype'), [(1, torch.uint8), (3, torch.uint8), (16, torch.float32)])
def test_each_view_is_scaled_for_its_network_band_by_band(bands, dtype):
    mean, std = [10.0 * band for band in range(bands)], [50.0 + band for band in range(bands)]
    views = (torch.rand(2, *size, bands).mul(255).to(dtype) for size in ((16, 24), (8, 12)))
    batch = dict(zip(('images', 'tokenizer_images'), views, strict=True))
    batch['mask'] = torch.tensor([[[True, False, True]], [[False, False, True]]])
    inputs = prepare(batch, mean, std)
    for band in range(bands):
        pixels = batch['images'][..., band].float()
        torch.testing.assert_close(inputs['images'][:, band], (pixels - mean[band]) / std[band])
        torch.testing.assert_close(inputs['tokenizer_images'][:, band], batch['tokenizer_images'][..., band] / 255)
    back = TwoViewDataPreprocessor(mean, std).denormalize(inputs['images'])
    torch.testing.assert_close(back, batch['images'].permute(0, 3, 1, 2) / 255, atol=1e-5, rtol=1e-5)
    assert torch.equal(inputs['mask'], batch['mask'])
    assert inputs['positions'].tolist() == [[0, 2], [2, -1]]
    positions = torch.tensor([[0, 2, -1], [2, -1, -1]])  # as BlockwiseMask gives them
    assert torch.equal(prepare(dict(batch, positions=positions), mean, std)['positions'], positions)
    alone = prepare(dict(images=batch['images']), mean, std)
    assert alone['tokenizer_images'] is alone['mask'] is alone['positions'] is None
    nothing = prepare(dict(images=batch['images'], mask=torch.zeros(2, 1, 3, dtype=torch.bool)), mean, std)
    assert nothing['positions'].tolist() == [[-1]] * 2  # keeps one slot


def test_the_tokenizers_view_is_made_on_the_device_as_pillow_would():
    rng = np.random.default_rng(0)
    small = Image.fromarray(rng.integers(0, 256, (6, 9, 3), dtype=np.uint8))
    image = small.resize((72, 48), Image.Resampling.BICUBIC)
    pixels = torch.from_numpy(np.array(image))[None]
    for scale, size in ((0.5, (36, 24)), (1, (72, 48))):
        expected = np.asarray(image.resize(size, Image.Resampling.BICUBIC)) / 255
        found = prepare(dict(images=pixels), tokenizer_scale=scale)['tokenizer_images'][0].permute(1, 2, 0)
        np.testing.assert_allclose(found.numpy(), expected, atol=1.01 / 255 if scale < 1 else 1e-6)
    given = dict(images=pixels, tokenizer_images=pixels[:, :8, :12])  # the pipeline's goes first
    assert prepare(given, tokenizer_scale=0.5)['tokenizer_images'].shape == (1, 3, 8, 12)


def test_brightness_left_to_the_device_changes_both_views_alike():
    batch = {name: torch.rand(2, 16, 24, 3).mul(255).byte() for name in ('images', 'tokenizer_images')}
    # brightness 0.5, contrast and saturation 1 (no change), in the order 0, 1, 2
    batch['jitter'] = torch.tensor([0.5, 1, 1, 100, 0, 1, 2]).repeat(2, 1)
    inputs = prepare(batch, [0] * 3, [255] * 3)
    for view in ('images', 'tokenizer_images'):
        expected = batch[view].permute(0, 3, 1, 2) * 0.5 / 255
        torch.testing.assert_close(inputs[view], expected, atol=1.01 / 255, rtol=0)


def pretrainer(bands: int, **changes) -> torch.nn.Module:
    model = narrow_model(**dict(target_generator=dict(TOKENIZER, in_channels=bands)) | changes)
    model['backbone']['in_channels'] = bands
    model['data_preprocessor'].update(mean=[127.5] * bands, std=[60] * bands)
    return MODELS.build(model)


@pytest.mark.parametrize('bands', [1, 6])
@pytest.mark.parametrize('pixels', [False, True])
def test_a_step_of_pretraining_and_its_pictures(bands, pixels):
    head = dict(type='beit_mm.PixelRegressionHead', embed_dims=32, patch_size=8, in_channels=bands)
    model = pretrainer(bands, **dict(head=head, target_generator=None) if pixels else {}).train()
    images, mask = torch.rand(4, 32, 32, bands) * 255, torch.rand(4, 4, 4) < 0.4
    inputs = model.data_preprocessor(dict(inputs=dict(images=images, tokenizer_images=images, mask=mask)))['inputs']
    model(inputs, mode='loss')['loss'].backward()
    assert model.backbone.patch_embed.proj.weight.grad.abs().sum(dim=(0, 2, 3)).min() > 0
    assert {tuple(column.shape) for column in reconstructed(model, inputs).values()} == {(4, bands, 32, 32)}


# --- classification: normalise, erase, mix, in this order, and only in training ----------------------

BOX = TOP, LEFT, HEIGHT, WIDTH = (4, 8, 40, 30)
INSIDE = (slice(None), slice(TOP, TOP + HEIGHT), slice(LEFT, LEFT + WIDTH))


def batch(collate=default_collate, boxes=(BOX, None, None, None)) -> dict:
    pack = TRANSFORMS.build(dict(type='mmpretrain.PackInputs', meta_keys=('erase_box',)))
    rng = np.random.default_rng(0)
    samples = [dict(img=rng.integers(0, 256, (64, 64, 3), dtype=np.uint8), gt_label=i) for i in range(len(boxes))]
    pairs = zip(samples, boxes, strict=True)
    return collate([pack(dict(sample, **({} if box is None else dict(erase_box=box)))) for sample, box in pairs])


def build(**kwargs):
    cfg = dict(type='beit_mm.ClassificationDataPreprocessor', mean=MEAN, std=STD, num_classes=4)
    return MODELS.build(dict(cfg, **kwargs))


def normalised() -> torch.Tensor:
    return ClsDataPreprocessor(mean=MEAN, std=STD)(batch())['inputs']


@pytest.mark.parametrize('collate', [default_collate, pseudo_collate])
def test_box_holds_noise_of_unit_variance_and_all_else_stays(collate):
    inputs = build()(batch(collate), training=True)['inputs']
    plain, noise = normalised(), inputs[0][INSIDE].clone()
    assert noise.numel() == 3600 and abs(noise.mean()) < 0.07 and abs(noise.std() - 1) < 0.05  # 4 deviations
    assert all(abs(noise[c].mean()) < 0.12 for c in range(3)) and noise.flatten().unique().numel() > 3500
    inputs[0][INSIDE] = plain[0][INSIDE]
    assert torch.equal(inputs, plain)


def test_evaluation_and_images_without_labels_are_only_normalised():
    augments = dict(augments=[dict(type='Mixup', alpha=0.8), dict(type='CutMix', alpha=1.0)])
    data = build(batch_augments=augments)(batch(), training=False)
    assert torch.equal(data['inputs'], normalised())
    assert [sample.gt_label.item() for sample in data['data_samples']] == [0, 1, 2, 3]
    data = build()(dict(inputs=batch()['inputs']), training=True)
    assert torch.equal(data['inputs'], normalised()) and data['data_samples'] is None


def test_one_hot_labels_give_the_loss_of_class_numbers():
    loss = dict(type='CrossEntropyLoss')
    head = MODELS.build(dict(type='mmpretrain.LinearClsHead', num_classes=4, in_channels=5, loss=loss))
    features, losses = torch.rand(4, 5), []
    for to_onehot in (True, False):
        samples = build(to_onehot=to_onehot)(batch(), training=True)['data_samples']
        losses.append(head.loss((features,), samples)['loss'])
    torch.testing.assert_close(*losses)


def test_mixing_comes_after_erasing(monkeypatch):
    monkeypatch.setattr('numpy.random.beta', lambda *_: 0.75)
    monkeypatch.setattr('torch.randperm', lambda n: torch.arange(n).flip(0))
    torch.manual_seed(3)
    erased = build()(batch(), training=True)['inputs']
    torch.manual_seed(3)
    data = build(batch_augments=dict(augments=dict(type='Mixup', alpha=0.8)))(batch(), training=True)
    torch.testing.assert_close(data['inputs'], 0.75 * erased + 0.25 * erased.flip(0))
    scores = torch.stack([sample.gt_score for sample in data['data_samples']])
    torch.testing.assert_close(scores, 0.75 * torch.eye(4) + 0.25 * torch.eye(4).flip(0))
