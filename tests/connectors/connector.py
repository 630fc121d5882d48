"""A real connector in a process of its own, driven from a test.

The process runs a file of drivers/ with the interpreter that has the connectors' packages; it
answers JSON lines. Nothing of a connector is ever imported into the test's own process.
"""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
DRIVERS: Final = HERE / "drivers"
ANSWER_WAIT_S: Final = 90.0
"""Longer than any verb of any driver takes on two busy cores; a hung call ends here."""
LOG_TAIL_BYTES: Final = 6000

QUIET: Final = {
    "LMCACHE_TRACK_USAGE": "false",
    "LMCACHE_DISABLE_BANNER": "1",
    "LMCACHE_LOG_LEVEL": "WARNING",
    "HF_HUB_OFFLINE": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "NIXL_LOG_LEVEL": "WARN",
}
"""No driver talks to anybody: telemetry and hubs off; and one OpenMP thread, for two cores."""


def interpreter() -> Path | None:
    """The Python that has the connectors: KVFS_CONNECTORS_PYTHON, else the checkout's own venv.

    The variable set to nothing means that there is none.
    """
    named = os.environ.get("KVFS_CONNECTORS_PYTHON")
    if named == "":
        return None
    python = Path(named) if named else ROOT / ".venv-connectors" / "bin" / "python"
    return python if python.exists() else None


def environment(python: Path) -> dict[str, str]:
    """A driver's environment: little of the caller's, and the unpacked wheels on the path."""
    unpacked = python.parent.parent / "unpacked"
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LANG") if name in os.environ}
    return {**kept, **QUIET, "PYTHONPATH": str(unpacked)}


class ConnectorFailed(AssertionError):
    """The driver answered with a traceback, died, or did not answer in time."""


class Connector:
    """One driver process; the driver's verbs are the first argument of ``call``."""

    def __init__(
        self,
        python: Path,
        driver: str,
        *arguments: str,
        wait_s: float = ANSWER_WAIT_S,
        prefix: Sequence[str] = (),
    ) -> None:
        """Start it by *prefix*, a command that becomes it; each answer may take *wait_s*."""
        self._wait_s = wait_s
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._opens = tempfile.NamedTemporaryFile("r", errors="replace")  # noqa: SIM115
        watched = {
            "LD_PRELOAD": str(python.parent.parent / "open_log.so"),
            "KVFS_OPEN_LOG": self._opens.name,
        }
        answers_fd, child_fd = os.pipe()
        try:
            self._process = subprocess.Popen(
                [*prefix, str(python), str(DRIVERS / f"{driver}.py"), str(child_fd), *arguments],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[child_fd],
                env={**environment(python), **watched},
                start_new_session=True,
                text=True,
            )
        finally:
            os.close(child_fd)
        self._answers_fd = answers_fd
        self._pending = b""
        self._unanswered = 0
        self._log_start_bytes = 0

    @property
    def pid(self) -> int:
        """The driver's process."""
        return self._process.pid

    @property
    def has_answered(self) -> bool:
        """Whether an answer waits to be read."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers_fd, selectors.EVENT_READ)
            return b"\n" in self._pending or bool(selector.select(0))

    def call(self, verb: str, **arguments: Any) -> Any:  # noqa: ANN401
        """Ask the driver and wait for its answer. Raises ConnectorFailed."""
        self.send(verb, **arguments)
        return self.answer()

    def send(self, verb: str, **arguments: Any) -> None:  # noqa: ANN401
        """Ask without waiting; ``answer`` waits."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps({"do": verb, "args": arguments}) + "\n")
            self._process.stdin.flush()
            self._unanswered += 1
        except BrokenPipeError:
            raise ConnectorFailed(f"the driver is gone\n{self.log_tail()}") from None

    def answer(self) -> Any:  # noqa: ANN401
        """Wait for the answer to the oldest ``send``. Raises ConnectorFailed."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._answers_fd, selectors.EVENT_READ)
            while b"\n" not in self._pending:
                if not selector.select(self._wait_s):
                    raise ConnectorFailed(f"no answer in {self._wait_s} s\n{self.log_tail()}")
                data = os.read(self._answers_fd, 1 << 20)
                if not data:
                    raise ConnectorFailed(f"the driver died\n{self.log_tail()}")
                self._pending += data
        line, self._pending = self._pending.split(b"\n", 1)
        self._unanswered -= 1
        answer = json.loads(line)
        if not answer["ok"]:
            raise ConnectorFailed(f"{answer['error']}\n{self.log_tail()}")
        return answer["result"]

    def end(self) -> None:
        """Let the driver stop its connector and leave by itself."""
        self.call("close")
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(ANSWER_WAIT_S)
        self._forget()

    def kill(self) -> None:
        """SIGKILL to the driver and whatever it started; harmless when it is gone."""
        if self._answers_fd < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(ANSWER_WAIT_S)
        self._forget()

    def rest(self) -> bool:
        """Stop the connector in it; return whether the process can open another one."""
        if self._answers_fd < 0:
            return False
        try:
            if self._unanswered:
                raise ConnectorFailed("a call is under way")
            self.call("close")
        except ConnectorFailed:
            self.kill()
            return False
        self._log_start_bytes = self._log.seek(0, os.SEEK_END)
        return True

    def opens(self, under: Path) -> list[tuple[str, int]]:
        """Path below ``under`` and flags of every open that the process has made there."""
        self._opens.seek(0)
        lines = [line.rstrip("\n").partition(" ") for line in self._opens]
        return [
            (path, int(flags, 8)) for flags, _, path in lines if Path(path).is_relative_to(under)
        ]

    def log_tail(self) -> str:
        """The last of what the connector printed in this test."""
        if self._answers_fd < 0:
            return "(ended)"
        size_bytes = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(self._log_start_bytes, size_bytes - LOG_TAIL_BYTES))
        return self._log.read().decode(errors="replace")

    def _forget(self) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._answers_fd)
        self._answers_fd = -1
        self._log.close()
        self._opens.close()


class Drivers:
    """Processes of drivers at rest: importing a connector takes seconds, so they are used again.

    Each ``take`` gives a process with no connector open in it; a killed one is never given out.
    """

    def __init__(self, python: Path) -> None:
        self.python = python
        self._resting: dict[tuple[str, ...], list[Connector]] = {}

    def take(self, *driver: str) -> Connector:
        """A process of a driver with its arguments, to be given back."""
        resting = self._resting.get(driver)
        return resting.pop() if resting else Connector(self.python, *driver)

    def give_back(self, connector: Connector, *driver: str) -> None:
        """Keep the process for the next test if it still works."""
        if connector.rest():
            self._resting.setdefault(driver, []).append(connector)

    def close(self) -> None:
        """End all of them."""
        for resting in self._resting.values():
            for connector in resting:
                connector.kill()


def run(
    python: Path, arguments: Sequence[str], wait_s: float = 55.0, prefix: Sequence[str] = ()
) -> str:
    """Run a connector's own command to its end; return its stdout. Raises ConnectorFailed.

    ``prefix`` is a command that becomes it.
    """
    done = subprocess.run(
        [*prefix, str(python), *arguments],
        env=environment(python),
        capture_output=True,
        stdin=subprocess.DEVNULL,
        timeout=wait_s,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise ConnectorFailed(f"exit {done.returncode}\n{done.stdout}\n{done.stderr}")
    return done.stdout
