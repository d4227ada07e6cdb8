"""Cost of the correction over the number of activations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trueup_lab.figures.style import BLUE, COLUMN, GREY, ORANGE, pyplot, quiet, save, small
from trueup_lab.performance import TimingRow


def draw_scaling(rows: Sequence[TimingRow], path: Path) -> Path:
    """Draw time over activations per row, and over rows: by histogram, by sorting, and for a copy of the tensor."""
    rows = [row for row in rows if row.case == "scaling"]
    with small():
        figure, panels = pyplot().subplots(1, 2, figsize=(2 * COLUMN, 2.7), layout="constrained")
        for axes, vary, fixed in ((panels[0], "activations", 4), (panels[1], "batch", 16_384)):
            shown = [r for r in rows if (r.batch if vary == "activations" else r.activations) == fixed]
            for what, colour, marker in (("correction", BLUE, "o"), ("correction by sorting", ORANGE, "s")):
                points = sorted((getattr(r, vary), 1e3 * r.cost) for r in shown if r.what == what)
                axes.plot(*zip(*points, strict=True), color=colour, marker=marker, markersize=3.5, label=what)
            copies = sorted((getattr(r, vary), 1e3 * r.of) for r in shown if r.what == "correction")
            axes.plot(*zip(*copies, strict=True), color=GREY, linestyle="--", label="copy")
            axes.set(xscale="log", yscale="log")
            quiet(axes)
        panels[0].set(xlabel="activations per row (4 rows)", ylabel="milliseconds")
        panels[1].set(xlabel="rows (16,384 activations each)")
        panels[0].legend(frameon=False)
        return save(figure, path)
