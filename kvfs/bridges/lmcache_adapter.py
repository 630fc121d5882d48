"""LMCache's file adapters with hints by tenant: an L2 adapter that LMCache loads as ``plugin``.

It is LMCache's own adapter of any type that keeps files (``fs_native``, ``fs``), which a listener
follows. Of a request LMCache tells an L2 adapter one thing: ``ObjectKey.cache_salt``, which says
whose block it is. ``priority`` and ``kv_transfer_params`` end before. So the configuration says
what the blocks of a salt are worth, in the words of ``user.kvfs.hint``.

The facts about LMCache are of 0.5.6: ``lmcache/v1/distributed/l2_adapters/plugin_l2_adapter.py``,
``lmcache/v1/distributed/internal_api.py`` (L2AdapterListener).
"""

import fnmatch
import os
from collections.abc import Mapping, Sequence
from typing import Any, Final

from lmcache.v1.distributed.api import ObjectKey
from lmcache.v1.distributed.internal_api import L2AdapterListener
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface
from lmcache.v1.distributed.l2_adapters.config import get_l2_adapter_config_class
from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import _object_key_to_filename

from kvfs.bridges.block_hints import BlockHints
from kvfs.bridges.envelope import BlockWish
from kvfs.core.hints import Do, hint_of

#: Settings that are not of the adapter itself.
_OWN: Final = ("type", "hints", "hints_socket")


class KvfsL2Adapter(L2AdapterInterface):
    """Makes an adapter as its settings say, and has it followed; there is no object of this class.

    LMCache calls it with ``adapter_params``: ``type`` and the settings of that adapter, ``hints``
    by salt (``*`` stands for any part of it), and ``hints_socket`` in place of the usual one.
    """

    def __new__(cls, settings: Mapping[str, Any], **more: object) -> L2AdapterInterface:
        """Return the adapter. Raises ValueError for what it or a hint cannot be."""
        kind = str(settings.get("type", "fs_native"))
        rest = {name: value for name, value in settings.items() if name not in _OWN}
        by_salt = wishes_by_salt(settings.get("hints", {}))
        adapter: L2AdapterInterface = create_l2_adapter(
            get_l2_adapter_config_class(kind).from_dict(rest), **more
        )
        directory = str(rest["base_path"])
        hints = BlockHints(directory, settings.get("hints_socket"))
        adapter.register_listener(SaltListener(directory, hints, by_salt))
        return adapter


def wishes_by_salt(said: Mapping[str, str]) -> dict[str, BlockWish]:
    """Return what is asked for the blocks of each salt. Raises ValueError."""
    found: dict[str, BlockWish] = {}
    for salt, text in said.items():
        hint = hint_of(text.encode())
        if hint.session:
            raise ValueError(f"hints: {salt}: a salt has no session")
        if hint.once:
            found[salt] = BlockWish(Do.DEMOTE)
        elif hint.priority:
            found[salt] = BlockWish(Do.RETAIN, hint.priority, hint.ttl_s)
    return found


class SaltListener(L2AdapterListener):
    """Hints each block that an adapter has stored or loaded."""

    def __init__(self, directory: str, hints: BlockHints, by_salt: Mapping[str, BlockWish]) -> None:
        self._directory, self._hints, self._by_salt = directory, hints, by_salt

    def on_l2_keys_stored(self, keys: Sequence[ObjectKey], _sizes: Sequence[int]) -> None:
        """Hint them."""
        self._send(keys)

    def on_l2_keys_accessed(self, keys: Sequence[ObjectKey]) -> None:
        """Hint them anew: the time of their priority begins again."""
        self._send(keys)

    def on_l2_keys_deleted(self, _keys: Sequence[ObjectKey]) -> None:
        """Nothing is there to be hinted."""

    def _send(self, keys: Sequence[ObjectKey]) -> None:
        if not self._by_salt:
            return
        wishes = ((key, self._wish_for(key.cache_salt)) for key in keys)
        self._hints.send(
            (os.path.join(self._directory, _object_key_to_filename(key)), wish)
            for key, wish in wishes
            if wish is not None
        )

    def _wish_for(self, salt: str) -> BlockWish | None:
        for pattern, wish in self._by_salt.items():
            if fnmatch.fnmatchcase(salt, pattern):
                return wish
        return None
