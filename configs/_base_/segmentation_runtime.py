"""default_runtime.py for segmentation: mmseg's scope, and everything counted in steps instead of epochs."""
_base_ = './default_runtime.py'

default_scope = 'mmseg'
default_hooks = dict(
    checkpoint=dict(by_epoch=False, interval=4000),
    # draws where `mim test` is given --show-dir
    visualization=dict(type='SegVisualizationHook'),
)
visualizer = dict(type='SegLocalVisualizer')
log_processor = dict(by_epoch=False)
