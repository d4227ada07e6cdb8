"""The benchmark: that it compares what it says, and keeps what it measured."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch

from trueup_lab.figures import draw_scaling
from trueup_lab.performance import (
    CASES,
    PerformanceCase,
    TimingRow,
    first_answer,
    read_timings,
    together,
    write_timings,
)
from trueup_lab.performance.cases import BY_NAME
from trueup_lab.performance.networks import NetworkCase
from trueup_lab.performance.rows import absolute, measured_on
from trueup_lab.performance.timing import side_by_side

CPU = torch.device("cpu")


def row(case="scaling", what="correction", n=1000, batch=4, cost=2.0, of=1.0):
    return TimingRow(case, what, "copy", n, batch, cost, of, cost / of, None)


def test_twice_the_work_costs_twice_as_much():
    times = side_by_side({"one": lambda: time.sleep(0.01), "two": lambda: time.sleep(0.02)}, CPU, seconds=0.1)
    assert times["two"] / times["one"] == pytest.approx(2, rel=0.2)


def test_new_rows_take_the_place_of_old_ones_of_their_case(tmp_path):
    path = tmp_path / "rows.csv"
    first = [measured_on(CPU, row()), measured_on(CPU, row("other"))]
    write_timings(path, first)
    assert read_timings(path) == first
    assert first[0].torch == torch.__version__
    write_timings(path, [row(cost=3.0)])
    assert [(r.case, r.cost) for r in read_timings(path)] == [("other", 2.0), ("scaling", 3.0)]


def test_the_correction_of_a_network_is_measured_beside_it():
    network = NetworkCase(BY_NAME["ResNet-20"], 2, rivals=True, threads=1, seconds=0.1)
    rows = list(network.prepare(CPU, "small", 1.5)())
    assert [r.what for r in rows] == ["evidence, no gate", "evidence", "BN batch", "BN mix", "TENT"]
    assert all(0.2 < r.ratio < 50 for r in rows)
    assert [r.reach for r in rows] == [1.5, *[None] * 4]


def test_the_command_prints_and_writes_its_rows(call, tmp_path, monkeypatch):
    measured = [row(), row(n=3000), row(what="correction by sorting")]
    monkeypatch.setattr(
        "trueup_lab.performance.CASES", (PerformanceCase("scaling", "", lambda _device: lambda: iter(measured)),)
    )
    picture = tmp_path / "scaling.png"
    more = [row(batch=b, n=16_384, what=w) for b in (1, 4) for w in ("correction", "correction by sorting")]
    write_timings(tmp_path / "rows.csv", more)
    run = call("bench", "scaling", "--device", "cpu", "--out", tmp_path / "rows.csv")
    assert run.exit_code == 0, run.output
    assert "4 x 3000" in run.output
    assert len(read_timings(tmp_path / "rows.csv")) == 3
    assert draw_scaling([*more, *read_timings(tmp_path / "rows.csv")], picture).stat().st_size > 1000


def test_a_run_that_is_out_of_time_keeps_its_rows_and_is_continued_with_what_is_missing(call, tmp_path, monkeypatch):
    slow = [True]

    def second(_device):
        if slow:
            subprocess.run(["sleep", "60"], check=True)
        return lambda: iter([row("second")])

    cases = (
        PerformanceCase("first", "", lambda _device: lambda: iter([row("first", cost=5.0)])),
        PerformanceCase("broken", "", lambda _device: [][0]),
        PerformanceCase("second", "", second),
    )
    monkeypatch.setattr("trueup_lab.performance.CASES", cases)
    run = call("bench", "--device", "cpu", "--out", tmp_path / "rows.csv", "--limit", "1")
    assert run.exit_code == 0, run.output
    assert "broken: failed, IndexError" in run.output
    assert "stopped after 1 seconds" in run.output
    assert [r.case for r in read_timings(tmp_path / "rows.csv")] == ["first"]
    slow.clear()
    run = call("bench", "first", "second", "--device", "cpu", "--out", tmp_path / "rows.csv", "--missing")
    assert "first" not in run.output
    assert [r.case for r in read_timings(tmp_path / "rows.csv")] == ["first", "second"]


def test_cases_prepare_at_the_same_time_and_are_measured_one_after_the_other(monkeypatch, tmp_path):
    """The processes run a stand-in that writes down when it does what."""
    monkeypatch.setattr(together, "__name__", "stand_in")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "stand_in.py").write_text(
        "import json, sys, time\n"
        "name = sys.argv[2]\n"
        "def note(what): open('notes', 'a').write(f'{what} {name}\\n')\n"
        "if name == 'broken': sys.exit('no such thing')\n"
        "if name == 'not here': import no_such_module\n"
        "note('prepared'), print('ready', flush=True), sys.stdin.readline(), note('begins'), time.sleep(0.2)\n"
        "row = dict(case=name, what='', against='', activations=0, batch=1, cost=1.0, of=1.0, ratio=1.0)\n"
        "note('ends'), print(json.dumps([row]))"
    )
    monkeypatch.chdir(tmp_path)
    cases = [PerformanceCase(name, "", iter, compiles=True) for name in ("a", "broken", "b", "c", "not here")]
    found = {case.name: outcome for case, outcome in together.measure_together(cases, CPU, 3)}
    assert [found[name][0].case for name in "abc"] == ["a", "b", "c"]
    assert str(found["broken"]) == "no such thing"
    assert isinstance(found["not here"], ImportError)  # the command skips it
    *prepared, last = (tmp_path / "notes").read_text().splitlines()
    assert {*prepared[:2]} == {"prepared a", "prepared b"}
    assert [*prepared[2:], last] == ["begins a", "ends a", "begins b", "ends b", "prepared c", "begins c", "ends c"]


def test_a_compiled_network_is_prepared_once(monkeypatch):
    """What `prepare` compiled is what is measured, in the number of threads and the precision of the case."""
    compiled = []
    monkeypatch.setattr(torch, "compile", lambda network, **_: compiled.append(network) or network)
    before = torch.get_num_threads()
    network = NetworkCase(BY_NAME["ResNet-20"], 2, how="compiled", threads=1, seconds=0.1)
    measure = network.prepare(CPU, "small", 1.5)
    assert (len(compiled), torch.get_num_threads()) == (3, before)
    assert [r.what for r in measure()] == ["evidence, no gate", "evidence"]
    assert (len(compiled), torch.get_num_threads()) == (3, before)


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of glibc")
def test_memory_that_is_freed_stays_with_the_process():
    """Each page of memory that comes from the system again is a page fault."""
    program = """
import resource, torch
from trueup_lab.performance.memory import keep_freed_memory

def count():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        torch.zeros(16 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

usual = count()
if not keep_freed_memory():
    raise SystemExit("none")
count()
print(usual, count())
"""
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if found.stderr.strip() == "none":
        pytest.skip("the C library is not glibc")
    usual, kept = map(int, found.stdout.split())
    assert kept < usual / 100


def test_an_unknown_case_is_answered_with_the_known_ones(call):
    run = call("bench", "nothing", "--device", "cpu")
    assert run.exit_code == 2
    assert {"ResNet-20", "batch 128", "scaling"} <= set(run.output.strip().split("of ")[1].split(", "))


def test_the_first_answer_is_measured_with_an_empty_and_then_a_full_cache(monkeypatch):
    def process(folder, _name, _device):
        cold = not (folder / "cache").exists()
        (folder / "cache").mkdir(exist_ok=True)
        (folder / "cache" / "kernel.cubin").touch()
        assert (folder / "model.pt").exists()
        assert (folder / "targets.safetensors").exists()
        return {"correct": 0.5, "uncorrected": 0.25, "corrected": 3.25 if cold else 0.5}

    monkeypatch.setattr(first_answer, "_in_a_new_process", process)
    rows = {r.what: r for r in first_answer.measure_first_answer(BY_NAME["ResNet-20"], CPU)}
    assert {what: (r.cost, r.against, r.reach) for what, r in rows.items()} == {
        "first answer, empty cache": (3.0, "second", 4.0),
        "correct": (0.5, "second", 1.0),
        "first answer, full cache": (0.25, "second", 0.5),
        "compiled kernels": (1, "kernel", None),
    }


def test_every_case_of_the_table_has_a_name_of_its_own():
    names = [case.name for case in CASES]
    assert len(set(names)) == len(names)
    assert sum(name.startswith("ViT-S/16") for name in names) == 8


def test_a_case_knows_its_aim_before_it_is_measured():
    """The table shows the aim of a column that has no rows yet."""
    reach = {case.name: case.reach for case in CASES}
    assert reach["Swin-T, batch 64, bfloat16, compiled"] == 1.15
    assert reach["ViT-S/16, batch 64, bfloat16: peak memory"] == 1.1
    assert reach["calibration, ResNet-20, batch 128"] == 2
    assert reach["scaling"] is None


def test_an_architecture_of_a_missing_package_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchvision.models", None)
    monkeypatch.setitem(sys.modules, "torchvision.models.vision_transformer", None)
    for name in ("DenseNet-121", "ViT-S/16"):
        with pytest.raises(ImportError, match="pip install torchvision"):
            BY_NAME[name].make()


def test_a_cost_without_a_counterpart_is_compared_with_its_unit():
    row = absolute("targets file", "small", "megabyte", 19e6, 20.0, unit=1e6)
    assert (row.ratio, row.cost, row.of) == (19.0, 19e6, 1e6)
