"""The layouts of mount/fuse/wire.py against those of linux/fuse.h, as the C compiler sees them."""

import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Final

import pytest

from mount.fuse import wire
from mount.fuse.wire import Opcode, data_reply, error_reply

HEADER: Final = Path("/usr/include/linux/fuse.h")
STRUCTS: Final = {
    "fuse_in_header": wire.IN_HEADER,
    "fuse_out_header": wire.OUT_HEADER,
    "fuse_open_out": wire.OPEN_OUT,
    "fuse_attr": wire.ATTR,
    "fuse_open_in": wire.OPEN_IN,
    "fuse_release_in": wire.RELEASE_IN,
    "fuse_flush_in": wire.FLUSH_IN,
    "fuse_fallocate_in": wire.FALLOCATE_IN,
    "fuse_lseek_in": wire.LSEEK_IN,
    "fuse_lseek_out": wire.LSEEK_OUT,
    "fuse_getxattr_in": wire.GETXATTR_IN,
}


def test_replies_are_as_long_as_they_say() -> None:
    assert error_reply(7, 5) == struct.pack("<IiQ", 16, -5, 7)
    assert error_reply(7, 0) == struct.pack("<IiQ", 16, 0, 7)
    assert data_reply(7, b"abc") == struct.pack("<IiQ", 19, 0, 7) + b"abc"


def test_every_code_is_below_the_bound_of_the_counters() -> None:
    assert max(Opcode) < 64


def test_the_kernel_expects_no_answer_to_these() -> None:
    assert {code.name for code in wire.UNANSWERED} == {
        "FORGET",
        "BATCH_FORGET",
        "INTERRUPT",
        "NOTIFY_REPLY",
    }


@pytest.fixture(scope="module")
def header() -> str:
    """The text of the installed linux/fuse.h."""
    if not HEADER.exists():
        pytest.skip("linux/fuse.h is not installed")
    return HEADER.read_text()


def test_codes_are_the_headers(header: str) -> None:
    """As far as the installed header is new enough to know them."""
    theirs = {name: int(code) for name, code in re.findall(r"\bFUSE_(\w+)\s*=\s*(\d+),", header)}
    known = {code.name: code.value for code in Opcode if code.name in theirs}
    assert known == {name: theirs[name] for name in known}
    assert len(known) >= 45
    notes = {name: getattr(wire, name) for name in dir(wire) if name.startswith("NOTIFY_")}
    shared = {name for name in notes if name in theirs}
    assert {name: notes[name] for name in shared} == {name: theirs[name] for name in shared}


def test_flags_are_the_headers(header: str) -> None:
    shift = r"^#define (FUSE_\w+|FOPEN_\w+)\s+\(1(?:ULL)? << (\d+)\)"
    theirs = {name: 1 << int(bit) for name, bit in re.findall(shift, header, re.MULTILINE)}
    ours = {name: getattr(wire, name) for name in dir(wire) if name.startswith(("FUSE_", "FOPEN_"))}
    known = {name: value for name, value in ours.items() if name in theirs}
    assert known == {name: theirs[name] for name in known}
    assert len(known) >= 6


def test_sizes_are_the_compilers(header: str, tmp_path: Path) -> None:
    """Of those structures that the installed header knows in the form of today."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    lines = "".join(f'printf("{name} %zu\\n", sizeof(struct {name}));\n' for name in STRUCTS)
    source = tmp_path / "sizes.c"
    source.write_text(
        f"#include <stdio.h>\n#include <linux/fuse.h>\nint main(void) {{\n{lines}return 0;\n}}\n"
    )
    subprocess.run([compiler, "-o", tmp_path / "sizes", source], check=True)
    printed = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True)
    theirs = dict(line.split() for line in printed.stdout.splitlines())
    assert {name: str(layout.size) for name, layout in STRUCTS.items()} == theirs
