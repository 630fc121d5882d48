"""docs/pictures is what its module makes, valid SVG, and README and docs show all of it."""

import xml.etree.ElementTree as ET
from typing import Final

import pytest

from make.long_description import long_description
from make.pictures import PLACE, measured_tokens, pictures
from tests.support.mounts.mounting import ROOT

MADE: Final = pictures()
SVG: Final = "{http://www.w3.org/2000/svg}"


def test_the_pictures_are_made_from_the_tables() -> None:
    kept = {path.name: path.read_text() for path in PLACE.iterdir()}
    assert kept == MADE, "run `python -m make.pictures`"


@pytest.mark.parametrize("name", MADE)
def test_a_picture_is_whole_and_says_what_it_shows(name: str) -> None:
    root = ET.fromstring(MADE[name])
    assert root.tag == f"{SVG}svg"
    title = root.find(f"{SVG}title")
    assert title is not None
    assert title.text
    _, _, width, height = (float(number) for number in root.attrib["viewBox"].split())
    for text in root.iter(f"{SVG}text"):
        # Some 7.6 pixels a letter: none may leave the picture.
        wide = 7.6 * len("".join(text.itertext()))
        left = float(text.attrib["x"]) - (wide if text.attrib["text-anchor"] == "end" else 0)
        assert left >= 0
        assert left + wide <= width, "".join(text.itertext())
        assert 0 < float(text.attrib["y"]) < height


def test_the_bars_are_the_figures_of_the_table() -> None:
    rows = dict(measured_tokens())
    assert rows["8,192"] == (250, 258, 56)
    assert rows["32,768"] == (1395, 904, 160)
    assert len(rows) == 5
    for values in rows.values():
        for value in values:
            assert f">{value:,} ms<" in MADE["first-token-light.svg"]


def test_each_is_shown_light_and_dark() -> None:
    shown = (ROOT / "README.md").read_text() + (ROOT / "docs" / "performance.md").read_text()
    for name in MADE:
        assert f"pictures/{name}" in shown


def test_a_reader_without_the_repository_sees_no_broken_picture() -> None:
    assert "<picture>" in (ROOT / "README.md").read_text()
    assert "picture>" not in long_description()
