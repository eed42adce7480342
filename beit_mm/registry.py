"""Child registries of mmengine's, scope `beit_mm`: `type='beit_mm.X'` finds our classes from any config.

The `locations` are imported at the first look-up, so no config needs `custom_imports`, in any process
(`mim train mmpretrain CONFIG` included).
"""

from importlib.util import find_spec

from mmengine import registry as root

# The one folder that imports mmseg; a location that cannot be imported would break every look-up.
SEGMENTATION = ('segmentation',) if find_spec('mmseg') else ()


def _child(name: str, *folders: str) -> root.Registry:
    parent = getattr(root, name)
    return root.Registry(parent.name, parent=parent, scope='beit_mm', locations=[f'beit_mm.{f}' for f in folders])


MODELS = _child('MODELS', 'models', *SEGMENTATION)
DATASETS = _child('DATASETS', 'datasets', *SEGMENTATION)
DATA_SAMPLERS = _child('DATA_SAMPLERS', 'datasets')
TRANSFORMS = _child('TRANSFORMS', 'datasets', *SEGMENTATION)
HOOKS = _child('HOOKS', 'engine', 'pictures')
LOOPS = _child('LOOPS', 'engine')
METRICS = _child('METRICS', 'engine')
OPTIM_WRAPPERS = _child('OPTIM_WRAPPERS', 'engine')
OPTIM_WRAPPER_CONSTRUCTORS = _child('OPTIM_WRAPPER_CONSTRUCTORS', 'engine')
