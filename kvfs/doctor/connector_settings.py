"""What a connector may keep and does: read from its environment, command line and settings files.

Only text is parsed here; the caller knows which process or file it is from. The settings are those
of the versions in docs/connectors/README.md.
"""

import json
import math
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from kvfs.core.sizes import GIB, parse_size
from kvfs.doctor.facts import ConnectorHabit, ConnectorLimit

#: Environment variable with the path of LMCache's settings file (v1, in process).
LMCACHE_CONFIG: Final = "LMCACHE_CONFIG_FILE"
_YAML_LINE: Final = re.compile(r"(\s*)[\"']?([\w.]+)[\"']?\s*[:=]\s*[\"']?([^\"'#\n,]*)")
#: Variables of LMCache for the settings of its file; they win over the file.
_OVERRIDES: Final = {
    "local_disk": "LMCACHE_LOCAL_DISK",
    "max_local_disk_size": "LMCACHE_MAX_LOCAL_DISK_SIZE",
}
MOONCAKE_PATH: Final = "MOONCAKE_OFFLOAD_FILE_STORAGE_PATH"
MOONCAKE_BACKEND: Final = "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR"
_BUCKETS: Final = "bucket_storage_backend"
#: For each backend of Mooncake the variables with its limit; the first one that is set counts.
#: ``file_per_key`` has no limit: it keeps to 90 % of what statvfs says.
_MOONCAKE_LIMITS: Final = {
    _BUCKETS: ("MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE", "MOONCAKE_BUCKET_MAX_TOTAL_SIZE"),
    "offset_allocator_storage_backend": ("MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES",),
}
#: Slabs that a variable places and another one bounds, in GiB: FlexKV (several directories, with
#: ``;`` between them) and Dynamo KVBM.
_SLABS: Final = {
    "FLEXKV_SSD_CACHE_DIR": "FLEXKV_SSD_CACHE_GB",
    "DYN_KVBM_DISK_CACHE_DIR": "DYN_KVBM_DISK_CACHE_GB",
}
#: The same in vLLM's kv_connector_extra_config, in bytes: Marconi's second tier, and the disk of
#: vLLM's own SimpleCPUOffloadConnector.
_VLLM_SLABS: Final = {
    "l2_pool_path": "l2_bytes_to_use",
    "disk_path": "disk_capacity_bytes",
}
ROCKSDB_PATH: Final = "AIBRIX_KV_CACHE_OL_ROCKSDB_ROOT"
#: SGLang reads "200G" as decimal and "200Gi" as binary. Any other text switches its evictor off.
_SGLANG_SIZE: Final = re.compile(r"(\d+(?:\.\d+)?)([kmgt]?)(i?)", re.IGNORECASE)
_POWERS: Final = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4}
_KV_TRANSFER: Final = "--kv-transfer-config"
_POLICY: Final = "kv_load_failure_policy"
_FILE_PER_KEY: Final = "file_per_key_storage_backend"
#: The connector of LMCache whose files belong to another process, `lmcache server`.
_MULTIPROCESS: Final = "LMCacheMPConnector"


def from_environment(
    environment: Mapping[str, str], mountpoint: str, origin: str, config: str = "", file: str = ""
) -> Iterator[ConnectorLimit]:
    """Yield the limits that environment variables set for directories below *mountpoint*.

    *config* is the text of LMCache's settings *file*, if the environment names one.
    """
    yield from _of_local_disk(environment, config, file, mountpoint, origin)
    if is_below(environment.get("SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR"), mountpoint):
        name = "SGLANG_HICACHE_FILE_BACKEND_MAX_SIZE"
        if size_bytes := _sglang_bytes(environment.get(name, "")):
            yield ConnectorLimit(name, size_bytes, origin, keeps_index=False)
    if is_below(environment.get(MOONCAKE_PATH), mountpoint):
        backend = environment.get(MOONCAKE_BACKEND, _BUCKETS)
        for name in _MOONCAKE_LIMITS.get(backend, ()):
            if size_bytes := int(_number(environment.get(name))):
                yield ConnectorLimit(name, size_bytes, origin)
                break
    for path, name in _SLABS.items():
        size_gib = _number(environment.get(name))
        if size_gib and is_below(environment.get(path, "").replace(";", ","), mountpoint):
            yield ConnectorLimit(name, int(size_gib * GIB), origin, GIB)


def from_command_line(
    words: Sequence[str], mountpoint: str, origin: str
) -> Iterator[ConnectorLimit]:
    """Yield the limits in a command line for directories below *mountpoint*.

    They are in `lmcache server --l2-adapter JSON` and in vLLM's ``--kv-transfer-config``.
    """
    extra = _kv_transfer_config(words).get("kv_connector_extra_config")
    if isinstance(extra, dict):
        for path, name in _VLLM_SLABS.items():
            size_bytes = int(_number(extra.get(name)))
            if size_bytes and is_below(str(extra.get(path) or ""), mountpoint):
                yield ConnectorLimit(name, size_bytes, origin)
    for position, word in enumerate(words):
        flag, _, value = word.partition("=")
        if flag != "--l2-adapter":
            continue
        if not value and position + 1 < len(words):
            value = words[position + 1]
        try:
            adapter = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if isinstance(adapter, dict):
            yield from _of_adapter(adapter, mountpoint, origin)


def from_settings(text: str, mountpoint: str, file: str) -> Iterator[ConnectorLimit]:
    """Yield the limits in a settings file: LMCache's YAML, an L2 adapter's JSON, VAR=VALUE lines.

    YAML is read line by line, since these settings are plain ``name: value``.
    """
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        yield from (limit._replace(file=file) for limit in _of_adapter(parsed, mountpoint, file))
    if "local_disk" in _top_level(text):
        yield from _of_local_disk({}, text, file, mountpoint, file)
        return
    if isinstance(parsed, dict):
        return
    lines = (line.strip().removeprefix("export ").partition("=") for line in text.splitlines())
    variables = {name.strip(): value.strip().strip("\"'") for name, _, value in lines}
    for limit in from_environment(variables, mountpoint, file):
        yield limit._replace(file=file)


def from_flag(text: str) -> ConnectorLimit:
    """Return the limit given by `--connector-limit`. Raises ValueError."""
    return ConnectorLimit("the limit", parse_size(text), f"--connector-limit {text}")


def with_given(
    running: Sequence[ConnectorLimit], given: Sequence[ConnectorLimit]
) -> tuple[ConnectorLimit, ...]:
    """Return the limits of *running* connectors, and those *given* that are not among them.

    A given file may be that of a running connector: then it counts once. Two connectors with equal
    limits count twice.
    """
    of_files = {(limit.setting, limit.limit_bytes, limit.file) for limit in running if limit.file}
    others = [one for one in given if (one.setting, one.limit_bytes, one.file) not in of_files]
    return (*others, *running)


def _of_local_disk(
    environment: Mapping[str, str], config: str, file: str, mountpoint: str, origin: str
) -> Iterator[ConnectorLimit]:
    """Yield the limit of LMCache's local_disk: the environment wins over the file."""
    in_file = _top_level(config)
    said = {name: environment.get(over, in_file.get(name)) for name, over in _OVERRIDES.items()}
    size_gib = _number(said["max_local_disk_size"])
    if not is_below(said["local_disk"], mountpoint) or not size_gib:
        return
    limit = ConnectorLimit("max_local_disk_size", int(size_gib * GIB), origin, GIB, file)
    name = _OVERRIDES["max_local_disk_size"]
    yield limit._replace(setting=name, file="") if name in environment else limit


def _top_level(text: str) -> dict[str, str]:
    """Return the top-level settings of a YAML or JSON text; of equal names the last counts."""
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError):
        parsed = None
    if isinstance(parsed, dict):
        return {name: str(value) for name, value in parsed.items()}
    said: dict[str, str] = {}
    indent: str | None = None
    for line in text.splitlines():
        match = _YAML_LINE.match(line)
        if match is not None and (indent is None or match[1] == indent):
            indent = match[1]
            said[match[2]] = match[3].strip()
    return said


def _of_adapter(
    adapter: Mapping[str, Any], mountpoint: str, origin: str
) -> Iterator[ConnectorLimit]:
    """Yield what one L2 adapter of LMCache may keep."""
    parameters = adapter.get("backend_params")
    said = {**adapter, **(parameters if isinstance(parameters, dict) else {})}
    if not is_below(str(said.get("base_path") or said.get("file_path") or ""), mountpoint):
        return
    # nixl_store_dynamic does not notice that a block is gone; fs and fs_native look on disk.
    keeps_index = str(said.get("type", "")).startswith("nixl")
    if size_gib := _number(said.get("max_capacity_gb")):
        limit_bytes = int(size_gib * GIB)
        yield ConnectorLimit("max_capacity_gb", limit_bytes, origin, GIB, "", keeps_index)
    if said.get("type") == "nixl_store":
        file_bytes = int(_number(said.get("file_size")))
        if limit_bytes := file_bytes * int(_number(said.get("pool_size"))):
            yield ConnectorLimit("pool_size", limit_bytes, origin, file_bytes)


def is_below(path: str | None, mountpoint: str) -> bool:
    """Tell whether *path*, or one of a list of them, is the mountpoint or below it."""
    paths = [one.strip().removeprefix("file://") for one in (path or "").split(",")]
    return any(one == mountpoint or one.startswith(f"{mountpoint}/") for one in paths)


def _number(value: object) -> float:
    """Return *value* as a number; 0 if it is not a number, or infinite."""
    try:
        number = float(str(value))
    except ValueError:
        return 0.0
    return max(0.0, number) if math.isfinite(number) else 0.0


def _sglang_bytes(text: str) -> int:
    match = _SGLANG_SIZE.fullmatch(text.strip())
    if match is None:
        return 0
    number, unit, binary = match.groups()
    return int(_number(number) * (1024 if binary else 1000) ** _POWERS[unit.lower()])


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


def keeps_a_database(
    environment: Mapping[str, str], mountpoint: str, origin: str
) -> Iterator[ConnectorHabit]:
    """Yield a habit if AIBrix keeps a RocksDB below *mountpoint*; its ``command`` is the path."""
    path = environment.get(ROCKSDB_PATH, "")
    if is_below(path, mountpoint):
        yield ConnectorHabit("keeps a database", origin, path)


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
