"""Events of a mount as vLLM's own: which blocks a host has, for routers that follow engines.

The message is that of ``vllm/distributed/kv_events.py`` (0.33): a ``KVEventBatch`` in msgpack, of
``BlockStored``, ``BlockRemoved`` and ``AllBlocksCleared``. As in the events of vLLM's own tiers,
tokens and parent are not said (``_placeholder_stored`` of its ``offloading/events.py``): a
router has them from the engine's events and learns here where the block is, too.

A name tells the block if vLLM's tier ``fs`` gave it (``FileMapper`` of vLLM): the hash, and the
group of layers.
"""

import re
import struct
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

from kvfs.bridges.envelope import HASH_MASK
from kvfs.core.errors import UsageError

MEDIUM: Final = "STORAGE"
#: ``..._r<rank>/<hhh>/<hh>_g<group>/<hash>.bin``. All workers are in the files of rank 0.
_NAME: Final = re.compile(
    r"_r0/(?P<first>[0-9a-f]{3})/(?P<second>[0-9a-f]{2})_g(?P<group>\d{1,9})"
    r"/(?P<hash>(?P=first)(?P=second)[0-9a-f]{11,123})\.bin$"
)
_DOUBLE: Final = struct.Struct(">Bd")
_UINT64: Final = struct.Struct(">BQ")

#: For one listener; of more the newest are dropped, as by vLLM.
HIGH_WATER_MARK: Final = 100_000
_LINGER_MS: Final = 1000

Value = None | str | int | float | Sequence["Value"] | Mapping[str, "Value"]


class KnownBlock(NamedTuple):
    """A block as routers know it."""

    #: The last 64 bits of its hash, as vLLM sends them (VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES).
    block_hash: int
    group: int


def block_of(path: str) -> KnownBlock | None:
    """Return which block the name *path* tells; None if it tells none."""
    found = _NAME.search(path)
    if found is None or len(found["hash"]) % 2:
        return None
    return KnownBlock(int(found["hash"], 16) & HASH_MASK, int(found["group"]))


def batch_of_event(event: Mapping[str, Any]) -> bytes | None:
    """Return the batch that says *event*, a line of docs/events.md; None if it says nothing.

    After ``lost`` nobody knows what a router still should know: it forgets the host's blocks.
    """
    kind = event.get("event")
    if kind == "lost":
        return _batch(0.0, {"type": "AllBlocksCleared"})
    if kind not in ("stored", "evicted", "removed"):
        return None
    block = block_of(str(event.get("path", "")))
    if block is None:
        return None
    about: dict[str, Value] = {"block_hashes": [block.block_hash]}
    if kind == "stored":
        about |= {"type": "BlockStored", "parent_block_hash": None, "token_ids": []}
        about |= {"block_size": 0, "lora_id": None, "lora_name": None}
    else:
        about |= {"type": "BlockRemoved"}
    about |= {"medium": MEDIUM, "group_idx": block.group, "locality": "LOCAL"}
    return _batch(float(event.get("time", 0.0)), about)


class EventPublisher:
    """Sends messages by ZeroMQ as vLLM's ``ZmqEventPublisher`` does: topic, number, message."""

    def __init__(self, endpoint: str, topic: str = "") -> None:
        """Listen at *endpoint*, as ``tcp://*:5557``. Raises UsageError."""
        try:
            import zmq
        except ImportError:
            raise UsageError("--publish needs the Python package pyzmq: kvfs[bridges]") from None
        self._topic, self._number = topic.encode(), 0
        self._socket = zmq.Context.instance().socket(zmq.PUB)
        self._socket.set_hwm(HIGH_WATER_MARK)
        self._socket.linger = _LINGER_MS
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise UsageError(f"{endpoint}: {error}") from None

    def send(self, message: bytes) -> None:
        """Send it to all who listen, and wait for none."""
        self._socket.send_multipart((self._topic, self._number.to_bytes(8, "big"), message))
        self._number += 1

    def close(self) -> None:
        """Hang up, once what waits is sent or a second has passed."""
        self._socket.close()


def _batch(time_s: float, event: Mapping[str, Value]) -> bytes:
    return _packed([time_s, [event]])


def _packed(value: Value) -> bytes:
    """Return *value* in msgpack, in the formats that these messages need."""
    if value is None:
        return b"\xc0"
    if isinstance(value, float):
        return _DOUBLE.pack(0xCB, value)
    if isinstance(value, int):
        return bytes([value]) if value < 0x80 else _UINT64.pack(0xCF, value)
    if isinstance(value, str):
        text = value.encode()
        return _opened(0xA0, len(text), 0x20) + text
    if isinstance(value, Mapping):
        pairs = b"".join(_packed(key) + _packed(one) for key, one in value.items())
        return _opened(0x80, len(value), 0x10) + pairs
    return _opened(0x90, len(value), 0x10) + b"".join(map(_packed, value))


def _opened(kind: int, length: int, bound: int) -> bytes:
    assert length < bound, "no text, list or map of these messages is as long"
    return bytes([kind | length])
