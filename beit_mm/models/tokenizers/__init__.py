"""Tokenizers: images to visual tokens, and back where they can."""
from .dalle import DALLETokenizer
from .discrete_vae import DiscreteVAE

__all__ = ['DALLETokenizer', 'DiscreteVAE']
