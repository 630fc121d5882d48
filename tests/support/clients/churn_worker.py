"""One client of a pool that is always full: it stores blocks, or loads them and checks every byte.

Run as a program; it prints one JSON object when it is done. A writer says first that it is ready,
and begins when it is told a line. A block's header says whose block it
is and which version; the rest follows from that.
"""

import argparse
import errno
import json
import os
import random
import select
import struct
import sys
import time
from collections import Counter
from typing import Final

import numpy as np

from kvfs.bench.kv_shapes import KvContent, first_difference

#: Name, key of the content, size.
HEADER: Final = struct.Struct("<QQQ")
ALIGNED: Final = 4096
WRITE_BYTES: Final = 4 << 20
SEED: Final = 5


def path_of(root: str, number: int) -> str:
    """Return where block *number* lies."""
    return f"{root}/{number % 4}/{number:06d}.kv"


def drawn_size(source: random.Random, least_bytes: int, most_bytes: int) -> int:
    """Return a size, as often below the geometric middle as above it."""
    size_bytes = int(least_bytes * (most_bytes / least_bytes) ** source.random())
    return max(ALIGNED, size_bytes // ALIGNED * ALIGNED)


class Client:
    """What both kinds share."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.random = random.Random(args.seed)
        self.content = KvContent(SEED, args.most_bytes)
        self.room = np.zeros(args.most_bytes + 8, np.uint8)
        self.content.fill(0, self.room, args.most_bytes)  # the first one is slow
        self.failed: Counter[str] = Counter()
        self.took_s: list[float] = []

    def block(self, number: int, key: int, size_bytes: int) -> np.ndarray:
        data = self.content.fill(key, self.room, size_bytes)
        HEADER.pack_into(data.data, 0, number, key, size_bytes)
        return data

    def note(self, error: OSError, call: str) -> None:
        self.failed[f"{call}: {errno.errorcode.get(error.errno or 0, '?')}"] += 1


class Writer(Client):
    """Stores *bytes* in cycles of temporary name and rename."""

    def run(self) -> dict[str, object]:
        stored_bytes = blocks = 0
        print("ready", flush=True)
        sys.stdin.readline()
        while stored_bytes < self.args.bytes:
            number = self.random.randrange(self.args.names)
            if self.args.stored:
                number = self.args.seed % self.args.writers + self.args.writers * blocks
            size_bytes = drawn_size(self.random, self.args.least_bytes, self.args.most_bytes)
            data = self.block(number, self.random.getrandbits(63), size_bytes)
            started_s = time.monotonic()
            if self.store(number, data):
                self.took_s.append(time.monotonic() - started_s)
                blocks += 1
                if self.args.stored:
                    with open(f"{self.args.stored}/{number % self.args.writers}", "ab") as file:
                        file.write(b".")
            stored_bytes += size_bytes
        return {"bytes": stored_bytes, "blocks": blocks}

    def store(self, number: int, data: np.ndarray) -> bool:
        final = path_of(self.args.root, number)
        temporary = f"{final}.{self.args.seed}.tmp"
        call = "open"
        try:
            fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                view = data.data
                while view:
                    call = "write"
                    view = view[os.write(fd, view[:WRITE_BYTES]) :]
            finally:
                call = "close" if call == "write" and not view else call
                os.close(fd)
            call = "rename"
            os.rename(temporary, final)
        except OSError as error:
            self.note(error, call)
            return False
        return True


class Reader(Client):
    """Loads random names until its standard input ends."""

    def run(self) -> dict[str, object]:
        hits = misses = 0
        wrong: list[str] = []
        os.set_blocking(0, False)
        while self.goes_on():
            number = self.drawn_number()
            try:
                with open(path_of(self.args.root, number), "rb", buffering=0) as file:
                    found = np.frombuffer(file.readall(), np.uint8)
            except FileNotFoundError:
                misses += 1
                # The pause of a program that was told to go on; the end of the run ends it.
                select.select([0], [], [], self.args.pause_s)
                continue
            except OSError as error:
                self.note(error, "load")
                continue
            hits += 1
            complaint = self.complaint(number, found)
            if complaint:
                wrong.append(complaint)
        return {"hits": hits, "misses": misses, "wrong": wrong[:5]}

    def drawn_number(self) -> int:
        """Return one of the names: of those in use, or of those that were stored last."""
        if not self.args.stored:
            return self.random.randrange(int(self.args.names))
        writer = self.random.randrange(self.args.writers)
        try:
            blocks = os.stat(f"{self.args.stored}/{writer}").st_size
        except FileNotFoundError:
            return writer
        writers = int(self.args.writers)
        of_each = self.args.names // writers
        return writer + writers * self.random.randrange(max(0, blocks - of_each), blocks)

    def goes_on(self) -> bool:
        try:
            return os.read(0, 1) != b""
        except BlockingIOError:
            return True

    def complaint(self, number: int, found: np.ndarray) -> str | None:
        if len(found) < HEADER.size:
            return f"{number}: {len(found)} bytes"
        whose, key, size_bytes = HEADER.unpack_from(found.data)
        if whose != number or size_bytes != len(found) or size_bytes > self.args.most_bytes:
            return f"{number}: {len(found)} bytes of {whose} with {size_bytes}"
        at = first_difference(self.block(number, key, size_bytes), found)
        return None if at is None else f"{number}: differs at {at} of {size_bytes}"


def main() -> int:
    """Run one client."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("writer", "reader"))
    parser.add_argument("root")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--names", type=int, default=100)
    parser.add_argument("--least-bytes", type=int, default=1 << 19)
    parser.add_argument("--most-bytes", type=int, default=64 << 20)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--writers", type=int, default=1)
    parser.add_argument("--stored", help="no name twice; a directory that tells how many there are")
    parser.add_argument("--pause-s", type=float, default=0.002)
    args = parser.parse_args()
    client = (Writer if args.role == "writer" else Reader)(args)
    result = client.run()
    slow_s = sorted(client.took_s)
    result["p50_s"] = slow_s[len(slow_s) // 2] if slow_s else None
    result["p99_s"] = slow_s[len(slow_s) * 99 // 100] if slow_s else None
    result["failed"] = dict(client.failed)
    print(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
