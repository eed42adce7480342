"""Backbone, tokenizers, heads and algorithms, registered in mmengine's MODELS under `beit_mm`."""
from beit_mm.checkpoint.loading import install_loader

from .backbone import BEiTBackbone
from .data_preprocessor import TwoViewDataPreprocessor
from .heads import BEiTMIMHead, PixelRegressionHead
from .pretrainer import BEiTPretrainer
from .tokenizers import DALLETokenizer, DiscreteVAE

__all__ = [
    'BEiTBackbone', 'BEiTMIMHead', 'BEiTPretrainer', 'DALLETokenizer', 'DiscreteVAE',
    'PixelRegressionHead', 'TwoViewDataPreprocessor'
]

install_loader()
