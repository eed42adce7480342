"""Workers of a run that is over end when they are told to."""

import multiprocessing

from torch.utils.data import DataLoader

from beit_mm.datasets.image_folder import UnlabeledImages
from beit_mm.engine.interruption import end_workers, shield_workers


def test_workers_are_gone_and_can_be_started_again(images):
    pipeline = [dict(type='beit_mm.LoadImage')]
    dataset = UnlabeledImages(str(images), pipeline=pipeline)
    options = dict(batch_size=None, num_workers=1, persistent_workers=True)
    loader = DataLoader(dataset, multiprocessing_context='fork', **options)
    shield_workers(loader)
    for _ in range(2):
        assert len(list(loader)) == len(dataset)
        (worker,) = loader._iterator._workers
        end_workers(loader)
        assert worker.exitcode == 0 and worker not in multiprocessing.active_children()
    end_workers(DataLoader(dataset))  # has none
