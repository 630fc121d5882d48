"""A release as `make release` builds it: its parts agree, and README installs it in bare roots.

KVFS_RELEASE names the folder of one that was built already; without it, one is built.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest
import yaml
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from tests.support.machines.bare_root import BareRoot
from tests.support.machines.emulated_root import ARCH, ELF_MACHINE, EmulatedRoot
from tests.support.mounts.mounting import ROOT, loop_device
from tests.support.rules.documented import statements
from tests.support.rules.helm import render, skip_without_helm

pytestmark = pytest.mark.proof
skip_without_helm()

#: Each Debian with what stands in the version of its package.
DEBIANS: Final = {"bookworm": "deb12", "trixie": "deb13"}
#: What README shows in the order in which a new user does it, and what is said behind each.
STEPS: Final = {
    "apt-get update": "",
    "apt-get install -y ./kvfs_": "Setting up kvfs",
    "mkdir -p /kv && kvfs mount /dev/nvme0n1 /kv": "",
    "kvfs status /kv": "hit rate",
    "kvfs demo": "every byte is as stored",
    "kvfs report /kv -o report.html": "",
    "kvfs umount /kv": "",
    "apt-get purge -y kvfs": "Purging configuration files for kvfs",
}
#: Calls what is compiled, and imports all that a server does.
USES_ALL: Final = """
import sys
sys.path.insert(0, "/usr/lib/kvfs")
import crc32c, lmdb, numpy, pyfuse3, kvfs_mount.serve
assert crc32c.crc32c(b"123456789") == 0xE3069283
assert numpy.arange(4).sum() == 6
with lmdb.open("/tmp/index").begin(write=True) as transaction:
    transaction.put(b"a", b"b")
    assert transaction.get(b"a") == b"b"
assert pyfuse3.EntryAttributes().st_ino == 0
print("ok")
"""
#: Of Debian 13 the first has the link from /lib to /usr/lib.
BESIDE: Final = ("base-files", "coreutils")
STEPS_WAIT_S: Final = 1800.0
DRIVE_BYTES: Final = 1 << 30


@pytest.fixture(scope="module")
def release() -> Path:
    if given := os.environ.get("KVFS_RELEASE"):
        return Path(given)
    subprocess.run(["make", "release"], cwd=ROOT, check=True)
    return ROOT / "dist" / "release"


def the(release: Path, pattern: str) -> Path:
    """Return the only file of this name."""
    (found,) = release.glob(pattern)
    return found


@pytest.fixture(scope="module")
def version(release: Path) -> str:
    return the(release, "kvfs-*.cdx.json").name.removeprefix("kvfs-").removesuffix(".cdx.json")


def own_arch() -> str:
    return run("dpkg", "--print-architecture").strip()


def told_by(package: Path, field: str) -> str:
    return run("dpkg-deb", "-f", package, field).strip()


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_every_part_has_its_checksum_and_the_version(release: Path, version: str) -> None:
    told = run("sha256sum", "--check", "--strict", "SHA256SUMS", cwd=release)
    names = {line.partition(":")[0] for line in told.splitlines()}
    assert names == {file.name for file in release.iterdir()} - {"SHA256SUMS"}
    print("\n".join(sorted(names)))
    for debian in DEBIANS.values():
        for arch in {own_arch(), ARCH}:
            package = the(release, f"kvfs_*+{debian}_{arch}.deb")
            assert told_by(package, "Version") == f"{version}+{debian}"
            assert told_by(package, "Architecture") == arch


def test_package_indexes_take_wheel_and_source(release: Path) -> None:
    parts = the(release, "kvfs-*.whl"), the(release, "kvfs-*.tar.gz")
    folder = Path(sys.executable).parent
    run(folder / "twine", "check", "--strict", *parts)
    run(folder / "check-wheel-contents", parts[0])


def test_the_image_has_the_command_and_starts_the_server(
    release: Path, version: str, tmp_path: Path
) -> None:
    image = the(release, "kvfs-image-*.tar")
    blobs = tmp_path / "image"
    blobs.mkdir()
    run("tar", "-xf", image, "-C", blobs)
    index = json.loads((blobs / "index.json").read_text())
    (first,) = index["manifests"]
    manifest = json.loads((blobs / "blobs" / first["digest"].replace(":", "/")).read_text())
    (layer,) = manifest["layers"]
    (tmp_path / "root").mkdir()
    run("tar", "-xf", blobs / "blobs" / layer["digest"].replace(":", "/"), "-C", tmp_path / "root")
    assert run("chroot", tmp_path / "root", "kvfs", "--version").strip() == f"kvfs {version}"


def test_the_chart_asks_for_the_image_of_its_release(release: Path, version: str) -> None:
    made = render(release / f"kvfs-{version}.tgz", {}, "kvfs")
    daemon = yaml.safe_load(made["kvfs/templates/daemonset.yaml"])
    (container, _) = daemon["spec"]["template"]["spec"]["containers"]
    assert container["image"] == f"kvfs:{version.replace('+', '-')}"


def test_the_list_of_what_is_inside_names_what_is_pinned(release: Path, version: str) -> None:
    text = (release / f"kvfs-{version}.cdx.json").read_text()
    assert JsonStrictValidator(SchemaVersion.V1_5).validate_str(text) is None
    told = json.loads(text)
    pins = dict(
        line.removesuffix(" \\").split("==")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    )
    inside = {one["name"]: one.get("version") for one in told["components"]}
    assert {"numpy", "trio", "lmdb", "pyfuse3", "xfsprogs"} <= inside.keys()
    for name in ("numpy", "trio", "lmdb"):
        assert inside[name] == pins[name]


def steps(package: Path, drive: str) -> list[str]:
    """What README says, word by word, but for the names of package and drive."""
    shown = [one.text for one in statements() if one.document == "README.md"]
    found = []
    for start in STEPS:
        text = next(text for text in shown if text.startswith(start)).partition("  #")[0].strip()
        text = re.sub(r"\./kvfs_\S+\.deb", f"./{package.name}", text)
        found.append(text.replace("/dev/nvme0n1", drive))
    return found


@pytest.mark.parametrize("suite", DEBIANS)
def test_readme_leads_to_a_mount_and_away_from_it(
    suite: str, release: Path, tmp_path: Path
) -> None:
    package = the(release, f"kvfs_*+{DEBIANS[suite]}_{own_arch()}.deb")
    root = BareRoot(tmp_path, suite, [package])
    with loop_device(DRIVE_BYTES) as drive:
        typed = steps(package, drive)
        said = root.run(typed, STEPS_WAIT_S)
    for command, told, wanted in zip(typed, said, STEPS.values(), strict=True):
        print(f"# {command}", *(f"  {line}" for line in told.splitlines()[-8:]), sep="\n")
        assert wanted in told
    assert root.has("/srv/report.html")
    assert not root.has("/usr/lib/kvfs")
    assert not root.has("/usr/bin/kvfs")


def names_of_packages(depends: str) -> list[str]:
    return sorted({re.split(r"[ (|]", one.strip())[0] for one in depends.split(",")})


def compiled(folder: Path) -> dict[str, int]:
    """Return each compiled module without its architecture, with the machine of its ELF header."""
    found = {}
    for file in folder.rglob("*.cpython-*.so"):
        name = str(file.relative_to(folder)).partition(".cpython-")[0]
        found[name] = int.from_bytes(file.read_bytes()[18:20], "little")
    return found


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the package is made without a compiler")
@pytest.mark.parametrize("suite", DEBIANS)
def test_the_package_of_arm64_is_whole_and_runs_under_emulation(
    suite: str, release: Path, version: str, tmp_path: Path
) -> None:
    """Its Depends are there in that Debian, and kvfs computes; no kernel of arm64 mounted it."""
    own, other = (
        the(release, f"kvfs_*+{DEBIANS[suite]}_{arch}.deb") for arch in (own_arch(), ARCH)
    )
    needed = names_of_packages(told_by(other, "Depends"))
    assert needed == names_of_packages(told_by(own, "Depends"))
    for package in (own, other):
        run("dpkg-deb", "-x", package, tmp_path / package.stem)
    modules = compiled(tmp_path / other.stem)
    assert modules.keys() == compiled(tmp_path / own.stem).keys()
    assert set(modules.values()) == {ELF_MACHINE}
    root = EmulatedRoot(tmp_path, suite, [*needed, *BESIDE], other)
    assert root.run("uname", "-m").strip() == "aarch64"
    assert root.run("kvfs", "--version").strip() == f"kvfs {version}"
    assert "capacity" in root.run("kvfs", "size", "--block", "4M", "--stores", "9", "--keep", "1h")
    assert root.run("python3", "-I", "-c", USES_ALL).split() == ["ok"]
