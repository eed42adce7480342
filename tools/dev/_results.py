"""What the comparisons share: figures in results.json of a folder, and trainings side by side."""

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

from beit_mm.files import atomic_file


def read_results(out: Path) -> dict[str, Any]:
    path = out / 'results.json'
    return json.loads(path.read_text()) if path.exists() else {}


def write_results(out: Path, results: dict[str, Any]) -> None:
    with atomic_file(out / 'results.json') as file:
        file.write((json.dumps(results, indent=1) + '\n').encode())


def run_all(function: Callable, calls: Iterable[tuple], jobs: int) -> None:
    """Calls a function with each tuple of arguments, `jobs` at a time; after an error or Ctrl-C none begins."""
    with ThreadPoolExecutor(jobs) as pool:
        futures = [pool.submit(function, *arguments) for arguments in calls]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
