"""Patterns of --match: what they match, where a walk may stop, and that none takes long."""

import pytest

from kvfs.engine.names.named import PathPattern

LMCACHE = "meta-llama-SEP-Llama-3.1-8B@8@0@2f6c1a90@bfloat16.data"


def matched_at(pattern: str, path: str) -> str | None:
    """Return the first directory on the way to *path*, or itself, that matches; None: nothing."""
    known = PathPattern(pattern)
    reached, way = known.start, []
    for name in path.split("/"):
        way.append(name)
        reached = known.after(reached, name.encode(errors="surrogateescape"))
        if known.is_matched(reached):
            return "/".join(way)
        if not reached:
            return None
    return None


@pytest.mark.parametrize(
    ("pattern", "path", "found"),
    [
        ("meta-llama-SEP-Llama-3.1-8B@*", LMCACHE, LMCACHE),
        ("*@8@0@*", LMCACHE, LMCACHE),
        ("*@[0-7]@0@*", LMCACHE, None),
        ("*8B@?@0@*.data", LMCACHE, LMCACHE),
        ("*", "a/b", "a"),
        ("a*", "lmcache/a", None),
        ("lmcache/a*", "lmcache/abc", "lmcache/abc"),
        ("/lmcache/a*", "lmcache/abc", "lmcache/abc"),
        ("lmcache/a*/", "lmcache/abc/x", "lmcache/abc"),
        ("**/x", "x", "x"),
        ("**/x", "a/b/x", "a/b/x"),
        ("a/**/x", "a/x", "a/x"),
        ("a/**/x", "a/b/c/x", "a/b/c/x"),
        ("a/**", "a/b/c", "a/b"),
        ("a/**", "a", None),
        ("**", "a/b", "a"),
        ("a/*/c", "a/b/d", None),
        ("*", ".hidden.tmp", ".hidden.tmp"),
        ("[!.]*", ".hidden.tmp", None),
        ("x[", "x[", "x["),
        ("*\udcff*", "a\udcffb", "a\udcffb"),
        ("a\nb*", "a\nbc", "a\nbc"),
    ],
)
def test_what_matches(pattern: str, path: str, found: str | None) -> None:
    assert matched_at(pattern, path) == found


def test_a_walk_stops_where_nothing_can_match() -> None:
    pattern = PathPattern("lmcache/*/x")
    assert not pattern.after(pattern.start, b"vllm")
    assert pattern.after(pattern.start, b"lmcache")


@pytest.mark.parametrize("text", ["", "/", "a/../b", "./a", "x" * 4097])
def test_what_nothing_can_match_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"pattern|leave out"):
        PathPattern(text)


def test_no_pattern_takes_long() -> None:
    """As a regular expression with as many ways to match would: hours."""
    pattern = PathPattern("*a" * 60 + "b")
    assert not pattern.after(pattern.start, b"a" * 255)
    deep = PathPattern("**/a/" * 30 + "b")
    reached = deep.start
    for _ in range(500):
        reached = deep.after(reached, b"a")
    assert not deep.is_matched(reached)
