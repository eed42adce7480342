"""How a run goes: optimizer wrappers and constructors, checks, hooks, metrics."""

from .checkpoints import CheckpointHook, CheckpointMetaHook
from .checks import FitCheckHook
from .dino import DINOHook
from .logs import LoggerHook, RuntimeInfoHook, ThroughputHook
from .loops import EpochLoop, IterLoop
from .metrics import DenseKNNHook, KNNHook, LayerAccuracy, MIMMetric, Predictions, TokenizerMetric
from .optim import AutocastOptimWrapper, BadStepHook, BEiTOptimWrapperConstructor
from .signals import InterruptionHook
from .steps import CompileHook, CompressGradientsHook, StepSeedHook
from .unreadable import UnreadableImagesHook
