"""CSV files of dataclass rows."""

from __future__ import annotations

import csv
import operator
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from trueup_lab.evaluation import EvaluationRow
from trueup_lab.performance import TimingRow
from trueup_lab.tables import append_rows, as_text, number, read_table, start_table, write_table

RESULTS = Path(__file__).parents[2] / "results"


@dataclass(frozen=True)
class Sample:
    name: str
    count: int
    share: float | None = number(".2f")
    flag: bool = False


ROWS = [Sample('a, "b"', 3, 0.125, True), Sample("c", -1, None)]


def test_rows_survive_the_file_in_their_formats(tmp_path):
    write_table(tmp_path / "t.csv", Sample, ROWS)
    assert (tmp_path / "t.csv").read_text() == 'name,count,share,flag\n"a, ""b""",3,0.12,True\nc,-1,,False\n'
    assert read_table(tmp_path / "t.csv", Sample) == [Sample('a, "b"', 3, 0.12, True), ROWS[1]]
    assert read_table(tmp_path / "missing.csv", Sample) == []


def test_a_table_is_started_once_and_appended_to(tmp_path):
    path = tmp_path / "new" / "t.csv"
    assert start_table(path, Sample) == []
    append_rows(path, ROWS[1:])
    assert start_table(path, Sample) == ROWS[1:]
    append_rows(path, ROWS[1:])
    assert read_table(path, Sample) == ROWS[1:] * 2


def test_appending_needs_a_started_table(tmp_path):
    with pytest.raises(FileNotFoundError):
        append_rows(tmp_path / "t.csv", ROWS)


def test_a_line_that_was_cut_short_is_skipped_and_then_removed(tmp_path):
    path = tmp_path / "t.csv"
    write_table(path, Sample, ROWS)
    whole = path.read_text()
    path.write_text(whole + "d,4")
    assert len(read_table(path, Sample)) == 2
    with pytest.warns(UserWarning, match=r"t\.csv: the last line was damaged.*2 rows are left"):
        start_table(path, Sample)
    assert path.read_text() == whole


@pytest.mark.parametrize("line", ["d,4", "d,4,0.5,Tr", "d,four,0.5,True", "d,4,0.5,True,5", "\0\0,\0"])
def test_a_damaged_last_line_is_mended_with_a_word(tmp_path, line):
    path = tmp_path / "t.csv"
    write_table(path, Sample, ROWS)
    whole = path.read_text()
    path.write_text(f"{whole}{line}\n")
    with pytest.raises(ValueError, match=r"t\.csv, line 4: damaged .*remove this line"):
        read_table(path, Sample)
    with pytest.warns(UserWarning, match="the last line was damaged"):
        assert len(start_table(path, Sample)) == 2
    assert path.read_text() == whole


def test_a_damaged_line_in_the_middle_is_named_and_left_alone(tmp_path):
    path = tmp_path / "t.csv"
    write_table(path, Sample, ROWS)
    path.write_text(path.read_text().replace("c,-1", "c,d,4,-1") + "e,5,,False\n")
    before = path.read_bytes()
    for read in (read_table, start_table):
        with pytest.raises(ValueError, match=r"t\.csv, line 3: damaged \(6 cells, expected 4\); remove this line"):
            read(path, Sample)
    assert path.read_bytes() == before


def test_half_a_line_of_a_killed_process_is_not_continued(tmp_path):
    path = tmp_path / "t.csv"
    write_table(path, Sample, ROWS)
    whole = path.read_text()
    path.write_text(whole + "d,4")
    append_rows(path, ROWS[1:])
    assert path.read_text() == whole + "c,-1,,False\n"


def test_rows_that_are_there_by_now_are_not_added_again(tmp_path):
    path = tmp_path / "t.csv"
    start_table(path, Sample)
    assert append_rows(path, ROWS[:1], key=lambda row: row.name) == ROWS[:1]
    assert append_rows(path, ROWS, key=lambda row: row.name) == ROWS[1:]
    assert read_table(path, Sample) == [Sample('a, "b"', 3, 0.12, True), ROWS[1]]


def test_only_rows_added_since_are_read_for_keys(tmp_path, monkeypatch):
    path, key = tmp_path / "t.csv", operator.attrgetter("name")
    start_table(path, Sample)
    append_rows(path, ROWS, key=key)
    append_rows(path, ROWS[:1])  # another process
    parsed = []
    monkeypatch.setattr("trueup_lab.tables._parse", lambda text, kind: parsed.append(text) or text)
    assert append_rows(path, ROWS, key=key) == []
    assert len(parsed) == 3 * 4  # all rows, once
    assert append_rows(path, ROWS, key=key) == []
    assert len(parsed) == 3 * 4
    append_rows(path, [Sample("new", 1, None)])
    assert append_rows(path, [Sample("new", 2, None)], key=key) == []
    assert len(parsed) == 4 * 4
    path.unlink()
    monkeypatch.undo()
    start_table(path, Sample)
    assert append_rows(path, ROWS, key=key) == ROWS  # another file


def test_on_a_disk_that_fills_up_an_append_adds_all_or_nothing(tmp_path):
    """A limit on the size of files cuts a write short, as a full disk does."""
    resource = pytest.importorskip("resource")
    path = tmp_path / "t.csv"
    write_table(path, Sample, ROWS)
    whole = path.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 20, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            append_rows(path, ROWS * 3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert path.read_bytes() == whole


APPEND = """
import dataclasses, sys
from trueup_lab.tables import append_rows

@dataclasses.dataclass(frozen=True)
class Named:
    name: str
    count: int

for count in range(20):
    append_rows(sys.argv[1], [Named("shared", count), Named(sys.argv[2], count)], key=dataclasses.astuple)
"""


@dataclass(frozen=True)
class Named:
    name: str
    count: int


def test_processes_that_append_at_the_same_time_lose_and_double_nothing(tmp_path):
    path = tmp_path / "t.csv"
    start_table(path, Named)
    processes = [subprocess.Popen([sys.executable, "-c", APPEND, path, name]) for name in "abc"]
    assert [process.wait() for process in processes] == [0, 0, 0]
    found = [(row.name, row.count) for row in read_table(path, Named)]
    assert sorted(found) == sorted((name, count) for name in ("a", "b", "c", "shared") for count in range(20))
    assert [entry.name for entry in tmp_path.iterdir()] == ["t.csv"]


def test_an_append_waits_until_another_process_has_finished_its_own(tmp_path, waits):
    path = tmp_path / "t.csv"
    start_table(path, Sample)
    assert waits(path, lambda: append_rows(path, ROWS))
    assert waits(path, lambda: start_table(path, Sample))
    assert len(read_table(path, Sample)) == 2


def test_other_columns_are_refused_and_the_file_is_left_alone(tmp_path):
    path = tmp_path / "t.csv"
    path.write_text("a,b\n1,")
    with pytest.raises(ValueError, match="does not hold rows of Sample: its columns are a, b, expected name, count"):
        start_table(path, Sample)
    assert path.read_text() == "a,b\n1,"


@pytest.mark.parametrize(
    ("pattern", "kind"), [("*-c.csv", EvaluationRow), ("rivals.csv", EvaluationRow), ("performance_*.csv", TimingRow)]
)
def test_committed_results_are_read_and_would_be_written_as_they_are(pattern, kind):
    paths = list(RESULTS.glob(pattern))
    assert paths
    for path in paths:
        lines = path.read_text().split("\n", 1)[1]
        assert as_text(read_table(path, kind)) == lines


MEASUREMENTS = {
    "accuracy": ("set", "architecture", "norm", "seed"),
    "bench": ("set", "model", "seed", "method", "corruption", "severity"),
    "budget": ("model", "seed", "asked", "of"),
    "choosing": ("model", "seed", "rule"),
    "corruptions_*": ("family", "corruption", "severity", "device"),
    "deployment": ("route", "batch", "rule", "unit"),
    "detection": ("model", "seed", "corruption", "severity"),
    "fast_path": ("network", "corruption", "severity"),
    "monitor_*": ("model", "rule", "batch"),
    "performance_*": ("case", "what", "activations", "batch"),
    "quantised": ("model", "quantisation", "order", "corruption", "severity", "rule"),
    "readings": ("network", "method", "corruption", "severity"),
    "settings": ("model", "seed", "rule"),
    "training_speed": ("norm", "models", "variant"),
    "zoo": ("source", "model"),
    "*-c": ("model", "seed", "method", "stream", "batch", "corruption", "severity", "images", "data", "calibrated"),
}


@pytest.mark.parametrize("name", MEASUREMENTS)
def test_no_measurement_is_committed_twice(name):
    """Tables count rows as models, so a second row of one measurement would count as another model."""
    paths = list(RESULTS.glob(f"{name}.csv"))
    assert paths
    for path in paths:
        with path.open(encoding="utf-8", newline="") as file:
            found = Counter(tuple(row[column] for column in MEASUREMENTS[name]) for row in csv.DictReader(file))
        assert [key for key, count in found.items() if count > 1] == []
