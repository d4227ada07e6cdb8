"""The jobs of a run: the models and methods that still have to see certain test sets, and the resulting rows."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trueup import __version__
from trueup_lab.evaluation.methods import Method, is_continual
from trueup_lab.evaluation.plan import Plan
from trueup_lab.evaluation.rows import EvaluationRow, SegmentationRow
from trueup_lab.evaluation.sets import Benchmark, Case, TestSet
from trueup_lab.evaluation.subjects import Subject


@dataclass(frozen=True)
class Pair:
    subject: Subject
    method: Method

    @property
    def name(self) -> tuple[str, str]:
        return self.subject.key, self.method.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Pair) and self.name == other.name


@dataclass(frozen=True)
class Job:
    """Stages of test sets, each shown as one stream to each pair.

    A continual method gets all stages in one job, since its answers depend on all stages before; for other methods a
    job has one stage.
    """

    benchmark: Benchmark
    stages: list[list[Case]]
    pairs: list[Pair]


def jobs_left(
    benchmark: Benchmark,
    subjects: Iterable[Subject],
    plan: Plan,
    done: set[tuple[object, ...]],
    wanted: set[tuple[object, ...]],
) -> list[tuple[list[list[Case]], list[Pair]]]:
    """Return the jobs that are left, in order. The keys of all rows of the plan are added to `wanted`."""
    cases = benchmark.cases(plan.severities, plan.only)
    stages = benchmark.groups(cases) if plan.stream == "mixed" else [[case] for case in cases]
    pairs = [
        Pair(subject, method)
        for subject in subjects
        if subject.set == benchmark.name
        for method in plan.methods
        if subject.takes(method)
    ]
    calibrated = benchmark.calibration_count(plan.calibrate) if any(p.method.needs.targets for p in pairs) else 0

    opened = [[benchmark.open(case) for case in stage] for stage in stages]
    sequence = sequence_hash(stages)
    keys = {
        (pair, number): {row_of(pair, plan, test, calibrated=calibrated, sequence=sequence).key for test in sets}
        for pair in pairs
        for number, sets in enumerate(opened)
    }
    wanted.update(*keys.values())

    def missing(pair: Pair, number: int) -> bool:
        return not keys[pair, number] <= done

    forgetful = [pair for pair in pairs if not is_continual(pair.method)]
    left = [[pair for pair in forgetful if missing(pair, number)] for number in range(len(stages))]
    unfinished = [p for p in pairs if is_continual(p.method) and any(missing(p, k) for k in range(len(stages)))]
    return [
        *(([stage], waiting) for stage, waiting in zip(stages, left, strict=True) if waiting),
        *((stages, [pair]) for pair in unfinished),
    ]


def row_of(
    pair: Pair,
    plan: Plan,
    test: TestSet,
    *,
    calibrated: int,
    sequence: str,
    seen: Mapping[str, Any] | None = None,
    ms: float = 0.0,
    device: str = "",
) -> EvaluationRow:
    """Return the row of a pair and test set. Without `seen`, the columns of results, only its key is valid."""
    needs, subject = pair.method.needs, pair.subject
    dense = {"mean_iou": 0.0, "iou": "", "set_aside": plan.set_aside, "rule": ""} if subject.dense else {}
    results = {"accuracy": 0.0, "calibration_error": 0.0, **dense, **(seen or {})}
    return (SegmentationRow if subject.dense else EvaluationRow)(
        model=subject.name,
        seed=subject.seed,
        method=pair.method.name,
        stream="any" if needs.stateless else plan.stream + (f"/{sequence}" if is_continual(pair.method) else ""),
        batch=0 if needs.stateless else 1 if plan.stream == "single" else plan.batch,
        corruption=test.case.corruption,
        severity=test.case.severity,
        images=len(test.labels),
        ms=float(f"{ms:.4g}"),
        data=test.origin,
        data_seed=plan.seed if test.origin.startswith("generated") else 0,
        calibrated=calibrated if needs.targets else 0,
        needs=str(needs),
        checkpoint=subject.checkpoint,
        trueup=__version__,
        torch=torch.__version__,
        device=device,
        **results,
    )


def row_kind(subjects: Sequence[Subject]) -> type[EvaluationRow]:
    """Return the kind of rows that these subjects give."""
    kinds = {SegmentationRow if subject.dense else EvaluationRow for subject in subjects}
    if len(kinds) > 1:
        raise ValueError("models for classification and for segmentation have different columns; evaluate them apart")
    return kinds.pop() if kinds else EvaluationRow


def sequence_hash(stages: list[list[Case]]) -> str:
    """Return a short hash of a sequence of test sets."""
    return hashlib.blake2b(repr(stages).encode(), digest_size=2).hexdigest()
