"""Images with 1 to 16 bands in the models: shapes, each band its own scale, and numbers of channels that differ."""

import numpy as np
import pytest
import torch
from helpers import narrow_model
from mmpretrain.structures import DataSample

from beit_mm.datasets import LoadBands, PackViews, TwoViewCenterCrop
from beit_mm.engine.checks import channels_of, check_channels
from beit_mm.models import DiscreteVAE, TwoViewDataPreprocessor
from beit_mm.registry import MODELS

BACKBONE = narrow_model()['backbone']
TOKENIZER = dict(type='beit_mm.DiscreteVAE', hidden=8, vocab_size=32, embed_dims=8, bottleneck_blocks=1)


def pretrainer(bands: int, **changes) -> torch.nn.Module:
    model = narrow_model(**dict(target_generator=dict(TOKENIZER, in_channels=bands)) | changes)
    model['backbone']['in_channels'] = bands
    levels = dict(mean=[10.0 * band for band in range(bands)], std=[50.0 + band for band in range(bands)])
    model['data_preprocessor'].update(levels)
    return MODELS.build(model)


def batch(bands: int, dtype: str = 'float32') -> dict[str, torch.Tensor]:
    """Four images of 32 pixels, through the pipeline."""
    rng, samples = np.random.default_rng(0), []
    load = LoadBands(low=-100, high=900) if dtype == 'float32' else LoadBands()
    for _ in range(4):
        values = rng.integers(0, 256, (40, 36, bands), 'uint8')
        values = values if dtype == 'uint8' else 3 * rng.random(1, dtype) * values
        sample = TwoViewCenterCrop(32, 32)(load(dict(img=values)))
        samples.append(PackViews()(dict(sample, mask=rng.random((4, 4)) < 0.4))['inputs'])
    return {key: torch.stack([sample[key] for sample in samples]) for key in ('images', 'tokenizer_images', 'mask')}


@pytest.mark.parametrize('bands', [1, 2, 6, 16])
@pytest.mark.parametrize('dtype', ['uint8', 'float32'])
def test_each_band_has_its_own_mean_and_std(bands, dtype):
    model, inputs = pretrainer(bands), batch(bands, dtype)
    prepared = model.data_preprocessor(dict(inputs=inputs))['inputs']
    for band in range(bands):
        pixels = inputs['images'][..., band].float()
        torch.testing.assert_close(prepared['images'][:, band], (pixels - 10 * band) / (50 + band))
        torch.testing.assert_close(prepared['tokenizer_images'][:, band], inputs['tokenizer_images'][..., band] / 255)
    assert 0 <= prepared['tokenizer_images'].min() and prepared['tokenizer_images'].max() <= 1
    columns = model.pictures(prepared)
    assert [tuple(column.shape) for column in columns.values()] == [(4, bands, 32, 32)] * 4
    image = inputs['images'].permute(0, 3, 1, 2) / 255
    torch.testing.assert_close(columns['image'], image, atol=1e-5, rtol=0)


@pytest.mark.parametrize('bands', [1, 6, 16])
@pytest.mark.parametrize('pixels', [False, True])
def test_a_step_of_pretraining(bands, pixels):
    head = dict(type='beit_mm.PixelRegressionHead', embed_dims=32, patch_size=8, in_channels=bands)
    model = pretrainer(bands, **dict(head=head, target_generator=None) if pixels else {}).train()
    check_channels(model, bands)
    inputs = model.data_preprocessor(dict(inputs=batch(bands)))['inputs']
    losses = model(inputs, mode='loss')
    losses['loss'].backward()
    assert losses['loss'].isfinite() and model.backbone.patch_embed.proj.weight.grad.abs().sum(dim=(0, 2, 3)).min() > 0


@pytest.mark.parametrize('bands', [1, 6, 16])
def test_a_classifier_runs(bands):
    config = dict(
        type='mmpretrain.ImageClassifier',
        data_preprocessor=dict(
            type='beit_mm.ClassificationDataPreprocessor', mean=[127] * bands, std=[60] * bands, num_classes=3
        ),
        backbone=dict(BACKBONE, in_channels=bands, masked_input=False, out_type='avg_featmap'),
        head=dict(type='mmpretrain.LinearClsHead', num_classes=3, in_channels=32),
    )
    classifier = MODELS.build(config).train()
    images = batch(bands)['images'].permute(0, 3, 1, 2)
    samples = [DataSample(erase_box=(0, 0, 8, 8)).set_gt_label(1) for _ in images]
    data = classifier.data_preprocessor(dict(inputs=images, data_samples=samples), training=True)
    torch.testing.assert_close(data['inputs'][:, :, 8:], (images[:, :, 8:] - 127) / 60)
    assert (data['inputs'][:, :, :8, :8] - (images[:, :, :8, :8] - 127) / 60).abs().amin(dim=(2, 3)).max() < 3
    assert classifier(**data, mode='loss')['loss'].isfinite()
    check_channels(classifier, channels_of(images))


@pytest.mark.parametrize('bands', [1, 6, 9])
def test_weights_of_rgb_images_are_adapted_to_bands(bands):
    rgb = MODELS.build(BACKBONE)
    backbone = pretrainer(bands).backbone
    backbone.load_state_dict(rgb.state_dict())
    assert backbone.load_report.adapted == ['patch_embed.proj.weight']
    gray = torch.rand(1, 1, 32, 32)  # where all bands are alike the patches are those of a gray RGB image
    patches, expected = (
        model.patch_embed(gray.expand(-1, channels, -1, -1))[0] for model, channels in ((backbone, bands), (rgb, 3))
    )
    torch.testing.assert_close(patches, expected)


@pytest.mark.parametrize(
    'changes, channels, message',
    [
        ({}, 3, 'the images 3, data_preprocessor.mean 6, backbone.in_channels 6, the tokenizer 6'),
        (dict(target_generator=dict(TOKENIZER)), 6, 'the tokenizer 3'),
        (
            dict(head=dict(type='beit_mm.PixelRegressionHead', embed_dims=32), target_generator=None),
            6,
            'head.in_channels 3',
        ),
    ],
)
def test_numbers_of_channels_that_differ_are_told_in_one_line(changes, channels, message):
    with pytest.raises(ValueError, match=f'numbers of channels differ: .*{message}') as error:
        check_channels(pretrainer(6, **changes), channels)
    assert '\n' not in str(error.value)


def test_one_mean_stands_for_all_channels_and_lists_are_as_long():
    check_channels(DiscreteVAE(hidden=8, vocab_size=8, in_channels=6, data_preprocessor=None), 6)
    model = pretrainer(6)
    model.data_preprocessor = TwoViewDataPreprocessor([127.5], [60])
    check_channels(model, 6)
    with pytest.raises(ValueError, match='mean has 3 channels, std 1'):
        TwoViewDataPreprocessor([1, 2, 3], [1])
