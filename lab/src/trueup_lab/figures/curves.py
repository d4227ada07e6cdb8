"""Accuracy over severity and over iterations, with the paper's numbers faint beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trueup_lab.experiments import Cell, Experiment, MeasuredCell, paper
from trueup_lab.experiments.specs import ITERATIONS
from trueup_lab.figures.style import BLUE, BY_NORM, COLUMN, GREEN, NAMES, ORANGE, PURPLE, pyplot, quiet, save, small

Cells = Mapping[tuple[str, str], MeasuredCell]


def draw_severities(experiment: Experiment, ours: Cells, path: Path) -> Path:
    """Draw one panel per norm: uncorrected and corrected over severity, with standard deviations over models."""
    norms = [n for n in experiment.norms if any(c.norm == n and ("5", c.label) in ours for c in experiment.columns)]
    theirs = paper(experiment.name)
    with small():
        figure, panels = pyplot().subplots(
            1,
            len(norms),
            figsize=(max(COLUMN, 2.4 * len(norms)), 2.7),
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for norm, axes in zip(norms, panels[0], strict=True):
            shown = [c for c in experiment.columns if c.norm == norm and ("5", c.label) in ours]
            for number, column in enumerate(shown):
                marks = {**_look(column.label, norm), "aside": 0.07 * (number - (len(shown) - 1) / 2)}
                _line(
                    axes, {s: ours[str(s), column.label].cell for s in range(6)}, label=_legend(column.label), **marks
                )
                if column.label in {label for _, label in theirs}:
                    points = {s: theirs[str(s), column.label] for s in range(6)}
                    _line(axes, points, **{**marks, "alpha": 0.35, "marker": ""}, label="_")
            axes.set(title=NAMES[norm], xlabel="severity (0: clean)", xticks=range(6))
            axes.legend(frameon=False, loc="lower left")
            quiet(axes)
        panels[0][0].set_ylabel("accuracy in %  (faint: the paper's)")
        return save(figure, path)


def draw_iterations(experiment: Experiment, ours: Cells, path: Path) -> Path:
    """Draw one panel per norm: average accuracy over the number of iterations, for four pairs of step sizes."""
    norms = [norm for norm in experiment.norms if ("average", f"{norm} x0") in ours]
    theirs = paper(experiment.name)
    with small():
        figure, panels = pyplot().subplots(
            1, len(norms), figsize=(max(COLUMN, 2.4 * len(norms)), 2.7), squeeze=False, layout="constrained"
        )
        looks = zip(ITERATIONS, (BLUE, ORANGE, GREEN, PURPLE), "osD^", strict=True)
        styles: dict[tuple[float, float], dict[str, Any]] = {
            pair: {"color": colour, "marker": marker} for pair, colour, marker in looks
        }
        for norm, axes in zip(norms, panels[0], strict=True):
            for pair, style in styles.items():
                curve = f"{norm} {pair[0]} {pair[1]}"
                labels = [f"{norm} x0", *(f"{curve} x{count}" for count in range(1, 6))]
                known = {n: ours["average", label].cell for n, label in enumerate(labels) if ("average", label) in ours}
                _line(axes, known, label=f"λ₁ {pair[0]}, λ₂ {pair[1]}", **style)
                points = {n: theirs[str(n), curve] for n in range(6)}
                _line(axes, points, label="_", **{**style, "alpha": 0.35, "marker": ""})
            axes.set(title=NAMES[norm], xlabel="iterations", xticks=range(6))
            quiet(axes)
        handles = panels[0][0].get_legend_handles_labels()
        figure.legend(*handles, frameon=False, loc="outside upper center", ncols=len(styles))
        panels[0][0].set_ylabel("accuracy in %  (faint: the paper's)")
        return save(figure, path)


def _line(axes: Any, points: Mapping[int, Cell], *, aside: float = 0.0, **look: Any) -> None:
    """Draw a curve with error bars, shifted by `aside` so that several stay visible."""
    spreads = [cell.spread or 0.0 for cell in points.values()]
    values = [cell.value for cell in points.values()]
    axes.errorbar(
        [x + aside for x in points],
        values,
        yerr=spreads,
        linewidth=1.2,
        markersize=3.5,
        capsize=2,
        elinewidth=0.8,
        **look,
    )


def _look(label: str, norm: str) -> dict[str, Any]:
    if "(c" not in label:
        return {"color": BY_NORM[norm], "marker": "o", "linestyle": "--", "markerfacecolor": "white"}
    if "match" in label or "without" in label:
        return {"color": PURPLE, "marker": "D", "linestyle": ":"}
    return {"color": BY_NORM[norm], "marker": "o", "linestyle": "-"}


def _legend(label: str) -> str:
    """Return the legend of a column.

    >>> _legend("bn"), _legend("bn (c, match)"), _legend("bn (c) without")
    ('uncorrected', 'corrected, match', 'corrected, without sparsity')
    """
    for ending, words in (
        ("(c)", "corrected"),
        ("(c, match)", "corrected, match"),
        ("without", "corrected, without sparsity"),
        ("with", "corrected, with sparsity"),
    ):
        if label.endswith(ending):
            return words
    return "uncorrected"
