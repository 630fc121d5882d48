"""``kvfs report``: one HTML file about a mount, to look at and to send."""

import argparse
import contextlib
import os
import socket
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import TO_OUTPUT, size_of
from kvfs.cli.failures import need_root
from kvfs.cli.parser import add_verb
from kvfs.core.errors import ServeFailed, UsageError
from kvfs.core.sizes import DAY_S

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers
    from kvfs.cli.report_document import ReportFacts

_DEFAULT: Final = "kvfs-report.html"
#: A drive that lasts longer is not worn out by this load.
_FOREVER_DAYS: Final = 36_500


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "report",
        run,
        description="Write one HTML file about MOUNT: hit rate and bytes over the last day, the "
        "hit rate of other sizes, ages of\nblocks, directories, durability, server, drive, and "
        "the findings of kvfs doctor. It needs no network and no script.\nIt holds names of "
        "directories and models, and none of blocks.",
        example="kvfs report /kv\n  kvfs report /kv -o /var/www/kv.html --endurance 7P",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=_DEFAULT,
        help=f"where to write it, - for standard output (default {_DEFAULT})",
    )
    parser.add_argument(
        "--endurance",
        metavar="SIZE",
        help="what the maker promises that may be written to the drive, e.g. 7P: then the day is "
        "told on which it is worn out",
    )


def run(args: argparse.Namespace) -> int:
    """Ask the server and the doctor, and write it."""
    need_root("kvfs report")
    endurance_bytes = size_of(args.endurance, "--endurance")
    from kvfs.cli.report_document import document

    text = document(_facts(args.mountpoint, endurance_bytes))
    if args.output == TO_OUTPUT:
        print(text, end="")
        return 0
    _write(args.output, text)
    print(f"{args.output}: {len(text) / 1024:.0f} KiB")
    return 0


def _facts(path: str, endurance_bytes: int | None) -> "ReportFacts":
    """Return what is known of the mount at *path*. Raises what ``kvfs status`` does."""
    from kvfs.cli.doctor import as_json
    from kvfs.cli.report_document import ReportFacts
    from kvfs.cli.status import health_of
    from kvfs.client.servers import status_of
    from kvfs.doctor.examine import examine
    from kvfs.doctor.gather import gather

    status = status_of(path)
    if status.get("device_lost"):
        raise ServeFailed(f"{path}: the device is lost: {status['device_lost']}")
    findings = as_json(examine(gather(path, [], [])))["findings"]
    return ReportFacts(
        status=status,
        history=_history(str(status["name"])),
        findings=findings,
        health=health_of(status),
        host=socket.gethostname(),
        made=time.strftime("%Y-%m-%d %H:%M %Z"),
        worn_out=worn_out(status["cache"].get("device") or {}, endurance_bytes, time.time()),
    )


def _history(name: str) -> Mapping[str, Any]:
    """Return what the server remembers; nothing if it is older than this command."""
    from kvfs.client.control_socket import ask
    from kvfs.core.mount_name import socket_path

    with contextlib.suppress(UsageError):
        return ask(socket_path(name), "history")
    return {}


def worn_out(device: Mapping[str, Any], endurance_bytes: int | None, now_s: float) -> str:
    """Return on which day the drive is worn out if it goes on as now; "" if that is not known."""
    rate, left = device.get("write_rate"), device.get("endurance_left")
    if endurance_bytes is None or rate is None or left is None:
        return ""
    days = left * endurance_bytes / rate / DAY_S if rate > 0 else _FOREVER_DAYS
    if days >= _FOREVER_DAYS:
        return "not in a hundred years, at the present rate"
    day = time.strftime("%Y-%m-%d", time.gmtime(now_s + days * DAY_S))
    return f"in {days:,.0f} days, on {day}, at the present rate"


def _write(path: str, text: str) -> None:
    """Put *text* in place of the file *path*; nobody sees half of it. Raises UsageError."""
    new = f"{path}.{os.getpid()}.new"
    try:
        with open(new, "x", encoding="utf-8") as file:
            file.write(text)
        os.replace(new, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise UsageError(f"-o {path}: {error.strerror}") from None
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(new)
        raise
