"""Mooncake Store with SSD offload: a master and a client of its own, on loopback.

A put goes to memory first and to disk by the client's next heartbeat. ``store`` waits for that and
drops the copy in memory, so that every load comes from disk; Mooncake counts those loads.
"""

import contextlib
import importlib.metadata
import os
import socket
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mooncake
import numpy as np
from json_lines import serve
from patterns import block_hash, pattern

WAIT_S = 40.0
POLL_S = 0.05
LEASE_MS = 100
MEMORY_BYTES = 64 << 20
DISK_BYTES = 256 << 20
KEYS_A_BUCKET = 2
"""A bucket is written when it is full; tests store an even number of blocks."""


class Store:
    """One client of one master."""

    def open(
        self,
        kv_dir: str,
        size_bytes: int,
        backend: str,
        limit_bytes: int = DISK_BYTES,
        wait_s: float = WAIT_S,
    ) -> str:
        """Start both, with ``backend`` on ``kv_dir``; the client scans what is there.

        ``wait_s`` bounds the wait for a store to be on disk.
        """
        self.size_bytes, self.wait_s = size_bytes, wait_s
        port, metrics_port = free_port(), free_port()
        self.master = subprocess.Popen(
            [
                str(Path(mooncake.__file__).with_name("mooncake_master")),
                f"--rpc_port={port}",
                "--rpc_address=127.0.0.1",
                f"--metrics_port={metrics_port}",
                "--enable_offload=true",
                "--enable_metric_reporting=false",
                f"--default_kv_lease_ttl={LEASE_MS}",
                "--logtostderr",
            ]
        )
        wait_for(lambda: listens(port))
        os.environ.update(
            MOONCAKE_OFFLOAD_FILE_STORAGE_PATH=kv_dir,
            MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR=backend,
            MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS="1",
            MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES=str(MEMORY_BYTES),
            MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES=str(limit_bytes),
            MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE=str(limit_bytes),
            MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT=str(KEYS_A_BUCKET),
            MOONCAKE_OFFSET_EVICTION_POLICY="fifo",
        )
        from mooncake.store import MooncakeDistributedStore

        self.client = MooncakeDistributedStore()
        failed = self.client.setup(
            "127.0.0.1",
            "P2PHANDSHAKE",
            MEMORY_BYTES,
            MEMORY_BYTES,
            "tcp",
            "",
            f"127.0.0.1:{port}",
            enable_ssd_offload=True,
            ssd_offload_path=kv_dir,
        )
        assert not failed, f"setup: {failed}"
        return importlib.metadata.version("mooncake-transfer-engine-non-cuda")

    def store(self, keys: list[int], version: int) -> dict[str, bool]:
        """Put blocks, wait until all are on disk, forget them in memory."""
        # In one call: a heartbeat between two puts finds half a bucket, drops that task (a NACK to
        # the master) and never writes the block, whatever the file system.
        failed = self.client.put_batch(
            [self._key(key) for key in keys],
            [pattern(key, version, self.size_bytes).tobytes() for key in keys],
        )
        wait_for(lambda: all(self._on_disk(key) for key in keys), self.wait_s)
        in_memory = [self._key(key) for key in keys if self._in_memory(key)]
        # A replica under lease stays; the put's own lease is short.
        wait_for(lambda: self._cleared(in_memory))
        return {"ok": not failed}

    def lookup(self, keys: list[int]) -> list[int]:
        """Those of ``keys`` that the master knows."""
        known = self.client.batch_is_exist([self._key(key) for key in keys])
        return [key for key, found in zip(keys, known, strict=True) if found == 1]

    def load(self, keys: list[int], version: int) -> dict[str, list[int]]:
        """Get blocks: those that came, all of them from disk, and those whose bytes are right."""
        before = self.client.get_offload_rpc_read_count()
        loaded, intact = [], []
        for key in keys:
            data = self.client.get(self._key(key))
            if not data:
                continue
            loaded.append(key)
            if np.array_equal(
                np.frombuffer(data, dtype=np.uint8), pattern(key, version, self.size_bytes)
            ):
                intact.append(key)
        assert self.client.get_offload_rpc_read_count() - before >= len(loaded)
        return {"loaded": loaded, "intact": intact}

    def delete(self, keys: list[int]) -> None:
        """Remove blocks, once their leases have ended."""
        for key in keys:
            wait_for(lambda key=key: self.client.remove(self._key(key)) == 0)

    def close(self) -> None:
        """Close the client, then end the master."""
        self.client.close()
        del self.client
        self.master.terminate()
        self.master.wait()

    def _replicas(self, key: int) -> list[Any]:
        return self.client.get_replica_desc(self._key(key))

    def _on_disk(self, key: int) -> bool:
        return any(replica.is_local_disk_replica() for replica in self._replicas(key))

    def _in_memory(self, key: int) -> bool:
        return any(replica.is_memory_replica() for replica in self._replicas(key))

    def _cleared(self, names: list[str]) -> bool:
        if names:
            done = self.client.batch_replica_clear(names, self.client.get_hostname())
            for name in done:
                names.remove(name)
        return not names

    def _key(self, key: int) -> str:
        return block_hash(key).hex()


def free_port() -> int:
    """A port of loopback that nobody listens on now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def listens(port: int) -> bool:
    """Whether somebody listens on ``port`` by now."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
        return True
    return False


def wait_for(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    """Poll until ``condition`` holds. Raises TimeoutError."""
    deadline_s = time.monotonic() + wait_s
    while not condition():
        if time.monotonic() > deadline_s:
            raise TimeoutError("Mooncake did not get there")
        time.sleep(POLL_S)


if __name__ == "__main__":
    serve(Store(), "open", "store", "lookup", "load", "delete", "close")
