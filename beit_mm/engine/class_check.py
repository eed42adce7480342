"""Do a model and the datasets it meets agree about the classes?"""
from torch import nn
from torch.utils.data import Dataset

Classes = tuple[str, ...]


def classes_of(dataset: Dataset) -> Classes | None:
    """Names of a dataset's classes; None where it has no labels."""
    classes = getattr(dataset, 'metainfo', {}).get('classes')
    return None if classes is None else tuple(classes)


def check_num_classes(model: nn.Module, dataset: Dataset) -> None:
    """Raises ValueError when a head is built for another number of classes than the dataset has; names all settings."""
    classes = classes_of(dataset)
    if classes is None:
        return
    built = {name: module.num_classes for name, module in model.named_modules()
             if isinstance(getattr(module, 'num_classes', None), int) and module.num_classes != len(classes)}
    # A segmentor repeats the number of its decode head: what holds another holder is left out.
    inner = [name for name in built if not any(other != name and f'{other}.'.startswith(f'{name}.' if name else '')
                                               for other in built)]
    if inner:
        settings = ' '.join('.'.join(part for part in ('model', name.removeprefix('module.'), 'num_classes') if part)
                            + f'={len(classes)}' for name in inner)
        raise ValueError(f'{path_of(dataset)} has {len(classes)} classes ({classes[0]} to {classes[-1]}), the model is '
                         f'built for {built[inner[0]]}; set {settings}, or give the right folder')


def check_same_classes(one: Classes | None, name: str, other: Classes | None, other_name: str) -> None:
    """Raises ValueError when two lists of classes number them differently; names of another kind are let pass."""
    if not one or not other or one == other or not set(one) & set(other):
        return
    label = next(i for i in range(max(len(one), len(other))) if one[i:i + 1] != other[i:i + 1])
    found, expected = (repr(classes[label]) if label < len(classes) else 'missing' for classes in (one, other))
    lacking = [f'; {place} lacks {", ".join(names[:5])}{", ..." if len(names) > 5 else ""}'
               for place, names in ((name, sorted({*other} - {*one})), (other_name, sorted({*one} - {*other})))
               if names]
    raise ValueError(f'{name} has {len(one)} classes, {other_name} has {len(other)}, and class {label} is {found} in '
                     f'the first, {expected} in the second{"".join(lacking)}; give the datasets one list: classes=...')


def path_of(dataset: Dataset) -> str:
    """Where a dataset's images lie, as far as it says."""
    prefix = getattr(dataset, 'data_prefix', {})
    return prefix.get('img_path') or getattr(dataset, 'data_root', '') or type(dataset).__name__
