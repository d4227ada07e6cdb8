"""Turn training runs into published models: files of all seeds, the zoo, and a table of accuracies."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from trueup_lab.locks import locked
from trueup_lab.models.files import Record, save_models
from trueup_lab.tables import number, read_table, write_table
from trueup_lab.training.run import load_run


class Published(NamedTuple):
    """The paper's clean test accuracy in percent: mean and standard deviation over ten models."""

    mean: float
    deviation: float | None


PAPER = {
    ("mnist", "bn"): Published(99.54, 0.04),
    ("mnist", "gn"): Published(99.60, 0.07),
    ("mnist", "frn"): Published(99.51, 0.06),
    # The paper's main table gives no deviation here. Its appendix has 83.52 ± 24.44, as if one model of ten had failed.
    ("cifar10", "bn"): Published(91.67, None),
    ("cifar10", "gn"): Published(89.05, 0.81),
    ("cifar10", "frn"): Published(87.80, 0.38),
}


@dataclass(frozen=True)
class AccuracyRow:
    """Clean test accuracy of one model in percent, with the paper's, if it has one."""

    set: str
    architecture: str
    norm: str
    seed: int
    test_accuracy: float = number(".2f")
    paper_mean: float | None = number(".2f")
    paper_deviation: float | None = number(".2f")

    @property
    def network(self) -> tuple[str, str, str]:
        """Set, architecture and norm."""
        return self.set, self.architecture, self.norm


class Trained(NamedTuple):
    """The models of one set, architecture and norm, from one or more runs."""

    record: Record
    weights: dict[int, dict[str, Tensor]]


def gather(runs: Iterable[Path]) -> list[Trained]:
    """Read the models of finished `runs`. Runs of the same network and recipe become one entry."""
    found: dict[str, Trained] = {}
    for run in runs:
        choices, weights, facts = load_run(run)
        record = replace(
            choices.record(),
            accuracy={int(seed): value for seed, value in facts["test_accuracy"].items()},
            training={
                "recipe": facts["choices"]["recipe"],
                "precision": choices.precision,
                "device": facts["device"],
                "versions": facts["versions"],
            },
        )
        if record.name not in found:
            found[record.name] = Trained(record, weights)
            continue
        there = found[record.name]
        if twice := there.weights.keys() & weights.keys():
            raise ValueError(
                f"seeds {sorted(twice)} of {record.name} are in {run} and in another run; give only one of them"
            )
        if there.record.training["recipe"] != record.training["recipe"]:
            raise ValueError(
                f"{run} was trained with another recipe than other runs of {record.name}; export it on its own"
            )
        together = replace(record, accuracy={**there.record.accuracy, **record.accuracy})
        found[record.name] = Trained(together, there.weights | weights)
    return list(found.values())


def representative(record: Record) -> int:
    """Return the seed with the median accuracy (the lower of two): a model of the zoo is typical, not the best.

    >>> representative(Record("mnist", "bn", channels=1, accuracy={0: 0.9, 1: 0.99, 2: 0.95}))
    2
    """
    ranked = sorted(record.accuracy, key=lambda seed: (record.accuracy[seed], seed))
    return ranked[(len(ranked) - 1) // 2]


def export(
    trained: Iterable[Trained],
    *,
    models: Path | None = None,
    zoo: Path | None = None,
    table: Path | None = None,
    seed: int | None = None,
) -> list[Path]:
    """Write all seeds to `models`, one (`seed`, or the representative) to `zoo`, and accuracies to `table`.

    `table` keeps its rows of other sets, architectures and norms. Returns the files written.
    """
    written = []
    rows: list[AccuracyRow] = []
    for record, weights in trained:
        if models is not None:
            path = models / f"{record.name}.safetensors"
            save_models(path, weights, record)
            written.append(path)
        if zoo is not None:
            chosen = representative(record) if seed is None else seed
            if chosen not in weights:
                raise ValueError(f"{record.name} has no seed {chosen}; it has {sorted(weights)}")
            path = zoo / f"{record.name}.safetensors"
            save_models(
                path,
                {chosen: weights[chosen]},
                replace(record, accuracy={chosen: record.accuracy[chosen]}),
            )
            written.append(path)
        rows += accuracy_rows(record)
    if table is not None:
        _merge_rows(table, rows)
        written.append(table)
    return written


def accuracy_rows(record: Record) -> list[AccuracyRow]:
    """Return one row per model, with the paper's accuracy."""
    paper = PAPER.get((record.set, record.norm)) if record.architecture == "resnet20" else None
    mean, deviation = (None, None) if paper is None else paper
    return [
        AccuracyRow(record.set, record.architecture, record.norm, seed, 100 * value, mean, deviation)
        for seed, value in sorted(record.accuracy.items())
    ]


def _merge_rows(table: Path, rows: list[AccuracyRow]) -> None:
    new = {row.network for row in rows}
    with locked(table):  # another process may add its rows at the same time
        kept = [row for row in read_table(table, AccuracyRow) if row.network not in new]
        write_table(table, AccuracyRow, sorted(kept + rows, key=lambda row: (*row.network, row.seed)))
