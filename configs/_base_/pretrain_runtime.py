"""default_runtime.py for what reconstructs images: pretraining and tokenizers."""
_base_ = './default_runtime.py'

custom_hooks = [*_base_.custom_hooks, dict(type='beit_mm.ReconstructionHook')]
log_processor = dict(
    custom_cfg=[
        # mmengine smooths what is called a loss, over validations too.
        dict(data_src='mim_loss', method_name='mean', window_size=1),
    ],
)
