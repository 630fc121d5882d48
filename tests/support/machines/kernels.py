"""Debian's kernels, for guests: fetched by apt, unpacked, and never installed.

``kernel("6.12")`` is the newest of that series which the machine's own Debian offers, in its
release or in its backports. They lie in the tree's folder ``.kernels``, which git ignores.
"""

import fcntl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.mounts.mounting import ROOT

PLACE: Final = ROOT / ".kernels"
#: A package that depends on the newest one of its suite.
_NEWEST: Final = "linux-image-amd64"
_FETCH_WAIT_S: Final = 600.0


class Kernel(NamedTuple):
    """One that is unpacked."""

    release: str
    """As ``uname -r`` says it in the guest."""
    image: Path
    place: Path
    """It has lib/modules/RELEASE below it."""

    def modules_for(self, *names: str) -> list[Path]:
        """Return the files of the modules *names* and what they need, in the order to load them."""
        found: list[Path] = []
        for name in names:
            shown = _output(
                "modprobe", "-d", self.place, "-S", self.release, "--show-depends", name
            )
            for line in shown.splitlines():
                kind, _, path = line.strip().partition(" ")
                if kind == "insmod" and Path(path.split()[0]) not in found:
                    found.append(Path(path.split()[0]))
        return found


def kernel(series: str) -> Kernel:
    """Return the newest kernel of *series*, such as 6.1; fetches it if it is not here yet.

    Raises AssertionError when neither Debian's release nor its backports have one.
    """
    place = PLACE / series
    place.mkdir(parents=True, exist_ok=True)
    with (PLACE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (place / "complete").exists():
            _fetch(series, place)
    (image,) = (place / "boot").glob("vmlinuz-*")
    release = image.name.partition("-")[2]
    return Kernel(release, image, place)


def _fetch(series: str, place: Path) -> None:
    apt = _own_apt(PLACE / "apt")
    _output("apt-get", *apt, "update", "-qq")
    versions = [
        line.split("|")[1].strip()
        for line in _output("apt-cache", *apt, "madison", _NEWEST).splitlines()
    ]
    version = next((each for each in versions if each.startswith(f"{series}.")), None)
    assert version is not None, f"no Linux {series} among {_NEWEST} {versions}"
    shown = _output("apt-cache", *apt, "show", f"{_NEWEST}={version}")
    depends = next(line for line in shown.splitlines() if line.startswith("Depends: "))
    package = depends.split()[1]
    _output("apt-get", *apt, "download", package, cwd=place)
    (archive,) = place.glob("*.deb")
    _output("dpkg-deb", "-x", archive, place)
    archive.unlink()
    release = package.removeprefix("linux-image-")
    _output("depmod", "-b", place, release)
    (place / "complete").touch()


def _own_apt(place: Path) -> list[str]:
    """Return options for an apt beside the machine's: its sources and their backports."""
    for name in ("state/lists/partial", "cache/archives/partial", "parts"):
        (place / name).mkdir(parents=True, exist_ok=True)
    (place / "sources").write_text("".join(_sources()))
    options = {
        "Dir::State": place / "state",
        "Dir::State::status": "/var/lib/dpkg/status",
        "Dir::Cache": place / "cache",
        "Dir::Etc::SourceList": place / "sources.list",
        "Dir::Etc::SourceParts": place / "parts",
        "APT::Sandbox::User": "root",
    }
    (place / "sources").rename(place / "sources.list")
    return [f"-o{name}={value}" for name, value in options.items()]


def _sources() -> Iterator[str]:
    """Yield the lines of sources.list(5) for the machine's own Debian, and for its backports."""
    wanted = "$(REPO_URI) $(CODENAME) $(COMPONENT) $(ORIGIN) $(LABEL)"
    shown = _output("apt-get", "indextargets", "--format", wanted, "Created-By: Packages")
    for line in sorted(set(shown.splitlines())):
        uri, codename, component, *label = line.split()
        if label == ["Debian", "Debian"] and component == "main" and "-" not in codename:
            yield f"deb {uri} {codename} main\n"
            yield f"deb {uri} {codename}-backports main\n"


def _output(*command: str | Path, cwd: Path | None = None) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, timeout=_FETCH_WAIT_S, check=False
    )
    assert done.returncode == 0, f"{command}: exit {done.returncode}\n{done.stderr}"
    return done.stdout
