"""Tests a checkpoint of a config, as `beit-mm test` does: `--help` lists the arguments."""

from beit_mm.apis.commands import test
from beit_mm.terminal import run

if __name__ == '__main__':
    run(test)
