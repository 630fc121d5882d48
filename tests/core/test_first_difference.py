"""A failing comparison of large bytes says so at once."""

from tests.support.rules.first_difference import SHORT_BYTES, first_difference, told_apart

LARGE = bytes(8 << 20)
OTHER = LARGE[:5_000_000] + b"x" + LARGE[5_000_001:]


def test_it_tells_where_blocks_differ() -> None:
    told = told_apart(LARGE, OTHER)
    assert told is not None
    assert "from byte 5000000 on: b'\\x00" in told[-1]
    assert "not b'x\\x00" in told[-1]
    assert all(len(line) < 300 for line in told)


def test_it_tells_which_of_many_differ() -> None:
    left = {b"/same": LARGE, b"/differs": LARGE, b"/left": b"l", b"/nested": [LARGE, 1]}
    right = {b"/same": LARGE, b"/differs": OTHER, b"/right": "directory", b"/nested": [LARGE, 2]}
    told = told_apart(left, right)
    assert told is not None
    text = "\n".join(told)
    assert "same" not in text
    assert "[b'/differs']: <8388608 bytes, sha1 " in text
    assert "[b'/left']: only left: b'l'" in text
    assert "[b'/right']: only right: 'directory'" in text
    assert "[b'/nested'][1]: 1 != 2" in text


def test_many_differences_are_cut_short() -> None:
    told = told_apart([LARGE] * 50, [OTHER] * 49)
    assert told is not None
    assert told[1] == "they: 50 items, not 49"
    assert told[-1] == "and more"


def test_what_is_short_is_pytests_own_business() -> None:
    assert told_apart(b"a", b"b") is None
    assert told_apart({b"a": bytes(SHORT_BYTES)}, {}) is None
    assert told_apart([1], "text") is None


def test_a_shorter_one_differs_at_its_end() -> None:
    assert first_difference(LARGE, LARGE[:-1]) == len(LARGE) - 1
    assert first_difference(b"", LARGE) == 0
