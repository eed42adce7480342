"""Optimizer wrappers and constructors, metrics, and the hooks that guard a run."""
from .mim_metric import MIMMetric
from .optim_constructor import BEiTOptimWrapperConstructor
from .optim_wrapper import AutocastOptimWrapper
from .plain_checkpoint import PlainCheckpointHook
from .preprocessing import PreprocessingCheckHook
from .start_check import StartCheckHook
from .throughput import ThroughputHook
from .tokenizer_metric import TokenizerMetric
from .unreadable_photos import UnreadablePhotosHook

__all__ = [
    'AutocastOptimWrapper', 'BEiTOptimWrapperConstructor', 'MIMMetric', 'PlainCheckpointHook',
    'PreprocessingCheckHook', 'StartCheckHook', 'ThroughputHook', 'TokenizerMetric', 'UnreadablePhotosHook'
]
