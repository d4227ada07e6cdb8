"""The paper's own numbers: every cell of its tables and every point of its plotted figures, from `paper.csv`.

Accuracies are in percent. `spread` is the standard deviation over models where the paper gives one. Corruptions are
called as in the data sets (the paper's `elastic` is `elastic_transform`, `frosted glass blur` is `glass_blur`).
"""

from __future__ import annotations

import csv
from functools import cache
from pathlib import Path
from typing import NamedTuple


class Cell(NamedTuple):
    """A number and its standard deviation over models, where it has one."""

    value: float
    spread: float | None = None


@cache
def paper(item: str) -> dict[tuple[str, str], Cell]:
    """The cells of a table or figure by (row, column); empty for a figure without numbers.

    >>> paper("table1")["fog", "bn (c)"]
    Cell(value=54.68, spread=25.14)
    """
    with Path(__file__).with_name("paper.csv").open(newline="") as file:
        return {
            (row["row"], row["column"]): Cell(float(row["value"]), float(row["spread"]) if row["spread"] else None)
            for row in csv.DictReader(file)
            if row["item"] == item
        }
