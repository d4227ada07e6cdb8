"""The report's style: light or dark as the reader's screen is, and narrow enough for a phone."""

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #5a636e; --line: #d9dee3; --page: #fff; --card: #f5f7f9;
  --a: #1f6fd1; --b: #c2570c; --clean: #7d8894; --bad: #b3261e; --good: #1b7a3d; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e8ec; --soft: #9aa5b1; --line: #343b43; --page: #14181c;
  --card: #1d2328; --a: #6aa9ff; --b: #f0934e; --clean: #8f9aa6; --bad: #ff8a80; --good: #6fd08c; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 62rem; padding: 1rem; background: var(--page); color: var(--ink);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: .5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; padding-top: .75rem; border-top: 1px solid var(--line); }
p { margin: .5rem 0; }
.soft, figcaption, footer { color: var(--soft); font-size: .9rem; }
.tiles { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 10.5rem), 1fr));
  margin: 1rem 0; }
.tile { background: var(--card); border-radius: .5rem; padding: .75rem; }
.tile b { display: block; font-size: 1.35rem; line-height: 1.3; }
.bad { color: var(--bad); } .good { color: var(--good); }
.plots { display: grid; gap: 1.25rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 21rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure svg { display: block; width: 100%; height: auto; max-width: 34rem; }
.key { display: inline-block; width: .8em; height: .8em; border-radius: .2em; margin-right: .3em;
  vertical-align: -.05em; }
.key.a { background: var(--a); } .key.b { background: var(--b); } .key.clean { background: var(--clean); }
.keys span { margin-right: 1rem; }
svg .t { font: 11px system-ui, sans-serif; fill: var(--soft); }
svg .e { text-anchor: end; } svg .m { text-anchor: middle; }
svg .grid { stroke: var(--line); stroke-width: 1; }
svg .dashed { stroke-dasharray: 4 3; fill: none; stroke-width: 1.5; }
svg .band { opacity: .18; stroke: none; } svg .line { fill: none; stroke-width: 1.75; stroke-linejoin: round; }
svg .a { stroke: var(--a); } svg .b { stroke: var(--b); } svg .clean { stroke: var(--clean); }
svg .a.band, svg .a.dot, svg .a.bar { fill: var(--a); stroke: none; }
svg .b.band, svg .b.dot, svg .b.bar { fill: var(--b); stroke: none; }
svg .clean.band, svg .clean.dot { fill: var(--clean); stroke: none; }
.images { display: grid; gap: .75rem; grid-template-columns: repeat(auto-fill, minmax(min(100%, 9.5rem), 1fr)); }
.image { background: var(--card); border-radius: .5rem; padding: .5rem; font-size: .8rem; min-width: 0; }
.image img { display: block; width: 100%; aspect-ratio: 1; object-fit: contain; image-rendering: pixelated;
  background: var(--line); border-radius: .25rem; margin-bottom: .35rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem .3rem 0; border-bottom: 1px solid var(--line); vertical-align: top; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; overflow-wrap: normal; }
details { margin: .75rem 0; } summary { cursor: pointer; color: var(--soft); }
code, pre { font: .85rem ui-monospace, SFMono-Regular, Menlo, monospace; white-space: pre-wrap; }
footer { margin-top: 2rem; padding-top: .75rem; border-top: 1px solid var(--line); }
"""
