"""``kvfs simulate``: what pools of each size and policy would find of a trace, without files."""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from kvfs.cli.arguments import percent_of, shares_of, words_of
from kvfs.cli.parser import add_verb
from kvfs.cli.replay import POLICIES
from kvfs.cli.tables import LEAST_COLUMNS, Column, headed, table_lines
from kvfs.core.errors import UsageError

if TYPE_CHECKING:
    from kvfs.bench.output import Screen
    from kvfs.bench.replay.trace import Request
    from kvfs.bench.simulate.served import Outcome
    from kvfs.cli.parser import Subparsers
    from kvfs.core.admission import Hint

#: What no mount has yet, beside the policies that it has.
_GATE: Final = "gate"
_BEST: Final = "best"
_KNOWN: Final = (*POLICIES, _GATE, _BEST)
_SHARES: Final = "1%,2%,5%,10%,20%"
#: Workloads made by rule (synthetic.py), here so that the parser starts fast.
MADE: Final = ("scan", "loop", "drift")
#: Goes up when a field of the JSON changes its meaning or is removed.
_FORMAT: Final = 1


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "simulate",
        run,
        description="Serve a request trace from pools that exist in memory only, by the code of a "
        "mount's policies, and show\nwhat they find and write. gate and best are no policies of a "
        "mount: gate judges which blocks are worth a\nwrite, best knows the future "
        "(docs/simulate.md). Needs neither a mount nor root.",
        example="kvfs simulate trace.jsonl --blocks-share 2%,10% --policies lru,gate,best",
    )
    add, default = parser.add_argument, "(default %(default)s)"
    add("trace", metavar="TRACE", nargs="?", help="a file as for `kvfs replay`")
    add("--synthetic", choices=MADE, help="a workload made by rule, in place of TRACE")
    add(
        "--blocks-share",
        metavar="SHARES",
        default=_SHARES,
        help=f"sizes of the pool, in percent of the trace's blocks (default {_SHARES})".replace(
            "%", "%%"
        ),
    )
    add("--policies", metavar="POLICIES", default=",".join(_KNOWN), help=default)
    add(
        "--hints",
        metavar="PERCENT",
        help="tell gate for each prompt whether its session goes on; so many are right",
    )
    add("--shuffle", action="store_true", help="serve the prompts in an order by chance")
    add("--requests", metavar="N", type=int, help="only the first N of the trace")
    add("--json", metavar="FILE", help="write everything to FILE, or - for stdout")
    add("--plot", metavar="FILE", help="write a picture (SVG) to FILE")


def run(args: argparse.Namespace) -> int:
    """Serve the trace from each pool, and show and write what was found."""
    from kvfs.bench.output import Screen, write_file
    from kvfs.bench.replay.trace import footprint
    from kvfs.bench.simulate.picture import picture_of
    from kvfs.bench.simulate.synthetic import hints_of

    shares, policies = shares_of(args.blocks_share, "--blocks-share"), _policies(args.policies)
    right = None if args.hints is None else percent_of(args.hints, "--hints") / 100
    with Screen(args.json, args.plot, steps="prompts") as screen:
        requests, name = _requests(args)
        blocks = footprint(requests)
        rooms = [max(1, int(blocks * share / 100)) for share in shares]
        hints = [] if right is None else hints_of(requests, right)
        screen.begin(len(requests) * len(policies) * len(rooms))
        found = {
            policy: [_outcome(policy, requests, room, hints, screen) for room in rooms]
            for policy in policies
        }
        screen.write_report(_report(requests, blocks, shares, rooms, found, args))
        tables = sys.stderr if args.json == "-" else sys.stdout
        asked = sum(len(request.blocks) for request in requests)
        print(
            headed(f"{name}: {len(requests):,} requests, {asked:,} accesses to {blocks:,} blocks"),
            "found in a prefix / written, % of all accesses",
            "",
            *_lines(shares, rooms, found),
            *_behind_lines(shares, rooms, found),
            sep="\n",
            file=tables,
        )
        if args.plot is not None:
            write_file(args.plot, picture_of(f"kvfs simulate: {name}", shares, found))
    return 0


def _requests(args: argparse.Namespace) -> "tuple[list[Request], str]":
    """Return the requests, and what to call them. Raises UsageError, TraceUnreadable."""
    from kvfs.bench.replay.trace import read_trace
    from kvfs.bench.simulate.synthetic import SYNTHETIC, shuffled

    if (args.trace is None) == (args.synthetic is None):
        raise UsageError("give TRACE or --synthetic, one of both")
    if args.requests is not None and args.requests < 1:
        raise UsageError("--requests must be at least 1")
    if args.trace is None:
        requests, name = SYNTHETIC[args.synthetic]()[: args.requests], args.synthetic
    else:
        requests, name = read_trace(args.trace, args.requests), os.path.basename(args.trace)
    return (shuffled(requests), f"{name}, shuffled") if args.shuffle else (requests, name)


def _policies(text: str) -> list[str]:
    policies = list(dict.fromkeys(words_of(text)))
    if not policies:
        raise UsageError("--policies: give at least one")
    if unknown := [each for each in policies if each not in _KNOWN]:
        raise UsageError(f"--policies: {unknown[0]!r} is none of {', '.join(_KNOWN)}")
    return policies


def _outcome(
    policy: str,
    requests: "Sequence[Request]",
    room: int,
    hints: "Sequence[Hint]",
    screen: "Screen",
) -> "Outcome":
    from kvfs.bench.simulate.optimum import best_possible
    from kvfs.bench.simulate.served import policy_for, served

    screen.describe(f"{policy}, {room:,} blocks")
    if policy == _BEST:
        return best_possible(requests, room, screen.count)
    return served(
        requests,
        policy_for(policy, room),
        room,
        hints=hints if policy == _GATE else (),
        count=screen.count,
    )


def _lines(
    shares: Sequence[float], rooms: Sequence[int], found: "dict[str, list[Outcome]]"
) -> Iterator[str]:
    """Yield the table: a row a size, a column a policy."""
    columns = [Column(text, right=True) for text in ("pool", "blocks", *found)]
    rows = [
        (
            f"{share:g} %",
            f"{room:,}",
            *(f"{one[at].prefix_hits:.1f} / {one[at].written:.0f}" for one in found.values()),
        )
        for at, (share, room) in enumerate(zip(shares, rooms, strict=True))
    ]
    return table_lines(columns, rows, LEAST_COLUMNS)


def _behind_lines(
    shares: Sequence[float], rooms: Sequence[int], found: "dict[str, list[Outcome]]"
) -> Iterator[str]:
    """Yield what a tier behind would add with the first policy of a mount: a row a size."""
    policy = next((each for each in found if each != _BEST), None)
    if policy is None:
        return
    outcomes = found[policy]
    yield ""
    yield headed(f"A tier behind a pool with {policy}, by how long it keeps what is evicted")
    yield "adds to what is found in a prefix, and is written, % of all accesses"
    yield ""
    names = ("pool", "blocks", *outcomes[0].behind, "written")
    rows = [
        (
            f"{share:g} %",
            f"{room:,}",
            *(f"{gain:.1f}" for gain in one.behind.values()),
            f"{one.evicted:.0f}",
        )
        for share, room, one in zip(shares, rooms, outcomes, strict=True)
    ]
    yield from table_lines([Column(text, right=True) for text in names], rows, LEAST_COLUMNS)


def _report(
    requests: "Sequence[Request]",
    blocks: int,
    shares: Sequence[float],
    rooms: Sequence[int],
    found: "dict[str, list[Outcome]]",
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Return the same as numbers; rates are shares of all accesses."""
    return {
        "format": _FORMAT,
        "trace": args.trace or args.synthetic,
        "is_shuffled": args.shuffle,
        "hints": args.hints,
        "requests": len(requests),
        "accesses": sum(len(request.blocks) for request in requests),
        "blocks": blocks,
        "pools": [
            {
                "blocks_share": share / 100,
                "blocks": room,
                "policies": {
                    policy: {
                        "hit_rate": round(one[at].prefix_hits / 100, 6),
                        "written": round(one[at].written / 100, 6),
                        "tier_behind": {
                            age: round(gain / 100, 6) for age, gain in one[at].behind.items()
                        },
                        "evicted": round(one[at].evicted / 100, 6),
                    }
                    for policy, one in found.items()
                },
            }
            for at, (share, room) in enumerate(zip(shares, rooms, strict=True))
        ],
    }
