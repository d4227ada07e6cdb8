"""The paper's own numbers: every cell of its tables and every point of its plotted figures, from `paper.csv`.

Accuracies are in percent. Corruptions have the names of the data sets (the paper's `elastic` is `elastic_transform`,
`frosted glass blur` is `glass_blur`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from trueup_lab.tables import read_table


class Cell(NamedTuple):
    """A number and its standard deviation over models, if known."""

    value: float
    spread: float | None = None


@dataclass(frozen=True)
class PaperRow:
    """A line of `paper.csv`."""

    item: str  # table or figure
    row: str
    column: str
    value: float
    spread: float | None


@cache
def paper(item: str) -> dict[tuple[str, str], Cell]:
    """Return the cells of a table or figure by (row, column); empty for a figure without numbers.

    >>> paper("table1")["fog", "bn (c)"]
    Cell(value=54.68, spread=25.14)
    """
    rows = read_table(Path(__file__).with_name("paper.csv"), PaperRow)
    return {(row.row, row.column): Cell(row.value, row.spread) for row in rows if row.item == item}
