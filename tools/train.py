"""Trains what a config describes, as `beit-mm train` does: `--help` lists the arguments."""

from beit_mm.apis.commands import train
from beit_mm.terminal import run

if __name__ == '__main__':
    run(train)
