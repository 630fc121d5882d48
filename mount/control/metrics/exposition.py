"""The text of the metrics, as Prometheus reads it (its text format, or OpenMetrics).

It is made in slices, so that no request waits for all of it, and kept for a second, so that many
scrapers cost as much as one.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import trio
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.openmetrics import exposition as openmetrics

from mount.control.metrics.families import FAMILIES, FLAGS, INFO_LABELS, INFO_MEANING, INFO_NAME
from mount.control.metrics.family import ANY, Family

#: How long a text is given out again: no scraper asks more often.
KEPT_S: Final = 1.0
#: Families encoded without a pause: some 0.2 ms.
_SLICE: Final = 8
#: The end of a text in OpenMetrics; it must not stand between two slices.
_END: Final = b"# EOF\n"
#: In a scraper's header Accept.
_OPENMETRICS: Final = "application/openmetrics-text"

Status = Mapping[str, Any]


class _Slice:
    """Some families as a registry of prometheus_client has them."""

    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Sequence[Metric]:
        """Return the families."""
        return self._families


class Exposition:
    """Makes the text of one mount's metrics."""

    def __init__(
        self,
        status: Callable[[], Awaitable[Status]],
        now_s: Callable[[], float] = trio.current_time,
    ) -> None:
        """*status* returns what `kvfs status --json` shows."""
        self._status = status
        self._now_s = now_s
        self._lock = trio.Lock()
        self._families: list[Metric] = []
        self._made_s = float("-inf")
        #: The text of each format, by content type.
        self._texts: dict[str, bytes] = {}

    async def text(self, accept: str = "") -> tuple[bytes, str]:
        """Return the text in the format that the header *accept* asks for, and its content type."""
        wants_open = _OPENMETRICS in accept
        encode = openmetrics.generate_latest if wants_open else generate_latest
        content_type = openmetrics.CONTENT_TYPE_LATEST if wants_open else CONTENT_TYPE_PLAIN_0_0_4
        async with self._lock:
            if self._now_s() - self._made_s >= KEPT_S:
                self._families = list(families_of(await self._status()))
                self._texts.clear()
                self._made_s = self._now_s()
            if content_type not in self._texts:
                self._texts[content_type] = await self._encoded(encode)
            return self._texts[content_type], content_type

    async def _encoded(self, encode: Callable[[Any], bytes]) -> bytes:
        parts = []
        ends = False
        for first in range(0, len(self._families), _SLICE):
            part = encode(_Slice(self._families[first : first + _SLICE]))
            ends = ends or part.endswith(_END)
            parts.append(part.removesuffix(_END))
            await trio.lowlevel.checkpoint()
        return b"".join(parts) + (_END if ends else b"")


def families_of(status: Status) -> Iterator[Metric]:
    """Yield the families of one mount's *status*; a family without a value is left out."""
    mount = _utf8(status["mountpoint"])
    info = InfoMetricFamily(INFO_NAME, INFO_MEANING, labels=["mount"])
    info.add_metric([mount], {key: _utf8(status[key]) for key in INFO_LABELS})
    yield info
    for name, (key, meaning) in FLAGS.items():
        flag = GaugeMetricFamily(name, meaning, labels=["mount"])
        flag.add_metric([mount], float(bool(status.get(key))))
        yield flag
    for family in FAMILIES:
        found = dict.fromkeys(family.present, 0) if "blocks" in status else {}
        found |= dict(values_of(status, family.key.split(".")))
        if found:
            yield _family(family, mount, found)


def _family(family: Family, mount: str, found: Mapping[str, Any]) -> Metric:
    labels = ["mount", family.label] if family.label else ["mount"]
    if family.kind == "histogram":
        return _histogram(family, mount, labels, found)
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    made = kind(family.name, family.meaning, labels=labels, unit=family.unit)
    for label, value in found.items():
        made.add_metric([mount, _utf8(label)] if family.label else [mount], float(value))
    return made


def _histogram(
    family: Family, mount: str, labels: Sequence[str], found: Mapping[str, Any]
) -> Metric:
    """Return what ``Latency.shown`` told, as a histogram."""
    made = HistogramMetricFamily(family.name, family.meaning, labels=labels, unit=family.unit)
    for label, times in found.items():
        buckets = [(str(end_s), count) for end_s, count in times["buckets"]]
        buckets.append(("+Inf", times["count"]))
        label_values = [mount, _utf8(label)] if family.label else [mount]
        made.add_metric(label_values, buckets, times["total_s"])
    return made


def values_of(status: Any, key: Sequence[str], label: str = "") -> Iterator[tuple[str, Any]]:  # noqa: ANN401
    """Yield each value under *key* with what ``ANY`` stands for; none where the key is missing.

    A list is one of predictions, which are named by their factors.
    """
    if not key:
        if status is not None:
            yield label, status
        return
    if isinstance(status, list):
        status = {str(row["factor"]): row for row in status}
    if not isinstance(status, Mapping):
        return
    first, *rest = key
    if first != ANY:
        yield from values_of(status.get(first), rest, label)
        return
    for name, value in status.items():
        # The name of the metric has the unit already.
        yield from values_of(value, rest, name.removesuffix("_s"))


def _utf8(text: str) -> str:
    """Return *text*, perhaps a path with bytes that are not UTF-8, as a label can have it."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
