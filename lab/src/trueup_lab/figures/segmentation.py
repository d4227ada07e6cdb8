"""Tables and plots of the page on segmentation, from its CSV files."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from trueup_lab.data.corruptions import REPORTED_ON
from trueup_lab.demo.scenes import ScenesRow
from trueup_lab.experiments.segmentation import SummaryRow, best_mixing
from trueup_lab.figures.style import BLUE, GREEN, GREY, ORANGE, PURPLE, pyplot, quiet, save
from trueup_lab.page_blocks import rewrite
from trueup_lab.performance.rows import read_timings
from trueup_lab.tables import read_table

PAGE = Path("docs", "segmentation.md")
RESULTS = Path("results", "segmentation")
DEMO = Path("results", "demo", "segmentation.csv")
LABELS = {
    "uncorrected": "as trained",
    "default": "**trueup, the default**",
    "evidence": "`Evidence()`",
    "correct": "the paper's rule",
    "bn-batch": "batch norm of the batch, 8 images of one corruption",
    "tent:rate=0.0001": "TENT, rate 0.0001, the same batches",
    "tent": "TENT, rate 0.001, the same batches",
}
AIM = 10
"""Points of mean IoU that the default was meant to gain on the mean of the fifteen."""

SET_ASIDE = 3
"""The rows that the page is about: every third test image set aside for calibration. Until there are any, all rows."""


def rewrite_page(root: Path) -> None:
    """Rewrite the tables between the markers of the page, and draw its plots."""
    rows = read_table(root / RESULTS / "summary.csv", SummaryRow)
    if [row for row in rows if row.group == "fifteen"]:
        draw_iou_by_severity(rows, root / "results" / "figures" / "segmentation-severities.png")
        draw_classes(rows, root / "results" / "figures" / "segmentation-classes.png")
    rewrite(root / PAGE, tables(root))
    rewrite(root / "README.md", {"segmentation": for_readme(rows)})


def tables(root: Path) -> dict[str, str]:
    """The page's tables as Markdown, by the name of their marker."""
    rows = read_table(root / RESULTS / "summary.csv", SummaryRow)
    return {
        "demo": drawn_scenes_table(read_table(root / DEMO, ScenesRow)),
        "in words": in_words(rows),
        "methods": methods_table(rows),
        "corruptions": corruptions_table(rows),
        "training": calibration_table(rows),
        "training in words": calibration_in_words(rows),
        "time": time_table(root),
    }


def drawn_scenes_table(rows: Sequence[ScenesRow]) -> str:
    """Mean IoU of the drawn scenes: weather by severity, as trained and corrected."""
    levels = sorted({row.severity for row in rows if row.severity})
    lines = [
        "| | " + " | ".join(f"severity {level}" for level in levels) + " |",
        "|---" * (len(levels) + 1) + "|",
    ]
    for weather in dict.fromkeys(row.weather for row in rows if row.severity):
        cells = [_arrow(row.as_trained, row.corrected) for row in rows if row.weather == weather]
        lines.append(f"| {weather} | {' | '.join(cells)} |")
    clean = [row for row in rows if not row.severity]
    lines += [f"| clean | {_arrow(row.as_trained, row.corrected)} |" + " |" * (len(levels) - 1) for row in clean]
    return "\n".join(lines) + "\n"


def for_readme(rows: Sequence[SummaryRow]) -> str:
    """One sentence for the first page."""
    by = {(row.method, row.group): row for row in _main(rows)}
    before, after = (by[method, "fifteen"].mean_iou for method in ("uncorrected", "default"))
    clean = by["default", "clean"]
    text = (
        "**Segmentation gains most**: under the same corruptions, a public ESPNet on CamVid has "
        f"{before:.1f} mIoU as trained and {after:.1f} with trueup ({clean.gain:+.1f} ± {clean.error:.1f} on clean "
        "images). "
        "[How other methods do](https://trueup-ml.github.io/trueup/segmentation.html)."
    )
    return textwrap.fill(text, 136, break_long_words=False, break_on_hyphens=False) + "\n"


def in_words(rows: Sequence[SummaryRow]) -> str:
    """Gains and losses of the default and its rivals, in sentences."""
    mine = _main(rows)
    gain = {(row.method, row.group): row for row in mine}
    clean, fifteen = gain["default", "clean"], gain["default", "fifteen"]
    mixing = best_mixing(mine) or "bn-mix"
    by_gain = sorted((gain["default", name] for name in REPORTED_ON), key=lambda row: row.gain)
    least, most = by_gain[0], by_gain[-1]
    read_batches = [gain[method, "fifteen"].gain for method in ("bn-batch", "tent:rate=0.0001")]
    text = (
        f"Calibration chose `{clean.rule}`. It gains {fifteen.gain:.1f} ± {fifteen.error:.1f} points of mean IoU on "
        f"the mean of the fifteen corruptions and {clean.gain:+.1f} ± {clean.error:.1f} on clean images. The smallest "
        f"gain on any of the {fifteen.sets} corrupted sets is {fifteen.worst:+.1f}. BN mixing at the N that is best "
        f"on the four gains {gain[mixing, 'fifteen'].gain:.1f} and changes clean images by "
        f"{gain[mixing, 'clean'].gain:+.1f}. Methods that read a batch of eight images of one corruption gain "
        f"{read_batches[0]:.1f} (batch norm of the batch) and {read_batches[1]:.1f} (TENT). The default gains most "
        f"under {most.group.replace('_', ' ')} ({most.gain:+.1f}) and least under {least.group.replace('_', ' ')} "
        f"({least.gain:+.1f})."
    )
    return textwrap.fill(text, 136) + "\n"


def methods_table(rows: Sequence[SummaryRow]) -> str:
    """Every method: clean, the fifteen, by severity, and the worst set."""
    mine = _main(rows)
    groups = ["clean", "fifteen", *(f"severity {level}" for level in range(1, 6))]
    lines = [
        "| | clean | mean of the fifteen | severity 1 | 2 | 3 | 4 | 5 | worst set | needs |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for method in _shown(mine):
        by = {row.group: row for row in mine if row.method == method}
        if "clean" not in by:
            continue
        plain = method == "uncorrected"
        cells = [
            "-" if group not in by else f"{by[group].mean_iou:.1f}" if plain else _gain(by[group]) for group in groups
        ]
        worst = [row.worst for group, row in by.items() if group.startswith("severity")]
        cells += ["" if plain or not worst else f"{min(worst):+.1f}", by["clean"].needs]
        lines.append(f"| {_label(method)} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def corruptions_table(rows: Sequence[SummaryRow]) -> str:
    """Each corruption over its severities: as trained, and what every single-image method gains."""
    mine = _main(rows)
    shown = [
        name for name in _shown(mine) if any(r.needs in ("targets", "batch norm") for r in mine if r.method == name)
    ]
    lines = [f"| | as trained | {' | '.join(map(_label, shown))} |", "|---" * (len(shown) + 2) + "|"]
    for name in REPORTED_ON:
        by = {row.method: row for row in mine if row.group == name}
        if by.keys() >= {"uncorrected", *shown}:
            cells = [f"{by['uncorrected'].mean_iou:.1f}", *(_gain(by[method]) for method in shown)]
            lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def calibration_table(rows: Sequence[SummaryRow]) -> str:
    """The default calibrated on test images set aside, and on training images."""
    lines = ["| calibrated on | tested on | clean | mean of the fifteen | chosen |", "|---|---|---|---|---|"]
    for aside in dict.fromkeys(row.set_aside for row in rows):
        by = {row.group: row for row in rows if (row.set_aside, row.method, row.kind) == (aside, "default", "all")}
        if {"clean", "fifteen"} <= by.keys():
            clean = by["clean"]
            nth = {2: "2nd", 3: "3rd"}.get(aside, f"{aside}th")
            what = f"every {nth} test image" if aside else "training images"
            lines.append(
                f"| {clean.calibrated}: {what} | {clean.images} clean images, {by['fifteen'].images} in each of "
                f"{by['fifteen'].sets} sets | {_gain(clean)} | {_gain(by['fifteen'])} | `{clean.rule}` |"
            )
    return "\n".join(lines) + "\n"


def calibration_in_words(rows: Sequence[SummaryRow]) -> str:
    """Compare the gain after calibration on training images with the aim; empty without such a row."""
    own = {row.group: row for row in rows if (row.set_aside, row.method, row.kind) == (0, "default", "all")}
    if "fifteen" not in own:
        return ""
    row, levels = own["fifteen"], [name[-1] for name in own if name.startswith("severity")]
    text = (
        f"Calibrated on training images, the default gains {_gain(row)} (severities {', '.join(levels)}; learned "
        f"weights). The aim of {AIM} is {'missed' if row.gain < AIM else 'met'}."
    )
    return textwrap.fill(text, 136) + "\n"


def time_table(root: Path) -> str:
    """Time per image, as a multiple of the model's."""
    lines = ["| device | case | model | the default | the paper's rule | mixing |", "|---|---|---|---|---|---|"]
    for path in sorted((root / RESULTS).glob("timing_*.csv")):
        rows = read_timings(path)
        for case in dict.fromkeys(row.case for row in rows):
            by = {row.what.partition(":")[0]: row for row in rows if row.case == case}
            first, shown = next(iter(by.values())), case.partition(", ")[2]
            own = f"{1000 * first.of / first.batch:.2f} ms"
            cells = [f"{by[name].ratio:.2f}" if name in by else "-" for name in ("default", "correct", "bn-mix")]
            lines.append(f"| {first.device} | {shown} | {own} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw_iou_by_severity(rows: Sequence[SummaryRow], path: Path) -> Path:
    """Draw mean IoU against severity, one line per method."""
    plt, mine = pyplot(), _main(rows)
    mixing = best_mixing(mine) or ""
    looks = {
        "uncorrected": (GREY, "as trained"),
        "correct": (ORANGE, "the paper's rule"),
        mixing: (PURPLE, _label(mixing)),
        "bn-batch": (GREEN, "batch norm of the batch"),
        "default": (BLUE, "trueup, the default"),
    }
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for method, (colour, label) in looks.items():
        by = {row.group: row for row in mine if row.method.partition(":")[0] == method or row.method == method}
        names = ["clean", *(f"severity {level}" for level in range(1, 6))]
        if set(names) <= by.keys():
            wide = 2.4 if method == "default" else 1.4
            axes.plot(range(6), [by[name].mean_iou for name in names], "o-", color=colour, label=label, linewidth=wide)
    axes.set_xticks(range(6), ["clean", *map(str, range(1, 6))])
    axes.set(xlabel="severity, mean of fifteen corruptions", ylabel="mean IoU in %", ylim=(0, None))
    axes.legend(frameon=False, fontsize=8)
    quiet(axes)
    return save(figure, path)


def draw_classes(rows: Sequence[SummaryRow], path: Path) -> Path:
    """Draw the IoU of each class over the fifteen corruptions, as trained and with the default."""
    plt = pyplot()
    mine = [row for row in _of_page(rows) if row.group == "fifteen" and row.kind != "all"]
    values = {
        method: {row.kind: row.mean_iou for row in mine if row.method == method}
        for method in ("uncorrected", "default")
    }
    names = sorted(values["default"], key=lambda name: values["default"][name])
    figure, axes = plt.subplots(figsize=(5.2, 3.4), layout="constrained")
    for y, name in enumerate(names):
        before, after = values["uncorrected"][name], values["default"][name]
        axes.plot([before, after], [y, y], color="#BBBBBB", linewidth=2, zorder=1)
        axes.scatter(
            before, y, s=60, facecolor="white", edgecolor=GREY, linewidth=1.5, zorder=2, label="" if y else "as trained"
        )
        axes.scatter(after, y, s=36, color=BLUE, zorder=3, label="" if y else "trueup, the default")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("IoU in %, mean of fifteen corruptions at five severities")
    axes.legend(frameon=False, fontsize=8, loc="lower right")
    quiet(axes, grid="x")
    return save(figure, path)


def _main(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    return [row for row in _of_page(rows) if row.kind == "all"]


def _of_page(rows: Sequence[SummaryRow]) -> list[SummaryRow]:
    return [row for row in rows if row.set_aside == SET_ASIDE] or list(rows)


def _shown(rows: Sequence[SummaryRow]) -> list[str]:
    """Methods in the order of the file. Of BN mixing, only the best setting on the four corruptions, if measured."""
    best = best_mixing(rows)
    names = dict.fromkeys(row.method for row in rows)
    return [name for name in names if best is None or not name.startswith("bn-mix") or name == best]


def _label(method: str) -> str:
    if method.startswith("bn-mix"):
        return f"BN mixing, N = {method.partition('=')[2] or 8}"
    known = LABELS.get(method) or ("" if method.startswith("evidence:") else LABELS.get(method.partition(":")[0], ""))
    return known or f"`{method}`"


def _gain(row: SummaryRow) -> str:
    return f"{row.gain:+.1f} ± {row.error:.1f}"


def _arrow(before: float, after: float) -> str:
    return f"{before:.1f} → {after:.1f}"
