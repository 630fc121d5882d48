"""On a terminal: tables wrap and show every value, on 20 columns too; a bar says how far it is."""

import sys
from pathlib import Path
from typing import Any

import pytest

from kvfs.bench.output import Screen
from kvfs.cli.follow import progress_bar
from kvfs.cli.main import main
from kvfs.cli.status_table import curve_lines
from kvfs.client.servers import ServerAnswer, status_of
from kvfs.core.errors import SeriousFindings
from kvfs.doctor.finding import Finding, Report, Severity, Verdict


def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let standard output be a terminal of 20 columns; pytest has another one for fixtures."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in (("COLUMNS", "20"), ("LINES", "24"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)


def test_status_shows_its_values(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow(monkeypatch)
    status = {"mountpoint": "/kv", "source": "/dev/nvme0n1", "capacity_bytes": 1 << 40}
    monkeypatch.setattr("kvfs.cli.status.status_of", lambda _: status)
    assert main(["status", "/kv"]) == 0
    shown = capsys.readouterr().out
    assert "/dev/nvme0n1" in shown
    assert "1 TiB" in shown


@pytest.mark.parametrize("columns", [40, 60, 80, 200])
def test_the_bars_of_other_sizes_fit(columns: int) -> None:
    """With the longest figures before them."""
    point = {"factor": 0.25, "capacity_bytes": 1023 * (1 << 40) + (1 << 39), "hit_rate": 1.0}
    lines = list(curve_lines({"curve": [point]}, columns))
    assert max(map(len, lines)) <= columns
    assert lines[-1].endswith("#" * min(8, columns // 5))


@pytest.mark.needs_fuse
@pytest.mark.one_data_path
@pytest.mark.parametrize(
    ("columns", "flags"), [(40, ()), (40, ("--all",)), (60, ("--all",)), (80, ("--all",))]
)
def test_status_breaks_at_words_only(
    kv: Path,
    columns: int,
    flags: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Of a real mount: each word of the wide table is whole in the narrow one."""
    for number in range(3):
        (kv / f"folder-{number}").mkdir()
        (kv / f"folder-{number}" / "block").write_bytes(bytes(100_000))
    monkeypatch.setenv("NO_COLOR", "1")
    answer = [ServerAnswer("", status_of(str(kv.parent)), None)]
    monkeypatch.setattr("kvfs.cli.status.answers_and_dead", lambda: answer)
    assert main(["status", *flags]) == 0
    wide = capsys.readouterr().out
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main(["status", *flags]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= columns
    # Bars are drawn to fit, and a name beside figures may be broken.
    text = (word for word in wide.split() if set(word) != {"#"} and kv.name not in word)
    words = {word for word in text if len(word) <= columns - 4}
    assert words <= {part for word in shown.split() for part in (word, word.rstrip(":"))}


@pytest.mark.parametrize("columns", [80, 97, 98, 120])
def test_top_hides_nothing_from_80_columns_on(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever the figures are."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("NO_COLOR", "1")
    looks = iter(range(2))
    names = ("loaded_bytes", "stored_bytes", "evicted_bytes")

    def status_now(_: str) -> dict[str, Any]:
        look = next(looks)
        counts = {"hits": 99_999 * look, "misses": 12_345 * look, "hit_rate": 1.0}
        counts |= dict.fromkeys(names, look * (99 << 30))
        directories = {"lmcache-of-a-long-name": counts}
        cache = {"hit_rate": 1.0, "uptime_s": 100.0 + look, "directories": directories}
        return {
            "mountpoint": "/kv",
            "used_bytes": 1,
            "capacity_bytes": 2,
            "blocks": 3,
            "cache": cache,
        }

    monkeypatch.setattr("kvfs.cli.top.status_of", status_now)
    assert main(["top", "/kv", "--once", "--interval", "0.1"]) == 0
    shown = capsys.readouterr().out.splitlines()
    for name in ("hit rate", "hits/s", "misses/s", "loaded/s", "stored/s", "so far", "evicted/s"):
        assert name in shown[1]
    assert max(map(len, shown)) <= columns


def test_doctor_shows_what_will_hurt(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow(monkeypatch)
    finding = Finding(Severity.SERIOUS, "nothing may go", "kvfs unpin /kv")
    report = Report("/kv", (Verdict("connector limits", (finding,), is_decided=True),))
    monkeypatch.setattr("kvfs.doctor.gather.gather", lambda *_: None)
    monkeypatch.setattr("kvfs.doctor.examine.examine", lambda _: report)
    assert main(["doctor", "/kv"]) == SeriousFindings.exit_code
    assert "nothing may go" in capsys.readouterr().out


def test_settings_show_their_reasons(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow(monkeypatch)
    assert main(["mount", "--print-settings"]) == 0
    # Where a reason is folded depends on the other columns.
    assert "an NVMe drive wants several" in " ".join(capsys.readouterr().out.split())


def test_the_demo_cuts_no_digit_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    narrow(monkeypatch)
    assert main(["demo", "--on", str(tmp_path), "--bytes", "16M"]) == 0
    shown = capsys.readouterr().out
    assert "4,194,304" in shown
    assert "…" not in shown


def test_a_bar_is_drawn_on_a_terminal_only(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with progress_bar("checking") as show:
        show(1, 2)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    for counted, text, drawn in ((True, "", "1/2"), (False, "half of it", "half of it")):
        with progress_bar("checking", counted=counted) as show:
            show(1, 2, text)
        assert drawn in capsys.readouterr().err


def test_filling_devices_has_a_bar_beside_that_of_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of `kvfs bench` and `kvfs replay`: it takes as long as many a step that is shown."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    with Screen(None, steps="prompts") as screen:
        screen.begin(7)
        screen.fill(4 << 20, 9 << 20)
    shown = capsys.readouterr().err
    assert "filling the devices" in shown
    assert "4 of 9 MiB" in shown
    assert "0 of 7 prompts" in shown
    with Screen(None, steps="prompts") as screen:
        screen.begin(7)
        screen.fill(4 << 20, 9 << 20)
        screen.fill(9 << 20, 9 << 20)
        capsys.readouterr()
        screen.count()
    assert "filling" not in capsys.readouterr().err
