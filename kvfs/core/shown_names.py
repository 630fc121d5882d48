"""How names are shown: safe for a terminal, and as digests in texts for other people.

Any user who stores a file chooses its name. A block's name contains the hash of a prompt: whoever
guesses a prompt can tell from the name that it was used. With one key a name always has the same
digest, so that texts can be compared. A key is used for one set of texts and kept nowhere.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

#: What stands for a byte of a file name that is no text (os.fsdecode); with LANG=C for each byte
#: of a name that is no ASCII.
_BYTES_OF_NAMES: Final = re.compile("[\udc80-\udcff]+")


def printable(text: str) -> str:
    """Return *text* with all unprintable characters escaped, such as line breaks and ESC.

    Bytes of names are read as UTF-8, whatever the locale; one that is none is shown as \\xff, which
    $'...' of a shell takes.
    """
    if text.isprintable():
        return text
    return "".join(
        one if one.isprintable() else one.encode("unicode_escape").decode("ascii")
        for one in _BYTES_OF_NAMES.sub(_read_again, text)
    )


def _read_again(found: re.Match[str]) -> str:
    return found[0].encode(errors="surrogateescape").decode(errors="backslashreplace")


_DIGEST_BYTES: Final = 5
_DIGEST: Final = re.compile(r"name-[0-9a-f]{10}(?:\.[a-z]{1,12})?")
#: The end of a name that says only what kind of file it is.
_SUFFIX: Final = re.compile(r"\.[a-z]{1,12}$")
#: What a path is made of in a log or a table.
_PATH: Final = r"[^\s\"'`,;()\[\]{}<>|]+"
_WORD: Final = re.compile(r"[^\s\"'`,;()\[\]{}<>|=]+")
#: Makes a word a name: an @, as in LMCache's names, or so many hex digits that it is a hash.
_NAME_LIKE: Final = re.compile(r"@|[0-9a-fA-F]{16}")
#: A word with this is not a name, in spite of the @.
_UNIT: Final = "kvfs@"
#: Names of directories and models this short are replaced in paths only: they may be words.
_SHORT: Final = 3
#: Names as Python shows bytes: ``b'...'``.
_BYTES: Final = re.compile(r"\bb(['\"])(.*?)(?<!\\)\1")
_POLICY: Final = re.compile(r"(policies\.\")([^\"]*)(\")")


class HiddenNames:
    """Replaces the names below some mountpoints in texts."""

    def __init__(self, key: bytes, mountpoints: Iterable[str], names: Iterable[str] = ()) -> None:
        """*key*: up to 64 random bytes; *names* are replaced wherever they occur."""
        self._key = key
        words = sorted({name for name in names if len(name) > _SHORT}, key=len, reverse=True)
        known = "|".join(map(re.escape, words))
        self._known = re.compile(rf"(?<![\w.-])(?:{known})(?![\w.-])") if known else None
        alternatives = "|".join(re.escape(one) for one in sorted(mountpoints, reverse=True) if one)
        self._below = re.compile(f"({alternatives})(/{_PATH})") if alternatives else None

    def in_text(self, text: str) -> str:
        """Return *text* with digests for names that lie below a mount or look like a block's."""
        if self._below is not None:
            text = self._below.sub(lambda found: found[1] + self.path(found[2]), text)
        text = _BYTES.sub(lambda found: f"b'{self.path(found[2])}'", text)
        text = _POLICY.sub(lambda found: found[1] + self.path(found[2]) + found[3], text)
        text = _WORD.sub(self._word, text)
        if self._known is not None:
            text = self._known.sub(lambda found: self.path(found[0]), text)
        return text

    def _word(self, found: re.Match[str]) -> str:
        word = found[0]
        is_name = _NAME_LIKE.search(word) and _UNIT not in word
        return self.path(word) if is_name else word

    def path(self, path: str) -> str:
        """Return *path* with a digest in place of each name; its suffix stays."""
        return "/".join(self._name(name) for name in path.split("/"))

    def _name(self, name: str) -> str:
        if not name or _DIGEST.fullmatch(name):
            return name
        raw = name.encode(errors="surrogateescape")
        digest = hashlib.blake2b(raw, key=self._key, digest_size=_DIGEST_BYTES).hexdigest()
        suffix = _SUFFIX.search(name)
        return f"name-{digest}{suffix[0] if suffix else ''}"


def names_in(status: Mapping[str, Any]) -> set[str]:
    """Return the names of directories and models that appear in the *status* of a mount."""
    found = set[str]()
    cache = status.get("cache")
    for key in ("directories", "models"):
        if isinstance(cache, Mapping) and isinstance(cache.get(key), Mapping):
            found.update(cache[key])
    held_by = status.get("held_by")
    if isinstance(held_by, Mapping):
        found.update(str(holder).partition(" ")[2] for holder in held_by)
    largest = status.get("largest_unevictable")
    if isinstance(largest, Mapping):
        found.update(str(largest.get("directory", "")).split("/"))
    return found
