"""The board and the rules in docs/monitoring, with a real Prometheus that scrapes a live mount."""

import contextlib
import functools
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from tests.support.clients.stepping import until
from tests.support.machines.prometheus import Prometheus, free_port, node_exporter, prometheus
from tests.support.mounts.mounting import ROOT, Mounted, run_kvfs, skip_without_mounts, workplace
from tests.support.rules.metric_document import documented

pytestmark = [pytest.mark.needs_fuse, pytest.mark.needs_loop, pytest.mark.one_data_path]

BOARD: Final = ROOT / "docs" / "monitoring" / "kvfs-dashboard.json"
RULES: Final = ROOT / "docs" / "monitoring" / "kvfs-alerts.yml"
#: What Grafana puts in the place of its variables.
INSTEAD: Final = {"$instance": ".*", "$mount": ".*", "$__rate_interval": "10s"}
#: Two names of this machine: to Prometheus two hosts, whose mounts have one name.
HOSTS: Final = ("127.0.0.1", "localhost")
#: What only a real drive tells.
OF_DRIVES: Final = ("kvfs_device_endurance_left_ratio",)
CAPACITY: Final = "64MiB"
BLOCK_BYTES: Final = 1 << 20
#: More than the capacity, so that some are evicted, and looked for in vain.
NAMES: Final = 100
DATA_WAIT_S: Final = 60.0


def targets() -> list[tuple[str, str]]:
    """Every query of the board, as Grafana sends it, with its legend."""
    panels = json.loads(BOARD.read_text())["panels"]
    return [
        (_sent(target["expr"]), target["legendFormat"])
        for panel in panels
        for target in panel.get("targets", [])
    ]


def _sent(expression: str) -> str:
    for word, value in INSTEAD.items():
        expression = expression.replace(word, value)
    return expression


def expressions() -> list[str]:
    """The queries that a mount without a drive of its own answers."""
    return [one for one, _ in targets() if not one.startswith(OF_DRIVES)]


#: Stores and loads blocks of a model, until killed. A process: a test's own open files are counted.
TRAFFIC: Final = f"""
import itertools, pathlib, sys, time
for number in itertools.count():
    path = pathlib.Path(sys.argv[1]) / f"model@1@0@{{number % {NAMES}}}.data"
    try:
        path.read_bytes()
    except FileNotFoundError:
        path.with_suffix(".tmp").write_bytes(bytes({BLOCK_BYTES}))
        path.with_suffix(".tmp").rename(path)
    time.sleep(0.02)
"""


@contextlib.contextmanager
def traffic(directory: Path) -> Iterator[None]:
    """Store and load blocks, until left."""
    with subprocess.Popen([sys.executable, "-c", TRAFFIC, str(directory)]) as client:
        try:
            yield
        finally:
            client.kill()


@pytest.fixture(scope="module")
def scraped_mount() -> Iterator[Prometheus]:
    """A Prometheus with some seconds of a mount at work."""
    skip_without_mounts()
    port = free_port()
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(workplace())
        # On a device, whose writes are counted.
        run_kvfs("mkfs", "--capacity", CAPACITY, str(place / "pool.img"))
        flags = (f"--set=metrics_port={port}",)
        mount = stack.enter_context(Mounted(place / "pool.img", place / "kv", *flags))
        (mount.path / "models").mkdir()
        stack.enter_context(traffic(mount.path / "models"))
        yield stack.enter_context(prometheus(place, port, RULES, names=HOSTS))


def test_each_query_of_the_board_has_data(scraped_mount: Prometheus) -> None:
    waiting = expressions()
    assert len(waiting) > 30

    def all_answered() -> bool:
        waiting[:] = [one for one in waiting if not scraped_mount.values(one)]
        return not waiting

    with contextlib.suppress(AssertionError):
        until(all_answered, "every query has data", DATA_WAIT_S, pause_s=1.0)
    assert not waiting, "no data"


def hosts_of(prometheus: Prometheus, expression: str) -> set[str]:
    """Return the hosts of which *expression* has data."""
    series = prometheus.series(expression)
    return {one.get("instance", "").partition(":")[0] for one in series}


def test_each_query_tells_two_hosts_apart(scraped_mount: Prometheus) -> None:
    """Both have a mount of the same name: each line is of one host, and its legend says which."""

    def both_seen() -> bool:
        return len(scraped_mount.series("kvfs_capacity_bytes")) == len(HOSTS)

    until(both_seen, "both are scraped", DATA_WAIT_S)
    for expression, legend in targets():
        wanted = set(HOSTS) if expression in expressions() else set()
        # A rate needs two scrapes of each.
        told = functools.partial(hosts_of, scraped_mount, expression)
        until(lambda told=told, wanted=wanted: told() == wanted, expression, DATA_WAIT_S)
        series = scraped_mount.series(expression)
        shown = [
            re.sub(r"{{(\w+)}}", lambda found, one=one: one[found[1]], legend) for one in series
        ]
        assert len(set(shown)) == len(shown), f"{legend} is the same for several"
        assert all(any(host in line for host in HOSTS) for line in shown), legend


def test_the_query_of_the_page_on_many_hosts_has_data(scraped_mount: Prometheus) -> None:
    (query,) = re.findall(r"`(topk\([^`]+)`", (ROOT / "docs" / "fleet.md").read_text())
    until(lambda: bool(scraped_mount.values(query)), "it has data", DATA_WAIT_S, pause_s=1.0)


def test_a_query_that_nothing_answers_is_noticed(scraped_mount: Prometheus) -> None:
    assert scraped_mount.values("kvfs_no_such_metric") == []
    assert scraped_mount.values("vector(0) / 0") == []


def test_the_rules_are_loaded_and_evaluated(scraped_mount: Prometheus) -> None:
    def rules() -> list[dict[str, Any]]:
        (group,) = scraped_mount.get("/api/v1/rules")["groups"]
        return list(group["rules"])

    until(lambda: all(rule["health"] == "ok" for rule in rules()), "all were evaluated")
    assert len(rules()) == 12


def test_a_textfile_that_nobody_writes_any_more_is_told() -> None:
    """By a real node_exporter, whose figures of the mount look as if all were well."""
    skip_without_mounts()
    alert = "KvfsTextfileStale"
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(workplace())
        for name in ("pool", "textfiles"):
            (place / name).mkdir()
        written = place / "textfiles" / "kvfs.prom"
        flags = (f"--capacity={CAPACITY}", f"--set=metrics_textfile={written}")
        mount = stack.enter_context(Mounted(place / "pool", place / "kv", *flags))
        until(written.exists, "the file is written")
        port = stack.enter_context(node_exporter(place, place / "textfiles"))
        scraper = stack.enter_context(prometheus(place, port, RULES))
        until(lambda: bool(scraper.values("node_textfile_mtime_seconds")), "it is scraped")
        until(lambda: _evaluated(scraper, alert), "the rule is evaluated")
        assert scraper.firing(alert) == []
        mount.kill()
        assert written.exists()
        # As if so much time had passed; nobody is left who would write the file anew.
        long_ago_s = time.time() - 600
        os.utime(written, (long_ago_s, long_ago_s))
        until(lambda: bool(scraper.firing(alert)), "the alert fires", DATA_WAIT_S)
        (labels,) = scraper.firing(alert)
        assert (labels["file"], labels["severity"]) == (str(written), "critical")
        assert scraper.values("kvfs_used_bytes"), "it still tells figures"


def _evaluated(scraper: Prometheus, alert: str) -> bool:
    rules = [rule for group in scraper.get("/api/v1/rules")["groups"] for rule in group["rules"]]
    return any(rule["name"] == alert and rule["health"] == "ok" for rule in rules)


def test_the_board_asks_for_metrics_that_there_are() -> None:
    """And rules: a name that was renamed leaves an empty panel, and an alert that never fires."""
    known = {name for name, told in documented().items() if told.kind != "histogram"}
    for name, told in documented().items():
        if told.kind == "histogram":
            known |= {f"{name}_{end}" for end in ("bucket", "count", "sum")}
    asked = {
        word
        for text in (*expressions(), RULES.read_text())
        for word in names_in(text)
        if not word.endswith("_")
    }
    assert len(asked) > 20
    assert asked <= known


def names_in(text: str) -> set[str]:
    """The names of metrics in *text*."""
    words = "".join(one if one.isalnum() or one == "_" else " " for one in text).split()
    return {word for word in words if word.startswith("kvfs_")}


def test_grafanas_own_models_know_all_of_the_board() -> None:
    """Grafana itself is in no registry that is reached; these are made from its schemas."""
    register_default_plugins()
    board = json.loads(BOARD.read_text())
    read = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert list(lost(board, read)) == []
    board["panels"][1]["gridPosition"] = {}
    read = json.loads(json.dumps(Dashboard.from_json(board), cls=JSONEncoder))
    assert list(lost(board, read)) == [".panels.1.gridPosition"]


def lost(given: Any, read: Any, at: str = "") -> Iterator[str]:  # noqa: ANN401
    """Yield what of *given* is not in *read*, which may have defaults beside it."""
    if isinstance(given, dict) and isinstance(read, dict):
        for key, value in given.items():
            yield from lost(value, read[key], f"{at}.{key}") if key in read else [f"{at}.{key}"]
    elif isinstance(given, list) and isinstance(read, list) and len(given) == len(read):
        for number, (one, other) in enumerate(zip(given, read, strict=True)):
            yield from lost(one, other, f"{at}.{number}")
    elif given != read:
        yield at
