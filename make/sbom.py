"""What is inside a Debian package of kvfs, as CycloneDX 1.5 in JSON.

``python3 make/sbom.py FOLDER VERSION DEPENDS``: FOLDER is /usr/lib/kvfs of the package, DEPENDS its
field of that name. Python's packages are told with the licenses that they state, Debian's by name:
their versions are those of the host.
"""

import email
import json
import re
import sys
from pathlib import Path
from typing import Any, Final

_OWN: Final = "kvfs"


def components(folder: Path) -> list[dict[str, Any]]:
    """Return the Python packages in *folder*, sorted by name."""
    found = []
    for metadata in sorted(folder.glob("*.dist-info/METADATA")):
        told = email.message_from_string(metadata.read_text())
        name = re.sub(r"[-_.]+", "-", str(told["Name"])).lower()
        component: dict[str, Any] = {
            "type": "library",
            "bom-ref": f"pkg:pypi/{name}@{told['Version']}",
            "name": name,
            "version": str(told["Version"]),
            "purl": f"pkg:pypi/{name}@{told['Version']}",
        }
        if license_ := told["License-Expression"]:
            component["licenses"] = [{"expression": license_}]
        elif named := _classified(told.get_all("Classifier") or []):
            component["licenses"] = [{"license": {"name": one}} for one in named]
        elif told["License"]:
            component["licenses"] = [{"license": {"name": told["License"].splitlines()[0]}}]
        found.append(component)
    return found


def _classified(classifiers: list[str]) -> list[str]:
    return [one.rpartition(" :: ")[2] for one in classifiers if one.startswith("License :: ")]


def of_debian(depends: str) -> list[dict[str, Any]]:
    """Return what the field *depends* names; of alternatives the first."""
    names = {re.split(r"[ (|]", one.strip())[0] for one in depends.split(",") if one.strip()}
    return [
        {"type": "library", "bom-ref": f"pkg:deb/debian/{name}", "name": name,
         "purl": f"pkg:deb/debian/{name}"}
        for name in sorted(names)
    ]  # fmt: skip


def bill(folder: Path, version: str, depends: str) -> dict[str, Any]:
    """Return the whole document."""
    python, debian = components(folder), of_debian(depends)
    (own,) = [one for one in python if one["name"] == _OWN]
    others = [one for one in python if one is not own] + debian
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": own | {"type": "application", "version": version}},
        "components": others,
        "dependencies": [{"ref": own["bom-ref"], "dependsOn": [one["bom-ref"] for one in others]}],
    }


if __name__ == "__main__":
    print(json.dumps(bill(Path(sys.argv[1]), sys.argv[2], sys.argv[3]), indent=1))
