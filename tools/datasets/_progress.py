"""How far a preparation of many images is: a line now and then, with rate and time left, for terminals and logs."""

import sys
import time
from collections.abc import Iterable, Iterator
from datetime import timedelta
from typing import TypeVar

T = TypeVar('T')
PERIOD = 10  # seconds between two lines


def track(items: Iterable[T], total: int, done: int = 0) -> Iterator[T]:
    """Passes items on, one for each image, and prints how far it is.

    Args:
        items: there are `total` - `done` of them.
        total: images.
        done: images that earlier runs have done.
    """
    before, shown = done, time.monotonic()
    for item in items:
        yield item
        done, now = done + 1, time.monotonic()
        if now - shown >= PERIOD or done == total:
            rate = (done - before) / max(now - shown, 1e-9)  # of late: what is skipped at the start takes no time
            left = timedelta(seconds=round((total - done) / rate))
            print(f'{done:,} of {total:,} images, {rate:,.0f}/s, {left} left', file=sys.stderr, flush=True)
            before, shown = done, now
