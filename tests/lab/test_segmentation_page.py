"""The page on segmentation shows what its files hold."""

from __future__ import annotations

from pathlib import Path

import pytest

from trueup_lab.demo.scenes import ScenesRow
from trueup_lab.experiments.segmentation import SummaryRow, best_mixing
from trueup_lab.figures import segmentation as page
from trueup_lab.tables import read_table

ROOT = Path(__file__).resolve().parents[2]


def test_its_tables_are_those_of_the_files():
    text = (ROOT / page.PAGE).read_text(encoding="utf-8")
    for name, table in page.tables(ROOT).items():
        assert f"<!-- {name} -->\n{table}<!-- /{name} -->" in text, "run benchmarks/segmentation.py --document"


def test_the_first_page_says_what_the_file_holds():
    sentence = page.for_readme(read_table(ROOT / page.RESULTS / "summary.csv", SummaryRow))
    block = f"<!-- segmentation -->\n{sentence}<!-- /segmentation -->"
    assert block in (ROOT / "README.md").read_text(encoding="utf-8"), "run benchmarks/segmentation.py --document"


def row(method: str, group: str, score: float, gain: float, **more) -> SummaryRow:
    values = {"set_aside": 3, "calibrated": 78, "kind": "all", "sets": 75, "images": 155, "accuracy": 90.0, "rule": ""}
    needs = {"uncorrected": "nothing", "default": "targets"}.get(method, "batch norm")
    results = {"group": group, "mean_iou": score, "gain": gain, "error": 0.2, "worst": -0.1}
    return SummaryRow("espnet", method, needs, **results, **values | more)


GROUPS = ("clean", "fifteen", *(f"severity {k}" for k in range(1, 6)))


def rows() -> list[SummaryRow]:
    made = []
    for method, score in (("uncorrected", 30.0), ("default", 44.0), ("bn-mix", 38.0), ("bn-mix:prior=16", 36.0)):
        made += [row(method, group, score, score - 30) for group in GROUPS]
        made += [row(method, "four", score, 9.0 if method.endswith("16") else 2.0)]
        made += [row(method, "fog", score, score - 30)]
        made += [row(method, "fifteen", score + k, 0.0, kind=k_name) for k, k_name in enumerate(("sky", "road"))]
    return made


def test_the_best_mixing_is_that_of_the_four_and_the_only_one_shown():
    assert best_mixing(rows()) == "bn-mix:prior=16"
    table = page.methods_table(rows())
    assert "BN mixing, N = 16 | +6.0 ± 0.2" in table
    assert "N = 8" not in table
    assert "| as trained | 30.0 | 30.0 |" in table
    assert "| **trueup, the default** | +14.0 ± 0.2 | +14.0 ± 0.2 | +14.0 ± 0.2" in table
    assert "| fog | 30.0 | +14.0 ± 0.2 | +6.0 ± 0.2 |" in page.corruptions_table(rows())


def test_an_unmeasured_cell_is_a_dash_and_never_a_number():
    few = [row("uncorrected", group, 30.0, 0.0) for group in ("clean", "severity 3")]
    few += [row("evidence:strength=0.1", group, 44.0, 14.0) for group in ("clean", "severity 3")]
    line = page.methods_table(few).splitlines()[3]
    assert line.startswith("| `evidence:strength=0.1` | +14.0 ± 0.2 | - | - | - | +14.0 ± 0.2 | - | - | -0.1 |")
    assert len(page.corruptions_table(few).splitlines()) == 2


def test_rows_of_training_images_are_in_their_own_table_only():
    other = [row("default", group, 50.0, 20.0, set_aside=0, calibrated=184, images=233) for group in GROUPS]
    assert page.methods_table([*rows(), *other]) == page.methods_table(rows())
    line = "| 184: training images | 233 clean images, 233 in each of 75 sets | +20.0 ± 0.2 |"
    assert line in page.calibration_table([*rows(), *other])
    assert "gains +20.0 ± 0.2 (severities 1, 2, 3, 4, 5; learned" in page.calibration_in_words(other)
    assert "aim of 10 is met" in page.calibration_in_words(other)
    assert page.calibration_in_words(rows()) == ""


def test_plots_are_drawn(tmp_path):
    for draw in (page.draw_iou_by_severity, page.draw_classes):
        assert draw(rows(), tmp_path / f"{draw.__name__}.png").stat().st_size > 5000


def test_the_demos_table_has_a_line_per_weather():
    made = [ScenesRow("clean", 0, 4, 90.0, 89.9, "", "")]
    made += [ScenesRow("fog", severity, 4, 50.0 - severity, 60.0, "", "") for severity in (1, 3)]
    assert page.drawn_scenes_table(made).splitlines()[2:] == [
        "| fog | 49.0 → 60.0 | 47.0 → 60.0 |",
        "| clean | 90.0 → 89.9 | |",
    ]


@pytest.mark.parametrize("name", ["demo", "methods", "corruptions", "training", "training in words", "time"])
def test_every_table_has_its_place(name):
    assert f"<!-- {name} -->" in (ROOT / page.PAGE).read_text(encoding="utf-8")
