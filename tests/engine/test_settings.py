"""Settings: every default has a reason, every mistake one line, and sizes and names are exact."""

from dataclasses import fields

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfs.core.errors import UsageError
from kvfs.core.mount_name import NAME_MAX_CHARACTERS, check_name, name_of, socket_path
from kvfs.core.setting_values import convert, default_of
from kvfs.core.settings import RELOADABLE, Settings
from kvfs.core.sizes import format_size, parse_size

SUN_PATH_MAX_BYTES = 107


def rejected(text: str, **overrides: object) -> str:
    """Return the line with which the settings are refused."""
    with pytest.raises(UsageError) as refusal:
        Settings.from_toml(text, overrides, origin="kv.toml")
    line = str(refusal.value)
    assert "\n" not in line
    return line


def test_every_setting_has_a_reason_and_a_default_it_would_accept() -> None:
    for declared in fields(Settings):
        assert len(declared.metadata["reason"]) > 10, declared.name
        default = default_of(declared)
        if default is not None:
            assert convert(declared, default) == default, declared.name


def test_the_table_shows_every_setting_with_its_unit() -> None:
    rows = {row[0]: row[1:] for row in Settings(mode=0o755, capacity_bytes=1 << 30).table()}
    assert set(rows) == {declared.name for declared in fields(Settings)}
    assert rows["mode"][0] == "0755"
    assert rows["capacity_bytes"][:2] == ("1 GiB", "-")
    assert rows["entry_timeout_s"][0] == "3600.0 s"
    assert rows["read_only"][0] == "false"


def test_toml_and_flags_mean_the_same_and_flags_win() -> None:
    text = 'source = "/dev/x"\ncapacity_bytes = "10G"\nmode = "0750"\nuid = 7\nfast_lane = false'
    settings = Settings.from_toml(text, {"uid": "9", "gid": None, "negative_timeout_s": "1.5"})
    assert settings.source == "/dev/x"
    assert settings.capacity_bytes == 10 << 30
    assert settings.mode == 0o750
    assert settings.uid == 9
    assert settings.gid is None
    assert settings.fast_lane is False
    assert settings.negative_timeout_s == 1.5
    assert Settings.from_toml("mode = 0o750\ncapacity_bytes = 10737418240").mode == 0o750


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("uuid = 3", "kv.toml: unknown setting 'uuid'; did you mean 'uid'?"),
        ("zzzzzz = 3", "kv.toml: unknown setting 'zzzzzz'; see `kvfs mount --print-settings`"),
        ("[mount]\nuid = 3", "unknown setting 'mount'"),
        ("uid = -1", "uid: -1 is outside 0 .. 4294967294"),
        ("uid = 4294967295", "uid: 4294967295 is outside 0 .. 4294967294"),
        ("uid = 1.5", "uid: 1.5 is not a whole number"),
        ("uid = true", "uid: True is not a number"),
        ("uid = [1]", "uid: [1] is not a number"),
        ('mode = "0799"', "mode: '0799' is not an octal mode such as 0755"),
        ("mode = 755", 'mode: TOML reads it as decimal; write 0o755 or "0755"'),
        (f"lease_s = {'9' * 400}", "lease_s: is too large"),
        (f"lease_s = {'9' * 5000}", "kv.toml: not a settings file"),
        (f"uid = {'[' * 5000}", "kv.toml: not a settings file"),
        ("mode = 0o4755", "mode: 0o4755 is outside 0o0 .. 0o1777"),
        ('capacity_bytes = "10X"', "'10X' is not a size"),
        ("capacity_bytes = 5", "capacity_bytes: 5 is below 1 MiB"),
        ("ready_share = nan", "ready_share: nan is outside 0 .. 0.5"),
        ("entry_timeout_s = inf", "entry_timeout_s: inf is outside 0 .. 86400"),
        ("negative_timeout_s = 601", "negative_timeout_s: 601.0 is outside 0 .. 600"),
        ('fsync = "always"', "fsync: 'always' is not one of relaxed, honour"),
        ("source = 3", "source: 3 is not a string"),
        ('source = "a\\nb"', "contains a control character"),
        ("read_only = 3", "read_only: 3 is not true or false"),
        ("uid = ", "kv.toml: Invalid value"),
    ],
)
def test_a_mistake_is_one_line_that_names_it(text: str, said: str) -> None:
    assert said in rejected(text)


def test_a_mistake_in_a_flag_names_the_command_line() -> None:
    assert rejected("", uid="x") == "command line: uid: 'x' is not a number"
    assert rejected("", capacity="1G").startswith("command line: unknown setting 'capacity'")


@pytest.mark.parametrize(
    "rest", ["", 'eviction = "gate"', 'probation_bytes = "1G"', 'eviction = "lru"']
)
def test_a_budget_of_writes_needs_what_can_hold_it(rest: str) -> None:
    budget = 'write_budget_bytes = "1T"\n'
    assert "needs eviction" in rejected(budget + rest)
    whole = Settings.from_toml(budget + 'eviction = "gate"\nprobation_bytes = "1G"')
    assert whole.write_budget_bytes == 1 << 40


def test_a_reload_takes_what_may_change_and_names_the_rest() -> None:
    running = Settings(source="/a", log_level="info", negative_timeout_s=60)
    fresh = Settings(source="/b", log_level="debug", negative_timeout_s=1, io_threads=9)
    taken, refused = running.reloaded(fresh)
    assert (taken.log_level, taken.negative_timeout_s) == ("debug", 1)
    assert (taken.source, taken.io_threads) == ("/a", 8)
    assert sorted(refused) == ["io_threads", "source"]


def test_reloadable_names_are_settings() -> None:
    assert {declared.name for declared in fields(Settings)} >= RELOADABLE


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("10G", 10 << 30),
        ("10GiB", 10 << 30),
        ("10 gb", 10 << 30),
        ("1.5k", 1536),
        (" 2 T ", 2 << 40),
        ("500MiB", 500 << 20),
    ],
)
def test_sizes_are_read_as_binary(text: str, size_bytes: int) -> None:
    assert parse_size(text) == size_bytes


@pytest.mark.parametrize("text", ["", "G", "-1", "1..5G", "10%", "1e9", "0x10", "1 G G", "9" * 30])
def test_what_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        parse_size(text)


@given(st.integers(min_value=0, max_value=2**50), st.sampled_from("KMGT"))
def test_an_exact_size_is_printed_so_that_it_reads_back(count: int, suffix: str) -> None:
    size_bytes = parse_size(f"{count}")
    assert size_bytes == count
    whole_bytes = parse_size(f"{count % 1000}{suffix}")
    assert parse_size(format_size(whole_bytes).removesuffix(" B")) == whole_bytes


def test_a_name_is_the_path_with_dashes() -> None:
    assert name_of("/kv") == "kv"
    assert name_of("/mnt/kv") == "mnt-kv"


def test_paths_that_differ_have_names_that_differ() -> None:
    paths = ["/mnt/kv", "/mnt-kv", "/mnt/-kv", "/mnt/k v", "/mnt/k_v", "/mnt/k:v", "/", "/." * 3]
    paths += ["/" + "a" * 200, "/" + "b" + "a" * 199, "/mnt/kv\udcff", "/-", "/.kv"]
    names = [name_of(path) for path in paths]
    assert len(set(names)) == len(paths)
    for name in names:
        assert check_name(name) == name


#: What a path decodes to (PEP 383): any character but half of a pair, or a byte that is no UTF-8.
_IN_PATHS = st.characters(blacklist_characters="\0", blacklist_categories=["Cs"]) | st.characters(
    min_codepoint=0xDC80, max_codepoint=0xDCFF, whitelist_categories=["Cs"]
)


@given(st.text(alphabet=_IN_PATHS, max_size=300))
def test_every_path_has_a_name_that_fits_a_socket(path: str) -> None:
    name = check_name(name_of("/" + path))
    assert len(name) <= NAME_MAX_CHARACTERS
    assert len(socket_path(name).encode()) <= SUN_PATH_MAX_BYTES


@pytest.mark.parametrize("name", ["", "a/b", "-x", ".x", "..", "a b", "x" * 65, "ä"])
def test_a_name_that_is_no_file_name_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="letters, digits"):
        check_name(name)
