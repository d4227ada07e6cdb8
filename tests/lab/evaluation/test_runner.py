"""The runner: every row once, for every batch size, interruption and number of processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import trueup
import trueup_lab
from trueup_lab.data import digits
from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import NORMALISATION
from trueup_lab.evaluation import (
    STREAMS,
    BatchStatistics,
    Benchmark,
    Case,
    Correct,
    Mixed,
    Needs,
    Plan,
    Subject,
    Tent,
    Uncorrected,
    evaluate,
    read_rows,
    read_subjects,
)
from trueup_lab.tables import append_rows

from .conftest import small_network

PLAN = Plan(
    (Uncorrected(), Correct(1.0, 0.2), Mixed(), BatchStatistics(), Tent(), Tent(continual=True)),
    only=("identity", "fog", "stripe", "impulse_noise"),
    images=24,
    batch=10,
    calibrate=50,
)


def numbers(path):
    """The rows without what differs from run to run."""
    return sorted((*row.key, row.accuracy, row.calibration_error) for row in read_rows(path))


@pytest.fixture
def run(tmp_path, subject):
    def one(plan=PLAN, out="rows.csv", subjects=(subject,), **options):
        return evaluate(subjects, plan, tmp_path / out, targets=tmp_path / "targets", **options)

    return one


def test_every_method_and_set_has_a_row_with_its_provenance(run, tmp_path):
    assert run()
    rows = read_rows(tmp_path / "rows.csv")
    assert len(rows) == 6 * 4
    assert {row.corruption: (row.severity, row.data) for row in rows} == {
        "identity": (0, "clean"),
        "fog": (5, "generated"),
        "stripe": (0, "generated"),
        "impulse_noise": (4, "generated"),
    }
    by_method = {row.method: row for row in rows if row.corruption == "fog"}
    assert (by_method["bn-batch"].stream, by_method["bn-batch"].batch) == ("corruption", 10)
    assert (by_method["bn-mix"].stream, by_method["bn-mix"].batch) == ("any", 0)
    assert by_method["correct:lambda1=1.0,lambda2=0.2"].calibrated == 50
    assert by_method["bn-mix"].calibrated == 0
    assert by_method["tent"].needs == "batch norm, batch, gradients, memory"
    assert by_method["tent"].torch == torch.__version__
    assert all(row.ms > 0 and row.checkpoint == "00000000" and row.images == 24 for row in rows)


def test_accuracy_is_that_of_the_model_on_the_corrupted_digits(tmp_path):
    """The oracle: the images corrupted and classified here, in one go."""
    (subject,) = read_subjects("resnet20-bn-digits")
    plan = Plan((Uncorrected(),), only=("fog", "shear"), images=40)
    evaluate([subject], plan, tmp_path / "rows.csv", targets=tmp_path)
    chosen = torch.arange(40) * 9  # spread over the 360
    test = digits.load("test")
    for row in read_rows(tmp_path / "rows.csv"):
        made = corrupt(test.images[chosen], row.corruption, row.severity, family="mnist-c", indices=chosen)
        with torch.inference_mode():
            p = subject.model(NORMALISATION["digits"](made)).softmax(1)
        right = p.argmax(1) == test.labels[chosen]
        assert row.accuracy == pytest.approx(100 * right.float().mean().item(), abs=1e-3)
        gaps = torch.zeros(15).index_add_(
            0, ((p.max(1).values * 15).ceil() - 1).long(), right.float() - p.max(1).values
        )
        assert row.calibration_error == pytest.approx(100 * gaps.abs().sum().item() / 40, abs=1e-2)
    assert len({row.accuracy for row in read_rows(tmp_path / "rows.csv")}) == 2


def test_nothing_is_done_twice(run, tmp_path, monkeypatch):
    run(replace(PLAN, methods=PLAN.methods[:2]))
    before = (tmp_path / "rows.csv").read_text()
    monkeypatch.setattr(Benchmark, "_clean", lambda *_: pytest.fail("an image was made again"))
    assert run(replace(PLAN, methods=PLAN.methods[:2]))
    assert (tmp_path / "rows.csv").read_text() == before


@pytest.mark.parametrize("after", [0, 1, 5, 11, 17, 20])
def test_a_killed_run_goes_on_to_the_same_rows(run, tmp_path, after):
    class KilledError(Exception):
        pass

    def kill(progress):
        if progress.done > after:
            raise KilledError

    with pytest.raises(KilledError):
        run(report=kill)
    with (tmp_path / "rows.csv").open("a") as file:
        file.write("small,0,unc")  # the kill cut a line short
    with pytest.warns(UserWarning, match="the last line was damaged"):
        assert run()
    run(out="whole.csv")
    assert numbers(tmp_path / "rows.csv") == numbers(tmp_path / "whole.csv")
    assert len({row.key for row in read_rows(tmp_path / "rows.csv")}) == len(read_rows(tmp_path / "rows.csv"))


def test_a_time_limit_stops_between_passes_and_many_calls_come_to_the_end(run, tmp_path):
    @dataclass(frozen=True)
    class Slow:
        name = "slow"
        needs = Needs()

        def prepare(self, model, _targets):
            def slow(x):
                time.sleep(0.3)
                return model(x)

            return slow

    plan = replace(PLAN, methods=(Slow(),))
    calls, counts = 0, []
    while not run(plan, time_limit=0.8):
        calls += 1
        counts.append(len(read_rows(tmp_path / "rows.csv")))
        assert calls < 8
    assert counts == sorted(set(counts))  # each call adds rows
    assert 0 < counts[0] < 4
    assert len(read_rows(tmp_path / "rows.csv")) == 4


@pytest.mark.parametrize("pass_size", [1, 7, 24])
def test_a_stateless_method_gives_the_same_rows_for_any_batch_size(run, tmp_path, pass_size):
    stateless = replace(PLAN, methods=PLAN.methods[:3])
    run(stateless)
    run(stateless, out="other.csv", pass_size=pass_size)
    for one, other in zip(numbers(tmp_path / "rows.csv"), numbers(tmp_path / "other.csv"), strict=True):
        assert one[:-1] == other[:-1]
        assert one[-1] == pytest.approx(other[-1], abs=1e-3)


def test_a_stateless_method_gives_the_same_number_in_all_four_streams(tmp_path):
    """Said to depend on the batch, so that the runner really makes it see each stream; and a rival that does."""

    @dataclass(frozen=True)
    class Pretending(Correct):
        needs = Needs(targets=True, batch=True)

    (subject,) = read_subjects("resnet20-bn-digits")
    found = {}
    for stream in STREAMS:
        plan = Plan((Pretending(1.0, 0.2), BatchStatistics()), stream=stream, batch=8, images=24, calibrate=40)
        plan = replace(plan, only=("fog", "impulse_noise"))
        evaluate([subject], plan, tmp_path / f"{stream}.csv", targets=tmp_path)
        found[stream] = {(row.method, row.corruption): row.accuracy for row in read_rows(tmp_path / f"{stream}.csv")}
    for corruption in plan.only:
        assert len({found[stream]["correct:lambda1=1.0,lambda2=0.2", corruption] for stream in STREAMS}) == 1
    assert len({found[stream]["bn-batch", "fog"] for stream in STREAMS}) > 1


def test_a_batch_in_the_single_stream_is_one_image(run, tmp_path, subject):
    """Batch statistics of one image are mixing with no prior."""
    run(replace(PLAN, methods=(BatchStatistics(),), stream="single"))
    run(replace(PLAN, methods=(Mixed(0),)), out="mixed.csv")
    both = [{r.corruption: r.accuracy for r in read_rows(tmp_path / f)} for f in ("rows.csv", "mixed.csv")]
    assert both[0] == both[1]
    assert {row.batch for row in read_rows(tmp_path / "rows.csv")} == {1}


def test_memory_is_reset_before_each_set_or_never(tmp_path, subject):
    """A network that counts what it has seen says so."""
    seen = []

    class Counter:
        def __init__(self):
            self.reset()

        def reset(self):
            self.count = 0

        def __call__(self, x):
            self.count += len(x)
            seen.append(self.count)
            return torch.zeros(len(x), 10)

    @dataclass(frozen=True)
    class Counting:
        name: str
        continual: bool
        needs = Needs(batch=True, memory=True)

        def prepare(self, _model, _targets):
            return Counter()

    plan = replace(PLAN, methods=(Counting("forgets", False),), only=("identity", "fog"))
    evaluate([subject], plan, tmp_path / "a.csv", targets=tmp_path)
    assert seen == [10, 20, 24, 10, 20, 24]
    seen.clear()
    evaluate([subject], replace(plan, methods=(Counting("keeps", True),)), tmp_path / "a.csv", targets=tmp_path)
    assert seen == [10, 20, 24, 34, 44, 48]


def test_a_continual_method_is_measured_again_in_another_sequence(run, tmp_path):
    run(replace(PLAN, methods=(Tent(continual=True),)))
    run(replace(PLAN, methods=(Tent(continual=True),), only=("fog",)))
    assert len(read_rows(tmp_path / "rows.csv")) == 5


def test_methods_that_a_model_cannot_take_are_left_out(run, tmp_path):
    plain = torch.nn.Sequential(torch.nn.Conv2d(1, 10, 28), torch.nn.ReLU(), torch.nn.Flatten())
    without = Subject("plain", 0, "digits", "none", NORMALISATION["digits"], "1", plain)
    run(subjects=[without], plan=replace(PLAN, only=("fog",)))
    assert [row.method for row in read_rows(tmp_path / "rows.csv")] == [
        "uncorrected",
        "correct:lambda1=1.0,lambda2=0.2",
    ]


def test_a_damaged_calibration_is_made_again_and_one_of_another_version_not_used(run, tmp_path):
    plan = replace(PLAN, methods=(Correct(1.0, 0.2),), only=("fog",))
    run(plan)
    (path,) = (tmp_path / "targets").iterdir()
    assert trueup.__version__ in path.name
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{path.name} is not a trueup targets file, or is damaged"):
        run(plan, out="again.csv")
    assert numbers(tmp_path / "again.csv") == numbers(tmp_path / "rows.csv")


def test_another_checkpoint_is_another_row(run, tmp_path, subject):
    plan = replace(PLAN, methods=(Uncorrected(),), only=("fog",))
    run(plan)
    run(plan, subjects=[replace(subject, checkpoint="11111111", model=small_network(1))])
    assert len(read_rows(tmp_path / "rows.csv")) == 2


def test_a_foreign_file_is_refused_and_left_alone(run, tmp_path):
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3,")
    with pytest.raises(ValueError, match="its columns are a, b"):
        run()
    assert (tmp_path / "rows.csv").read_text() == "a,b\n1,2\n3,"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"only": ("smog",)}, "'smog' is not a corruption of mnist-c"),
        ({"images": 400}, "images=400: digits has 360 test images"),
        ({"stream": "random"}, "unknown stream"),
        ({"batch": 0}, "at least one image"),
        ({"methods": (Mixed(8), Mixed(8.0))}, "two have the same name"),
    ],
)
def test_nonsense_is_refused(run, changes, message):
    with pytest.raises(ValueError, match=message):
        run(replace(PLAN, **changes))


def test_rows_survive_the_file(run, tmp_path):
    run(replace(PLAN, methods=(Uncorrected(),)))
    rows = read_rows(tmp_path / "rows.csv")
    (tmp_path / "copy.csv").write_text((tmp_path / "rows.csv").read_text().splitlines(keepends=True)[0])
    append_rows(tmp_path / "copy.csv", rows)
    assert read_rows(tmp_path / "copy.csv") == rows


def test_a_mixed_stream_mixes_the_corruptions_of_one_severity():
    cases = [Case("identity", 0), Case("fog", 1), Case("snow", 1), Case("fog", 3)]
    benchmark = Benchmark("digits")
    assert benchmark.groups(benchmark.cases()) == [[Case("identity", 0)], benchmark.cases()[1:]]
    benchmark.family = "cifar10-c"
    assert [len(group) for group in benchmark.groups(cases)] == [1, 2, 1]


SCRIPT = """
import sys
from test_runner_plan import PLAN
from evaluation.conftest import small_network
from trueup_lab.data.images import NORMALISATION
from trueup_lab.evaluation import Subject, evaluate
from trueup_lab.processes import together

subjects = [Subject("small", s, "digits", "bn", NORMALISATION["digits"], "00000000", small_network(s)) for s in (0, 1)]
with together() as processes:
    assert processes.world == int(sys.argv[2])
    where = {"out": f"{sys.argv[1]}/{sys.argv[2]}.csv", "targets": f"{sys.argv[1]}/targets{sys.argv[2]}"}
    assert not evaluate(subjects, PLAN, **where, processes=processes, time_limit=0)  # all stop together
    assert evaluate(subjects, PLAN, **where, processes=processes)
"""


def test_two_processes_write_the_rows_of_one_and_calibrate_alike(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "test_runner_plan.py").write_text("from evaluation.test_runner import PLAN\n")
    sources = [tmp_path, Path(__file__).parents[1], *(Path(p.__file__).parents[1] for p in (trueup, trueup_lab))]
    environment = {**os.environ, "PYTHONPATH": ":".join(map(str, sources)), "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for world, command in ((1, [sys.executable]), (2, launch)):
        subprocess.run(
            [*command, str(tmp_path / "script.py"), str(tmp_path), str(world)],
            check=True,
            capture_output=True,
            timeout=120,
            env=environment,
        )
    assert len(read_rows(tmp_path / "1.csv")) == 2 * 6 * 4
    assert numbers(tmp_path / "1.csv") == numbers(tmp_path / "2.csv")
    for path in (tmp_path / "targets1").iterdir():
        one, two = (trueup.Targets.load(tmp_path / f"targets{world}" / path.name) for world in (1, 2))
        assert one.images == two.images == 50
        assert one.activations.keys() == two.activations.keys()
        for name, target in one.activations.items():
            torch.testing.assert_close(target.target, two.activations[name].target)
