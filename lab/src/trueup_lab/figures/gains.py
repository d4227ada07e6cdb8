"""Gain of each method over the uncorrected model, on corrupted and on clean images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trueup_lab.evaluation import EvaluationRow
from trueup_lab.experiments import Experiment, differences
from trueup_lab.figures.style import BLUE, COLUMN, GREY, NAMES, ORANGE, pyplot, quiet, save, small


def draw_gains(experiment: Experiment, rows: Sequence[EvaluationRow], path: Path) -> Path | None:
    """Draw one panel per norm and one line per method: gains on clean and corrupted images, with deviations."""
    panels = {}
    for norm in experiment.norms:
        plain, *others = (column for column in experiment.columns if column.norm == norm)
        gains = {column.method.name: differences(experiment, column, plain, rows) for column in others}
        if found := {name: gain for name, gain in gains.items() if "average" in gain}:
            panels[norm] = found
    if not panels:
        return None
    lines = sum(len(found) for found in panels.values())
    with small():
        figure, drawn = pyplot().subplots(
            len(panels),
            1,
            figsize=(1.6 * COLUMN, 0.55 + 0.19 * lines + 0.3 * len(panels)),
            sharex=True,
            squeeze=False,
            layout="constrained",
            height_ratios=[len(found) for found in panels.values()],
        )
        for (norm, found), axes in zip(panels.items(), drawn[:, 0], strict=True):
            for row, label, colour, marker in (("clean", "clean", GREY, "o"), ("average", "corrupted", ORANGE, "D")):
                for number, (name, gain) in enumerate(found.items()):
                    value, spread = gain[row]
                    ours = name.startswith("evidence") and row == "average"
                    axes.errorbar(
                        value, number, xerr=spread or 0, color=BLUE if ours else colour, marker=marker, markersize=4,
                        capsize=2, linestyle="", label=label if number == 0 else "_",
                    )  # fmt: skip
            axes.axvline(0, color="#999999", linewidth=0.8)
            axes.set(title=NAMES.get(norm, "a published model"), yticks=range(len(found)), yticklabels=list(found))
            axes.set_ylim(len(found) - 0.5, -0.5)
            quiet(axes, grid="x")
        drawn[0, 0].legend(frameon=False, loc="best")
        drawn[-1, 0].set_xlabel("gain over uncorrected, points (blue: our rule)")
        return save(figure, path)
