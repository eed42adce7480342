"""default_runtime.py for segmentation: mmseg's scope, and everything counted in steps instead of epochs."""
_base_ = './default_runtime.py'

default_scope = 'mmseg'
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=16000),
    # predictions of a test as PNG and drawn: --cfg-options default_hooks.predictions.folder=DIR
    predictions=dict(type='beit_mm.SavePredictionsHook', folder=None),
    # draws where `mim test` is given --show-dir
    visualization=dict(type='SegVisualizationHook'),
)
custom_hooks = [
    dict(type='beit_mm.StartCheckHook'),
    dict(type='beit_mm.RankSeedHook'),
    dict(type='beit_mm.LabelCheckHook'),
    dict(type='beit_mm.PreprocessingCheckHook'),
    dict(type='beit_mm.ThroughputHook'),
    dict(type='beit_mm.UnreadableImagesHook'),
    dict(type='beit_mm.CheckpointMetaHook'),
    dict(type='beit_mm.CurveHook'),
]
visualizer = dict(type='SegLocalVisualizer')
log_processor = dict(by_epoch=False)
