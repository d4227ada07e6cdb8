"""What all pictures share: colours for every kind of colour vision, sizes of a column, quiet axes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# Okabe and Ito's colours, told apart by every kind of colour vision.
BLUE, ORANGE, GREEN, PURPLE, SKY, YELLOW = "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00"
GREY = "#7F7F7F"
BY_NORM = {"bn": BLUE, "frn": GREEN, "gn": ORANGE}
NAMES = {"bn": "batch norm", "frn": "filter response norm", "gn": "group norm"}
COLUMN = 3.5  # inches


def pyplot() -> Any:
    """Matplotlib's pyplot, drawing to files, with letters to be read at column width."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("figures need matplotlib: pip install 'trueup-lab[figures]'") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    return plt


def small() -> Any:
    """A context with sizes for pictures as wide as a column."""
    sizes = {"font.size": 8, "axes.titlesize": 8, "legend.fontsize": 7, "xtick.labelsize": 7, "ytick.labelsize": 7}
    return pyplot().rc_context(sizes)


def quiet(axes: Any, *, grid: str = "y") -> None:
    """A light grid behind the data, and no frame."""
    if grid:
        axes.grid(axis=grid, color="#DDDDDD", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> Path:
    """Write the picture and let go of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=200)
    pyplot().close(figure)
    return path
