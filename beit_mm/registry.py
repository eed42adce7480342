"""Child registries of mmengine, scope `beit_mm`: `type='beit_mm.X'` finds our classes from any config.

What registers a type is imported when the type is first looked up, so that no config needs `custom_imports`, in any
process (`mim train mmpretrain CONFIG` included).
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any

from mmengine import registry as root

from beit_mm.locations import LOCATIONS
from beit_mm.terminal import quiet_import

_building = threading.RLock()


class _Registry(root.Registry):
    """Imports its locations one by one until the type is found: the last one may import mmseg, which takes seconds."""

    def __init__(self, kind: str) -> None:
        parent = getattr(root, kind)
        super().__init__(parent.name, parent=parent, scope='beit_mm')
        self.kind = kind

    def get(self, key: str) -> Any:
        for location in LOCATIONS[self.kind]:
            if key.rpartition('.')[2] in self.module_dict:
                break
            import_location(location)
        return super().get(key)


def import_location(name: str) -> None:
    try:
        quiet_import(name)
    except ModuleNotFoundError as error:
        if find_spec('mmseg') or 'mmseg' not in str(error):  # without mmseg there are no types of segmentation
            raise


@contextmanager
def building(scope: str | None = None) -> Iterator[None]:
    """Inside, types of the library `scope` need no prefix. One thread at a time: mmengine has one scope for all."""
    with _building, root.DefaultScope.overwrite_default_scope(scope):
        yield


MODELS = _Registry('MODELS')
DATASETS = _Registry('DATASETS')
DATA_SAMPLERS = _Registry('DATA_SAMPLERS')
TRANSFORMS = _Registry('TRANSFORMS')
HOOKS = _Registry('HOOKS')
LOOPS = _Registry('LOOPS')
METRICS = _Registry('METRICS')
OPTIMIZERS = _Registry('OPTIMIZERS')
OPTIM_WRAPPERS = _Registry('OPTIM_WRAPPERS')
OPTIM_WRAPPER_CONSTRUCTORS = _Registry('OPTIM_WRAPPER_CONSTRUCTORS')
