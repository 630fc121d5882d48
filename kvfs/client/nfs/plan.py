"""The plan of an export: the text for the server's configuration, and the next commands.

NFS-Ganesha's own configuration is never changed: the operator adds an include by a command.
"""

import ipaddress
import os
import re
import shlex
import shutil
from typing import Final, NamedTuple

from kvfs.client.nfs import nfsd
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
from kvfs.client.nfs.nfsd import export_line, nfsd_runs, options_of
from kvfs.client.nfs.squash import Squash
from kvfs.core.errors import UsageError
from kvfs.core.mount_name import name_of
from kvfs.machine.file_servers import GANESHA as PROGRAM

NFSD, GANESHA = "nfsd", "ganesha"
_MARK: Final = "# kvfs export {}: this file is kvfs's; `kvfs export --remove` takes it back.\n"
#: The options with which a client mounts it; docs/nfs.md has a reason for each.
CLIENT_OPTIONS: Final = (
    "vers=4.2,proto=tcp,nconnect=8,softerr,timeo=50,retrans=2,acdirmin=1,acdirmax=1"
)
#: Characters that fstab(5) needs escaped, and their escapes.
_BLANKS: Final = {ord(one): f"\\{ord(one):03o}" for one in " \t\n\\"}
#: exports(5), "Machine Name Formats", and what Ganesha's scanner takes without quotes as well.
_CLIENT: Final = re.compile(r"\*|@[A-Za-z_][\w.-]*|[A-Za-z_?*\[][\w.?*\[\]!-]*", re.ASCII)
#: The unit of Debian's package.
_UNIT: Final = "nfs-ganesha"


class WantedExport(NamedTuple):
    """The mount, and how it is to be exported."""

    mountpoint: str
    fsid: str
    clients: tuple[str, ...]
    squash: Squash
    is_writable: bool

    @property
    def name(self) -> str:
        """The name of its file, which is made from the mountpoint."""
        return name_of(self.mountpoint)


class ExportPlan(NamedTuple):
    """What must be done for an export."""

    mountpoint: str
    server: str
    file: str
    text: str
    runs: bool
    """Whether the server runs."""
    exported: bool
    """Whether it exports the mountpoint already."""
    next: tuple[str, ...]
    """The commands that must follow, in order."""
    remarks: tuple[str, ...] = ()
    taken_by: tuple[str, ...] = ()
    """Files of others that export it already."""
    is_here: bool = True
    """Whether the server runs in our mount namespace, so that it sees the same file."""

    @property
    def client_mount(self) -> str:
        """The command by which a client mounts it from this host."""
        place, here = shlex.quote(self._exported_at), shlex.quote(self.mountpoint)
        return f"mount -t nfs -o {CLIENT_OPTIONS} {place} {here}"

    @property
    def client_fstab(self) -> str:
        """The line of a client's fstab(5) that does the same."""
        place, here = (one.translate(_BLANKS) for one in (self._exported_at, self.mountpoint))
        return f"{place} {here} nfs {CLIENT_OPTIONS},_netdev 0 0"

    @property
    def _exported_at(self) -> str:
        return f"{os.uname().nodename}:{self.mountpoint}"


def marked(text: str, name: str) -> str:
    """Return *text* below a first line that marks it as kvfs's, of the mount *name*."""
    return _MARK.format(name) + text


def client_of(text: str) -> str:
    """Return *text* as both servers take it: a host, a network, @NETGROUP, *. Raises UsageError."""
    try:
        network = ipaddress.ip_network(text, strict=False)
    except ValueError:
        if not _CLIENT.fullmatch(text):
            raise UsageError(
                f"--client: {text!r} is not a client; give a host, a network such as 10.0.0.0/24, "
                "@NETGROUP, or * for everybody"
            ) from None
        return text
    if network.prefixlen == 0:
        return "*"
    return str(network.network_address) if network.num_addresses == 1 else str(network)


def plan_nfsd(wanted: WantedExport) -> ExportPlan:
    """Return the plan of an export by the kernel's NFS server."""
    file = f"{nfsd.EXPORTS_DIRECTORY}/{wanted.name}.exports"
    options = options_of(wanted.squash, wanted.fsid, is_writable=wanted.is_writable)
    line = export_line(wanted.mountpoint, wanted.clients, options)
    runs = nfsd.nfsd_runs()
    commands = ["exportfs -ra"] if runs else ["systemctl start nfs-server", "exportfs -ra"]
    if shutil.which("exportfs") is None:
        commands = ["apt-get install nfs-kernel-server", "exportfs -ra"]
    try:
        told = nfsd.told_exports(wanted.mountpoint)
    except OSError:
        told = ()
    remarks = []
    if any(one.is_here for one in ganeshas(wanted.mountpoint)):
        remarks.append("NFS-Ganesha runs here, and a port can have one server only")
    return ExportPlan(
        wanted.mountpoint,
        NFSD,
        file,
        marked(f"{line}\n", wanted.name),
        runs,
        any(one.path == wanted.mountpoint for one in told),
        tuple(commands),
        tuple(remarks),
        taken_by=tuple(nfsd.exported_by(wanted.mountpoint, file)),
    )


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
