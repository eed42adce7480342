"""Backbone, tokenizers, heads and algorithms, registered in mmengine's MODELS under `beit_mm`."""

from .beit import BEiTMIMHead, BEiTPretrainer, PixelRegressionHead, TwoViewDataPreprocessor
from .probe import ClassificationDataPreprocessor, LinearProbe
from .tokenizers import DALLETokenizer, DiscreteVAE, Tokenizer
from .vit import BEiTBackbone
