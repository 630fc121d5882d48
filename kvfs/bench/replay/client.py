"""One client of a replay: it serves prompts as a connector does, and checks every byte it loads.

Run as ``python -m kvfs.bench.replay.client BLOCK_BYTES FLAGS``; FLAGS are added to open(2). It
takes one JSON line per prompt on stdin, answers with one, and ends when stdin ends. For a prompt it
looks its blocks up, head first, up to the first that is missing; loads those; then looks up the
others and stores what is missing. Only system calls are timed: names and contents are made outside.
"""

import errno
import json
import os
import sys
import time
from typing import Any, Final

from kvfs.bench import block_client
from kvfs.bench.kv_shapes import KvContent, aligned_buffer, first_difference
from kvfs.bench.worker import block_name
from kvfs.core.errors import NO_SPACE, VerifyFailed
from kvfs.core.types import PAGE_BYTES

#: All clients of all runs make the same content, so each block proves itself.
_SEED: Final = 20250224


class Meter:
    """Clock and CPU time of the system calls of one prompt, in ns."""

    def __init__(self) -> None:
        self.cpu_ns = 0
        self._begun = (0, 0)

    def start(self) -> None:
        """Note that a system call follows."""
        self._begun = time.perf_counter_ns(), time.thread_time_ns()

    def stop(self) -> int:
        """Note that it has ended; return how many ns it took."""
        ended_ns, cpu_ns = time.perf_counter_ns(), time.thread_time_ns()
        self.cpu_ns += cpu_ns - self._begun[1]
        return ended_ns - self._begun[0]


class Client:
    """Serves prompts with blocks of *block_bytes*."""

    def __init__(self, block_bytes: int, flags: int) -> None:
        self._flags = flags
        self._block_bytes = block_bytes
        self._content = KvContent(_SEED, block_bytes)
        self._expected = aligned_buffer(block_bytes)
        self._found = aligned_buffer(block_bytes + PAGE_BYTES)  # longer, to notice surplus bytes

    def serve(self, directory: str, blocks: list[int]) -> dict[str, Any]:
        """Look up, load and store the *blocks* of one prompt in *directory*; return what happened.

        Raises VerifyFailed, and OSError for anything but a miss and a store without space.
        """
        meter = Meter()
        paths = [os.fsencode(directory) + b"/" + block_name("replay", each) for each in blocks]
        lookups_ns = hits = 0
        for path in paths:
            meter.start()
            size_bytes = block_client.look_up(path)
            lookups_ns += meter.stop()
            if size_bytes is None:
                break
            hits += 1
        loads_ns: list[int] = []
        for path, block in zip(paths[:hits], blocks, strict=False):
            if (load_ns := self._load(path, block, meter)) is None:
                break
            loads_ns.append(load_ns)
        lost, hits = hits - len(loads_ns), len(loads_ns)
        stores_ns: list[int] = []
        present = refused = 0
        for path, block in zip(paths[hits:], blocks[hits:], strict=True):
            meter.start()
            size_bytes = block_client.look_up(path)
            meter.stop()
            if size_bytes is not None:
                present += 1
            elif (store_ns := self._store(path, block, meter)) is None:
                refused += 1
            else:
                stores_ns.append(store_ns)
        return {
            "hits": hits,
            "lost": lost > 0,
            "present": present,
            "refused": refused,
            "lookups_ns": lookups_ns,
            "loads_ns": loads_ns,
            "stores_ns": stores_ns,
            "cpu_ns": meter.cpu_ns,
        }

    def _load(self, path: bytes, block: int, meter: Meter) -> int | None:
        """Return how long it took in ns, None for a miss."""
        meter.start()
        try:
            got_bytes = block_client.load(path, self._found.data, self._flags)
        except FileNotFoundError:
            return None
        finally:
            load_ns = meter.stop()
        expected = self._content.fill(block, self._expected, self._block_bytes)
        offset_bytes = first_difference(expected, self._found[:got_bytes])
        if offset_bytes is not None:
            raise VerifyFailed(f"{os.fsdecode(path)}: not what was stored at offset {offset_bytes}")
        return load_ns

    def _store(self, path: bytes, block: int, meter: Meter) -> int | None:
        """Return how long it took in ns, None if the file system refused it for want of space."""
        data = self._content.fill(block, self._expected, self._block_bytes)
        draft = b"%s.%d.tmp" % (path, os.getpid())
        meter.start()
        try:
            block_client.store(draft, path, (data.data,), self._flags | os.O_EXCL)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            return None
        finally:
            store_ns = meter.stop()
        return store_ns


def main() -> None:
    """Serve prompts until stdin ends."""
    client = Client(int(sys.argv[1]), int(sys.argv[2]))
    for line in sys.stdin:
        order = json.loads(line)
        try:
            reply = client.serve(order["directory"], order["blocks"])
        except VerifyFailed as error:
            reply = {"wrong": str(error)}
        except OSError as error:
            code = errno.errorcode.get(error.errno or 0, "?")
            reply = {"failed": f"{code}: {error}"}
        sys.stdout.write(json.dumps(reply) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
