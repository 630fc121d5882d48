"""``kvfs VERB``: find the verb, run it, turn what goes wrong into one line and an exit code.

Only the verb that was asked for is imported, so that ``kvfs --version`` and ``kvfs status``
start fast.
"""

import importlib
import os
import sys
from collections.abc import Sequence
from typing import Final

from kvfs import __version__
from kvfs.cli.failures import explain
from kvfs.cli.parser import OneLineParser

#: Each verb is the module of that name here; its summary stands here so that ``kvfs --help``
#: imports none of them.
VERBS: Final = {
    "mkfs": "make an empty pool of a drive, an image file or a directory",
    "mount": "serve a pool at a mountpoint",
    "umount": "unmount, and wait for the server's clean end",
    "status": "show what is mounted and how it does",
    "doctor": "look at a mount and its machine, and say what will hurt",
    "evict": "evict blocks now, by path, by size or by age",
    "pin": "keep files and directories from being evicted",
    "unpin": "let what was pinned be evicted again",
    "fsck": "check a pool that is not mounted, and repair it",
    "destroy": "remove a pool with every block in it",
    "bench": "measure a directory with KV-shaped loads",
    "demo": "mount a small pool and run a checked load on it",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line *argv* and return the exit code."""
    try:
        return _dispatch(sys.argv[1:] if argv is None else list(argv))
    except BrokenPipeError:
        # The reader of our output has gone (kvfs status | head): nothing to say to anybody.
        os.dup2(os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC), sys.stdout.fileno())
        return 1
    except (Exception, KeyboardInterrupt) as error:  # the command line's door
        line, exit_code = explain(error)
        print(f"kvfs: {line}", file=sys.stderr)
        return exit_code


def _dispatch(argv: list[str]) -> int:
    parser = OneLineParser(
        prog="kvfs",
        description="A flash tier for LLM KV cache that is a file system.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvfs {__version__}")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    asked = next((argument for argument in argv if not argument.startswith("-")), "")
    for verb, summary in VERBS.items():
        if verb == asked:
            importlib.import_module(f"kvfs.cli.{verb}").configure(subparsers)
        else:
            subparsers.add_parser(verb, help=summary)
    arguments = parser.parse_args(argv)
    arguments.argv = argv  # mount runs itself again
    exit_code = int(arguments.run(arguments))
    sys.stdout.flush()
    return exit_code


if __name__ == "__main__":
    sys.exit(main())
