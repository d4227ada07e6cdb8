"""The demonstration's picture."""

from __future__ import annotations

import os

from trueup.demo import Result
from trueup.figures.style import BLUE, GREY, ORANGE, pyplot


def draw_demo(result: Result, path: str | os.PathLike[str]) -> None:
    """One line a corruption: an example, and the accuracy without and with correction, mean over the severities."""
    plt = pyplot()
    names = sorted({row.corruption for row in result.corrupted}, key=lambda n: result.mean(corruption=n).gain)
    rows = [result.mean(corruption=name) for name in names]
    rows, names = [result.clean, *rows], ["clean", *names]

    figure, (pictures, axes) = plt.subplots(
        1, 2, figsize=(7.2, 0.42 * len(rows) + 1.2), width_ratios=(1, 17), sharey=True, layout="constrained"
    )
    for y, (name, row) in enumerate(zip(names, rows, strict=True)):
        better = row.gain >= 0
        colour = BLUE if better else ORANGE
        axes.plot([row.plain, row.corrected], [y, y], color=colour, linewidth=2.5, zorder=1)
        axes.scatter(row.plain, y, s=36, facecolor="white", edgecolor=GREY, linewidth=1.5, zorder=2)
        axes.scatter(row.corrected, y, s=40, color=colour, zorder=3)
        axes.annotate(
            f"{row.gain:+.1f}",
            (row.corrected, y),
            xytext=(9 if better else -9, 0),
            textcoords="offset points",
            ha="left" if better else "right",
            va="center",
            fontsize=9,
            color=colour,
        )
        pictures.imshow(
            result.examples[name].numpy(), cmap="gray", extent=(-0.42, 0.42, y - 0.42, y + 0.42), vmin=0, vmax=255
        )
    pictures.set(xlim=(-0.45, 0.45), ylim=(-0.6, len(rows) - 0.4), xticks=[], aspect="auto")
    pictures.set_yticks(range(len(rows)), [name.replace("_", " ") for name in names])
    pictures.tick_params(length=0)
    pictures.spines[:].set_visible(False)

    axes.scatter([], [], s=36, facecolor="white", edgecolor=GREY, linewidth=1.5, label="as trained")
    axes.scatter([], [], s=40, color=BLUE, label="corrected: better")
    axes.scatter([], [], s=40, color=ORANGE, label="corrected: worse")
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
    severities = ", ".join(str(severity) for severity in sorted({row.severity for row in result.corrupted}))
    axes.set_xlabel(f"accuracy in %, {result.images} digits a point, mean over severities {severities}")
    low = min(min(row.plain, row.corrected) for row in rows)
    axes.set_xlim(max(0, low - 12), 104)
    axes.grid(axis="x", color="#DDDDDD", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
