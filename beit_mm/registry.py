"""Child registries of mmengine, scope `beit_mm`: `type='beit_mm.X'` finds our classes from any config.

The `locations` are imported at the first look-up, so that no config needs `custom_imports`, in any process
(`mim train mmpretrain CONFIG` included).
"""

from contextlib import redirect_stdout
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mmengine import registry as root


class _Registry(root.Registry):
    """Imports the folder that needs mmseg, which takes seconds, only if a name is not found without it."""

    def get(self, key: str) -> Any:
        self.import_from_location()
        if key.rpartition('.')[2] not in self.module_dict and find_spec('mmseg'):
            with redirect_stdout(None):  # mmseg prints
                import_module('beit_mm.segmentation')
        return super().get(key)


def _child(name: str, *folders: str) -> _Registry:
    parent = getattr(root, name)
    return _Registry(parent.name, parent=parent, scope='beit_mm', locations=[f'beit_mm.{f}' for f in folders])


MODELS = _child('MODELS', 'models')
DATASETS = _child('DATASETS', 'datasets')
DATA_SAMPLERS = _child('DATA_SAMPLERS', 'datasets')
TRANSFORMS = _child('TRANSFORMS', 'datasets')
HOOKS = _child('HOOKS', 'engine', 'pictures')
LOOPS = _child('LOOPS', 'engine')
METRICS = _child('METRICS', 'engine')
OPTIM_WRAPPERS = _child('OPTIM_WRAPPERS', 'engine')
OPTIM_WRAPPER_CONSTRUCTORS = _child('OPTIM_WRAPPER_CONSTRUCTORS', 'engine')
