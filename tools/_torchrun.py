"""torchrun without the forty lines that bury what a failing process has said. dist_*.sh start it."""

import sys

from torch.distributed import run  # isort: split

from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

try:
    run.main()
except ChildFailedError as error:
    rank, failure = error.get_first_failure()
    sys.exit(f'Rank {rank} has ended with exit code {failure.exitcode}; what it said stands above.')
