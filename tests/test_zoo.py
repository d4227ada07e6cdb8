"""The zoo of models: its file, the counts that the document takes from it, and that it notices what goes wrong."""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import trueup
from architectures import make

ROOT = Path(__file__).parents[1]


@pytest.fixture
def zoo(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import zoo

    yield zoo
    sys.modules.pop("zoo")


@pytest.fixture
def rows(zoo):
    with zoo.RESULTS.open() as file:
        return list(csv.DictReader(file))


def test_the_table_of_the_document_is_that_of_the_file(zoo, rows):
    text = zoo.DOCUMENT.read_text()
    assert zoo.document(text, rows) == text, "run benchmarks/zoo.py --document"


def test_all_but_a_few_models_work(zoo, rows):
    for source, least in (("timm", 110), ("torchvision", 39), ("transformers", 12)):
        here = [row for row in rows if row["source"] == source and row["error"] != "took too long"]
        assert sum(map(zoo.works, here)) >= least
        assert sum(not zoo.works(row) for row in here) <= 2
    assert sum(row["compiles"] == row["exports"] == "yes" for row in rows) >= 20


def test_a_model_that_works_has_a_row_that_says_so(zoo):
    case = zoo.Case("own", "resnet", "resnet", lambda: (make("resnet"), zoo.images(3, 32, 32), "32 x 32"))
    row = {key: str(value) for key, value in zoo.measure(case, compile_too=False, device="cpu").items()}
    row = dict.fromkeys(zoo.COLUMNS, "") | row
    assert zoo.works(row), row
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
def test_a_row_with_one_thing_wrong_does_not_count(zoo, rows, change, value):
    good = next(
        row for row in rows if zoo.works(row) and row["evidence"] == "runs" and float(row["own_difference"]) < 1e-3
    )
    assert not zoo.works(good | {change: value})


def test_an_answer_that_depends_on_the_batch_is_measured(zoo):
    class Leaks(nn.Module):
        def forward(self, x):
            return (x + x.mean(dim=0)).mean((2, 3))

    assert zoo.alone_and_together(Leaks(), zoo.images(3, 8, 8)) > 0.1
    assert zoo.alone_and_together(nn.Flatten(), zoo.images(3, 8, 8)) == 0


def test_a_model_that_fails_has_a_row_with_the_reason(zoo):
    def broken():
        return nn.Sequential(nn.Linear(3, 3), nn.ReLU()), zoo.images(3, 8, 8), "8 x 8"

    row = zoo.measure(zoo.Case("own", "broken", "broken", broken), compile_too=False, device="cpu")
    assert row["error"].startswith("RuntimeError: ")
    assert trueup.__version__ in zoo.versions()
    assert torch.__version__.split("+")[0] in zoo.versions()
