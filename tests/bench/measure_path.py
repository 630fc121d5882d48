"""What one request touches: calls of our functions, the files they are in, crossings between them.

Run as root: ``python -m tests.bench.measure_path [--json] [--files] [TREE]``. TREE is a checkout
with a ``.venv``; this one by default. ``--files`` lists the calls of one median request, in order;
``--json`` has its files, each with its calls (docs/dev/request-path.md shows them).
A real mount on a loop device serves single requests, one after the other, under a profiler
(sys.setprofile) that sees each call. A request lasts from the readv(2) that read it to the next
poll(2); an eviction and a tick last from their function's call to its return. The reader is the
one in Python, because the compiled one makes neither call that a profiler sees. The median of some
rounds is told. The kernel, libfuse, trio and lmdb are not counted.
"""

import argparse
import itertools
import json
import os
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from kvfs.bench.self_made import folders, loop_device, torn_down
from tests.bench.measure_commits import BACKING, NEW, kvfs
from tests.bench.profiled_server import profiled_server
from tests.support.mounts.unsupervised import UNSUPERVISED

DEVICE_BYTES: Final = 1 << 30
ROUNDS: Final = 30
BLOCK_BYTES: Final = 4096
#: So many seconds nothing is asked: ticks come by themselves.
IDLE_S: Final = 3.0
#: What is told, by the name that the server gives it.
SHOWN: Final = {
    "CREATE": "CREATE",
    "RELEASE of a store": "RELEASE a store",
    "CREATE in place": "CREATE in place",
    "RELEASE that publishes": "RELEASE in place",
    "RENAME": "RENAME",
    "LOOKUP hit": "LOOKUP",
    "OPEN again": "OPEN again",
    "RELEASE of a reader": "RELEASE",
    "eviction of one block": "eviction",
    "idle tick": "tick",
}
#: Profiles the server's thread, and writes each request, eviction and tick as a list of its calls.
PROGRAM: Final = f"""
import contextlib, json, os, sys, threading
import kvfs.cli.main, mount.serve
from mount.fuse.wire import Opcode
from kvfs.engine.eviction.reclaim import Reclaim
from kvfs.engine.store import Store
tree, written, run = sys.argv.pop(1) + "/", sys.argv.pop(1), mount.serve.run
with contextlib.suppress(ImportError):  # an older TREE has no other
    try:
        from mount.fuse.channel import PYTHON, choose_reader
    except ImportError:
        from mount.fuse.reader_choice import PYTHON, choose_reader
    choose_reader.__kwdefaults__["found"] = PYTHON
due = getattr(Store, "run_due", None) or getattr(Store, "tick")  # its name in an older TREE
ROOTS = {{Reclaim._execute.__code__: "eviction", due.__code__: "tick"}}
packages = tree + ".venv/"
found, path, state = [], [], {{"label": "", "inside": [], "wrote": False}}
def end():
    if state["label"] and path:
        found.append((state["label"], list(path)))
    state["label"] = ""
    path.clear()
def profile(frame, event, argument):
    code = frame.f_code
    if event == "call":
        if code.co_filename.startswith(tree) and not code.co_filename.startswith(packages):
            path.append((code.co_filename[len(tree):], code.co_qualname))
            if code in ROOTS:
                state["inside"].append((code, len(path) - 1))
    elif event == "return":
        if state["inside"] and state["inside"][-1][0] is code:
            _, since = state["inside"].pop()
            if not state["inside"]:
                found.append((ROOTS[code], path[since:]))
            if not state["label"]:
                path.clear()
    elif event == "c_return" and argument is os.readv:
        end()
        number = int.from_bytes(frame.f_locals["buffer"][4:8], "little")
        state["label"] = Opcode(number).name if number in set(Opcode) else str(number)
    elif event == "c_call" and getattr(argument, "__name__", "") == "poll":
        end()
        if not state["inside"]:
            path.clear()
def profiled(*arguments, **named):
    sys.setprofile(profile)
    try:
        return run(*arguments, **named)
    finally:
        sys.setprofile(None)
        with open(written, "w") as file:
            json.dump(found, file)
mount.serve.run = profiled
{UNSUPERVISED}
sys.exit(kvfs.cli.main.main(sys.argv[1:]))
"""


#: Of a request: the file and the name of each function called, in order.
Calls = list[tuple[str, str]]


class Touched(NamedTuple):
    """Of one request, or the median of some: ``calls``, ``files``, ``crossings``."""

    calls: int
    files: int
    crossings: int


def path_of(calls: Calls) -> Touched:
    """Return the figures of a request that made these *calls*."""
    files = [file for file, _ in calls]
    crossings = sum(one != other for one, other in itertools.pairwise(files))
    return Touched(len(files), len(set(files)), crossings)


def work(blocks: Path, tree: Path, rounds: int) -> None:
    """Store, look up, load twice and evict, *rounds* times; store in place; wait for ticks.

    What is stored in place is in a directory of its own, which is made before (``sorted_out``).
    """
    for number in range(rounds):
        name, staging = blocks / f"{number}.data", blocks / f"{number}.tmp"
        store(staging)
        staging.rename(name)
        first = os.open(name, os.O_RDONLY)
        os.close(os.open(name, os.O_RDONLY))
        os.close(first)
    for number in range(0, rounds, 2):
        kvfs(tree, "evict", str(blocks / f"{number}.data"))
    in_place = blocks / "in_place"
    in_place.mkdir()
    for number in range(rounds):
        store(in_place / f"{number}.data")
    time.sleep(IDLE_S)


def store(block: Path) -> None:
    """Create *block*, write it and close it."""
    fd = os.open(block, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, bytes(BLOCK_BYTES))
    os.close(fd)


def paths_of(tree: Path, device: str, place: Path, rounds: int = ROUNDS) -> dict[str, list[Calls]]:
    """Return for each kind of request the calls that the server of *tree* made, in *rounds*."""
    with profiled_server(tree, PROGRAM, device, place) as blocks:
        work(blocks, tree, rounds)
    return sorted_out(json.loads((place / "found.json").read_text()))


def sorted_out(found: list[tuple[str, list[list[str]]]]) -> dict[str, list[Calls]]:
    """Return *found* by kind; a RELEASE or OPEN is told apart by what came before it."""
    kinds: dict[str, list[Calls]] = defaultdict(list)
    before, directories = "", 0
    for label, calls in found:
        kind = label
        directories += label == "MKDIR"
        # The first directory holds all blocks, the second one those that are stored in place.
        in_place = directories > 1
        if label == "CREATE" and in_place:
            kind = "CREATE in place"
        elif label == "RELEASE" and before == "CREATE":
            kind = "RELEASE in place" if in_place else "RELEASE a store"
        elif label == "OPEN" and before == "OPEN":
            kind = "OPEN again"
        if label in ("CREATE", "OPEN", "RELEASE"):
            before = label
        kinds[kind].append([(file, name) for file, name in calls])
    return kinds


def figures_of(kinds: dict[str, list[Calls]]) -> dict[str, Touched]:
    """Return the medians of what is shown."""
    figures = {}
    for shown, kind in SHOWN.items():
        each = [path_of(calls) for calls in kinds.get(kind, [])]
        if each:
            medians = [statistics.median_low(one) for one in zip(*each, strict=True)]
            figures[shown] = Touched(*medians)
    return figures


def median_requests(kinds: dict[str, list[Calls]]) -> Iterator[tuple[str, Calls]]:
    """Yield of each kind that is shown one request with the median number of calls."""
    for shown, kind in SHOWN.items():
        each = sorted(kinds.get(kind, []), key=len)
        if each:
            yield shown, each[(len(each) - 1) // 2]


def print_calls(kinds: dict[str, list[Calls]]) -> None:
    """Print the calls of the median requests; a line is a stay in a file."""
    for shown, median in median_requests(kinds):
        print(f"\n{shown}")
        for file, stay in itertools.groupby(median, key=lambda call: call[0]):
            print(f"  {file}: {', '.join(name for _, name in stay)}")


def as_json(kinds: dict[str, list[Calls]]) -> dict[str, dict[str, Any]]:
    """Return the figures of what is shown, and the files of a median request with their calls."""
    found: dict[str, dict[str, Any]] = {
        shown: one._asdict() for shown, one in figures_of(kinds).items()
    }
    for shown, median in median_requests(kinds):
        found[shown]["calls_in"] = Counter(file for file, _ in median)
    return found


def main() -> int:
    """Count and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tree", nargs="?", default=NEW, type=lambda text: Path(text).resolve())
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--files", action="store_true", help="list the calls too")
    args = parser.parse_args()
    with torn_down() as stack:
        place, _ = folders(stack, BACKING)
        device = stack.enter_context(loop_device(place / "image", DEVICE_BYTES))
        kinds = paths_of(args.tree, device, place)
    figures = figures_of(kinds)
    if args.json:
        print(json.dumps({"requests": as_json(kinds)}, indent=1))
    else:
        print(f"{'one request':<24}{'calls':>8}{'files':>8}{'crossings':>12}")
        for name, one in figures.items():
            print(f"{name:<24}{one.calls:>8}{one.files:>8}{one.crossings:>12}")
        if args.files:
            print_calls(kinds)
    return 0 if len(figures) == len(SHOWN) else 1


if __name__ == "__main__":
    sys.exit(main())
