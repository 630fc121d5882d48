"""docs/fleet.md: its linter reads the playbooks, and those that change a mount are run on one."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT, Mounted, run_kvfs

FLEET: Final = ROOT / "docs" / "fleet"
PAGE: Final = ROOT / "docs" / "fleet.md"
#: Ansible is a program of the system's Python, which must not see this one's packages.
ENVIRONMENT: Final = {
    **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "ANSIBLE_LOCALHOST_WARNING": "False",
    "NO_COLOR": "1",
}


def run(*command: str | Path, place: Path) -> subprocess.CompletedProcess[str]:
    """Run a program of Ansible's with its own files in *place*."""
    return subprocess.run(
        command,
        cwd=place,
        env={**ENVIRONMENT, "HOME": str(place), "ANSIBLE_LOCAL_TEMP": str(place / "tmp")},
        capture_output=True,
        text=True,
        timeout=2 * COMMAND_WAIT_S,
        check=False,
    )


def play(name: str, place: Path, *variables: str) -> str:
    """Run the playbook *name* on this machine; return what it printed."""
    (place / "hosts.ini").write_text(
        "[kvfs]\nlocalhost ansible_connection=local ansible_python_interpreter=/usr/bin/python3\n"
    )
    extra = [word for each in (*variables, "ansible_become=false") for word in ("-e", each)]
    done = run(
        "/usr/bin/ansible-playbook", "-i", place / "hosts.ini", FLEET / name, *extra, place=place
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_linter_finds_nothing(tmp_path: Path) -> None:
    done = run("ansible-lint", "--offline", "--strict", *FLEET.glob("*.yml"), place=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("- hosts: all\n  tasks:\n    - shell: kvfs status\n")
    assert run("ansible-lint", "--offline", wrong, place=tmp_path).returncode != 0


def test_the_page_names_each_example_and_each_example_its_command() -> None:
    text = PAGE.read_text()
    for example in FLEET.iterdir():
        assert f"](fleet/{example.name})" in text
        if example.suffix == ".yml":
            (command,) = [
                line.removeprefix("#").strip()
                for line in example.read_text().splitlines()
                if "ansible-playbook" in line
            ]
            assert command in text


@pytest.mark.needs_fuse
@pytest.mark.one_data_path
def test_a_model_is_purged_and_a_server_upgraded(mount: Mounted, kv: Path, tmp_path: Path) -> None:
    mountpoint = kv.parent
    gone, kept = kv / "model-a@1@0@1.data", kv / "model-b@1@0@1.data"
    for block in (gone, kept):
        block.with_suffix(".tmp").write_bytes(bytes(1 << 20))
        block.with_suffix(".tmp").rename(block)
    purge = ("purge-model.yml", tmp_path, f"mountpoint={mountpoint}", "model=model-a")
    assert "changed=1" in play(*purge)
    assert not gone.exists()
    assert kept.exists()
    assert "changed=0" in play(*purge), "a host that has no block of it is no failure"
    before = json.loads(run_kvfs("status", str(mountpoint), "--json").stdout)
    assert "changed=1" in play("upgrade.yml", tmp_path, f"mountpoint={mountpoint}")
    mount.adopt()  # other modules share it
    after = json.loads(run_kvfs("status", str(mountpoint), "--json").stdout)
    assert after["upgrades"] == before["upgrades"] + 1
    assert kept.exists()


@pytest.mark.needs_fuse
@pytest.mark.one_data_path
def test_many_hosts_are_one_table(kv: Path, tmp_path: Path) -> None:
    status = json.loads(run_kvfs("status", str(kv.parent), "--json").stdout)
    files = [tmp_path / f"node00{number}.json" for number in (1, 2)]
    for file in files:
        file.write_text(json.dumps([status]))
    shown = subprocess.check_output([sys.executable, FLEET / "hosts.py", *files], text=True)
    heading, *lines = shown.splitlines()
    assert heading in PAGE.read_text()
    assert [line.split()[0] for line in lines] == ["node001", "node002"]
    assert all(status["data_path"] in line for line in lines)
    code = [line for line in (FLEET / "hosts.py").read_text().splitlines()[1:] if line.strip()]
    assert len(code) <= 10
