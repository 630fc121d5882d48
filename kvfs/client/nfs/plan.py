"""The plan of an export: the text for the server's configuration, and the next commands."""

import ipaddress
import os
import re
import shlex
import shutil
from typing import Final, NamedTuple

from kvfs.client.nfs import nfsd
from kvfs.client.nfs.exports import export_line, options_of
from kvfs.client.nfs.ganesha import ganeshas
from kvfs.client.nfs.own_file import marked
from kvfs.client.nfs.squash import Squash
from kvfs.core.errors import UsageError
from kvfs.core.mount_name import name_of

NFSD, GANESHA = "nfsd", "ganesha"
#: The options with which a client mounts it; docs/nfs.md has a reason for each.
CLIENT_OPTIONS: Final = (
    "vers=4.2,proto=tcp,nconnect=8,softerr,timeo=50,retrans=2,acdirmin=1,acdirmax=1"
)
#: Characters that fstab(5) needs escaped, and their escapes.
_BLANKS: Final = {ord(one): f"\\{ord(one):03o}" for one in " \t\n\\"}
#: exports(5), "Machine Name Formats", and what Ganesha's scanner takes without quotes as well.
_CLIENT: Final = re.compile(r"\*|@[A-Za-z_][\w.-]*|[A-Za-z_?*\[][\w.?*\[\]!-]*", re.ASCII)


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
