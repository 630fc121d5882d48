"""The programs kvfs, mount.kvfs and umount.kvfs, as pip and the Debian package install them.

What a command imports takes 0.1 s, and more on a busy machine. Ctrl-C in that time ends it without
a word, as it ends a program in C: an exception there would be the traceback of some import, or be
lost in one. Once the verb runs, Ctrl-C has its line and its exit code (``stops_raise``).
"""

# signal is written in Python, and is an import of its own.
import _signal as signals  # type: ignore[import-not-found]

# One that was ignored when we started stays so.
if signals.getsignal(signals.SIGINT) is signals.default_int_handler:
    signals.signal(signals.SIGINT, signals.SIG_DFL)


def kvfs() -> int:
    """Run as ``kvfs``; return the exit code."""
    from kvfs.cli.main import main

    return main()


def mount_kvfs() -> int:
    """Run as ``mount.kvfs``; return the exit code."""
    from kvfs.cli.mount_helper import mount_main

    return mount_main()


def umount_kvfs() -> int:
    """Run as ``umount.kvfs``; return the exit code."""
    from kvfs.cli.mount_helper import umount_main

    return umount_main()
