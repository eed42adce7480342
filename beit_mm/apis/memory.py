"""Chooses a batch that fits the memory."""

import math
from collections.abc import Mapping
from typing import Any

import torch

from beit_mm.apis.configs import bundled_config
from beit_mm.apis.split import Images
from beit_mm.datasets.transforms import as_size
from beit_mm.models.vit import sizes_of

NARROW = 192  # largest width of a model for which the demo's recipes hold
GIB_PER_IMAGE = 0.2  # on a GPU, for BEiT-Base at 224 pixels with the tokenizer
# On a GPU, per image of 1,024 patches: a segmentor's heads at 768 channels, and the blocks of BEiT-Base. It is what
# autograd keeps in bfloat16, and a tenth more. For UperNet it was counted at sizes small, base and large (on an H100
# base took 1.2 of its 1.26 GiB), for the others at base.
GIB_OF_HEADS = dict(upernet=0.58, setr_pup=1.2, masks=0.82, masks_decoder=1.25, linear=0.38)
GIB_OF_BLOCKS = 0.68
HEAD_PARAMETERS = 100_000_000  # each takes 16 bytes: weight, gradient and two moments
MAX_BATCH = 512  # on a GPU: more would leave a short training few steps
CPU_BATCH = 64, 16  # for a narrow model, as in its recipes, and for a wide one, whose steps take seconds


def choose_batch(images: Images, base: str, backbone: Mapping[str, Any], device: str, head: str | None) -> int:
    """The largest power of two that fits in memory and leaves several steps in an epoch."""
    sizes = sizes_of(backbone['arch'])
    if device == 'cpu' and head and sizes['embed_dims'] > NARROW:
        return 2  # 512 x 512 pixels each
    height, width = as_size(backbone['img_size'])
    patches = height * width / backbone['patch_size'] ** 2
    most = largest_batch(device, sizes, patches, head)
    if head:
        most = min(most, bundled_config(base).auto_scale_lr.base_batch_size)
    limit = max(4, len(images.train.names) / 8)
    return 2 ** int(math.log2(max(2, min(most, limit))))


def largest_batch(device: str, sizes: Mapping[str, int], patches: float, head: str | None) -> float:
    """The most images per step for a model of these sizes and this number of patches."""
    width, depth = sizes['embed_dims'], sizes['num_layers']
    if device == 'cpu':
        return CPU_BATCH[width > NARROW]
    free = torch.cuda.mem_get_info()[0] / 2**30
    gib_per_image = GIB_PER_IMAGE * (width / 768) * (patches / 196)  # in proportion to BEiT-Base at 224 pixels
    if head:
        gib_per_image = (GIB_OF_HEADS[head] + GIB_OF_BLOCKS * (width / 768) * (depth / 12)) * patches / 1024
        free -= 16 * (12 * width**2 * depth + HEAD_PARAMETERS) / 2**30
    return min(free / gib_per_image, MAX_BATCH)
