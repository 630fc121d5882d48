"""Writers that store through mappings, two blocks of three larger than their directory had before.

Run as a program: ROOT WRITER STORES MOST_BYTES; it prints one JSON object. Each store is a process
of its own, because a mapping that finds no space ends it.
"""

import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any, Final

from tests.support.clients.mapped_writer import store_mapped
from tests.support.clients.stamped import seed_of
from tests.support.kernel.calls import read_file
from tests.support.mounts.mounting import ROOT

#: Stores in one directory, each larger than the one before.
_IN_A_DIRECTORY: Final = 3
_LEAST_BYTES: Final = 1 << 18
#: One store of so many writes instead, into a file that was set to its length all the same.
_WRITTEN_ONE_OF: Final = 5
_WAIT_S: Final = 3000.0


def drawn_sizes(source: random.Random, most_bytes: int) -> list[int]:
    """Return sizes for one directory, in bytes, each larger than the one before."""
    spread = most_bytes / _LEAST_BYTES
    drawn = (int(_LEAST_BYTES * spread ** source.random()) for _ in range(_IN_A_DIRECTORY))
    return [size_bytes + number for number, size_bytes in enumerate(sorted(drawn))]


def store_all(root: Path, writer: int, stores: int, most_bytes: int) -> dict[str, Any]:
    """Store blocks; return how the stores ended, and what was stored and is wrong."""
    source = random.Random(writer)
    ends: Counter[str] = Counter()
    stored_bytes = hits = 0
    wrong: list[str] = []
    sizes: list[int] = []
    for number in range(stores):
        directory = root / f"{writer}-{number // _IN_A_DIRECTORY}"
        if not number % _IN_A_DIRECTORY:
            directory.mkdir()
            sizes = drawn_sizes(source, most_bytes)
        name, size_bytes = f"{number}", sizes[number % _IN_A_DIRECTORY]
        how = "mapped" if number % _WRITTEN_ONE_OF else "written"
        end = _end_of_one(directory, name, size_bytes, how)
        ends[end] += 1
        if end != "stored":
            continue
        stored_bytes += size_bytes
        try:
            seed_of(read_file(directory / name), name, size_bytes)
            hits += 1
        except FileNotFoundError:
            pass  # it went for another one already
        except AssertionError as error:
            wrong.append(str(error)[:200])
    return {"ends": dict(ends), "bytes": stored_bytes, "hits": hits, "wrong": wrong[:5]}


def _end_of_one(directory: Path, name: str, size_bytes: int, how: str) -> str:
    """Store one block in a process of its own; return how that ended."""
    pid = os.fork()
    if not pid:
        try:
            store_mapped(str(directory), name, size_bytes, how)
        except OSError as error:
            os._exit(error.errno or 255)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        return f"{how}: signal {-code}"
    return "stored" if not code else f"{how}: {os.strerror(code)}"


def mapped_stores(root: Path, writers: int, stores: int, most_bytes: int) -> list[dict[str, Any]]:
    """Let *writers* processes make *stores* each, at once; return what each found."""
    command = [sys.executable, "-m", "tests.support.clients.mapped_stores", str(root)]
    running = [
        subprocess.Popen(
            [*command, str(writer), str(stores), str(most_bytes)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
            text=True,
        )
        for writer in range(writers)
    ]
    try:
        return [json.loads(process.communicate(timeout=_WAIT_S)[0]) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    place, *figures = sys.argv[1:]
    print(json.dumps(store_all(Path(place), *map(int, figures))))
