"""One worker process: it handles its share of a job's blocks between two readings of the clock.

Workers are processes, not threads, so that they do not share the interpreter's lock: the threads of
a connector are C or C++. Everything but the system calls is done before the clock starts. Names are
relative, so that both sides walk one path component, and the buffer is reused, as a connector's
pinned pool is. Run as ``python -m kvfs.bench.worker GATE_FD BUFFER_BYTES``; it takes one JSON line
per job on stdin, and ends when stdin ends.
"""

import gc
import hashlib
import json
import mmap
import os
import sys
import time
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kvfs.bench import block_client
from kvfs.core.errors import VerifyFailed

_STAMP_BYTES: Final = 8


class NamedBlock(NamedTuple):
    """A block's two names, and its first and last 8 bytes."""

    name: bytes
    temporary: bytes
    stamp: bytes


class Task(NamedTuple):
    """One worker's share of a job."""

    blocks: list[NamedBlock]
    passes: int
    size_bytes: int
    flags: int


def store(task: Task, buffer: mmap.mmap) -> None:
    """Create, write once, close, rename."""
    size_bytes, tail = task.size_bytes, task.size_bytes - _STAMP_BYTES
    flags = task.flags | os.O_EXCL  # as vLLM's fs tier creates its temporary files
    with memoryview(buffer)[:size_bytes] as view:
        for name, temporary, stamp in task.blocks:
            buffer[:_STAMP_BYTES] = stamp
            buffer[tail:size_bytes] = stamp
            block_client.store(temporary, name, (view,), flags)


def load(task: Task, buffer: mmap.mmap) -> None:
    """Open, read once into the reused buffer, close."""
    size_bytes, tail = task.size_bytes, task.size_bytes - _STAMP_BYTES
    with memoryview(buffer)[:size_bytes] as view:
        for _ in range(task.passes):
            for name, _, stamp in task.blocks:
                got_bytes = block_client.load(name, view, task.flags)
                ends = buffer[:_STAMP_BYTES], buffer[tail:size_bytes]
                if got_bytes != size_bytes or ends != (stamp, stamp):
                    raise VerifyFailed(f"{name!r} is not what was stored")


def stat(task: Task, _buffer: mmap.mmap) -> None:
    """Look up names that exist."""
    names = [block.name for block in task.blocks]
    for _ in range(task.passes):
        for name in names:
            os.stat(name)


def access(task: Task, _buffer: mmap.mmap) -> None:
    """Look up names that do not exist."""
    names = [block.name for block in task.blocks]
    for _ in range(task.passes):
        for name in names:
            if os.access(name, os.F_OK):
                raise VerifyFailed(f"{name!r} exists, but was never stored")


def open_close(task: Task, _buffer: mmap.mmap) -> None:
    """Open and close without a read: the cost of a load besides its bytes."""
    names = [block.name for block in task.blocks]
    for _ in range(task.passes):
        for name in names:
            os.close(os.open(name, os.O_RDONLY))


def delete(task: Task, _buffer: mmap.mmap) -> None:
    """Unlink."""
    for block in task.blocks:
        os.unlink(block.name)


ACTIONS: Final[dict[str, Callable[[Task, mmap.mmap], dict[str, object] | None]]] = {
    action.__name__: action for action in (store, load, stat, access, open_close, delete)
}


def block_name(salt: str, number: int) -> bytes:
    """Return a name as LMCache makes it: model, world, rank and a hash of the block's tokens."""
    digest = hashlib.sha256(f"{salt}/{number}".encode()).hexdigest()
    return f"meta-llama--Llama-3.1-8B-Instruct@1@0@{digest}.data".encode()


def temporary_name(name: bytes) -> bytes:
    """Return the name a block is written under before its rename."""
    return name + b".tmp"


def block_stamp(name: bytes) -> bytes:
    """Return the first and last 8 bytes of the block *name*, by which a load recognises it."""
    return hashlib.sha256(name).digest()[:8]


def parse_task(order: dict[str, Any]) -> Task:
    """Return the task of one order line, all names made."""
    names = [block_name(order["salt"], order["first"] + i) for i in range(order["blocks"])]
    blocks = [NamedBlock(name, temporary_name(name), block_stamp(name)) for name in names]
    flags = os.O_DIRECT if order["direct"] else 0
    return Task(blocks, order["passes"], order["size_bytes"], flags)


def obey(order: dict[str, Any], buffer: mmap.mmap, gate_fd: int) -> dict[str, object]:
    """Do one order: prepare, say so, wait at the gate, run between two readings of the clock."""
    task, action = parse_task(order), ACTIONS[order["do"]]
    os.chdir(order["directory"])
    try:
        _say({"ready": True})
        os.read(gate_fd, 1)
        start_ns = time.monotonic_ns()
        told = action(task, buffer) or {}
        return {"start_ns": start_ns, "end_ns": time.monotonic_ns(), **told}
    finally:
        # A working directory on the mount would prevent its unmount.
        os.chdir("/")


def _say(reply: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Serve orders until stdin ends."""
    gate_fd, buffer_bytes = int(sys.argv[1]), int(sys.argv[2])
    gc.disable()
    with mmap.mmap(-1, buffer_bytes) as buffer:
        # Random bytes, written now: no page fault and no page of zeros while the clock runs.
        unit = os.urandom(min(buffer_bytes, 1 << 20))
        for offset in range(0, buffer_bytes, len(unit)):
            buffer[offset : offset + len(unit)] = unit[: buffer_bytes - offset]
        for line in sys.stdin:
            try:
                reply = obey(json.loads(line), buffer, gate_fd)
            except (OSError, VerifyFailed) as error:
                reply = {"failed": str(error)}
            _say(reply)


if __name__ == "__main__":
    main()
