"""What plan.json in the folder of a run holds, by which the same call resumes it."""

import json
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from beit_mm.checkpoint.checkpoint import given_levels
from beit_mm.checkpoint.find import DEMO, path_of_checkpoint
from beit_mm.errors import UserError, check_choice
from beit_mm.files import atomic_file

NONE, NEW = 'none', 'new'  # options: random weights; a tokenizer trained on these images
MIN_STEPS = 20
OPTIONS = 'verb images init tokenizer_option length batch seed reduce_zero_label balance bands levels'.split()


@dataclass(frozen=True)
class Length:
    """How long a run is."""

    number: float
    unit: str  # 'minutes', 'steps' or 'epochs'

    def __str__(self) -> str:
        return f'{self.number:.12g} {self.unit}'


@dataclass
class Record:
    """The call that made a run, what was planned for it, and what came of it.

    What the call leaves open is None until it is planned. The options are those of `pretrain` and `finetune`.
    """

    verb: str  # 'pretrain' or 'finetune'
    images: str = ''  # folder
    init: str | None = None
    tokenizer_option: str | None = None
    length: Length | None = None
    batch: int | None = None
    seed: int | None = None
    reduce_zero_label: bool | None = None
    balance: bool | None = None
    bands: str | list[int] | None = None
    levels: dict[str, list[float]] | None = None  # mean and std
    workers: int | None = None
    device: str | None = None  # 'cpu' or 'cuda'

    tokenizer: str | None = None  # see Plan.tokenizer_name
    found: str = ''  # how many images
    digest: str = ''  # of their names
    seconds: float = 0.0  # that the run has taken
    stages: dict[str, dict[str, Any]] = field(default_factory=dict)  # steps, time, and what its validation measured
    metrics: dict[str, Any] = field(default_factory=dict)  # of the report: value, standard error, number of images
    verdict: str = ''

    @classmethod
    def read(cls, path: Path) -> 'Record':
        try:
            record = cls(**json.loads(path.read_text()))
            record.length = Length(*record.length)
        except (ValueError, TypeError):
            advice = 'choose another --out, or delete the folder'
            raise UserError(f'{path} is damaged or of another version of beit_mm; {advice}') from None
        return record

    def write(self, path: Path) -> None:
        with atomic_file(path) as file:
            file.write(json.dumps(vars(self), indent=2, default=astuple).encode())


def new_call(verb: str, images: str | Path, init: str | Path | None = None, **options: Any) -> Record:
    """The record of a call before anything is planned.

    Args:
        options: of `pretrain` or `finetune`, None where the call leaves them open; minutes, steps or epochs become the
            length.
    """
    options = {name: value for name, value in options.items() if value is not None}
    limits = dict(minutes=(1e-3, 1e6), epochs=(1e-3, 1e6), steps=(MIN_STEPS, 10**9))
    units = [unit for unit in limits if unit in options]
    if len(units) > 1:
        raise UserError(f'{" and ".join(units)} are both given; expected one of them')
    limits |= dict(workers=(0, 1024), seed=(0, 2**32 - 1))  # numpy's
    for name, (least, most) in limits.items():
        if name in options and not least <= options[name] <= most:
            raise UserError(f'{name} is {options[name]}; expected {least:,} to {most:,}')
    if 'tokenizer_option' in options:
        check_choice('tokenizer', options['tokenizer_option'], (DEMO, NEW))
    if init not in (None, DEMO, NONE) and '://' not in str(init):
        init = path_of_checkpoint(init).absolute()  # links stay: name and neighbouring files tell what it is
    options['levels'] = given_levels(**options.get('levels', {})) or None
    options['length'] = next((Length(options.pop(unit), unit) for unit in units), None)
    return Record(verb, str(Path(images).expanduser().resolve()), None if init is None else str(init), **options)
