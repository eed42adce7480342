"""The modules whose import registers types, by registry: `beit_mm/__init__.py` lists them, registry.py imports them.

The registry lies below all of them and so names none. The package's `__init__` knows every folder, but may not import
the registry, which takes a second to import torch.
"""

LOCATIONS: dict[str, tuple[str, ...]] = {}  # name of the registry in mmengine -> modules
