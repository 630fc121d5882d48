"""`kvfs quota`: what each tenant stores and may store, shown and set, also over restarts."""

import json
import os
import shlex
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from tests.fuse.conftest import NOBODY, OTHER
from tests.support.clients.callers import Caller
from tests.support.clients.stepping import until
from tests.support.mounts.bounded_pool import BLOCK_BYTES, bounded_pool, store, store_whole
from tests.support.mounts.mounting import Mounted, run_kvfs
from tests.support.rules.documented import of

pytestmark = [
    pytest.mark.needs_fuse,
    pytest.mark.one_data_path,
    pytest.mark.usefixtures("kvfs_only"),
]

SETTINGS: Final = f'[tenants.{OTHER}]\nquota = "50M"\nweight = 2\n'


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Mounted]:
    """A pool of 96 MiB, in which one user has a weight and a quota by the settings file."""
    settings = tmp_path / "kv.toml"
    settings.write_text(SETTINGS)
    with bounded_pool("daemon", "--config", str(settings)) as mounted:
        yield mounted


def tenants(pool: Mounted, *flags: str) -> dict[str, dict[str, Any]]:
    said = json.loads(run_kvfs("quota", str(pool.path), "--json", *flags).stdout)
    assert said["mountpoint"] == str(pool.path)
    found: dict[str, dict[str, Any]] = said["tenants"]
    return found


def test_a_table_of_tenants_has_what_the_settings_say(pool: Mounted) -> None:
    with Caller(NOBODY, NOBODY) as caller:
        store(caller, pool.path / "block")
    table = run_kvfs("quota", str(pool.path)).stdout.splitlines()
    assert table[0].split() == ["tenant", "stored", "held", "quota", "weight", "share"]
    bound, free = (next(line for line in table if str(uid) in line) for uid in (OTHER, NOBODY))
    assert bound.split()[-9:-2] == ["0", "B", "0", "B", "50", "MiB", "2"]
    assert " none " in free
    assert tenants(pool)[str(OTHER)]["quota_bytes"] == 50 << 20
    assert tenants(pool)[str(OTHER)]["weight"] == 2


def test_a_quota_that_is_set_holds_at_once_and_after_a_restart(pool: Mounted) -> None:
    with Caller(NOBODY, NOBODY) as caller:
        for number in range(8):
            store(caller, pool.path / f"{number}.tmp")
            caller.os("rename", str(pool.path / f"{number}.tmp"), str(pool.path / str(number)))
    told = tenants(pool, "--user", str(NOBODY), "--quota", "4M", "--weight", "3")[str(NOBODY)]
    assert (told["quota_bytes"], told["weight"]) == (4 << 20, 3.0)
    until(
        lambda: tenants(pool)[str(NOBODY)]["stored_bytes"] <= 4 * BLOCK_BYTES,
        "what is above it goes",
    )
    assert [(pool.path / str(number)).exists() for number in range(8)] == [False] * 4 + [True] * 4
    pool.stop()
    pool.start()
    told = tenants(pool)[str(NOBODY)]
    assert (told["quota_bytes"], told["weight"]) == (4 << 20, 3.0)
    told = tenants(pool, "--user", str(NOBODY), "--quota", "none", "--weight", "default")
    assert (told[str(NOBODY)]["quota_bytes"], told[str(NOBODY)]["weight"]) == (None, 1.0)


def test_what_is_set_goes_over_the_settings_file_until_it_is_taken_back(pool: Mounted) -> None:
    for flags, quota_bytes in (
        (("--quota", "none"), None),
        (("--quota", "default"), 50 << 20),
        (("--quota", "default"), 50 << 20),
    ):
        assert tenants(pool, "--user", str(OTHER), *flags)[str(OTHER)]["quota_bytes"] == quota_bytes


def test_a_reload_takes_over_the_settings_and_what_is_set_still_goes_over_them(
    pool: Mounted, tmp_path: Path
) -> None:
    """Weights, quotas and directories that are tenants, while the mount serves."""
    settings = tmp_path / "kv.toml"
    (pool.path / "team").mkdir()
    with Caller(NOBODY, NOBODY) as caller:
        (pool.path / "team").chmod(0o777)
        store_whole(caller, pool.path / "team/block")
    tenants(pool, "--user", str(NOBODY), "--quota", "7M")

    def reloads(text: str, expected: Mapping[str, Mapping[str, float | None]]) -> None:
        settings.write_text(text)
        os.kill(pool.server_pid, signal.SIGHUP)

        def is_told() -> bool:
            found = tenants(pool)
            return all(row.items() <= found.get(who, {}).items() for who, row in expected.items())

        until(is_told, text)

    first = f'[tenants.{NOBODY}]\nweight = 5\nquota = "9M"\n[tenants."/team"]\nquota = "8M"\n'
    own = {"weight": 5.0, "quota_bytes": 7 << 20, "stored_bytes": 0}
    team = {"quota_bytes": 8 << 20, "stored_bytes": BLOCK_BYTES}
    reloads(first, {str(NOBODY): own, "/team": team})
    assert str(OTHER) not in tenants(pool)
    reloads("", {str(NOBODY): {**own, "weight": 1.0, "stored_bytes": BLOCK_BYTES}})
    assert "/team" not in tenants(pool)
    settings.write_text("[tenants.nobody-here]\nweight = 2\n")
    os.kill(pool.server_pid, signal.SIGHUP)
    until(lambda: bool(pool.errors()), "it says so")
    (line,) = pool.errors()
    assert "settings not reloaded: tenants: 'nobody-here' is no user of /etc/passwd" in line
    pool.log_file.write_text("")


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (("--quota", "1G"), "--user or --directory goes with --quota or --weight"),
        (("--user", "1000"), "--user or --directory goes with --quota or --weight"),
        (("--user", "1000", "--directory", "a", "--quota", "1G"), "--user or --directory goes"),
        (("--directory", "nothing", "--quota", "1G"), "'nothing' is no directory at the top of"),
        (("--directory", "..", "--quota", "1G"), "'..' is no directory at the top of"),
        (("--user", "nobody-here", "--quota", "1G"), "--user: there is no user 'nobody-here'"),
        (("--user", "1000", "--quota", "much"), "--quota: 'much' is not a size"),
        (("--user", "1000", "--quota", "1G", "--weight", "0"), "--weight: 0 is outside"),
    ],
)
def test_what_it_cannot_set_it_says_in_a_line(
    pool: Mounted, flags: tuple[str, ...], line: str
) -> None:
    done = run_kvfs("quota", str(pool.path), *flags, check=False)
    assert done.returncode == 2
    assert line in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert "1000" not in tenants(pool)


def test_only_root_gives_out_quotas_and_only_on_the_root_directory(pool: Mounted) -> None:
    """The attribute is what the command sets; it is not listed, as other policies are not."""
    name = f"user.kvfs.quota.{NOBODY}"
    with Caller(NOBODY, NOBODY) as caller, pytest.raises(PermissionError):
        caller.os("setxattr", str(pool.path), name, b"90G")
    (pool.path / "directory").mkdir()
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(pool.path / "directory", name, b"1G")
    with pytest.raises(OSError, match="Invalid argument"):
        os.setxattr(pool.path, name, b"much")
    os.setxattr(pool.path, name, b"1G")
    assert os.getxattr(pool.path, name) == b"1G"
    assert name not in os.listxattr(pool.path)
    os.removexattr(pool.path, name)
    with pytest.raises(OSError, match="No data available"):
        os.getxattr(pool.path, name)


def test_the_commands_of_the_page_do_what_it_says(pool: Mounted) -> None:
    (pool.path / "team-a").mkdir()
    said = [shlex.split(text, comments=True) for text in of("docs/tenants.md", "kvfs quota ")]
    instead = {"/kv": str(pool.path), "alice": str(NOBODY), "500G": "5M", "2T": "6M"}
    for _, *words in said:
        run_kvfs(*(instead.get(word, word) for word in words))
    assert len(said) == 4
    assert tenants(pool)["/team-a"]["quota_bytes"] == 6 << 20
    assert " /team-a " in f" {run_kvfs('quota', str(pool.path)).stdout}".replace("\n", " ")
    told = tenants(pool)[str(NOBODY)]
    assert (told["quota_bytes"], told["weight"]) == (None, 3.0)
