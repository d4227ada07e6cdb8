"""Write the numbers of docs/evaluation.md and docs/models.md from the CSV files that they name.

    python benchmarks/document_numbers.py

A block between `<!-- NAME -->` and `<!-- /NAME -->` is replaced. A test compares the blocks with what this writes.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from pathlib import Path
from statistics import fmean, stdev

from trueup_lab.evaluation import EvaluationRow, read_rows
from trueup_lab.page_blocks import rewrite
from trueup_lab.tables import read_table
from trueup_lab.training.export import AccuracyRow

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 138
PAPER = "correct:lambda1=1.0,lambda2=0.2"
NORMS = {"bn": "batch norm", "gn": "group norm", "frn": "filter response norm"}
SETS = {"cifar10": "CIFAR-10", "mnist": "MNIST"}


def main() -> None:
    """Replace the blocks of both documents."""
    for path, blocks in documents().items():
        rewrite(path, blocks)


def documents() -> dict[Path, dict[str, str]]:
    """Return the documents and their blocks."""
    rows = [row for row in read_rows(ROOT / "results" / "cifar10-c.csv") if row.seed in (0, 1, 2)]
    public = read_rows(ROOT / "results" / "rivals.csv")
    accuracies = read_table(ROOT / "results" / "accuracy.csv", AccuracyRow)
    return {
        ROOT / "docs" / "evaluation.md": {
            "streams": streams_table(rows),
            "streams in words": streams_in_words(rows),
            "other norms": other_norms(rows),
            "public": public_in_words(public),
        },
        ROOT / "docs" / "models.md": {"accuracy": accuracy_table(accuracies)},
    }


def streams_table(rows: list[EvaluationRow]) -> str:
    """Each method on each stream, over the 19 corruptions and five severities."""
    lines = ["| | any stream | one corruption per batch | mixed | sorted by class |", "|---|---|---|---|---|"]
    names = {
        "uncorrected": "uncorrected",
        PAPER: "the paper's correction",
        "bn-mix": "`bn-mix`",
        "evidence": "`evidence`",
    }
    for method, name in names.items():
        lines.append(f"| {name} | {corrupted(rows, 'bn', method):.1f} | | | |")
    for method, name in {
        "bn-batch": "`bn-batch`",
        "tent": "`tent`",
        "tent:continual=True": "`tent`, continual",
    }.items():
        cells = [f"{corrupted(rows, 'bn', method, stream):.1f}" for stream in ("corruption", "mixed", "sorted")]
        lines.append(f"| {name} | | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def streams_in_words(rows: list[EvaluationRow]) -> str:
    """Losses of methods that read the batch: with single images, and on clean ones."""
    methods = ("bn-batch", "tent", "tent:continual=True")
    single = max(corrupted(rows, "bn", method, "single", severities=(5,)) for method in methods)
    clean = {
        m: mean(rows, lambda r, m=m: _is(r, "bn", m, "corruption") and r.corruption == "identity") for m in methods
    }  # type: ignore[misc]
    plain = mean(
        rows, lambda r: _is(r, "bn", "uncorrected", "any") and r.corruption == "identity" and r.images == 10000
    )
    return _wrapped(
        f"With single images, the last three are lost ({single:.0f} and below, at severity 5), and on clean images "
        f"they cost {plain - max(clean.values()):.1f} points or more. So use batch statistics where a whole batch is "
        "sure to share one corruption and to hold all classes, and a single-image rule anywhere else."
    )


def other_norms(rows: list[EvaluationRow]) -> str:
    """Norms without batch statistics."""
    three = {
        norm: [f"{corrupted(rows, norm, method):.1f}" for method in ("uncorrected", PAPER, "evidence")]
        for norm in ("frn", "gn")
    }
    plain, paper, ours = three["frn"]
    return _wrapped(
        f"With other norms there are only single-image rules. Filter response norm: {plain} uncorrected, {paper} the "
        f"paper's, {ours} `evidence`. Group norm: {three['gn'][0]}, {three['gn'][1]} and {three['gn'][2]}."
    )


def public_in_words(rows: list[EvaluationRow]) -> str:
    """A published ResNet-20: clean, and the mean over corruptions."""
    names = {
        "uncorrected": "uncorrected {}",
        PAPER: "the paper's correction {}",
        "bn-mix": "`bn-mix` {}",
        "correct+bn-mix:lambda2=0.0,location=match": "both together {}",
        "bn-batch": "`bn-batch` (batches of 240) {}",
    }
    told = []
    for method, text in names.items():
        clean = mean(rows, lambda r, m=method: r.method == m and r.corruption == "identity")  # type: ignore[misc]
        rest = mean(rows, lambda r, m=method: r.method == m and r.corruption != "identity")  # type: ignore[misc]
        told.append(text.format(f"{clean:.1f} / {rest:.1f}"))
    (images,) = {row.images for row in rows}
    (targets,) = {row.calibrated for row in rows} - {0}
    return _wrapped(
        f"On a public CIFAR-10 ResNet-20 ([rivals.csv](../results/rivals.csv): 19 corruptions, severities 1, 3 and 5, "
        f"{images} images each, targets of {targets} images), accuracy in %, clean / mean: {', '.join(told)}."
    )


def accuracy_table(rows: list[AccuracyRow]) -> str:
    """Clean accuracies of the trained ResNet-20s, beside the paper's."""
    lines = ["| | seeds | ours | the paper's |", "|---|---|---|---|"]
    for chosen, name in SETS.items():
        for norm, words in NORMS.items():
            mine = [row for row in rows if row.network == (chosen, "resnet20", norm)]
            ours = [row.test_accuracy for row in mine]
            paper = f"{mine[0].paper_mean:.2f}"
            paper += "" if mine[0].paper_deviation is None else f" ± {mine[0].paper_deviation:.2f}"
            lines.append(f"| {name}, {words} | {len(mine)} | {fmean(ours):.2f} ± {stdev(ours):.2f} % | {paper} % |")
    return "\n".join(lines) + "\n"


def corrupted(
    rows: list[EvaluationRow],
    norm: str,
    method: str,
    stream: str = "any",
    severities: tuple[int, ...] = (1, 2, 3, 4, 5),
) -> float:
    """Return the mean accuracy over the corrupted sets, all on the same number of images: the largest."""
    chosen = [row for row in rows if _is(row, norm, method, stream) and row.corruption != "identity"]
    most = max(row.images for row in chosen)
    return mean(chosen, lambda row: row.images == most and row.severity in severities)


def mean(rows: list[EvaluationRow], wanted: Callable[[EvaluationRow], bool]) -> float:
    """Return the mean accuracy of some rows."""
    return fmean(row.accuracy for row in rows if wanted(row))


def _is(row: EvaluationRow, norm: str, method: str, stream: str) -> bool:
    same = (row.model, row.method) == (f"resnet20-{norm}-cifar10", method)
    return same and row.stream.partition("/")[0] == stream


def _wrapped(text: str) -> str:
    return textwrap.fill(text, WIDTH, break_on_hyphens=False, break_long_words=False) + "\n"


if __name__ == "__main__":
    main()
