"""How a run goes: optimizer wrappers and constructors, checks, hooks, metrics."""

from .bad_steps import BadStepHook
from .checkpoints import CheckpointHook, CheckpointMetaHook
from .checks import FitCheckHook
from .dino import DINOHook
from .interruption import InterruptionHook
from .knn import DenseKNNHook, KNNHook
from .loops import EpochLoop, IterLoop
from .metrics import LayerAccuracy, MIMMetric, Predictions, TokenizerMetric
from .optim import AutocastOptimWrapper, BEiTOptimWrapperConstructor
from .steps import CompileHook, LoggerHook, RuntimeInfoHook, StepSeedHook, ThroughputHook
from .unreadable import UnreadableImagesHook
