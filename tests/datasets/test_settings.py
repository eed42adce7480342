"""Settings that cannot be met are refused by name, when a transform is built or, of bands, at the first file."""

import numpy as np
import pytest

from beit_mm.datasets import MultiCrop, RandomErasing
from beit_mm.datasets.masking import BlockwiseMask
from beit_mm.datasets.reading import LoadBands
from beit_mm.datasets.transforms import TwoViewColorJitter, TwoViewRandomResizedCrop

MASK = dict(grid=(14, 14), num_masked=75)


@pytest.mark.parametrize(
    ('transform', 'settings', 'message'),
    [
        (BlockwiseMask, dict(MASK, num_masked=197), 'num_masked is 197'),
        (BlockwiseMask, dict(MASK, num_masked=74.5), "74.5; only variant='paper'"),
        (BlockwiseMask, dict(MASK, variant='unilm'), 'unilm'),
        (BlockwiseMask, dict(MASK, num_masked=196, min_block=190), '190'),  # round(sqrt(190)) = 14
        (BlockwiseMask, dict(grid=(1, 14), num_masked=5), '1x14'),  # no block is lower than one row
        (TwoViewRandomResizedCrop, dict(second_size=(8, 0)), 'size is'),
        (TwoViewRandomResizedCrop, dict(scale=(0.5, 1.5)), 'scale is'),
        (TwoViewColorJitter, dict(contrast=1.5), '1.5'),
        (TwoViewColorJitter, dict(device='cuda'), 'cuda'),
        (MultiCrop, dict(local_scale=(0.5, 1.5)), 'local_scale is'),
        (RandomErasing, dict(area=(0.3, 0.1)), 'expected 0 to 1 each'),
        (LoadBands, dict(low=0), 'both or neither'),
        (LoadBands, dict(bands=[0, 1], low=[0], high=[1]), 'as many in each'),
        (LoadBands, dict(bands=list(range(17))), '1 to 16 bands'),
        (LoadBands, dict(low=[0, 5], high=[1, 5]), 'low < high'),
    ],
)
def test_impossible_settings_are_refused(transform, settings, message):
    with pytest.raises(ValueError, match=message):
        transform(**settings)


@pytest.mark.parametrize(
    ('settings', 'shape', 'dtype', 'message'),
    [
        ({}, (4, 3, 6), 'uint16', 'type uint16; expected uint8'),
        (dict(bands=[6]), (4, 3, 6), 'uint8', '6 bands, counted from 0'),
        (dict(low=[0] * 4, high=[1] * 4), (4, 3, 6), 'uint8', '6 bands; expected 4'),
        ({}, (6, 3, 40), 'uint8', '40 bands; expected 1 to 16'),  # rows taken for bands
    ],
)
def test_files_that_are_not_as_the_config_says_are_named(tmp_path, settings, shape, dtype, message):
    np.save(tmp_path / 'a.npy', np.zeros(shape, dtype))
    with pytest.raises(OSError, match=f'^.*a.npy: .*{message}.*$'):
        LoadBands(**settings)(dict(img_path=str(tmp_path / 'a.npy')))
