"""A real Prometheus on a loopback port that scrapes mounts or a node_exporter every second."""

import contextlib
import json
import math
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from tests.support.clients.stepping import until
from tests.support.mounts.mounting import COMMAND_WAIT_S

LOOPBACK: Final = "127.0.0.1"


def free_port() -> int:
    """Return a port of the loopback address that nobody listens on now."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        return int(taken.getsockname()[1])


class Prometheus:
    """A server that runs; ask it by its HTTP API."""

    def __init__(self, port: int) -> None:
        self._url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **arguments: str) -> Any:  # noqa: ANN401
        """Return the data of an API call. Raises OSError while nobody answers."""
        query = urllib.parse.urlencode(arguments)
        with urllib.request.urlopen(f"{self._url}{path}?{query}", timeout=COMMAND_WAIT_S) as answer:
            told = json.load(answer)
        assert told["status"] == "success", told
        return told["data"]

    def values(self, expression: str) -> list[float]:
        """Return the values that *expression* has now, without those that are no number."""
        found = self.get("/api/v1/query", query=expression)["result"]
        values = [float(one["value"][1]) for one in found]
        return [value for value in values if not math.isnan(value)]

    def series(self, expression: str) -> list[dict[str, str]]:
        """Return the labels of each series that *expression* has now."""
        found = self.get("/api/v1/query", query=expression)["result"]
        return [dict(one["metric"]) for one in found]

    def firing(self, alert: str) -> list[dict[str, str]]:
        """Return the labels of each *alert* that fires."""
        told = self.get("/api/v1/alerts")["alerts"]
        fires = [one["labels"] for one in told if one["state"] == "firing"]
        return [labels for labels in fires if labels["alertname"] == alert]

    def answers(self) -> bool:
        """Whether it is up."""
        with contextlib.suppress(OSError):
            return bool(self.get("/api/v1/status/buildinfo"))
        return False


@contextlib.contextmanager
def prometheus(
    place: Path, target_port: int, rules: Path, *, names: Sequence[str] = (LOOPBACK,)
) -> Iterator[Prometheus]:
    """Run one with its files in *place*, which scrapes *target_port* and reads *rules*.

    By several *names* of this machine it is as many instances.
    """
    config = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": [str(rules)],
        "scrape_configs": [
            {
                "job_name": "kvfs",
                "static_configs": [{"targets": [f"{name}:{target_port}" for name in names]}],
            }
        ],
    }
    (place / "prometheus.yml").write_text(json.dumps(config))  # YAML holds JSON
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={place}/prometheus.yml",
        f"--storage.tsdb.path={place}/data",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]
    with _running(command, place / "prometheus.log"):
        running = Prometheus(port)
        until(running.answers, "Prometheus is up", COMMAND_WAIT_S)
        yield running


@contextlib.contextmanager
def node_exporter(place: Path, folder: Path) -> Iterator[int]:
    """Run node_exporter's textfile collector on *folder*; yield its port. Its log is in *place*."""
    port = free_port()
    command = [
        "prometheus-node-exporter",
        "--collector.disable-defaults",
        "--collector.textfile",
        f"--collector.textfile.directory={folder}",
        f"--web.listen-address={LOOPBACK}:{port}",
    ]
    with _running(command, place / "node-exporter.log"):
        yield port


@contextlib.contextmanager
def _running(command: list[str], log_file: Path) -> Iterator[None]:
    with log_file.open("w") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        yield
    finally:
        server.terminate()
        server.wait(COMMAND_WAIT_S)
