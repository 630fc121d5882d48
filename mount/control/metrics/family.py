"""One metric: its name and kind, and the status key that it comes from."""

from typing import Final, Literal, NamedTuple

Kind = Literal["gauge", "counter", "histogram"]
#: In a key: any name that the status has in this place; the name becomes the label's value.
ANY: Final = "*"


class Family(NamedTuple):
    """One metric. ``name`` is without the ``_total`` of a counter."""

    name: str
    kind: Kind
    #: Key of `kvfs status --json`; a dot leads to a key inside.
    key: str
    meaning: str
    #: The label that takes what ``ANY`` stands for.
    label: str = ""
    #: Values of the label that are shown from the start, as 0, so that an alert sees an increase.
    present: tuple[str, ...] = ()

    @property
    def unit(self) -> str:
        """``bytes``, ``seconds``, ``ratio`` or empty: what the name ends with."""
        end = self.name.rpartition("_")[2]
        return end if end in ("bytes", "seconds", "ratio") else ""


def gauge(name: str, key: str, meaning: str, label: str = "") -> Family:
    """Return the gauge *name*, which is told under *key*."""
    return Family(f"kvfs_{name}", "gauge", key, meaning, label)


def counter(name: str, key: str, meaning: str, label: str = "") -> Family:
    """Return the counter *name*, which is told under *key*."""
    return Family(f"kvfs_{name}", "counter", key, meaning, label)


def histogram(name: str, key: str, meaning: str, label: str = "") -> Family:
    """Return the histogram *name*, which is told under *key*."""
    return Family(f"kvfs_{name}", "histogram", key, meaning, label)
