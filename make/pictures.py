"""The pictures of README and docs, each light and dark: ``python -m make.pictures`` writes them.

*where* shows between what kvfs stands. *first-token* has what was measured (docs/measured), as its
table has (make/measured_tables.py).
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final, NamedTuple

from make.measured_tables import read_run, token_rows

ROOT: Final = Path(__file__).resolve().parents[1]
PLACE: Final = ROOT / "docs" / "pictures"
_MEASURED: Final = "first-token"
#: Of its columns: computed anew, cold after a restart, warm.
_BARS: Final = (0, 3, 5)
_FONT: Final = "system-ui, 'DejaVu Sans', sans-serif"


class Theme(NamedTuple):
    """The colours of a picture."""

    text: str
    soft: str
    edge: str
    box: str
    own: str
    bars: tuple[str, str, str]


THEMES: Final = {
    "light": Theme(
        "#1b1f24", "#57606a", "#8c959f", "#f6f8fa", "#ddf4ff", ("#8c959f", "#8250df", "#0969da")
    ),
    "dark": Theme(
        "#e6edf3", "#9aa4af", "#6e7681", "#161b22", "#0c2d4d", ("#6e7681", "#bc8cff", "#58a6ff")
    ),
}


def pictures() -> dict[str, str]:
    """Return the text of each picture by its file's name."""
    made = {"where": where, "first-token": first_token}
    return {
        f"{name}-{theme}.svg": make(colours)
        for name, make in made.items()
        for theme, colours in THEMES.items()
    }


def where(theme: Theme) -> str:
    """Return the picture of what stands above, below and beside kvfs."""
    own = theme.own
    parts = [
        *_box(
            theme, 10, 10, 250, 86, "inference host", ("vLLM, SGLang", "their connector, as it is")
        ),
        *_box(theme, 290, 10, 200, 86, "memory", ("of GPU and host",)),
        *_box(theme, 520, 10, 230, 86, "other hosts of the rack", ("no software of ours",)),
        *_box(
            theme,
            10,
            150,
            740,
            92,
            "kvfs at /kv",
            (
                "never full: it evicts; blocks are whole or not there; it outlives its server",
                "the kernel moves the bytes (FUSE passthrough); a small server has the names",
            ),
            fill=own,
        ),
        *_box(
            theme,
            10,
            296,
            740,
            64,
            "NVMe drive, image file or directory",
            ("XFS is made on a drive; a directory may lie on XFS, ext4 or tmpfs",),
        ),
        *_arrow(theme, 135, 96, 150, "files: open, read, write, rename"),
        *_arrow(theme, 635, 96, 150, "NFS"),
        *_arrow(theme, 380, 242, 296, "blocks, each a file; the log of the index"),
        f'<path d="M262 53 H288" stroke="{theme.edge}" fill="none" marker-end="url(#head)" '
        'marker-start="url(#head)"/>',
    ]
    title = "kvfs stands between inference engines, whose memory is too small, and a drive"
    return _svg(theme, 760, 372, title, parts)


def first_token(theme: Theme) -> str:
    """Return the picture of the times to the first token."""
    rows = list(measured_tokens())
    most = max(value for _, values in rows for value in values)
    parts = []
    for number, what in enumerate(("computed", "kvfs, cold after a restart", "kvfs, warm")):
        x = 124 + 200 * number
        parts.append(f'<rect x="{x}" y="12" width="12" height="12" fill="{theme.bars[number]}"/>')
        parts.append(_words(theme.text, x + 18, 23, what))
    y = 44
    for tokens, values in rows:
        parts.append(_words(theme.text, 114, y + 29, f"{tokens} tokens", anchor="end"))
        for number, value in enumerate(values):
            wide = max(2.0, 550 * value / most)
            top = y + 16 * number
            parts.append(
                f'<rect x="124" y="{top}" width="{wide:.1f}" height="13" '
                f'fill="{theme.bars[number]}"/>'
            )
            parts.append(_words(theme.soft, 130 + wide, top + 11, f"{value:,} ms"))
        y += 62
    title = "Time to the first token of Llama 3 8B's shape on an H200, a pool on devices in memory"
    return _svg(theme, 760, y, title, parts)


def measured_tokens() -> Iterator[tuple[str, tuple[int, int, int]]]:
    """Yield prompt lengths with the medians (ms): computed, cold after a restart, and warm."""
    for tokens, _, each in token_rows(read_run(_MEASURED).results):
        computed, restarted_cold, warm = (round(1e3 * each[column][0]) for column in _BARS)
        yield f"{tokens:,}", (computed, restarted_cold, warm)


def _box(
    theme: Theme, x: int, y: int, w: int, h: int, title: str, lines: tuple[str, ...], fill: str = ""
) -> Iterator[str]:
    yield (
        f'<rect x="{x}" y="{y}" width="{w}" height="{h}" rx="8" fill="{fill or theme.box}" '
        f'stroke="{theme.edge}"/>'
    )
    yield _words(theme.text, x + 14, y + 28, title, bold=True)
    for number, line in enumerate(lines):
        yield _words(theme.soft, x + 14, y + 50 + 20 * number, line)


def _arrow(theme: Theme, x: int, top: int, bottom: int, text: str) -> Iterator[str]:
    yield (
        f'<path d="M{x} {top + 2} V{bottom - 2}" stroke="{theme.edge}" fill="none" '
        'marker-end="url(#head)" marker-start="url(#head)"/>'
    )
    yield _words(theme.soft, x + 12, (top + bottom) / 2 + 5, text)


def _words(
    colour: str, x: float, y: float, text: str, anchor: str = "start", *, bold: bool = False
) -> str:
    weight = ' font-weight="600"' if bold else ""
    return (
        f'<text x="{x:g}" y="{y:g}" fill="{colour}" text-anchor="{anchor}"{weight}>'
        f"{escape(text)}</text>"
    )


def _svg(theme: Theme, width: int, height: int, title: str, parts: list[str]) -> str:
    head = (
        '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" fill="{theme.edge}"/></marker>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="{_FONT}" font-size="14" role="img">\n'
        f"<title>{escape(title)}</title>\n<defs>{head}</defs>\n{body}\n</svg>\n"
    )


if __name__ == "__main__":
    PLACE.mkdir(exist_ok=True)
    for name, text in pictures().items():
        (PLACE / name).write_text(text)
