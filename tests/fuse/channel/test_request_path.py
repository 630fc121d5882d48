"""What a request touches is about what docs/dev/request-path.md says: counted on a real mount."""

from typing import Final

from kvfs.bench.self_made import folders, loop_device, torn_down
from make.measured_tables import read_run
from tests.bench.measure_commits import BACKING
from tests.bench.measure_path import DEVICE_BYTES, SHOWN, Calls, Touched, path_of, paths_of
from tests.support.mounts.mounting import ROOT

#: Of each request so many are seen, and half as many evictions.
ROUNDS: Final = 6
#: A part that a request may touch more or less than the page says.
SLACK: Final = 0.2
TOLD: Final = {
    name: Touched(*(one[key] for key in Touched._fields))
    for name, one in read_run("path").results["requests"].items()
}
#: What a tick does depends on what is due at that moment.
IDLE: Final = "idle tick"
#: Issue 30: calls of an idle tick.
IDLE_CALLS_MAX: Final = 120


def test_requests_touch_what_the_page_says() -> None:
    with torn_down() as stack:
        place, _ = folders(stack, BACKING)
        device = stack.enter_context(loop_device(place / "image", DEVICE_BYTES))
        kinds = paths_of(ROOT, device, place, ROUNDS)
    wrong = {
        name: (told, found)
        for name, told in TOLD.items()
        if (found := off(told, kinds.get(SHOWN[name], []), is_idle=name == IDLE))
    }
    assert TOLD.keys() == SHOWN.keys()
    assert not wrong, "see docs/dev/request-path.md for how its tables are made anew"


def off(told: Touched, each: list[Calls], *, is_idle: bool = False) -> list[str]:
    """Return what none of the requests *each* has within the slack of what was *told*.

    A busy machine makes some requests do more or less, such as when no extent is ready. So the
    page is wrong only if all do more, or all do less.
    """
    found = [path_of(calls) for calls in each]
    if not found:
        return ["not seen"]
    if is_idle:
        return ["calls"] * (min(one.calls for one in found) >= IDLE_CALLS_MAX)
    return [
        name
        for name, expected, numbers in zip(
            Touched._fields, told, zip(*found, strict=True), strict=True
        )
        if min(numbers) > expected * (1 + SLACK) or max(numbers) < expected * (1 - SLACK)
    ]


def test_a_request_that_touches_more_or_less_is_noticed() -> None:
    told = Touched(10, 2, 9)
    same: Calls = [("a.py", "one"), ("b.py", "other")] * 5
    assert off(told, [same]) == []
    assert off(told, [same * 2, same * 3]) == ["calls", "crossings"]
    assert off(told, [same * 2, same]) == []
    assert off(told, [same[:4]]) == ["calls", "crossings"]
    assert off(told, [[("a.py", "one")] * 10]) == ["files", "crossings"]
    assert off(told, []) == ["not seen"]
    assert off(told, [same * 11], is_idle=True) == []
    assert off(told, [same * 12], is_idle=True) == ["calls"]
