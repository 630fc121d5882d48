"""The commands that README and docs show, and where each is run.

A statement is a shell's: lines that a backslash or an open quotation mark continues are one. What
is in none of the lists here fails tests/core/test_documented_commands.py.
"""

import re
import shlex
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.mounts.mounting import ROOT

DOCUMENTS: Final = (
    "README.md",
    "CONTRIBUTING.md",
    *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/**/*.md")),
)

#: How indented blocks begin that are no commands.
NO_COMMANDS: Final = (
    "POOL      ",
    "[Unit]",  # tests/system/test_nfs_restarts.py
    "[Service]",  # tests/bench/measure_nfs.py
    "0000  ",
    "chunk_size: 256",  # configurations: test_configurations_are_what_the_connectors_read
    '{"type": ',
    '{"hints": ',  # tests/fuse/control/test_hints.py
    '{"id": ',
    'agent.create_backend("POSIX"',  # tests/connectors/test_nixl_posix.py
)
_FENCED: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_BLOCK: Final = re.compile(r"(?:^(?: {4}.*| *)\n)+", re.MULTILINE)
_QUOTED: Final = re.compile(r"`([^`\n]+)`")


class Statement(NamedTuple):
    """One command of a document."""

    document: str
    text: str

    @property
    def words(self) -> list[str]:
        """The words of it, without comments."""
        return shlex.split(self.text, comments=True)


def statements() -> list[Statement]:
    """Return every command in an indented block."""
    return [
        Statement(document, text)
        for document in DOCUMENTS
        for block in _blocks(ROOT / document)
        if not block.startswith(NO_COMMANDS)
        for text in _statements_of(block)
    ]


def of(document: str, start: str) -> list[str]:
    """Return the commands of *document* that begin with *start*, which must be some."""
    found = [one.text for one in statements() if one.document == document]
    found = [text for text in found if text.startswith(start)]
    assert found, f"{document} shows no {start}"
    return found


def quoted(program: str) -> list[Statement]:
    """Return the commands of *program* inside of sentences, each once."""
    return sorted(
        {
            Statement(document, text)
            for document in DOCUMENTS
            for text in _QUOTED.findall(_FENCED.sub("", (ROOT / document).read_text()))
            if text.startswith(f"{program} ")
        }
    )


def _blocks(path: Path) -> list[str]:
    text = _FENCED.sub("", path.read_text())
    found = (re.sub(r"^ {4}", "", one, flags=re.MULTILINE) for one in _BLOCK.findall(text))
    return [block.strip() for block in found if block.strip()]


def _statements_of(block: str) -> list[str]:
    found, waiting = [], ""
    for line in block.splitlines():
        waiting += f"{line}\n"
        if line.endswith("\\") or not line.strip():
            continue
        try:
            words = shlex.split(waiting, comments=True)
        except ValueError:  # an open quotation mark
            continue
        if words:
            found.append(waiting.replace("\\\n", " ").strip())
        waiting = ""
    assert not waiting.strip(), f"unfinished: {waiting}"
    return found
