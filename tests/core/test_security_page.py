"""docs/security.md: the modes of sockets and the capabilities are those of settings and unit."""

import re
from typing import Final

from kvfs.core.settings import Settings
from tests.support.mounts.mounting import ROOT

PAGE: Final = (ROOT / "docs" / "security.md").read_text()


def test_the_unit_has_as_many_capabilities_as_the_page_says() -> None:
    unit = (ROOT / "systemd" / "kvfs@.service").read_text()
    (bounding,) = re.findall(r"^CapabilityBoundingSet=(.+)$", unit, re.MULTILINE)
    assert len(bounding.split()) == 9
    assert "leaves it nine capabilities" in PAGE
    assert "NoNewPrivileges=yes" in unit


def test_the_sockets_are_open_to_whom_the_page_says() -> None:
    rows = dict(re.findall(r"^\| `/run/kvfs/NAME\.(\w+)`[^|]*\| ([^|]+) \|", PAGE, re.MULTILINE))
    assert rows["metrics"] == "every user"
    assert Settings().metrics_socket_mode == 0o666
    assert rows["events"] == rows["sock"] == "root and the server's own user"
    assert Settings().events_socket_mode == 0o600
    assert rows["hints"] == "every user"
    assert Settings().hints_socket_mode == 0o666
    assert Settings().control_group == ""


def test_each_bound_is_a_setting() -> None:
    named = set(re.findall(r"`([a-z]+(?:_[a-z]+)+)`", PAGE))
    assert {"lease_max", "pin_share", "length_share"} <= named
    assert named <= set(Settings.__dataclass_fields__)
