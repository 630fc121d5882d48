"""NFS-Ganesha's configuration: parsed as its own scanner does it, and the text of an export.

Sources: ganesha-config(8), and src/config_parsing of NFS-Ganesha 4.3. Names are case-insensitive.
If a block occurs twice, each starts from the defaults, so the last one counts.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Final, NamedTuple

from kvfs.client.nfs.squash import ALL, NONE, ROOT, Squash

#: One token; blanks and comments match without a group.
_TOKEN: Final = re.compile(
    r"""\s+ | \#[^\n]* | (?P<string>"(?:\\.|[^"\\])*" | '[^']*') | (?P<mark>[{}=;,])
    | (?P<word>[^\s{}=;,"'\#]+) | (?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)
_INCLUDE: Final = re.compile(
    r"""^\s*%(?P<kind>include|dir|url)\s+"?(?P<path>[^"\s]+)"?""", re.MULTILINE
)
#: Both names of the block with settings of the cache (mdcache_read_conf.c).
_CACHE_BLOCKS: Final = frozenset({"mdcache", "cacheinode"})
#: The default of Anonymous_uid (ganesha-export-config(8)); the kernel takes 32 bits of it.
_ANONYMOUS_ID: Final = -2
_SQUASHES: Final = {
    **dict.fromkeys(("root", "root_squash", "rootsquash"), ROOT),
    **dict.fromkeys(("rootid", "root_id_squash", "rootidsquash"), ROOT),
    **dict.fromkeys(("all", "all_squash", "allsquash", "all_anomnymous", "allanonymous"), ALL),
    **dict.fromkeys(("no_root_squash", "none", "noidsquash"), NONE),
}
_NAMES: Final = {ROOT: "Root_Squash", ALL: "All_Squash", NONE: "No_Root_Squash"}
_EXPORT_ID_MAX: Final = 65_535


class ConfigBlock(NamedTuple):
    """``NAME { NAME = VALUE, VALUE; ... NAME { ... } }``; names are in lower case."""

    name: str
    values: Mapping[str, tuple[str, ...]]
    blocks: "tuple[ConfigBlock, ...]"

    def text_of(self, name: str, default: str = "") -> str:
        """Return what *name* is set to, without what follows a comma."""
        return (*self.values.get(name, ()), default)[0]

    def number(self, name: str, default: int) -> int:
        """Return the number that *name* is set to (ANSI C syntax), *default* if it is none."""
        try:
            return int(_ansi(self.text_of(name, str(default))), 0)
        except ValueError:
            return default


def _ansi(text: str) -> str:
    return f"0o{text[1:]}" if re.fullmatch(r"0[0-7]+", text) else text


class CacheSettings(NamedTuple):
    """Settings for when Ganesha closes a file that no client uses (ganesha-cache-config(8))."""

    fd_lwmark_percent: int = 50
    """Percent of its limit of open files; below it no file is ever closed."""
    lru_run_interval_s: int = 90


#: With these a file that no client uses is closed within a second.
FIT: Final = CacheSettings(0, 1)
#: How long clients may still find a name that kvfs has evicted; with 0 each lookup is a request.
FIT_EXPIRATION_S: Final = 1


class GaneshaExport(NamedTuple):
    """The settings of an EXPORT block (ganesha-export-config(8))."""

    export_id: int
    path: str
    pseudo: str
    filesystem_id: str
    """Empty if it is not set; Ganesha then uses the mount's device number."""
    squash: Squash
    is_writable: bool
    attr_expiration_s: int = 60
    """For how long it caches attributes and names; -1: for ever."""


def includes(text: str) -> list[tuple[str, str]]:
    """Return the includes of *text*: ``include``, ``dir`` or ``url``, and the path."""
    return [(found["kind"], found["path"]) for found in _INCLUDE.finditer(text)]


def parse(text: str) -> tuple[ConfigBlock, ...]:
    """Return the blocks of *text*; what Ganesha would refuse is left out."""
    return _blocks(_tokens(_INCLUDE.sub("", text)), {})


def _tokens(text: str) -> Iterator[tuple[str, str]]:
    for found in _TOKEN.finditer(text):
        kind = found.lastgroup
        if kind == "string":
            yield "value", _unquoted(found[0])
        elif kind is not None:
            yield ("mark", found[0]) if kind == "mark" else ("value", found[0])


def _unquoted(text: str) -> str:
    inner = text[1:-1]
    if text[0] == "'":
        return inner
    special = {"n": "\n", "t": "\t", "r": "\r"}
    return re.sub(r"\\(.)", lambda one: special.get(one[1], one[1]), inner, flags=re.DOTALL)


def _blocks(
    tokens: Iterator[tuple[str, str]], values: dict[str, tuple[str, ...]]
) -> tuple[ConfigBlock, ...]:
    """Return the blocks up to the brace that ends this one; statements go into *values*."""
    found = []
    name = ""
    for kind, text in tokens:
        if kind == "value":
            name = text.lower()
        elif text == "{":
            inner: dict[str, tuple[str, ...]] = {}
            inside = _blocks(tokens, inner)
            found.append(ConfigBlock(name, inner, inside))
        elif text == "=":
            values[name] = tuple(_statement(tokens))
        elif text == "}":
            break
    return tuple(found)


def _statement(tokens: Iterator[tuple[str, str]]) -> Iterator[str]:
    for kind, text in tokens:
        if kind == "value":
            yield text
        elif text in ";}":
            return


def cache_settings(blocks: tuple[ConfigBlock, ...]) -> CacheSettings | None:
    """Return the settings of the last MDCACHE block; None without one, for the defaults."""
    said = [block for block in blocks if block.name in _CACHE_BLOCKS]
    if not said:
        return None
    usual = CacheSettings()
    return CacheSettings(
        said[-1].number("fd_lwmark_percent", usual.fd_lwmark_percent),
        said[-1].number("lru_run_interval", usual.lru_run_interval_s),
    )


def exports_of(blocks: tuple[ConfigBlock, ...]) -> tuple[GaneshaExport, ...]:
    """Return all EXPORT blocks, completed from EXPORT_DEFAULTS."""
    defaults = [block for block in blocks if block.name == "export_defaults"]
    return tuple(_export(block, defaults) for block in blocks if block.name == "export")


def _export(block: ConfigBlock, defaults: list[ConfigBlock]) -> GaneshaExport:
    merged: dict[str, tuple[str, ...]] = {}
    for one in (*defaults, block):
        merged.update(one.values)
    said = ConfigBlock("", merged, ())
    uid, gid = (
        said.number(f"anonymous_{one}", _ANONYMOUS_ID) & 0xFFFF_FFFF for one in ("uid", "gid")
    )
    kind = _SQUASHES.get(said.text_of("squash").lower(), ROOT)
    of_clients = [one.text_of("access_type") for one in block.blocks if one.name == "client"]
    accesses = {one.lower() for one in (said.text_of("access_type"), *of_clients)}
    return GaneshaExport(
        said.number("export_id", 0),
        said.text_of("path"),
        said.text_of("pseudo"),
        said.text_of("filesystem_id"),
        Squash(kind) if kind == NONE else Squash(kind, uid, gid),
        "rw" in accesses,
        said.number("attr_expiration_time", GaneshaExport._field_defaults["attr_expiration_s"]),
    )


def filesystem_id_of(uuid: str) -> str:
    """Return the Filesystem_Id of the pool *uuid*: two numbers, neither all ones (convert_fsid)."""
    digits = uuid.replace("-", "")
    return f"{int(digits[:15], 16)}.{int(digits[17:], 16)}"


def export_id_of(uuid: str, taken: frozenset[int]) -> int:
    """Return an Export_Id for the pool *uuid* that is not *taken*, the same each time.

    It is part of every handle that a client has. 0 is Ganesha's own root.
    """
    first = int(uuid.replace("-", "")[-4:], 16)
    candidates = ((first + step) % _EXPORT_ID_MAX + 1 for step in range(_EXPORT_ID_MAX))
    return next((one for one in candidates if one not in taken), first % _EXPORT_ID_MAX + 1)


def export_text(
    export: GaneshaExport, clients: tuple[str, ...], cache: CacheSettings | None
) -> str:
    """Return the EXPORT block of *export* for *clients*; before it *cache*, if it is to be set."""
    lines = []
    if cache is not None:
        lines += [
            "MDCACHE {",
            f"    FD_LWMark_Percent = {cache.fd_lwmark_percent};",
            f"    LRU_Run_Interval = {cache.lru_run_interval_s};",
            "}",
        ]
    lines += [
        "EXPORT {",
        f"    Export_Id = {export.export_id};",
        f"    Path = {_quoted(export.path)};",
        f"    Pseudo = {_quoted(export.pseudo)};",
        f"    Filesystem_Id = {export.filesystem_id};",
        f"    Squash = {_NAMES[export.squash.kind]};",
    ]
    if export.squash.kind != NONE:
        lines.append(f"    Anonymous_Uid = {export.squash.uid};")
        lines.append(f"    Anonymous_Gid = {export.squash.gid};")
    lines += [
        f"    Attr_Expiration_Time = {export.attr_expiration_s};",
        "    Protocols = 3, 4;",
        "    Transports = TCP;  # TCP, RDMA where Ganesha is built with it",
        "    SecType = sys;  # krb5p with Kerberos",
        # Otherwise any user of a client could claim to be root (ganesha-export-config(8)).
        "    PrivilegedPort = true;",
        "    Access_Type = None;",
        "    CLIENT {",
        f"        Clients = {', '.join(clients)};",
        f"        Access_Type = {'RW' if export.is_writable else 'RO'};",
        "    }",
        "    FSAL {",
        "        Name = VFS;",
        "    }",
        "}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(path: str) -> str:
    escaped = re.sub(r'(["\\])', r"\\\1", path)
    return f'"{escaped}"'
