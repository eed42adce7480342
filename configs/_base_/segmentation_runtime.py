"""What every segmentation run has: logs, checkpoints, progress, curves; mmseg's counterpart of default_runtime.py."""
default_scope = 'mmseg'

default_hooks = dict(
    timer=dict(type='IterTimerHook'),
    logger=dict(type='LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=16000, max_keep_ckpts=3),
    sampler_seed=dict(type='DistSamplerSeedHook'),
    # predictions of a test as PNG and drawn: --cfg-options default_hooks.predictions.folder=DIR
    predictions=dict(type='beit_mm.SavePredictionsHook', folder=None),
    # draws where `mim test` is given --show-dir
    visualization=dict(type='SegVisualizationHook'))
custom_hooks = [
    dict(type='beit_mm.FitCheckHook'),
    dict(type='beit_mm.RankSeedHook'),
    dict(type='beit_mm.ThroughputHook'),
    dict(type='beit_mm.UnreadableImagesHook'),
    dict(type='beit_mm.CheckpointMetaHook'),
    dict(type='beit_mm.CurveHook'),
]

visualizer = dict(
    type='SegLocalVisualizer',
    vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')])
log_level = 'INFO'
log_processor = dict(window_size=50, by_epoch=False)
load_from = None
resume = False
randomness = dict(seed=0)

env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'))
# device_ids=None serves a CPU too, where mmengine's default would name a GPU.
model_wrapper_cfg = dict(
    type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False)
