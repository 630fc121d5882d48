"""The settings of one ``kvfs mount``: its TOML file, with the flags on top."""

import argparse
import os
from dataclasses import replace
from typing import Final

from kvfs.client.user_file import read_file
from kvfs.core.errors import UsageError
from kvfs.core.mount_name import check_name, config_path, name_of
from kvfs.core.settings import Settings
from kvfs.machine.mount_table import resolve_mountpoint

#: Flags with the name of a setting.
_FLAGS: Final = (
    "source",
    "mountpoint",
    "name",
    "capacity_bytes",
    "fsync",
    "data_path",
    "log_file",
    "log_level",
    "guard",
)
_MOUNT_OPTIONS: Final = ("uid", "gid", "mode")


def load_settings(args: argparse.Namespace) -> Settings:
    """Return the settings of the command line *args* and of the TOML file it names or implies.

    Paths in *args* are absolute already, and those in the file must be. In the result the
    mountpoint has no symlinks, and the name is set. Raises UsageError.
    """
    settings, path = _given(args)
    if not settings.source or not settings.mountpoint:
        raise UsageError("give SOURCE and MOUNTPOINT (or both in the file of --config)")
    for name in ("source", "mountpoint", "log_file", "metrics_textfile"):
        value = getattr(settings, name)
        if value and not os.path.isabs(value):
            raise UsageError(f"{path}: {name}: {value!r} is not an absolute path")
    mountpoint = resolve_mountpoint(settings.mountpoint)
    textfile = settings.metrics_textfile
    if textfile and resolve_mountpoint(textfile).startswith(f"{mountpoint.rstrip('/')}/"):
        # A server that waits for its own mount at its end may wait for ever.
        raise UsageError(f"{path}: metrics_textfile must not lie on the mount itself")
    name = check_name(settings.name or name_of(mountpoint))
    return replace(settings, mountpoint=mountpoint, name=name)


def settings_to_show(args: argparse.Namespace) -> Settings:
    """Return the settings of *args*, which may name neither source nor mountpoint."""
    return load_settings(args) if args.source or args.config else _given(args)[0]


def _given(args: argparse.Namespace) -> tuple[Settings, str]:
    """Return the settings and the path of their file, which must exist if a flag names it."""
    overrides = _overrides(args)
    path = args.config or _implied_config(args)
    text = read_settings_file(path, must_exist=bool(args.config)) if path else ""
    return Settings.from_toml(text, overrides, origin=path), path


def read_settings_file(path: str, *, must_exist: bool) -> str:
    """Return the text of the settings file; empty if it is missing and need not exist.

    Raises UsageError if it cannot be read.
    """
    try:
        return read_file(path).decode()
    except FileNotFoundError:
        if not must_exist:
            return ""
        raise UsageError(f"settings file {path} does not exist") from None
    except OSError as error:
        raise UsageError(f"settings file {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"settings file {path}: {error}") from None


def _overrides(args: argparse.Namespace) -> dict[str, object]:
    overrides: dict[str, object] = {}
    for assignment in args.set:
        key, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"--set {assignment}: write --set NAME=VALUE")
        overrides[key.strip()] = value.strip()
    for option in ",".join(args.options).split(","):
        overrides.update(_mount_option(option))
    for name in _FLAGS:
        if getattr(args, name) is not None:
            overrides[name] = getattr(args, name)
    return overrides


def _mount_option(option: str) -> dict[str, object]:
    if option in ("ro", "rw"):
        return {"read_only": option == "ro"}
    key, equals, value = option.partition("=")
    if equals and key in _MOUNT_OPTIONS:
        return {key: value}
    if not option:
        return {}
    raise UsageError(f"-o {option}: use uid=, gid=, mode=, ro or rw, and --set for other settings")


def _implied_config(args: argparse.Namespace) -> str:
    if args.name:
        return config_path(check_name(args.name))
    return config_path(name_of(resolve_mountpoint(args.mountpoint))) if args.mountpoint else ""
