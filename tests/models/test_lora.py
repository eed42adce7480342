"""LoRA around a backbone: what is trained and stored, and merging."""

import copy

import pytest
import torch
from labelled import BACKBONE
from mmengine.registry import DefaultScope
from mmpretrain.models.peft.lora import LoRALinear

from beit_mm.models import BEiTBackbone
from beit_mm.models.lora import merge_lora, with_lora
from beit_mm.registry import MODELS

CONFIG = dict(BACKBONE, type='beit_mm.BEiTBackbone', out_type='avg_featmap')


@pytest.fixture
def classifier():
    head = dict(type='LinearClsHead', num_classes=3, in_channels=32)
    with DefaultScope.overwrite_default_scope('mmpretrain'):
        model = MODELS.build(dict(type='ImageClassifier', backbone=with_lora(CONFIG, 4), head=head))
    for module in model.modules():
        if isinstance(module, LoRALinear):
            torch.nn.init.normal_(module.lora_up.weight, std=0.5)
    return model.eval()


def test_a_checkpoint_holds_the_small_matrices_and_the_head(classifier):
    plain = MODELS.build(CONFIG)
    trained = {name for name, parameter in classifier.named_parameters() if parameter.requires_grad}
    assert set(classifier.state_dict()) == trained
    layers = 4 * plain.num_layers
    assert len([name for name in trained if '.lora_' in name]) == 2 * layers and len(trained) == 2 * layers + 2


def test_merged_it_is_the_same_plain_model(classifier):
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        expected = classifier(images)
        unadapted = copy.deepcopy(classifier)
        for module in unadapted.modules():
            if isinstance(module, LoRALinear):
                module.lora_up.weight.zero_()
        merged = merge_lora(classifier)
        torch.testing.assert_close(merged(images), expected, atol=1e-5, rtol=1e-5)
        assert (merged(images) - unadapted(images)).abs().max() > 0.01
    assert type(merged.backbone) is BEiTBackbone
    assert set(merged.backbone.state_dict()) == set(MODELS.build(CONFIG).state_dict())
    alone = MODELS.build(with_lora(CONFIG, 2))
    assert type(merge_lora(alone)) is BEiTBackbone
