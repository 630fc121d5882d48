"""What connectors do below a mount because of their settings, which kvfs cannot change.

Pure text, as in connector_settings.py; the settings are those of the versions in
docs/connectors.md.
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvfs.doctor.connector_settings import MOONCAKE_BACKEND, MOONCAKE_PATH, is_below
from kvfs.doctor.facts import ConnectorHabit

_KV_TRANSFER: Final = "--kv-transfer-config"
_POLICY: Final = "kv_load_failure_policy"
_FILE_PER_KEY: Final = "file_per_key_storage_backend"
#: The connector of LMCache whose files belong to another process, `lmcache server`.
_MULTIPROCESS: Final = "LMCacheMPConnector"


def fails_requests(
    words: Sequence[str], told: str, mountpoint: str, origin: str
) -> Iterator[ConnectorHabit]:
    """Yield a habit if vLLM fails requests whose blocks are gone, which is its default.

    *words* is its command line, *told* its other settings (environment, LMCache's file). The files
    of an LMCacheMPConnector belong to another process, so that habit is ``is_remote``.
    """
    config = _kv_transfer_config(words)
    if not config.get("kv_connector") or config.get(_POLICY) == "recompute":
        return
    texts = [*_texts(config), told]
    is_remote = any(_MULTIPROCESS in text for text in texts)
    if is_remote or any(_names(text, mountpoint) for text in texts):
        yield ConnectorHabit("fails requests", origin, _with_policy(words, config), is_remote)


def serves_below(words: Sequence[str], mountpoint: str) -> bool:
    """Tell whether *words* is an `lmcache server` that keeps blocks below *mountpoint*."""
    joined = " ".join(words)
    return "lmcache" in joined and "--l2-adapter" in joined and _names(joined, mountpoint)


def keeps_file_per_key(
    environment: Mapping[str, str], mountpoint: str, origin: str
) -> Iterator[ConnectorHabit]:
    """Yield a habit if Mooncake uses the backend that has no limit of its own."""
    if is_below(environment.get(MOONCAKE_PATH), mountpoint) and (
        environment.get(MOONCAKE_BACKEND) == _FILE_PER_KEY
    ):
        yield ConnectorHabit("keeps a file per key", origin)


def _kv_transfer_config(words: Sequence[str]) -> dict[str, Any]:
    """Return what vLLM's flag sets, as one JSON or as ``--kv-transfer-config.NAME VALUE``."""
    config: dict[str, Any] = {}
    for position, word in enumerate(words):
        flag, has_value, value = word.partition("=")
        flag, _, name = flag.partition(".")
        if flag.replace("_", "-") != _KV_TRANSFER:
            continue
        if not has_value and position + 1 < len(words):
            value = words[position + 1]
        if name:
            config[name] = value
            continue
        try:
            parsed = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if isinstance(parsed, dict):
            config.update(parsed)
    return config


def _with_policy(words: Sequence[str], config: Mapping[str, Any]) -> str:
    """Return command line *words* with the policy "recompute" added to *config*."""
    kept: list[str] = []
    skip = False
    for word in words:
        flag, has_value, _ = word.partition("=")
        if skip or not word:
            skip = False
        elif flag.partition(".")[0].replace("_", "-") == _KV_TRANSFER:
            skip = not has_value
        else:
            kept.append(word)
    wanted = json.dumps({**config, _POLICY: "recompute"})
    return shlex.join([*kept, _KV_TRANSFER, wanted])


def _texts(value: object) -> Iterator[str]:
    """Yield every text in a JSON value."""
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, str):
            yield one
        elif isinstance(one, dict):
            waiting.extend(one.values())
        elif isinstance(one, list):
            waiting.extend(one)


def _names(text: str, mountpoint: str) -> bool:
    """Tell whether *text* names *mountpoint* or a path below it."""
    path = rf"(?:^|[\s\"'=:,]|//){re.escape(mountpoint)}(?=[/\s\"',]|$)"
    return re.search(path, text, re.MULTILINE) is not None
