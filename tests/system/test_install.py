"""docs/install.md on a bare Debian 12: each command as it stands, in its order.

In QEMU with a kernel of its own, and as process 1 of namespaces, which takes a minute.

Between the commands of the page it looks whether what the page says is so. KVFS_DEB names a package
that was made already; without it, one is made.
"""

import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Final

import pytest

from kvfs import __version__
from tests.support.machines.bare_debian import BareDebian, Step
from tests.support.machines.kernels import kernel
from tests.support.machines.vm import why_no_vm
from tests.support.mounts.mounting import ROOT
from tests.support.rules.documented import statements

pytestmark = pytest.mark.proof

PACKAGE: Final = f"kvfs_{__version__}_amd64.deb"
NEXT: Final = "kvfs_99_amd64.deb"
#: Emulation is some ten times slower than a machine.
GUEST_WAIT_S: Final = float(os.environ.get("KVFS_GUEST_WAIT_S", "3000"))
#: Run on the machine that makes the package, by tests/system/test_wheel.py, or in a guest.
ELSEWHERE: Final = (
    *("make deb", "python3 -m venv ", "/opt/kvfs/bin/"),
    # Namespaces have no dm-crypt: tests/guest/test_encryption.py.
    *("apt-get install -y --no-install-recommends cryptsetup-bin", "echo 'encrypt = "),
)
#: Said of every step that it shall fail.
FAILS: Final = "if {}; then exit 1; fi"
#: What the page says comes within seconds.
PATIENT: Final = "for again in $(seq 20); do if {}; then exit 0; fi; sleep 1; done; exit 1"
#: Behind which command of the page what is looked at, as shell.
LOOKS: Final = {
    "apt-get install -y ./kvfs": [
        "kvfs --version; ls /usr/share/man/man1/kvfs-mount.1* /sbin/mount.kvfs"
    ],
    "kvfs doctor": [
        "echo stored >/kv/block.tmp; mv /kv/block.tmp /kv/block",
        "systemctl show kvfs@kv -p ActiveState -p WatchdogUSec",
    ],
    "kvfs status /kv": ["test ! -e /kv/block || grep stored /kv/block"],
    "systemctl reboot": ["systemctl is-active kvfs@kv; grep stored /kv/block"],
    "umount /kv": [FAILS.format("touch /kv/lost 2>/dev/null"), "findmnt -n /kv || echo bare"],
    "systemctl restart kvfs@kv": ["systemctl is-active kvfs@kv; grep stored /kv/block"],
}
#: Once, before the last section: an upgrade changes no mount, a removal is refused.
BEFORE_REMOVAL: Final = [
    "systemctl show -p MainPID kvfs@kv >/srv/before",
    f"apt-get install -y ./{NEXT}; dpkg-query -W kvfs",
    "systemctl show -p MainPID kvfs@kv | cmp - /srv/before",
    "kvfs status /kv; grep stored /kv/block",
    FAILS.format("apt-get remove -y kvfs"),
    "kvfs status /kv",
]
AT_THE_END: Final = [
    "touch /kv/free; rm /kv/free; ls /etc/kvfs",
    FAILS.format("ls -d /usr/lib/kvfs /usr/bin/kvfs /sbin/mount.kvfs /var/log/kvfs 2>/dev/null"),
]


def steps() -> list[str]:
    """Return the page's commands in their order, each with the looks behind it."""
    found: list[str] = []
    for one in statements():
        if one.document != "docs/install.md" or one.text.startswith(ELSEWHERE):
            continue
        if one.text.startswith("systemctl disable") and any("sed -i" in text for text in found):
            raise AssertionError("the last section removes, and nothing follows it")
        found.append(PATIENT.format(one.text) if one.text.startswith("curl ") else one.text)
        for start, looks in LOOKS.items():
            if one.text.startswith(start):
                found += looks
    last = max(at for at, text in enumerate(found) if text.startswith("systemctl disable"))
    return [*found[:last], *BEFORE_REMOVAL, *found[last:], *AT_THE_END]


@pytest.fixture(scope="module")
def package() -> Path:
    if given := os.environ.get("KVFS_DEB"):
        return Path(given)
    built = subprocess.run(["make", "deb"], cwd=ROOT, check=False, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return ROOT / "dist" / PACKAGE


@pytest.fixture
def next_package(package: Path, tmp_path: Path) -> Path:
    """The same with a later version, as an upgrade has it."""
    tree = tmp_path / "tree"
    subprocess.run(["dpkg-deb", "-R", package, tree], check=True)
    control = tree / "DEBIAN" / "control"
    control.write_text(control.read_text().replace(f"Version: {__version__}", "Version: 99"))
    subprocess.run(["dpkg-deb", "-Zgzip", "-b", tree, tmp_path / NEXT], check=True)
    return tmp_path / NEXT


@pytest.mark.parametrize("where", ["namespaces", "qemu"])
def test_the_page_leads_to_a_mount_and_away_from_it(
    where: str, package: Path, next_package: Path, tmp_path: Path
) -> None:
    assert where != "qemu" or (why := why_no_vm()) is None, why
    assert shutil.which("mmdebstrap"), "needs mmdebstrap"
    wanted = f"./{PACKAGE} curl prometheus-node-exporter"
    machine = BareDebian(tmp_path / "vm", kernel("6.1"), [package, next_package], wanted)
    texts = steps()
    began_s = time.monotonic()
    run = machine.run_in_qemu if where == "qemu" else machine.run_in_namespaces
    done = run(texts, GUEST_WAIT_S)
    print(f"{where}: {time.monotonic() - began_s:.0f} s")
    for step in done:
        _show(step)
    reboots = [step for step in done if step.text == "systemctl reboot"]
    assert reboots
    assert [step.text for step in done] == texts, f"console in {tmp_path}/vm"
    assert all(step.code == 0 or step in reboots for step in done)


def _show(step: Step) -> None:
    print(f"# {step.text}")
    print("".join(f"  {line}\n" for line in step.said.splitlines()[-12:]), end="")
    if step.code:
        print(f"  exit {step.code}")
