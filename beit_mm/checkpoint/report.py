"""What became of each tensor when a backbone was loaded."""
from collections.abc import Mapping
from dataclasses import dataclass, field

from beit_mm.positions import Grid

# Come and go with the task: the mask token and the norm after the last block.
TASK_PARTS = ('mask_token', 'norm.', 'fc_norm.')


@dataclass
class LoadReport:
    """What became of each tensor when a backbone was loaded; names without `backbone.`.

    Attributes:
        source: file and format.
        preprocessing: of the images that the weights were trained on, see Origin.
        grid: patch grid (h, w) of these images, None where the file does not say.
        matched: loaded as they were in the file.
        expanded: tables copied from the one that all blocks shared.
        resized: name -> patch grids, for tables and position embeddings.
        adapted: patch embeddings made for another number of channels.
        folded: LayerScale multiplied into other weights.
        missing: of the model, not in the file: they keep their initial values.
        left_out: in the file, of no use to the model.
    """
    source: str
    preprocessing: Mapping = field(default_factory=dict)
    grid: Grid | None = None
    matched: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)
    resized: dict[str, str] = field(default_factory=dict)
    adapted: list[str] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        grids = ', '.join(sorted(set(self.resized.values())))
        parts = [
            f'{len(self.matched)} matched', f'{len(self.expanded)} expanded',
            f'{len(self.resized)} resized' + (f' ({grids})' if grids else ''), f'{len(self.adapted)} adapted',
            f'{len(self.folded)} folded', listed(self.missing, 'missing'), listed(self.left_out, 'left out')]
        return f'Backbone weights from {self.source}: ' + ', '.join(
            part for part in parts if not part.startswith('0 ')) + '.'

    @property
    def surplus(self) -> list[str]:
        """What was left out although it is no matter of the task."""
        return [name for name in self.left_out if not name.startswith(TASK_PARTS)]

    @property
    def lacking(self) -> list[str]:
        """What is missing although it is no matter of the task."""
        return [name for name in self.missing if not name.startswith(TASK_PARTS)]


def listed(names: list[str], what: str) -> str:
    """Number, kind and the first few of some names."""
    shown = ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')
    return f'{len(names)} {what} ({shown})' if names else f'0 {what}'
