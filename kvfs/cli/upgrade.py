"""``kvfs upgrade``: let a server of this version take the place of the one that serves a mount."""

import argparse
import json
import time
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import OnMount, locate
from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.client.control_socket import ask
from kvfs.client.subprocesses import program_again
from kvfs.core.errors import CommandError, NotMounted, ServeFailed

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

#: The new server imports all that it needs first, on a machine that may be loaded.
_WAIT_S: Final = 90.0
_LOOK_S: Final = 0.05


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "upgrade",
        run,
        description="Replace the server of MOUNTPOINT by one of this command's version.\n"
        "No call on the mount fails, and open files stay open: callers wait for a moment. The new "
        "server is asked first whether it\ncan go on with the pool and the open files; if it "
        "cannot, or fails, the server before serves on.",
        example="kvfs upgrade /kv",
    )
    parser.add_argument("mountpoint", metavar="MOUNTPOINT")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Ask for it, and wait until the new server answers."""
    need_root("kvfs upgrade")
    where = locate([args.mountpoint])
    before = ask(where.socket, "status")
    after = replaced(where, before, "upgrade", {})
    if after["upgrades"] == before["upgrades"]:
        raise ServeFailed(
            f"the new server failed, and version {after['version']} serves {where.mountpoint} "
            "again; its log says why"
        )
    if args.json:
        names = ("mountpoint", "version", "server_pid", "upgrades", "longest_pause_s")
        told = {name: after[name] for name in names}
        print(json.dumps({**told, "version_before": before["version"]}, indent=2))
    else:
        versions = f"version {after['version']} follows {before['version']}"
        print(f"{versions}: process {after['server_pid']} serves {where.mountpoint}")
    return 0


def replaced(
    where: OnMount, before: dict[str, Any], verb: str, args: dict[str, Any]
) -> dict[str, Any]:
    """Ask for *verb*, which has a server of this version take over; return what that one says.

    *before* is the status of the server that is asked. Raises CommandError if it serves on.
    """
    command, environment = program_again("kvfs.cli.main")
    wanted = {"program": command, "python_path": environment.get("PYTHONPATH", "")}
    try:
        told = ask(where.socket, verb, {**args, **wanted}, timeout_s=_WAIT_S)
    except CommandError:
        # The server answers only if it goes on serving. If it was replaced, the socket is closed.
        if (now := _status(where.socket)) is not None and now["server_pid"] == before["server_pid"]:
            raise
    else:
        raise ServeFailed(str(told.get("why")))
    return _next(where, before["server_pid"])


def _next(where: OnMount, before_pid: int) -> dict[str, Any]:
    """Return the status of the server that comes after *before_pid*. Raises ServeFailed."""
    until_s = time.monotonic() + _WAIT_S
    while time.monotonic() < until_s:
        now = _status(where.socket)
        if now is not None and now["server_pid"] != before_pid:
            return now
        time.sleep(_LOOK_S)
    raise ServeFailed(f"no server of {where.mountpoint} answers within {_WAIT_S:g} s")


def _status(socket: str) -> dict[str, Any] | None:
    """Return what the server says now; None while there is none."""
    try:
        return ask(socket, "status")
    except (NotMounted, ServeFailed):
        return None
