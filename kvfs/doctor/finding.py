"""What a rule of `kvfs doctor` says when it finds something, and how much it matters."""

from collections.abc import Callable
from enum import IntEnum
from typing import NamedTuple

from kvfs.doctor.facts import Facts


class Severity(IntEnum):
    """How much it hurts: a higher value is worse."""

    NOTE = 1
    """Costs a little, or is worth knowing."""
    WARNING = 2
    """Costs speed, or will fail under load."""
    SERIOUS = 3
    """Breaks a promise: blocks are lost, stores fail, calls hang."""


class Finding(NamedTuple):
    """One thing that will hurt."""

    severity: Severity
    problem: str
    fix: str
    """The command to type that ends the problem; a second line says what else is needed."""


#: A rule returns what it found, or None if facts that it needs are missing.
Rule = Callable[[Facts], list[Finding] | None]


class Verdict(NamedTuple):
    """What one rule concluded from the facts."""

    check: str
    findings: tuple[Finding, ...]
    is_decided: bool


class Report(NamedTuple):
    """All verdicts about one mount."""

    mountpoint: str
    verdicts: tuple[Verdict, ...]

    @property
    def worst(self) -> Severity | None:
        """The worst severity that was found."""
        found = [finding.severity for verdict in self.verdicts for finding in verdict.findings]
        return max(found, default=None)
