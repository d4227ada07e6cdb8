"""Run an experiment: turn its columns into plans for the runner, and find the models that are missing."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from trueup_lab.evaluation import EvaluationProgress, Plan, evaluate, read_subjects
from trueup_lab.experiments.sources import Source, source
from trueup_lab.experiments.specs import Column, Experiment
from trueup_lab.processes import ALONE, Processes


def rows_file(results: Path, set_name: str) -> Path:
    """Return the file of rows of a set. All experiments share it, so that no row is measured twice."""
    return results / f"{set_name}-c.csv"


def lacking(experiment: Experiment, results: Path, root: Path | None = None) -> list[Source]:
    """Return the missing models of an experiment. `source.missing(results, root)` says how to get each."""
    if experiment.rows == "setting":
        return []
    return [s for norm in experiment.norms if (s := source(experiment.set, norm)).missing(results, root)]


def run_experiment(
    experiment: Experiment,
    results: Path,
    *,
    root: Path | None = None,
    device: str = "cpu",
    images: int | None = None,
    calibrate: int | None = None,
    seeds: tuple[int, ...] | None = None,
    targets: Path = Path("runs/targets"),
    time_limit: float | None = None,
    processes: Processes = ALONE,
    report: Callable[[EvaluationProgress], None] = lambda _: None,
) -> bool:
    """Measure the missing rows of an experiment, for the models that exist. Return whether all are measured.

    `images`, `calibrate` and `seeds` limit the work. The rows record the limits.
    """
    began = time.monotonic()
    chosen = 0
    for found, columns in _by_source(experiment):
        path = found.find(results, root)
        if not path.is_file():
            continue
        first = columns[0]
        wanted = first.seeds if seeds is None else tuple(s for s in seeds if first.seeds is None or s in first.seeds)
        if seeds is not None and not wanted:
            continue
        chosen += 1
        left = None if time_limit is None else time_limit - (time.monotonic() - began)
        finished = evaluate(
            read_subjects(path, wanted),
            Plan(
                methods=tuple(dict.fromkeys(column.method for column in columns)),
                severities=(5,) if first.stream == "single" else tuple(s for s in experiment.severities if s),
                only=experiment.only,
                stream=first.stream or "corruption",
                images=_fewer(images, first.images),
                calibrate=calibrate,
            ),
            rows_file(results, experiment.set),
            root=root,
            device=device,
            targets=targets,
            time_limit=left,
            processes=processes,
            report=report,
        )
        if not finished:
            return False
    if seeds is not None and not chosen and not lacking(experiment, results, root):
        raise ValueError(f"seeds={seeds}: {experiment.name} uses none of these models")
    return True


def _by_source(experiment: Experiment) -> list[tuple[Source, list[Column]]]:
    """Group the columns that one plan can measure: same model, seeds, stream and number of images."""
    groups: dict[tuple[object, ...], tuple[Source, list[Column]]] = {}
    for column in experiment.columns:
        key = (column.norm, column.seeds, column.stream, column.images)
        groups.setdefault(key, (source(column.set, column.norm), []))[1].append(column)
    return list(groups.values())


def _fewer(*counts: int | None) -> int | None:
    known = [count for count in counts if count is not None]
    return min(known) if known else None
