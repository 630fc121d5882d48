"""NIXL's POSIX plug-in, driven as its users drive it: register, transfer, poll, deregister.

A block is a file of its own, written in place under its final name, as SGLang's HiCacheNixl does;
several are moved by one transfer request. The argument ``open`` gets chooses the I/O queue.
"""

import ctypes
import importlib.metadata
import mmap
import os
import time
from pathlib import Path

import numpy as np
from json_lines import serve
from nixl._api import nixl_agent, nixl_agent_config
from patterns import UNTOUCHED, block_hash, pattern

TRANSFER_WAIT_S = 40.0
PLUGIN = "POSIX"


class Agent:
    """One agent with a DRAM buffer of ``slots`` blocks."""

    def open(
        self, kv_dir: str, size_bytes: int, slots: int, queue: str, o_direct: bool
    ) -> dict[str, str]:
        """Create the plug-in with ``queue``: use_aio, use_uring or use_posix_aio."""
        self.kv_dir, self.size_bytes, self.slots = Path(kv_dir), size_bytes, slots
        self.flags = os.O_DIRECT if o_direct else 0
        config = nixl_agent_config(backends=[])
        self.agent = nixl_agent(f"agent-{os.getpid()}-{time.monotonic_ns()}", config)
        queues = ("use_aio", "use_uring", "use_posix_aio")
        params = {name: str(name == queue).lower() for name in queues}
        self.agent.create_backend(PLUGIN, params)
        self.map = mmap.mmap(-1, size_bytes * slots)
        self.buffer = np.frombuffer(self.map, dtype=np.uint8).reshape(slots, size_bytes)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.memory = self.agent.register_memory(
            [(self.address, size_bytes * slots, 0, "")], mem_type="DRAM"
        )
        return {"version": importlib.metadata.version("nixl"), **self.params()}

    def params(self) -> dict[str, str]:
        """What the plug-in says of its configuration."""
        return dict(self.agent.get_backend_params(PLUGIN))

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Write blocks, a transfer a batch."""
        done = []
        for batch in self._batches(keys):
            for slot, key in enumerate(batch):
                self.buffer[slot] = pattern(key, version, self.size_bytes)
            done.append(self._transfer("WRITE", batch, os.O_RDWR | os.O_CREAT))
        return {"ok": all(done)}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` whose files the plug-in's query finds."""
        asked = [(0, 0, 0, str(self._path(key))) for key in keys]
        answers = self.agent.query_memory(asked, PLUGIN, mem_type="FILE")
        return [key for key, answer in zip(keys, answers, strict=True) if answer is not None]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Read the blocks that can be opened; which came, and which are right."""
        loaded, intact = [], []
        there = [key for key in keys if self._path(key).exists()]
        for batch in self._batches(there):
            self.buffer.fill(UNTOUCHED)
            if not self._transfer("READ", batch, os.O_RDONLY):
                continue
            loaded += batch
            for slot, key in enumerate(batch):
                if np.array_equal(self.buffer[slot], pattern(key, version, self.size_bytes)):
                    intact.append(key)
        return {"loaded": loaded, "intact": intact}

    def delete(self, keys: list[int]) -> None:
        """Unlink the files: NIXL leaves that to its user."""
        for key in keys:
            self._path(key).unlink()

    def close(self) -> None:
        """Give the memory back and end the agent."""
        self.agent.deregister_memory(self.memory)
        del self.agent

    def _transfer(self, operation: str, batch: list[int], flags: int) -> bool:
        fds = [os.open(self._path(key), flags | self.flags, 0o644) for key in batch]
        try:
            files = self.agent.register_memory(
                [(0, self.size_bytes, fd, "") for fd in fds], mem_type="FILE"
            )
            slots = range(
                self.address, self.address + len(batch) * self.size_bytes, self.size_bytes
            )
            handle = self.agent.initialize_xfer(
                operation,
                self.agent.get_xfer_descs([(at, self.size_bytes, 0) for at in slots], "DRAM"),
                self.agent.get_xfer_descs([(0, self.size_bytes, fd) for fd in fds], "FILE"),
                self.agent.name,
            )
            state = self.agent.transfer(handle)
            deadline_s = time.monotonic() + TRANSFER_WAIT_S
            while state == "PROC" and time.monotonic() < deadline_s:
                time.sleep(0.0005)
                state = self.agent.check_xfer_state(handle)
            self.agent.release_xfer_handle(handle)
            self.agent.deregister_memory(files)
        finally:
            for fd in fds:
                os.close(fd)
        return state == "DONE"

    def _path(self, key: int) -> Path:
        return self.kv_dir / f"{block_hash(key).hex()}.kv"

    def _batches(self, keys: list[int]) -> list[list[int]]:
        return [keys[i : i + self.slots] for i in range(0, len(keys), self.slots)]


if __name__ == "__main__":
    serve(Agent(), "open", "store", "lookup", "load", "delete", "close")
