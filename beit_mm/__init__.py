"""BEiT (arXiv 2106.08254) as a plugin of MMPretrain and MMSegmentation.

Every registered type is found as `type='beit_mm.NAME'` in any config. The package has two parts: the plugin, for
configs of OpenMMLab, and on top of it the application, for folders of images. The plugin never imports the application.

The plugin:

    errors.py       The user's mistakes, and lines in the log
    files.py        Writes files completely or not at all, hashes them, and makes text safe to print and to store
    locations.py    The modules whose import registers types, by registry: `beit_mm/__init__.py` lists them,
                    registry.py imports them
    pictures.py     Sheets of titled pictures, reconstructions, attention maps and curves
    positions.py    Looks up and resizes relative position bias tables and position embeddings for any patch grid
    precision.py    Which floating-point type a device computes in
    registry.py     Child registries of mmengine, scope `beit_mm`: `type='beit_mm.X'` finds our classes from any config
    terminal.py     What a terminal shows: messages that a user can act on
    apis/           What users call from Python: imports nothing, so that each call loads only what it needs: commands,
                    configs, export, inference, inferencers, page, rebuild, stored_config
    checkpoint/     Weights from any BEiT file into a model and out again, without running what a file holds:
                    checkpoint, convert, description, find, formats, names, read
    datasets/       Images, their transforms, masks and samplers: geotiff, image_folder, masking, multi_crop, nodata,
                    reading, samplers, segmentation_folder, transforms
    engine/         How a run goes: loops, signals, steps, logs, checkpoints, checks, optimizer wrappers, metrics:
                    checkpoints, checks, dino, fit_head, logs, loops, metrics, optim, progress, resuming, signals,
                    steps, unreadable
    features/       Features of images, and what a classifier of them alone reaches: evaluation, extractor
    models/         Backbone, tokenizers, heads and algorithms, registered in mmengine's MODELS under `beit_mm`: base,
                    beit, beit_v2, dalle, dino, discrete_vae, feature_targets, layers, lora, probe, provenance, vit,
                    vqkd, vqkd_training
    segmentation/   Semantic segmentation with MMSegmentation. Outside this folder only functions in apis import mmseg:
                    blocks, heads, mask_head, metrics, segmentor

The application, which plans, runs and judges trainings on a folder of images:

    __main__.py     `beit-mm VERB ...`, or `python -m beit_mm`. The options of a verb are the arguments of its function
    own_images/     The application: plans a run on a folder of images, keeps its minutes, and reports whether its
                    weights are good: annotations, classification, images, label_maps, label_values, layouts, look,
                    mistakes, prediction, pretraining, record, report, run, scale, segmentation, tables, task
"""

from beit_mm.locations import LOCATIONS

__version__ = '0.4.0'
_ENGINE = ('beit_mm.engine',)
LOCATIONS.update(
    MODELS=('beit_mm.models', 'beit_mm.segmentation'),
    DATASETS=('beit_mm.datasets',),
    DATA_SAMPLERS=('beit_mm.datasets',),
    TRANSFORMS=('beit_mm.datasets', 'beit_mm.segmentation'),
    HOOKS=('beit_mm.engine', 'beit_mm.pictures'),
    LOOPS=_ENGINE,
    METRICS=('beit_mm.engine', 'beit_mm.segmentation'),
    OPTIMIZERS=_ENGINE,
    OPTIM_WRAPPERS=_ENGINE,
    OPTIM_WRAPPER_CONSTRUCTORS=_ENGINE,
)
PUBLIC = dict(
    BEiTBackbone='models.vit',
    BEiTPretrainer='models.beit',
    ClassificationInferencer='apis.inferencers',
    FeatureExtractor='features.extractor',
    SegmentationInferencer='apis.inferencers',
    attention='apis.inference',
    classify='own_images.prediction',
    convert_checkpoint='checkpoint.convert',
    embed='features.extractor',
    export='apis.export',
    export_onnx='apis.export',
    find_config='apis.configs',
    get_model='apis.rebuild',
    list_models='checkpoint.find',
    look='own_images.look',
    finetune='own_images.run',
    pretrain='own_images.run',
    reconstruct='apis.inference',
    segment='own_images.prediction',
)
__all__ = [*PUBLIC]


def __getattr__(name: str):
    """A public name, imported when it is first asked for: importing beit_mm alone stays fast, and imports nothing."""
    if name not in PUBLIC:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    from beit_mm.terminal import quiet_import

    return getattr(quiet_import(f'{__name__}.{PUBLIC[name]}'), name)


def __dir__() -> list[str]:
    """Also the names that are not imported yet."""
    return sorted({*globals(), *__all__})
