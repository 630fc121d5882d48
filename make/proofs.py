"""Run the long proofs, a file at a time, and keep what each printed: ``python -m make.proofs``.

What a proof printed is docs/dev/proof-NAME.txt, headed by the commit, the date, the machine and the
command. One that passed at this very commit is not run again, so that a run that was interrupted
goes on where it was. The last lines are a table. ``--background`` lets the run outlive its shell.
"""

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

ROOT: Final = Path(__file__).resolve().parents[1]
#: Where outputs are kept, from the root.
KEPT: Final = Path("docs", "dev")
_BACKGROUND_LOG: Final = Path("build", "proofs.log")
_COMMIT_DIGITS: Final = 12
#: A test that takes longer than any proof may shows where it stands.
_STUCK_AFTER_S: Final = 7200
_HEAD: Final = re.compile(
    r"commit   (?P<commit>[0-9a-f]{12}(?:-dirty)?)\n"
    r"date     (?P<date>\d{4}-\d\d-\d\dT\d\d:\d\dZ)\n"
    r"machine  Linux \S+, \d+ cores, \d+ GiB\n"
    r"command  pytest -m proof (?P<test>\S+\.py)\n\n"
)
#: pytest's last line, of a run in which all passed that was not deselected.
_PASSED: Final = re.compile(r"=+ \d+ passed(?:, \d+ deselected)? in (?P<took>[\d.]+s)[^=]* =+\n*\Z")


class Kept(NamedTuple):
    """What the output of a proof says of itself."""

    commit: str
    date: str
    test: str
    has_passed: bool
    took: str


def name_of(test: str) -> str:
    """Return the name under which the output of the file *test* is kept."""
    return "proof-" + Path(test).stem.removeprefix("test_").replace("_", "-") + ".txt"


def read_kept(text: str) -> Kept | None:
    """Return what the output *text* says of itself; None: it is none of ours."""
    head = _HEAD.match(text)
    if head is None:
        return None
    passed = _PASSED.search(text)
    return Kept(
        head["commit"],
        head["date"],
        head["test"],
        passed is not None,
        passed["took"] if passed else "",
    )


def all_proofs() -> list[str]:
    """Return the files that have a test marked as a proof, in order."""
    listed = subprocess.run(
        [*_pytest(), "--collect-only", "-q", "-m", "proof", "--no-header", "tests"],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    return sorted({line.partition("::")[0] for line in listed.stdout.splitlines() if "::" in line})


def commit_here() -> str:
    """Return the commit that is checked out; ``-dirty``: something else than an output differs."""
    found = _git("rev-parse", f"--short={_COMMIT_DIGITS}", "HEAD").stdout.strip()
    changed = _git("diff", "--quiet", "HEAD", "--", ".", f":!{KEPT / 'proof-*.txt'}").returncode
    return f"{found}-dirty" if changed else found


def run_proof(test: str, commit: str) -> Kept:
    """Run the proofs of the file *test*, show and keep what they print, and return how they end."""
    path = ROOT / KEPT / name_of(test)
    with path.open("w") as kept:
        for line in _head(test, commit):
            kept.write(line)
        kept.flush()
        with subprocess.Popen(
            [*_pytest(), *_options(), test],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            cwd=ROOT,
        ) as running:
            assert running.stdout is not None
            for line in running.stdout:
                # What a build says has paths of this checkout, which nobody else has.
                kept.write(line.replace(str(ROOT), "."))
                kept.flush()
                sys.stdout.write(line)
                sys.stdout.flush()
    found = read_kept(path.read_text())
    assert found is not None
    return found._replace(has_passed=found.has_passed and running.returncode == 0)


def table(rows: Sequence[tuple[str, Kept, bool]]) -> Iterator[str]:
    """Return the lines of the table: a proof, how it ended, and whether it is from before."""
    width = max(len(test) for test, _, _ in rows)
    for test, kept, is_old in rows:
        ended = f"passed  {kept.took:>9}" if kept.has_passed else f"FAILED  {'':>9}"
        yield f"{test:<{width}}  {ended}  {'before' if is_old else 'now':<6}  {kept.commit}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for; 1 if a proof fails, 2 if there is none."""
    parser = argparse.ArgumentParser(
        prog="make proof",
        description="Run the long proofs and keep what they print.",
        epilog="example: make proof PROOF=tests/system/test_server_kills.py",
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="files with proofs; default: all")
    parser.add_argument("--background", action="store_true", help="go on behind this shell")
    parser.add_argument("--again", action="store_true", help="run also what passed at this commit")
    asked = parser.parse_args(arguments)
    if asked.background:
        return _go_on_behind(asked.files, again=asked.again)
    files = asked.files or all_proofs()
    if not files:
        print("make: no test is marked as a proof", file=sys.stderr)
        return 2
    rows: list[tuple[str, Kept, bool]] = []
    commit = commit_here()
    for test in files:
        before = _passed_before(test, commit)
        is_old = before is not None and not asked.again
        rows.append((test, before if before and is_old else run_proof(test, commit), is_old))
    for line in table(rows):
        print(line)
    return 0 if all(kept.has_passed for _, kept, _ in rows) else 1


def _passed_before(test: str, commit: str) -> Kept | None:
    path = ROOT / KEPT / name_of(test)
    kept = read_kept(path.read_text()) if path.exists() else None
    # What lies beside a commit is known by nobody: such a run says nothing of the next one.
    if kept is None or not kept.has_passed or kept.commit != commit or commit.endswith("-dirty"):
        return None
    return kept


def _go_on_behind(files: Sequence[str], *, again: bool) -> int:
    log = ROOT / _BACKGROUND_LOG
    log.parent.mkdir(exist_ok=True)
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "make.proofs", *(["--again"] * again), *files],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            start_new_session=True,
        )
    print(f"process {process.pid} runs the proofs; its table comes last in {_BACKGROUND_LOG}")
    return 0


def _head(test: str, commit: str) -> Iterator[str]:
    memory_kib = int(Path("/proc/meminfo").read_text().split()[1])
    yield f"commit   {commit}\n"
    yield f"date     {time.strftime('%Y-%m-%dT%H:%MZ', time.gmtime())}\n"
    cores = len(os.sched_getaffinity(0))
    yield f"machine  Linux {os.uname().release}, {cores} cores, {memory_kib / 1048576:.0f} GiB\n"
    yield f"command  pytest -m proof {test}\n\n"


def _pytest() -> list[str]:
    return [sys.executable, "-m", "pytest"]


def _options() -> list[str]:
    stuck = f"faulthandler_timeout={_STUCK_AFTER_S}"
    return ["-m", "proof", "-s", "--no-header", "-o", stuck]


def _git(*words: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=ROOT)


if __name__ == "__main__":
    sys.exit(main())
