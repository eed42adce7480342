"""Tensor names of published formats.

Each row of a table gives a group of tensors: how their names begin in our models, and in the other format. `*` stands
for the number of a block, and None means that the format has no such tensors. The first row that fits a name decides.
"""

import re

Table = tuple[tuple[str, str | None], ...]

# microsoft/unilm `beit/` and `beit2/`; timm's BEiT has the same names
UNILM: Table = (
    ('patch_aggregation.', 'cls_pt_layers.'),
    ('head.lm_head.', 'lm_head.'),
    ('head.fc.', 'head.'),
    ('backbone.', ''),
)
# microsoft/unilm `beit/semantic_segmentation`: the pyramid is part of the backbone
UNILM_SEGMENTATION: Table = (
    ('neck.upsample_4x.', 'backbone.fpn1.'),
    ('neck.upsample_2x.', 'backbone.fpn2.'),
    *((name, name) for name in ('backbone.', 'decode_head.', 'auxiliary_head.')),
)
TIMM: Table = (('backbone.mask_token', None), *UNILM[2:])  # timm's BEiT has no pretraining head
# A plain ViT as named by timm, DeiT, MAE and DINO; the second name of the registers is that of DINOv2's own files
VIT: Table = (
    *((f'backbone.blocks.*.gamma_{i}', f'blocks.*.ls{i}.gamma') for i in (1, 2)),
    *(('backbone.register_tokens', name) for name in ('reg_token', 'register_tokens')),
    *TIMM,
)
OPENMMLAB_BLOCK: Table = (
    ('norm1.', 'ln1.'),
    ('norm2.', 'ln2.'),
    ('mlp.fc1.', 'ffn.layers.0.0.'),
    ('mlp.fc2.', 'ffn.layers.1.'),
    ('', ''),
)
MMPRETRAIN: Table = (
    ('backbone.patch_embed.proj.', 'backbone.patch_embed.projection.'),
    *((f'backbone.blocks.*.{ours}', f'backbone.layers.*.{theirs}') for ours, theirs in OPENMMLAB_BLOCK),
    *((f'patch_aggregation.*.{ours}', f'neck.patch_aggregation.*.{theirs}') for ours, theirs in OPENMMLAB_BLOCK),
    ('backbone.norm.', 'backbone.ln1.'),
    ('backbone.fc_norm.', 'backbone.ln2.'),
    ('head.lm_head.', 'head.cls_head.'),
    *((name, name) for name in ('backbone.', 'head.', 'neck.', 'decode_head.', 'auxiliary_head.')),
)
MMPRETRAIN_VIT: Table = (
    ('backbone.blocks.*.gamma_1', 'backbone.layers.*.attn.gamma1.weight'),
    ('backbone.blocks.*.gamma_2', 'backbone.layers.*.ffn.gamma2.weight'),
)
MMPRETRAIN_V2: Table = (('backbone.norm.', 'neck.norm.'), *MMPRETRAIN)  # BEiT v2 in pretraining
NOT_IN_MMSEG = ('backbone.mask_token', 'backbone.norm.', 'backbone.fc_norm.', 'head.', 'patch_aggregation.')
MMSEG: Table = (*((name, None) for name in NOT_IN_MMSEG), *MMPRETRAIN)
# transformers' names in files of `save_pretrained`; since version 5 a model's own state_dict() has other names
HF: Table = (
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
    ('backbone.blocks.*.attn.q_bias', 'beit.encoder.layer.*.attention.attention.query.bias'),
    ('backbone.blocks.*.attn.v_bias', 'beit.encoder.layer.*.attention.attention.value.bias'),
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
    *((name, name) for name in ('decode_head.', 'auxiliary_head.')),
)
HF_PRETRAINING: Table = (('backbone.norm.', 'layernorm.'), *HF)
# transformers' plain ViTs: what differs from its BEiT, once `beit.` has replaced the root of their names
HF_ROOT = re.compile(r'^((beit|vit|deit|dinov2|dinov2_with_registers)\.)?(?=embeddings|encoder|pooler|layernorm)')
HF_VIT: Table = (
    ('backbone.dist_token', 'beit.embeddings.distillation_token'),
    ('backbone.register_tokens', 'beit.embeddings.register_tokens'),
    ('backbone.blocks.*.norm', 'beit.encoder.layer.*.norm'),
    ('backbone.blocks.*.mlp.fc', 'beit.encoder.layer.*.mlp.fc'),
    ('backbone.blocks.*.mlp.fc1.', 'beit.encoder.layer.*.mlp.weights_in.'),
    ('backbone.blocks.*.mlp.fc2.', 'beit.encoder.layer.*.mlp.weights_out.'),
    ('backbone.blocks.*.gamma_1', 'beit.encoder.layer.*.layer_scale1.lambda1'),
    ('backbone.blocks.*.gamma_2', 'beit.encoder.layer.*.layer_scale2.lambda1'),
    ('head.fc.', 'cls_classifier.'),
)
# Other names in Meta's DINOv2 and DINOv3 and in timm's Eva. `mlp.gate` and `mlp.fc1` become one layer
VIT_OTHERS: Table = (
    ('backbone.register_tokens', 'storage_tokens'),
    *(('backbone.blocks.*.mlp.gate.', f'blocks.*.mlp.{name}.') for name in ('w1', 'fc1_g')),
    *(('backbone.blocks.*.mlp.fc1.', f'blocks.*.mlp.{name}.') for name in ('w2', 'w12', 'fc1_x')),
    ('backbone.blocks.*.mlp.fc2.', 'blocks.*.mlp.w3.'),
)
# timm's Eva, for rotary positions
EVA: Table = (
    ('backbone.register_tokens', 'reg_token'),
    ('backbone.blocks.*.mlp.gate.', 'blocks.*.mlp.fc1_g.'),
    ('backbone.blocks.*.mlp.value.', 'blocks.*.mlp.fc1_x.'),
    *TIMM,
)
# transformers' DINOv3, once `beit.` is before `embeddings`
HF_ROTARY: Table = (
    ('backbone.norm.', 'norm.'),
    ('backbone.patch_embed.proj.', 'beit.embeddings.patch_embeddings.'),
    *((f'backbone.{name}', f'beit.embeddings.{name}') for name in ('cls_token', 'mask_token', 'register_tokens')),
    ('backbone.blocks.*.norm', 'layer.*.norm'),
    ('backbone.blocks.*.attn.proj.', 'layer.*.attention.o_proj.'),
    *((f'backbone.blocks.*.attn.{part}_bias', f'layer.*.attention.{part}_proj.bias') for part in 'qv'),
    *((f'backbone.blocks.*.attn.{part}.', f'layer.*.attention.{part[0]}_proj.') for part in ('query', 'key', 'value')),
    ('backbone.blocks.*.gamma_1', 'layer.*.layer_scale1.lambda1'),
    ('backbone.blocks.*.gamma_2', 'layer.*.layer_scale2.lambda1'),
    ('backbone.blocks.*.mlp.gate.', 'layer.*.mlp.gate_proj.'),
    *((f'backbone.blocks.*.mlp.{part}.', 'layer.*.mlp.up_proj.') for part in ('fc1', 'value')),
    ('backbone.blocks.*.mlp.fc2.', 'layer.*.mlp.down_proj.'),
)
TABLES: dict[str, Table] = dict(beit_mm=(('', ''),), unilm=UNILM, timm=TIMM, hf=HF, mmpretrain=MMPRETRAIN, mmseg=MMSEG)
TABLES_OF_TASKS = {('unilm', 'segmentation'): UNILM_SEGMENTATION, ('hf', 'pretraining'): HF_PRETRAINING}
READ = (
    TABLES
    | dict(  # these cover all tasks and models of a format
        timm=(*VIT[:4], *VIT_OTHERS, *UNILM),
        hf=(*HF_VIT, *HF_PRETRAINING, *HF_ROTARY),
        mmpretrain=(*MMPRETRAIN_VIT, *MMPRETRAIN_V2),
    )
)
FORMATS = tuple(TABLES)
