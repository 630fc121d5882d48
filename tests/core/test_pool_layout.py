"""The names in a pool directory: docs/dev/format.md lists those that this release makes."""

import re
from typing import Final

from kvfs.core import pool_layout
from tests.support.rules.source_tree import ROOT

_PAGE: Final = (ROOT / "docs" / "dev" / "format.md").read_text()


def test_the_page_of_the_format_lists_every_name() -> None:
    listing = re.findall(r"^    (\S.*?)  +\S", _PAGE.partition("\n## ")[0], re.MULTILINE)
    listed = {re.split(r"[/ ]", path)[0] for line in listing for path in line.split(", ")}
    directories = {pool_layout.INDEX, *pool_layout.FAN_OUTS}
    directories |= {pool_layout.QUARANTINE, pool_layout.STRAYS, pool_layout.LOG}
    names = {pool_layout.POOL, *pool_layout.FILES} | directories
    assert listed == {name for name in names if not name.endswith(".new")}
    for file in (pool_layout.DATA_NAME, pool_layout.LOCK_NAME):
        assert f"{pool_layout.INDEX}/{file}" in _PAGE
    last = pool_layout.fan_out_directory("", pool_layout.FAN_OUT - 1)
    for top in pool_layout.FAN_OUTS:
        assert f"{top}{pool_layout.fan_out_directory('', 0)} .. {last[1:]}/" in _PAGE


def test_the_page_of_the_format_names_what_an_interruption_leaves() -> None:
    names = (*pool_layout.FILES, *pool_layout.INDEXES)
    left = [name for name in names if "." in name]
    assert [name for name in left if f"`{name}`" not in _PAGE] == []
