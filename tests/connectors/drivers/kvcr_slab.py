"""KVCR by its own interface, with little memory of its own: blocks go on to its file, its G3.

All of it is the wheel's, and NIXL's plug-in POSIX moves the bytes.
"""

import ctypes
import importlib.metadata
import mmap
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from json_lines import serve
from kvcr import KVCR, KVCRBindings
from kvcr.config import G3Options, KVCRBackendConfigs, KVCRConfig, LocalDramOptions
from kvcr.types import MemoryRef, OpEntryResult, QueryStatus, RegionDescriptor
from named_blocks import NamedBlocks
from patterns import UNTOUCHED

AGENT = "kvfs"
POOL = "kv"
MEMORY_SLOTS = 2
WAIT_S = 30


def address(memory: mmap.mmap) -> int:
    """Where it is."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class Runner(NamedBlocks):
    """One KVCR, and a buffer for one block."""

    def open(self, kv_dir: str, size_bytes: int, slots: int) -> dict[str, str]:
        """Start it with a file of *slots* blocks."""
        self.size_bytes = size_bytes
        self.memory = mmap.mmap(-1, MEMORY_SLOTS * size_bytes)
        self.buffer = mmap.mmap(-1, size_bytes)
        self.block = np.frombuffer(self.buffer, dtype=np.uint8)
        region = RegionDescriptor(addr=address(self.buffer), size=size_bytes, label=POOL)
        self.kvcr = KVCR(
            KVCRConfig(
                nixl_agent_name=AGENT,
                pool_layouts=[(POOL, size_bytes)],
                operation_timeout_ms=WAIT_S * 1000,
                abandon_timeout_ms=2 * WAIT_S * 1000,
                nixl_listen_port=0,
            ),
            KVCRBindings(
                request_pin=lambda _: 0, poll_pin_results=list, release_pin=lambda _: True
            ),
            KVCRBackendConfigs(
                framework_regions=[region],
                local_dram=LocalDramOptions([(POOL, address(self.memory), len(self.memory))]),
                g3=G3Options(
                    paths=(Path(kv_dir) / "g3",),
                    capacity_bytes_per_file=slots * size_bytes,
                    backend="POSIX",
                ),
            ),
        )
        return {"version": importlib.metadata.version("kvcr")}

    def done(self, handle: int) -> bool:
        """Wait for the end of an operation; whether it succeeded."""
        give_up_s = time.monotonic() + WAIT_S
        while time.monotonic() < give_up_s:
            for found, results in self.kvcr.poll_completed():
                if found == handle:
                    return self.succeeded(results)
            time.sleep(0.001)  # an engine polls once a step
        return False

    def succeeded(self, results: Mapping[bytes, OpEntryResult]) -> bool:
        return all(result.success for result in results.values())

    def reference(self) -> list[MemoryRef]:
        """The buffer."""
        return [MemoryRef(end_point_name=AGENT, label=POOL, element_index=0)]

    def put(self, name: str, data: np.ndarray) -> bool:
        if self.has(name):  # what its callers ask first
            return True
        self.block[:] = data
        return self.done(self.kvcr.deposit({bytes.fromhex(name): self.reference()}))

    def get(self, name: str) -> np.ndarray | None:
        if not self.has(name):
            return None
        self.block.fill(UNTOUCHED)
        handle = self.kvcr.deliver({bytes.fromhex(name): self.reference()})
        return self.block if self.done(handle) else None

    def has(self, name: str) -> bool:
        ((status, _),) = self.kvcr.query([bytes.fromhex(name)])
        return status is not QueryStatus.MISS

    def close(self) -> None:
        """Stop it."""
        self.kvcr.close()


if __name__ == "__main__":
    serve(Runner(), "open", "store", "lookup", "load", "close")
