"""An OCI image of one layer, made of a root file system: no registry and no daemon is needed.

``python3 make/oci_image.py ROOT.tar VERSION ARCH IMAGE.tar`` writes an archive as the OCI image
layout specification 1.0 has it, which `podman load`, `docker load` (25 and later) and `skopeo copy
oci-archive:` read. What it runs is what the Dockerfile says.
"""

import gzip
import hashlib
import io
import json
import re
import shutil
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

_OCI: Final = "application/vnd.oci.image"
_DOCKERFILE: Final = Path(__file__).parents[1] / "Dockerfile"


def what_it_runs(dockerfile: str) -> dict[str, Any]:
    """Return what *dockerfile* runs, and how it is stopped, as an image's configuration has it."""
    found = dict(re.findall(r"^(ENTRYPOINT|CMD|STOPSIGNAL) (.+)$", dockerfile, re.MULTILINE))
    return {
        "Entrypoint": json.loads(found["ENTRYPOINT"]),
        "Cmd": json.loads(found["CMD"]),
        "StopSignal": found["STOPSIGNAL"],
        "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"],
    }


def write_image(root: Path, version: str, arch: str, image: Path) -> None:
    """Write the archive *image*, whose one layer is the tar file *root*."""
    with tempfile.TemporaryDirectory(dir=image.parent) as folder:
        layer = Path(folder) / "layer"
        with (
            root.open("rb") as plain,
            layer.open("wb") as packed,
            # Without a name or a time: the same root is the same layer.
            gzip.GzipFile("", "wb", 6, packed, mtime=0) as compressed,
        ):
            shutil.copyfileobj(plain, compressed, 1 << 20)
        configuration = _as_bytes(
            {
                "architecture": arch,
                "os": "linux",
                "config": what_it_runs(_DOCKERFILE.read_text()),
                "rootfs": {"type": "layers", "diff_ids": [f"sha256:{_sha256(root)}"]},
                "history": [{"created_by": f"kvfs {version}"}],
            }
        )
        manifest = _as_bytes(
            {
                "schemaVersion": 2,
                "mediaType": f"{_OCI}.manifest.v1+json",
                "config": _described(f"{_OCI}.config.v1+json", configuration),
                "layers": [
                    {
                        "mediaType": f"{_OCI}.layer.v1.tar+gzip",
                        "digest": f"sha256:{_sha256(layer)}",
                        "size": layer.stat().st_size,
                    }
                ],
            }
        )
        named = {"org.opencontainers.image.ref.name": version.replace("+", "-")}
        first = _described(f"{_OCI}.manifest.v1+json", manifest) | {"annotations": named}
        with tarfile.open(image, "w") as archive:
            _add(archive, "oci-layout", _as_bytes({"imageLayoutVersion": "1.0.0"}))
            _add(archive, "index.json", _as_bytes({"schemaVersion": 2, "manifests": [first]}))
            for blob in (configuration, manifest):
                _add(archive, f"blobs/sha256/{hashlib.sha256(blob).hexdigest()}", blob)
            archive.add(layer, f"blobs/sha256/{_sha256(layer)}", filter=_without_owner)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _as_bytes(told: dict[str, Any]) -> bytes:
    return json.dumps(told, sort_keys=True).encode()


def _described(media_type: str, blob: bytes) -> dict[str, Any]:
    digest = f"sha256:{hashlib.sha256(blob).hexdigest()}"
    return {"mediaType": media_type, "digest": digest, "size": len(blob)}


def _add(archive: tarfile.TarFile, name: str, blob: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(blob)
    archive.addfile(member, io.BytesIO(blob))


def _without_owner(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    return member


if __name__ == "__main__":
    write_image(Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4]))
