"""Requests that store several times what a directory has room for, on any file system.

Each request does what an engine does: it looks up the blocks of an earlier prompt, stores those of
a new one meanwhile, and then loads what the lookup found. Half of the requests ask for one prompt
that all share, as a system prompt is; the others for one that was stored up to one room ago. The
same seed makes the same requests, so that several file systems can be compared.
"""

import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from kvfs.bench import block_client
from kvfs.bench.kv_load import THREADS
from kvfs.bench.kv_shapes import Bytes, KvContent, aligned_buffer, first_difference
from kvfs.core.errors import NO_SPACE, VerifyFailed
from kvfs.core.sizes import MIB
from kvfs.core.types import PAGE_BYTES

#: 32 tokens of Llama 3.1 8B.
BLOCK_BYTES: Final = 4 * MIB
#: Blocks of a prompt, one after the other: a block is of use only behind those before it.
PROMPT_BLOCKS: Final = 4
PROMPT_BYTES: Final = PROMPT_BLOCKS * BLOCK_BYTES
#: How many times the room is stored.
TIMES: Final = 5
#: A slow disk is given so long, and then less than TIMES is stored.
_SIDE_MAX_S: Final = 25.0


class PromptPair(NamedTuple):
    """One request: the number of the prompt that is stored, and of the one that is asked for."""

    new: int
    asked: int


@dataclass
class Overfilled:
    """What happened to blocks so far."""

    stored: int = 0
    #: Stores that the file system refused for want of space.
    refused: int = 0
    asked: int = 0
    #: Of those asked for: loaded, and every byte right.
    found: int = 0
    #: There when they were looked up, and gone when they were loaded.
    lost: int = 0

    def add(self, other: "Overfilled") -> None:
        """Add *other*."""
        self.stored += other.stored
        self.refused += other.refused
        self.asked += other.asked
        self.found += other.found
        self.lost += other.lost


def requests_for(room_bytes: int, seed: int) -> list[PromptPair]:
    """Return requests whose new prompts come to TIMES *room_bytes*."""
    chance = random.Random(seed)  # no secret: the same requests on each side
    room = max(2, room_bytes // PROMPT_BYTES)
    return [
        PromptPair(new, 0 if chance.random() < 0.5 else max(0, new - chance.randint(1, room)))
        for new in range(1, TIMES * room + 1)
    ]


class Overfill:
    """The requests on the directory *root*, which has room for *room_bytes*.

    *progress* is called in the caller's thread after each request, with the number of those done,
    that of all, and how far the run is, 0 to 1: by requests, or by the time that it may take.
    """

    def __init__(
        self, root: Path, room_bytes: int, *, seed: int, progress: Callable[[int, int, float], None]
    ) -> None:
        self._root = root
        self._requests: Sequence[PromptPair] = requests_for(room_bytes, seed)
        self._progress = progress
        self._content = KvContent(seed, BLOCK_BYTES)
        self._rooms = threading.local()
        self.counts = Overfilled()
        self.took_s = 0.0

    def run(self) -> None:
        """Serve the requests. Raises VerifyFailed for a wrong byte, OSError for a failed call."""
        begun_s = time.monotonic()
        self.counts.add(self._store(0))
        with ThreadPoolExecutor(THREADS, "overfill") as pool:
            waiting = [pool.submit(self._serve, request) for request in self._requests]
            try:
                for number, done in enumerate(as_completed(waiting), 1):
                    self.counts.add(done.result())
                    time_share = (time.monotonic() - begun_s) / _SIDE_MAX_S
                    self._progress(number, len(waiting), max(number / len(waiting), time_share))
                    if time_share > 1:
                        break
            finally:
                pool.shutdown(wait=True, cancel_futures=True)
        self.took_s = time.monotonic() - begun_s

    def _serve(self, request: PromptPair) -> Overfilled:
        done = Overfilled(asked=PROMPT_BLOCKS)
        there = 0
        while there < PROMPT_BLOCKS and self._is_there(request.asked, there):
            there += 1
        done.add(self._store(request.new))
        for number in range(there):
            if not self._load(request.asked, number):
                done.lost += 1
                break
            done.found += 1
        # What was not found is computed anew, and stored for the next one.
        done.add(self._store(request.asked, done.found))
        return done

    def _path(self, prompt: int, number: int) -> Path:
        return self._root / f"prompt-{prompt:06}-{number}.kv"

    def _is_there(self, prompt: int, number: int) -> bool:
        return block_client.look_up(self._path(prompt, number)) == BLOCK_BYTES

    def _store(self, prompt: int, first: int = 0) -> Overfilled:
        done = Overfilled()
        for number in range(first, PROMPT_BLOCKS):
            path = self._path(prompt, number)
            if self._is_there(prompt, number):
                continue
            draft = path.with_suffix(f".{threading.get_ident()}.tmp")
            data = self._content.fill(_key(prompt, number), self._room("expected"), BLOCK_BYTES)
            try:
                block_client.store(draft, path, (data.data,), 0)
                done.stored += 1
            except OSError as error:
                if error.errno not in NO_SPACE:
                    raise
                done.refused += 1
        return done

    def _load(self, prompt: int, number: int) -> bool:
        path, room = self._path(prompt, number), self._room("found")
        try:
            got_bytes = block_client.load(path, room.data, 0)
        except FileNotFoundError:
            return False
        expected = self._content.fill(_key(prompt, number), self._room("expected"), BLOCK_BYTES)
        offset_bytes = first_difference(expected, room[:got_bytes])
        if offset_bytes is not None:
            raise VerifyFailed(f"{path}: not what was stored at offset {offset_bytes}")
        return True

    def _room(self, purpose: str) -> Bytes:
        room: Bytes | None = getattr(self._rooms, purpose, None)
        if room is None:  # longer than a block, to notice surplus bytes
            room = aligned_buffer(BLOCK_BYTES + PAGE_BYTES)
            setattr(self._rooms, purpose, room)
        return room


def _key(prompt: int, number: int) -> int:
    return 1 + prompt * PROMPT_BLOCKS + number
