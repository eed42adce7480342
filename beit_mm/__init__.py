"""BEiT (arXiv 2106.08254) as a plugin of MMPretrain and MMSegmentation.

Every registered type is found as `type='beit_mm.NAME'` in any config. Where what lives:

    __main__.py         the command line, `python -m beit_mm VERB`
    registry.py         child registries of mmengine's, scope 'beit_mm'
    files.py            files that are written whole or not at all
    precision.py        the type that a device computes in
    terminal.py         what a terminal gets to see: no noise, one line for a mistake
    positions.py        relative position bias and position embedding, at any patch grid
    checkpoint/         find.py, read.py, names.py (the formats), fit.py (weights made to fit), convert.py
    datasets/           masking.py (Algorithm 1), reading.py, bands.py, transforms.py, multi_crop.py, resize.py,
                        image_folder.py, segmentation_folder.py, samplers.py
    models/             vit.py (the backbone), beit.py (the method), beit_v2.py, dino.py, tokenizers/, probe.py
    features/           reader.py, extractor.py, probing.py and evaluation.py (k-NN and linear classifiers)
    engine/             optim.py (mixed precision, layer decay), checks.py, steps.py, dino.py, knn.py, checkpoints.py,
                        interruption.py, loops.py, metrics.py, progress.py
    segmentation/       segmentor.py (sliding windows, multi-scale), heads.py; all that needs mmseg
    pictures/           pictures that no library draws: of features, attention, samples, masks
    apis/               training.py, plans.py, split.py and inference.py (one's own images in one line),
                        inferencers.py, configs.py, export.py: what a notebook calls
"""

__version__ = '0.2.0'
_MODULES = dict(
    BEiTBackbone='models.vit',
    BEiTPretrainer='models.beit',
    ClassificationInferencer='apis.inferencers',
    FeatureExtractor='features.extractor',
    SegmentationInferencer='apis.inferencers',
    attention='apis.inference',
    classify='apis.inference',
    convert_checkpoint='checkpoint.convert',
    embed='features.extractor',
    export_onnx='apis.export',
    get_model='apis.configs',
    list_models='checkpoint.find',
    finetune='apis.training',
    pretrain='apis.training',
    reconstruct='apis.inference',
    segment='apis.inference',
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
