"""From training runs to published models: files of all seeds, the zoo, the table of accuracies."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from trueup.atomic import write_atomically
from trueup_lab.models.files import Record, save_models
from trueup_lab.training.run import load_run


class Published(NamedTuple):
    """The paper's clean test accuracy in per cent: mean and standard deviation over ten models."""

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
FIELDS = ("set", "architecture", "norm", "seed", "test_accuracy", "paper_mean", "paper_deviation")


class Trained(NamedTuple):
    """The models of one set, architecture and norm, from one or more runs."""

    record: Record
    weights: dict[int, dict[str, Tensor]]


def gather(runs: Iterable[Path]) -> list[Trained]:
    """The models of finished `runs`; runs of the same network and recipe are put together."""
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
            raise ValueError(f"seeds {sorted(twice)} of {record.name} are in {run} and in another run")
        if there.record.training["recipe"] != record.training["recipe"]:
            raise ValueError(f"{run} was trained by another recipe than other runs of {record.name}")
        together = replace(record, accuracy={**there.record.accuracy, **record.accuracy})
        found[record.name] = Trained(together, there.weights | weights)
    return list(found.values())


def representative(record: Record) -> int:
    """The seed whose accuracy is the median (the lower of two): a model of the zoo is typical, not the best.

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
    """Write all seeds into `models`, one into `zoo` (`seed`, or the representative), accuracies into `table`.

    Rows of other sets, architectures and norms that `table` already has stay. Returns the files written.
    """
    written = []
    rows: list[dict[str, str]] = []
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


def accuracy_rows(record: Record) -> list[dict[str, str]]:
    """One row a model, in per cent, beside the paper's."""
    paper = PAPER.get((record.set, record.norm)) if record.architecture == "resnet20" else None
    mean = "" if paper is None else f"{paper.mean:.2f}"
    deviation = "" if paper is None or paper.deviation is None else f"{paper.deviation:.2f}"
    return [
        dict(
            zip(
                FIELDS,
                (record.set, record.architecture, record.norm, str(seed), f"{100 * value:.2f}", mean, deviation),
                strict=True,
            )
        )
        for seed, value in sorted(record.accuracy.items())
    ]


def _merge_rows(table: Path, rows: list[dict[str, str]]) -> None:
    def network(row: dict[str, str]) -> tuple[str, str, str]:
        return row["set"], row["architecture"], row["norm"]

    new = {network(row) for row in rows}
    if table.exists():
        with table.open(newline="") as file:
            # Tables from before there were other architectures do not say which it is.
            there = [{"architecture": "resnet20", **row} for row in csv.DictReader(file)]
        rows = [row for row in there if network(row) not in new] + rows
    rows = sorted(rows, key=lambda row: (*network(row), int(row["seed"])))
    text = io.StringIO()
    writer = csv.DictWriter(text, FIELDS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(table, text.getvalue().encode())
