"""How a run goes: optimizer wrappers and constructors, checks, hooks, metrics."""

from .bad_steps import BadStepHook
from .checkpoints import CheckpointHook, CheckpointMetaHook
from .checks import FitCheckHook
from .hooks import (
    CompileHook,
    DenseKNNHook,
    DINOHook,
    KNNHook,
    LoggerHook,
    RuntimeInfoHook,
    StepSeedHook,
    ThroughputHook,
)
from .interruption import InterruptionHook
from .loops import EpochLoop, IterLoop
from .metrics import LayerAccuracy, MIMMetric, Predictions, TokenizerMetric
from .optim import AutocastOptimWrapper, BEiTOptimWrapperConstructor
from .unreadable import UnreadableImagesHook
