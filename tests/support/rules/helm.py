"""Helm's own library, in a process of its own.

It is Go: when it is loaded it takes over the signals of its process. Then SIGPIPE, which Python
ignores, is not ignored any more, and programs that a test starts would begin so.
``python -m tests.support.rules.helm lint|render CHART NAME`` is that process: values as JSON on its
standard input, the answer or ``{"refused": WHY}`` as JSON on its standard output.
"""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import pytest

from tests.support.mounts.mounting import COMMAND_WAIT_S, ROOT

_NAMESPACE: Final = "kube-system"


class HelmRefused(Exception):
    """Helm does not take the chart or the values, and says why."""


def skip_without_helm() -> None:
    """Skip the module that calls this where the library is not built for the machine."""
    if importlib.util.find_spec("helm_python") is None:
        pytest.skip("Helm's library is for x86_64", allow_module_level=True)


def lint(chart: Path, values: dict[str, Any]) -> dict[str, Any]:
    """Return what ``helm lint --strict`` finds in *chart* with *values*."""
    return _ask("lint", chart, values, "-")


def render(chart: Path, values: dict[str, Any], name: str) -> dict[str, str]:
    """Return the text of each file that the release *name* of *chart* comes to.

    Raises HelmRefused if the values are none that the chart takes.
    """
    return _ask("render", chart, values, name)


def _ask(verb: str, chart: Path, values: dict[str, Any], name: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-m", __name__, verb, str(chart), name],
        input=json.dumps(values),
        stdout=subprocess.PIPE,
        check=True,
        cwd=ROOT,
        text=True,
        timeout=COMMAND_WAIT_S,
    )
    told: dict[str, Any] = json.loads(done.stdout)
    if why := told.get("refused"):
        raise HelmRefused(why)
    return told


def _answer(verb: str, chart: Path, values: dict[str, Any], name: str) -> dict[str, Any]:
    from helm_python import chart as helm  # here alone: see above

    if verb == "lint":
        return dict(helm.lint(chart, values, strict=True))
    try:
        with helm.Chart.load(chart) as loaded:
            return dict(loaded.render(values=values, name=name, namespace=_NAMESPACE))
    except Exception as error:  # whatever its binding raises says what Helm said
        return {"refused": str(error)}


if __name__ == "__main__":
    told = _answer(sys.argv[1], Path(sys.argv[2]), json.load(sys.stdin), sys.argv[3])
    json.dump(told, sys.stdout)
