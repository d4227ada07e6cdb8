"""Aggregate rows of results to the cells of an experiment: means over models, and their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from trueup_lab.data.corruptions import corruption_names
from trueup_lab.evaluation import EvaluationRow
from trueup_lab.evaluation.metrics import mean_corruption_error
from trueup_lab.evaluation.sets import CLEAN, FAMILIES
from trueup_lab.experiments.published import Cell
from trueup_lab.experiments.sources import source
from trueup_lab.experiments.specs import Column, Experiment


@dataclass(frozen=True)
class MeasuredCell:
    """One of our cells: mean and standard deviation over models, and the numbers of models and images behind it."""

    value: float
    spread: float | None
    models: int
    images: int

    @property
    def cell(self) -> Cell:
        """Mean and spread, in the form of the paper's cells."""
        return Cell(self.value, self.spread)


def cells(experiment: Experiment, rows: Sequence[EvaluationRow]) -> dict[tuple[str, str], MeasuredCell]:
    """Return our cells by (row, column label), as `paper` does. Incomplete cells are left out."""
    table: dict[tuple[str, str], MeasuredCell] = {}
    for column, mine in used(experiment, rows).items():
        accuracies, images = _by_seed(mine), min(row.images for row in mine)
        for label, weights in _groups(experiment).items():
            if values := _complete(accuracies, weights):
                spread = stdev(values) if len(values) > 1 else None
                table[label, column.label] = MeasuredCell(fmean(values), spread, len(values), images)
    return table


def used(experiment: Experiment, rows: Sequence[EvaluationRow]) -> dict[Column, list[EvaluationRow]]:
    """Return the rows behind each column of an experiment.

    A column uses the models that have all its test sets. If no model has, a cell is shown only if every model with any
    row of the column has all rows of the cell. A column measured on another number of images than the first column of
    its norm cannot be compared with it and is left out, unless the table shows the number of images.
    """
    wanted = _cases_of(_groups(experiment))
    found: dict[Column, list[EvaluationRow]] = {}
    sizes: dict[str, int] = {}
    for column in experiment.columns:
        mine = _whole(matching(column, rows, all_sizes=True), wanted) or [
            row for row in matching(column, rows) if _case(row) in wanted
        ]
        if not mine:
            continue
        images = min(row.images for row in mine)
        if images == sizes.setdefault(column.norm, images) or experiment.rows not in ("corruption", "severity"):
            found[column] = mine
    return found


def differences(
    experiment: Experiment, column: Column, base: Column, rows: Sequence[EvaluationRow]
) -> dict[str, tuple[float, float | None]]:
    """Return the gains of a column over `base`, by row of the table: mean and standard deviation over models.

    Only the same models on the same images are compared, and only models with all test sets in both columns.
    """
    groups = _groups(experiment)
    found = [matching(c, rows, all_sizes=True) for c in (column, base)]
    common = set.intersection(*({_pair(row) for row in mine} for mine in found))
    ours, theirs = (
        _by_seed(_whole([row for row in mine if _pair(row) in common], _cases_of(groups))) for mine in found
    )
    table = {}
    for label, weights in groups.items():
        if gaps := [a - b for a, b in zip(_complete(ours, weights), _complete(theirs, weights), strict=True)]:
            table[label] = fmean(gaps), stdev(gaps) if len(gaps) > 1 else None
    return table


def _pair(row: EvaluationRow) -> tuple[object, ...]:
    """Key that two rows must share to be compared: the model and the images."""
    return *_case(row), row.seed, row.checkpoint, row.images, row.data, row.data_seed


def _groups(experiment: Experiment) -> dict[str, dict[tuple[str, int], float]]:
    """Return the test sets of each row of a table, as (corruption, severity), and their weights."""
    family = FAMILIES[experiment.set]
    counted = experiment.over or experiment.only
    names = [n for n in corruption_names(family) if n != CLEAN and (not counted or n in counted)]
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
        worst = {} if experiment.set == "mnist" else {"severity 5": {(name, 5): 1.0 for name in names}}
        return {"clean": {(CLEAN, 0): 1.0}, **worst, "average": average}
    return {**each, CLEAN: {(CLEAN, 0): 1.0}, "average": average}


def _cases(name: str, experiment: Experiment) -> list[tuple[str, int]]:
    """Return the test sets of a corruption. MNIST-C has one, called severity 0; elsewhere 0 is the clean set."""
    if experiment.set == "mnist":
        return [(name, 0)]
    return [(name if severity else CLEAN, severity) for severity in experiment.severities]


def _cases_of(groups: dict[str, dict[tuple[str, int], float]]) -> set[tuple[str, int]]:
    return {case for weights in groups.values() for case in weights}


def _case(row: EvaluationRow) -> tuple[str, int]:
    """Return a row's test set. For MNIST-C, which has one severity per corruption, it is called 0."""
    return row.corruption, 0 if row.model.endswith("mnist") else row.severity


def _by_seed(rows: Sequence[EvaluationRow]) -> dict[int, dict[tuple[str, int], float]]:
    """Return accuracies by model and test set, with the models in order."""
    found: dict[int, dict[tuple[str, int], float]] = {}
    for row in sorted(rows, key=lambda row: row.seed):
        found.setdefault(row.seed, {})[_case(row)] = row.accuracy
    return found


def _whole(rows: Sequence[EvaluationRow], wanted: set[tuple[str, int]]) -> list[EvaluationRow]:
    """Return the rows of the models that have all `wanted` test sets on the same number of images.

    Of several such numbers, the largest is used. The clean set may have more images.
    """
    by_size: dict[int, dict[int, list[EvaluationRow]]] = {}
    for row in rows:
        if _case(row) in wanted:
            by_size.setdefault(row.images, {}).setdefault(row.seed, []).append(row)
    clean = {row.seed: row for row in sorted(rows, key=lambda row: row.images) if row.corruption == CLEAN}
    for images in sorted(by_size, reverse=True):
        whole: list[EvaluationRow] = []
        for seed, found in by_size[images].items():
            corrupted = [row for row in found if row.corruption != CLEAN]
            mine = corrupted + ([clean[seed]] if seed in clean else [])
            if corrupted and wanted <= {_case(row) for row in mine}:
                whole += mine
        if whole:
            return whole
    return []


def matching(column: Column, rows: Sequence[EvaluationRow], *, all_sizes: bool = False) -> list[EvaluationRow]:
    """Return the rows of a column: for each test set those on the most images, or all with `all_sizes`.

    Rows are sorted by the number of calibration images, so that the row with the most comes last and is used.
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
    """Return the weighted mean of each model, or nothing if any model lacks any test set."""
    if not all(case in found for found in accuracies.values() for case in weights):
        return []
    total = sum(weights.values())
    return [sum(weight * found[case] for case, weight in weights.items()) / total for found in accuracies.values()]


def mce(column: Column, experiment: Experiment, rows: Sequence[EvaluationRow], *, extra: bool) -> float | None:
    """Return the mCE of a column from its models' mean accuracies; None if a test set is missing."""
    per_corruption = {
        label: measured.value
        for (label, name), measured in cells(experiment, rows).items()
        if name == column.label and label not in (CLEAN, "average")
    }
    try:
        return mean_corruption_error(per_corruption, extra=extra)
    except ValueError:
        return None
