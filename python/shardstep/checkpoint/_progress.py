"""A progress bar on rank 0, where tqdm is installed."""

import contextlib
import sys
from collections.abc import Callable, Iterator

SECONDS = 2.0  # what is done by then needs no bar


@contextlib.contextmanager
def progress_bar(rank: int, doing: str, total: int) -> "Iterator[Callable[[int], None]]":
    """Gives a function that is told of every so many bytes. On a terminal only, and only when it takes its time."""
    tqdm = None
    if rank == 0 and sys.stderr.isatty():
        with contextlib.suppress(ImportError):
            from tqdm import tqdm
    if tqdm is None:
        yield lambda n: None
        return
    with tqdm(total=total, desc=doing, unit="B", unit_scale=True, delay=SECONDS, leave=False) as bar:
        yield bar.update
