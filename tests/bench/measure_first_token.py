"""The time to the first token, computed anew and with the KV state loaded from files.

Run as root: ``python -m tests.bench.measure_first_token [--tokens 512,2048] [--rounds 5]``: JSON,
and a table on stderr. A model of random weights (first_token_worker.py) computes the first token
of a prompt from nothing, and from its KV state on an XFS, on a pool, on a pool that was unmounted
and mounted again, and on a full pool through which five times its capacity of other prompts goes.

*Cold* is a load after the page cache was dropped, *warm* the same load once more. A loaded state
must be that of the computation, bit by bit, and lead to the same logits; else the run fails. The
model's Python, ``--python``, needs torch and transformers; it need not have kvfs.
"""

import argparse
import json
import math
import os
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final, NamedTuple

from rich.console import Console

import kvfs
from kvfs.bench.crew import hear, tell
from kvfs.bench.daemon import KVFS, mount_status
from kvfs.bench.self_made import (
    check_room,
    fill_holes,
    folders,
    kvfs_mount,
    loop_device,
    run_tool,
    torn_down,
    unmount,
)
from kvfs.core.errors import BenchFailed
from kvfs.core.sizes import parse_size
from tests.bench.first_token_report import FULL, POOL, RECOMPUTED, RESTARTED, XFS, rows, table
from tests.connectors.connector import interpreter

COLD: Final = "cold"
WARM: Final = "warm"
#: How much of other prompts goes through the full pool, in its capacities.
_OTHERS: Final = 5
#: Numbers of prompts: the one of the rounds, and the first ones of the full pool.
_PROMPT: Final = 1
_FIRST_HOT: Final = 1_000
_FIRST_OTHER: Final = 1_000_000
_WORKER: Final = Path(__file__).with_name("first_token_worker.py")
_DROP_CACHES: Final = Path("/proc/sys/vm/drop_caches")

Say = Callable[[str], None]


class Load(NamedTuple):
    """What is asked of the model, and where its KV state lies."""

    tokens: tuple[int, ...]
    rounds: int
    shape: str
    device: str
    threads: int
    device_bytes: int
    full_device_bytes: int
    full_tokens: int
    hot: int
    data_path: str
    backing: str
    stop_after_s: float


class Model:
    """The process with the model; leaving the stack ends it."""

    def __init__(self, stack: ExitStack, python: str, load: Load) -> None:
        most_tokens = max(*load.tokens, load.full_tokens)
        arguments = {"shape": load.shape, "device": load.device, "threads": load.threads}
        self._process = subprocess.Popen(
            [python, "-P", str(_WORKER), json.dumps(arguments | {"most_tokens": most_tokens})],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""},
            start_new_session=True,
        )
        stack.callback(self._process.communicate)
        stack.callback(self._process.kill)

    def ask(self, verb: str, **arguments: Any) -> dict[str, Any]:  # noqa: ANN401
        """Ask and wait for the answer. Raises ``VerifyFailed`` for a wrong load."""
        tell(self._process, {"do": verb, **arguments})
        return hear(self._process, f"{verb} {arguments}")


class Pool:
    """A mounted pool that can be mounted anew."""

    def __init__(self, stack: ExitStack, device: str, point: str, load: Load, say: Say) -> None:
        self._device, self.point, self._load, self._say = device, point, load, say
        self._mounted = stack.enter_context(ExitStack())
        self._mount()
        self.directory = os.path.join(point, "kv")
        os.mkdir(self.directory)

    def restart(self) -> None:
        """Unmount it, which ends its server, and mount it with a new one."""
        self._mounted.close()
        self._mount()

    def _mount(self) -> None:
        mounted = kvfs_mount(self._device, self.point, self._load.data_path, self._say)
        self._mounted.enter_context(mounted)


class Ground(NamedTuple):
    """Where KV state is kept."""

    xfs_directory: str
    pool: Pool
    full: Pool


def run(load: Load, python: str, say: Say) -> dict[str, Any]:
    """Make everything, measure, and return the report. Raises what ``self_made`` raises."""
    check_room(2 * load.device_bytes + load.full_device_bytes, load.backing)
    until_s = time.monotonic() + load.stop_after_s
    with torn_down() as stack:
        model = Model(stack, python, load)
        ground = _make(stack, load, say)
        about = model.ask("about")
        say(f"{about['parameters']:,} parameters, {about['token_bytes']} bytes of KV state a token")
        agreement = [_learn(model, ground, tokens, say) for tokens in load.tokens]
        samples: list[dict[str, Any]] = []
        for number in range(load.rounds):
            if number and time.monotonic() > until_s:
                say(f"time is up after {number} of {load.rounds} rounds")
                break
            samples += _round(model, ground, load, number)
            say(f"round {number + 1} of {load.rounds}")
        full = _fill(model, ground.full, load, about["token_bytes"], say) if load.hot else {}
        status = mount_status(ground.pool.point)
    samples += full.pop("samples", [])
    return {
        "format": 1,
        "kvfs": kvfs.__version__,
        "cores": os.cpu_count(),
        "data_path": status["data_path"],
        "load": load._asdict(),
        "model": about,
        "agreement": agreement,
        "rows": rows(samples),
        "full": full,
        "samples": samples,
    }


def _make(stack: ExitStack, load: Load, say: Say) -> Ground:
    images, points = folders(stack, load.backing)
    sizes_bytes = {"xfs": load.device_bytes, "kvfs": load.device_bytes}
    sizes_bytes["full"] = load.full_device_bytes
    for name in sizes_bytes:
        os.mkdir(points / name)
    say("making an XFS and two pools, and writing their backing files full")
    devices = {
        name: stack.enter_context(loop_device(images / name, size_bytes))
        for name, size_bytes in sizes_bytes.items()
    }
    run_tool("mkfs.xfs", "-q", devices["xfs"])
    for name in ("kvfs", "full"):
        run_tool(*KVFS, "mkfs", devices[name])
    fill_holes(images / "xfs", images / "kvfs")
    fill_holes(images / "full")
    stack.callback(unmount, str(points / "xfs"))
    run_tool("mount", "-t", "xfs", devices["xfs"], str(points / "xfs"))
    xfs_directory = str(points / "xfs" / "kv")
    os.mkdir(xfs_directory)
    pools = [Pool(stack, devices[name], str(points / name), load, say) for name in ("kvfs", "full")]
    return Ground(xfs_directory, *pools)


def _learn(model: Model, ground: Ground, tokens: int, say: Say) -> dict[str, Any]:
    """Compute the state of the prompt of *tokens*, and store it at both places."""
    say(f"{tokens:,} tokens: computing and storing")
    answer = model.ask("recompute", prompt=_PROMPT, tokens=tokens)
    for directory in (ground.xfs_directory, ground.pool.directory):
        model.ask("store", directory=directory)
    kept = ("step_has_same_token", "step_differs_by", "logits_reach")
    return {"tokens": tokens} | {key: answer[key] for key in kept}


def _round(model: Model, ground: Ground, load: Load, number: int) -> list[dict[str, Any]]:
    samples = [_recomputed(model, _PROMPT, tokens) for tokens in load.tokens]
    places = [(XFS, ground.xfs_directory), (POOL, ground.pool.directory)]
    for place, directory in places if number % 2 == 0 else reversed(places):
        samples += _loads(model, place, directory, load)
    ground.pool.restart()
    return samples + _loads(model, RESTARTED, ground.pool.directory, load)


def _recomputed(model: Model, prompt: int, tokens: int) -> dict[str, Any]:
    answer = model.ask("recompute", prompt=prompt, tokens=tokens)
    if not answer["again_the_same"]:
        raise BenchFailed(f"{tokens} tokens: computed twice, the KV state or the logits differ")
    told = {"place": RECOMPUTED, "cache": "", "tokens": tokens}
    return told | {"first_token_s": answer["first_token_s"]}


def _loads(model: Model, place: str, directory: str, load: Load) -> list[dict[str, Any]]:
    samples = []
    for tokens in load.tokens:
        os.sync()
        _DROP_CACHES.write_text("3")
        for cache in (COLD, WARM):
            answer = model.ask("load", directory=directory, prompt=_PROMPT, tokens=tokens)
            if not answer["hit"]:
                raise BenchFailed(f"{tokens} tokens on {place}: {answer['missing']} layers missing")
            samples.append({"place": place, "cache": cache, "tokens": tokens} | answer)
    return samples


def _fill(model: Model, pool: Pool, load: Load, token_bytes: int, say: Say) -> dict[str, Any]:
    """Let five times the capacity of prompts, asked once each, go past some that are asked often.

    A prompt that is not there whole is computed and stored.
    """
    tokens, capacity_bytes = load.full_tokens, mount_status(pool.point)["capacity_bytes"]
    others = math.ceil(_OTHERS * capacity_bytes / (tokens * token_bytes))
    say(f"the full pool: {others} other prompts of {tokens:,} tokens, {load.hot} hot ones")
    samples: list[dict[str, Any]] = []
    misses_s: list[float] = []
    counts = {"hot_hits": 0, "hot_misses": 0, "hot_misses_of_a_part": 0, "others": others}
    for number in range(-load.hot, others):
        # The hot ones are asked first, and then in turn after each other prompt.
        if number >= 0:
            _miss(model, pool, _FIRST_OTHER + number, tokens)
        hot = _FIRST_HOT + number % load.hot
        answer = model.ask("load", directory=pool.directory, prompt=hot, tokens=tokens)
        if answer["hit"]:
            counts["hot_hits"] += 1
            samples.append({"place": FULL, "cache": "as it came", "tokens": tokens} | answer)
            continue
        missed_s = answer["missed_s"] + _miss(model, pool, hot, tokens)
        if number >= 0:
            layers = model.ask("about")["layers"]
            counts["hot_misses"] += 1
            counts["hot_misses_of_a_part"] += answer["missing"] < layers
            misses_s.append(missed_s)
    eviction = mount_status(pool.point)["eviction"]
    if not eviction["blocks"]:
        raise BenchFailed("the pool that should be full has evicted nothing")
    stored_bytes = others * tokens * token_bytes
    return {
        "samples": samples,
        "capacity_bytes": capacity_bytes,
        "stored_bytes": stored_bytes,
        "missed_first_token_s": misses_s,
        "evicted_blocks": eviction["blocks"],
    } | counts


def _miss(model: Model, pool: Pool, prompt: int, tokens: int) -> float:
    first_token_s = float(_recomputed(model, prompt, tokens)["first_token_s"])
    model.ask("store", directory=pool.directory)
    return first_token_s


def main() -> None:
    """Measure; print the report and its table."""
    parser = argparse.ArgumentParser(prog="measure_first_token", allow_abbrev=False)
    add = parser.add_argument
    add("--tokens", default="512,2048", help="sizes of prompts (default 512,2048)")
    add("--rounds", type=int, default=5, help="times that each is asked (default 5)")
    add("--shape", default="small", help="tiny, small (default) or llama-3-8b")
    add("--device", default="cpu", help="where torch computes: cpu (default) or cuda")
    add("--python", default=str(interpreter() or ""), help="one with torch and transformers")
    add("--threads", type=int, default=2, help="readers and writers of files (default 2)")
    add("--device-size", type=parse_size, default="1G", help="of XFS and pool (default 1G)")
    add("--full-device-size", type=parse_size, default="1G", help="of the full pool (default 1G)")
    add("--full-tokens", type=int, default=2048, help="its prompts' size (default 2048)")
    add("--hot", type=int, default=4, help="its prompts that are asked often (4; 0: no full pool)")
    add("--data-path", choices=("auto", "passthrough", "daemon"), default="auto")
    add("--backing", default="/dev/shm", help="where the devices lie (default /dev/shm)")
    add("--stop-after-s", type=float, default=3600.0, help="begin no round later (3600)")
    given = vars(parser.parse_args())
    python = given.pop("python")
    if not python:
        parser.error("--python: name a Python with torch and transformers")
    tokens = tuple(int(each) for each in given.pop("tokens").split(","))
    given["device_bytes"] = given.pop("device_size")
    given["full_device_bytes"] = given.pop("full_device_size")
    notes = Console(stderr=True, highlight=False, width=104)
    start_s = time.monotonic()
    report = run(
        Load(tokens=tokens, **given),
        python,
        lambda line: notes.print(f"{time.monotonic() - start_s:6.1f} s  {line}"),
    )
    notes.print(table(report))
    if report["full"]:
        notes.print({key: each for key, each in report["full"].items() if "_s" not in key[-2:]})
    print(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
