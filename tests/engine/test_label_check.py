"""The first batch's labels against the model."""

from types import SimpleNamespace

import pytest
import torch
from helpers import train
from labelled import classifier_config, make_images
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from beit_mm.engine.checks import FitCheckHook, check_labels


def sample(labels: list[int], reduced: bool = False) -> SegDataSample:
    made = SegDataSample(metainfo=dict(seg_map_path='data/x.png', reduce_zero_label=reduced))
    made.gt_sem_seg = PixelData(data=torch.tensor(labels)[None, None])
    return made


def test_labels_that_fit():
    check_labels([sample([0, 1, 2, 255]), sample([2, 2, 2, 2])], 3, 255)
    check_labels([sample([0, 1, 254])], 3, 254)


@pytest.mark.parametrize(
    'reduced, advice',
    [
        (False, 'if 0 marks unlabelled pixels, reduce_zero_label=True'),
        (True, 'reduce_zero_label=True has already made labels one lower'),
    ],
)
def test_a_label_without_a_class_is_named_with_its_file(reduced, advice):
    with pytest.raises(ValueError) as error:
        check_labels([sample([0, 1]), sample([0, 3, 5, 255], reduced)], 3, 255)
    assert str(error.value) == (
        f'data/x.png gives label 3, the model has num_classes=3 (0 to 2); set num_classes of '
        f'every head to that of the data ({advice})'
    )


def test_ignored_pixels(monkeypatch):
    said = []
    monkeypatch.setattr('beit_mm.engine.checks.print_log', lambda message, **_: said.append(message))
    check_labels([sample([0, 1, 255, 255])], 3, 255)
    assert not said
    check_labels([sample([0, 255, 255, 255], reduced=True)], 3, 255)
    assert said == [
        '75% of the pixels of the first batch are ignored (label 255, and label 0 with reduce_zero_label='
        'True). Is it meant?'
    ]
    with pytest.raises(ValueError, match='every pixel of the first batch is ignored'):
        check_labels([sample([255, 255])], 3, 255)


def test_the_hook_looks_once_a_run():
    hook, head = FitCheckHook(), SimpleNamespace(num_classes=3, ignore_index=255)
    runner = SimpleNamespace(model=SimpleNamespace(decode_head=head))
    wrong = dict(data_samples=[sample([7])])
    for _ in range(2):  # a second training of the same runner is another run
        hook.first_batch = True
        with pytest.raises(ValueError, match='gives label 7'):
            hook.before_train_iter(runner, 0, wrong)
        hook.before_train_iter(runner, 1, wrong)


def test_the_hook_checks_the_groups_of_the_optimizer(tmp_path):
    config = classifier_config(make_images(tmp_path / 'images'), tmp_path / 'work')
    config.optim_wrapper.update(
        constructor='LearningRateDecayOptimWrapperConstructor',
        paramwise_cfg=dict(layer_decay_rate=0.65, custom_keys={'.bias': dict(decay_mult=0.0)}),
    )
    config.optim_wrapper.optimizer.weight_decay = 0.05
    with pytest.raises(ValueError, match='weight of blocks.0.norm1 .* not to its bias'):
        train(config)
