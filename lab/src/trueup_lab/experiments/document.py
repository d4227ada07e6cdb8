"""The text of docs/reproduction.md: our results with the paper's, cell by cell, from the committed CSV files."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean

from trueup_lab.evaluation import EvaluationRow, read_rows
from trueup_lab.experiments.aggregate import MeasuredCell, cells, differences, mce, used
from trueup_lab.experiments.published import Cell, paper
from trueup_lab.experiments.runs import lacking, rows_file
from trueup_lab.experiments.specs import EXPERIMENTS, MIXING, Column, Experiment
from trueup_lab.performance import read_timings

HEAD = """# Reproduction

Every table and figure of the paper, with our results next to the paper's. `trueup reproduce --report` writes this
document from the rows in [results](../results); nothing is typed by hand. `trueup reproduce NAME` measures what a
section lists as missing.

A cell reads *ours ± spread / paper's ± spread (difference)*. Accuracies are in %, and spreads are standard deviations
over models. A **bold** difference is larger than the sum of both spreads and two standard errors of our accuracy, so
neither the choice of models nor the choice of images explains it. (c) is the correction as the paper's text describes
it (`location="keep"`: a layer keeps its own mean). (c, match) is the other reading (`location="match"`), compared with
the same numbers of the paper.
"""


def report(results: Path, root: Path | None = None) -> str:
    """Return the whole document."""
    rows = {name: read_rows(rows_file(results, name)) for name in dict.fromkeys(e.set for e in EXPERIMENTS)}
    sections = [_section(e, rows[e.set], results, root) for e in EXPERIMENTS]
    parts = [HEAD, *sections, _readings(rows), _times(results)]
    return "\n".join(part for part in parts if part)


def _section(experiment: Experiment, rows: Sequence[EvaluationRow], results: Path, root: Path | None) -> str:
    word, _, number = re.fullmatch(r"([a-z]+)(-\w+|(\d*))", experiment.name).groups()  # type: ignore[union-attr]
    title = " ".join(part for part in (word.capitalize(), number) if part)
    lines = [f"## {title}: {experiment.title}", ""]
    if experiment.note:
        lines += [experiment.note, ""]
    if experiment.rows == "setting":
        lines += _settings()
    elif experiment.rows == "stream":
        lines += _streams(experiment, cells(experiment, rows))
    elif experiment.rows == "paired":
        lines += _paired(experiment, rows)
    elif experiment.rows == "curve":
        lines += _curves(experiment, cells(experiment, rows))
    elif experiment.columns:
        lines += _table(experiment, rows)
    picture = results / "figures" / f"{experiment.name}.png"
    if picture.exists():
        lines += [f"![{experiment.title}](../{results.name}/figures/{picture.name})", ""]
    if without := lacking(experiment, results, root):
        lines += [f"Missing models: {', '.join(source.model for source in without)}.", ""]
    return "\n".join(lines)


def _table(experiment: Experiment, rows: Sequence[EvaluationRow]) -> list[str]:
    ours, theirs = cells(experiment, rows), paper(experiment.name)
    shown = [c for c in experiment.columns if any(label == c.label for _, label in ours)]
    if not shown:
        return ["Not measured yet.", ""]
    labels = list(dict.fromkeys(row for row, _ in theirs if row != "mCE"))
    body = [
        [label, *(_pair(ours.get((label, c.label)), theirs.get((label, c.papers))) for c in shown)] for label in labels
    ]
    if experiment.mce:
        body += [
            [name, *(_mce(c, experiment, rows, extra=extra) for c in shown)]
            for name, extra in (("mCE (19)", True), ("mCE (15)", False))
        ]
    table = _markdown([experiment.rows, *(c.label for c in shown)], body)
    return [*table, "", _made_of(experiment, shown, rows), "", _beyond(shown, ours, theirs), ""]


def _pair(ours: MeasuredCell | None, theirs: Cell | None) -> str:
    """Format one cell: ours / the paper's (difference)."""
    if ours is None:
        return f"- / {_number(theirs)}" if theirs else "-"
    if theirs is None:
        return _number(ours.cell)
    text = f"{ours.value - theirs.value:+.2f}"
    if _apart(ours, theirs):
        text = f"**{text}**"
    return f"{_number(ours.cell)} / {_number(theirs)} ({text})"


def _apart(ours: MeasuredCell, theirs: Cell) -> bool:
    """Return whether two cells differ by more than chance, from spreads over models and the number of test images."""
    share = theirs.value / 100
    sampling = 200 * math.sqrt(share * (1 - share) / ours.images) if ours.images and 0 < share < 1 else 0.0
    return abs(ours.value - theirs.value) > (ours.spread or 0) + (theirs.spread or 0) + sampling


def _beyond(
    columns: Sequence[Column], ours: dict[tuple[str, str], MeasuredCell], theirs: dict[tuple[str, str], Cell]
) -> str:
    """Write one sentence per column on its differences beyond chance."""
    sentences = []
    for column in columns:
        both = {
            row: (mine, cell)
            for (row, label), mine in ours.items()
            if label == column.label and (cell := theirs.get((row, column.papers)))
        }
        gaps = {row: mine.value - cell.value for row, (mine, cell) in both.items() if _apart(mine, cell)}
        if gaps:
            named = ", ".join(f"{_spoken(row)} {gap:+.1f}" for row, gap in gaps.items())
            sentences.append(f"{column.label}: {len(gaps)} of {len(both)} beyond chance ({named}).")
        elif both:
            sentences.append(f"{column.label}: all {len(both)} within chance.")
    return " ".join(sentences)


def _spoken(row: str) -> str:
    return f"severity {row}" if row.isdigit() else row.replace("_", " ")


def _number(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell.value:.2f}" + ("" if cell.spread is None else f" ± {cell.spread:.2f}")


def _mce(column: Column, experiment: Experiment, rows: Sequence[EvaluationRow], *, extra: bool) -> str:
    value = mce(column, experiment, rows, extra=extra)
    published = paper(experiment.name).get(("mCE", column.papers)) if extra else None
    return _pair(None if value is None else MeasuredCell(value, None, 1, 0), published)


def _curves(experiment: Experiment, ours: dict[tuple[str, str], MeasuredCell]) -> list[str]:
    """Write Figure 3 as a table: one line per curve, one column per number of iterations."""
    if not ours:
        return ["Not measured yet.", ""]
    theirs = paper(experiment.name)
    curves = dict.fromkeys(column for _, column in theirs)
    body = []
    for curve in curves:
        norm = curve.split()[0]
        labels = [f"{norm} x0", *(f"{curve} x{count}" for count in range(1, 6))]
        if ("average", labels[0]) in ours:
            points = [
                _pair(ours.get(("average", label)), theirs[str(count), curve]) for count, label in enumerate(labels)
            ]
            body.append([curve, *points])
    return [*_markdown(["norm, λ1, λ2", *(f"{count} iteration{'s' * (count != 1)}" for count in range(6))], body), ""]


def _streams(experiment: Experiment, ours: dict[tuple[str, str], MeasuredCell]) -> list[str]:
    """Write the table of rivals: one line per norm, method and stream."""
    body = [
        [
            column.norm,
            f"`{column.method.name}`",
            str(column.method.needs),
            column.stream or "any",
            *_size(ours, column),
            *(
                _number(m.cell if (m := ours.get((row, column.label))) else None)
                for row in ("clean", "severity 5", "average")
            ),
        ]
        for column in experiment.columns
        if any(label == column.label for _, label in ours)
    ]
    if not body:
        return ["Not measured yet.", ""]
    head = ["norm", "method", "needs", "stream", "models", "images", "clean", "severity 5", "average"]
    return [*_markdown(head, body), ""]


def _size(ours: dict[tuple[str, str], MeasuredCell], column: Column) -> tuple[str, str]:
    """Return the number of models of a column, and its smallest number of images per set."""
    found = [m for (_, label), m in ours.items() if label == column.label]
    return str(found[0].models), str(min(m.images for m in found))


def _paired(experiment: Experiment, rows: Sequence[EvaluationRow]) -> list[str]:
    """Write one line per norm and method: accuracies, and gains on the same models over other methods."""
    ours = cells(experiment, rows)
    body = []
    for column in experiment.columns:
        if ("average", column.label) not in ours:
            continue
        plain, papers = (_like(experiment, column, number) for number in (0, 1))
        gains = {base.label: differences(experiment, column, base, rows) for base in (plain, papers)}
        rivals = [c for c in experiment.columns if c.norm == column.norm and c.method in MIXING]
        average = ours["average", column.label]
        body.append(
            [
                column.norm,
                str(average.models),
                str(average.images),
                f"`{column.method.name}`",
                _number(ours["clean", column.label].cell),
                _gap(gains[plain.label].get("clean")),
                _number(m.cell if (m := ours.get(("severity 5", column.label))) else None),
                _number(average.cell),
                _gap(gains[plain.label].get("average")),
                _gap(gains[papers.label].get("average")),
                *(_gap(differences(experiment, column, rival, rows).get("average")) for rival in rivals),
                *(["-"] * (len(MIXING) - len(rivals))),
            ]
        )
    if not body:
        return ["Not measured yet.", ""]
    against = ("over uncorrected", "over the paper's", *(f"over mixing, N = {method.prior}" for method in MIXING))
    head = ["norm", "models", "images", "method", "clean", "gain on clean", "severity 5", "average", *against]
    return [*_markdown(head, body), ""]


def _like(experiment: Experiment, column: Column, number: int) -> Column:
    """Return the first (uncorrected) or second (the paper's) column of the same models."""
    return [c for c in experiment.columns if c.norm == column.norm][number]


def _gap(gap: tuple[float, float | None] | None) -> str:
    if gap is None:
        return "-"
    return f"{gap[0]:+.2f}" + ("" if gap[1] is None else f" ± {gap[1]:.2f}")


def _settings() -> list[str]:
    theirs = paper("table4")
    fields = ("lambda1", "lambda2", "iterations")
    body = [[norm, *(f"{theirs[norm, f].value:g}" for f in fields)] for norm in ("bn", "frn", "gn")]
    return [*_markdown(["norm", *fields], body), "", "Table 1 is measured with these settings.", ""]


def _readings(rows: dict[str, list[EvaluationRow]]) -> str:
    """Compare the two readings of the location by their mean distance from the paper's gains."""
    body = []
    for experiment in EXPERIMENTS:
        if not experiment.name.startswith("table") or not experiment.columns:
            continue
        theirs = paper(experiment.name)
        line = [experiment.name]
        for ending in ("(c)", "(c, match)"):
            gaps = [
                abs(gain[row][0] - (theirs[row, c.papers].value - theirs[row, c.norm].value))
                for c in experiment.columns
                if c.label.endswith(ending)
                for gain in [differences(experiment, c, _like(experiment, c, 0), rows[experiment.set])]
                for row in dict.fromkeys(row for row, _ in theirs)
                if row in gain
            ]
            line.append(f"{fmean(gaps):.2f}" if gaps else "-")
        body.append(line)
    if all(line[1] == "-" for line in body):
        return ""
    text = [
        "## Which reading of the location is the paper's?",
        "",
        "Mean distance over a table's cells between our gain and the paper's, in points:",
        "",
    ]
    return "\n".join([*text, *_markdown(["table", "keep", "match"], body), "", _nearer(body), ""])


def _nearer(body: list[list[str]]) -> str:
    """Return the answer as a sentence, from lines of a table's name and two distances.

    >>> _nearer([["table1", "2.5", "2.2"], ["table3", "0.6", "0.8"], ["table9", "-", "-"]])
    '`keep` is closer in table3, `match` in table1, by at most 0.30 points.'
    """
    both = [(name, float(keep), float(match)) for name, keep, match in body if "-" not in (keep, match)]
    nearer = {
        "keep": [name for name, keep, match in both if keep < match],
        "match": [name for name, keep, match in both if match < keep],
    }
    said = [f"in {', '.join(names)}" if names else "nowhere" for names in nearer.values()]
    most = max((abs(keep - match) for _, keep, match in both), default=0.0)
    return f"`keep` is closer {said[0]}, `match` {said[1]}, by at most {most:.2f} points."


def _times(results: Path) -> str:
    """Write the milliseconds per image without and with the correction, as measured by `trueup bench`."""
    body = [
        [row.case, row.device, f"{1000 * row.of / row.batch:.3g}", f"{1000 * row.cost / row.batch:.3g}"]
        for path in sorted(results.glob("performance_*.csv"))
        for row in read_timings(path)
        if (row.what, row.against) == ("correction", "uncorrected") and "memory" not in row.case
    ]
    if not body:
        return ""
    text = [
        "## Milliseconds per image",
        "",
        "The paper reports 0.3 and 2 for MNIST (one GPU), and 0.1 and 12 for ImageNet (four GPUs). `trueup bench`",
        "measured ours; see [performance](performance.md). The times in the rows of results are not comparable:",
        "those runs may have shared their device.",
        "",
    ]
    return "\n".join([*text, *_markdown(["what", "device", "uncorrected", "corrected"], body), ""])


def _made_of(experiment: Experiment, shown: Sequence[Column], rows: Sequence[EvaluationRow]) -> str:
    """Describe the models, images and software behind a table, from its rows."""
    found = used(experiment, rows)
    sizes = []
    for column in shown:
        corrupted = [row for row in found[column] if row.data != "clean"] or found[column]
        models, images = len({row.seed for row in corrupted}), sorted({row.images for row in corrupted})
        sizes.append(
            (f"{models} model{'s' * (models > 1)}, {' or '.join(map(str, images))} images per set", column.label)
        )
    by_size = {size: ", ".join(label for other, label in sizes if other == size) for size, _ in sizes}
    mine = [row for column in shown for row in found[column]]
    data = sorted({row.data for row in mine if row.data != "clean"})
    parts = "; ".join(f"{labels}: {size}" for size, labels in by_size.items())
    return (
        f"{parts}. Corrupted images are {' and '.join(data)}; torch {', '.join(sorted({row.torch for row in mine}))} "
        f"on {', '.join(sorted({row.device for row in mine}))}."
    )


def _markdown(head: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *body]
    return [f"| {' | '.join(cell.replace('_', ' ') for cell in line)} |" for line in lines]
