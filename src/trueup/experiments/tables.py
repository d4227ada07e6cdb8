"""Rows of results as the cells of an experiment: means over models, and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from trueup.data.corruptions import corruptions
from trueup.evaluation import Row
from trueup.evaluation.metrics import mean_corruption_error
from trueup.evaluation.sets import CLEAN, FAMILIES
from trueup.experiments.paper import Cell
from trueup.experiments.sources import source
from trueup.experiments.specs import Column, Experiment


@dataclass(frozen=True)
class Measured:
    """A cell of ours: the mean over models, their standard deviation, and what went into it."""

    value: float
    spread: float | None
    models: int
    images: int

    @property
    def cell(self) -> Cell:
        """As the paper's are kept."""
        return Cell(self.value, self.spread)


def cells(experiment: Experiment, rows: Sequence[Row]) -> dict[tuple[str, str], Measured]:
    """Ours by (row, column label), as in `trueup.experiments.paper`; only what has been measured completely.

    A cell is there when every model that has any row of the column has all of the cell's test sets.
    """
    table: dict[tuple[str, str], Measured] = {}
    for column in experiment.columns:
        mine = _used(experiment, column, rows)
        accuracies = _by_seed(column, mine)
        for label, weights in _groups(experiment).items():
            if values := _complete(accuracies, weights):
                spread = stdev(values) if len(values) > 1 else None
                images = min(row.images for row in mine)
                table[label, column.label] = Measured(fmean(values), spread, len(values), images)
    return table


def differences(
    experiment: Experiment, column: Column, base: Column, rows: Sequence[Row]
) -> dict[str, tuple[float, float | None]]:
    """How much more a column has than `base`, by row of the table: the mean over models that both have, and spread."""
    found = [_by_seed(c, _used(experiment, c, rows)) for c in (column, base)]
    both = [{seed: mine[seed] for seed in found[0] if seed in found[1]} for mine in found]
    table = {}
    for label, weights in _groups(experiment).items():
        ours, theirs = (_complete(accuracies, weights) for accuracies in both)
        if ours and theirs:
            gaps = [a - b for a, b in zip(ours, theirs, strict=True)]
            table[label] = fmean(gaps), stdev(gaps) if len(gaps) > 1 else None
    return table


def _groups(experiment: Experiment) -> dict[str, dict[tuple[str, int], float]]:
    """The test sets of each row of a table, as (corruption, severity), and how much each weighs."""
    family = FAMILIES[experiment.set]
    counted = experiment.over or experiment.only
    names = [n for n in corruptions(family) if n != CLEAN and (not counted or n in counted)]
    if experiment.rows == "severity":
        per = {str(severity): {(name, severity): 1.0 for name in names} for severity in experiment.severities}
        return {"0": {(CLEAN, 0): 1.0}, **per}
    each = {name: dict.fromkeys(_cases(name, experiment), 1.0) for name in names}
    average: dict[tuple[str, int], float] = {(CLEAN, 0): experiment.identity} if experiment.identity else {}
    for group in each.values():
        for case in group:
            average[case] = average.get(case, 0.0) + 1 / len(group)
    if experiment.rows == "curve":
        return {"average": average}
    if experiment.rows in ("stream", "paired"):
        return {"clean": {(CLEAN, 0): 1.0}, "severity 5": {(name, 5): 1.0 for name in names}, "average": average}
    return {**each, CLEAN: {(CLEAN, 0): 1.0}, "average": average}


def _cases(name: str, experiment: Experiment) -> list[tuple[str, int]]:
    """The test sets of a corruption. MNIST-C has one each, called severity 0; elsewhere 0 is the clean set."""
    if experiment.set == "mnist":
        return [(name, 0)]
    return [(name if severity else CLEAN, severity) for severity in experiment.severities]


def _by_seed(column: Column, rows: Sequence[Row]) -> dict[int, dict[tuple[str, int], float]]:
    """Accuracies of a column's models by test set; MNIST-C's severities, being one each, are all called 0."""
    found: dict[int, dict[tuple[str, int], float]] = {}
    for row in rows:
        severity = 0 if column.set == "mnist" else row.severity
        found.setdefault(row.seed, {})[row.corruption, severity] = row.accuracy
    return found


def _used(experiment: Experiment, column: Column, rows: Sequence[Row]) -> list[Row]:
    """The rows of a column; in a table of pairs, of each test set those of models and images that all methods have."""
    if experiment.rows != "paired":
        return matching(column, rows)
    common: dict[tuple[str, int], set[tuple[int, int]]] = {}
    for other in (c for c in experiment.columns if c.norm == column.norm):
        seen: dict[tuple[str, int], set[tuple[int, int]]] = {}
        for row in matching(other, rows, all_sizes=True):
            seen.setdefault((row.corruption, row.severity), set()).add((row.images, row.seed))
        common |= {case: common.get(case, found) & found for case, found in seen.items()}
    most = {case: max((images for images, _ in pairs), default=0) for case, pairs in common.items()}
    return [
        row
        for row in matching(column, rows, all_sizes=True)
        if row.images == most[case := (row.corruption, row.severity)] and (row.images, row.seed) in common[case]
    ]


def matching(column: Column, rows: Sequence[Row], *, all_sizes: bool = False) -> list[Row]:
    """The rows of a column: of each test set those on the most images, unless `all_sizes` are wanted.

    Of two that differ in how many images targets are made of, the one with more comes later, and counts.
    """
    model = source(column.set, column.norm).model
    stream = "any" if column.method.needs.stateless else column.stream or "corruption"
    mine = [
        row
        for row in rows
        if row.model == model
        and row.method == column.method.name
        and row.stream.partition("/")[0] == stream
        and (column.seeds is None or row.seed in column.seeds)
        and (column.images is None or row.images <= column.images)
    ]
    most: dict[tuple[str, int], int] = {}
    for row in mine:
        most[row.corruption, row.severity] = max(row.images, most.get((row.corruption, row.severity), 0))
    return sorted(
        (row for row in mine if all_sizes or row.images == most[row.corruption, row.severity]),
        key=lambda row: row.calibrated,
    )


def _complete(
    accuracies: dict[int, dict[tuple[str, int], float]], weights: dict[tuple[str, int], float]
) -> list[float]:
    """The weighted mean of each model; none where any model lacks any test set."""
    if not all(case in found for found in accuracies.values() for case in weights):
        return []
    total = sum(weights.values())
    return [sum(weight * found[case] for case, weight in weights.items()) / total for found in accuracies.values()]


def mce(column: Column, experiment: Experiment, rows: Sequence[Row], *, extra: bool) -> float | None:
    """The mCE of a column over its models' mean accuracies; None where a test set is missing."""
    per_corruption = {
        label: measured.value
        for (label, name), measured in cells(experiment, rows).items()
        if name == column.label and label not in (CLEAN, "average")
    }
    try:
        return mean_corruption_error(per_corruption, extra=extra)
    except ValueError:
        return None
