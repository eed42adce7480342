"""Runs torchrun for dist_*.sh and ends with one line; torchrun's forty lines would hide what the processes printed."""

import logging
import os
import re
import signal
import socket
import sys

from torch.distributed import run  # isort: split

from torch.distributed.elastic.multiprocessing import ProcessFailure, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

from beit_mm import terminal
from beit_mm.errors import UserError

ELASTIC = 'torch.distributed.elastic'
NOISE = 'death signal|closing signal'  # follows from earlier lines
if not os.environ.get('MAX_RESTARTS'):
    NOISE += r'|failed \(exitcode'  # printed below; kept for a process that is started again


def main() -> None:
    check_port()
    for name in (f'{ELASTIC}.agent.server.api', f'{ELASTIC}.multiprocessing.api'):
        logging.getLogger(name).addFilter(lambda record: not re.search(NOISE, str(record.msg)))
    # torchrun passes on the other signals that save and end a run, but SIGUSR1 would kill it.
    signal.signal(signal.SIGUSR1, lambda number, frame: os.kill(os.getpid(), signal.SIGTERM))
    try:
        run.main()
    except SignalException as error:  # all processes have ended; torchrun does not report their exit code
        sys.exit(130 if error.sigval == signal.SIGINT else os.EX_TEMPFAIL)
    except ChildFailedError as error:
        sys.exit(code_or_message(*first_failure(error)))


def check_port() -> None:
    """Refuses a PORT that another program uses, on the node that listens: torchrun could wait for that program."""
    port = os.environ.get('PORT')  # without it torchrun chooses a free port
    if port and os.environ.get('NODE_RANK', '0') == '0':
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
            try:
                probe.bind(('', int(port)))
            except (OSError, OverflowError, ValueError) as error:
                raise UserError(f'PORT={port} cannot be used ({error}); choose another: PORT=...') from None


def first_failure(error: ChildFailedError) -> tuple[int, ProcessFailure]:
    """Rank and failure of the process that failed first; in the same second a killed process comes first."""
    return min(error.failures.items(), key=lambda item: (item[1].timestamp, item[1].exitcode != -signal.SIGKILL))


def code_or_message(rank: int, failure: ProcessFailure) -> int | str:
    if failure.exitcode in (os.EX_TEMPFAIL, 130):  # ended by a signal, and the process has printed that
        return failure.exitcode
    if failure.exitcode == -signal.SIGKILL:
        return (
            f"error: rank {rank} was killed, most likely because memory ran out (the machine's, not a GPU's). "
            f'{terminal.LESS_MEMORY}, as do fewer workers: train_dataloader.num_workers=...'
        )
    return f'Rank {rank} ended with exit code {failure.exitcode}; see its message above.'


terminal.run(main)
