"""Backbone, tokenizers, heads and algorithms, registered in mmengine's MODELS under `beit_mm`."""

from beit_mm.checkpoint.loader import install_loader

from .beit import BEiTMIMHead, BEiTPretrainer, PixelRegressionHead, TwoViewDataPreprocessor
from .probe import ClassificationDataPreprocessor, LinearProbe
from .tokenizers import DALLETokenizer, DiscreteVAE, Tokenizer
from .vit import BEiTBackbone

install_loader()
