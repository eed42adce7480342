"""How a run goes: loops, signals, steps, logs, checkpoints, checks, optimizer wrappers, metrics.

At each point of a run its hooks are called in this order, those of one priority in the order of the config:

    HIGHEST       InterruptionHook      locks the folder, and stops a run before a step has changed anything
    VERY_HIGH     RuntimeInfoHook       fetches the numbers that a line of the log will need
    VERY_HIGH     StepSeedHook          seeds a step before anything is drawn
    ABOVE_NORMAL  KNNHook               measures averaged weights, before an EMAHook takes them out of the model
    ABOVE_NORMAL  DenseKNNHook
    NORMAL        IterTimerHook
    NORMAL        DistSamplerSeedHook
    NORMAL        FitCheckHook          checks the model before a first step is compiled
    NORMAL        ThroughputHook
    NORMAL        UnreadableImagesHook
    NORMAL        EMAHook
    NORMAL        DINOHook
    NORMAL        TeacherMomentumHook
    NORMAL        CompileHook
    NORMAL        CompressGradientsHook
    BELOW_NORMAL  LoggerHook            writes the numbers of those above
    LOW           ParamSchedulerHook
    VERY_LOW      CheckpointHook        saves what all others have changed
    VERY_LOW      CheckpointMetaHook    adds to the content that all others have changed
    VERY_LOW      ProgressHook          prints a line after a checkpoint is written
"""

from .checkpoints import CheckpointHook, CheckpointMetaHook
from .checks import FitCheckHook
from .dino import DINOHook, TeacherMomentumHook
from .logs import LoggerHook, RuntimeInfoHook, ThroughputHook
from .loops import EpochLoop, IterLoop
from .metrics import DenseKNNHook, FeatureMetric, KNNHook, LayerAccuracy, MIMMetric, Predictions, TokenizerMetric
from .optim import LARS, AutocastOptimWrapper, BadStepHook, BEiTOptimWrapperConstructor
from .signals import InterruptionHook
from .steps import CompileHook, CompressGradientsHook, StepSeedHook
from .unreadable import UnreadableImagesHook
