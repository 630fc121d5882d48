"""SGLang's HiCache storage ``file`` with hints: a backend that SGLang loads as ``dynamic``.

It is SGLang's own ``HiCacheFile``: same files, same names. A storage of HiCache knows pages and no
requests. What it is told of one is ``HiCacheStorageExtraInfo``: the pages before those that a call
is about (``prefix_keys``), and free values, in which the envelope lies under ``kv_hints``. So the
envelope is read where a request looks for its pages (``batch_exists``), and a page that is stored
afterwards is hinted then. What a request generates it never looks for: ``covers_output`` says
nothing here.

The facts about SGLang are of 0.5.23: ``python/sglang/srt/mem_cache/hicache_storage.py``. It carries
the envelope as far as its scheduler, and its controller does not put it there yet.
"""

import os
import threading
from collections.abc import Iterator, Sequence
from typing import Final

from sglang.srt.mem_cache.hicache_storage import HiCacheFile

from kvfs.bridges.block_hints import BlockHints, LaterWishes
from kvfs.bridges.envelope import BlockWish, RequestHints, hints_of
from kvfs.core.hints import Do

#: Of a page's hash so many hex digits are in envelopes (``hash_str_to_int64`` of SGLang).
_DIGITS: Final = 16
_KEY: Final = "kv_hints"


class KvfsHiCacheFile(HiCacheFile):
    """SGLang's storage ``file`` that passes on hints; several threads may call it."""

    def __init__(self, storage_config: object, _more: object = None) -> None:
        """As SGLang's factory calls it; extra_config may have a ``hints_socket``."""
        super().__init__(storage_config)
        extra = getattr(storage_config, "extra_config", None) or {}
        self._hints = BlockHints(self.file_path, extra.get("hints_socket"))
        self._lock = threading.Lock()
        self._wishes = LaterWishes()

    def batch_exists(self, keys: list[str], extra_info: object = None) -> int:
        """Read the envelope, too."""
        found: int = super().batch_exists(keys, extra_info)
        self._read(keys, found, extra_info)
        return found

    def batch_exists_v2(
        self, keys: list[str], pool_transfers: object = None, extra_info: object = None
    ) -> object:
        """Read the envelope, too."""
        found = super().batch_exists_v2(keys, pool_transfers, extra_info)
        self._read(keys, found.kv_hit_pages, extra_info)
        return found

    def get(self, key: str, *given: object, **more: object) -> object:
        """Say of a page that is of no use after this request, once it has it, that it may go."""
        block: object = super().get(key, *given, **more)
        wish = self._wishes.of(key)
        if block is not None and wish is not None and wish.do is Do.DEMOTE:
            self._send([(key, wish)])
        return block

    def set(self, key: str, *given: object, **more: object) -> bool:
        """Hint the page, if a request that looked for it wished that."""
        stored: bool = super().set(key, *given, **more)
        wish = self._wishes.of(key) if stored else None
        if wish is not None:
            self._send([(key, wish)])
        return stored

    def _read(self, keys: Sequence[str], found: int, extra_info: object) -> None:
        told = getattr(extra_info, "extra_info", None)
        envelope = told.get(_KEY) if isinstance(told, dict) else None
        if envelope is None:
            return
        hints = hints_of(envelope)
        with self._lock:
            self._hints.unknown += hints.unknown
        # None is also what a request says that begins at the start of its prompt.
        before: list[str] = getattr(extra_info, "prefix_keys", None) or []
        message = getattr(envelope, "message_id", None) or str(envelope)
        there = frozenset([*before, *keys[:found]])
        new = self._wishes.remember(message, self._wishes_of(hints, [*before, *keys]))
        self._send([(key, wish) for key, wish in new if key in there and wish.do is not Do.DEMOTE])
        wanted = [key for key in keys[:found] if _in_envelopes(key) in hints.fetched]
        self._send([(key, BlockWish(Do.FETCH)) for key in wanted])

    def _wishes_of(
        self, hints: RequestHints, keys: Sequence[str]
    ) -> Iterator[tuple[str, BlockWish]]:
        width_tokens: int = getattr(getattr(self, "mem_pool_host", None), "page_size", 0)
        if not width_tokens:  # how many tokens a page has is not known
            hints = hints._replace(directives=())
        for index, key in enumerate(keys, 1):
            end_token = index * width_tokens
            wish = hints.wish_for(end_token, prompt_tokens=end_token)
            if wish is not None:
                yield key, wish

    def _send(self, wishes: Sequence[tuple[str, BlockWish]]) -> None:
        self._hints.send((self._path(key), wish) for key, wish in wishes)

    def _path(self, key: str) -> str:
        return os.path.join(self.file_path, f"{self._get_suffixed_key(key)}.bin")


def _in_envelopes(key: str) -> int:
    """Return the hash of a page as routers know it; -1 for a name that is no hash."""
    try:
        return int(key[:_DIGITS], 16)
    except ValueError:
        return -1
