"""``kvfs record``: which blocks of a mount are used, a line a second, for ``kvfs simulate``."""

import argparse
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from kvfs.bench.replay.trace import RECORDING_FORMAT, RECORDING_KEY
from kvfs.cli.arguments import TO_OUTPUT, OnMount, locate, positive_of
from kvfs.cli.follow import ask_on
from kvfs.cli.parser import add_verb
from kvfs.client.subprocesses import held_back
from kvfs.core.errors import CommandError, UsageError
from kvfs.core.sizes import count_of, format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

#: The server counts a block's uses by the second, too (heat.py).
_EVERY_S: Final = 1.0
_DEFAULT: Final = "kvfs-recording.jsonl"
_KEY_BYTES: Final = 16

Write = Callable[[dict[str, Any]], None]


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "record",
        run,
        description="Write which blocks of MOUNT are used from now on, a line of JSON a second, "
        "until Ctrl-C: then `kvfs simulate FILE`\nsays what pools of other sizes and policies "
        "would have found. Names of blocks do not leave the server: FILE has\nnumbers for them, "
        "by a key that nobody keeps.",
        example="kvfs record /kv --seconds 3600 -o load.jsonl\n  kvfs simulate load.jsonl",
    )
    parser.add_argument("mountpoint", metavar="MOUNT")
    parser.add_argument("--seconds", metavar="N", help="end after so long")
    parser.add_argument(
        "-o",
        "--output",
        metavar="FILE",
        default=_DEFAULT,
        help=f"where to write it, - for standard output (default {_DEFAULT})",
    )


def run(args: argparse.Namespace) -> int:
    """Ask once a second what was used, and write it."""
    seconds = None if args.seconds is None else positive_of(args.seconds, "--seconds")
    where = locate([args.mountpoint])
    if where.paths != ("",):
        raise UsageError(f"{args.mountpoint} is no mount: give {where.mountpoint}")
    with _writing(args.output) as write:
        recorder = Recorder(where, write)
        with suppress(KeyboardInterrupt):  # the usual end
            recorder.follow(seconds)
        with held_back():
            recorder.write_new(is_end=True)
    print(recorder.summary(), file=sys.stderr)
    return 0


class Recorder:
    """One recording, which goes on if another server takes over."""

    def __init__(self, where: OnMount, write: Write) -> None:
        """Begin it, and write the header."""
        self._where = where
        self._write = write
        self._key = secrets.token_hex(_KEY_BYTES)
        self._begun_s = time.monotonic()
        self._uses = self._bytes = 0
        begun = self._begin()
        write(
            {
                RECORDING_KEY: RECORDING_FORMAT,
                "name": begun["name"],
                "time": begun["time"],
                "every_s": _EVERY_S,
                "capacity_bytes": begun["capacity_bytes"],
                "for_blocks_bytes": begun["for_blocks_bytes"],
            }
        )

    def _begin(self) -> dict[str, Any]:
        begun = ask_on(self._where, "record", {"key": self._key})
        self._number: int = begun["recording"]
        self._before = begun
        return begun

    def follow(self, seconds: float | None) -> None:
        """Write what is used, for *seconds* or for ever."""
        until_s = float("inf") if seconds is None else self._begun_s + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            time.sleep(min(_EVERY_S, left_s))
            if left_s > _EVERY_S:  # the last line is the end's
                with held_back():
                    self.write_new()

    def write_new(self, *, is_end: bool = False) -> None:
        """Write what was used since the last call; if *is_end*, the server then forgets it all."""
        while True:
            asked = {"recording": self._number, "end": is_end}
            told = ask_on(self._where, "recorded", asked)
            if "gone" in told:
                self._go_on()
                continue
            line = {"time": told["time"], "blocks": told["blocks"], "bytes": told["bytes"]}
            for name in ("hits", "misses"):
                line[name] = told[name] - self._before[name]
            self._before = told
            if told["lost"]:
                line["lost"] = told["lost"]
            if any(line[name] for name in line if name != "time"):
                self._uses += len(told["blocks"])
                self._bytes += told["bytes"]
                self._write(line)
            if not told["more"]:
                return

    def _go_on(self) -> None:
        """Another server has taken over, and does not know what was used just before."""
        since_s = self._before["time"]
        begun = self._begin()
        gap_s = round(max(0, begun["time"] - since_s), 3)
        self._write({"time": begun["time"], "blocks": [], "bytes": 0, "gap_s": gap_s})

    def summary(self) -> str:
        """Return how much was recorded, in a line."""
        took_s = time.monotonic() - self._begun_s
        uses = count_of(self._uses, "use")
        return f"{uses} of blocks, {format_size(self._bytes)}, in {took_s:.0f} s"


@contextmanager
def _writing(path: str) -> Iterator[Write]:
    """Yield what writes a line to *path*, whole. Raises UsageError, CommandError."""
    if path == TO_OUTPUT:
        yield lambda line: print(_text_of(line), end="", flush=True)
        return
    try:
        # Closed below: only the errors of opening it are the user's.
        file = open(path, "wb", buffering=0)  # noqa: SIM115
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror}") from None

    def write(line: dict[str, Any]) -> None:
        left = memoryview(_text_of(line).encode())
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            raise CommandError(f"cannot write {path}: {error.strerror}") from None

    with file:
        yield write


def _text_of(line: dict[str, Any]) -> str:
    return json.dumps(line, separators=(",", ":")) + "\n"
