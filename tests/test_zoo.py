"""The zoo of models: its file, the counts that the document takes from it, and that it notices what goes wrong."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from architectures import make

ROOT = Path(__file__).parents[1]


PARTS = ("zoo", "zoo_models", "zoo_table", "zoo_trial", "zoo_workers")


@pytest.fixture
def parts(monkeypatch):
    """The modules of the zoo, by their names."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    yield {name: importlib.import_module(name) for name in PARTS}
    for name in [name for name in sys.modules if name.startswith(PARTS)]:
        del sys.modules[name]


@pytest.fixture
def table(parts):
    return parts["zoo_table"]


@pytest.fixture
def trial(parts):
    return parts["zoo_trial"]


@pytest.fixture
def case(parts):
    return parts["zoo_models"].case


@pytest.fixture
def rows(table):
    return table.read(table.RESULTS)


def test_the_table_of_the_document_is_that_of_the_file(table, rows):
    text = table.DOCUMENT.read_text()
    assert table.document(text, rows) == text, "run benchmarks/zoo.py --document"


def test_all_but_a_few_models_work(table, rows):
    for source, least in (("timm", 110), ("torchvision", 39), ("transformers", 12)):
        here = [row for row in rows if row["source"] == source and row["error"] != "took too long"]
        assert sum(map(table.works, here)) >= least
        assert sum(not table.works(row) for row in here) <= 2
    assert sum(row["compiles"] == row["exports"] == "yes" for row in rows) >= 20


def test_a_model_that_works_has_a_row_that_says_so(table, trial, case):
    tried = case.ZooCase("own", "resnet", "resnet", lambda: (make("resnet"), case.images(3, 32, 32), "32 x 32"))
    row = {key: str(value) for key, value in trial.measure(tried).items()}
    row = dict.fromkeys(trial.COLUMNS, "") | row
    assert table.works(row), row
    assert (row["activations"], row["norms"], row["traced"]) == ("7", "6", "True")


@pytest.mark.parametrize(
    ("change", "value"),
    [
        ("error", "ValueError: no"),
        ("finite", "False"),
        ("state_dict", "False"),
        ("evidence", "changes nothing"),
        ("evidence_difference", "0.5"),
        ("compiles", "no: graph break"),
    ],
)
def test_a_row_with_one_thing_wrong_does_not_count(table, rows, change, value):
    good = next(
        row for row in rows if table.works(row) and row["evidence"] == "runs" and float(row["own_difference"]) < 1e-3
    )
    assert not table.works(good | {change: value})


def test_an_answer_that_depends_on_the_batch_is_measured(trial, case):
    class Leaks(nn.Module):
        def forward(self, x):
            return (x + x.mean(dim=0)).mean((2, 3))

    assert trial.alone_and_together(Leaks(), case.images(3, 8, 8)) > 0.1
    assert trial.alone_and_together(nn.Flatten(), case.images(3, 8, 8)) == 0


def test_a_model_that_fails_has_a_row_with_the_reason(trial, case):
    def broken():
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU()), case.images(3, 8, 8), "8 x 8"

    row = trial.measure(case.ZooCase("own", "broken", "broken", broken))
    assert row["error"].startswith("RuntimeError: ")
    assert trueup.__version__ in trial.versions()
    assert torch.__version__.split("+")[0] in trial.versions()


def test_the_batch_norms_of_a_random_model_get_the_statistics_of_the_inputs(trial, case):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, momentum=0.1)).eval()
    trial.settle(model, case.images(3, 16, 16))
    out = trial.output(model, case.images(3, 16, 16))
    torch.testing.assert_close(out.mean((0, 2, 3)), torch.zeros(8), atol=1e-5, rtol=0)
    torch.testing.assert_close(out.std((0, 2, 3)), torch.ones(8), atol=1e-2, rtol=0)
    assert not model[1].training
    assert model[1].momentum == 0.1


def test_what_is_done_is_not_done_again_and_compiling_comes_last(parts, monkeypatch, table):
    zoo, case = parts["zoo"], parts["zoo_models"].ZooCase
    monkeypatch.setattr(zoo, "SOURCES", {"timm": lambda: [case("timm", "f", name, None) for name in "abc"]})
    options = argparse.Namespace(source=None, only="", missing=False, again=False, compile="all")
    now = parts["zoo_trial"].versions()
    done = {"source": "timm", "model": "b", "versions": now, "error": "", "compiles": "yes"}
    jobs = [(job.model, job.portability) for job in zoo.jobs_of(options, [done], now)]
    assert jobs == [("a", False), ("c", False), ("a", True), ("c", True)]
    old = done | {"versions": now.replace(torch.__version__.split("+")[0], "1.0")}
    assert len(zoo.jobs_of(options, [old], now)) == 6
