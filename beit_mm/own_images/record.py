"""What a call asked for, and what plan.json keeps of its run."""

import json
import math
import os
import shlex
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, fields
from itertools import count
from pathlib import Path
from typing import Any

from beit_mm.checkpoint.checkpoint import given_mean_std
from beit_mm.checkpoint.find import DEMO, path_of_checkpoint
from beit_mm.errors import UserError, check_choice
from beit_mm.files import atomic_file

RECORD = 'plan.json'  # in a run's folder
NONE, ALL = 'none', 'all'  # options: random weights; all blocks
UNITS = ('minutes', 'epochs', 'steps')  # options that give the length of a run
CHANGEABLE = ('workers',)  # options that a call which resumes a run may change
NOT_HANDED_ON = ('init', 'batch', 'workers', 'seed', 'mean', 'std')  # options that a run from another's weights chooses


@dataclass(frozen=True)
class Length:
    number: float
    unit: str  # one of UNITS

    def __post_init__(self) -> None:
        check_choice('the unit of a length', self.unit, UNITS)
        if not 0 < self.number < math.inf:
            raise UserError(f'--{self.unit} is {self.number}; expected a number above 0')

    def __str__(self) -> str:
        return f'{self.number:.12g} {self.unit}'


USUAL_LENGTH = Length(15, 'minutes')


@dataclass
class Record:
    """The call that started a run, its plan and its results. What the call leaves out is None until it is planned."""

    verb: str  # 'pretrain' or 'finetune'
    images: str  # folder
    options: dict  # the other arguments of the verb's function, by name
    length: Length | None = None

    device: str | None = None  # 'cpu' or 'cuda'
    predicts: str | None = None  # what a pretraining predicts; a resumed run must find the same
    found: str = ''  # how many images
    digest: str = ''  # of their names and labels; empty until the run is planned
    rules: str = ''  # digest of what holds for all images, such as the numbers in label maps
    seconds: float = 0.0  # how long the run has taken
    stages: dict = field(default_factory=dict)  # a dict of each: steps, time, and what its validation measured
    metrics: dict = field(default_factory=dict)  # of the report: value, standard error, number of images
    verdict: str = ''

    @classmethod
    def of_call(cls, verb: str, images: str | Path, arguments: Mapping[str, Any]) -> 'Record':
        """The record of a call with these arguments, before anything is planned."""
        if (processes := os.environ.get('WORLD_SIZE', '1')) not in ('', '1'):  # set by torchrun
            raise UserError(
                f'{verb} runs in one process, but WORLD_SIZE is {processes}; start it without a launcher, or train its '
                'config with dist_train.sh'
            )
        options = dict(arguments)
        lengths = [(options.pop(unit), unit) for unit in UNITS if unit in options]
        given = [Length(number, unit) for number, unit in lengths if number is not None]
        if len(given) > 1:
            raise UserError(f'{" and ".join(length.unit for length in given)} are given; leave one out')
        if options['init'] is not None:
            options['init'] = absolute_source(options['init'])
        options |= given_mean_std(options['mean'], options['std'])
        folder = str(Path(images).expanduser().resolve()) if str(images) else ''
        return cls(verb, folder, options, length=given[0] if given else None)

    @classmethod
    def read(cls, path: Path) -> 'Record':
        try:
            stored = json.loads(path.read_bytes())
            record = cls(**stored)
            record.length = Length(*record.length)
            kinds: dict[str, Any] = {each.name: each.type for each in fields(cls)}
            wrong = [name for name in kinds if name not in stored or not isinstance(getattr(record, name), kinds[name])]
            if wrong:
                raise UserError(f'missing or of another type: {", ".join(wrong)}')
        except (TypeError, ValueError, RecursionError) as error:  # the last of brackets nested too deeply
            raise UnknownRecordError(path, error) from None
        return record

    def write(self, path: Path) -> None:
        with atomic_file(path) as file:
            file.write(json.dumps(vars(self), indent=2, default=astuple).encode())

    def command(self, init: str | Path, folder: Path, length: Length | None) -> str:
        """The command line of another run with these options, from the weights `init`, beside the folder."""
        free = next(path for number in count(2) if not (path := folder.with_name(f'{folder.name}_{number}')).exists())
        options = {name: value for name, value in self.options.items() if name not in NOT_HANDED_ON}
        options |= {length.unit: f'{length.number:.12g}'} if length else {}
        return shlex.join(['beit-mm', self.verb, self.images, *words_of(dict(init=init, out=free, **options))])

    def resume(self, call: 'Record', folder: Path, is_finished: bool) -> None:
        """Refuses a call whose options differ from the run's; an option that it leaves out keeps its value."""
        known = dict(verb=self.verb, images=self.images, length=self.length, **self.options)
        asked = dict(verb=call.verb, images=call.images, length=call.length, **call.options)
        for option, value in asked.items():
            if value not in (None, known.get(option)) and option not in CHANGEABLE:
                cure = 'choose another --out'
                if is_finished and option == 'length':
                    cure = f'to train its weights further: {self.command(folder, folder, call.length)}'
                raise UserError(
                    f'{folder} began with {option}={known.get(option)}, this call says {option}={value}; {cure}'
                )
        if known.keys() != asked.keys():
            raise UnknownRecordError(folder / RECORD, f'unexpected: {", ".join(sorted(known.keys() ^ asked.keys()))}')
        self.options.update({option: call.options[option] for option in CHANGEABLE if call.options[option] is not None})


class UnknownRecordError(UserError):
    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f'{path} is damaged, or of another version of beit_mm ({reason}); finish the run with that version, begin '
            'again with another --out, or start from its weights with --init'
        )


def words_of(options: Mapping[str, Any]) -> list[str]:
    """Options of a verb's function as words of its command line."""
    words = []
    for name, value in options.items():
        if name == 'reduce_zero_label' and value is False:
            words.append('--keep-zero-label')
        elif value is not None and value is not False:
            text = ','.join(map(str, value)) if isinstance(value, list) else str(value)
            words += [f'--{name.replace("_", "-")}', *([] if value is True else [text])]
    return words


def absolute_source(source: str | Path) -> str:
    """The absolute path of a checkpoint, for later calls from other folders; words and URLs stay as they are."""
    if source in (DEMO, NONE) or '://' in str(source):
        return str(source)
    return str(path_of_checkpoint(source).absolute())  # links stay: the name and the files beside it say what it is
