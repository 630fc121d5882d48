"""A bar on the terminal for work whose length is known."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

#: Called with how much is done, and with the total.
Progress = Callable[[int, int], None]


@contextmanager
def progress_bar(what: str) -> Iterator[Progress]:
    """Yield a function of (done, total); it draws only on a terminal, and only once called."""
    if not sys.stderr.isatty():
        yield lambda _done, _total: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Bar(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None, visible=False)
        yield lambda done, total: bar.update(task, completed=done, total=total, visible=True)
