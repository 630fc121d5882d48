"""Following work to its end: a bar on the terminal; a job of the server, which Ctrl-C cancels."""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, Protocol

from kvfs.cli.arguments import OnMount
from kvfs.client.control_socket import ServerGone, ask
from kvfs.core.errors import ServeFailed
from kvfs.core.sizes import format_size

#: Time between two questions to the server about its progress.
ASK_S: Final = 0.05

#: After this time without an answer the mount counts as dead.
_TAKE_OVER_S: Final = 5.0

#: Takes the job's state and the order. Returns the text of the bar, how much is done, and out of
#: how much (None: not known).
Shows = Callable[[dict[str, Any], dict[str, Any]], tuple[str, int, int | None]]


def ask_on(where: OnMount, do: str, args: dict[str, Any]) -> dict[str, Any]:
    """Ask the server, or the one that takes over if it dies meanwhile. Raises what ``ask`` does."""
    until_s = time.monotonic() + _TAKE_OVER_S
    while True:
        try:
            return ask(where.socket, do, args)
        except (ServerGone, ServeFailed):
            if time.monotonic() >= until_s:
                raise
        time.sleep(ASK_S)


class ProgressBar(Protocol):
    """Told how much is done, out of how much (None: not known), and what to show beside the bar."""

    def __call__(self, done: int, total: int | None, text: str = "") -> None: ...


@contextmanager
def progress_bar(what: str, *, quiet: bool = False, counted: bool = False) -> Iterator[ProgressBar]:
    """Yield what draws a bar for *what*: only on a terminal, from its first call on.

    *counted*: with the numbers and the time that is left, and gone at the end.
    """
    if quiet or not sys.stderr.isatty():
        yield lambda _done, _total, _text="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    rest = (MofNCompleteColumn(), TimeRemainingColumn()) if counted else (TimeElapsedColumn(),)
    columns = (TextColumn("{task.description}"), BarColumn(), *rest)
    with Progress(*columns, console=Console(stderr=True), transient=counted) as bar:
        task = bar.add_task(what, total=None, visible=False)

        def show(done: int, total: int | None, text: str = "") -> None:
            bar.update(task, completed=done, total=total, description=text or what, visible=True)

        yield show


def follow(
    where: OnMount, verb: str, order: dict[str, Any], shows: Shows, *, quiet: bool
) -> dict[str, Any]:
    """Start the job *verb* with *order*, wait for it and return its last state."""
    job = ask(where.socket, verb, {"paths": list(where.paths), **order})["job"]
    try:
        with progress_bar("checking", quiet=quiet) as show:
            while not (state := ask(where.socket, "job", {"job": job}))["done"]:
                text, done, total = shows(state, order)
                show(done, total, text)
                time.sleep(ASK_S)
    except KeyboardInterrupt:
        ask(where.socket, "cancel", {"job": job})
        raise
    return state


def reasons(done: dict[str, Any]) -> str:
    """Return why some stay as they are, with number and size: ``leased 30 (300 MiB)``."""
    sizes = done.get("kept_bytes", {})
    return ", ".join(
        f"{why} {count:,} ({format_size(sizes.get(why, 0))})"
        for why, count in sorted(done["kept"].items())
    )
