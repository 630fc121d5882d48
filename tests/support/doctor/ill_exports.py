"""Exports over NFS, well and ill, and mounts of them: for the rules of the doctor."""

from typing import Any, Final

from kvfs.client.nfs.ganesha import Configuration, Ganesha
from kvfs.client.nfs.nfsd import Export
from kvfs.doctor.facts import NfsMount
from kvfs.doctor.finding import Severity

SERIOUS, WARNING, NOTE = Severity.SERIOUS, Severity.WARNING, Severity.NOTE
THROUGH_NFS: Final = {"vers": "4.2", "softerr": "", "proto": "tcp", "nconnect": "8"}
NFSD_OPTIONS: Final = frozenset({"rw", "fsid=1", "no_subtree_check", "no_root_squash"})
#: What `kvfs export` writes for NFS-Ganesha, but for what a test puts in.
GANESHA_CONFIG: Final = """
MDCACHE {{ FD_LWMark_Percent = {low}; LRU_Run_Interval = {interval}; }}
EXPORT {{
    Export_Id = 7; Path = "/kv"; Pseudo = /kv; Filesystem_Id = {fsid};
    Squash = {squash}; Access_Type = {access}; Attr_Expiration_Time = {expiration};
    FSAL {{ Name = VFS; }}
}}
EXPORT {{ Export_Id = 8; Path = /other; Pseudo = /other; Filesystem_Id = 8.8; Access_Type = RW; }}
"""


def ganesha_with(
    low: int = 0,
    interval: int = 1,
    fsid: str = "1.1",
    squash: str = "No_Root_Squash",
    access: str = "RW",
    expiration: int = 1,
    **changed: Any,  # noqa: ANN401
) -> Ganesha:
    """Return a server with that in its configuration, and what else is *changed* of it."""
    text = GANESHA_CONFIG.format(
        low=low,
        interval=interval,
        fsid=fsid,
        squash=squash,
        access=access,
        expiration=expiration,
    )
    configuration = Configuration("/etc/ganesha/ganesha.conf", text)
    command = "ganesha.nfsd -f /etc/ganesha/ganesha.conf"
    unit = "nfs-ganesha.service"
    made = Ganesha(4711, unit, command, configuration, is_here=True, is_older=False, open_files=3)
    return made._replace(**changed)


def ganesha(**changed: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"ganeshas": (ganesha_with(**changed),)}


def nfs(**changed: str) -> dict[str, Any]:
    options = {**THROUGH_NFS, **changed}
    return {"nfs": NfsMount("box:/kv", "nfs4", options)}


def export(*options: str) -> dict[str, Any]:
    return {"exports": (Export("/kv/a b", "*", frozenset(options)),)}


#: As `ILL` of ill_mounts.py.
ILL_EXPORTS: Final[list[tuple[str, dict[str, Any], Severity, str, str]]] = [
    ("NFS exports", export("rw", "no_subtree_check"), SERIOUS, "fsid=", "exportfs -o rw,async,"),
    ("NFS exports", export("rw", "subtree_check", "fsid=1"), WARNING, "rename", "'*:/kv/a b'"),
    (
        "NFS exports",
        {"exports": (Export("/kv", "*", NFSD_OPTIONS, ("/other",)),)},
        SERIOUS,
        "with the fsid of /other",
        "fsid=0e3c1ff2-0c2d-4b2c-9a5e-6f0e3c1ff20c '*:/kv'",
    ),
    (
        "NFS exports",
        {"exports": (Export("/kv", "*", frozenset({"rw", "fsid=1", "root_squash"})),)},
        SERIOUS,
        "so that nobody can store: they are taken for uid 65534, which may not write to a root "
        "directory of uid 0 and mode 0755",
        ",no_root_squash,fsid=",
    ),
    (
        "NFS-Ganesha",
        ganesha(low=50, interval=90, open_files=184, unknown_files=1),
        WARNING,
        "FD_LWMark_Percent is 50 and LRU_Run_Interval 90; it has at least 184 files of the mount",
        "systemctl restart nfs-ganesha.service\nbefore that, say in its block MDCACHE { FD_LWMark_",
    ),
    (
        "NFS-Ganesha",
        ganesha(open_files=184_000, is_older=True, unit=""),
        WARNING,
        "has 184,000 files of the mount open; its configuration is newer than the process",
        "done; ganesha.nfsd -f /etc/ganesha/ganesha.conf",
    ),
    (
        "NFS-Ganesha",
        ganesha(fsid="8.8"),
        SERIOUS,
        "with one Filesystem_Id for /kv, /other",
        "in yours say Filesystem_Id = 64108121223779506.747156695119032844;",
    ),
    (
        "NFS-Ganesha",
        {**ganesha(), "status": {"device_number": 61, "device_number_before": 58}},
        WARNING,
        "/kv has device number 61 and had 58 before",
        "umount /kv && mount /kv\non each client",
    ),
    ("NFS-Ganesha", ganesha(expiration=60), WARNING, "believes for 60 s", "Expiration_Time = 1;"),
    ("NFS-Ganesha", ganesha(expiration=-1), WARNING, "believes for ever", "Expiration_Time = 1;"),
    ("NFS-Ganesha", ganesha(access="RO"), NOTE, "read-only", "Access_Type = RW;"),
    (
        "NFS-Ganesha",
        ganesha(squash="root_squash"),
        SERIOUS,
        "so that nobody can store: they are taken for uid 4294967294",
        "Squash = No_Root_Squash;",
    ),
    ("NFS exports", export("ro", "fsid=1"), NOTE, "read-only", "exportfs -o rw,"),
    ("NFS mount", nfs(sync=""), WARNING, "sync: every write", "umount /kv && mount -t nfs -o vers"),
    ("NFS mount", nfs(noac=""), WARNING, "noac", "softerr,nconnect=8 box:/kv /kv"),
    ("NFS mount", nfs(lookupcache="none"), WARNING, "every miss", "lookupcache=all"),
    ("NFS mount", nfs(rsize="32768"), WARNING, "32 KiB a message", "rsize=1048576"),
    ("NFS mount", nfs(proto="udp"), WARNING, "udp", "proto=tcp"),
    (
        "NFS mount",
        {"nfs": NfsMount("box:/kv", "nfs4", {"hard": "", "nconnect": "4"})},
        WARNING,
        "hang",
        "softerr,timeo=50,retrans=2",
    ),
    (
        "NFS mount",
        {"nfs": NfsMount("box:/kv", "nfs4", {"softerr": ""})},
        NOTE,
        "one connection",
        "nconnect=8",
    ),
]
