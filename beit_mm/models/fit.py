"""Do backbone, head, tokenizer and data fit each other? What was found, and what to set instead."""
from torch import nn


def check_mask_grid(found: tuple[int, int], grid: tuple[int, int]) -> None:
    """Raises ValueError unless a mask has one cell a patch."""
    if tuple(found) != grid:
        raise ValueError(f'the mask has {found[0]} x {found[1]} cells, the backbone {grid[0]} x {grid[1]} patches; '
                         f'set the mask transform\'s grid to {grid}')


def check_second_view(tokenizer: nn.Module, size: tuple[int, int], grid: tuple[int, int]) -> None:
    """Raises ValueError unless a second view of `size` (h, w) pixels gives one token a patch."""
    try:
        found = tokenizer.grid_size(*size)
    except ValueError as error:  # no whole number of tokens
        found = error
    if found != grid:
        fitting = [factor for factor in range(1, 65)
                   if _accepts(tokenizer, grid[0] * factor, grid[1] * factor, grid)]
        right = f'; set second_size to {grid[0] * fitting[0]} x {grid[1] * fitting[0]}' if fitting else ''
        raise ValueError(f'a second view of {size[0]} x {size[1]} pixels does not give one visual token for '
                         f'each of the {grid[0]} x {grid[1]} patches of the backbone ({found}){right}')


def _accepts(tokenizer: nn.Module, height: int, width: int, grid: tuple[int, int]) -> bool:
    try:
        return tokenizer.grid_size(height, width) == grid
    except ValueError:
        return False


def check_vocabulary(head: nn.Module, tokenizer: nn.Module) -> None:
    """Raises ValueError unless a head predicts the tokenizer's vocabulary."""
    predicted = getattr(head, 'vocab_size', None)
    if predicted != tokenizer.vocab_size:
        raise ValueError(f'{type(head).__name__} predicts {predicted} visual tokens, the tokenizer has '
                         f'{tokenizer.vocab_size}; use a BEiTMIMHead with vocab_size={tokenizer.vocab_size}')
