"""The transcribed numbers against what the paper makes of them itself: its averages, its mCE, its figures."""

from __future__ import annotations

from statistics import fmean

import pytest

from trueup import Correction
from trueup_lab.evaluation.metrics import mean_corruption_error
from trueup_lab.experiments import EXPERIMENTS, experiment, paper
from trueup_lab.experiments.specs import PAPERS

COLUMNS = ["bn", "bn (c)", "frn", "frn (c)", "gn", "gn (c)"]
ROUNDING = 0.011  # of an average to two digits, and of what it is made of


def column(item, label):
    return {row: cell.value for (row, name), cell in paper(item).items() if name == label}


def average(cells, identity):
    values = [value for row, value in cells.items() if row not in ("average", "mCE", "identity")]
    return fmean(values + identity * [cells["identity"]]) if identity else fmean(values)


@pytest.mark.parametrize("label", COLUMNS)
@pytest.mark.parametrize("item", ["table1", "table2", "table3", "table5"])
def test_the_paper_s_averages_are_means_of_its_cells(item, label):
    """Each with its own weight of the clean set: a wrong digit anywhere, or a wrong weight, shows."""
    cells = column(item, label)
    assert average(cells, experiment(item).identity) == pytest.approx(cells["average"], abs=ROUNDING)


# Table 6's own averages are not the means of its cells; by how much is said in the report.
@pytest.mark.parametrize(("label", "off"), list(zip(COLUMNS, [0.19, 0.0, -0.11, 0.10, 0.0, 0.02], strict=True)))
def test_table_6_is_off_by_what_the_note_says(label, off):
    cells = column("table6", label)
    assert cells["average"] - average(cells, 0) == pytest.approx(off, abs=ROUNDING)


@pytest.mark.parametrize("label", COLUMNS)
def test_the_paper_s_mce_is_over_all_nineteen(label):
    cells = column("table3", label)
    corrupted = {row: value for row, value in cells.items() if row not in ("average", "mCE")}
    assert mean_corruption_error(corrupted, extra=True) == pytest.approx(cells["mCE"], abs=ROUNDING)


@pytest.mark.parametrize("label", COLUMNS)
def test_figure_4_and_table_2_are_one_measurement(label):
    """The table's cells are means over the clean set and the five severities: six numbers, not five."""
    points, cells = column("figure4", label), column("table2", label)
    assert points["0"] == pytest.approx(cells["identity"], abs=ROUNDING)
    assert fmean(points[str(s)] for s in range(6)) == pytest.approx(cells["average"], abs=ROUNDING)


@pytest.mark.parametrize("label", COLUMNS)
def test_figure_5_is_table_2_s_saturate(label):
    points = column("figure5", label)
    assert fmean(points[str(s)] for s in range(6)) == pytest.approx(column("table2", label)["saturate"], abs=ROUNDING)


def test_one_of_the_ten_models_of_table_5_has_failed():
    """Its clean accuracy is that of nine models as in Table 2 and one that guesses."""
    for label in ("bn", "bn (c)"):
        mixed = 0.9 * column("table2", label)["identity"] + 0.1 * 10
        assert column("table5", label)["identity"] == pytest.approx(mixed, abs=0.15)


def test_figure_3_has_four_curves_a_norm_that_start_as_one():
    points = paper("figure3")
    for norm in ("bn", "frn", "gn"):
        curves = {name for _, name in points if name.startswith(f"{norm} ")}
        assert len(curves) == 4
        assert len({points["0", curve].value for curve in curves}) == 1


@pytest.mark.parametrize(("norm", "gap"), [("bn", -4.5), ("frn", 0.29), ("gn", 0.15)])
def test_figure_3_is_no_function_of_the_effective_step(norm, gap):
    """Nearly the same step, reached in one iteration or in two."""
    once, twice = Correction(0.75, 0.25, 1), Correction(0.5, 0.25, 2)
    assert once.step == pytest.approx(twice.step, abs=0.05)
    points = paper("figure3")
    found = points["1", f"{norm} 0.75 0.25"].value - points["2", f"{norm} 0.5 0.25"].value
    assert found == pytest.approx(gap, abs=0.06)


def test_the_settings_are_those_of_table_4():
    for norm, setting in PAPERS["mnist"].items():
        for field in ("lambda1", "lambda2", "iterations"):
            assert getattr(setting, field) == paper("table4")[norm, field].value


def test_every_table_has_all_its_cells():
    sizes = {"table1": 17, "table2": 21, "table3": 21, "table5": 21, "table6": 20}
    for item, rows in sizes.items():
        assert len(paper(item)) == 6 * rows
    assert all(cell.spread is not None for cell in paper("table1").values())


def test_tables_and_figures_are_listed_in_full():
    names = [e.name for e in EXPERIMENTS]
    papers = [*(f"table{k}" for k in range(1, 7)), *(f"figure{k}" for k in range(1, 9))]
    assert names == [*papers, "rivals", "beyond-cifar10", "beyond-mnist", "beyond-imagenet"]
    with pytest.raises(ValueError, match="unknown experiment 'table9'; known: table1"):
        experiment("table9")
