"""Which request reader a mount gets, and what it says of it."""

import sys

import pytest

from mount.fuse.channel import choose_reader, look_for_compiled
from mount.fuse.request_reader import RequestReader


def test_the_compiled_reader_is_taken_where_it_is() -> None:
    """The tests want it: `make` needs a compiler anyway."""
    choice = choose_reader(compiled=True)
    assert (choice.name, choice.reason) == ("compiled", "it was compiled at installation")


def test_a_setting_chooses_the_one_in_python() -> None:
    choice = choose_reader(compiled=False)
    assert choice == (RequestReader, "python", "compiled_reader = false")


def test_without_the_compiled_module_it_is_the_one_in_python(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "mount.fuse.compiled_reader", None)
    choice = choose_reader(compiled=True, found=look_for_compiled())
    assert (choice.make, choice.name) == (RequestReader, "python")
    assert choice.reason.startswith("none was compiled: ")
