"""The man pages, made from the command line's parsers and the table of settings.

Nothing is copied by hand, so a page says what the command of the same tree does. man(7) has the
macros.
"""

import argparse
import dataclasses
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from kvfs import __version__
from kvfs.cli.main import VERBS, parser_of
from kvfs.cli.mount_helper import IGNORED, mount_parser
from kvfs.core.mount_name import CONFIG_DIRECTORY, LOG_DIRECTORY, RUN_DIRECTORY
from kvfs.core.setting_values import default_of, show
from kvfs.core.settings import RELOADABLE, Settings
from make.configuration_page import kind_of, words_of

_EXIT_CODES: Final = Path(__file__).resolve().parents[1] / "docs" / "exit-codes.md"
_CODE_ROW: Final = re.compile(r"^\| (\d+) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def pages() -> dict[str, str]:
    """Return the text of each page by its file name, such as ``kvfs-mount.1``."""
    parser = parser_of(VERBS)
    verbs = _nested(parser)
    found = {
        "kvfs.1": _overview(parser),
        "kvfs.conf.5": _settings(),
        "mount.kvfs.8": _mount_helper(),
    }
    for name in ("mount.fuse.kvfs", "umount.kvfs", "umount.fuse.kvfs"):
        found[f"{name}.8"] = ".so man8/mount.kvfs.8\n"
    for verb, summary in VERBS.items():
        found[f"kvfs-{verb}.1"] = _verb(verbs[verb], summary)
    return found


def _overview(parser: argparse.ArgumentParser) -> str:
    lines = [*_head("kvfs", 1, "a flash tier for LLM KV cache that is a file system")]
    lines += [".SH SYNOPSIS", ".B kvfs", ".I VERB", r"[\fIargument\fR ...]", ".SH DESCRIPTION"]
    lines += [*_text(parser.description or ""), ".PP"]
    lines += _text("Each verb has a page of its own, and kvfs VERB --help shows the same.")
    lines += [".SH VERBS"]
    for verb, summary in VERBS.items():
        lines += [".TP", rf"\fB{_roff(f'kvfs-{verb}')}\fR(1)", _roff(summary)]
    lines += [".SH OPTIONS", *_options(parser), ".SH EXIT STATUS"]
    for code, meaning, _ in _CODE_ROW.findall(_EXIT_CODES.read_text()):
        lines += [".TP", f".B {code}", *_text(meaning.replace("`", ""))]
    lines += [".SH FILES"]
    for path, meaning in (
        (f"{CONFIG_DIRECTORY}/NAME.toml", "settings of the mount called NAME, see kvfs.conf(5)"),
        (f"{RUN_DIRECTORY}/NAME.sock", "its control socket"),
        (f"{LOG_DIRECTORY}/NAME.log", "its log, where there is neither journal nor syslog"),
        ("kvfs@NAME.service", "the unit of systemd(1) that serves it"),
    ):
        lines += [".TP", f".I {_roff(path)}", *_text(meaning)]
    others = [f"kvfs-{verb}(1)" for verb in VERBS]
    return _page([*lines, *_see_also([*others, "kvfs.conf(5)", "mount.kvfs(8)", "fuse(4)"])])


def _verb(parser: argparse.ArgumentParser, summary: str) -> str:
    title = parser.prog.replace(" ", "-")
    lines = [*_head(title, 1, summary), ".SH SYNOPSIS", *_synopsis(parser)]
    inner = _nested(parser)
    for what in inner.values():
        lines += [".PP", *_synopsis(what)]
    lines += [".SH DESCRIPTION", *_text(parser.description or ""), *_arguments(parser, "SH")]
    for name, what in inner.items():
        lines += [f".SH {_quoted(name.upper())}", *_text(what.description or "")]
        lines += [*_arguments(what, "SS"), *_example(what, "SS")]
    lines += _example(parser, "SH")
    lines += [".SH EXIT STATUS", *_text("0 if done; every other code is explained in kvfs(1).")]
    return _page([*lines, *_see_also(["kvfs(1)", "kvfs.conf(5)"])])


def _settings() -> str:
    """Return kvfs.conf(5): each setting with type, default and reason."""
    lines = [*_head("kvfs.conf", 5, "settings of a kvfs mount")]
    lines += [".SH SYNOPSIS", f".I {CONFIG_DIRECTORY}/NAME.toml", ".SH DESCRIPTION"]
    lines += _text(
        "The settings of the mount called NAME, one NAME = VALUE a line (TOML). NAME is made from "
        "the mountpoint: kv for /kv. kvfs mount --config reads another file, its flags and --set "
        "NAME=VALUE go over the file, and --print-settings shows what is in force."
    )
    lines += [
        ".PP",
        *_text("Sizes may be written as text, such as 500G, GiB and G being the same."),
    ]
    lines += [".SH SETTINGS"]
    for declared in dataclasses.fields(Settings):
        lines += [".TP", rf"\fB{_roff(declared.name)}\fR = \fI{_roff(_kind(declared))}\fR"]
        default = show(declared, default_of(declared))
        told = "" if default == "-" else f"Default: {default}. "
        reload = " Changes at a reload." if declared.name in RELOADABLE else ""
        reason = declared.metadata["reason"]
        lines += _text(f"{told}{reason[:1].upper()}{reason[1:]}.{reload}")
    lines += [".SH EXAMPLE", ".nf", 'source = "/dev/nvme0n1"', 'mountpoint = "/kv"']
    lines += ['capacity_bytes = "500G"', ".fi"]
    return _page([*lines, *_see_also(["kvfs(1)", "kvfs-mount(1)", "mount.kvfs(8)"])])


def _mount_helper() -> str:
    """Return mount.kvfs(8): what an fstab may say."""
    parser = mount_parser()
    lines = [*_head("mount.kvfs", 8, "mount a kvfs pool by mount(8) and fstab(5)")]
    lines += [".SH SYNOPSIS", *_synopsis(parser), ".SH DESCRIPTION"]
    lines += _text(
        f"{parser.description} umount(8) calls umount.kvfs, which is kvfs umount: it waits until "
        "the source is free. umount -i does without it."
    )
    lines += [*_arguments(parser, "SH"), ".SH MOUNT OPTIONS"]
    for name, meaning in (
        ("ro", "Serve what is there, and store nothing."),
        ("uid=, gid=, mode=", "Owner, group and mode of the root directory."),
        ("capacity=SIZE", "Limit for the data, such as 500G."),
        (
            "config=FILE",
            "Settings file. Without it, that of kvfs mount is read: /etc/kvfs/NAME.toml",
        ),
        ("guard", "Let nothing be stored in DIR while nothing is mounted there."),
        (
            "SETTING=VALUE",
            "Any setting of kvfs.conf(5); for true or false also SETTING, noSETTING.",
        ),
    ):
        lines += [".TP", rf"\fB{_roff(name)}\fR", *_text(meaning)]
    ignored = ", ".join(sorted(IGNORED))
    lines += [".PP", *_text(f"Taken, and without effect here: {ignored}; x-*, comment=*.")]
    lines += [*_example(parser, "SH"), ".SH FSTAB", ".nf"]
    lines += [_roff("/dev/nvme0n1  /kv  kvfs  nofail,guard,capacity=500G  0  0"), ".fi"]
    lines += [
        ".SH EXIT STATUS",
        *_text("Those of mount(8): 0, 1 for a wrong call, 32 if it failed."),
    ]
    return _page([*lines, *_see_also(["kvfs-mount(1)", "kvfs.conf(5)", "mount(8)", "fstab(5)"])])


def _kind(declared: "dataclasses.Field[Any]") -> str:
    """Return what values it takes, such as ``0 to 86400 s``."""
    if words := words_of(declared):
        return " | ".join(words)
    if kind := kind_of(declared):
        return kind
    unit, low, high = (declared.metadata[name] for name in ("unit", "low", "high"))
    shown = [show(declared, bound) for bound in (low, high) if bound is not None]
    bounds = " to ".join(shown) if len(shown) == 2 else "".join(f"{one} or more" for one in shown)
    name = {"bytes": "size", "octal": "mode", "share": "share"}.get(unit, "number")
    return f"{name}, {bounds}" if bounds else name


def _arguments(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    options = list(_options(parser))
    if options:
        yield f".{level} OPTIONS"
        yield from options


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    formatter = parser._get_formatter()
    for action in parser._actions:
        if action.help == argparse.SUPPRESS or isinstance(action, argparse._SubParsersAction):
            continue
        shown = formatter._format_action_invocation(action).split(", ")
        named = [_flag(one) if action.option_strings else rf"\fI{_roff(one)}\fR" for one in shown]
        said = formatter._expand_help(action) if action.help else ""
        if said or action.option_strings:
            yield from (".TP", ", ".join(named), *_text(said or " "))


def _flag(shown: str) -> str:
    name, _, value = shown.partition(" ")
    return rf"\fB{_roff(name)}\fR" + (rf" \fI{_roff(value)}\fR" if value else "")


def _synopsis(parser: argparse.ArgumentParser) -> list[str]:
    usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
    words = usage.removeprefix(parser.prog).strip()
    return [rf"\fB{_roff(parser.prog)}\fR {_roff(words)}"]


def _example(parser: argparse.ArgumentParser, level: str) -> Iterator[str]:
    title, _, rest = (parser.epilog or "").partition("\n")
    if rest:
        yield f".{level} {_quoted(title.rstrip(':').upper())}"
        yield from (".nf", *(_line(line.strip()) for line in rest.splitlines()), ".fi")


def _nested(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            return dict(action.choices)
    return {}


def _head(title: str, section: int, summary: str) -> list[str]:
    # A package that is built again is the same (reproducible-builds.org).
    made_s = float(os.environ.get("SOURCE_DATE_EPOCH", time.time()))
    made = time.strftime("%Y-%m-%d", time.gmtime(made_s))
    return [
        f'.TH "{_roff(title.upper())}" "{section}" "{made}" "kvfs {__version__}" "kvfs"',
        *(".nh", ".ad l", ".SH NAME", rf"{_roff(title)} \- {_roff(summary)}"),
    ]


def _see_also(others: list[str]) -> list[str]:
    named = [re.sub(r"(.+)(\(\d\))", r"\\fB\1\\fR\2", _roff(one)) for one in others]
    return [".SH SEE ALSO", ",\n".join(named)]


def _text(text: str) -> list[str]:
    """Return *text* as roff that fills its lines; blank lines part paragraphs."""
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.strip()):
        if lines:
            lines.append(".PP")
        lines.append(_line(" ".join(paragraph.split())))
    return lines


def _line(text: str) -> str:
    return rf"\&{_roff(text)}" if text.startswith((".", "'")) else _roff(text)


def _quoted(text: str) -> str:
    return f'"{_roff(text)}"'


def _roff(text: str) -> str:
    """Return *text* with the characters that roff reads otherwise."""
    text = text.replace("\\", r"\e").replace("-", r"\-")
    return text.replace("'", r"\(aq").replace("`", r"\(ga").replace('"', r"\(dq")


def _page(lines: list[str]) -> str:
    return "\n".join(lines) + "\n"
