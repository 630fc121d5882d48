"""``kvfs replay``: a request trace through a mount and through an XFS beside a cleaner script."""

import argparse
import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Final

from kvfs.cli.arguments import percent_of, positive_of, shares_of, size_of, words_of
from kvfs.cli.bench import DATA_PATHS, makes_both
from kvfs.cli.parser import add_verb
from kvfs.core.errors import UsageError
from kvfs.core.settings import Settings
from kvfs.core.sizes import format_size
from kvfs.core.types import PAGE_BYTES

if TYPE_CHECKING:
    from kvfs.bench.output import Screen
    from kvfs.bench.replay.cleaner import Habits
    from kvfs.bench.replay.first_token import Model
    from kvfs.bench.replay.report import Round, TraceFacts
    from kvfs.bench.replay.run import ReplayPlan
    from kvfs.bench.replay.sides import Sides
    from kvfs.cli.parser import Subparsers

POLICIES: Final = Settings.__dataclass_fields__["eviction"].metadata["choices"]
#: Smaller ones are sidecars to kvfs, which go last (docs/eviction.md).
_BLOCK_MIN_BYTES: Final = 64 << 10
#: A cache of fewer blocks holds no prompt of a usual trace.
_BLOCKS_MIN: Final = 32
_AS_FAST: Final = "as-fast"


def configure(subparsers: "Subparsers") -> None:
    """Add the verb's parser."""
    parser = add_verb(
        subparsers,
        "replay",
        run,
        description="Serve the prompts of a request trace from a kvfs mount and from an XFS beside "
        "a cleaner script, in turns,\nand compare hit rates, times and writes. Every loaded byte "
        "is checked. A trace is a file of Mooncake's JSON\nlines or of lines `MILLISECONDS TOKENS "
        "BLOCK BLOCK ...`, also .gz (docs/performance.md).\nOn a pool in use the replayed blocks "
        "evict yours.",
        example="kvfs replay trace.jsonl --self-contained --blocks-share 2%,5%,10%",
    )
    add, default = parser.add_argument, "(default %(default)s)"
    add("trace", metavar="TRACE")
    add("--mount", metavar="DIR", help="a directory on the kvfs mount")
    add("--baseline", metavar="DIR", help="a directory on the XFS to compare with")
    add("--self-contained", action="store_true", help="make both in memory (needs root)")
    add("--backing", metavar="DIR", default="/dev/shm", help=f"where these lie {default}")
    add(
        "--blocks-share",
        metavar="SHARES",
        help="sizes of the cache, in percent of the trace's blocks (default 2%%,5%%,10%%); with "
        "--mount the blocks are scaled to fit",
    )
    add(
        "--block-size",
        metavar="SIZE",
        help="default 1M, less if the memory has no room; with --mount instead of --blocks-share",
    )
    add("--requests", metavar="N", type=int, help="only the first N of the trace")
    add("--clients", metavar="N", type=int, default=1, help=f"prompts served at once {default}")
    add(
        "--speed",
        metavar="RATE",
        default=_AS_FAST,
        help=f"seconds of the trace a second, 1 as it was, or {_AS_FAST} (default)",
    )
    add("--direct", action="store_true", help="store and load with O_DIRECT")
    add("--data-path", choices=DATA_PATHS, default="auto", help="of the mount that is made")
    add("--eviction", metavar="POLICIES", help="of the pools made, e.g. lru,adaptive (default lru)")
    add("--baseline-options", metavar="OPTIONS", default="", help="of the XFS made, for mount -o")
    cleaner = parser.add_argument_group("the cleaner script beside XFS")
    add = cleaner.add_argument
    add(
        "--cleaner-interval",
        metavar="S",
        default="60",
        help="seconds of the trace between two looks, 60 as by cron; with --self-contained a list, "
        "e.g. 1,60",
    )
    add("--cleaner-high", metavar="PERCENT", default="90%", help="start above (default 90%%)")
    add("--cleaner-low", metavar="PERCENT", default="80%", help="stop below (default 80%%)")
    add("--cleaner-by", choices=("atime", "mtime"), default="atime", help=f"age {default}")
    _configure_model(parser)
    parser.add_argument("--json", metavar="FILE", help="write everything to FILE, or - for stdout")


def _configure_model(parser: argparse.ArgumentParser) -> None:
    from kvfs.bench.replay.first_token import Model

    group = parser.add_argument_group("the model of the time to the first token")
    for name, what in {
        "block_tokens": "tokens of a block (512: Mooncake's traces)",
        "token_bytes": "KV cache of a token (131072: Llama 3.1 8B, bf16)",
        "parameters": "of the model (8.03e9)",
        "layers": "of the model (32)",
        "width": "its hidden size (4096)",
        "flops": "sustained by the GPU (4e14: 40 %% of an H100's 989e12)",
        "drive_bytes_s": "B/s for what scaled blocks lack (7e9: PCIe 4.0 x4)",
    }.items():
        flag = f"--{name.replace('bytes_s', 'rate').replace('_', '-')}"
        kind, default = Model.__annotations__[name], Model._field_defaults[name]
        group.add_argument(flag, dest=name, metavar="N", type=kind, default=default, help=what)


def run(args: argparse.Namespace) -> int:
    """Replay the trace at each size, and show and write the results."""
    from kvfs.bench.comparison import machine_facts
    from kvfs.bench.output import Screen
    from kvfs.bench.replay.report import build_report, facts_of
    from kvfs.bench.replay.run import ReplayPlan
    from kvfs.bench.replay.trace import read_trace

    habits, model = _habits(args), _model(args)
    _check(args)
    speed = None if args.speed == _AS_FAST else positive_of(args.speed, "--speed")
    with Screen(args.json, steps="prompts") as screen:
        requests = read_trace(args.trace, args.requests)
        facts = facts_of(requests, model)
        flags = os.O_DIRECT if args.direct else 0
        plan = ReplayPlan(requests, 0, args.clients, speed, flags, model)
        setting = {
            "machine": machine_facts(),
            "clients": args.clients,
            "speed": speed,
            "direct": args.direct,
            "cleaner": [each._asdict() for each in habits],
        }
        rounds = _rounds(args, plan, facts, habits, screen)
        screen.write_report(build_report(rounds, facts, model, setting))
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise UsageError or NotRoot for flags that do not fit together."""
    if makes_both(args, "replay"):
        _policies(args.eviction)
    elif args.eviction or args.baseline_options or args.data_path != "auto":
        raise UsageError("--eviction, --baseline-options and --data-path need --self-contained")
    elif args.block_size and args.blocks_share:
        raise UsageError("with --mount give --block-size or --blocks-share: the other one follows")
    if args.clients < 1:
        raise UsageError("--clients must be at least 1")
    if args.requests is not None and args.requests < 1:
        raise UsageError("--requests must be at least 1")


def _habits(args: argparse.Namespace) -> "list[Habits]":
    from kvfs.bench.replay.cleaner import Habits

    high = percent_of(args.cleaner_high, "--cleaner-high") / 100
    low = percent_of(args.cleaner_low, "--cleaner-low") / 100
    if low >= high:
        raise UsageError("--cleaner-low must be below --cleaner-high")
    looks_s = [positive_of(each, "--cleaner-interval") for each in words_of(args.cleaner_interval)]
    if len(looks_s) != 1 and not (args.self_contained and looks_s):
        raise UsageError("--cleaner-interval takes several only with --self-contained")
    return [Habits(high, low, args.cleaner_by, look_s) for look_s in looks_s]


def _model(args: argparse.Namespace) -> "Model":
    from kvfs.bench.replay.first_token import Model

    model = Model(*(getattr(args, name) for name in Model._fields))
    if not all(0 < number < float("inf") for number in model):
        raise UsageError("the parameters of the model must be greater than 0")
    return model


def _policies(text: str | None) -> list[str]:
    policies = words_of(text or str(Settings.__dataclass_fields__["eviction"].default))
    if unknown := [each for each in policies if each not in POLICIES]:
        raise UsageError(f"--eviction: {unknown[0]!r} is none of {', '.join(POLICIES)}")
    return policies


def _aligned(size_bytes: int) -> int:
    return size_bytes // PAGE_BYTES * PAGE_BYTES


def _check_room(room_bytes: int, block_bytes: int, where: str) -> None:
    if block_bytes < _BLOCK_MIN_BYTES:
        raise UsageError(
            f"{where}: blocks of {format_size(block_bytes)} are too small, kvfs takes them for "
            "sidecars below 64 KiB: choose a larger device, a smaller share, or --block-size"
        )
    if room_bytes < _BLOCKS_MIN * block_bytes:
        raise UsageError(
            f"{where}: room for {room_bytes // block_bytes} blocks is too small, a replay needs "
            f"{_BLOCKS_MIN}"
        )


def _rounds(
    args: argparse.Namespace,
    plan: "ReplayPlan",
    facts: "TraceFacts",
    habits: "list[Habits]",
    screen: "Screen",
) -> "list[Round]":
    """Run a round for each size of the cache; show each as soon as it is there."""
    from kvfs.bench.replay.report import Round, in_words, round_table
    from kvfs.bench.replay.run import replay

    rounds = []
    fixed = not args.self_contained and args.block_size is not None
    asked = args.blocks_share or "2%,5%,10%"
    shares = [0.0] if fixed else shares_of(asked, "--blocks-share")
    for percent in shares:
        with ExitStack() as stack:
            enter = _self_made if args.self_contained else _on_mounts
            blocks = [each * facts.blocks / 100 for each in (percent, max(shares))]
            sides, block_bytes = enter(args, blocks, habits, screen, stack)
            share = 100 * sides.room_bytes / block_bytes / facts.blocks
            screen.begin(len(plan.requests) * len(sides.sides), f"{share:.3g} %")
            results = replay(sides, plan._replace(block_bytes=block_bytes), screen.count)
            rounds.append(Round(share, block_bytes, sides.room_bytes, results))
            screen.show_table(round_table(rounds[-1], facts), in_words(rounds[-1]))
    return rounds


def _self_made(
    args: argparse.Namespace,
    blocks: "list[float]",
    habits: "list[Habits]",
    screen: "Screen",
    stack: ExitStack,
) -> "tuple[Sides, int]":
    """Make sides with room for *blocks*: now, and at most in any round.

    Returns them and the bytes of a block, the same in all rounds.
    """
    from kvfs.bench.replay.sides import BLOCK_BYTES, SelfMade, block_bytes_for, self_made

    policies = _policies(args.eviction)
    now, most = map(int, blocks)
    if args.block_size:
        block_bytes = _aligned(size_of(args.block_size, "--block-size") or 0)
    else:
        block_bytes = block_bytes_for(most, len(policies) + len(habits), args.backing)
        block_bytes = max(_BLOCK_MIN_BYTES, block_bytes)
        if block_bytes < BLOCK_BYTES:
            screen.say(
                f"blocks of {format_size(block_bytes)}: there is no room for "
                f"{format_size(BLOCK_BYTES)}"
            )
    room_bytes = now * block_bytes
    _check_room(room_bytes, block_bytes, "--blocks-share")
    made = SelfMade(room_bytes, args.backing, policies, args.baseline_options, args.data_path)
    waits = args.speed == _AS_FAST
    sides = self_made(made, habits, waits=waits, say=screen.say, filled=screen.fill)
    return stack.enter_context(sides), block_bytes


def _on_mounts(
    args: argparse.Namespace,
    blocks: "list[float]",
    habits: "list[Habits]",
    screen: "Screen",
    stack: ExitStack,
) -> "tuple[Sides, int]":
    """Use the user's mounts; return them and a block's bytes: the flag's, or so blocks fit now."""
    from kvfs.bench.replay.sides import on_mounts

    waits = args.speed == _AS_FAST
    sides = stack.enter_context(on_mounts(args.mount, args.baseline, habits[0], waits=waits))
    given_bytes = size_of(args.block_size, "--block-size")
    block_bytes = _aligned(given_bytes or int(sides.room_bytes / blocks[0]))
    _check_room(sides.room_bytes, block_bytes, args.mount)
    screen.say(
        f"blocks of {format_size(block_bytes)}, room for {format_size(sides.room_bytes)} on each"
    )
    return sides, block_bytes
