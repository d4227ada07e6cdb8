"""Output of `trueup demo`: a table, a summary, and rows of a CSV file."""

from __future__ import annotations

from dataclasses import dataclass

from rich.table import Table

from trueup import Correction
from trueup_lab import demo


@dataclass(frozen=True)
class DemoTableRow:
    """One test set in the CSV file: accuracies in percent."""

    corruption: str
    severity: int
    images: int
    as_trained: float
    correction: float
    evidence: float


def demo_table(result: demo.Result, correction: Correction) -> Table:
    """Return the table of accuracies by corruption and severity."""
    table = Table(
        title="ResNet-20 on digits: accuracy in %, mean over severities\n"
        f"correction: the paper's, step {correction.step:.2f}, location {correction.location!r}\n"
        "evidence: trueup's own, the default",
        title_justify="left",
        title_style="bold",
    )
    table.add_column("corruption", no_wrap=True)
    for name in (demo.PLAIN, *demo.RULES):
        table.add_column(name.replace("_", " "), justify="right", no_wrap=True)
    for name in demo.CORRUPTIONS:
        _add(table, name.replace("_", " "), result.mean(corruption=name), last=name == demo.CORRUPTIONS[-1])
    for severity in demo.SEVERITIES:
        _add(table, f"severity {severity}", result.mean(severity=severity), last=severity == demo.SEVERITIES[-1])
    _add(table, "[bold]mean[/]", result.mean())
    _add(table, "clean", result.clean)
    return table


def demo_summary(result: demo.Result) -> list[str]:
    """Return one line per rule, and one on costs."""
    mean, clean, plain = result.mean(), result.clean, result.ms[demo.PLAIN]
    lines = []
    for rule in demo.RULES:
        gains = [row.gain(rule) for row in result.corrupted]
        better, worse = sum(gain > 0 for gain in gains), sum(gain < 0 for gain in gains)
        sets = f"better in {better} of {len(gains)} sets, worse in {worse}"
        points = f"{mean.gain(rule):+.1f} points under corruption, {clean.gain(rule):+.1f} on clean images"
        lines.append(f"{rule}: {sets}; {points}; {result.ms[rule] / plain:.2g} times the time")
    one = f"One image is {100 / result.images:.1f} points and takes {plain:.1f} ms as trained"
    return [*lines, f"{one}; calibration takes {result.calibration_seconds:.0f} s, once"]


def _add(table: Table, name: str, row: demo.DemoRow, *, last: bool = False) -> None:
    cells = [f"{row.accuracy[rule]:.1f}  {_coloured(row.gain(rule))}" for rule in demo.RULES]
    table.add_row(name, f"{row.accuracy[demo.PLAIN]:.1f}", *cells, end_section=last)


def _coloured(gain: float) -> str:
    text = f"{gain:+5.1f}"
    if abs(gain) < 0.05:
        return text
    return f"[{'green' if gain > 0 else 'red'}]{text}[/]"
