"""Models in files, and the ones that come with the package."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from trueup_lab import models
from trueup_lab.data.sets import SETS
from trueup_lab.models import Record, ResNet20, read_models, read_record, save_models, zoo
from trueup_lab.models.weights import weights_of

RECORD = Record("mnist", "gn", channels=1, groups=4, accuracy={3: 0.5, 8: 0.25}, training={"recipe": {"a": 1}})


def some_weights(record, seeds):
    return {seed: weights_of(record.build()) for seed in seeds}


def test_models_come_back_as_they_were_but_for_rounding(tmp_path):
    weights = some_weights(RECORD, (3, 8))
    save_models(tmp_path / "m.safetensors", weights, RECORD)
    assert read_record(tmp_path / "m.safetensors") == RECORD
    back = read_models(tmp_path / "m.safetensors")
    assert list(back) == [3, 8]
    for seed, model in back.items():
        assert not model.training
        assert model.bn1.num_groups == 4
        for key, value in weights_of(model).items():
            assert value.dtype == torch.float32
            want = weights[seed][key]
            assert torch.equal(value, want.half().float() if want.dim() > 1 else want), key


def test_batch_norms_statistics_survive_outside_the_range_of_float16(tmp_path):
    record = Record("mnist", "bn", channels=1)
    weights = some_weights(record, (0,))
    weights[0]["bn1.running_var"] = torch.full((16,), 1e6)
    save_models(tmp_path / "m.safetensors", weights, record)
    assert read_models(tmp_path / "m.safetensors")[0].bn1.running_var[0] == 1e6


def test_files_from_before_there_were_other_architectures_hold_resnet20s(tmp_path):
    save_models(tmp_path / "m.safetensors", some_weights(RECORD, (3,)), RECORD)
    with safe_open(tmp_path / "m.safetensors", "pt") as file:
        facts = json.loads(file.metadata()["trueup"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    del facts["architecture"]
    save_file(tensors, tmp_path / "older.safetensors", {"trueup": json.dumps(facts)})
    assert read_record(tmp_path / "older.safetensors") == RECORD
    assert isinstance(read_models(tmp_path / "older.safetensors")[3], ResNet20)


def test_other_files_and_other_formats_are_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    save_file({"a": torch.ones(1)}, path)
    with pytest.raises(ValueError, match="holds no models of trueup"):
        read_record(path)
    save_file({"a": torch.ones(1)}, path, {"trueup": json.dumps({"format": 99, "kind": "models"})})
    with pytest.raises(ValueError, match="is in format 99"):
        read_models(path)


def test_a_model_of_the_zoo_loads_by_name(tmp_path, monkeypatch):
    monkeypatch.setattr(zoo, "FOLDER", tmp_path)
    weights = some_weights(RECORD, (3,))
    save_models(tmp_path / f"{RECORD.name}.safetensors", weights, RECORD)
    assert models.names() == ("resnet20-gn-mnist",)
    model = models.load("resnet20-gn-mnist")
    assert isinstance(model, ResNet20)
    assert models.record("resnet20-gn-mnist") == RECORD


@pytest.mark.parametrize("name", ["resnet20-ln-mnist", "../resnet20-gn-mnist"])
def test_an_unknown_name_is_answered_with_the_known_ones(tmp_path, monkeypatch, name):
    monkeypatch.setattr(zoo, "FOLDER", tmp_path)
    with pytest.raises(ValueError, match="known: none; this installation"):
        models.load(name)
    save_models(tmp_path / "resnet20-gn-mnist.safetensors", some_weights(RECORD, (3,)), RECORD)
    with pytest.raises(ValueError, match=r"no model called .* known: resnet20-gn-mnist"):
        models.load(name)


@pytest.mark.parametrize("name", models.names())
def test_every_model_of_the_zoo_is_small_and_says_what_it_is(name):
    record = models.record(name)
    assert record.name == name
    assert len(record.accuracy) == 1
    assert record.training["recipe"]["epochs"] > 0
    size = (zoo.FOLDER / f"{name}.safetensors").stat().st_size
    assert size < (600_000 if record.architecture == "resnet20" else 6_000_000)


@pytest.mark.data
@pytest.mark.parametrize("name", [n for n in models.names() if not n.endswith(("digits", "scenes"))])
def test_every_model_of_the_zoo_is_as_accurate_as_its_record(name, data_path):
    record = models.record(name)
    data_path({"mnist": "MNIST", "cifar10": "cifar-10-batches-py"}[record.set])
    count = 1000 if record.architecture == "resnet20" else 300
    test = SETS[record.set].load("test").first(count)
    with torch.inference_mode():
        logits = models.load(name)(SETS[record.set].normalisation(test.images))
    (accuracy,) = record.accuracy.values()
    right = float((logits.argmax(1) == test.labels).double().mean())
    # Three standard deviations of a sample of that size.
    assert abs(right - accuracy) <= 3 * (accuracy * (1 - accuracy) / count) ** 0.5 + 1e-9


@pytest.mark.parametrize("folder", [zoo.FOLDER, Path(__file__).parents[3] / "results" / "models"])
def test_every_model_that_comes_along_has_its_checksum_listed(folder):
    listed = dict(reversed(line.split()) for line in (folder / "SHA256SUMS").read_text().splitlines())
    assert listed == {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.glob("*.safetensors")}


def test_a_file_that_differs_from_the_listed_checksum_is_refused(tmp_path):
    path = tmp_path / "m.safetensors"
    save_models(path, some_weights(RECORD, (3,)), RECORD)
    (tmp_path / "SHA256SUMS").write_text(f"{'0' * 64}  m.safetensors\n")
    for read in (read_models, read_record):
        with pytest.raises(ValueError, match=r"m\.safetensors is damaged: it does not match SHA256SUMS"):
            read(path)
    save_models(path, some_weights(RECORD, (3,)), RECORD)  # lists what it writes
    assert list(read_models(path)) == [3]


def test_a_flipped_bit_in_a_model_is_noticed(tmp_path):
    path = tmp_path / "m.safetensors"
    save_models(path, some_weights(RECORD, (3,)), RECORD)
    content = bytearray(path.read_bytes())
    for at in range(200, len(content), len(content) // 30):
        content[at] ^= 1
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"m\.safetensors"):
            read_models(path)
        content[at] ^= 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, f: (t | {"3/fc.bias": t["3/fc.bias"] * float("nan")}, f), "fc.bias holds NaN"),
        (lambda t, f: (t | {"3/fc.bias": t["3/fc.bias"].half()}, f), "3/fc.bias is torch.float16"),
        (lambda t, f: ({k: v for k, v in t.items() if k != "3/fc.bias"}, f), "fc.bias"),
        (lambda t, f: (t | {"3/fc.bias": t["3/fc.bias"][:3].clone()}, f), "fc.bias"),
        (lambda t, f: ({k.replace("3/", "x/"): v for k, v in t.items()}, f), "damaged model file"),
        (lambda t, f: (t, f | {"norm": "xn"}), "unknown norm 'xn'"),
        (lambda t, f: (t, f | {"set": "svhn"}), "unknown set 'svhn'"),
        (lambda t, f: (t, f | {"channels": "1"}), "1 channels"),
        (lambda t, f: (t, f | {"classes": -3}), "-3 classes"),
        (lambda t, f: (t, f | {"more": 1}), "unexpected keyword"),
        (lambda t, f: (t, {k: v for k, v in f.items() if k != "accuracy"}), "no 'accuracy'"),
        (lambda t, f: (t, [f]), "its facts are list"),
    ],
)
def test_a_file_without_a_checksum_is_checked_in_every_part(tmp_path, change, message):
    path = tmp_path / "m.safetensors"
    save_models(path, some_weights(RECORD, (3,)), RECORD)
    with safe_open(path, "pt") as file:
        facts = json.loads(file.metadata()["trueup"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    tensors, facts = change(tensors, facts)
    save_file(tensors, path, {"trueup": json.dumps(facts)})
    with pytest.raises(ValueError, match=r"m\.safetensors.*" + re.escape(message)):
        read_models(path)
