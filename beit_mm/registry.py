"""Child registries of mmengine, scope `beit_mm`: `type='beit_mm.X'` finds our classes from any config.

What registers a type is imported when the type is first looked up, so that no config needs `custom_imports`, in any
process (`mim train mmpretrain CONFIG` included).
"""

from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mmengine import registry as root

from beit_mm.locations import LOCATIONS


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
        with redirect_stdout(None):  # mmseg prints
            import_module(name)
    except ModuleNotFoundError as error:
        if find_spec('mmseg') or 'mmseg' not in str(error):  # without mmseg there are no types of segmentation
            raise


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
