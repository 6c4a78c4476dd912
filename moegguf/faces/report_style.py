"""How a report looks."""

STYLE = """
:root { --ink: #1d2329; --muted: #68727c; --grid: #e4e8ec; --page: #ffffff; --soft: #f5f7f9; --accent: #c2410c; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ec; --muted: #98a2ac; --grid: #30363d; --page: #14181c; --soft: #1c2228; --accent: #ff9a5c; }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", sans-serif; }
header, main, footer { max-width: 47rem; margin: 0 auto; padding: 0 1.1rem; }
header { padding-top: 2.2rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0 0 .8rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 0 0 .5rem; scroll-margin-top: 1rem; }
nav ul { list-style: none; display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; margin: 0; padding: 0; font-size: .9rem; }
a { color: var(--accent); text-underline-offset: .15em; }
section { padding: 1.9rem 0 .6rem; margin-top: 1.6rem; border-top: 1px solid var(--grid); }
.findings { margin: 0 0 1.1rem; padding: 0; list-style: none; max-width: 42rem; overflow-wrap: anywhere; }
.findings li + li { margin-top: .3rem; }
figure { margin: 0 0 1.3rem; }
.plot { overflow-x: auto; }
.plot svg { display: block; width: 100%; max-width: 42rem; min-width: 22rem; height: auto; }
.plot svg text { font-family: inherit !important; }
.plot image { image-rendering: pixelated; }
figcaption, footer { color: var(--muted); font-size: .87rem; }
details { margin: .3rem 0; }
summary { cursor: pointer; color: var(--muted); font-size: .9rem; }
summary:focus-visible, a:focus-visible { outline: 2px solid var(--accent); outline-offset: 2px; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .86rem; font-variant-numeric: tabular-nums; margin: .5rem 0 .9rem; }
caption { position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); }
th, td { padding: .28rem .8rem .28rem 0; border-bottom: 1px solid var(--grid); text-align: right; vertical-align: top; }
th { font-weight: 600; }
thead th { vertical-align: bottom; }
tbody th { text-align: left; font-weight: 500; white-space: nowrap; }
thead th:first-child { text-align: left; }
#recorded ~ .wide td { text-align: left; overflow-wrap: anywhere; }
#recorded ~ .wide th { color: var(--muted); }
footer { padding: 2rem 1.1rem 2.5rem; }
"""
