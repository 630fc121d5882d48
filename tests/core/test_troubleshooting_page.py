"""docs/troubleshooting.md names figures and settings that are there, and every check of doctor."""

import re
from typing import Final

from kvfs.core.settings import Settings
from kvfs.doctor.examine import RULES
from tests.support.mounts.mounting import ROOT

PAGE: Final = (ROOT / "docs" / "troubleshooting.md").read_text()
_KEY: Final = re.compile(r"`([a-z]+(?:[._][a-z]+)+)`")
#: Of others: a setting of vLLM, a backend of Mooncake.
_OTHERS: Final = {"kv_load_failure_policy", "file_per_key", "vm.zone_reclaim_mode"}


def test_each_check_of_doctor_has_a_row() -> None:
    _, _, checks = PAGE.partition("## What `kvfs doctor` looks at")
    rows = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", checks, re.MULTILINE)
    assert rows[0] == "check"
    assert rows[1:] == list(RULES)


def test_each_figure_is_one_of_the_status_or_a_setting() -> None:
    status = (ROOT / "docs" / "status.md").read_text()
    figures = set(re.findall(r"^\| `([\w.]+)` \|", status, re.MULTILINE))
    parts = {key[: end.start()] for key in figures for end in re.finditer(r"\.|$", key)}
    policies = {"user.kvfs.evict"}
    named = set(_KEY.findall(PAGE))
    assert len(named) > 10
    assert named - parts - _OTHERS - policies - set(Settings.__dataclass_fields__) == set()


def test_exit_codes_are_those_of_their_table() -> None:
    """A symptom that names one shares a word with its meaning."""
    codes = (ROOT / "docs" / "exit-codes.md").read_text()
    meanings = dict(re.findall(r"^\| (\d+) \| (.+?) \|", codes, re.MULTILINE))
    named = re.findall(r"^\| ([^|]+?) \((?:exit code )?(\d+)\) \|", PAGE, re.MULTILINE)
    assert len(named) >= 6
    for symptom, code in named:
        words = re.findall(r"\w{4,}", symptom.lower())
        assert any(word in meanings[code].lower() for word in words), (symptom, meanings[code])
