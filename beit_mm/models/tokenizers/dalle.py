"""DALL-E's tokenizer, the paper's: 8192 words, frozen."""
import torch
from torch import Tensor, nn

from beit_mm.functional.pixels import map_pixels, unmap_pixels
from beit_mm.layers.dalle import STRIDE, DALLEDecoder, DALLEEncoder
from beit_mm.models.tokenizers.codebook import CodebookTokenizer
from beit_mm.models.tokenizers.loading import load_exactly, read_weights
from beit_mm.registry import MODELS

ENCODER_URL = ('https://download.openmmlab.com/mmselfsup/1.x/target_generator_ckpt/'
               'dalle_encoder.pth')
ENCODER_ADVICE = (
    f'Get {ENCODER_URL} (or https://cdn.openai.com/dall-e/encoder.pkl) and name the file in '
    'target_generator.checkpoint; for a smoke run set target_generator.random_weights=True.')
DECODER_ADVICE = (
    'Get https://cdn.openai.com/dall-e/decoder.pkl and name the file in '
    'target_generator.decoder_checkpoint, or leave that key out.')
SMOKE_SEED = 0  # random weights are the same on all ranks, whatever the run's seed


@MODELS.register_module()
class DALLETokenizer(CodebookTokenizer, nn.Module):
    """The encoder of DALL-E's dVAE as the source of visual tokens, and its decoder for pictures.

    Args:
        checkpoint: encoder weights, a path or a URL: a state dict (.pth, .safetensors, ...) or
            OpenAI's encoder.pkl.
        decoder_checkpoint: decoder weights, e.g. OpenAI's decoder.pkl; None: there is no `decode`.
        precision: of all convolutions but the encoder's output and the decoder's input, which are
            fp32. 'fp16': as the original, that is fp16 on a GPU and fp32 on a CPU; 'bf16'; 'fp32'.
            Tokens are an argmax, so precision changes some: fp16 0.2 %, bf16 2 % (random weights).
        random_weights: no files, seeded random weights for both networks: for smoke runs only.
        sha256: expected hash of the encoder's file.
        hidden: width of the first group.
        vocab_size: number of visual tokens.

    `provenance` says type, precision, path and sha256, for the run's checkpoints.

    Raises:
        ValueError: unknown precision, or weights of another network.
        FileNotFoundError: no weights; says where it looked and where to get them.

    Source: openai/DALL-E; tokens as microsoft/unilm `beit/modeling_discrete_vae.py` `Dalle_VAE`.
    Differs from them in mapping the pixels itself, in looking tokens up in `decode`, in 'bf16',
    and in rounding the weights once, at the first use, instead of at each.
    """

    def __init__(self, checkpoint: str = ENCODER_URL, decoder_checkpoint: str | None = None,
                 precision: str = 'fp16', random_weights: bool = False, sha256: str | None = None,
                 hidden: int = 256, vocab_size: int = 8192) -> None:
        super().__init__()
        if precision not in ('fp16', 'bf16', 'fp32'):
            raise ValueError(f"precision must be 'fp16', 'bf16' or 'fp32', got {precision!r}.")
        self.vocab_size = vocab_size
        self.stride = STRIDE
        self.precision = precision
        self.provenance = dict(type='DALLETokenizer', precision=precision)
        if random_weights:
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(SMOKE_SEED)
                self.encoder = DALLEEncoder(hidden, vocab_size)
                self.decoder = DALLEDecoder(hidden, vocab_size)
            self.provenance.update(path='random weights', sha256='')
        else:
            self.encoder, file = _load(
                DALLEEncoder, hidden, vocab_size, checkpoint, sha256, ENCODER_ADVICE)
            self.provenance.update(file)
            self.decoder = None
            if decoder_checkpoint is not None:
                self.decoder, file = _load(
                    DALLEDecoder, hidden, vocab_size, decoder_checkpoint, None, DECODER_ADVICE)
                self.provenance.update({f'decoder_{key}': value for key, value in file.items()})
        self.requires_grad_(False)
        self.to(memory_format=torch.channels_last)

    def to_input(self, images: Tensor) -> Tensor:
        """Pixels in [0, 1] as the encoder wants them."""
        return map_pixels(images).contiguous(memory_format=torch.channels_last)

    def to_images(self, output: Tensor) -> Tensor:
        """The decoder's output, float32, as pixels in [0, 1]: its location, without the scale."""
        return unmap_pixels(output[:, :3].sigmoid())

    def prepare(self, device: torch.device) -> None:
        """Rounds the weights to the precision that `device` calls for."""
        dtype = dict(fp16=torch.float16, bf16=torch.bfloat16, fp32=torch.float32)[self.precision]
        if dtype == torch.float16 and device.type == 'cpu':
            dtype = torch.float32
        for network in (self.encoder, self.decoder):
            if network is not None:
                network.cast_inner(dtype)


def _load(network: type[nn.Module], hidden: int, vocab_size: int, source: str, sha256: str | None,
          advice: str) -> tuple[nn.Module, dict[str, str]]:
    """A network with the weights of a file; its parameters are never initialised in vain."""
    state, file = read_weights(source, sha256, advice)
    with torch.device('meta'):
        module = network(hidden, vocab_size)
    module.to_empty(device='cpu')
    load_exactly(module, state, source)
    return module, file
