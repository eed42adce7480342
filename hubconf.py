"""torch.hub's entry.

torch.hub.load('/path/to/this/checkout', 'beit', 'beit_base_patch16_224_pt22k', pretrained=True, source='local')
"""

dependencies = ['torch', 'torchvision', 'mmengine', 'mmcv', 'mmpretrain', 'mmseg']

from beit_mm.apis.rebuild import get_model as beit  # noqa: E402, F401
from beit_mm.checkpoint.find import list_models  # noqa: E402, F401
