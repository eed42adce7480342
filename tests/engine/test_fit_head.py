"""A linear head on features that are computed once."""

import pytest
import torch
from labelled import classifier_config, make_images, save_backbone
from mmengine.registry import DefaultScope
from mmengine.runner import Runner

from beit_mm.engine.fit_head import fit_head
from beit_mm.engine.unreadable import UnreadableImagesHook
from beit_mm.errors import UserError
from beit_mm.features.evaluation import choose_penalty, standardiser
from beit_mm.registry import MODELS


@pytest.fixture
def unreadable(tmp_path) -> UnreadableImagesHook:
    hook = UnreadableImagesHook()
    hook.begin(tmp_path)
    return hook


@pytest.fixture
def parts(tmp_path):
    """A classifier with random features, and the config of a loader of 21 images."""
    config = classifier_config(make_images(tmp_path / 'images', per_class=7), tmp_path)
    config.model.backbone.init_cfg = dict(type='Pretrained', checkpoint=save_backbone(tmp_path / 'ours.pth'))
    images = config.train_dataloader
    images.sampler.shuffle = False
    images.dataset.pipeline[-1].meta_keys = 'sample_idx', 'unreadable'
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(config.model)
        model.init_weights()
        yield model, images


def test_it_is_the_linear_fit_to_the_features_of_each_image_alone(parts, unreadable):
    model, config = parts
    shown = []
    loader = Runner.build_dataloader(config, seed=3)
    found = fit_head(model, loader, 3, unreadable, lambda *numbers: shown.append(numbers))
    assert shown == [(number, 6) for number in range(1, 7)] and not model.training
    pixels = torch.stack([loader.dataset[index]['inputs'] for index in range(21)])
    with torch.no_grad():
        features = torch.cat([model.backbone((one[None].float() - 127.5) / 127.5)[0] for one in pixels])
    labels, standardise = torch.arange(3).repeat_interleave(7), standardiser(features)
    linear, chosen = choose_penalty(standardise(features), labels, 3, torch.arange(21), by_class=False, seed=3)
    logits = linear(standardise(features))
    torch.testing.assert_close(model.head.fc(features), logits, atol=2e-3, rtol=0)
    assert found.loss == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-2)
    assert f'{chosen["penalty"]}' in found.line and '21' in found.line


def test_images_that_cannot_be_read_are_replaced_and_named(parts, unreadable, tmp_path, warnings):
    model, config = parts
    config.dataset.on_error = 'skip'
    broken = tmp_path / 'images/train/red/3.png'
    broken.write_bytes(b'nothing')
    fit_head(model, Runner.build_dataloader(config, seed=0), 0, unreadable)
    assert (tmp_path / 'unreadable_images.txt').read_text() == f'{broken}\n'
    (text,) = warnings()
    assert str(broken) in text


def test_too_few_images_for_a_batch_are_refused(parts, unreadable):
    model, config = parts
    config.update(batch_size=64, drop_last=True)
    with pytest.raises(UserError, match='21 images, fewer than one batch of 64'):
        fit_head(model, Runner.build_dataloader(config, seed=0), 0, unreadable)
