"""``kvfs pin``, ``kvfs unpin``: keep files and directories from being evicted, and let them go."""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import OnMount, add_match, locate, nothing_matches
from kvfs.cli.follow import follow, reasons
from kvfs.cli.parser import add_verb
from kvfs.client.control_socket import LINE_MAX_BYTES, ask
from kvfs.core.errors import UsageError
from kvfs.core.shown_names import printable
from kvfs.core.sizes import count_of, format_size

if TYPE_CHECKING:
    from kvfs.cli.parser import Subparsers

#: Left in a request for what is not a path.
_FRAME_BYTES: Final = 1024


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "pin",
        run,
        description="Keep files at PATHs, and everything below directories, from being evicted: "
        "the same as\n`setfattr -n user.kvfs.pin -v 1 PATH`. With --match only what matches: any "
        "number of files, each with a pin of its own.\nThe setting pin_share limits all pins "
        "together; the answer says what was not pinned and why. Shows what was pinned and how\n"
        "much all pins hold; with --list all pins of the mount at PATH. Ends with exit code 20 if "
        "nothing matches.",
        example="kvfs pin /kv/system-prompts\n  kvfs pin /kv --match 'lmcache/*Llama-3.1-8B@*'\n  "
        "kvfs pin --list /kv",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    add_match(parser)
    parser.add_argument("--list", action="store_true", help="show what is pinned; change nothing")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Pin, and print the new pins; or print all pins."""
    if args.list and args.match is not None:
        raise UsageError("--list shows all pins; leave out --match")
    where = locate(args.paths)
    if args.list:
        show(all_pins(where.socket), as_json=args.json)
    elif args.match is not None:
        done = pin_by_job(where, "pin", args)
        if "beyond pin_share" in done["kept"]:
            sys.stdout.flush()
            raise UsageError(f"some cannot be pinned ({reasons(done)}): raise pin_share")
    else:
        show(ask_for_all(where, "pin"), as_json=args.json)
    return 0


def pin_by_job(where: OnMount, verb: str, args: argparse.Namespace) -> dict[str, Any]:
    """Have the server pin or unpin, step by step; print what it did, and return it."""
    order = {"match": args.match, "all": getattr(args, "all", False)}
    done = follow(where, verb, order, _shown, quiet=args.json)
    pinned_bytes = ask(where.socket, "pins", {"after": (1 << 62) - 1})["pinned_bytes"]
    if args.json:
        answer = {"mountpoint": where.mountpoint, **done, "pinned_bytes": pinned_bytes}
        print(json.dumps(answer, indent=2))
    else:
        print(_told(done, verb), end="")
        print(f"; {format_size(pinned_bytes)} pinned in all")
    if args.match is not None and not done["looked_at"]:
        raise nothing_matches(args)
    return done


def _told(done: dict[str, Any], verb: str) -> str:
    counts = [count_of(done["files"], "file")]
    if done["directories"]:
        counts.append(count_of(done["directories"], "directory", "directories"))
    if done["others"]:
        counts.append(count_of(done["others"], "other"))
    kept = sum(done["kept"].values())
    more = f"; {kept:,} as before: {reasons(done)}" if kept else ""
    return f"{', '.join(counts)} {verb}ned, {format_size(done['bytes'])}{more}"


def _shown(state: dict[str, Any], _order: dict[str, Any]) -> tuple[str, int, int | None]:
    return f"{state['looked_at']:,} done", 0, None


def ask_for_all(where: OnMount, verb: str) -> dict[str, Any]:
    """Ask for *verb* on all paths, in as many requests as they take; return all answers in one.

    If it takes several, it first looks whether all paths exist, so that with one missing nothing is
    changed.
    """
    requests = list(_requests(where.paths))
    for paths in requests if len(requests) > 1 else ():
        ask(where.socket, verb, {"paths": paths, "dry_run": True})
    pins: dict[str, int] = {}
    pinned_bytes = 0
    for paths in requests:
        told = ask(where.socket, verb, {"paths": paths})
        pins.update(told["pins"])
        pinned_bytes = told["pinned_bytes"]
    return {"pins": pins, "pinned_bytes": pinned_bytes}


def _requests(paths: Sequence[str]) -> Iterator[list[str]]:
    """Yield *paths* in lists that each fit into a request."""
    part, part_bytes = list[str](), _FRAME_BYTES
    for path in paths:
        path_bytes = len(json.dumps(path)) + 2
        if part and part_bytes + path_bytes > LINE_MAX_BYTES:
            yield part
            part, part_bytes = [], _FRAME_BYTES
        part.append(path)
        part_bytes += path_bytes
    yield part


def all_pins(socket: str) -> dict[str, Any]:
    """Return all pins of the mount behind *socket*, which come in several replies."""
    pins: dict[str, int] = {}
    after: int | None = 0
    while after is not None:
        told = ask(socket, "pins", {"after": after})
        pins.update(told["pins"])
        after = told.get("next")
    return {"pins": pins, "pinned_bytes": told["pinned_bytes"]}


def show(pinned: dict[str, Any], *, as_json: bool) -> None:
    """Print pins, each with its bytes when it was set, and the sum that all hold now."""
    if as_json:
        print(json.dumps(pinned, indent=2))
        return
    for path, size_bytes in sorted(pinned["pins"].items()):
        print(f"{format_size(size_bytes):>12}  {printable(path)}")
    print(f"{format_size(pinned['pinned_bytes']):>12}  pinned")


def configure_unpin(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "unpin",
        run_unpin,
        description="Remove the pin of PATHs; a PATH in a pinned directory becomes an exception to "
        "its pin. With --match, remove the pin\nof each one that matches. With --all remove every "
        "pin of the mount at PATH. Pins of the settings file stay.\nEnds with exit code 20 if "
        "nothing matches.",
        example="kvfs unpin /kv/system-prompts\n  kvfs unpin /kv --match 'lmcache/*@8@*'\n  "
        "kvfs unpin --all /kv",
    )
    parser.add_argument("paths", metavar="PATH", nargs="+")
    add_match(parser)
    parser.add_argument("--all", action="store_true", help="all pins of the mount at PATH")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run_unpin(args: argparse.Namespace) -> int:
    """Remove pins, and print what is still pinned."""
    if args.all and args.match is not None:
        raise UsageError("--all is every pin; leave out --match")
    where = locate(args.paths)
    if args.all or args.match is not None:
        pin_by_job(where, "unpin", args)
    else:
        ask_for_all(where, "unpin")
        show(all_pins(where.socket), as_json=args.json)
    return 0
