"""How a run goes: optimizer wrappers and constructors, checks, hooks, metrics."""

from .bad_data import BadStepHook, UnreadableImagesHook
from .checkpoints import CheckpointHook, CheckpointMetaHook
from .checks import FitCheckHook
from .dino import DINOHook
from .interruption import EpochLoop, InterruptionHook, IterLoop
from .metrics import DenseKNNHook, KNNHook, LayerAccuracy, MIMMetric, Predictions, TokenizerMetric
from .optim import AutocastOptimWrapper, BEiTOptimWrapperConstructor
from .steps import CompileHook, CompressGradientsHook, LoggerHook, RuntimeInfoHook, StepSeedHook, ThroughputHook
