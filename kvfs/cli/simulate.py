"""``kvfs simulate``: what pools of each size and policy would find of a load, without files.

The load is a trace of prompts, or a recording of a mount (`kvfs record`), which knows no prompts.
"""

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvfs.cli.arguments import percent_of, shares_of, words_of
from kvfs.cli.parser import add_verb
from kvfs.cli.replay import POLICIES
from kvfs.cli.simulate_budgets import (
    Ask,
    Budgeted,
    add_budgets,
    asked_budgets,
    budget_lines,
    budget_report,
)
from kvfs.cli.tables import LEAST_COLUMNS, Column, headed, table_lines
from kvfs.core.errors import UsageError
from kvfs.core.sizes import count_of, format_size

if TYPE_CHECKING:
    from kvfs.bench.output import Screen
    from kvfs.bench.replay.trace import Request
    from kvfs.bench.simulate.loads import Recording
    from kvfs.bench.simulate.served import Outcome
    from kvfs.cli.parser import Subparsers
    from kvfs.core.admission import Hint

#: What takes hints, of the policies that a mount has; and what no mount has.
_GATE: Final = "gate"
_BEST: Final = "best"
_KNOWN: Final = (*POLICIES, _BEST)
_SHARES: Final = "1%,2%,5%,10%,20%"
#: Workloads made by rule (loads.py), here so that the parser starts fast.
MADE: Final = ("scan", "loop", "drift")
#: Goes up when a field of the JSON changes its meaning or is removed.
_FORMAT: Final = 1


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "simulate",
        run,
        description="Serve a request trace, or what `kvfs record` wrote, from pools that exist in "
        "memory only, by the code of a\nmount's policies, and show what they find and write. gate "
        "judges which blocks are worth a write; best\nis no policy of a mount: it "
        "knows the future (docs/simulate.md). Needs neither a mount nor root.",
        example="kvfs simulate trace.jsonl --blocks-share 2%,10% --policies lru,gate,best",
    )
    add, default = parser.add_argument, "(default %(default)s)"
    add("trace", metavar="TRACE", nargs="?", help="a file as for `kvfs replay`, or a recording")
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
    add_budgets(add)
    add("--shuffle", action="store_true", help="serve the prompts in an order by chance")
    add("--requests", metavar="N", type=int, help="only the first N of the trace")
    add("--json", metavar="FILE", help="write everything to FILE, or - for stdout")
    add("--plot", metavar="FILE", help="write a picture (SVG) to FILE")


class _Load(NamedTuple):
    """The requests of one load, and its name in the output."""

    requests: "list[Request]"
    name: str
    recording: "Recording | None" = None

    @property
    def accesses(self) -> int:
        """How many blocks are asked for."""
        if self.recording is not None:
            return self.recording.uses
        return sum(len(request.blocks) for request in self.requests)

    @property
    def one_in(self) -> int:
        """One block in so many is served (recording.py)."""
        return 1 if self.recording is None else self.recording.one_in

    @property
    def found(self) -> str:
        """What a hit is."""
        return "found in a prefix" if self.recording is None else "found"

    @property
    def of(self) -> str:
        """What rates are shares of."""
        return "accesses" if self.recording is None else "uses"


class _Size(NamedTuple):
    """A pool: its size in percent of the load's blocks, in blocks, and as it is shown."""

    share: float
    blocks: int
    shown: str


def run(args: argparse.Namespace) -> int:
    """Serve the load from each pool, and show and write what was found."""
    from kvfs.bench.output import Screen, write_file
    from kvfs.bench.replay.trace import footprint
    from kvfs.bench.simulate.loads import hints_of
    from kvfs.bench.simulate.picture import picture_of

    shares, policies = shares_of(args.blocks_share, "--blocks-share"), _policies(args.policies)
    right = None if args.hints is None else percent_of(args.hints, "--hints") / 100
    with Screen(args.json, args.plot, steps="prompts") as screen:
        load = _load(args)
        blocks = footprint(load.requests) * load.one_in
        sizes = _sizes(shares, blocks, load.recording)
        hints = [] if right is None else hints_of(load.requests, right)
        ask = _budgets(args, load, policies)
        runs = len(policies) + len(ask.a_day_bytes)
        screen.begin(len(load.requests) * runs * len(sizes))
        found = {
            policy: [
                _outcome(policy, load, min(size.blocks, blocks), hints, screen) for size in sizes
            ]
            for policy in policies
        }
        budgeted = [
            [
                ask.of(
                    size.shown,
                    _outcome(
                        _GATE, load, min(size.blocks, blocks), hints, screen, ask, a_day_bytes
                    ),
                    load.accesses,
                    a_day_bytes,
                )
                for a_day_bytes in ask.a_day_bytes
            ]
            for size in sizes
        ]
        screen.write_report(_report(load, blocks, sizes, found, args, budgeted))
        tables = sys.stderr if args.json == "-" else sys.stdout
        print(
            *_heading(load, blocks),
            "",
            *_lines(sizes, found),
            *_behind_lines(load, sizes, found),
            *budget_lines(ask, budgeted, f"{load.found} / written, % of all {load.of}"),
            sep="\n",
            file=tables,
        )
        if args.plot is not None:
            title = f"kvfs simulate: {load.name}"
            shown = [size.shown for size in sizes]
            text = picture_of(title, shown, found, found=f"blocks {load.found}", of=load.of)
            write_file(args.plot, text)
    return 0


def _budgets(args: argparse.Namespace, load: _Load, policies: Sequence[str]) -> Ask:
    """Return which budgets of writes the gate gets. Raises UsageError."""
    if args.write_budget is not None and _GATE not in policies:
        raise UsageError(f"--write-budget: {_GATE} alone has one, and --policies lacks it")
    block_bytes = None if load.recording is None else load.recording.block_bytes
    span_s = load.requests[-1].at_s - load.requests[0].at_s
    return asked_budgets(args, block_bytes, span_s)


def _load(args: argparse.Namespace) -> _Load:
    """Return what to serve. Raises UsageError, TraceUnreadable."""
    from kvfs.bench.replay.trace import read_trace
    from kvfs.bench.simulate.loads import SYNTHETIC, recording_at, shuffled

    if (args.trace is None) == (args.synthetic is None):
        raise UsageError("give TRACE or --synthetic, one of both")
    if args.requests is not None and args.requests < 1:
        raise UsageError("--requests must be at least 1")
    if args.trace is None:
        load = _Load(SYNTHETIC[args.synthetic]()[: args.requests], args.synthetic)
    else:
        name, recording = os.path.basename(args.trace), recording_at(args.trace, args.requests)
        if recording is None:
            load = _Load(read_trace(args.trace, args.requests), name)
        elif args.hints is not None:
            raise UsageError("--hints: a recording does not know when a session goes on")
        else:
            load = _Load(recording.requests, name, recording)
    if args.shuffle:
        load = load._replace(requests=shuffled(load.requests), name=f"{load.name}, shuffled")
    return load


def _sizes(shares: Sequence[float], blocks: int, recording: "Recording | None") -> list[_Size]:
    """Return the pools of a load with so many *blocks*: of a recording also the mount's own."""
    sizes = [_Size(share, max(1, int(blocks * share / 100)), f"{share:g} %") for share in shares]
    if recording is not None:
        share, room = 100 * recording.room / blocks, max(1, recording.room)
        sizes.append(_Size(share, room, f"{share:.3g} % (now)"))
        sizes.sort(key=lambda size: size.blocks)
    return sizes


def _heading(load: _Load, blocks: int) -> Iterator[str]:
    """Yield what was asked for, and what is counted."""
    recording = load.recording
    if recording is None:
        requests = f"{len(load.requests):,} requests"
        yield headed(f"{load.name}: {requests}, {load.accesses:,} accesses to {blocks:,} blocks")
    else:
        took_s = load.requests[-1].at_s
        uses = f"{count_of(load.accesses, 'use')} of {count_of(blocks, 'block')}"
        size = format_size(recording.block_bytes)
        yield headed(f"{load.name}: {uses} of {size} in {took_s:,.0f} s")
        if recording.one_in > 1:
            yield f"by a sample: one block in {recording.one_in}"
        asked = f"{count_of(recording.hits, 'hit')} and {recording.misses:,} misses"
        yield f"the mount has room for {count_of(recording.room, 'block')}; it counted {asked}"
        if recording.lost:
            yield f"{count_of(recording.lost, 'use')} more came too fast, and are not in it"
        if recording.gaps_s:
            yield f"it lacks {recording.gaps_s:.1f} s in which the server was replaced"
    yield f"{load.found} / written, % of all {load.of}"


def _policies(text: str) -> list[str]:
    policies = list(dict.fromkeys(words_of(text)))
    if not policies:
        raise UsageError("--policies: give at least one")
    if unknown := [each for each in policies if each not in _KNOWN]:
        raise UsageError(f"--policies: {unknown[0]!r} is none of {', '.join(_KNOWN)}")
    return policies


def _outcome(
    policy: str,
    load: _Load,
    blocks: int,
    hints: "Sequence[Hint]",
    screen: "Screen",
    ask: Ask | None = None,
    a_day_bytes: int = 0,
) -> "Outcome":
    from kvfs.bench.simulate.found import best_possible
    from kvfs.bench.simulate.served import policy_for, served

    screen.describe(f"{policy}, {blocks:,} blocks")
    room = max(1, blocks // load.one_in)
    if policy == _BEST:
        found = best_possible(load.requests, room, screen.count)
    else:
        found = served(
            load.requests,
            policy_for(policy, room, a_day_bytes // load.one_in),
            room,
            hints=hints if policy == _GATE else (),
            block_bytes=0 if ask is None else ask.block_bytes,
            count=screen.count,
        )
    return found if load.recording is None else load.recording.of_all(found)


def _lines(sizes: Sequence[_Size], found: "dict[str, list[Outcome]]") -> Iterator[str]:
    """Yield the table: a row a size, a column a policy."""
    columns = [Column(text, right=True) for text in ("pool", "blocks", *found)]
    rows = [
        (
            size.shown,
            f"{size.blocks:,}",
            *(f"{one[at].prefix_hits:.1f} / {one[at].written:.0f}" for one in found.values()),
        )
        for at, size in enumerate(sizes)
    ]
    return table_lines(columns, rows, LEAST_COLUMNS)


def _behind_lines(
    load: _Load, sizes: Sequence[_Size], found: "dict[str, list[Outcome]]"
) -> Iterator[str]:
    """Yield what a tier behind would add with the first policy of a mount: a row a size."""
    policy = next((each for each in found if each != _BEST), None)
    if policy is None:
        return
    outcomes = found[policy]
    yield ""
    yield headed(f"A tier behind a pool with {policy}, by how long it keeps what is evicted")
    yield f"adds to what is {load.found}, and is written, % of all {load.of}"
    yield ""
    names = ("pool", "blocks", *outcomes[0].behind, "written")
    rows = [
        (
            size.shown,
            f"{size.blocks:,}",
            *(f"{gain:.1f}" for gain in one.behind.values()),
            f"{one.evicted:.0f}",
        )
        for size, one in zip(sizes, outcomes, strict=True)
    ]
    yield from table_lines([Column(text, right=True) for text in names], rows, LEAST_COLUMNS)


def _report(
    load: _Load,
    blocks: int,
    sizes: Sequence[_Size],
    found: "dict[str, list[Outcome]]",
    args: argparse.Namespace,
    budgeted: Sequence[Sequence[Budgeted]],
) -> dict[str, Any]:
    """Return the same as numbers; rates are shares of all accesses."""
    recording = load.recording
    return {
        "format": _FORMAT,
        "trace": args.trace or args.synthetic,
        "recording": None
        if recording is None
        else {name: value for name, value in recording._asdict().items() if name != "requests"},
        "is_shuffled": args.shuffle,
        "hints": args.hints,
        "requests": len(load.requests),
        "accesses": load.accesses,
        "blocks": blocks,
        "pools": [
            {
                "blocks_share": size.share / 100,
                "blocks": size.blocks,
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
                "write_budgets": budget_report(budgeted[at]),
            }
            for at, size in enumerate(sizes)
        ],
    }
