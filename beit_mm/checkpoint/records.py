"""What `inert_pickle` builds instead of modules and tensors, and plain containers and tensors made of it."""
import mmap
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from beit_mm.checkpoint.errors import CheckpointError

MAX_DEPTH = 100  # containers within each other; an optimizer's state has about 5
MAX_LETTERS = 10**7  # in the names of all modules' tensors; BEiT-L has 400 names of 40 letters


class Record:
    """An instance of a foreign class: its state, and nothing that can be called."""

    __slots__ = ('state',)

    def __new__(cls, *args: Any) -> 'Record':
        record = super().__new__(cls)
        record.state = {}
        return record

    def __init__(self, *args: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            self.state = state


class PlainDict(dict):
    """A dict that ignores attributes."""

    __slots__ = ()

    def __setstate__(self, state: Any) -> None:
        pass


class Storage(NamedTuple):
    """A run of numbers somewhere in the file."""
    key: str
    dtype: str
    numel: int
    offset: int = 0  # in elements; not 0 for views in legacy files


class TensorView(NamedTuple):
    """A tensor to be made from a storage."""
    storage: Storage
    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]


def view_numbers(mapped: mmap.mmap, start: int, size: int, storage: Storage, copied: bool) -> Tensor:
    """A storage's numbers where they lie in the file, or a copy where that is wanted or processors cannot read them.

    Args:
        mapped: the file, writable; it stays mapped as long as the result is there.
        start: in bytes.
        size: in bytes.
        storage: its type counts, not the length that it claims.
        copied: whether the result is to be independent of the file.

    Returns:
        (size / item size,)
    """
    dtype = getattr(torch, storage.dtype)
    if not 0 <= start <= start + size <= len(mapped):
        raise CheckpointError('is damaged or cut short')
    if size % dtype.itemsize:
        raise CheckpointError(f'is damaged: {size} bytes are no numbers of type {storage.dtype}')
    if not size:
        return torch.empty(0, dtype=dtype)
    if copied or start % dtype.itemsize:  # in legacy files; a map begins at a page
        with memoryview(mapped) as whole, whole[start:start + size] as part:
            return torch.frombuffer(bytearray(part), dtype=dtype)
    return torch.frombuffer(mapped, dtype=dtype, count=size // dtype.itemsize, offset=start)


class Materialiser:
    """Makes plain content of what the unpickler built; tensors go on sharing their storages.

    Args:
        numbers: finds those of a storage, see `view_numbers`.
    """

    def __init__(self, numbers: Callable[[Storage], Tensor]) -> None:
        self.numbers = numbers
        self.storages: dict[str, Tensor] = {}
        self.made: dict[int, Any] = {}  # by the id of what it was made of: shared content stays shared
        self.letters = 0

    def __call__(self, content: Any, depth: int = 0) -> Any:
        """Modules become state dicts, other records dicts, tensor views tensors."""
        if content is None or isinstance(content, (str, bytes, int, float, complex)):
            return content
        if depth > MAX_DEPTH:
            raise CheckpointError(f'holds containers more than {MAX_DEPTH} deep within each other, or in a circle')
        if id(content) not in self.made:
            self.made[id(content)] = self._make(content, depth + 1)
        return self.made[id(content)]

    def _make(self, content: Any, depth: int) -> Any:
        if isinstance(content, TensorView):
            return self._tensor(content)
        if isinstance(content, Record):
            content = self._state_dict(content) if '_parameters' in content.state else content.state
        if isinstance(content, dict):
            return {key: self(value, depth) for key, value in content.items()}
        if isinstance(content, (list, tuple, set)):
            return [self(value, depth) for value in content]
        return None  # a class or function by itself

    def _tensor(self, view: TensorView) -> Tensor:
        storage = view.storage
        if storage.key not in self.storages:
            self.storages[storage.key] = self.numbers(storage)
        # as_strided checks the bounds, so numbers made up by the file cannot reach foreign memory
        return self.storages[storage.key].as_strided(
            view.size, view.stride, storage.offset + view.offset)

    def _state_dict(self, module: Record) -> dict[str, TensorView]:
        """What `Module.state_dict()` would give, in its order."""
        found, modules = {}, [('', module.state)]
        while modules:
            prefix, state = modules.pop()
            entries = [*state['_parameters'].items(), *state['_buffers'].items(),
                       *reversed(state['_modules'].items())]
            self.letters += sum(len(prefix) + len(name) + 1 for name, _ in entries)
            if self.letters > MAX_LETTERS:
                raise CheckpointError('holds modules within each other without end')
            transient = state.get('_non_persistent_buffers_set') or ()
            for name, value in entries:
                if isinstance(value, Record):
                    modules.append((prefix + name + '.', value.state))
                elif isinstance(value, TensorView) and name not in transient:
                    found[prefix + name] = value
        return found
