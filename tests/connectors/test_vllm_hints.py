"""Hints of requests in vLLM's engine (drivers/vllm_engine.py) reach kvfs by kvfs's tier, and count.

vLLM loads the tier by the command line of docs/hints.md. Its parser, scheduler, connector and tiers
are real, and so are the envelope and the mount.
"""

import json
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from tests.connectors.conftest import REFERENCE
from tests.connectors.connector import Connector, Drivers
from tests.connectors.contract import MIB
from tests.support.clients.stepping import until
from tests.support.forks.process import Process
from tests.support.mounts.mounting import KVFS, ROOT, Mounted, why_no_mounts, workplace
from tests.support.mounts.supervised import Supervised
from tests.support.rules.documented import of

pytestmark = pytest.mark.connectors

DRIVER: Final = ("vllm_engine", "native")
CHUNK_TOKENS: Final = 256
CHUNK_BYTES: Final = 2 * MIB
CAPACITY_BYTES: Final = 48 * MIB
SYSTEM_TOKENS: Final = 4 * CHUNK_TOKENS
PROMPT_TOKENS: Final = 7 * CHUNK_TOKENS
#: No prompt of a flood has these numbers.
PROMPT, OTHER_PROMPT, FIRST_OF_FLOOD = 1, 2, 100
ENVELOPE: Final = {
    "protocol_version": "0.1",
    "message_id": "m-1",
    "actions": [
        {
            "action_id": "a1",
            "action_type": "kv.retain",
            "action_version": "1.0",
            "payload": {
                "scope": None,
                "directives": [
                    {"start": 0, "end": SYSTEM_TOKENS, "priority": 80, "duration": 60},
                ],
            },
        },
        {"action_id": "a2", "action_type": "kv.deref", "action_version": "1.0", "payload": {}},
    ],
}


@pytest.fixture
def small() -> Iterator[Supervised]:
    """A pool that 24 chunks fill."""
    if REFERENCE or why_no_mounts() is not None:
        pytest.skip("about kvfs")
    with workplace() as directory:
        (directory / "pool").mkdir()
        flags = (f"--capacity={CAPACITY_BYTES}",)
        with Supervised(directory / "pool", directory / "kv", *flags) as mounted:
            yield mounted
            mounted.stop()
            assert mounted.errors() == []


@pytest.fixture
def engine(drivers: Drivers) -> Iterator[Connector]:
    """A process for an engine."""
    engine = drivers.take(*DRIVER)
    yield engine
    drivers.give_back(engine, *DRIVER)


def starts(engine: Connector, small: Mounted, **tier: object) -> None:
    """Start it with the page's command line, but its own place, size of memory and *tier*."""
    (command,) = of("docs/hints.md", "vllm serve ")
    kv_dir = small.path / "vllm"
    opened = engine.call("open", command=command, kv_dir=str(kv_dir), cpu_bytes=64 * MIB, tier=tier)
    assert opened["tiers"] == ["KvfsTierManager"]
    assert (opened["chunk_bytes"], opened["chunk_tokens"]) == (CHUNK_BYTES, CHUNK_TOKENS)


def asks(engine: Connector, prompt: int, **more: Any) -> int:  # noqa: ANN401
    """Ask for a prompt that begins with the system's; how many tokens came from the tier."""
    arguments = {"tokens": PROMPT_TOKENS, "system_tokens": SYSTEM_TOKENS, **more}
    told = engine.call("ask", prompt=prompt, **arguments)
    engine.call("settle")
    engine.call("forget")
    assert told.pop("intact"), engine.log_tail()
    return int(told["hit_tokens"])


def chunks(small: Mounted) -> set[Path]:
    """The files of chunks that are there."""
    return set((small.path / "vllm").rglob("*_g*/*.bin"))


def flood(engine: Connector, small: Mounted) -> None:
    """Other prompts, of three times the pool's capacity."""
    for number in range(-(-3 * CAPACITY_BYTES // (PROMPT_TOKENS // CHUNK_TOKENS * CHUNK_BYTES))):
        assert asks(engine, FIRST_OF_FLOOD + number, system_tokens=0) == 0
    assert small.status()["eviction"]["bytes"] >= 2 * CAPACITY_BYTES


@pytest.mark.parametrize("carrier", ["kv_hints", "kv_transfer_params", "none"])
def test_a_flood_leaves_what_the_envelope_retains(
    engine: Connector, small: Mounted, carrier: str
) -> None:
    """The system prompt's blocks are hits, the rest are not; without hints nothing is."""
    hints: dict[str, Any] = {
        "kv_hints": {"kv_hints": ENVELOPE},
        "kv_transfer_params": {"kv_transfer_params": {"kv_hint": ENVELOPE}},
        "none": {},
    }[carrier]
    starts(engine, small)
    assert asks(engine, PROMPT, **hints) == 0
    first = chunks(small)
    assert len(first) == PROMPT_TOKENS // CHUNK_TOKENS
    if hints:
        until(lambda: small.status()["hints"]["taken"] == len(first), "the hints are taken")
    flood(engine, small)
    kept = SYSTEM_TOKENS // CHUNK_TOKENS if hints else 0
    assert len(chunks(small) & first) == kept
    assert asks(engine, OTHER_PROMPT) == kept * CHUNK_TOKENS
    assert small.status()["hints"]["unknown"] == 0
    expected = {"sent": len(first)} if hints else {}
    assert engine.call("hints") == expected


def test_blocks_that_were_there_are_hinted_when_the_request_ends(
    engine: Connector, small: Mounted
) -> None:
    starts(engine, small)
    assert asks(engine, PROMPT) == 0
    assert asks(engine, PROMPT, kv_hints=ENVELOPE) == PROMPT_TOKENS
    until(lambda: small.status()["hints"]["taken"] == PROMPT_TOKENS // CHUNK_TOKENS, "hinted")


def test_what_a_router_wants_fetched_is_fetched(engine: Connector, small: Mounted) -> None:
    """Dynamo names blocks by the last 64 bits of their hashes, in order."""
    starts(engine, small)
    assert asks(engine, PROMPT) == 0
    hashes = [int(path.stem[-16:], 16) for path in chunks(small)]
    payload = {"source_control_endpoint": "tcp://host-a:25000", "block_hashes": [*hashes[:5], 7]}
    action = {"action_id": "a", "action_type": "kv.fetch", "action_version": "1.0"}
    envelope = {**ENVELOPE, "actions": [{**action, "payload": payload}]}
    assert asks(engine, PROMPT, kv_hints=envelope) == PROMPT_TOKENS
    until(lambda: small.status()["hints"]["fetched"] == 5, "five are fetched")


def test_without_a_server_of_hints_all_is_served(engine: Connector, small: Mounted) -> None:
    """And with hints that nobody knows: they are counted."""
    starts(engine, small, hints_socket=str(small.path / "no.hints"))
    unknown = {**ENVELOPE["actions"][0], "action_version": "7.0"}  # type: ignore[index]
    envelope = {**ENVELOPE, "actions": [unknown, *ENVELOPE["actions"]]}
    assert asks(engine, PROMPT, kv_hints=envelope) == 0
    assert asks(engine, PROMPT, kv_hints=envelope) == PROMPT_TOKENS
    assert small.status()["hints"]["taken"] == 0
    engine.call("forget_hints")
    assert engine.call("hints") == {"dropped": 2 * PROMPT_TOKENS // CHUNK_TOKENS, "unknown": 2}


def test_a_server_that_restarts_gets_the_next_hints(engine: Connector, small: Mounted) -> None:
    starts(engine, small)
    chunks_each = PROMPT_TOKENS // CHUNK_TOKENS
    assert asks(engine, PROMPT, kv_hints=ENVELOPE) == 0
    until(lambda: small.status()["hints"]["taken"] == chunks_each, "the first")
    small.kill_server()
    small.follow_server()
    assert asks(engine, PROMPT, kv_hints=ENVELOPE) == PROMPT_TOKENS

    def second_are_taken() -> bool:
        engine.call("settle")
        return bool(small.status()["hints"]["taken"] == chunks_each)

    until(second_are_taken, "the second, by the second server")


def test_vllm_reads_what_events_say_in_its_format(engine: Connector, small: Mounted) -> None:
    """`kvfs events --format vllm`, read by vLLM's own KVEventBatch."""
    starts(engine, small)
    count = 4
    command = [*KVFS, "events", str(small.path), "--format=vllm", f"--count={count}"]
    with Process(command, stdout=subprocess.PIPE, cwd=ROOT) as printing:
        assert printing.stdout is not None
        prompt = FIRST_OF_FLOOD
        # It listens from some moment on, which it does not tell.
        while printing.poll() is None:
            asks(engine, prompt, system_tokens=0)
            prompt += 1
        said = printing.stdout.read()
    events = engine.call("read_events", batches=said.hex())
    assert len(events) == count
    assert {one["type"] for one in events} <= {"BlockStored", "BlockRemoved"}
    stored = [one for one in events if one["type"] == "BlockStored"]
    hashes = {int(path.stem[-16:], 16) for path in chunks(small)}
    assert {one["block_hashes"][0] for one in stored} <= hashes
    assert stored
    assert all(one["medium"] == "STORAGE" and one["group_idx"] == 0 for one in events)


def test_events_are_published_as_vllm_publishes_its_own(
    connectors_python: Path, engine: Connector, small: Mounted
) -> None:
    """By the code of the command, where pyzmq is; read by vLLM's own schema in three parts."""
    starts(engine, small)
    with socket.create_server(("127.0.0.1", 0)) as free:
        endpoint = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    engine.call("subscribe", endpoint=endpoint, topic="kv@")
    command = [str(connectors_python), "-m", "kvfs.cli.main", "events", str(small.path)]
    flags = ["--format=vllm", f"--publish={endpoint}", "--topic=kv@host-a@model", "--count=12"]
    with subprocess.Popen([*command, *flags], cwd=ROOT) as publishing:
        prompt = FIRST_OF_FLOOD
        while publishing.poll() is None:
            asks(engine, prompt, system_tokens=0)
            prompt += 1
    assert publishing.returncode == 0
    got = engine.call("published")
    assert {topic for topic, _, _ in got} == {"kv@host-a@model"}
    numbers = [number for _, number, _ in got]
    assert numbers == list(range(numbers[0], 12))
    assert {one["type"] for _, _, one in got} <= {"BlockStored", "BlockRemoved"}


def test_the_page_shows_the_envelope_of_this_test() -> None:
    page = (ROOT / "docs" / "hints.md").read_text()
    shown = json.loads(page.partition("```json\n")[2].partition("```")[0])
    kinds = {one["action_type"] for one in shown["actions"]}
    assert {one["action_type"] for one in ENVELOPE["actions"]} <= kinds  # type: ignore[index]
