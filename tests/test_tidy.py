"""The house rules that no linter knows: floors, purity, sizes, words.

``python -m tests.test_tidy`` prints the sizes.
"""

import ast
import re
import statistics
import tomllib
from collections import Counter
from pathlib import Path
from typing import Final

import pytest

from kvfs.cli.main import VERBS
from kvfs.core import errors
from tests.support.rules.floors import FLOORS, floor_of, is_pure
from tests.support.rules.house_rules import of_each
from tests.support.rules.late_binding import late_bound, stand_ins
from tests.support.rules.open_parts import fields, set_elsewhere
from tests.support.rules.source_tree import (
    MODULES,
    ROOT,
    SOURCES,
    TESTS,
    Function,
    code_lines_of,
    constants_of,
    functions_of,
    imports_of,
    lines_of,
    module_of,
    names_made,
    names_used,
    shown,
    tracked_texts,
    tree_of,
    words_of,
)

#: What the pure floor must not import: it sees values, not the machine and not the clock.
IMPURE: Final = frozenset(
    [
        "asyncio",
        "concurrent",
        "ctypes",
        "datetime",
        "fcntl",
        "glob",
        "io",
        "lmdb",
        "logging",
        "mmap",
        "multiprocessing",
        "os",
        "pathlib",
        "pyfuse3",
        "random",
        "resource",
        "secrets",
        "select",
        "shutil",
        "signal",
        "socket",
        "subprocess",
        "sys",
        "tempfile",
        "threading",
        "time",
        "trio",
        "uuid",
    ]
)
DOES_IO: Final = frozenset({"open", "print", "input"})

#: Lines of code: what explains costs nothing, and cutting off fragments brings nothing.
FILE_MAX_LINES: Final = 300
#: A test file is a list: its length hides nothing.
TEST_FILE_MAX_LINES: Final = 360
FUNCTION_MAX_LINES: Final = 69
MEDIAN_MAX_LINES: Final = 200

#: Counts, shares and waits below it are equal by chance.
SMALL_NUMBER: Final = 8

#: Ways to call upwards that no import shows, beside plain data that is set from outside.
LATE: Final = """
def _nothing():
    \"\"\"Stand in.\"\"\"


class Part:
    def __init__(self, given: Callable[[], None], other: Other) -> None:
        self.given: Callable[[], None] = given
        self.told: Callable[[], None] = _nothing
        self._part = other

    def look(self, part, size_bytes):
        part.size_bytes = size_bytes
        part.told = lambda: None
        part.pool.told = _nothing
        self._part.told = self.look
"""
#: Ways to set a field of an open inode from outside of its part.
OUTSIDE: Final = """
class Part:
    def look(self, opened, handle):
        self.fd = opened.fd
        opened.fd, handle.flushed = -1, True
        handle.opened.readers += 1
        opened.torn = not opened.gone
"""
#: Settings that are declared are a list: its length hides nothing. What is worked out counts.
DECLARED: Final = """
@dataclass
class Settings:
    \"\"\"Some.\"\"\"

    plain_s: float = setting(
        2 * MINUTE_S,
        "a reason",
        choices=("off", "on"),
        low=-1,
    )
    part: float = share(0.5, "another")
    table: dict[str, str] = setting_table("a third")
"""
WORKED_OUT: Final = """
    made: float = setting(
        (lambda: 1.0)(),
        "a reason",
    )
    other: float = field(default=1.0)

    def method(self) -> float:
        return self.plain_s
"""
#: A file that is shorter than this many lines earns its name by so many importers.
FRAGMENT_END_LINES: Final = 40
FRAGMENT_IMPORTERS: Final = 3
#: Each with the reason why it is neither merged nor longer.
FRAGMENTS: Final = {
    "kvfs.cli.program": "loaded before all else: what it held besides would be loaded too early"
}
#: A file with fewer lines of code than this has two importers, or none: then it is loaded by name.
SMALL_END_LINES: Final = 60
#: Each with the reason why it is not merged with its one importer.
SMALL: Final = {
    "kvfs.storage.file_leases": "what the kernel makes of a lease, with the places in its source",
}

BANNED_MODULES: Final = frozenset(
    {"base", "common", "helper", "helpers", "manager", "misc", "util", "utils"}
)
#: Words with two meanings here; design.md names the ones to use.
BANNED_WORDS: Final = frozenset(
    [
        "blob",
        "blobs",
        "chunk",
        "chunks",
        "entries",
        "entry",
        "object",
        "objects",
        "page",
        "pages",
        "segment",
        "segments",
    ]
)
#: The kernel's page, FUSE's timeout, and a directory's own count of its names.
ALLOWED_NAMES: Final = frozenset({"PAGE_BYTES", "page_cache", "entry_timeout_s", "entries"})
#: Where another's language is spoken: FUSE's (a name with its attributes), LMDB's.
ALLOWED_WORDS: Final = {
    "mount.": frozenset({"entry", "entries"}),
    "kvfs.storage.index": frozenset({"page", "pages"}),
    "kvfs.storage.lmdb_file": frozenset({"page", "pages"}),
}

#: Verbs that do not say what happens. What is due now is done by ``run_due``.
VAGUE_VERBS: Final = frozenset({"look", "note", "take", "tick"})

#: The only module of kvfs/ that starts what serves.
DOOR_TO_MOUNT: Final = "kvfs.cli.serve"

#: Hosts that a text may point a reader to. Registries and mirrors are the machine's business;
#: example.com is nobody's (RFC 2606).
READERS_HOSTS: Final = re.compile(
    r"(^|\.)(apache\.org|example\.com|freedesktop\.org|github\.com|kernel\.org"
    r"|keepachangelog\.com|man7\.org|python\.org|readthedocs\.io|systemd\.io|w3\.org)$|^localhost$|^127\.0\.0\.1$"
)
MACHINE_PATHS: Final = re.compile("|".join(f"/{top}/" for top in ("work", "root", "home")))


@of_each(SOURCES)
def test_imports_point_down(path: Path) -> None:
    floor = floor_of(module_of(path))
    assert floor is not None, f"{module_of(path)} has no floor; see tests/support/rules/floors.py"
    floors = {name: floor_of(name) for name in imports_of(path) if name in MODULES}
    above = {
        name: its
        for name, its in floors.items()
        if its is not None and FLOORS.index(its) > FLOORS.index(floor)
    }
    assert not above, f"{module_of(path)} ({floor}) imports from above: {above}"


def test_imports_make_no_circle() -> None:
    left = {
        name: (set(imports_of(path)) & MODULES.keys()) - {name} for name, path in MODULES.items()
    }
    while free := [name for name, used in left.items() if not used & left.keys()]:
        for name in free:
            del left[name]
    assert not left, f"these import each other: {sorted(left)}"


def test_the_house_is_made_of_folders() -> None:
    """At most eleven rooms in kvfs/ and six in mount/, and nothing lies between the rooms."""
    for top, most, alone in (
        ("kvfs", 11, {"__init__"}),
        ("mount", 6, {"__init__", "serve"}),
    ):
        assert {path.stem for path in (ROOT / top).glob("*.py")} == alone
        rooms = [path.parent for path in (ROOT / top).glob("*/__init__.py")]
        assert 0 < len(rooms) <= most
    unused = [floor for floor in FLOORS if floor not in MODULES]
    assert not unused, "folders of the table that are not there"


@of_each(SOURCES)
def test_what_a_part_calls_was_given_to_its_constructor(path: Path) -> None:
    later = list(late_bound(path))
    assert not later, f"{shown(path)}: a port in the constructor instead: {later}"
    idle = list(stand_ins(path))
    assert not idle, f"{shown(path)}: stands in for a part that is not there: {idle}"


def test_what_is_bound_later_is_found(tmp_path: Path) -> None:
    path = tmp_path / "late.py"
    path.write_text(LATE)
    found = [line.partition(": ")[2] for line in late_bound(path)]
    assert found == ["self.told", "part.told", "part.pool.told", "self._part.told"]
    assert list(stand_ins(path)) == ["_nothing"]


@of_each(SOURCES)
def test_a_part_of_an_open_inode_is_set_by_its_own_module(path: Path) -> None:
    outside = list(set_elsewhere(path))
    assert not outside, f"{shown(path)}: a method of the part instead: {outside}"


def test_what_is_set_from_outside_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"fd", "spare_bytes", "served_readers", "hands", "gone", "readers", "torn"} <= set(
        fields()
    )
    path = tmp_path / "outside.py"
    path.write_text(OUTSIDE)
    monkeypatch.setattr("tests.support.rules.open_parts.module_of", lambda path: path.stem)
    found = sorted(line.split(": ")[1].split(" is ")[0] for line in set_elsewhere(path))
    assert found == ["handle.opened.readers", "opened.fd", "opened.torn"]


@of_each(SOURCES)
def test_the_pure_floor_touches_no_machine(path: Path) -> None:
    if is_pure(module_of(path)):
        impure = {name for name in imports_of(path) if name.partition(".")[0] in IMPURE}
        assert not impure, f"{module_of(path)} is pure and imports {sorted(impure)}"
        calls = [
            node.lineno
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in DOES_IO
        ]
        assert not calls, f"{shown(path)}: does I/O in lines {calls}"


@of_each(SOURCES)
def test_only_the_mount_knows_fuse(path: Path) -> None:
    module = module_of(path)
    if module.partition(".")[0] != "mount":
        tops = {name.partition(".")[0] for name in imports_of(path)}
        assert "pyfuse3" not in tops
        assert "mount" not in tops or module == DOOR_TO_MOUNT, f"{module} is not {DOOR_TO_MOUNT}"


def test_the_c_library_is_opened_once() -> None:
    opened = [shown(path) for path in SOURCES if "CDLL" in names_used(path)]
    assert opened == ["kvfs/storage/syscalls.py"], "use its LIBC"


def test_a_constant_has_one_home() -> None:
    """Equal in name and value, it is the same limit or format; a small number means nothing."""
    homes: dict[tuple[str, float | str], list[str]] = {}
    for path in SOURCES:
        for name, value in constants_of(path):
            if isinstance(value, str) or abs(value) >= SMALL_NUMBER:
                homes.setdefault((name, value), []).append(shown(path))
    copied = {name: at for (name, _), at in homes.items() if len(at) > 1}
    assert not copied, "import it from one of them, or name the two apart"


@of_each(SOURCES + TESTS)
def test_files_and_functions_are_short(path: Path) -> None:
    most = TEST_FILE_MAX_LINES if path in TESTS else FILE_MAX_LINES
    assert lines_of(path) <= most or code_lines_of(path) <= most, f"{shown(path)}: split it"
    for function in functions_of(path):
        length = (function.end_lineno or function.lineno) - function.lineno + 1
        assert length <= FUNCTION_MAX_LINES, f"{shown(path)}: {function.name}: {length} lines"


def test_declared_settings_are_free_and_code_beside_them_counts(tmp_path: Path) -> None:
    declared, both = tmp_path / "declared.py", tmp_path / "both.py"
    declared.write_text(DECLARED)
    both.write_text(DECLARED + WORKED_OUT)
    assert code_lines_of(declared) == 2
    assert code_lines_of(both) == 2 + 7
    outside = tmp_path / "outside.py"
    outside.write_text('plain_s: float = setting(2.0, "no class")\n')
    assert code_lines_of(outside) == 1


def test_no_file_is_a_fragment() -> None:
    """Verbs are imported by name (cli/main.py), and a package's __init__ only opens it."""
    importers = Counter(name for path in SOURCES for name in set(imports_of(path)))
    found = {
        name
        for name, path in MODULES.items()
        if lines_of(path) < FRAGMENT_END_LINES
        and importers[name] < FRAGMENT_IMPORTERS
        and name.removeprefix("kvfs.cli.") not in VERBS
        and path.stem != "__init__"
    }
    assert found == FRAGMENTS.keys(), "merge it with its one reader"


def test_a_small_file_has_several_readers() -> None:
    importers = Counter(name for path in SOURCES for name in set(imports_of(path)))
    found = {
        name
        for name, path in MODULES.items()
        if code_lines_of(path) < SMALL_END_LINES
        and importers[name] == 1
        and path.stem != "__init__"
    }
    assert found == SMALL.keys(), "merge it with what it belongs to, or say why not"


def test_the_usual_file_is_short() -> None:
    assert statistics.median(map(lines_of, SOURCES)) <= MEDIAN_MAX_LINES


@of_each(SOURCES + TESTS)
def test_what_is_public_says_what_it_is(path: Path) -> None:
    if lines_of(path):
        assert ast.get_docstring(tree_of(path)), f"{shown(path)}: no docstring"
    if path in SOURCES:
        silent = [
            node.name
            for node in tree_of(path).body
            if isinstance(node, Function | ast.ClassDef)
            and not node.name.startswith("_")
            and not ast.get_docstring(node)
        ]
        assert not silent, f"{shown(path)}: no docstring on {silent}"


@of_each(SOURCES)
def test_words_are_the_products(path: Path) -> None:
    assert path.stem not in BANNED_MODULES, f"{shown(path)}: name it by what it does"
    banned = set(BANNED_WORDS)
    for prefix, words in ALLOWED_WORDS.items():
        if module_of(path).startswith(prefix):
            banned -= words
    wrong = [
        f"{name} (line {line})"
        for name, line in names_made(path)
        if name not in ALLOWED_NAMES and words_of(name) & banned
    ]
    assert not wrong, f"{shown(path)}: say it in the words of design.md: {wrong}"


@of_each(SOURCES)
def test_verbs_say_what_happens(path: Path) -> None:
    vague = [
        function.name for function in functions_of(path) if function.name.strip("_") in VAGUE_VERBS
    ]
    assert not vague, f"{shown(path)}: what does it do?"


def test_a_public_class_has_a_name_of_its_own() -> None:
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for node in tree_of(path).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes.setdefault(node.name, []).append(shown(path))
    shared = {name: at for name, at in homes.items() if len(at) > 1}
    assert not shared, "name each by what it is"


def test_no_file_knows_this_machine() -> None:
    found = []
    for name, text in tracked_texts():
        for number, line in enumerate(text.splitlines(), 1):
            hosts = re.findall(r"https?://([^/\s:'\"`)>]+)", line)
            if MACHINE_PATHS.search(line) or not all(map(READERS_HOSTS.search, hosts)):
                found.append(f"{name}:{number}")
    assert not found, "a path of one machine, or a host that is not in READERS_HOSTS"


def test_everything_installed_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["test"]]
    text = (ROOT / "constraints.txt").read_text()
    hashes = r"((?: \\\n +--hash=sha256:[0-9a-f]{64})+)?"
    pins = re.findall(rf"^([\w.-]+)==\S+{hashes}$", text, re.MULTILINE)
    assert len(pins) == text.count("==")
    without = [name for name, hashed in pins if not hashed]
    assert not without, "make pins"
    names = {re.split(r"[<>=\[; ]", line)[0].lower().replace("_", "-") for line in wanted}
    missing = names - {name for name, _ in pins}
    assert not missing, "pin them in constraints.txt, and: make pins"


def test_exit_codes_tell_errors_apart() -> None:
    base = errors.CommandError
    kinds = [
        kind
        for kind in vars(errors).values()
        if isinstance(kind, type) and issubclass(kind, base) and kind is not base
    ]
    assert len({kind.exit_code for kind in kinds} | {0, 1}) == len(kinds) + 2


if __name__ == "__main__":
    for at in sorted(SOURCES, key=code_lines_of):
        print(f"{code_lines_of(at):5} {shown(at)}")
    print(f"{statistics.median(map(lines_of, SOURCES)):5.0f} median of {len(SOURCES)} files")
