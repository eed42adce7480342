"""Backbone, tokenizers, heads and algorithms, registered in mmengine's MODELS under `beit_mm`."""

from .beit import BEiTMIMHead, BEiTPretrainer, PixelRegressionHead, PixelTargets, TwoViewDataPreprocessor
from .beit_v2 import BEiTV2Pretrainer
from .dino import DINOHead, DINOPretrainer, MultiCropDataPreprocessor
from .feature_targets import FeatureRegressionHead, FeatureTargets
from .probe import AttentiveProbe, ClassificationDataPreprocessor, LinearProbe
from .tokenizers import VQKD, DALLETokenizer, DiscreteVAE, Tokenizer, VQKDTokenizer
from .vit import BEiTBackbone
