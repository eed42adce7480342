"""Visual tokenizers: images to the tokens that pretraining predicts."""

from .base import Tokenizer
from .dalle import DALLETokenizer
from .discrete_vae import DiscreteVAE
from .vqkd import VQKDTokenizer

__all__ = ['DALLETokenizer', 'DiscreteVAE', 'Tokenizer', 'VQKDTokenizer']
