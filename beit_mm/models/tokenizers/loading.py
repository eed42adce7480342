"""A tokenizer's weights: found, read safely, and loaded completely or not at all."""
from torch import Tensor, nn

from beit_mm.checkpoint.io import file_sha256, locate_weights, read_checkpoint
from beit_mm.checkpoint.loader import weights_of


def read_weights(source: str, sha256: str | None,
                 advice: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """State dict of a weight file, and its provenance.

    Args:
        source: path or URL.
        sha256: expected hash, None for any.
        advice: what to do when the file is missing.

    Returns:
        Names to tensors, and dict(path, sha256).
    """
    path = locate_weights(source, advice)
    return weights_of(read_checkpoint(path, sha256)), dict(path=str(path), sha256=sha256 or file_sha256(path))


def load_exactly(module: nn.Module, state: dict[str, Tensor], path: str) -> None:
    """Loads a state dict whose names and shapes must be the module's; nothing is half loaded.

    Raises:
        ValueError: with counts and the first offenders.
    """
    own = module.state_dict()
    missing = [name for name in own if name not in state]
    unexpected = [name for name in state if name not in own]
    shapes = [f'{name} is {tuple(state[name].shape)}, not {tuple(own[name].shape)}'
              for name in own if name in state and state[name].shape != own[name].shape]
    if missing or unexpected or shapes:
        problems = ', '.join(f'{len(names)} {kind} ({names[0]}, ...)' for kind, names in (
            ('missing', missing), ('unexpected', unexpected), ('of another shape', shapes),
        ) if names)
        raise ValueError(f'{path} does not hold the weights of this {type(module).__name__}: of '
                         f'{len(own)} tensors {problems}.')
    module.load_state_dict(state)
