"""A document as a browser shows it: widths, and the contrast of its text, in light and dark.

Chromium runs without a screen. A copy of the document measures itself, which its own policy would
forbid, in a frame: no window is narrower than 500 pixels.
"""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path
from typing import Any, Final

BROWSER: Final = shutil.which("chromium")
_WAIT_S: Final = 60
_DARK: Final = ("--force-dark-mode", "--blink-settings=preferredColorScheme=0")
#: Says how wide it is, whether it is dark, and which text has too little contrast (WCAG 2.1).
_MEASURE: Final = """<script>
function rgb(text) { return text.match(/[\\d.]+/g).map(Number); }
function light(colour) {
  const [r, g, b] = colour.map(c => c / 255)
    .map(c => c <= 0.03928 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}
function behind(node) {
  for (; node; node = node.parentElement) {
    const back = rgb(getComputedStyle(node).backgroundColor);
    if (back.length < 4 || back[3] > 0) return back.slice(0, 3);
  }
  return [255, 255, 255];
}
const pale = [];
let seen = 0;
for (const node of document.body.querySelectorAll("*")) {
  const own = [...node.childNodes].some(n => n.nodeType === 3 && n.data.trim());
  if (!own || node.tagName === "SCRIPT") continue;
  seen += 1;
  const style = getComputedStyle(node);
  const text = light(rgb(node.tagName === "text" ? style.fill : style.color).slice(0, 3));
  const back = light(behind(node));
  const ratio = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
  if (ratio < 4.5) pale.push(node.outerHTML.slice(0, 80) + " " + ratio.toFixed(2));
}
const small = [...document.querySelectorAll("svg.drawing text")]
  .map(n => n.getBoundingClientRect().height).filter(height => height < 10).length;
parent.document.getElementById("found").textContent = JSON.stringify({
  width: document.documentElement.scrollWidth, window: innerWidth, seen, pale, small,
  dark: light(behind(document.body)) < 0.2,
});
</script></body>"""

_AROUND: Final = """<!DOCTYPE html>
<html style="color-scheme: light dark"><body style="margin: 0"><pre id="found"></pre>
<iframe style="border: 0" width="{width}" height="4000" srcdoc="{document}"></iframe></body></html>
"""


def measured(document: str, place: Path, width: int, *, dark: bool) -> dict[str, Any]:
    """Return what *document* measures in a window of *width* pixels; its copy lies in *place*."""
    assert BROWSER is not None
    copy = re.sub(r"<meta http-equiv[^>]*>", "", document).replace("</body>", _MEASURE)
    path = place / f"{width}-{dark}.html"
    path.write_text(_AROUND.format(width=width, document=escape(copy)))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
    done = subprocess.run(
        [
            *(BROWSER, *flags, f"--user-data-dir={place / 'profile'}", *(_DARK if dark else ())),
            *("--window-size=1600,1000", "--dump-dom", path.as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=_WAIT_S,
        check=True,
    )
    (told,) = re.findall(r'<pre id="found">(.*?)</pre>', done.stdout, re.DOTALL)
    found: dict[str, Any] = json.loads(unescape(told))
    return found
