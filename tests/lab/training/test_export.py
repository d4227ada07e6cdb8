"""From runs to files: nothing is lost, nothing is mixed up."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from trueup_lab.data.images import NORMALISATION
from trueup_lab.models import read_models, read_record
from trueup_lab.tables import as_text, read_table
from trueup_lab.training.accuracy import share_correct
from trueup_lab.training.engine import Engine
from trueup_lab.training.export import PAPER, AccuracyRow, accuracy_rows, export, gather, representative
from trueup_lab.training.recipes import Recipe
from trueup_lab.training.run import Choices, train

RECIPE = Recipe(epochs=1, decay_after=(), batch=8)


@pytest.fixture
def runs(tiny, tmp_path):
    """Seeds 0 and 1 of one run, 2 of another."""
    folders = []
    for name, seeds in (("a", (0, 1)), ("b", (2,))):
        train(Choices("digits", "gn", seeds, RECIPE), tiny, tiny, Engine(), out=tmp_path / name)
        folders.append(tmp_path / name)
    return folders


def rows_of(path):
    return read_table(path, AccuracyRow)


def test_seeds_of_several_runs_go_into_one_file_with_their_accuracies(runs, tiny, tmp_path):
    export(gather(runs), models=tmp_path / "models")
    path = tmp_path / "models" / "resnet20-gn-digits.safetensors"
    models, record = read_models(path), read_record(path)
    assert list(models) == [0, 1, 2]
    for seed, model in models.items():
        assert record.accuracy[seed] == share_correct(model, tiny, NORMALISATION["digits"])
    assert record.training["recipe"]["batch"] == 8


def test_the_zoo_gets_the_seed_of_median_accuracy_or_the_one_asked_for(runs, tmp_path):
    trained = gather(runs)
    export(trained, zoo=tmp_path)
    path = tmp_path / "resnet20-gn-digits.safetensors"
    assert list(read_record(path).accuracy) == [representative(trained[0].record)]
    export(trained, zoo=tmp_path, seed=2)
    (model,) = read_models(path).values()
    assert torch.equal(model.fc.bias, trained[0].weights[2]["fc.bias"])
    with pytest.raises(ValueError, match=r"no seed 7; it has \[0, 1, 2\]"):
        export(trained, zoo=tmp_path, seed=7)


def test_the_table_keeps_rows_of_other_norms_and_replaces_its_own(runs, tiny, tmp_path):
    table = tmp_path / "accuracy.csv"
    table.write_text(
        "set,architecture,norm,seed,test_accuracy,paper_mean,paper_deviation\n"
        "digits,resnet20,bn,0,97.00,,\ndigits,resnet20,gn,9,11.00,,\n"
    )
    export(gather(runs), table=table)
    assert [(r.norm, r.seed) for r in rows_of(table)] == [("bn", 0), ("gn", 0), ("gn", 1), ("gn", 2)]


def test_rows_stand_beside_the_papers_numbers(runs):
    record = replace(gather(runs)[0].record, set="cifar10", norm="frn", accuracy={0: 0.87654})
    assert as_text(accuracy_rows(record)) == "cifar10,resnet20,frn,0,87.65,87.80,0.38\n"
    other = accuracy_rows(replace(record, norm="bn", architecture="vgg"))[0]
    assert (other.architecture, other.paper_mean) == ("vgg", None)
    assert {norm for _, norm in PAPER} == {"bn", "gn", "frn"}


def test_the_same_seed_twice_and_other_recipes_are_refused(runs, tiny, tmp_path):
    with pytest.raises(ValueError, match=r"seeds \[0, 1\] of resnet20-gn-digits"):
        gather([*runs, runs[0]])
    other = Choices("digits", "gn", (5,), replace(RECIPE, rate=0.01))
    train(other, tiny, tiny, Engine(), out=tmp_path / "other")
    with pytest.raises(ValueError, match="another recipe"):
        gather([*runs, tmp_path / "other"])


def test_the_command_writes_the_requested_files_and_names_them(call, runs, tmp_path):
    result = call("export", *runs, "--models", tmp_path / "m", "--table", tmp_path / "t.csv")
    assert result.exit_code == 0, result.output
    assert "resnet20-gn-digits.safetensors  1.6" in result.output
    assert len(rows_of(tmp_path / "t.csv")) == 3
    missing = call("export", tmp_path / "nowhere", "--table", tmp_path / "t.csv")
    assert missing.exit_code == 2
    assert "no training run at" in missing.output
