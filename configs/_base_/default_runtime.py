"""Settings of all runs: logs, checkpoints, progress, checks at the start."""
default_scope = 'mmpretrain'

default_hooks = dict(
    runtime_info=dict(type='beit_mm.RuntimeInfoHook'),
    timer=dict(type='IterTimerHook'),
    logger=dict(type='beit_mm.LoggerHook', interval=50, log_metric_by_epoch=False),
    param_scheduler=dict(type='ParamSchedulerHook'),
    checkpoint=dict(type='beit_mm.CheckpointHook', interval=1, max_keep_ckpts=3),
    sampler_seed=dict(type='DistSamplerSeedHook'),
)
custom_hooks = [
    dict(type='beit_mm.FitCheckHook'),
    dict(type='beit_mm.StepSeedHook'),
    dict(type='beit_mm.ThroughputHook'),
    dict(type='beit_mm.UnreadableImagesHook'),
    dict(type='beit_mm.CheckpointMetaHook'),
    dict(type='beit_mm.InterruptionHook'),
]

visualizer = dict(
    type='Visualizer',
    vis_backends=[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')],
)
log_level = 'INFO'
log_processor = dict(window_size=50)
load_from = None
resume = False
randomness = dict(seed=0)  # deterministic=True: the same bits in each run, slower on a GPU

env_cfg = dict(
    cudnn_benchmark=True,
    mp_cfg=dict(mp_start_method='fork', opencv_num_threads=0),
    dist_cfg=dict(backend='nccl'),
)
# device_ids=None serves a CPU too, where mmengine's default would name a GPU. gradient_as_bucket_view: gradients lie in
# the buffers that are exchanged, not beside them. No static_graph: torch fails with it where batches are accumulated,
# and a parameter without a gradient would go unnoticed.
model_wrapper_cfg = dict(
    type='MMDistributedDataParallel', device_ids=None, broadcast_buffers=False, gradient_as_bucket_view=True)
