"""One folder named once: a config whose datasets and number of classes follow from its `data_root`."""

import copy
import logging
import os
from collections.abc import Iterator
from typing import Any

from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.runner import BaseLoop, Runner

from beit_mm.engine.checks import check_size
from beit_mm.registry import DATASETS, RUNNERS


@RUNNERS.register_module()
class FolderRunner(Runner):
    """mmengine's Runner for configs with `runner_type='beit_mm.FolderRunner'` and one `data_root` at their top.

    Every dataset without a `data_root` of its own gets that one, and every `num_classes` of the model becomes the
    number of classes of the training dataset; where its folder is missing, as it may be in a test, of the tested one.
    Where the validation dataset's folder is missing, there is no validation, and the log says so. A config cannot do so
    itself, because `--cfg-options data_root=...` is merged after it was read. mmseg's test.py does not use this class.

    Raises:
        FileNotFoundError: a folder is missing; the dataset's own message.
        ValueError: in training, fewer images than a batch.
    """

    @classmethod
    def from_cfg(cls, cfg: Config) -> 'FolderRunner':
        """The runner of a config, which itself stays as it is."""
        cfg = copy.deepcopy(cfg)
        for split in ('train', 'val', 'test'):
            if loader := cfg.get(f'{split}_dataloader'):
                loader.dataset.setdefault('data_root', cfg.data_root)
        if any(entries_with_classes(cfg.model)):
            tested = missing_folder(cfg.train_dataloader) and not missing_folder(cfg.test_dataloader)
            labelled = cfg.test_dataloader if tested else cfg.train_dataloader
            pipeline = labelled.dataset.pipeline[:1]  # says which files are images
            dataset = DATASETS.build(dict(labelled.dataset, pipeline=pipeline))
            set_num_classes(cfg.model, len(dataset.metainfo['classes']))
        missing = missing_folder(cfg.val_dataloader)
        if missing:
            cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
        runner = super().from_cfg(cfg)
        if missing:
            print_log(f'No folder {missing!r}: training without validation.', logger='current', level=logging.WARNING)
        return runner

    def build_train_loop(self, loop: dict | BaseLoop) -> BaseLoop:
        """The loop, whose epochs have at least one step; schedules counted in epochs need that."""
        loop = super().build_train_loop(loop)
        check_size(loop.dataloader)
        return loop


def missing_folder(loader: dict | None) -> str | None:
    """The folder of a data loader's images, if there is none such."""
    if not loader:
        return None
    prefix = loader['dataset'].get('data_prefix', '')
    prefix = prefix if isinstance(prefix, str) else prefix.get('img_path', '')
    folder = os.path.join(loader['dataset']['data_root'], prefix)
    return None if os.path.isdir(folder) else folder


def set_num_classes(config: Any, number: int) -> None:
    """Sets each `num_classes` in a config, at any depth."""
    for entry in entries_with_classes(config):
        entry['num_classes'] = number


def entries_with_classes(config: Any) -> Iterator[dict]:
    """The dicts with a `num_classes` in a config, at any depth."""
    if isinstance(config, dict):
        if 'num_classes' in config:
            yield config
        config = list(config.values())
    if isinstance(config, list):
        for entry in config:
            yield from entries_with_classes(entry)
