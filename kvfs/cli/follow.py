"""Following a job of the server to its end, with a progress bar; Ctrl-C cancels it."""

import sys
import time
from collections.abc import Callable
from typing import Any, Final

from kvfs.cli.arguments import OnMount
from kvfs.client.control_socket import ask
from kvfs.core.sizes import format_size

#: Time between two questions to the server about its progress.
_ASK_S: Final = 0.05

#: Takes the job's state and the order. Returns the text of the bar, how much is done, and out of
#: how much (None: not known).
Shows = Callable[[dict[str, Any], dict[str, Any]], tuple[str, int, int | None]]


def follow(
    where: OnMount, verb: str, order: dict[str, Any], shows: Shows, *, quiet: bool
) -> dict[str, Any]:
    """Start the job *verb* with *order*, wait for it and return its last state."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    job = ask(where.socket, verb, {"paths": list(where.paths), **order})["job"]
    try:
        with Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TimeElapsedColumn(),
            console=Console(stderr=True),
            disable=quiet or not sys.stderr.isatty(),
        ) as bar:
            task = bar.add_task("checking", total=None)
            while not (state := ask(where.socket, "job", {"job": job}))["done"]:
                text, completed, total = shows(state, order)
                bar.update(task, description=text, completed=completed, total=total)
                time.sleep(_ASK_S)
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
