"""``kvfs simulate --write-budget``: what the gate finds if only so much may be written a day.

The budget is that of a mount (core/write_budget.py), by the clock of the load. What a drive is
written, and how long it lasts, follows from the size of a block.
"""

import argparse
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kvfs.cli.arguments import size_of, words_of
from kvfs.cli.tables import LEAST_COLUMNS, Column, headed, table_lines
from kvfs.core.errors import UsageError
from kvfs.core.sizes import DAY_S, format_size, short_size

if TYPE_CHECKING:
    from kvfs.bench.simulate.served import Outcome

#: In place of a budget: all may be written.
_NONE: Final = "none"


def add_budgets(add: Callable[..., object]) -> None:
    """Add the flags to a parser."""
    add(
        "--write-budget",
        metavar="SIZES",
        help="let gate write only so much a day: sizes, or none; needs the size of a block",
    )
    add(
        "--block-size", metavar="SIZE", help="how large a block of the trace is, for --write-budget"
    )
    add("--endurance", metavar="SIZE", help="what the drive may be written in its life: its days")


class Budgeted(NamedTuple):
    """What the gate finds with one budget, of one pool."""

    pool: str
    a_day_bytes: int
    """The budget; 0: there is none."""
    outcome: "Outcome"
    written_a_day_bytes: float
    lasts_days: float | None
    """None: the drive's endurance is not known, or nothing was written."""


class Ask(NamedTuple):
    """Which budgets are asked for, and of what load."""

    a_day_bytes: list[int]
    block_bytes: int
    span_s: float
    endurance_bytes: int | None

    def of(self, pool: str, outcome: "Outcome", accesses: int, a_day_bytes: int) -> Budgeted:
        """Return what the *outcome* of so many *accesses* means for the drive of *pool*."""
        written_bytes = outcome.written / 100 * accesses * self.block_bytes
        written_a_day_bytes = written_bytes * DAY_S / self.span_s
        lasts_days = None
        if self.endurance_bytes is not None and written_a_day_bytes:
            lasts_days = self.endurance_bytes / written_a_day_bytes
        return Budgeted(pool, a_day_bytes, outcome, written_a_day_bytes, lasts_days)


def asked_budgets(args: argparse.Namespace, block_bytes: int | None, span_s: float) -> Ask:
    """Return what *args* ask for, of a load of *span_s*, whose blocks have *block_bytes* if known.

    Raises UsageError.
    """
    given_bytes = size_of(args.block_size, "--block-size")
    endurance_bytes = size_of(args.endurance, "--endurance")
    if args.write_budget is None:
        if given_bytes or endurance_bytes:
            raise UsageError("--block-size and --endurance are for --write-budget")
        return Ask([], 0, span_s, None)
    words = list(dict.fromkeys(words_of(args.write_budget)))
    if not words:
        raise UsageError("--write-budget: give at least one size")
    budgets = [0 if word == _NONE else size_of(word, "--write-budget") or 0 for word in words]
    known_bytes = given_bytes or block_bytes
    if known_bytes is None:
        raise UsageError("--write-budget: give --block-size, too; a trace does not tell it")
    if span_s <= 0:
        raise UsageError("--write-budget: the load came at one moment, and tells no day")
    return Ask(budgets, known_bytes, span_s, endurance_bytes)


def budget_lines(ask: Ask, found: Sequence[Sequence[Budgeted]], rates: str) -> Iterator[str]:
    """Yield the table: a row for each pool and budget."""
    if not ask.a_day_bytes:
        return
    yield ""
    blocks, hours = format_size(ask.block_bytes), ask.span_s / 3600
    yield headed(f"gate with a budget of writes: blocks of {blocks}, {hours:.3g} hours")
    yield rates
    yield "what is written a day, and how many days the drive lasts so"
    yield ""
    names = ("pool", "budget a day", "gate", "written a day", "days")
    rows = [
        (
            one.pool,
            format_size(one.a_day_bytes) if one.a_day_bytes else _NONE,
            f"{one.outcome.prefix_hits:.1f} / {one.outcome.written:.0f}",
            short_size(one.written_a_day_bytes),
            "-" if one.lasts_days is None else f"{one.lasts_days:,.0f}",
        )
        for of_pool in found
        for one in of_pool
    ]
    yield from table_lines([Column(text, right=True) for text in names], rows, LEAST_COLUMNS)


def budget_report(found: Sequence[Budgeted]) -> list[dict[str, Any]]:
    """Return the same of one pool as numbers; rates are shares of all accesses."""
    return [
        {
            "a_day_bytes": one.a_day_bytes,
            "hit_rate": round(one.outcome.prefix_hits / 100, 6),
            "written": round(one.outcome.written / 100, 6),
            "written_a_day_bytes": round(one.written_a_day_bytes),
            "lasts_days": None if one.lasts_days is None else round(one.lasts_days, 1),
        }
        for one in found
    ]
