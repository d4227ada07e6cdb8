"""The measurement of segmentation: its methods, and means over groups of test sets with errors paired over images."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from statistics import fmean
from typing import TypeVar

import torch
from torch import Tensor

from trueup_lab.data.corruptions import CHOSEN_ON, REPORTED_ON
from trueup_lab.data.sets import SETS
from trueup_lab.evaluation import (
    BatchStatistics,
    Correct,
    Method,
    Mixed,
    Realign,
    SegmentationRow,
    Tent,
    Uncorrected,
    mean_iou,
    read_counts,
)
from trueup_lab.evaluation.methods import Default
from trueup_lab.tables import number, read_table, write_table

R = TypeVar("R", SegmentationRow, "SummaryRow")

LEVELS = (1, 2, 3, 4, 5)
PRIORS = (4, 8, 16, 32, 64)
METHODS: tuple[Method, ...] = (
    Uncorrected(),
    Default(),
    Realign(),
    Correct(0.5, 0.5),  # the paper's setting for large images
    *(Mixed(prior) for prior in PRIORS),
    BatchStatistics(),
    Tent(rate=1e-4),
    Tent(),
)
"""The methods compared. Those that depend on the batch get batches of one corruption."""

BATCH = 8
"""Batch size of the methods that depend on it: what fits beside a network for segmentation on a small device."""


@dataclass(frozen=True)
class SummaryRow:
    """One method on a group of test sets: mean IoU, and the gain over the uncorrected model with its standard error.

    `group` is clean, fifteen, four, a severity of the fifteen (`severity 3`) or one corruption, over its severities
    (those that were measured: `sets` tells how many); `kind` is a class, or all. The error is the jackknife's over
    images, each of which is left out of all sets at once, for both methods: the difference is paired, and images, not
    pixels, are what was drawn. `worst` is the smallest gain on a test set of the group.
    """

    model: str
    method: str
    needs: str
    set_aside: int
    calibrated: int
    group: str
    kind: str
    sets: int
    images: int
    mean_iou: float = number(".3f")
    gain: float = number(".3f")
    error: float = number(".3f")
    worst: float = number(".3f")
    accuracy: float = number(".3f")  # of pixels
    rule: str = ""


def summarise(path: Path, set_name: str) -> list[SummaryRow]:
    """Return the groups of a results file of segmentation that are complete."""
    rows = read_table(path, SegmentationRow)
    found = []
    for model, aside in dict.fromkeys((row.model, row.set_aside) for row in rows):
        mine = [row for row in rows if (row.model, row.set_aside) == (model, aside)]
        for method in dict.fromkeys(row.method for row in mine):
            found += _of_method(path, mine, method, SETS[set_name].dense)
    return found


def publish(rows: Path, out: Path, set_name: str) -> list[SummaryRow]:
    """Write measured rows and their summary into the folder `out`, and return the summary.

    What other runs measured stays there: a run on another machine, or with another `set_aside`, replaces only rows of
    the same model, method, test set and `set_aside`.
    """
    out.mkdir(parents=True, exist_ok=True)
    summary = summarise(rows, set_name)
    _replace(out / rows.name, SegmentationRow, read_table(rows, SegmentationRow), _ROW)
    _replace(out / "summary.csv", SummaryRow, summary, _SUMMARY)
    return summary


_ROW = attrgetter("model", "seed", "method", "stream", "batch", "corruption", "severity", "set_aside")
_SUMMARY = attrgetter("model", "method", "set_aside", "group", "kind")


def _replace(path: Path, kind: type[R], rows: Sequence[R], key: Callable[[R], Hashable]) -> None:
    """Write rows into a table in the place of those with the same key; the others come last."""
    merged: dict[Hashable, R] = {key(row): row for row in read_table(path, kind)}
    merged.update({key(row): row for row in rows})
    write_table(path, kind, merged.values())


def groups(levels: tuple[int, ...] = LEVELS) -> dict[str, list[tuple[str, int]]]:
    """Test sets by group: corruption and severity, where these severities were measured.

    >>> {name: len(groups()[name]) for name in ("clean", "fifteen", "four", "severity 1", "fog")}
    {'clean': 1, 'fifteen': 75, 'four': 20, 'severity 1': 15, 'fog': 5}
    """
    return {
        "clean": [("identity", 0)],
        "fifteen": [(name, level) for name in REPORTED_ON for level in levels],
        "four": [(name, level) for name in CHOSEN_ON for level in levels],
        **{f"severity {level}": [(name, level) for name in REPORTED_ON] for level in levels},
        **{name: [(name, level) for level in levels] for name in (*REPORTED_ON, *CHOSEN_ON)},
    }


def _of_method(path: Path, rows: Sequence[SegmentationRow], method: str, classes: Sequence[str]) -> list[SummaryRow]:
    own = {(row.corruption, row.severity): row for row in rows if row.method == method}
    before = {(row.corruption, row.severity): row for row in rows if row.method == Uncorrected().name}
    found = []
    levels = {severity for _, severity in own if severity}
    for group, sets in groups(tuple(sorted(levels)) or LEVELS).items():
        if not all(case in own and case in before for case in sets):
            continue
        mine, plain = ([chosen[case] for case in sets] for chosen in (own, before))
        counts, reference = (_counts(path, some) for some in (mine, plain))
        if counts[0].shape != reference[0].shape:
            raise ValueError(
                f"{method} was measured on {counts[0].shape[1]} images of {group} and the uncorrected model on "
                f"{reference[0].shape[1]}; measure both on the same"
            )
        kinds = {"all": slice(None)} | {name: slice(k, k + 1) for k, name in enumerate(classes)}
        for kind, part in kinds.items():
            if kind != "all" and group not in ("clean", "fifteen", "severity 5", "fog"):
                continue
            score, gain, error, worst = paired(*((i[..., part], u[..., part]) for i, u in (counts, reference)))
            first = mine[0]
            found.append(
                SummaryRow(
                    model=first.model,
                    method=method,
                    needs=first.needs,
                    set_aside=first.set_aside,
                    calibrated=first.calibrated,
                    group=group,
                    kind=kind,
                    sets=len(sets),
                    images=first.images,
                    mean_iou=score,
                    gain=gain,
                    error=error,
                    worst=worst,
                    accuracy=fmean(row.accuracy for row in mine),
                    rule=first.rule,
                )
            )
    return found


def _counts(path: Path, rows: Sequence[SegmentationRow]) -> tuple[Tensor, Tensor]:
    """Intersections and unions `(sets, images, classes)`."""
    found = [read_counts(path, row) for row in rows]
    intersection, union = (torch.stack([one[name] for one in found]).long() for name in ("intersection", "union"))
    return intersection, union


def paired(method: tuple[Tensor, Tensor], before: tuple[Tensor, Tensor]) -> tuple[float, float, float, float]:
    """Return mean IoU, gain, the gain's standard error and the smallest gain on a set, in percent.

    Each argument holds intersections and unions `(sets, images, classes)`. The score is the mean over sets of the mean
    IoU of a set.

    >>> i, u = torch.tensor([[[2], [6], [4]]]), torch.tensor([[[10], [10], [10]]])
    >>> paired((i + 1, u), (i, u))
    (50.0, 10.0, 0.0, 10.0)
    """
    whole = [_scores(i.sum(dim=1), u.sum(dim=1)) for i, u in (method, before)]  # (sets,)
    left_out = [_scores(i.sum(dim=1, keepdim=True) - i, u.sum(dim=1, keepdim=True) - u) for i, u in (method, before)]
    gains = (left_out[0] - left_out[1]).mean(dim=0)  # (images,): without each image
    n = len(gains)
    error = ((n - 1) / n * (gains - gains.mean()).square().sum()).sqrt()
    each = whole[0] - whole[1]
    return tuple(round(100 * float(x), 6) for x in (whole[0].mean(), each.mean(), error, each.min()))  # type: ignore[return-value]


def _scores(intersection: Tensor, union: Tensor) -> Tensor:
    return mean_iou(intersection, union).nan_to_num(0.0)


def best_mixing(rows: Sequence[SummaryRow]) -> str | None:
    """Return the BN mixing with the largest gain on the four corruptions on which constants are chosen."""
    mixing = [row for row in rows if row.method.startswith("bn-mix") and (row.group, row.kind) == ("four", "all")]
    return max(mixing, key=lambda row: row.gain).method if mixing else None
