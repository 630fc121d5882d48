"""``kvfs report``: one valid document that needs nothing else, and says what the mount says."""

import json
import os
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import html5lib
import pytest

from kvfs.cli.report import worn_out
from kvfs.cli.report_document import ReportFacts, document
from kvfs.client.control_socket import ask
from kvfs.core.errors import NotMounted, UsageError
from kvfs.core.mount_name import socket_path
from kvfs.core.sizes import shown_rate
from tests.support.clients.browser import BROWSER, measured
from tests.support.clients.stepping import until
from tests.support.mounts.mounting import Mounted, run_kvfs, skip_without_mounts, workplace
from tests.support.mounts.places import blank_place, small_mount

pytestmark = [pytest.mark.needs_fuse, pytest.mark.one_data_path]

#: Whoever may store a file chooses its name.
HOSTILE: Final = "<script>alert(1)</script>\"'&\x1b[2J"
MIB: Final = 1 << 20


@pytest.fixture(scope="module")
def used() -> Iterator[Mounted]:
    """A small pool that was filled and asked, with three samples of its history or more."""
    skip_without_mounts()
    with blank_place() as place, small_mount(place, "--set", "history_step_s=0.2") as mount:
        for directory in ("lmcache", HOSTILE.replace("/", "|")):
            (mount.path / directory).mkdir()
            for number in range(200):
                name = f"org-SEP-Llama@1@0@{number:04x}.data"
                draft = mount.path / directory / f"{number}.tmp"
                draft.write_bytes(bytes(MIB))
                draft.rename(mount.path / directory / name)
                (mount.path / directory / name).open("rb").close()
        socket = socket_path(str(mount.status()["name"]))
        until(lambda: len(ask(socket, "history")["samples"]) >= 3, "three samples")
        yield mount


@pytest.fixture(scope="module")
def report(used: Mounted) -> str:
    """The document about that mount."""
    return made(used)


def made(used: Mounted) -> str:
    """Return a report about *used*."""
    return run_kvfs("report", str(used.path), "-o", "-", "--endurance", "7P").stdout


def valid(text: str) -> ET.Element:
    """Return the root of *text*, which is HTML without a mistake, and well-formed XML, too."""
    html5lib.HTMLParser(strict=True).parse(text)
    root = ET.fromstring(text)
    ids = [node.get("id") for node in root.iter() if node.get("id")]
    assert len(ids) == len(set(ids))
    return root


def words_of(root: ET.Element) -> str:
    return " ".join(" ".join(root.itertext()).split())


def test_it_is_valid_and_needs_nothing_else(report: str) -> None:
    root = valid(report)
    tags = {node.tag for node in root.iter()}
    assert {"svg", "polyline", "table", "h1", "h2"} <= tags
    assert not tags & {"script", "link", "img", "iframe", "object", "a"}
    names = {name for node in root.iter() for name in node.attrib}
    assert not [name for name in names if name.startswith("on") or name in ("src", "href")]
    assert not re.search(r"url\(|@import|https?:", report)
    assert "default-src 'none'" in report
    assert all(node.get("aria-label") or node.get("aria-hidden") for node in root.iter("svg"))


def test_it_says_what_the_mount_says(used: Mounted, report: str) -> None:
    shown, status = words_of(valid(report)), used.status()
    cache = status["cache"]
    assert str(used.path) in shown
    assert f"hit rate {shown_rate(cache['hit_rate'])} {cache['hits']:,} hits" in shown
    for point in cache["curve"]:
        assert f"{point['factor']:g} x" in shown
    for heading in (
        "Findings of kvfs doctor",
        "Hit rate over the last day",
        "Bytes a second over the last day",
        "Hit rate at other sizes",
        "Ages of blocks",
        "By directory",
        "By model",
        "Durability",
        "Server",
        "Drive",
    ):
        assert heading in shown
    assert "A tenant is told by its directory." in shown
    assert "lmcache" in shown
    assert "org-SEP-Llama" in shown
    assert status["data_path_reason"] in shown


def test_it_has_the_findings_of_the_doctor(used: Mounted) -> None:
    """What the doctor finds in the machine comes and goes, so the two are asked together."""

    def are_shown() -> bool:
        doctor = run_kvfs("doctor", str(used.path), "--json", check=False)
        shown = words_of(valid(made(used)))
        return all(one["check"] in shown for one in json.loads(doctor.stdout)["findings"])

    until(are_shown, "the report has what the doctor finds")


def test_names_are_shown_and_steer_nothing(report: str) -> None:
    shown = words_of(valid(report))
    assert r"""<script>alert(1)<|script>"'&\x1b[2J""" in shown
    assert "\x1b" not in report


def test_it_holds_no_name_of_a_block(report: str) -> None:
    assert not re.search(r"@0@[0-9a-f]{4}", report)


@pytest.mark.skipif(BROWSER is None, reason="needs chromium")
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [400, 1400])
def test_a_browser_shows_it_whole_and_readable(report: str, width: int, dark: bool) -> None:
    with workplace("disk") as place:
        found = measured(report, place, width, dark=dark)
    assert found["dark"] is dark
    assert found["window"] == width
    assert found["width"] <= width, "it would scroll sideways"
    assert found["seen"] > 50
    assert found["pale"] == []
    assert found["small"] == 0


def test_the_file_is_written_whole_or_not_at_all(used: Mounted, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text("the one before")
    said = run_kvfs("report", str(used.path), "-o", str(path)).stdout
    assert said.startswith(f"{path}: ")
    valid(path.read_text())
    failed = run_kvfs("report", str(used.path), "-o", str(tmp_path / "none" / "x"), check=False)
    assert failed.returncode == UsageError.exit_code
    assert len(failed.stderr.splitlines()) == 1
    assert os.listdir(tmp_path) == ["report.html"]


def test_without_a_mount_nothing_is_written(tmp_path: Path) -> None:
    failed = run_kvfs("report", str(tmp_path), "-o", str(tmp_path / "x"), check=False)
    assert failed.returncode == NotMounted.exit_code
    assert failed.stderr == f"kvfs: no kvfs is mounted at {tmp_path}\n"
    assert os.listdir(tmp_path) == []


def test_a_pool_that_nobody_used_is_told_in_words() -> None:
    skip_without_mounts()
    with blank_place() as place, small_mount(place, "--set", "history_step_s=0") as mount:
        shown = words_of(valid(run_kvfs("report", str(mount.path), "-o", "-").stdout))
    assert "hit rate - 0 hits" in shown
    assert "Nothing was asked for yet." in shown
    assert "The server keeps no history" in shown


def facts(status: dict[str, Any], **changed: Any) -> ReportFacts:  # noqa: ANN401
    whole: dict[str, Any] = {
        "status": status,
        "history": {},
        "findings": [],
        "health": "ok",
        "host": "host",
        "made": "now",
        "worn_out": "",
    }
    return ReportFacts(**{**whole, **changed})


def test_a_gap_in_the_history_is_a_gap_in_the_line(used: Mounted) -> None:
    """Nobody asked for a while: a rate of that time is not 0."""
    counted = [(0, 0), (8, 2), (8, 2), (9, 3)]
    samples = [
        {"time_s": 60.0 * n, "hits": hits, "misses": misses, "loaded_bytes": 0, "stored_bytes": 0}
        for n, (hits, misses) in enumerate(counted)
    ]
    root = valid(document(facts(used.status(), history={"step_s": 60.0, "samples": samples})))
    (drawing,) = [n for n in root.iter("svg") if "Hit rate over" in (n.get("aria-label") or "")]
    assert len(list(drawing.iter("polyline"))) == 2
    assert "between 50.0 % and 80.0 %" in words_of(root)


def test_findings_come_with_what_helps(used: Mounted) -> None:
    finding = {
        "check": "leases",
        "severity": "serious",
        "problem": "a <b> & c",
        "fix": "kill 1\nand wait",
    }
    root = valid(document(facts(used.status(), findings=[finding], health="see kvfs doctor")))
    assert "serious leases: a <b> & c kill 1 and wait" in words_of(root)
    assert "see kvfs doctor 1 finding of kvfs doctor" in words_of(root)


def test_a_drive_is_worn_out_on_a_day_if_all_is_known() -> None:
    device = {"write_rate": 1e9, "endurance_left": 0.5}
    assert worn_out(device, int(7.0e15), 0.0) == "in 41 days, on 1970-02-10, at the present rate"
    assert "hundred years" in worn_out({**device, "write_rate": 0}, int(7.0e15), 0.0)
    assert worn_out(device, None, 0.0) == ""
    assert worn_out({**device, "endurance_left": None}, 1, 0.0) == ""
    assert worn_out({}, 1, 0.0) == ""


def test_of_many_directories_those_asked_most_are_shown(used: Mounted) -> None:
    status = used.status()
    tally = {
        **dict.fromkeys(("loaded_bytes", "stored_bytes", "evicted_bytes"), 0),
        "hits": 1,
        "misses": 0,
        "hit_rate": 1.0,
    }
    named = {f"/directory-{number:02}": {**tally, "hits": number} for number in range(30)}
    cache = {**status["cache"], "directories": named}
    shown = words_of(valid(document(facts({**status, "cache": cache}))))
    assert "And 18 more." in shown
    assert "/directory-18" in shown
    assert "/directory-17" not in shown
