"""Runs stop, crash and go on without leaving a trace in the models."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import pytest
import torch

from trueup import atomic
from trueup.atomic import write_atomically
from trueup_lab.data.images import NORMALISATION
from trueup_lab.models.files import shipped
from trueup_lab.training.accuracy import share_correct
from trueup_lab.training.checkpoint import load_checkpoint, save_checkpoint
from trueup_lab.training.engine import Engine
from trueup_lab.training.recipes import Recipe
from trueup_lab.training.run import Choices, TrainingProgress, load_run, train

CHOICES = Choices("digits", "bn", (0, 4), Recipe(epochs=3, decay_after=(2,), batch=8, crop_padding=1))


class CrashError(Exception):
    pass


def crash_after(epoch):
    def report(progress: TrainingProgress) -> None:
        if progress.epoch == epoch:
            raise CrashError

    return report


def test_a_crashed_run_goes_on_bit_for_bit(tiny, tmp_path):
    train(CHOICES, tiny, tiny, Engine(), out=tmp_path / "whole")
    with pytest.raises(CrashError):
        train(CHOICES, tiny, tiny, Engine(), out=tmp_path / "crashed", report=crash_after(1))
    seen = []
    train(CHOICES, tiny, tiny, Engine(), out=tmp_path / "crashed", report=seen.append)
    assert [progress.epoch for progress in seen] == [2, 3]
    whole, crashed = (load_checkpoint(tmp_path / n / "checkpoint.safetensors") for n in ("whole", "crashed"))
    assert whole[1] == crashed[1]
    assert whole[0].keys() == crashed[0].keys()
    for key, value in whole[0].items():
        assert torch.equal(value, crashed[0][key]), key
    histories = [(tmp_path / n / "history.csv").read_text() for n in ("whole", "crashed")]
    assert histories[0] == histories[1]
    assert len(histories[0].splitlines()) == 1 + 3 * 2


def test_a_finished_run_is_not_trained_further(tiny, tmp_path):
    models = train(CHOICES, tiny, tiny, Engine(), out=tmp_path)
    seen = []
    again = train(CHOICES, tiny, tiny, Engine(), out=tmp_path, report=seen.append)
    assert seen == []
    for seed, model in models.items():
        for key, value in model.state_dict().items():
            assert torch.equal(value, again[seed].state_dict()[key]), key


def test_a_time_limit_stops_after_an_epoch_and_the_next_call_goes_on(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup_lab.training.run.RESERVE", 9000)
    stops = []
    assert train(CHOICES, tiny, tiny, Engine(), out=tmp_path, time_limit=900, report=stops.append) is None
    assert [(p.epoch, p.stopped) for p in stops] == [(1, True)]
    with pytest.raises(ValueError, match="at epoch 1 of 3"):
        load_run(tmp_path)
    assert set(train(CHOICES, tiny, tiny, Engine(), out=tmp_path, time_limit=36000)) == {0, 4}


def test_a_time_limit_without_a_folder_is_refused(tiny):
    with pytest.raises(ValueError, match="needs a folder"):
        train(CHOICES, tiny, tiny, Engine(), time_limit=1)


def test_a_time_limit_that_is_too_short_for_an_epoch_is_an_error(tiny, tmp_path):
    with pytest.raises(ValueError, match=r"the time limit of 0 s ended epoch 1 after 1 of \d+ steps.*more time"):
        train(CHOICES, tiny, tiny, Engine(), out=tmp_path, time_limit=0)
    assert list(tmp_path.iterdir()) == []


def test_the_checkpoint_of_another_run_is_refused_by_what_differs(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup_lab.training.run.RESERVE", 9000)
    train(CHOICES, tiny, tiny, Engine(), out=tmp_path, time_limit=900)
    other = replace(CHOICES, norm="gn", recipe=replace(CHOICES.recipe, rate=0.05))
    with pytest.raises(ValueError, match=r"norm bn there, gn asked for; rate 0.1 there, 0.05 asked for"):
        train(other, tiny, tiny, Engine(), out=tmp_path)


def test_a_trained_model_has_learned_and_the_record_says_how_well(tiny, tmp_path):
    choices = replace(CHOICES, seeds=(0,), recipe=replace(CHOICES.recipe, epochs=12, decay_after=(9,)))
    model = train(choices, tiny, tiny, Engine(), out=tmp_path)[0]
    assert not model.training
    right = share_correct(model, tiny, NORMALISATION["digits"])
    assert right > 0.9
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["test_accuracy"] == {"0": right}
    assert record["choices"]["recipe"]["momentum"] == 0.9
    assert record["versions"]["torch"] == torch.__version__
    assert record["engine"]["compile"] == "none"


def test_a_run_reads_back_as_the_models_it_returned(tiny, tmp_path):
    models = train(CHOICES, tiny, tiny, Engine(), out=tmp_path)
    choices, weights, record = load_run(tmp_path)
    assert choices == CHOICES
    assert record["epoch"] == 3
    for seed, model in models.items():
        for key, value in shipped(weights[seed]).items():
            assert torch.equal(value.float(), model.state_dict()[key]), key


def test_a_run_that_crashed_before_its_last_test_says_how_to_make_it_up(tiny, tmp_path):
    with pytest.raises(CrashError):
        train(CHOICES, tiny, tiny, Engine(), out=tmp_path, report=crash_after(3))
    with pytest.raises(ValueError, match=r"no test accuracy of seeds \[0, 4\]; run the same train command again"):
        load_run(tmp_path)
    train(CHOICES, tiny, tiny, Engine(), out=tmp_path)
    assert set(load_run(tmp_path)[2]["test_accuracy"]) == {"0", "4"}


def test_shipped_weights_are_float16_and_vectors_float32():
    types = {k: v.dtype for k, v in shipped({"m": torch.ones(2, 2), "v": torch.full((2,), 1e6)}).items()}
    assert types == {"m": torch.float16, "v": torch.float32}


def test_a_crash_while_writing_leaves_the_old_checkpoint(tmp_path, monkeypatch):
    path = tmp_path / "checkpoint.safetensors"
    save_checkpoint(path, {"a": torch.ones(3)}, {"epoch": 1})

    def fail(_):
        raise OSError("disk full")

    monkeypatch.setattr(atomic.os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, b"half of a")
    tensors, facts = load_checkpoint(path)
    assert facts == {"epoch": 1}
    assert tensors["a"].tolist() == [1, 1, 1]
    assert os.listdir(tmp_path) == [path.name]


def test_leftovers_of_a_killed_process_are_removed(tiny, tmp_path):
    (tmp_path / ".checkpoint.safetensors.12345").write_bytes(b"half a checkpoint")
    train(replace(CHOICES, recipe=replace(CHOICES.recipe, epochs=1)), tiny, tiny, Engine(), out=tmp_path)
    assert sorted(os.listdir(tmp_path)) == ["checkpoint.safetensors", "history.csv", "record.json"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, _: tensors.update({"0/weights/fc.weight": torch.ones(3)}), "fc.weight is missing or wrong"),
        (lambda tensors, facts: tensors.pop("0/weights/fc.bias"), "fc.bias is missing or wrong"),
        (lambda tensors, facts: facts.update(epoch=99), "epoch is missing or wrong"),
        (lambda tensors, facts: facts.update(epoch=-1), "epoch is missing or wrong"),
        (lambda tensors, facts: facts["history"][0].pop("loss"), "loss"),
    ],
)  # fmt: skip
def test_a_checkpoint_whose_parts_do_not_fit_is_refused(tiny, tmp_path, change, message):
    """As a faulty writer leaves it: its checksum is right."""
    path, once = tmp_path / "checkpoint.safetensors", replace(CHOICES, recipe=replace(CHOICES.recipe, epochs=1))
    train(once, tiny, tiny, Engine(), out=tmp_path)
    tensors, facts = load_checkpoint(path)
    change(tensors, facts)
    save_checkpoint(path, tensors, facts)
    with pytest.raises(ValueError, match=f"damaged checkpoint .*{message}.*delete it"):
        train(once, tiny, tiny, Engine(), out=tmp_path)


def test_another_safetensors_file_is_no_checkpoint(tmp_path):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ValueError, match="not a checkpoint of trueup"):
        load_checkpoint(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"set": "svhn"}, "unknown set 'svhn'; known: mnist, cifar10, digits"),
        ({"norm": "ln"}, "unknown norm 'ln'"),
        ({"seeds": ()}, "one or more different seeds"),
        ({"seeds": (1, 1)}, "one or more different seeds"),
    ],
)
def test_impossible_choices_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        replace(CHOICES, **change)
