"""Visual tokenizers: from images to the visual tokens that pretraining predicts."""

from .base import Tokenizer
from .dalle import DALLETokenizer
from .discrete_vae import DiscreteVAE
from .vqkd import VQKDTokenizer
from .vqkd_training import VQKD, BEiTTeacher, CLIPTeacher
