"""Rules about the file system under the pool: its mount options, and how its XFS was made."""

import shlex
from typing import Final

from kvfs.core.pool_layout import XFS_INODE_BYTES, XFS_INODES, XFS_TREES
from kvfs.core.sizes import format_size
from kvfs.doctor.facts import Facts
from kvfs.doctor.finding import Finding, Severity

#: Creates and unlinks come in bursts. When the log is full, they wait for the disk.
_LOG_LOW_BYTES: Final = 64 << 20
_LOG_MATTERS_FROM_BYTES: Final = 100 << 30
#: By option: what it costs, and the option to use instead.
_COSTLY: Final = {
    "sync": ("every write waits for the drive", "async"),
    "dirsync": ("every create and unlink waits for the drive", "async"),
    "wsync": ("every create and unlink waits for the drive", "defaults"),
    "data=journal": ("every byte is written twice", "data=ordered"),
    "discard": ("every unlink waits for the drive's own discard", "nodiscard"),
}
_SEVERE: Final = frozenset({"sync", "dirsync", "wsync", "data=journal"})
#: These are accepted by a mount only: a remount refuses them.
_NEEDS_NEW_MOUNT: Final = frozenset({"wsync", "data=journal"})


def mount_options(facts: Facts) -> list[Finding] | None:
    """kvfs chooses the options for its own drive, but not for the file system below a directory.

    ext4(5), xfs(5), mount(8).
    """
    if facts.kind == "block":
        return []
    if facts.backing is None:
        return None
    where = shlex.quote(facts.backing.mountpoint)
    found = []
    for option in sorted(facts.backing.options & _COSTLY.keys()):
        cost, instead = _COSTLY[option]
        fix = f"mount -o remount,{instead} {where}"
        if option in _NEEDS_NEW_MOUNT:
            again = f"mount -o {instead} {shlex.quote(facts.backing.source)} {where}"
            fix = f"{_without_pool(facts, f'umount {where} && {again}')}\nand in /etc/fstab"
        found.append(
            Finding(
                Severity.WARNING if option in _SEVERE else Severity.NOTE,
                f"{facts.backing.mountpoint}, which holds {facts.source}, is mounted with "
                f"{option}: {cost}",
                fix,
            )
        )
    return found


def below_mount(facts: Facts) -> list[Finding] | None:
    """While nothing is mounted, clients fill the disk on which the mountpoint lies."""
    if facts.below is None:
        return None
    if not facts.below.files:
        return []
    at_least = "" if facts.below.is_whole else "at least "
    parent, name = facts.mountpoint.rsplit("/", 1)
    shown = f'"$d"/{shlex.quote(name)}'
    return [
        Finding(
            Severity.WARNING,
            f"{at_least}{format_size(facts.below.size_bytes)} in {facts.below.files} files are in "
            f"the directory {facts.mountpoint} itself, hidden by the mount: they were stored while "
            "nothing was mounted there, on the file system below",
            f'd=$(mktemp -d) && mount --bind {shlex.quote(parent or "/")} "$d" && '
            f'ls -lR {shown}; umount "$d"; rmdir "$d"\n'
            "which shows them; move or remove them in the same way. To prevent it, start clients "
            "after the mount, or make the empty directory immutable with `chattr +i`",
        )
    ]


def _without_pool(facts: Facts, commands: str) -> str:
    """Return *commands* that need an unused pool, with the unmount and mount around them."""
    where, source = shlex.quote(facts.mountpoint), shlex.quote(facts.source)
    return f"kvfs umount {where} && {commands} && kvfs mount {source} {where}"


def _made_anew(facts: Facts, device: str) -> str:
    """Return the commands that make the XFS on *device* as kvfs would."""
    source = shlex.quote(facts.source)
    if facts.kind != "directory" or facts.backing is None:
        remark = "erases the pool: only if a cold cache costs less"
        return f"{_without_pool(facts, f'kvfs mkfs --force {source}')}\n{remark}"
    home, drive = shlex.quote(facts.backing.mountpoint), shlex.quote(device)
    commands = (
        f"umount {home} && mkfs.xfs -f -i {XFS_INODES} -m {XFS_TREES} {drive} && "
        f"mount {drive} {home} && mkdir -p {source}"
    )
    remark = f"erases all of {facts.backing.mountpoint}: only if it is to be formatted anyway"
    return f"{_without_pool(facts, commands)}\n{remark}"


def xfs(facts: Facts) -> list[Finding] | None:
    """kvfs formats its own XFS; the XFS below a directory may have been made with other options."""
    if facts.xfs is None:
        return [] if facts.backing is not None and facts.backing.fs_type != "xfs" else None
    made = facts.xfs
    found = []
    again = _made_anew(facts, made.device)
    if made.inode_bytes < XFS_INODE_BYTES:
        problem = (
            f"the XFS on {made.device} has inodes of {made.inode_bytes} bytes: the identity "
            "of a block does not fit in, and each store writes one more block"
        )
        found.append(Finding(Severity.NOTE, problem, again))
    if made.log_bytes < _LOG_LOW_BYTES and made.size_bytes >= _LOG_MATTERS_FROM_BYTES:
        problem = (
            f"the log of the XFS on {made.device} is {format_size(made.log_bytes)}: bursts of "
            "stores and evictions wait for it"
        )
        wider = again.replace("-m ", "-l size=256m -m ")
        found.append(Finding(Severity.NOTE, problem, wider))
    trees = [
        name for name, has in (("reflink", made.has_reflink), ("rmapbt", made.has_rmapbt)) if has
    ]
    if trees:
        problem = (
            f"the XFS on {made.device} keeps {' and '.join(trees)} trees, which kvfs does "
            "not use: each allocation updates them"
        )
        found.append(Finding(Severity.NOTE, problem, again))
    return found
