"""Targets as files: read back the same, refused where damaged, foreign or newer."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from torch import nn

import trueup
from architectures import images, make


def test_saving_and_loading_gives_the_same_targets(tmp_path):
    model, x = make("mobilenet"), images(6)
    for resolution in (33, None):
        targets = trueup.calibrate(model, [x], resolution=resolution)
        targets.save(tmp_path / "targets.safetensors")
        loaded = trueup.Targets.load(tmp_path / "targets.safetensors")
        assert list(loaded) == list(targets)
        assert loaded.fingerprint == targets.fingerprint
        assert loaded.sampled.equal(targets.sampled)
        for name in targets:
            assert loaded[name].shape == targets[name].shape
            assert loaded[name].target.equal(targets[name].target)
            assert loaded[name].spread.equal(targets[name].spread)
            assert loaded[name].sample.equal(targets[name].sample)
            assert loaded[name].compression_error == targets[name].compression_error
        assert list(loaded.channels) == list(targets.channels) == trueup.sites(model, kind="norm")
        for name, site in targets.channels.items():
            assert (loaded.channels[name].shape, loaded.channels[name].images) == (site.shape, site.images)
            assert loaded.channels[name].total.equal(site.total)
            assert loaded.channels[name].sample.equal(site.sample)
        assert list(loaded.gate) == list(targets.gate)
        for name, site in targets.gate.items():
            assert (loaded.gate[name].shape, loaded.gate[name].images) == (site.shape, site.images)
            assert loaded.gate[name].total.equal(site.total)
            assert loaded.gate[name].sample.equal(site.sample)
        for rule in (trueup.Correction(), trueup.Evidence(), trueup.Evidence(budget=1, bands=False)):
            assert trueup.correct(model, loaded, rule)(x).equal(trueup.correct(model, targets, rule)(x))
        assert (loaded + targets).images == 12
    assert [path.name for path in tmp_path.iterdir()] == ["targets.safetensors"]


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "targets.safetensors"
    trueup.calibrate(make("vgg"), [images(4)], resolution=33).save(path)
    return path


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="damaged or cut short"):
        trueup.Targets.load(saved)


def test_a_foreign_file_is_refused(tmp_path):
    safetensors.torch.save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="holds no trueup targets"):
        trueup.Targets.load(tmp_path / "model.safetensors")
    (tmp_path / "text").write_text("not a tensor at all, but long enough to have a header")
    with pytest.raises(ValueError, match="no trueup targets file"):
        trueup.Targets.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match=r"no targets at .*nowhere.*trueup\.calibrate"):
        trueup.Targets.load(tmp_path / "nowhere")


def test_a_newer_file_is_refused(saved):
    tensors = safetensors.torch.load_file(saved)
    with safetensors.safe_open(saved, "pt") as file:
        metadata = file.metadata()
    safetensors.torch.save_file(tensors, saved, metadata | {"version": "4"})
    with pytest.raises(ValueError, match="format version 4.*reads up to 3.*upgrade"):
        trueup.Targets.load(saved)


def test_a_file_of_the_first_version_is_read_and_says_what_it_lacks(tmp_path):
    model, path = make("mobilenet"), tmp_path / "targets.safetensors"
    targets = trueup.calibrate(model, [images(4)], select=lambda site: site.kind == "activation")
    targets.save(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "channels"}
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, metadata | {"version": "1"})
    old = trueup.Targets.load(path)
    paper = trueup.Correction()
    assert trueup.correct(model, old, paper)(images(2)).equal(trueup.correct(model, targets, paper)(images(2)))
    with pytest.raises(ValueError, match=r"Evidence needs statistics of channels.*calibrate again.*kind='norm'"):
        trueup.correct(model, old, trueup.Evidence())
    shift = trueup.measure(model, old, images(2))
    assert shift.norms == ()
    assert shift.image.isnan().all()
    with pytest.raises(ValueError, match="cannot be added: one has sites"):
        old + trueup.calibrate(model, [images(4)])


def test_a_file_of_the_second_version_is_read_and_says_what_it_lacks(tmp_path):
    model, path = make("mobilenet"), tmp_path / "targets.safetensors"
    targets = trueup.calibrate(model, [images(8)])
    targets.save(path)
    with safetensors.safe_open(path, "pt") as file:
        metadata = {key: value for key, value in file.metadata().items() if key != "gate"}
    tensors = {k: v for k, v in safetensors.torch.load_file(path).items() if "/gate_" not in k}
    safetensors.torch.save_file(tensors, path, metadata | {"version": "2"})
    old, x = trueup.Targets.load(path), images(4) * 3
    assert old.gate == {}
    ungated = trueup.Evidence(budget=1)
    assert trueup.correct(model, old, ungated)(x).equal(trueup.correct(model, targets, ungated)(x))
    assert trueup.correct(model, old, trueup.Evidence(budget=0, least=0))(x).equal(model(x))
    with pytest.raises(ValueError, match=r"asks how unusual an image is.*calibrate again.*Evidence\(budget=1\)"):
        trueup.correct(model, old, trueup.Evidence())
    shift = trueup.measure(model, old, x)
    assert shift.norms == tuple(targets.channels)
    assert shift.image.isnan().all()
    assert (old + targets).gate == (targets + old).gate == {}


def test_a_file_that_lacks_something_is_refused(saved):
    tensors = safetensors.torch.load_file(saved)
    with safetensors.safe_open(saved, "pt") as file:
        metadata = file.metadata()
    records = json.loads(metadata["sites"])
    for broken in (
        metadata | {"sites": "{"},
        {key: value for key, value in metadata.items() if key != "fingerprint"},
        metadata | {"sites": json.dumps({"another": records["1"]})},
        metadata | {"sites": "[]"},
        metadata | {"fingerprint": "[]"},
        metadata | {"version": "abc"},
    ):
        safetensors.torch.save_file(tensors, saved, broken)
        with pytest.raises(ValueError, match="damaged"):
            trueup.Targets.load(saved)
    safetensors.torch.save_file(tensors | {"1/total": torch.zeros(7)}, saved, metadata)
    with pytest.raises(ValueError, match=r"damaged.*do not fit together.*\(7,\)"):
        trueup.Targets.load(saved)


def test_site_names_may_hold_slashes_and_start_alike(tmp_path):
    model = _Chain(nn.ModuleDict({"a": nn.ReLU(), "a/b": nn.ReLU(), "a/b/levels": nn.ReLU()}))
    targets = trueup.calibrate(model, [torch.randn(4, 6)])
    assert list(targets) == ["parts.a", "parts.a/b", "parts.a/b/levels"]
    targets.save(tmp_path / "targets")
    assert list(trueup.Targets.load(tmp_path / "targets")) == list(targets)


class _Chain(nn.Module):
    def __init__(self, parts):
        super().__init__()
        self.parts = parts

    def forward(self, x):
        for part in self.parts.values():
            x = part(x) - 0.1
        return x
