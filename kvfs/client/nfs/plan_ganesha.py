"""The plan of an export by NFS-Ganesha: a file that its configuration includes.

The configuration itself is never changed: the operator adds the include by a command.
"""

import os
import shlex
import shutil
from typing import Final

from kvfs.client.nfs.ganesha import (
    CONFIG,
    Configuration,
    Ganesha,
    exports_below,
    ganeshas,
    read_configuration,
    reload_of,
    restart_of,
)
from kvfs.client.nfs.ganesha_config import (
    FIT,
    FIT_EXPIRATION_S,
    GaneshaExport,
    cache_settings,
    export_id_of,
    export_text,
    exports_of,
    filesystem_id_of,
    parse,
)
from kvfs.client.nfs.nfsd import nfsd_runs
from kvfs.client.nfs.own_file import marked
from kvfs.client.nfs.plan import GANESHA, NFSD, ExportPlan, WantedExport
from kvfs.machine.file_servers import GANESHA as PROGRAM

#: The unit of Debian's package.
_UNIT: Final = "nfs-ganesha"


def choose_server(mountpoint: str) -> str:
    """Return the server that runs here; nfsd if none or both run."""
    return GANESHA if not nfsd_runs() and _server_with("", mountpoint) is not None else NFSD


def plan_ganesha(wanted: WantedExport, config: str = "") -> ExportPlan:
    """Return the plan of an export, with the configuration *config*, or the one Ganesha reads."""
    server = _server_with(config, wanted.mountpoint)
    path = config or (server.configuration.path if server is not None else CONFIG)
    file = f"{os.path.dirname(path)}/kvfs-{wanted.name}.conf"
    if server is not None and not server.is_here:
        others = whole = server.configuration
    else:
        others, whole = read_configuration(path, but=file), read_configuration(path)
    blocks = parse(others.text)
    exports, cache = exports_of(blocks), cache_settings(blocks)
    export = GaneshaExport(
        export_id_of(wanted.fsid, frozenset(one.export_id for one in exports)),
        wanted.mountpoint,
        wanted.mountpoint,
        filesystem_id_of(wanted.fsid),
        wanted.squash,
        wanted.is_writable,
        FIT_EXPIRATION_S,
    )
    exported = any(one.path == wanted.mountpoint for one in exports_of(parse(whole.text)))
    taken = any(wanted.mountpoint in (one.path, one.pseudo) for one in exports)
    return ExportPlan(
        wanted.mountpoint,
        GANESHA,
        file,
        marked(export_text(export, wanted.clients, FIT if cache is None else None), wanted.name),
        server is not None,
        exported,
        tuple(_next(server, whole, file, restarts=cache is None and not exported)),
        tuple(_remarks(server, whole, fits=cache in (None, FIT))),
        taken_by=(path,) if taken else (),
        is_here=server is None or server.is_here,
    )


def _server_with(config: str, mountpoint: str) -> Ganesha | None:
    """Return the server that reads *config*; if empty, one here, or one of this mountpoint."""

    def fits(one: Ganesha) -> bool:
        if config:
            return one.configuration.path == config
        return one.is_here or bool(exports_below(one, mountpoint))

    found = filter(fits, ganeshas(mountpoint))
    return max(
        found, key=lambda one: (one.is_here, bool(exports_below(one, mountpoint))), default=None
    )


def _next(server: Ganesha | None, found: Configuration, file: str, *, restarts: bool) -> list[str]:
    commands = []
    if server is None and shutil.which(PROGRAM) is None:
        commands.append("apt-get install nfs-ganesha nfs-ganesha-vfs")
    if file not in found.files:
        # The last line of that file may have no line break.
        commands.append(f"printf '\\n%%include \"{file}\"\\n' >> {shlex.quote(found.path)}")
    if server is None:
        commands.append(f"systemctl start {_UNIT}")
    elif restarts:  # a reload reads exports only (ganesha-config(8))
        commands.append(restart_of(server))
    else:
        commands.append(reload_of(server))
    return commands


def _remarks(server: Ganesha | None, found: Configuration, *, fits: bool) -> list[str]:
    remarks = []
    if server is not None and not server.is_here:
        remarks.append(
            f"NFS-Ganesha (process {server.pid}) runs in another mount namespace: put the file "
            "where it finds it"
        )
    if not fits:
        remarks.append(
            f"a block MDCACHE or CacheInode of {found.path} decides when files are closed: set "
            f"FD_LWMark_Percent = {FIT.fd_lwmark_percent}; and LRU_Run_Interval = "
            f"{FIT.lru_run_interval_s}; there, and restart NFS-Ganesha"
        )
    if server is not None and found.unread:
        remarks.append(f"not all of its configuration could be read: {found.unread}")
    if nfsd_runs():
        remarks.append("the kernel's NFS server runs here, and a port can have one server only")
    return remarks
