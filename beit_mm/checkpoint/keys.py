"""Names of the same parameters in every checkpoint format.

A format is a table of (ours, theirs): how a name begins here and there, with `*` for a block's number. The first row
that fits decides, in both directions, and what follows the beginning is kept. `None` stands for "has no place there".
Rows that would also take others' names stand behind those. Our names are those of our models: the released code's
below `backbone.`, mmpretrain's and mmseg's for neck and heads.
"""
import re
from collections.abc import Iterable
from functools import cache

Pairs = tuple[tuple[str, str | None], ...]

# microsoft/unilm `beit/`: pretraining and fine-tuning
UNILM: Pairs = (
    ('head.lm_head.', 'lm_head.'),
    ('head.fc.', 'head.'),
    ('backbone.', ''),
)
# microsoft/unilm `beit/semantic_segmentation`: the pyramid is part of the backbone
UNILM_SEGMENTATION: Pairs = (
    ('neck.upsample_4x.', 'backbone.fpn1.'),
    ('neck.upsample_2x.', 'backbone.fpn2.'),
    ('backbone.', 'backbone.'),
    ('decode_head.', 'decode_head.'),
    ('auxiliary_head.', 'auxiliary_head.'),
)
# timm: the released names, but no mask token and no pretraining head; its plain ViT names LayerScale otherwise
TIMM: Pairs = (
    ('backbone.mask_token', None),
    ('head.fc.', 'head.'),
    ('backbone.', ''),
)
TIMM_VIT: Pairs = (
    ('backbone.blocks.*.gamma_1', 'blocks.*.ls1.gamma'),
    ('backbone.blocks.*.gamma_2', 'blocks.*.ls2.gamma'),
    *UNILM,
)
# mmpretrain 1.x, and the blocks of mmsegmentation 1.x
MMPRETRAIN: Pairs = (
    ('backbone.patch_embed.proj.', 'backbone.patch_embed.projection.'),
    ('backbone.blocks.*.norm1.', 'backbone.layers.*.ln1.'),
    ('backbone.blocks.*.norm2.', 'backbone.layers.*.ln2.'),
    ('backbone.blocks.*.mlp.fc1.', 'backbone.layers.*.ffn.layers.0.0.'),
    ('backbone.blocks.*.mlp.fc2.', 'backbone.layers.*.ffn.layers.1.'),
    ('backbone.blocks.*.', 'backbone.layers.*.'),
    ('backbone.norm.', 'backbone.ln1.'),
    ('backbone.fc_norm.', 'backbone.ln2.'),
    ('head.lm_head.', 'head.cls_head.'),
    ('backbone.', 'backbone.'),
    ('head.', 'head.'),
    ('neck.', 'neck.'),
    ('decode_head.', 'decode_head.'),
    ('auxiliary_head.', 'auxiliary_head.'),
)
# mmsegmentation's backbone ends with the last block
MMSEG: Pairs = (
    ('backbone.mask_token', None),
    ('backbone.norm.', None),
    ('backbone.fc_norm.', None),
    ('head.', None),
    *MMPRETRAIN,
)
# transformers, the names in its files
HF: Pairs = (
    ('backbone.norm.', 'beit.layernorm.'),
    ('backbone.fc_norm.', 'beit.pooler.layernorm.'),
    ('backbone.cls_token', 'beit.embeddings.cls_token'),
    ('backbone.mask_token', 'beit.embeddings.mask_token'),
    ('backbone.pos_embed', 'beit.embeddings.position_embeddings'),
    ('backbone.patch_embed.proj.', 'beit.embeddings.patch_embeddings.projection.'),
    ('backbone.rel_pos_bias.', 'beit.encoder.relative_position_bias.'),
    ('backbone.blocks.*.norm1.', 'beit.encoder.layer.*.layernorm_before.'),
    ('backbone.blocks.*.norm2.', 'beit.encoder.layer.*.layernorm_after.'),
    ('backbone.blocks.*.attn.relative_', 'beit.encoder.layer.*.attention.attention.relative_position_bias.relative_'),
    ('backbone.blocks.*.attn.proj.', 'beit.encoder.layer.*.attention.output.dense.'),
    ('backbone.blocks.*.attn.', 'beit.encoder.layer.*.attention.attention.'),  # query, key, value
    ('backbone.blocks.*.mlp.fc1.', 'beit.encoder.layer.*.intermediate.dense.'),
    ('backbone.blocks.*.mlp.fc2.', 'beit.encoder.layer.*.output.dense.'),
    ('backbone.blocks.*.gamma_', 'beit.encoder.layer.*.lambda_'),
    ('head.lm_head.', 'lm_head.'),
    ('head.fc.', 'classifier.'),
    ('neck.upsample_4x.', 'fpn1.'),
    ('neck.upsample_2x.', 'fpn2.'),
    ('decode_head.conv_seg.', 'decode_head.classifier.'),
    ('auxiliary_head.conv_seg.', 'auxiliary_head.classifier.'),
    ('decode_head.', 'decode_head.'),
    ('auxiliary_head.', 'auxiliary_head.'),
)
HF_PRETRAINING: Pairs = (('backbone.norm.', 'layernorm.'), *HF)  # the final norm stands outside of `beit.`
# transformers 5 renamed its modules and still writes the names above into files. Not (ours, theirs) for once, but
# (in its files, in its memory).
HF_IN_MEMORY: Pairs = (
    ('beit.encoder.relative_position_bias.', 'beit.shared_position_bias.'),
    ('beit.encoder.layer.*.attention.attention.relative_position_bias.', 'beit.layers.*.relative_position_bias.'),
    ('beit.encoder.layer.*.attention.attention.query.', 'beit.layers.*.attention.q_proj.'),
    ('beit.encoder.layer.*.attention.attention.key.', 'beit.layers.*.attention.k_proj.'),
    ('beit.encoder.layer.*.attention.attention.value.', 'beit.layers.*.attention.v_proj.'),
    ('beit.encoder.layer.*.attention.output.dense.', 'beit.layers.*.attention.o_proj.'),
    ('beit.encoder.layer.*.intermediate.dense.', 'beit.layers.*.mlp.fc1.'),
    ('beit.encoder.layer.*.output.dense.', 'beit.layers.*.mlp.fc2.'),
    ('beit.encoder.layer.*.', 'beit.layers.*.'),
    ('fpn1.0.', 'fpn.fpn1.conv_transpose1.'),
    ('fpn1.1.', 'fpn.fpn1.normalization.'),
    ('fpn1.3.', 'fpn.fpn1.conv_transpose2.'),
    ('fpn2.0.', 'fpn.fpn2.'),
    ('decode_head.psp_modules.*.1.conv.', 'decode_head.psp_modules.blocks.*.conv.convolution.'),
    ('decode_head.psp_modules.*.1.bn.', 'decode_head.psp_modules.blocks.*.conv.normalization.'),
    ('decode_head.bottleneck.conv.', 'decode_head.psp_bottleneck.convolution.'),
    ('decode_head.bottleneck.bn.', 'decode_head.psp_bottleneck.normalization.'),
    ('decode_head.fpn_bottleneck.conv.', 'decode_head.fpn_bottleneck.convolution.'),
    ('decode_head.fpn_bottleneck.bn.', 'decode_head.fpn_bottleneck.normalization.'),
    ('decode_head.lateral_convs.*.conv.', 'decode_head.lateral_convs.*.convolution.'),
    ('decode_head.lateral_convs.*.bn.', 'decode_head.lateral_convs.*.normalization.'),
    ('decode_head.fpn_convs.*.conv.', 'decode_head.fpn_convs.*.convolution.'),
    ('decode_head.fpn_convs.*.bn.', 'decode_head.fpn_convs.*.normalization.'),
    ('auxiliary_head.convs.*.conv.', 'auxiliary_head.convs.*.convolution.'),
    ('auxiliary_head.convs.*.bn.', 'auxiliary_head.convs.*.normalization.'),
    ('auxiliary_head.conv_cat.conv.', 'auxiliary_head.conv_cat.convolution.'),
    ('auxiliary_head.conv_cat.bn.', 'auxiliary_head.conv_cat.normalization.'),
    ('', ''),
)


# All that our backbone can have; another name in a block is a layer that BEiT has not.
OUR_BACKBONE = re.compile(r'''backbone\.(
    cls_token | mask_token | pos_embed | patch_embed\.proj\.(weight|bias) | (fc_)?norm\.(weight|bias)
    | rel_pos_bias\.relative_position_bias_table
    | blocks\.\d+\.(
        norm[12]\.(weight|bias) | mlp\.fc[12]\.(weight|bias) | gamma_[12]
        | attn\.(q_bias | v_bias | qkv\.weight | proj\.(weight|bias) | relative_position_bias_table)
    )
)''', re.VERBOSE)


def rename(name: str, pairs: Pairs) -> str | None:
    """A name after the first row whose left side it begins with; None when it has no place."""
    for source, target in pairs:
        if match := _beginning(source).match(name):
            if target is None:
                return None
            for number in match.groups():
                target = target.replace('*', number, 1)
            return target + name[match.end():]
    return None


def reverse(pairs: Pairs) -> Pairs:
    """The table read from right to left."""
    return tuple((theirs, ours) for ours, theirs in pairs if theirs is not None)


@cache
def _beginning(source: str) -> re.Pattern:
    return re.compile(re.escape(source).replace(r'\*', r'(\d+)'))


def unwrapped(name: str) -> str:
    """A name without what DistributedDataParallel and torch.compile put before or into it."""
    name = name.replace('_orig_mod.', '')
    while name.startswith('module.'):
        name = name.removeprefix('module.')
    return name


def recognise(names: Iterable[str]) -> str | None:
    """Format of a state dict by the names of its tensors, one of `formats.READ`; None for no BEiT.

    A plain ViT or DeiT of timm or mmpretrain, with one bias for q, k and v, counts as a BEiT without its extras.
    """
    names = set(names)
    if {f'{root}embeddings.patch_embeddings.projection.weight' for root in ('', 'beit.')} & names:
        # the other Transformers of that library have a bias for the keys
        return None if any(name.endswith(('key.bias', 'k_proj.bias')) for name in names) else 'hf'
    if not {'cls_token', 'backbone.cls_token'} & names:
        return None
    if {'layers.0.attn.qkv.weight', 'backbone.layers.0.attn.qkv.weight'} & names:
        return 'mmpretrain/mmseg'
    if 'backbone.blocks.0.attn.qkv.weight' in names:
        return 'unilm segmentation' if 'backbone.fpn1.0.weight' in names else 'beit_mm'
    return 'unilm/timm' if 'blocks.0.attn.qkv.weight' in names else None
