"""The figure of the demonstration."""

from __future__ import annotations

import os

from trueup_lab.demo import PLAIN, RULES, Result
from trueup_lab.figures.style import BLUE, GREY, ORANGE, pyplot, quiet

LOOKS = {
    PLAIN: {"s": 85, "facecolor": "white", "edgecolor": GREY, "linewidth": 1.5, "marker": "o", "label": "as trained"},
    "correction": {"s": 40, "color": ORANGE, "marker": "D", "label": "the paper's correction"},
    "evidence": {"s": 36, "color": BLUE, "marker": "o", "label": "evidence, the default"},
}


def draw_demo(result: Result, path: str | os.PathLike[str]) -> None:
    """Draw one line per corruption: an example image, and the mean accuracy as trained and with each rule."""
    plt = pyplot()
    names = sorted(
        {row.corruption for row in result.corrupted}, key=lambda n: result.mean(corruption=n).gain("evidence")
    )
    rows = [result.clean, *(result.mean(corruption=name) for name in names)]
    names = ["clean", *names]

    figure, (pictures, axes) = plt.subplots(
        1, 2, figsize=(7.2, 0.42 * len(rows) + 1.2), width_ratios=(1, 17), sharey=True, layout="constrained"
    )
    for y, (name, row) in enumerate(zip(names, rows, strict=True)):
        values = row.accuracy.values()
        axes.plot([min(values), max(values)], [y, y], color="#BBBBBB", linewidth=2, zorder=1)
        for which, look in LOOKS.items():  # the ring is wide enough to show around the others
            axes.scatter(row.accuracy[which], y, zorder=2, **look | {"label": "" if y else look["label"]})
        for column, rule in enumerate(RULES):
            axes.text(
                1.09 + 0.1 * column, y, f"{row.gain(rule):+.1f}", transform=axes.get_yaxis_transform(),
                ha="right", va="center", fontsize=9, color=LOOKS[rule]["color"],
            )  # fmt: skip
        pictures.imshow(
            result.examples[name].numpy(), cmap="gray", extent=(-0.42, 0.42, y - 0.42, y + 0.42), vmin=0, vmax=255
        )
    pictures.set(xlim=(-0.45, 0.45), ylim=(-0.6, len(rows) - 0.4), xticks=[], aspect="auto")
    pictures.set_yticks(range(len(rows)), [name.replace("_", " ") for name in names])
    pictures.tick_params(length=0)
    pictures.spines[:].set_visible(False)

    axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=9, borderaxespad=0.2)
    axes.text(1.11, 1.02, "gain", transform=axes.transAxes, ha="center", va="bottom", fontsize=9)
    severities = ", ".join(str(severity) for severity in sorted({row.severity for row in result.corrupted}))
    axes.set_xlabel(f"accuracy in %, {result.images} digits per point, mean over severities {severities}")
    axes.set_xlim(max(0, min(min(row.accuracy.values()) for row in rows) - 5), 102)
    quiet(axes, grid="x")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0, labelleft=False)
    figure.savefig(path, dpi=150)
    plt.close(figure)
