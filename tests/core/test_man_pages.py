"""The man pages: made from the parsers and the settings, and well formed."""

import dataclasses
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from kvfs.cli.main import VERBS
from kvfs.core.settings import Settings
from make.man_pages import pages
from tests.support.mounts.mounting import ROOT


def read(text: str) -> str:
    """Return the words that a reader of the page sees, a blank between two."""
    done = subprocess.run(
        ["mandoc", "-Tutf8", "-Owidth=500"], input=text, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return " ".join(re.sub(".\b", "", done.stdout).split())  # bold is struck twice


def test_each_verb_has_one_with_its_flags() -> None:
    found = pages()
    assert set(found) >= {"kvfs.1", "kvfs.conf.5", *(f"kvfs-{verb}.1" for verb in VERBS)}
    for verb, summary in VERBS.items():
        shown = read(found[f"kvfs-{verb}.1"])
        assert f"kvfs-{verb} - {summary}" in shown
        assert "EXAMPLE" in shown
        assert f"kvfs-{verb}(1)" in read(found["kvfs.1"])
    mount = read(found["kvfs-mount.1"])
    assert "--capacity SIZE" in mount
    assert "--print-settings" in mount
    assert "--ready-fd" not in mount  # for kvfs's own use
    compare = read(found["kvfs-bench.1"])
    assert "kvfs bench compare [-h]" in compare
    assert "(default 9)" in compare


def test_each_setting_is_told_with_its_default_and_reason() -> None:
    shown = read(pages()["kvfs.conf.5"])
    for declared in dataclasses.fields(Settings):
        assert f" {declared.name} = " in shown
        reason = declared.metadata["reason"]
        assert " ".join(reason[1:].split()) in shown, declared.name
    assert " lease_s = number, 0 s to 86400 s Default: 600.0 s. " in shown
    assert "Default: relaxed." in shown


PAGES: Final = [name for name, text in sorted(pages().items()) if not text.startswith(".so")]


@pytest.mark.parametrize("name", PAGES)
def test_they_are_well_formed(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(pages()[name])
    lint = subprocess.run(
        ["mandoc", "-Tlint", "-Wwarning", path], capture_output=True, text=True, check=False
    )
    assert lint.stdout + lint.stderr == ""
    if shutil.which("man"):
        shown = subprocess.run(
            ["man", "--warnings", "-E", "UTF-8", "-l", "-Tutf8", "-Z", path],
            env={"LC_ALL": "C.UTF-8", "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )
        assert shown.stderr == ""


def test_they_are_made_without_what_kvfs_depends_on() -> None:
    """A build has neither trio nor numpy: no verb may import them before it runs."""
    script = (
        "import sys; sys.path.insert(0, '.'); import make.man_pages as m; print(len(m.pages()))"
    )
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.strip() == str(len(pages())), done.stderr
