"""Every command that README and docs show is run by a test, or stands here with what keeps it.

kvfs's own are run in tests/fuse/commands/test_documented_commands.py, connectors' in
tests/connectors.
"""

import argparse
import re
import shlex
import subprocess
from typing import Final

import pytest

from kvfs.cli.main import VERBS, configure_verb
from kvfs.cli.parser import OneLineParser
from tests.support.mounts.mounting import ROOT
from tests.support.rules.documented import Statement, quoted, statements

#: How a command begins: the test that runs it.
RUN: Final = {
    "kvfs mount ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs mkfs ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs fsck ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs status ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs top ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs doctor ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs report ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs export ": "tests/fuse/commands/test_export.py",
    "exportfs ": "tests/fuse/commands/test_export.py",
    "kvfs evict ": "tests/fuse/commands/test_documented_commands.py",
    "setfattr ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs warm ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs pin ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs drive ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs quota ": "tests/fuse/commands/test_quota.py",
    "kvfs umount ": "tests/fuse/commands/test_documented_commands.py",
    "kvfs demo": "tests/fuse/commands/test_demo.py",
    "kvfs size ": "tests/core/test_size_command.py",
    "kvfs simulate ": "tests/core/test_simulate_command.py",
    "kvfs record ": "tests/fuse/commands/test_record.py",
    "kvfs events ": "tests/fuse/control/test_events.py",
    "kvfs upgrade ": "tests/system/test_upgrades.py",
    "curl ": "tests/fuse/commands/test_documented_commands.py",
    "unshare ": "tests/system/test_containers.py",
    "mkfs.xfs ": "tests/fuse/commands/test_documented_commands.py",
    **dict.fromkeys(
        ("apt-get ", "echo ", "mkdir -p ", "mount /kv", "printf ", "sed -i ", "systemctl "),
        "tests/system/test_install.py",
    ),
    "umount /kv": "tests/system/test_install.py",
    "kvfs destroy ": "tests/system/test_install.py",
    "head -c ": "tests/guest/test_encryption.py",
    "chmod ": "tests/guest/test_encryption.py",
    "lmcache server ": "tests/connectors/test_lmcache_server.py",
    "lmcache bench server ": "tests/connectors/test_lmcache_server.py",
    "vllm serve ": "tests/connectors/test_vllm_engine.py",
    "mooncake_master ": "tests/connectors/test_mooncake.py",
    "export MOONCAKE_OFFLOAD_": "tests/connectors/test_mooncake.py",
    "export AWS_": "tests/connectors/test_object_store.py",
}
#: How a command begins that cannot be run here as it stands: why, and what is looked at instead.
NOT_RUN: Final = {
    "python3 -m venv ": "downloads; test_wheel.py does it without",
    "/opt/kvfs/bin/": "the same",
    "mount -t nfs ": "no kernel here has an NFS client; test_doctor_rules.py judges its options",
    "server:/kv /kv nfs ": "a line of fstab(5), which test_nfs_exports.py compares",
    "make ": "installs, runs for up to an hour, CI does it; that each has a recipe is tested",
    "python -m sglang.launch_server ": "wants a GPU; its file tiers are run (test_sglang_*.py)",
    "SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR=": "the same",
    "export SGLANG_HICACHE_": "for it; the tiers read these variables (test_sglang_*.py)",
    "export SPOOLCACHE_PATH=": "for vLLM with a GPU; the store is run (test_spoolcache.py)",
    "export AIBRIX_KV_CACHE_OL_L2_": "for vLLM with a GPU; both tiers are run (test_aibrix.py)",
    "python kv-cache.py ": "is in no package index; its calls are made (test_mlperf_pattern.py)",
    "pytest -s -m proof ": "a proof, of minutes; that there is one is tested",
    "kvfs bench ": "measures for minutes; the real parser takes each",
    "kvfs replay ": "serves a whole trace; test_replay.py serves a slice, the parser takes each",
    "git worktree ": "builds another commit of kvfs",
    ".venv/bin/python -m tests.bench.": "measures for minutes; it is there",
    ".venv/bin/python -m make.measured_tables": "writes pages; test_measured_tables.py calls it",
}


@pytest.mark.parametrize(
    "statement", statements(), ids=lambda one: f"{one.document}: {one.text[:60]}"
)
def test_each_command_has_its_place(statement: Statement) -> None:
    places = [*RUN, *NOT_RUN]
    found = [start for start in places if statement.text.startswith(start)]
    assert len(found) == 1, f"{statement.document}: in no list, or in two: {statement.text}"
    if found[0] in RUN:
        assert (ROOT / RUN[found[0]]).exists()


def test_no_list_names_what_nobody_shows() -> None:
    texts = [one.text for one in statements()]
    for start in (*RUN, *NOT_RUN):
        assert any(text.startswith(start) for text in texts), start


def parser_of(verb: str) -> argparse.ArgumentParser:
    """Return the real parser of one verb."""
    subparsers = OneLineParser(prog="kvfs", allow_abbrev=False).add_subparsers()
    configure_verb(verb, subparsers)
    found = subparsers.choices[verb]
    assert isinstance(found, argparse.ArgumentParser)
    return found


OWN: Final = [one for one in statements() if one.text.startswith("kvfs ")]


@pytest.mark.parametrize("statement", OWN, ids=lambda one: one.text[:60])
def test_kvfs_reads_each_of_its_own_commands(statement: Statement) -> None:
    """As they stand, with what may be left out (in brackets) said."""
    _, verb, *words = shlex.split(re.sub(r"[][]", "", statement.text), comments=True)
    parser_of(verb).parse_args(words)


@pytest.mark.parametrize("statement", quoted("kvfs"), ids=lambda one: f"{one.document} {one.text}")
def test_what_sentences_say_of_kvfs_is_there(statement: Statement) -> None:
    """Verbs and flags; what such a one is about need not be said."""
    _, verb, *words = statement.words
    if verb == "VERB":
        verb = "status"
    assert verb in VERBS
    parser, known = parser_of(verb), set[str]()
    waiting = [parser]
    while waiting:
        for action in waiting.pop()._actions:
            known.update(action.option_strings)
            if isinstance(action, argparse._SubParsersAction):
                known.update(action.choices)
                waiting.extend(action.choices.values())
    flags = [word.partition("=")[0] for word in words if word.startswith("-")]
    assert set(flags) <= known


@pytest.mark.parametrize(
    "words",
    sorted(
        {
            tuple(one.words)
            for one in (*statements(), *quoted("make"))
            if one.text.startswith("make ")
        }
    ),
    ids=" ".join,
)
def test_make_has_a_recipe_for_each_target(words: tuple[str, ...]) -> None:
    done = subprocess.run(
        ["make", "--dry-run", *words[1:]], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_proofs_and_measures_named_are_there() -> None:
    named = [one.text for one in statements()]
    named += [one.text for program in ("python", "pytest") for one in quoted(program)]
    modules = {found[1] for text in named if (found := re.search(r"-m (tests\.bench\.\w+)", text))}
    files = {found[0] for text in named if (found := re.search(r"tests/\w+/test_\w+\.py", text))}
    assert modules
    assert files
    for module in modules:
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
    for file in files:
        assert "mark.proof" in (ROOT / file).read_text(), file
