"""What `make release` is made of: versions, image, list of what is inside, Dockerfile."""

import gzip
import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from make.oci_image import what_it_runs, write_image
from make.release_version import give_version
from make.sbom import bill
from tests.support.mounts.mounting import ROOT

FILES = ("kvfs/__init__.py", "debian/changelog", "docs/kubernetes/chart/Chart.yaml")
HADOLINT = Path(sys.executable).with_name("hadolint")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files in which a version stands."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    return tmp_path


@pytest.mark.parametrize("version", ["1.2.3", "0.1.0+g0123abcde"])
def test_a_version_stands_everywhere(tree: Path, version: str) -> None:
    for _ in range(2):  # a second time changes nothing
        give_version(tree, version)
    told = {name: (tree / name).read_text() for name in FILES}
    assert f'__version__ = "{version}"' in told[FILES[0]]
    parsed = subprocess.check_output(
        ["dpkg-parsechangelog", "-l", tree / FILES[1], "-S", "Version"], text=True
    )
    assert parsed.strip() == version
    assert told[FILES[1]].count(f"kvfs ({version})") == 1
    assert f"\nversion: {version}\n" in told[FILES[2]]
    assert f'appVersion: "{version.replace("+", "-")}"' in told[FILES[2]]


@pytest.mark.parametrize("version", ["", "v1.2.3", "1.2", "1.0.0rc1", "1.2.3; rm"])
def test_what_is_no_version_is_refused(tree: Path, version: str) -> None:
    with pytest.raises(ValueError, match="is no version"):
        give_version(tree, version)


def test_what_is_committed_has_one_version(tree: Path) -> None:
    before = {name: (tree / name).read_text() for name in FILES}
    from kvfs import __version__

    give_version(tree, __version__)
    assert {name: (tree / name).read_text() for name in FILES} == before


def blobs_of(image: Path) -> dict[str, bytes]:
    with tarfile.open(image) as archive:
        found = {one.name: archive.extractfile(one) for one in archive.getmembers()}
        return {name: file.read() for name, file in found.items() if file is not None}


def test_an_image_is_what_its_digests_say(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "root.tar", "w") as root:
        member = tarfile.TarInfo("usr/bin/kvfs")
        member.size = 4
        root.addfile(member, io.BytesIO(b"kvfs"))
    images = [tmp_path / "image.tar", tmp_path / "again.tar"]
    for image in images:
        write_image(tmp_path / "root.tar", "1.2.3+g1", "amd64", image)
    assert images[0].read_bytes() == images[1].read_bytes()
    blobs = blobs_of(images[0])

    def read(described: dict[str, Any]) -> bytes:
        blob = blobs["blobs/" + described["digest"].replace(":", "/")]
        assert len(blob) == described["size"]
        assert f"sha256:{hashlib.sha256(blob).hexdigest()}" == described["digest"]
        return blob

    (first,) = json.loads(blobs["index.json"])["manifests"]
    assert first["annotations"]["org.opencontainers.image.ref.name"] == "1.2.3-g1"
    manifest = json.loads(read(first))
    configuration = json.loads(read(manifest["config"]))
    assert (configuration["architecture"], configuration["os"]) == ("amd64", "linux")
    assert configuration["config"]["Entrypoint"] == ["kvfs"]
    (layer,) = manifest["layers"]
    plain = gzip.decompress(read(layer))
    assert plain == (tmp_path / "root.tar").read_bytes()
    assert configuration["rootfs"]["diff_ids"] == [f"sha256:{hashlib.sha256(plain).hexdigest()}"]


def test_the_image_runs_what_the_dockerfile_says() -> None:
    told = what_it_runs((ROOT / "Dockerfile").read_text())
    assert told["Cmd"] == ["mount", "--foreground", "--config", "/etc/kvfs/kv.toml"]
    assert told["StopSignal"] == "SIGTERM"


@pytest.mark.skipif(not HADOLINT.exists(), reason="its package is for x86_64")
def test_the_linter_of_dockerfiles_finds_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [HADOLINT, ROOT / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    (tmp_path / "Dockerfile").write_text("FROM debian\nRUN apt-get install curl\n")
    done = subprocess.run([HADOLINT, tmp_path / "Dockerfile"], capture_output=True, check=False)
    assert done.returncode != 0


def test_the_list_names_everything_inside(tmp_path: Path) -> None:
    for name, text in {
        "kvfs-1.2.3": "Name: kvfs\nVersion: 1.2.3\nLicense-Expression: Apache-2.0\n",
        "lmdb-3.0": "Name: lmdb\nVersion: 3.0\nClassifier: License :: OSI Approved :: OpenLDAP\n",
        "crc32c-2": "Name: CRC_32c\nVersion: 2\nLicense: LGPL\n",
    }.items():
        (tmp_path / f"{name}.dist-info").mkdir()
        (tmp_path / f"{name}.dist-info" / "METADATA").write_text(text)
    told = bill(tmp_path, "1.2.3", "libc6 (>= 2.36), fuse3, mount | other")
    own = told["metadata"]["component"]
    assert (own["name"], own["version"], own["type"]) == ("kvfs", "1.2.3", "application")
    assert [one["purl"] for one in told["components"]] == [
        "pkg:pypi/crc-32c@2",
        "pkg:pypi/lmdb@3.0",
        "pkg:deb/debian/fuse3",
        "pkg:deb/debian/libc6",
        "pkg:deb/debian/mount",
    ]
    assert told["components"][1]["licenses"] == [{"license": {"name": "OpenLDAP"}}]
    assert len(told["dependencies"][0]["dependsOn"]) == len(told["components"])
    schema = JsonStrictValidator(SchemaVersion.V1_5)
    assert schema.validate_str(json.dumps(told)) is None
    told["components"][1]["licence"] = []
    assert schema.validate_str(json.dumps(told)) is not None
