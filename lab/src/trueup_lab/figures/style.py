"""Shared style of all figures: colour-blind safe colours, column width, plain axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's colour-blind safe colours
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#CC79A7"
GREY = "#7F7F7F"
BY_NORM = {"bn": BLUE, "frn": GREEN, "gn": ORANGE}
NAMES = {"bn": "batch norm", "frn": "filter response norm", "gn": "group norm"}
COLUMN = 3.5  # inches


def pyplot() -> Any:
    """Import matplotlib's pyplot, set to draw to files."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'trueup-lab[figures]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def small() -> Any:
    """Context with font sizes for figures of column width."""
    sizes = {"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7}
    return pyplot().rc_context(sizes)


def quiet(axes: Any, *, grid: str = "y") -> None:
    """Draw a light grid behind the data, and no frame."""
    axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> Path:
    """Save and close the figure."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    pyplot().close(figure)
    return path
