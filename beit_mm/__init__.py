"""BEiT (arXiv 2106.08254) as a plugin of MMPretrain and MMSegmentation.

Every registered type is found as `type='beit_mm.NAME'` in any config. Where what lives:

    __main__.py         the command line, `python -m beit_mm VERB`
    registry.py         child registries of mmengine's, scope 'beit_mm'
    terminal.py         what a terminal gets to see: no noise, one line for a mistake
    positions.py        relative position bias and position embedding, at any patch grid
    checkpoint/         io.py reads and writes files, names.py knows the formats, fit.py makes weights fit,
                        convert.py converts and publishes
    datasets/           masking.py (Algorithm 1), reading.py, bands.py, transforms.py, multi_crop.py, resize.py,
                        image_folder.py, segmentation_folder.py, samplers.py
    models/             vit.py (the backbone), beit.py (the method), beit_v2.py, dino.py, tokenizers/, probe.py
    engine/             optim.py (mixed precision, layer decay), checks.py, hooks.py, metrics.py,
                        progress.py, probing.py (k-NN and linear evaluation of frozen features)
    segmentation/       segmentor.py (sliding windows, multi-scale), heads.py; all that needs mmseg
    visualization/      pictures that no library draws: of features, attention, samples, masks
    apis/               training.py, plans.py and verbs.py (one's own images in one line), inferencers.py, features.py,
                        evaluation.py, zoo.py, export.py: what a notebook calls
"""

__version__ = '0.2.0'
_MODULES = dict(
    BEiTBackbone='models.vit',
    BEiTPretrainer='models.beit',
    ClassificationInferencer='apis.inferencers',
    FeatureExtractor='apis.features',
    SegmentationInferencer='apis.inferencers',
    attention='apis.verbs',
    classify='apis.verbs',
    convert_checkpoint='checkpoint.convert',
    embed='apis.features',
    export_onnx='apis.export',
    get_model='apis.zoo',
    list_models='apis.zoo',
    finetune='apis.training',
    pretrain='apis.training',
    reconstruct='apis.verbs',
    segment='apis.verbs',
)
__all__ = [*_MODULES]


def __getattr__(name: str):
    """A public name, imported when it is first asked for: importing beit_mm alone stays fast, and imports nothing."""
    if name not in _MODULES:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from beit_mm.terminal import quiet_import

    return getattr(quiet_import(f'{__name__}.{_MODULES[name]}'), name)


def __dir__() -> list[str]:
    """Also the names that are not imported yet."""
    return sorted({*globals(), *__all__})
