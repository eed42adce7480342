"""Optimizer wrappers and constructors, metrics, and the hooks that guard a run."""
from .folder_runner import FolderRunner
from .knn import KNNHook
from .layer_accuracy import LayerAccuracy
from .mim_metric import MIMMetric
from .optim_constructor import BEiTOptimWrapperConstructor
from .optim_wrapper import AutocastOptimWrapper
from .plain_checkpoint import CheckpointMetaHook
from .predictions import Predictions
from .preprocessing import PreprocessingCheckHook
from .rank_seed import RankSeedHook
from .start_check import StartCheckHook
from .throughput import ThroughputHook
from .tokenizer_metric import TokenizerMetric
from .unreadable_images import UnreadableImagesHook

__all__ = [
    'AutocastOptimWrapper', 'BEiTOptimWrapperConstructor', 'FolderRunner', 'KNNHook', 'LayerAccuracy', 'MIMMetric',
    'CheckpointMetaHook', 'Predictions', 'PreprocessingCheckHook', 'RankSeedHook', 'StartCheckHook', 'ThroughputHook',
    'TokenizerMetric', 'UnreadableImagesHook'
]
