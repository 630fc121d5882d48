"""Wheel and source package: complete, and a prefix that one is installed into has everything.

The wheel is built from the source package, as a release is.
"""

import configparser
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

from kvfs import __version__
from kvfs.cli.main import VERBS
from tests.support.mounting import ROOT

BUILD: Final = (
    "import sys; from setuptools import build_meta as b; print(b.build_sdist(sys.argv[1]))"
)
_LINK: Final = re.compile(r"\]\(([^)#:]+)(?:#[^)]*)?\)")


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what git has, and of what it would take: a build leaves files behind."""
    copy = tmp_path_factory.mktemp("tree")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            (copy / name).write_bytes((ROOT / name).read_bytes())
    return copy


@pytest.fixture(scope="module")
def source_package(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("sdist")
    run(sys.executable, "-c", BUILD, out, cwd=tree)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def wheel(source_package: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps")
    run(*pip, "--no-build-isolation", "--no-index", "-w", out, source_package)
    (made,) = out.iterdir()
    return made


@pytest.fixture(scope="module")
def prefix(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `pip install --prefix` makes of it."""
    top = tmp_path_factory.mktemp("prefix")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps")
    run(*pip, "--no-index", "--ignore-installed", "--prefix", top, wheel)
    return top


def test_the_source_package_has_every_file_of_the_tree(tree: Path, source_package: Path) -> None:
    with tarfile.open(source_package) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    own = {str(path.relative_to(tree)) for path in tree.rglob("*") if path.is_file()}
    own = {name for name in own if ".egg-info/" not in name and "__pycache__" not in name}
    assert own - names == set()


def test_the_wheel_has_unit_pages_completion_and_docs(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    data = f"kvfs-{__version__}.data/data"
    docs = {f"share/doc/kvfs/docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    pages = {f"share/man/man1/kvfs-{verb}.1" for verb in VERBS}
    wanted = {"lib/systemd/system/kvfs@.service", "share/man/man5/kvfs.conf.5", *docs, *pages}
    assert {f"{data}/{name}" for name in wanted} - names == set()


def test_what_is_installed_is_found(prefix: Path) -> None:
    """By systemd, by man, and by a reader who follows the links of the documents."""
    unit = configparser.ConfigParser(interpolation=None, strict=True)
    unit.read(prefix / "lib" / "systemd" / "system" / "kvfs@.service")
    assert unit["Service"]["Type"] == "notify"
    assert (prefix / "share/bash-completion/completions/kvfs").exists()
    readme = prefix / "share" / "doc" / "kvfs" / "README.md"
    assert (readme.parent / "docs" / "semantics.md").exists()
    for document in (readme, *readme.parent.rglob("*.md")):
        for link in _LINK.findall(document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_the_installed_command_runs(prefix: Path) -> None:
    """It is the wheel's own code that runs, with the packages of this Python below it."""
    (code,) = prefix.glob("l*/python3*/site-packages")
    script = "import kvfs; print(kvfs.__file__)"
    environment = {**os.environ, "PYTHONPATH": str(code)}
    ran = [[sys.executable, "-P", "-c", script], [str(prefix / "bin" / "kvfs"), "--version"]]
    told = [subprocess.check_output(each, env=environment, text=True, cwd="/") for each in ran]
    assert told[0].startswith(str(prefix))
    assert told[1] == f"kvfs {__version__}\n"
