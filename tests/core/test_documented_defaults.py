"""Defaults of settings that the documents and a help text state in brackets behind the name."""

import re
from typing import Final

import pytest

from kvfs.bench.jobs import Effort
from kvfs.cli.main import main
from kvfs.core.settings import Settings
from kvfs.core.sizes import parse_size
from tests.support.rules.documented import DOCUMENTS
from tests.support.rules.source_tree import ROOT

DEFAULTS: Final = {name: getattr(Settings(), name) for name in Settings.__dataclass_fields__}
#: What may stand behind a number, by the end of the setting's name.
UNITS: Final = {"s": {"s": 1, "seconds": 1, "minutes": 60}, "share": {"%": 0.01, "": 1}}
STATED: Final = re.compile(
    r"`(\w+)`(?: of the capacity)? \((half|[\d.,]+ ?(?:%|[KMGT]iB|s\b|seconds|minutes)?)"
)


def as_default(name: str, text: str) -> float | None:
    """Return *text* in the unit of setting *name*; None if it is of another kind."""
    if text == "half":
        return 0.5
    if text.endswith("iB"):
        return parse_size(text) if name.endswith("_bytes") else None
    number, unit = re.fullmatch(r"([\d.,]+?),? ?([a-z%]*)", text).groups()  # type: ignore[union-attr]
    factor = UNITS.get(name.rpartition("_")[2], {"": 1}).get(unit)
    return None if factor is None else float(number.replace(",", "")) * factor


def test_defaults_in_the_documents_are_those_of_the_settings() -> None:
    stated = [
        (document, name, value)
        for document in DOCUMENTS
        for name, text in STATED.findall(re.sub(r"\s+", " ", (ROOT / document).read_text()))
        if name in DEFAULTS and (value := as_default(name, text)) is not None
    ]
    assert len(stated) >= 5
    wrong = [f"{at}: {name} ({value})" for at, name, value in stated if DEFAULTS[name] != value]
    assert not wrong, "the default is another one"


def test_the_help_of_bench_says_how_much_data_a_run_has(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "compare", "--help"])
    said = re.search(r"--data SIZE .*\(default (\w+)\)", capsys.readouterr().out)
    assert said is not None
    assert parse_size(said[1]) == Effort().data_bytes
