"""Wheel and source package: complete, and a prefix that one is installed into has everything.

The wheel is built from the source package, as a release is.
"""

import ast
import configparser
import email
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path
from typing import Final

import pytest

from kvfs import __version__
from kvfs.cli.main import VERBS
from make.own_names import as_installed
from tests.support.mounts.mounting import ROOT, skip_without_mounts, workplace

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
    """A virtual environment with kvfs alone; nothing else is fetched."""
    top = tmp_path_factory.mktemp("prefix")
    run(sys.executable, "-m", "venv", "--without-pip", top)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", top)
    run(*pip, "install", "--no-deps", "--no-index", wheel)
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
    docs = {f"share/doc/kvfs/{path.relative_to(ROOT)}" for path in ROOT.glob("docs/**/*.md")}
    pages = {f"share/man/man1/kvfs-{verb}.1" for verb in VERBS}
    wanted = {"lib/systemd/system/kvfs@.service", "share/man/man5/kvfs.conf.5", *docs, *pages}
    assert {f"{data}/{name}" for name in wanted} - names == set()


def test_the_judges_of_packages_find_nothing(source_package: Path, wheel: Path) -> None:
    bin_ = Path(sys.executable).parent
    run(bin_ / "twine", "check", "--strict", source_package, wheel)
    run(bin_ / "check-wheel-contents", wheel)


def test_all_modules_lie_below_names_of_its_own(wheel: Path) -> None:
    """A package called mount could be anybody's."""
    with zipfile.ZipFile(wheel) as archive:
        modules = [n for n in archive.namelist() if n.endswith(".py") and ".data/" not in n]
        assert {name.partition("/")[0] for name in modules} == {"kvfs", "kvfs_mount"}
        for name in modules:
            text = archive.read(name).decode()
            for node in ast.walk(ast.parse(text)):
                named = node.module if isinstance(node, ast.ImportFrom) else None
                assert named is None or named.partition(".")[0] != "mount", name
    here = {str(path.relative_to(ROOT)) for path in (ROOT / "mount").rglob("*.py")}
    assert {name for name in modules if name[5:] in here} == {f"kvfs_{name}" for name in here}


def test_nothing_but_names_of_modules_changes() -> None:
    text = (
        "from mount import serve\nfrom mount.files.files import x\nCOMMAND = 'mount', 'a/mount'\n"
    )
    text += 'LATER = "mount.serve", f"{h}/mount/supervisor/__main__.py", "mount.fuse.kvfs"\n'
    assert as_installed(text).splitlines() == [
        "from kvfs_mount import serve",
        "from kvfs_mount.files.files import x",
        "COMMAND = 'mount', 'a/mount'",
        'LATER = "kvfs_mount.serve", f"{h}/kvfs_mount/supervisor/__main__.py", "mount.fuse.kvfs"',
    ]
    with pytest.raises(ValueError, match="write `from mount import"):
        as_installed("import mount.serve\n")


@pytest.mark.parametrize("how", ["CC=/bin/false", "KVFS_PURE=1"])
def test_without_a_compiler_a_wheel_lacks_the_compiled_module_alone(
    source_package: Path, wheel: Path, tmp_path: Path, how: str
) -> None:
    """So does the wheel of a release, which is for every Python and machine."""
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps")
    build = (*pip, "--no-build-isolation", "--no-index", "-w", tmp_path, source_package)
    run("env", how, *build)
    (made,) = tmp_path.iterdir()
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(made) as without:
        (missing,) = {
            name
            for name in set(whole.namelist()) - set(without.namelist())
            if ".dist-info/" not in name
        }
    assert re.fullmatch(r"kvfs_mount/fuse/compiled_reader\.cpython-.*\.so", missing)
    assert made.name.endswith("-py3-none-any.whl") == (how == "KVFS_PURE=1")


@pytest.mark.needs_fuse
def test_an_installation_serves_and_outlives_its_server(prefix: Path) -> None:
    """With this environment's packages, but no file of this tree."""
    skip_without_mounts()
    (packages,) = (prefix / "lib").glob("python3*/site-packages")
    (packages / "others.pth").write_text(f"{Path(sysconfig.get_path('purelib'))}\n")
    kvfs = prefix / "bin" / "kvfs"
    with workplace() as place:
        kv = place / "kv"
        kv.mkdir()
        run("env", "-u", "PYTHONPATH", kvfs, "mount", "--capacity=64M", place / "pool", kv)
        try:
            (kv / "block.tmp").write_bytes(b"kept")
            (kv / "block.tmp").rename(kv / "block")
            before = json.loads(run(kvfs, "status", "--json", kv))
            assert before["request_reader"] == "compiled"
            code = Path(f"/proc/{before['supervisor_pid']}/cmdline").read_bytes().split(b"\0")
            assert os.fsencode(packages / "kvfs_mount" / "supervisor" / "__main__.py") in code
            os.kill(before["server_pid"], signal.SIGKILL)
            assert (kv / "block").read_bytes() == b"kept"
            run(kvfs, "upgrade", kv)
            assert json.loads(run(kvfs, "status", "--json", kv))["upgrades"] == 1
        finally:
            run(kvfs, "umount", kv)


def test_a_package_index_shows_a_readme_whose_links_work(wheel: Path) -> None:
    """It has no file beside it there: what is left of a link names a path that was installed."""
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name.partition("/share/doc/kvfs/")[2] for name in archive.namelist()}
        told = email.message_from_bytes(archive.read(f"kvfs-{__version__}.dist-info/METADATA"))
    assert told["Author"] == "kvfs developers"
    assert "Operating System :: POSIX :: Linux" in (told.get_all("Classifier") or ())
    assert told.get_all("Project-URL") is None
    assert told["Description-Content-Type"] == "text/markdown"
    text = told.get_payload()
    assert "# kvfs" in text
    assert _LINK.findall(text) == []
    named = set(re.findall(r"(?<![\w/])(?:docs/[\w/-]+\.md|[A-Z]+\.md)", text))
    assert len(named) > 10
    assert named <= shipped


def test_what_is_installed_is_found(prefix: Path) -> None:
    """By systemd, by man, and by a reader who follows the links of the documents."""
    unit = configparser.ConfigParser(interpolation=None, strict=False)
    unit.read(prefix / "lib" / "systemd" / "system" / "kvfs@.service")
    assert unit["Service"]["Type"] == "notify"
    assert (prefix / "share/bash-completion/completions/kvfs").exists()
    readme = prefix / "share" / "doc" / "kvfs" / "README.md"
    assert (readme.parent / "docs" / "semantics.md").exists()
    for document in (readme, *readme.parent.rglob("*.md")):
        for link in _LINK.findall(document.read_text()):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_man_finds_the_pages_of_the_command(prefix: Path) -> None:
    """man(1) looks beside the folders of PATH."""
    if shutil.which("man") is None:
        pytest.skip("needs man(1)")
    environment = {"PATH": f"{prefix}/bin:/usr/bin:/bin"}
    for name, place in (("kvfs-mount", "man1/kvfs-mount.1"), ("kvfs.conf", "man5/kvfs.conf.5")):
        found = subprocess.check_output(["man", "-w", name], env=environment, text=True)
        assert found == f"{prefix}/share/man/{place}\n"


def test_the_installed_command_runs(prefix: Path) -> None:
    told = run(prefix / "bin" / "kvfs", "--version", cwd=Path("/"))
    assert told == f"kvfs {__version__}\n"


INSTALL: Final = """\
mkdir {place}/memory
mount -t tmpfs none {place}/memory
for path in usr/local usr/sbin etc; do
    mkdir -p {place}/memory/$path/upper {place}/memory/$path/work
    layers=upperdir={place}/memory/$path/upper,workdir={place}/memory/$path/work
    mount -t overlay -o lowerdir=/$path,$layers none /$path
done
new() {{ (cd {place}/memory; find . -path '*/upper/*' -not -type d -not -type c | sort); }}
{script}
"""


def in_own_places(place: Path, script: str) -> str:
    """Run *script* with copies of /usr/local, /sbin and /etc that are gone afterwards."""
    place.mkdir()
    text = INSTALL.format(place=place, script=script)
    return run("unshare", "--mount", "--propagation", "private", "bash", "-euc", text)


@pytest.mark.needs_fuse
def test_install_puts_each_file_where_it_is_looked_for(prefix: Path, tmp_path: Path) -> None:
    skip_without_mounts()
    script = f"PATH={prefix}/bin:$PATH; kvfs install >/dev/null; new; readlink /sbin/mount.kvfs"
    *new, helper = in_own_places(tmp_path / "one", script).splitlines()
    assert helper == f"{prefix}/bin/mount.kvfs"
    found = {name.removeprefix("./").replace("upper/", "") for name in new}
    assert found >= {
        "etc/logrotate.d/kvfs",
        "usr/sbin/mount.kvfs",
        "usr/sbin/mount.fuse.kvfs",
        "usr/sbin/umount.fuse.kvfs",
        "usr/local/bin/kvfs",
        "usr/local/lib/systemd/system/kvfs@.service",
        "usr/local/share/man/man8/mount.kvfs.8",
        "usr/local/share/zsh/site-functions/_kvfs",
        "usr/local/share/doc/kvfs/docs/exit-codes.md",
    }


@pytest.mark.needs_fuse
def test_install_takes_all_of_it_away_again(prefix: Path, tmp_path: Path) -> None:
    """But for a file of /etc that the operator has changed. A second run changes nothing."""
    skip_without_mounts()
    kvfs = f"{prefix}/bin/kvfs"
    twice = f"{kvfs} install; new >{tmp_path}/a; {kvfs} install; new >{tmp_path}/b"
    script = f"({twice}) >/dev/null; cmp {tmp_path}/a {tmp_path}/b; {kvfs} install --remove; new"
    *removed, last = in_own_places(tmp_path / "one", script).splitlines()
    assert removed
    assert last.startswith("removed "), "nothing is left"
    changed = f"{kvfs} install; echo '#' >>/etc/logrotate.d/kvfs; {kvfs} install --remove; new"
    told = in_own_places(tmp_path / "two", changed).splitlines()
    assert told[-1] == "./etc/upper/logrotate.d/kvfs"
    assert "/etc/logrotate.d/kvfs stays: it has been changed" in told


@pytest.mark.needs_fuse
def test_install_leaves_a_packages_own_commands_alone(prefix: Path, tmp_path: Path) -> None:
    skip_without_mounts()
    script = f"echo x >/sbin/mount.kvfs; {prefix}/bin/kvfs install 2>&1 || echo code $?; new"
    said, code, *new = in_own_places(tmp_path / "one", script).splitlines()
    why = "was not made by `kvfs install`: remove the package that owns it first"
    assert said == f"kvfs: /sbin/mount.kvfs {why}"
    assert code == "code 2"
    assert new == ["./usr/sbin/upper/mount.kvfs"]
