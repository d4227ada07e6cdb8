"""Cells from rows: means over models, complete or not at all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from trueup_lab.data.corruptions import corruption_names
from trueup_lab.evaluation import EvaluationRow
from trueup_lab.experiments import cells, experiment, lacking, rows_file
from trueup_lab.experiments.aggregate import differences, mce
from trueup_lab.experiments.document import report
from trueup_lab.tables import append_rows, start_table

NAMES = corruption_names("cifar10-c")
ROW = EvaluationRow(
    model="resnet20-bn-cifar10", seed=0, method="uncorrected", stream="any", batch=0, corruption="fog", severity=5,
    images=100, accuracy=50.0, calibration_error=1.0, ms=0.5, data="generated", data_seed=0, calibrated=0,
    needs="nothing", checkpoint="0", trueup="0", torch="2", device="cpu",
)  # fmt: skip
CORRECTED = "correct:lambda1=1.0,lambda2=0.2"


def rows_of(seed, method, accuracy):
    """A model's rows: the clean set, and every corruption and severity, `accuracy(corruption, severity)` each."""
    cases = [("identity", 0), *((name, severity) for name in NAMES for severity in range(1, 6))]
    return [
        replace(ROW, seed=seed, method=method, corruption=name, severity=severity, accuracy=accuracy(name, severity))
        for name, severity in cases
    ]


def test_a_cell_is_the_mean_over_severities_then_models():
    rows = rows_of(0, "uncorrected", lambda _, s: 10.0 * s) + rows_of(1, "uncorrected", lambda _, s: 10.0 * s + 6)
    table = cells(experiment("table2"), rows)
    assert table["fog", "bn"].value == pytest.approx(
        28
    )  # (0 + 10 + ... + 50) / 6 = 25, the clean set being one, and 31
    assert table["fog", "bn"].spread == pytest.approx(18**0.5)  # of 25 and 31
    assert (table["fog", "bn"].models, table["fog", "bn"].images) == (2, 100)
    assert table["identity", "bn"].value == pytest.approx(3)
    assert cells(experiment("table5"), rows)["fog", "bn"].value == pytest.approx(53)
    assert not any(label == "bn (c)" for _, label in table)


def test_the_clean_set_counts_in_an_average_as_often_as_the_paper_counts_it():
    rows = rows_of(0, "uncorrected", lambda name, _: 100.0 if name == "identity" else 40.0)
    assert cells(experiment("table2"), rows)["average", "bn"].value == pytest.approx((5 * 40 + 100) / 6)
    assert cells(experiment("table6"), _imagenet(rows))["average", "bn"].value == pytest.approx(40)
    assert cells(experiment("table5"), rows)["average", "bn"].value == pytest.approx((19 * 40 + 100) / 20)


def test_a_corruption_weighs_as_much_as_the_clean_set_however_many_severities_it_has():
    one = replace(experiment("table3"), identity=1)
    rows = _imagenet(rows_of(0, "uncorrected", lambda name, _: 100.0 if name == "identity" else 40.0))
    assert cells(one, rows)["average", "bn"].value == pytest.approx((19 * 40 + 100) / 20)


def _imagenet(rows):
    return [replace(row, model="resnet50_v1_imagenet_bn") for row in rows]


def test_mnist_counts_the_clean_set_twice():
    digits = [n for n in corruption_names("mnist-c") if n != "identity"]
    rows = [replace(ROW, model="resnet20-bn-mnist", corruption=n, severity=3, accuracy=40.0) for n in digits]
    rows += [replace(ROW, model="resnet20-bn-mnist", corruption="identity", severity=0, accuracy=100.0)]
    assert cells(experiment("table1"), rows)["average", "bn"].value == pytest.approx((15 * 40 + 200) / 17)


def test_our_rule_is_judged_on_the_fifteen_corruptions_that_it_was_not_chosen_on():
    extra = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
    rows = rows_of(0, "uncorrected", lambda name, _: 0.0 if name in extra else 40.0)
    assert cells(experiment("beyond-cifar10"), rows)["average", "bn, uncorrected"].value == pytest.approx(40)
    assert cells(experiment("rivals"), rows)["average", "bn, uncorrected"].value == pytest.approx(15 * 40 / 19)


def test_gains_are_paired_over_the_models_and_images_that_both_methods_have(tmp_path):
    beyond = experiment("beyond-cifar10")
    plain, papers, *_, ours = (column for column in beyond.columns if column.norm == "bn")
    rows = [row for seed in range(3) for row in rows_of(seed, plain.method.name, lambda *_, s=seed: 40.0 + 10 * s)]
    rows += [row for seed in range(2) for row in rows_of(seed, papers.method.name, lambda *_, s=seed: 42.0 + 12 * s)]
    rows += [row for seed in range(2) for row in rows_of(seed, ours.method.name, lambda *_, s=seed: 43.0 + 12 * s)]
    gains = differences(beyond, ours, plain, rows)
    assert gains["average"] == (pytest.approx(4), pytest.approx(2**0.5))  # of 3 and 5: the third model has no row
    assert differences(beyond, ours, papers, rows)["clean"] == (pytest.approx(1), 0)
    more = [replace(row, images=1000) for seed in range(3) for row in rows_of(seed, "uncorrected", lambda *_: 90.0)]
    assert differences(beyond, ours, plain, rows + more) == gains  # pairs are of the same images
    started = rows_of(2, ours.method.name, lambda *_: 0.0)[:-1]
    assert differences(beyond, ours, plain, rows + started) == gains  # and of models that have all test sets

    start_table(rows_file(tmp_path, "cifar10"), EvaluationRow)
    append_rows(rows_file(tmp_path, "cifar10"), rows)
    (line,) = (line for line in report(tmp_path).splitlines() if f"| `{ours.method.name}` | 49" in line)
    assert line.endswith("| +4.00 ± 1.41 | +1.00 ± 0.00 | - | - | - |")


def test_of_two_calibrations_the_larger_one_counts():
    few, many = (
        [replace(row, calibrated=count) for row in rows_of(0, CORRECTED, lambda *_, a=accuracy: a)]
        for count, accuracy in ((100, 50.0), (1000, 60.0))
    )
    for rows in (few + many, many + few):
        assert cells(experiment("table2"), rows)["fog", "bn (c)"].value == pytest.approx(60)


def test_a_cell_that_is_not_complete_is_not_there():
    rows = rows_of(0, "uncorrected", lambda *_: 50.0)
    rows = [row for row in rows if (row.corruption, row.severity) != ("fog", 3)]
    table = cells(experiment("table2"), rows)
    assert ("fog", "bn") not in table
    assert ("average", "bn") not in table
    assert ("snow", "bn") in table


def test_a_model_that_has_all_test_sets_is_not_kept_back_by_one_that_has_not():
    rows = rows_of(0, "uncorrected", lambda *_: 50.0)
    started = [replace(row, images=1000) for row in rows_of(1, "uncorrected", lambda *_: 90.0)[:-1]]
    measured = cells(experiment("table2"), rows + started)["average", "bn"]
    assert (measured.value, measured.models, measured.images) == (pytest.approx(50), 1, 100)


def test_a_column_on_fewer_images_than_the_uncorrected_one_is_left_out():
    many = [replace(row, images=1000) for row in rows_of(0, "uncorrected", lambda *_: 50.0)]
    few = rows_of(0, CORRECTED, lambda *_: 60.0)
    assert {label for _, label in cells(experiment("table2"), many + few)} == {"bn"}
    assert "bn, evidence" in {
        label
        for _, label in cells(experiment("beyond-cifar10"), many + [replace(row, method="evidence") for row in few])
    }


def test_all_test_sets_of_a_column_have_as_many_images():
    few = rows_of(0, "uncorrected", lambda *_: 50.0)
    many = [replace(row, images=1000, accuracy=90.0) for row in few]
    table = cells(experiment("table2"), few + many[:-1])  # one is missing
    assert table["identity", "bn"].value == pytest.approx(90)  # of clean images, as many as there are
    assert table["fog", "bn"].value == pytest.approx((5 * 50 + 90) / 6)


def test_more_images_replace_fewer():
    few = rows_of(0, "uncorrected", lambda *_: 50.0)
    many = [replace(row, images=1000, accuracy=60.0) for row in few]
    for rows in (few + many, many + few):  # whichever came last
        assert cells(experiment("table2"), rows)["fog", "bn"].value == pytest.approx(60)
        assert cells(experiment("table2"), rows)["fog", "bn"].images == 1000


def test_both_readings_stand_beside_the_paper_s_one():
    columns = {column.label: column.papers for column in experiment("table2").columns}
    assert columns["bn (c)"] == columns["bn (c, match)"] == "bn (c)"


def test_severities_are_the_rows_of_figure_4():
    rows = rows_of(0, "uncorrected", lambda _, s: 90.0 - 10 * s)
    table = cells(experiment("figure4"), rows)
    assert [table[str(s), "bn"].value for s in range(6)] == pytest.approx([90, 80, 70, 60, 50, 40])


def test_the_mce_of_rows():
    rows = _imagenet(rows_of(0, "uncorrected", lambda *_: 100.0))
    one = experiment("table3")
    assert mce(one.columns[0], one, rows, extra=True) == 0
    assert mce(one.columns[0], one, rows[:20], extra=True) is None


def test_the_report_holds_ours_the_paper_s_and_the_difference(tmp_path):
    path = rows_file(tmp_path, "cifar10")
    start_table(path, EvaluationRow)
    made = rows_of(0, "uncorrected", lambda *_: 80.0) + rows_of(1, "uncorrected", lambda *_: 80.2)
    made += rows_of(0, CORRECTED, lambda *_: 82.0) + rows_of(1, CORRECTED, lambda *_: 82.0)
    append_rows(path, [replace(row, images=10000) for row in made])
    text = report(tmp_path, Path("nowhere"))
    line = next(line for line in text.splitlines() if line.startswith("| fog"))
    assert "80.10 ± 0.14 / 84.14 (**-4.04**)" in line
    assert "82.00 ± 0.00 / 84.75 (**-2.75**)" in line
    assert "bn, bn (c): 2 models, 10000 images per set. Corrupted images are generated" in text
    assert "fog -4.0" in text
    assert "Missing models: resnet20-bn-cifar10, resnet20-frn-cifar10, resnet20-gn-cifar10." in text
    assert "## Which reading" in text
    assert text.count("## ") >= 15


def test_differences_within_the_spread_are_not_bold(tmp_path):
    path = rows_file(tmp_path, "cifar10")
    start_table(path, EvaluationRow)
    made = rows_of(0, "uncorrected", lambda *_: 84.0) + rows_of(1, "uncorrected", lambda *_: 85.0)
    append_rows(path, [replace(row, images=10000) for row in made])
    line = next(line for line in report(tmp_path).splitlines() if line.startswith("| fog"))
    assert "84.50 ± 0.71 / 84.14 (+0.36)" in line


def test_few_images_explain_more_than_many(tmp_path):
    """Four points are nothing on 100 images, whose share of right ones has a standard error of 3.7."""
    path = rows_file(tmp_path, "cifar10")
    start_table(path, EvaluationRow)
    append_rows(path, rows_of(0, "uncorrected", lambda *_: 80.0))
    line = next(line for line in report(tmp_path).splitlines() if line.startswith("| fog"))
    assert "80.00 / 84.14 (-4.14)" in line


def test_a_missing_model_says_how_to_get_it(tmp_path):
    sources = lacking(experiment("table2"), tmp_path, tmp_path)
    assert [source.norm for source in sources] == ["bn", "frn", "gn"]
    assert "trueup train --set cifar10 --norm gn --seeds 0-9" in sources[2].missing(tmp_path)
    assert lacking(experiment("table4"), tmp_path) == []
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "resnet20-bn-cifar10.safetensors").touch()
    assert [source.norm for source in lacking(experiment("figure6"), tmp_path)] == []


def test_gains_are_drawn_for_the_models_that_have_any(tmp_path):
    from trueup_lab.figures.gains import draw_gains

    beyond = experiment("beyond-cifar10")
    plain, papers, *_ = (column for column in beyond.columns if column.norm == "gn")
    rows = [replace(row, model="resnet20-gn-cifar10") for row in rows_of(0, plain.method.name, lambda *_: 40.0)]
    assert draw_gains(beyond, rows, tmp_path / "none.png") is None
    rows += [replace(row, model="resnet20-gn-cifar10") for row in rows_of(0, papers.method.name, lambda *_: 42.0)]
    written = draw_gains(beyond, rows, tmp_path / "gains.png")
    assert written.read_bytes().startswith(b"\x89PNG")
    assert [path.name for path in tmp_path.iterdir()] == ["gains.png"]
