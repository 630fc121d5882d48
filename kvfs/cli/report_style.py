"""How the document of ``kvfs report`` looks: light and dark, from 400 pixels on, printable.

The colours of text keep a contrast of 4.5 to 1 or more to what lies behind them.
"""

from typing import Final

STYLE: Final = """
:root {
  color-scheme: light dark;
  --back: #f6f7f9; --card: #ffffff; --text: #1b1f24; --soft: #57606a; --edge: #d8dee4;
  --one: #0969da; --two: #8250df; --good: #1a7f37; --bad: #b3261e; --rest: #e6eaef;
}
@media (prefers-color-scheme: dark) {
  :root {
    --back: #0d1117; --card: #161b22; --text: #e6edf3; --soft: #9aa4af; --edge: #30363d;
    --one: #58a6ff; --two: #bc8cff; --good: #56d364; --bad: #ff7b72; --rest: #2a313a;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; padding: 16px; max-width: 1400px; background: var(--back); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif;
}
h1 { margin: 0; font-size: 24px; overflow-wrap: anywhere; }
h2 { margin: 0 0 8px; font-size: 16px; }
ul { margin: 0; padding-left: 20px; } li { margin-bottom: 8px; overflow-wrap: anywhere; }
p { margin: 0 0 8px; }
.soft, caption { color: var(--soft); font-size: 13px; }
header { margin-bottom: 16px; }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(150px, 1fr)); gap: 12px; }
.cards {
  display: grid; grid-auto-flow: dense; gap: 12px; margin-top: 12px;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 400px), 1fr));
}
.tile, .card {
  min-width: 0; padding: 12px 14px; background: var(--card); border: 1px solid var(--edge);
  border-radius: 8px;
}
.wide { grid-column: 1 / -1; }
.tile b { display: block; font-size: 22px; overflow-wrap: anywhere; }
.scrolls { overflow-x: auto; }
table { width: 100%; border-collapse: collapse; }
th, td { padding: 4px 8px 4px 0; border-bottom: 1px solid var(--edge); text-align: left; }
th { color: var(--soft); font-size: 13px; font-weight: 600; }
td { vertical-align: top; }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums; }
.name { min-width: 9em; overflow-wrap: anywhere; }
code { font-size: 13px; overflow-wrap: anywhere; white-space: pre-wrap; }
.good { color: var(--good); } .bad { color: var(--bad); }
.drawing { display: block; width: 100%; max-width: 640px; height: auto; }
.drawing text { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--edge); stroke-width: 1; }
polyline { fill: none; stroke-width: 2; stroke-linejoin: round; }
.one { stroke: var(--one); } .two { stroke: var(--two); stroke-dasharray: 5 3; }
.dot { stroke: none; fill: var(--one); } .two.dot { fill: var(--two); }
.bar { fill: var(--one); } .rest { fill: var(--rest); }
.half { stroke: var(--text); stroke-width: 2; }
.key { display: inline-block; width: 18px; margin: 0 4px 4px 0; border-top: 3px solid var(--one); }
.key.two { border-top: 3px dashed var(--two); margin-left: 12px; }
.cell { vertical-align: middle; }
@media print { body { max-width: none; } .card, .tile { break-inside: avoid; } }
"""
