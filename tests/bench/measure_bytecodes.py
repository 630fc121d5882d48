"""How many bytecodes the server runs for one store, and for one open and close, of two commits.

Run as root: ``python -m tests.bench.measure_bytecodes OLD``, OLD as for measure_commits. CPU time
differs by some percent from run to run on a machine that others use; this count only by the ticks
and polls that fall in between, so that the least of some runs is told. It sees neither system calls
nor what C code does: it goes beside measure_server_cpu.
"""

import json
import os
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from kvfs.bench.self_made import folders, loop_device, torn_down
from tests.bench.measure_commits import BACKING, NEW
from tests.bench.profiled_server import profiled_server
from tests.support.mounts.unsupervised import UNSUPERVISED

DEVICE_BYTES: Final = 2 << 30
#: Both are run in a mount of their own: the difference is without the start and the stop.
FEW: Final = 200
MANY: Final = 1200
BLOCK_BYTES: Final = 4096
SHOWN: Final = 20
RUNS: Final = 4
#: One store, or one open and close, in a directory.
Work = Callable[[Path, int], None]
#: Counts in the server: traces every opcode (sys.settrace) and writes the counts at the end.
PROGRAM: Final = f"""
import collections, json, sys
import kvfs.cli.main, mount.serve
counts, run = collections.Counter(), mount.serve.run
def count(frame, event, argument):
    if event == "opcode":
        counts[frame.f_code.co_qualname] += 1
    return count
def trace(frame, event, argument):
    frame.f_trace_opcodes, frame.f_trace_lines = True, False
    return count
def counted(*arguments, **named):
    sys.settrace(trace)
    try:
        return run(*arguments, **named)
    finally:
        sys.settrace(None)
        with open(sys.argv.pop(0), "w") as file:
            json.dump(counts, file)
mount.serve.run = counted
del sys.argv[:2]  # now the file to write stands for the program
{UNSUPERVISED}
sys.exit(kvfs.cli.main.main(sys.argv[1:]))
"""


def store(directory: Path, number: int) -> None:
    """Store one block under a temporary name and rename it."""
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    fd = os.open(directory / f"{number}.tmp", flags, 0o600)
    os.write(fd, bytes(BLOCK_BYTES))
    os.close(fd)
    os.rename(directory / f"{number}.tmp", directory / f"{number}.data")


def open_and_close(directory: Path, _number: int) -> None:
    """Open a warm block and close it."""
    os.close(os.open(directory / "0.data", os.O_RDONLY))


def counts_of(tree: Path, device: str, place: Path, work: Work, count: int) -> Counter[str]:
    """Return the bytecodes by function that a server of *tree* ran, with *count* times *work*."""
    with profiled_server(tree, PROGRAM, device, place) as blocks:
        if work is open_and_close:
            store(blocks, 0)
        for number in range(count):
            work(blocks, number)
    return Counter(json.loads((place / "found.json").read_text()))


def per_call(tree: Path, device: str, place: Path, work: Work) -> dict[str, float]:
    """Return the bytecodes by function for one *work*, of the run that had the fewest."""
    found = []
    for _ in range(RUNS):
        few, many = (counts_of(tree, device, place, work, count) for count in (FEW, MANY))
        found.append({name: (many[name] - few[name]) / (MANY - FEW) for name in many})
    return min(found, key=lambda counts: sum(counts.values()))


def compared(old: dict[str, float], new: dict[str, float]) -> dict[str, Any]:
    """Return both sums, their ratio, and the functions that differ most."""
    before, after = sum(old.values()), sum(new.values())
    names = sorted(
        old.keys() | new.keys(), key=lambda name: -abs(new.get(name, 0) - old.get(name, 0))
    )
    differ = {name: [round(old.get(name, 0)), round(new.get(name, 0))] for name in names[:SHOWN]}
    return {
        "old": round(before),
        "new": round(after),
        "ratio": round(after / before, 3),
        "differ_most": differ,
    }


def main() -> int:
    """Count and print."""
    trees = (Path(sys.argv[1]).resolve(), NEW)
    figures: dict[str, Any] = {}
    with torn_down() as stack:
        place, _ = folders(stack, BACKING)
        device = stack.enter_context(loop_device(place / "image", DEVICE_BYTES))
        for name, work in {"store": store, "open-close": open_and_close}.items():
            figures[name] = compared(*(per_call(tree, device, place, work) for tree in trees))
    print(json.dumps(figures, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
