"""Markdown tables of results/performance_*.csv, written between the markers of docs/performance.md.

python benchmarks/performance_table.py            # rewrite the tables
python benchmarks/performance_table.py --check    # fail if the document does not show what the files hold
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from trueup_lab.performance import CASES, TimingRow, read_timings
from trueup_lab.performance.architectures import TIMED_NETWORKS

ROOT = Path(__file__).resolve().parent.parent
DOCUMENT = ROOT / "docs" / "performance.md"
WAYS = {  # columns, and the cases that they show, after the name of the architecture
    "bf16": ", batch 64, bfloat16",
    "TF32": ", batch 64, TF32",
    "bf16, compiled": ", batch 64, bfloat16, compiled",
    "TF32, compiled": ", batch 64, TF32, compiled",
    "one image, CUDA graph": ", batch 1, CUDA graph",
    "one image, eager": ", batch 1",
    "peak memory": ", batch 64, bfloat16: peak memory",
}
CPU_WAYS = {
    "one image, one thread": ", batch 1, one CPU thread",
    "the same, compiled": ", batch 1, one CPU thread, compiled",
    "batch 32, two threads": ", batch 32, two CPU threads",
}
RULES = {"evidence, no gate": "no gate", "evidence": "`Evidence()`", "correction": "the paper's"}
RIVALS = {"BN batch": "BN of the batch", "BN mix": "BN mixing", "TENT": "TENT"}


def main() -> None:
    """Rewrite or check the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="change nothing; fail if a table is stale")
    asked = parser.parse_args()
    text = DOCUMENT.read_text(encoding="utf-8")
    new = text
    for name, table in tables().items():
        new = re.sub(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", rf"\g<1>{table}\g<2>", new, flags=re.DOTALL)
    if asked.check and new != text:
        raise SystemExit(f"{DOCUMENT} does not show the results; run python benchmarks/performance_table.py")
    if not asked.check:
        DOCUMENT.write_text(new, encoding="utf-8")


def tables() -> dict[str, str]:
    """The tables by the names of their markers."""
    gpu, cpu = (read_timings(ROOT / "results" / f"performance_{name}.csv") for name in ("h200", "cpu"))
    return {
        "gpu": architectures(gpu, WAYS),
        "cpu": architectures(cpu, CPU_WAYS),
        "first": first_answers(gpu),
        "rules": rules([*gpu, *cpu]),
        "rest": rest(gpu, cpu),
    }


def architectures(rows: Sequence[TimingRow], ways: Mapping[str, str]) -> str:
    """Ratios of the rule that calibration usually chooses, one line per architecture."""
    lines = [f"| | {' | '.join(ways)} |", f"|---{'|---' * len(ways)}|"]
    bounds = [_bound(suffix) for suffix in ways.values()]
    lines.append(f"| *to reach* | {' | '.join(bounds)} |")
    for architecture in TIMED_NETWORKS:
        cells = [_ratio(rows, architecture.name + suffix, "evidence, no gate") for suffix in ways.values()]
        if any(cell != "-" for cell in cells):
            lines.append(f"| {architecture.name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def first_answers(rows: Sequence[TimingRow]) -> str:
    """Seconds from `correct` to the first answer, and the kernels that are compiled on the way."""
    lines = [
        "| | `correct` | first answer, no compiled kernels | kernels compiled before | kernels |",
        "|---|---|---|---|---|",
        "| *to reach* | 1 s | 4 s | 0.5 s | |",
    ]
    for architecture in TIMED_NETWORKS:
        found = {row.what: row for row in rows if row.case == f"{architecture.name}: first answer"}
        if found:
            times = [_cell(found.get(what), " s") for what in ("correct", *_FIRST)]
            kernels = found.get("compiled kernels")
            lines.append(f"| {architecture.name} | {' | '.join(times)} | {f'{kernels.cost:g}' if kernels else '-'} |")
    return "\n".join(lines) + "\n"


def rules(rows: Sequence[TimingRow]) -> str:
    """All rules and rivals in the cases that compare them."""
    names = {**RULES, **RIVALS}
    lines = [f"| | {' | '.join(names.values())} |", f"|---{'|---' * len(names)}|"]
    cases = dict.fromkeys(row.case for row in rows if row.what == "correction" and row.against == "uncorrected")
    lines += [f"| {case} | {' | '.join(_ratio(rows, case, what) for what in names)} |" for case in cases]
    return "\n".join(lines) + "\n"


def rest(gpu: Sequence[TimingRow], cpu: Sequence[TimingRow]) -> str:
    """The operator alone, calibration, the decision and the targets file."""
    lines = ["| | device | ratio | to reach | by sorting |", "|---|---|---|---|---|"]
    for row in [*gpu, *cpu]:
        if (
            row.case.startswith(("operator", "calibration", "decision", "targets file"))
            and row.what != "correction by sorting"
        ):
            by_sorting = [r.ratio for r in (gpu if row in gpu else cpu) if r.case == row.case and "sorting" in r.what]
            unit = " MB" if row.against == "megabyte" else ""
            bound = _REACH.get(row.case) if row.reach is None else row.reach  # a row may be older than its aim
            reach = "" if bound is None else f"{bound:g}{unit}"
            ratio = _bold(f"{row.ratio:.3g}{unit}", missed=bound is not None and row.ratio > bound)
            sort = f"{by_sorting[0]:.0f}" if by_sorting else ""
            lines.append(f"| {row.case} | {row.device} | {ratio} | {reach} | {sort} |")
    return "\n".join(lines) + "\n"


_REACH = {case.name: case.reach for case in CASES}
_FIRST = ("first answer, empty cache", "first answer, full cache")


def _ratio(rows: Sequence[TimingRow], case: str, what: str) -> str:
    return _cell(next((row for row in rows if row.case == case and row.what == what), None))


def _cell(row: TimingRow | None, unit: str = "") -> str:
    if row is None:
        return "-"
    return _bold(f"{row.ratio:.2f}{unit}", missed=row.reach is not None and row.ratio > row.reach)


def _bold(text: str, *, missed: bool) -> str:
    return f"**{text}**" if missed else text


def _bound(suffix: str) -> str:
    """The aim of a column, from its cases: there may be no rows yet."""
    (bound,) = {_REACH[name] for each in TIMED_NETWORKS if (name := each.name + suffix) in _REACH}
    return f"{bound:g}"


if __name__ == "__main__":
    main()
