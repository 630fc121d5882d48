"""``kvfs VERB``: find the verb, run it, turn an error into one line and an exit code.

Only the verb that was asked for is imported, so that ``kvfs --version`` and ``kvfs status``
start fast.
"""

import argparse
import importlib
import sys
from collections.abc import Collection, Sequence
from typing import Any, Final

from kvfs import __version__
from kvfs.cli.failures import HUNG_UP_EXIT, explain, stops_raise
from kvfs.cli.parser import OneLineParser
from kvfs.cli.standard_streams import TerminalGone, flush_output, make_usable, say

#: Each verb is the module of that name, but for _TOGETHER. The summaries are here, so that
#: ``kvfs --help`` imports none of the modules.
VERBS: Final = {
    "mkfs": "make an empty pool on a drive, in an image file or in a directory",
    "mount": "serve a pool at a mountpoint",
    "upgrade": "let a server of this version serve a mount, while it is in use",
    "umount": "unmount, and wait until the server has stopped",
    "status": "show mounts, usage and health",
    "report": "write one HTML file about a mount, to look at and to send",
    "top": "show hit rates and throughput, live",
    "events": "print what is stored, missing and evicted, as it happens",
    "doctor": "check a mount and its machine for problems",
    "export": "export a mount over NFS, by nfsd or NFS-Ganesha",
    "evict": "evict blocks now, by path, by size or by age",
    "quota": "show and set what each user may store",
    "drive": "show and change the drives of a mount",
    "pin": "keep files and directories from being evicted",
    "unpin": "let pinned files and directories be evicted again",
    "verify": "compare blocks with their checksums",
    "sync": "wait until what is stored now would survive a power loss",
    "warm": "read blocks into memory ahead of their use",
    "debug": "collect a support bundle, without block data",
    "fsck": "check a pool that is not mounted, and repair it",
    "destroy": "remove a pool with every block in it",
    "bench": "compare a mount with a plain directory",
    "replay": "serve a request trace from a mount and from XFS with a cleaner",
    "record": "write which blocks of a mount are used, for kvfs simulate",
    "simulate": "tell what pools of each size and policy would find of a trace or recording",
    "size": "tell what capacity, memory, cores and drive a load needs",
    "demo": "mount a small pool, load it and verify every byte",
    "install": "after `pip install`, put unit, man pages and mount.kvfs where they are looked for",
}
#: Verbs that stand beside another one, in its module.
_TOGETHER: Final = {"events": "top", "unpin": "pin", "verify": "fsck", "destroy": "mkfs"}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line *argv* and return the exit code."""
    make_usable()
    try:
        exit_code = _dispatch(sys.argv[1:] if argv is None else list(argv))
    except SystemExit as end:  # --help and --version
        if (unwritten := flush_output()) is None:
            raise
        return _unwritten(unwritten) if not end.code else int(end.code)
    except (Exception, KeyboardInterrupt) as error:  # the last handler of the command line
        unwritten = flush_output()
        if isinstance(error, BrokenPipeError) or (unwritten and isinstance(error, OSError)):
            return _unwritten(unwritten or error)
        line, exit_code = explain(error)
        say(f"kvfs: {line}")
        return exit_code
    if (unwritten := flush_output()) is not None:
        return _unwritten(unwritten)
    return exit_code


def _unwritten(error: OSError) -> int:
    if isinstance(error, TerminalGone):
        return HUNG_UP_EXIT
    # If the reader of our output has gone (kvfs status | head), there is nobody to tell.
    if not isinstance(error, BrokenPipeError):
        say(f"kvfs: cannot write the output: {error.strerror}")
    return 1


def parser_of(verbs: Collection[str]) -> OneLineParser:
    """Return the parser of the command line, which knows the flags of *verbs* alone.

    Of other verbs it knows only name and summary.
    """
    parser = OneLineParser(
        prog="kvfs",
        description="A flash tier for LLM KV cache that is a file system.",
        epilog="example:\n  kvfs help mount",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("-V", "--version", action="version", version=f"kvfs {__version__}")
    subparsers = parser.add_subparsers(metavar="VERB", required=True)
    for verb, summary in VERBS.items():
        if verb in verbs:
            configure_verb(verb, subparsers)
        else:
            subparsers.add_parser(verb, help=summary)
    subparsers.add_parser("help", help="show the help of a verb")
    return parser


def configure_verb(verb: str, subparsers: "argparse._SubParsersAction[Any]") -> None:
    """Import the module of *verb*, and have it add the verb's parser."""
    home = importlib.import_module(f"kvfs.cli.{_TOGETHER.get(verb, verb)}")
    getattr(home, f"configure_{verb}" if verb in _TOGETHER else "configure")(subparsers)


def _dispatch(argv: list[str]) -> int:
    if not argv:
        argv = ["--help"]
    if argv[:1] == ["help"]:
        argv = [*argv[1:], "--help"]
    asked = next((argument for argument in argv if not argument.startswith("-")), "")
    parser = parser_of({asked})
    parser.refuse_unknown_flags(argv)
    arguments = parser.parse_args(argv)
    arguments.argv = argv  # kvfs mount runs this command line again
    if getattr(arguments, "foreground", False):  # SIGTERM is the normal end of a server
        return int(arguments.run(arguments))
    with stops_raise():
        return int(arguments.run(arguments))


if __name__ == "__main__":
    sys.exit(main())
