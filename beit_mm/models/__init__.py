"""Backbone, tokenizers, heads and algorithms, registered in mmengine's MODELS under `beit_mm`."""
from beit_mm.checkpoint.loader import install_loader

from .backbone import BEiTBackbone
from .classification_preprocessor import ClassificationDataPreprocessor
from .data_preprocessor import TwoViewDataPreprocessor
from .heads import BEiTMIMHead, PixelRegressionHead
from .linear_probe import LinearProbe
from .pretrainer import BEiTPretrainer
from .tokenizers import DALLETokenizer, DiscreteVAE

__all__ = [
    'BEiTBackbone', 'BEiTMIMHead', 'BEiTPretrainer', 'ClassificationDataPreprocessor', 'DALLETokenizer', 'DiscreteVAE',
    'LinearProbe', 'PixelRegressionHead', 'TwoViewDataPreprocessor'
]

install_loader()
