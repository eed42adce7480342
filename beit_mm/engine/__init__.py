"""How a run goes: optimizer wrappers and constructors, checks, hooks, metrics, the runner of a folder."""

from .bad_steps import BadStepHook, ReplayHook
from .checkpoints import CheckpointHook, CheckpointMetaHook
from .checks import FitCheckHook
from .hooks import CompileHook, DenseKNNHook, DINOHook, KNNHook, RuntimeInfoHook, StepSeedHook, ThroughputHook
from .interruption import InterruptionHook
from .loops import EpochLoop, IterLoop
from .metrics import LayerAccuracy, MIMMetric, Predictions, TokenizerMetric
from .optim import AutocastOptimWrapper, BEiTOptimWrapperConstructor
from .runner import FolderRunner
from .unreadable import UnreadableImagesHook
