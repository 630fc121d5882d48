"""The attribute user.kvfs.hint: what its values say, and which are none."""

import pytest

from kvfs.core.directory_policy import HINT, check_value, policies_of
from kvfs.core.errors import InvalidRequest
from kvfs.core.hints import PRIORITY_USUAL, BlockHint, hint_of


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (b"none", BlockHint()),
        (b"priority=0", BlockHint()),
        (b"priority=100", BlockHint(100)),
        (b"once", BlockHint(once=True)),
        (b"ttl=1h", BlockHint(PRIORITY_USUAL, ttl_s=3600.0)),
        (b"ttl=2s,priority=7", BlockHint(7, ttl_s=2.0)),
        (b"session=a.B_9:@-", BlockHint(session="a.B_9:@-")),
        (b"priority=80,ttl=7d,session=s", BlockHint(80, ttl_s=7 * 86_400.0, session="s")),
        (b"once,session=s", BlockHint(once=True, session="s")),
    ],
)
def test_a_hint_says_what_it_says(value: bytes, hint: BlockHint) -> None:
    assert hint_of(value) == hint._replace(text=value)
    check_value(HINT, value)


@pytest.mark.parametrize(
    "value",
    [
        *(b"", b"priority", b"priority=", b"priority=101", b"priority=-1", b"priority=1e1"),
        *(b"priority=5,priority=5", b"once=1", b"once,priority=5", b"once,ttl=1h", b"none,once"),
        *(b"ttl=0s", b"ttl=soon", b"ttl=99999d", b"session=", b"session=a b", b"session=\xff"),
        *(b"session=" + b"s" * 129, b"keep", b"priority=\xc2\xb2", b" once", b"once,"),
    ],
)
def test_what_is_no_hint_is_refused(value: bytes) -> None:
    with pytest.raises(ValueError, match=r".+"):
        hint_of(value)
    with pytest.raises(InvalidRequest, match="hint"):
        check_value(HINT, value)


def test_the_settings_file_has_hints_of_directories() -> None:
    said = {"/a": {"hint": "priority=80,ttl=1h"}}
    assert policies_of(said) == said
    with pytest.raises(ValueError, match="priority must be"):
        policies_of({"/a": {"hint": "priority=500"}})
