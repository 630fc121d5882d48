"""docs/connectors/README.md says what the tests hold, no less and no more."""

import importlib
import inspect
import re
import subprocess
from pathlib import Path
from typing import Final

import pytest

from tests.connectors.connector import Drivers, environment
from tests.connectors.contract import BlockFiles, ConnectorContract
from tests.connectors.document import DOCUMENT, FOLDER, examples

HERE: Final = Path(__file__).parent
#: Columns that no test is named after.
NO_CELLS: Final = frozenset({"connector", "tested version", "held by"})
#: Files whose tests are of no single connector.
NO_CONNECTORS: Final = frozenset(
    {"test_document", "test_demo", "test_lmcache_server", "test_mlperf_pattern"}
    | {"test_object_store"}
    | {"test_projects_own", "test_skips", "test_vllm_engine", "test_vllm_example"}
    | {"test_vllm_hints", "test_sglang_hints", "test_lmcache_hints"}
)


def rows() -> list[dict[str, str]]:
    """The table's rows, by column."""
    # The first table; the list of skips is another one.
    table = DOCUMENT.read_text().partition("\n| connector |")[2].partition("\n\n")[0]
    lines = [line for line in f"| connector |{table}".splitlines() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [dict(zip(cells[0], row, strict=True)) for row in cells[2:]]


def classes_of_tests() -> dict[str, type[ConnectorContract]]:
    """Every connector's test class, by name."""
    modules = [
        importlib.import_module(f"tests.connectors.{path.stem}")
        for path in HERE.glob("test_*.py")
        if path.stem not in NO_CONNECTORS
    ]
    return {
        name: found
        for module in modules
        for name, found in vars(module).items()
        if name.startswith("Test") and inspect.isclass(found)
    }


classes_of_tests.__test__ = False  # type: ignore[attr-defined]


def test_every_row_has_its_tests_and_every_class_its_row() -> None:
    held_by = [row["held by"] for row in rows()]
    assert sorted(held_by) == sorted(classes_of_tests())


@pytest.mark.parametrize("row", rows(), ids=lambda row: row["held by"])
def test_cells_say_what_the_class_holds(row: dict[str, str]) -> None:
    held = classes_of_tests()[row["held by"]]
    assert row["works"] == "yes"
    by_flag = "yes" if held.o_direct else "no"
    assert row["O_DIRECT"] == ("some" if held.o_direct_too else by_flag)
    restarted = "yes" if held.killed_warm else "if it ended"
    assert row["restart-warm"] == (restarted if held.restart_warm else "forgets")
    assert row["tested version"] == held.tested_version
    assert row["evicted"] == held.evicted
    assert row["full pool"] == getattr(held, "full_pool", "-")
    assert row["vanished"] == vanished(held)
    assert row["two processes"] == ("yes" if held.shares_directory else "own directories")
    for column in row:
        tests = [name for name in dir(held) if name.startswith(f"test_{column_of(column)}")]
        is_told = column not in NO_CELLS and row[column] != "-"
        assert bool(tests) == is_told, f"{column}: {tests}"


def vanished(held: type[ConnectorContract]) -> str:
    """What the class's tests say of a block that somebody else unlinked."""
    if not issubclass(held, BlockFiles):
        return "-"
    return "miss" if held.forgets_vanished else "load fails"


def column_of(column: str) -> str:
    """How the tests of a column begin."""
    return column.lower().replace(" ", "_").replace("-", "_")


@pytest.mark.connectors
def test_versions_are_the_tested_ones(connectors_python: Path) -> None:
    """What is installed is what the table names."""
    named = {part for row in rows() for part in row["tested version"].split(", ")}
    named = {part for part in named if not part.startswith("llama.cpp ")}  # in no Python package
    program = "import importlib.metadata as m, sys; print(m.version(sys.argv[1]))"
    for package, version in sorted(part.split(" ") for part in named):
        command = [str(connectors_python), "-c", program, package]
        done = subprocess.run(
            command,
            env=environment(connectors_python),
            capture_output=True,
            check=True,
            text=True,
        )
        assert done.stdout.strip().partition("+")[0] == version


@pytest.mark.connectors
def test_configurations_are_what_the_connectors_read(drivers: Drivers) -> None:
    """Each example for LMCache passes the parser that will read it."""
    reader = drivers.take("parse_document")
    found = reader.call("read", examples=examples())
    drivers.give_back(reader, "parse_document")
    assert found == {
        "servers": [
            ["FSNativeL2AdapterConfig"],
            ["FSNativeL2AdapterConfig", "S3L2AdapterConfig"],
        ],
        "adapters": ["DynamicNixlStoreL2AdapterConfig", "NixlStoreL2AdapterConfig"],
        "engines": [
            [
                "fs_connector_use_odirect",
                "remote_storage_plugin.fs.base_path",
                "save_chunk_meta",
            ],
            ["use_odirect"],
        ],
    }


#: What each page of a program answers, in this order.
ANSWERS: Final = [
    "What to set",
    "Why",
    "What a miss looks like",
    "What a restart keeps",
    "Versions",
]


@pytest.mark.parametrize(
    "page", sorted(set(FOLDER.glob("*.md")) - {DOCUMENT}), ids=lambda page: page.stem
)
def test_each_page_answers_the_same_questions(page: Path) -> None:
    assert re.findall(r"^## (.+)$", page.read_text(), re.MULTILINE) == ANSWERS
