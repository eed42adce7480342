"""How a run goes: optimizer wrappers and constructors, checks, hooks, metrics, the runner of a folder."""

from .checks import FitCheckHook
from .hooks import CheckpointMetaHook, KNNHook, RankSeedHook, ThroughputHook, UnreadableImagesHook
from .metrics import LayerAccuracy, MIMMetric, Predictions, TokenizerMetric
from .optim import AutocastOptimWrapper, BEiTOptimWrapperConstructor
from .runner import FolderRunner
