"""The chart: Helm itself lints and renders it, and Kubernetes' own schemas read what comes out."""

import dataclasses
import tomllib
from pathlib import Path
from typing import Any, Final

import kubernetes_validate
import pytest
import yaml

from kvfs.core.settings import Settings
from tests.support.mounts.mounting import ROOT
from tests.support.rules.helm import HelmRefused, lint, render, skip_without_helm
from tests.support.rules.metric_document import promtool

skip_without_helm()

CHART: Final = ROOT / "docs" / "kubernetes" / "chart"
EXAMPLE: Final = ROOT / "docs" / "kubernetes" / "daemonset.yaml"
RULES: Final = ROOT / "docs" / "monitoring" / "kvfs-alerts.yml"
#: Of the oldest Kubernetes that Chart.yaml names, and of a recent one.
VERSIONS: Final = ("1.25", "1.33")
EVERYTHING: Final[dict[str, Any]] = {
    "source": "/dev/disk/by-id/nvme-eui.01",
    "settings": {
        "fsync": "honour",
        "lease_max": 0.5,
        "idmapped_mounts": True,
        "stop_timeout_s": 60,
    },
    "mounts": {"path": "/srv/kv", "name": "one"},
    "image": {"repository": "here/kvfs", "tag": "9", "pullPolicy": "Always"},
    "imagePullSecrets": [{"name": "key"}],
    "nodeSelector": {"disk": "nvme"},
    "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "affinity": {"nodeAffinity": {}},
    "resources": {"requests": {"cpu": "1", "memory": "1Gi"}},
    "podAnnotations": {"what": "cache"},
    "serviceMonitor": {"enabled": True, "interval": "10s", "labels": {"release": "prometheus"}},
    "alerts": {"enabled": True, "labels": {"release": "prometheus"}},
}
QUIET: Final[dict[str, Any]] = {"metrics": {"enabled": False}, "priorityClassName": ""}
CHOICES: Final = pytest.mark.parametrize(
    "values", [{}, EVERYTHING, QUIET], ids=["defaults", "everything", "quiet"]
)


def rendered(values: dict[str, Any], name: str = "kvfs") -> dict[str, dict[str, Any]]:
    """Return what the chart comes to with *values*, by kind."""
    files = render(CHART, values, name)
    texts = [text for path, text in files.items() if path.endswith(".yaml")]
    made = [one for text in texts for one in yaml.safe_load_all(text) if one]
    assert len({one["kind"] for one in made}) == len(made)
    return {one["kind"]: one for one in made}


@CHOICES
def test_helm_has_nothing_to_say(values: dict[str, Any]) -> None:
    found = lint(CHART, values)
    assert found["total_charts_linted"] == 1
    assert found["errors"] == []
    assert [one["error"] for one in found["messages"]] == ["icon is recommended"]


@CHOICES
@pytest.mark.parametrize("version", VERSIONS)
def test_kubernetes_reads_each_resource(values: dict[str, Any], version: str) -> None:
    made = rendered(values)
    own = {kind: one for kind, one in made.items() if "coreos" not in one["apiVersion"]}
    assert own.keys() >= {"ConfigMap", "DaemonSet"}
    for one in own.values():
        kubernetes_validate.validate(one, version, strict=True)
    wrong = made["DaemonSet"]
    wrong["spec"]["template"]["spec"]["hostPid"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, version, strict=True)


@CHOICES
def test_the_settings_are_some_that_kvfs_has(values: dict[str, Any]) -> None:
    told = tomllib.loads(rendered(values)["ConfigMap"]["data"]["kv.toml"])
    known = {field.name for field in dataclasses.fields(Settings)}
    assert told.keys() <= known
    assert told["source"] == values.get("source", "/dev/nvme0n1")
    assert values.get("settings", {}).items() <= told.items()
    assert ("metrics_textfile" in told) == (values != QUIET)


def test_by_default_it_is_the_example() -> None:
    """docs/kubernetes/daemonset.yaml says the same, for whoever has no Helm."""
    (_, example) = yaml.safe_load_all(EXAMPLE.read_text())
    spec = example["spec"]["template"]["spec"]
    made = rendered(QUIET | {"priorityClassName": "system-node-critical"})["DaemonSet"]
    own = made["spec"]["template"]["spec"]
    for container in (*own["initContainers"], *own["containers"]):
        del container["imagePullPolicy"]
    assert own == spec


def test_the_operator_scrapes_what_is_there_and_has_the_rules(tmp_path: Path) -> None:
    made = rendered(EVERYTHING, name="one")
    service, monitor = made["Service"]["spec"], made["ServiceMonitor"]["spec"]
    pod = made["DaemonSet"]["spec"]["template"]
    assert service["selector"].items() <= pod["metadata"]["labels"].items()
    assert (
        monitor["selector"]["matchLabels"].items() <= made["Service"]["metadata"]["labels"].items()
    )
    assert monitor["namespaceSelector"]["matchNames"] == ["kube-system"]
    (endpoint,) = monitor["endpoints"]
    assert endpoint["port"] == service["ports"][0]["name"]
    ports = {port["name"] for one in pod["spec"]["containers"] for port in one.get("ports", ())}
    assert service["ports"][0]["targetPort"] in ports
    rules = made["PrometheusRule"]
    assert rules["spec"] == yaml.safe_load(RULES.read_text())
    assert rules["metadata"]["labels"]["release"] == "prometheus"
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(rules["spec"]))
    assert "12 rules found" in promtool("check", "rules", tmp_path / "rules.yml")


@pytest.mark.parametrize(
    ("values", "what"),
    [
        ({"sorce": "/dev/sda"}, "sorce"),
        ({"source": "nvme0n1"}, "source"),
        ({"settings": {"mountpoint": "/x"}}, "mountpoint"),
        ({"metrics": {"enabled": False}, "serviceMonitor": {"enabled": True}}, "metrics.enabled"),
    ],
    ids=["unknown", "relative", "given elsewhere", "nothing to scrape"],
)
def test_values_that_make_no_sense_are_refused(values: dict[str, Any], what: str) -> None:
    with pytest.raises(HelmRefused, match=what):
        rendered(values)
