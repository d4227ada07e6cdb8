"""Targets as files: read back the same, refused where damaged, foreign or newer, and by the file's name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import random
from dataclasses import replace

import pytest
import safetensors.torch
import torch
from torch import nn

import trueup
from architectures import images, make
from trueup.targets.decision import LEFT_ALONE, Decision, Trial
from trueup.targets.file import VERSION


class Small(nn.Module):
    """An activation and a norm, with a file of a few kilobytes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.relu = nn.Conv2d(3, 2, 1), nn.BatchNorm2d(2), nn.ReLU()

    def forward(self, x):
        return self.relu(self.bn(self.conv(x)))


def small_targets():
    return trueup.calibrate(Small().eval(), [images(4, 8)], resolution=5, decide=False)


@pytest.fixture
def saved(tmp_path):
    path = tmp_path / "targets.safetensors"
    small_targets().save(path)
    return path


def parts(path):
    """Tensors and text of a file."""
    with safetensors.safe_open(path, "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, file.metadata()  # noqa: SIM118


def checksum(tensors, metadata):
    """Checksum of the contents: all text but the checksum, then each tensor by name."""
    text = {key: value for key, value in metadata.items() if key != "checksum"}
    digest = hashlib.sha256(json.dumps(text, sort_keys=True).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name}\0{tensor.dtype}\0{tuple(tensor.shape)}\0".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def forge(path, tensors, metadata):
    """Write a file with a right checksum and any contents, as a faulty writer would."""
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    safetensors.torch.save_file(tensors, path, metadata | {"checksum": checksum(tensors, metadata)})


@pytest.mark.parametrize("resolution", [33, None])
def test_saving_and_loading_gives_equal_targets(tmp_path, resolution):
    model, x = make("mobilenet"), images(6)
    targets = trueup.calibrate(model, [x], resolution=resolution, decide=False)
    targets.save(tmp_path / "targets.safetensors")
    loaded = trueup.Targets.load(tmp_path / "targets.safetensors")
    assert loaded == targets
    assert list(loaded.activations) == list(targets.activations)
    assert list(loaded.norms) == [site.name for site in trueup.sites(model) if site.kind == "norm"]
    assert list(loaded.gate) == list(targets.gate)
    for name, site in targets.activations.items():
        assert loaded.activations[name].shape == site.shape
        assert loaded.activations[name].target.equal(site.target)
        assert loaded.activations[name].spread.equal(site.spread)
        assert loaded.activations[name].compression_error == site.compression_error
    for rule in (trueup.Correction(), trueup.Evidence(), trueup.Evidence(budget=1, bands=False)):
        assert trueup.correct(model, loaded, rule)(x).equal(trueup.correct(model, targets, rule)(x))
    assert (loaded + targets).images == 12
    assert [path.name for path in tmp_path.iterdir()] == ["targets.safetensors"]


def test_a_small_file_keeps_fewer_images_to_a_byte_per_number(tmp_path):
    model, x = make("resnet"), images(4, seed=5) * 0.5
    targets = trueup.calibrate(model, images(240).split(60), decide=False)
    targets.save(tmp_path / "whole")
    targets.save(tmp_path / "small", small=True)
    found = trueup.Targets.load(tmp_path / "small")
    assert (tmp_path / "small").stat().st_size < 0.6 * (tmp_path / "whole").stat().st_size
    assert found.images == 240
    assert list(found.norms) == list(targets.norms)
    for name, norm in found.norms.items():
        mine = targets.norms[name].sample[:84].double()
        assert norm.total.equal(targets.norms[name].total)
        step = (mine.amax(0) - mine.amin(0)) / 255
        assert ((norm.sample.double() - mine).abs() <= 0.51 * step + 2e-3 * mine.abs()).all()
    for name, gate in found.gate.items():
        assert len(gate.sample) == len(targets.gate[name].sample) == 240
    with torch.no_grad():
        for rule in (trueup.Evidence(), trueup.Evidence(budget=1, strength=0.1)):
            plain, whole, less = model(x), *(trueup.correct(model, t, rule)(x) for t in (targets, found))
            assert (less - whole).norm() < 0.25 * (whole - plain).norm()
        paper = trueup.Correction(lambda1=0.5)
        assert trueup.correct(model, found, paper)(x).equal(trueup.correct(model, targets, paper)(x))
    found.save(tmp_path / "again", small=True)
    again = trueup.Targets.load(tmp_path / "again")
    assert all(again.norms[name].sample.sub(norm.sample).abs().max() < 1e-2 for name, norm in found.norms.items())


@pytest.fixture(scope="module")
def decided(one_answer_is_enough):
    """Targets of more images than a small file keeps, with a rule that changes something."""
    model = make("resnet")
    targets = trueup.calibrate(model, images(240).split(60))
    before, *others = targets.decision.trials
    one = next(trial for trial in others if not trial.rule.gated)
    one = replace(one, changed=0.0, gain=1.0, moved=0.0)
    return model, replace(targets, decision=replace(targets.decision, trials=(before, one)))


def test_a_small_file_loses_nothing_of_the_rule_that_calibration_chose(decided, tmp_path):
    model, targets = decided
    x = images(4, seed=5) * 0.5
    targets.save(tmp_path / "small", small=True)
    found = trueup.Targets.load(tmp_path / "small")
    assert found.rule == targets.rule
    assert trueup.correct(model, found)(x).equal(trueup.correct(model, targets)(x))
    other = replace(targets.rule, strength=0.5)
    assert not trueup.correct(model, found, other)(x).equal(trueup.correct(model, targets, other)(x))
    found.save(tmp_path / "again", small=True)
    assert trueup.correct(model, trueup.Targets.load(tmp_path / "again"))(x).equal(trueup.correct(model, targets)(x))
    with pytest.warns(UserWarning, match="small=False"):
        assert (found + found).images == 480


def test_a_small_file_holds_norms_that_a_tuned_rule_does_not_correct(tmp_path):
    """The last fifteenth of a model's norms is not corrected, and no weights are learned for it."""
    targets = decided_targets()
    before, other = targets.decision.trials
    decision = replace(targets.decision, trials=(before, replace(other, rule=trueup.Evidence(budget=1, tuned=True))))
    last = replace(targets.norms["bn"], weights=None)
    targets = replace(targets, norms=targets.norms | {"last": last}, decision=decision)
    targets.save(tmp_path / "small", small=True)
    found = trueup.Targets.load(tmp_path / "small")
    assert found.rule == targets.rule
    assert torch.equal(found.norms["bn"].reference(found.rule), targets.norms["bn"].reference(found.rule))
    assert found.norms["last"].settled is None
    assert found.norms["last"].weights is None


@pytest.mark.parametrize(
    ("row", "value"),
    [(0, torch.nan), (0, -torch.inf), (1, -1.0), (1, torch.inf), (2, 0.0), (2, torch.inf)],  # centre, spread, κ
)
def test_statistics_of_the_chosen_rule_that_cannot_be_right_are_refused(saved, row, value):
    decided_targets().save(saved, small=True)
    tensors, metadata = parts(saved)
    (name,) = (name for name in tensors if name.endswith("/settled"))
    tensors[name][row] = value
    forge(saved, tensors, metadata)
    with pytest.raises(ValueError, match=r"targets\.safetensors is a damaged .* the settled statistics of site 'bn'"):
        trueup.Targets.load(saved)


def test_a_sum_with_a_small_file_keeps_the_first_single_images_without_gaps(tmp_path):
    """Images are kept in the order of their names. Behind the first that the small file lacks, none can be kept."""
    model = make("compact")
    some, others = (trueup.calibrate(model, images(120, seed=k).split(60), decide=False) for k in (1, 2))
    some.save(tmp_path / "small", small=True)
    whole = some + others
    with pytest.warns(UserWarning, match="small=False"):
        less = trueup.Targets.load(tmp_path / "small") + others
    lost = set(some.sampled[84:].tolist())
    first = next(k for k, name in enumerate(whole.sampled.tolist()) if name in lost)
    for name, norm in less.norms.items():
        wanted = whole.norms[name].sample
        assert len(norm.sample) == first
        assert (norm.sample - wanted[:first]).abs().max() < 0.01 * wanted.abs().max()


def test_infinite_statistics_that_a_rule_settles_itself_are_no_fault():
    model = make("resnet")
    name, norm = next((name, module) for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d))
    with torch.no_grad():
        norm.weight[0] = 0  # a channel that never varies
    target = trueup.calibrate(model, images(60).split(20), decide=False).norms[name]
    varying, still = (target.settle(trueup.Evidence(strength=strength)) for strength in (0.1, 0.0))
    assert varying.settled[1][:, 0].isinf().all()
    assert varying.settled[1][:, 1:].isfinite().all()
    assert still.settled[2].isinf().any()
    assert varying.fault_of_settled() is still.fault_of_settled() is None


def test_large_files_are_small_by_default(tmp_path, monkeypatch):
    targets = trueup.calibrate(make("resnet"), images(240).split(60), decide=False)
    for limit, name in ((10**9, "whole"), (10**5, "reduced")):
        monkeypatch.setattr(trueup.Targets, "SMALL_ABOVE", limit)
        targets.save(tmp_path / name)
    assert trueup.Targets.load(tmp_path / "whole") == targets
    targets.save(tmp_path / "small", small=True)
    targets.save(tmp_path / "large", small=False)
    assert (tmp_path / "small").read_bytes() == (tmp_path / "reduced").read_bytes()
    assert (tmp_path / "large").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.parametrize("fault", ["infinite", "negative", "shape", "missing"])
def test_a_small_file_with_a_grid_that_cannot_be_right_is_refused(tmp_path, fault):
    path = tmp_path / "targets"
    small_targets().save(path, small=True)
    tensors, metadata = parts(path)
    grid = tensors.pop("bn/grid")
    faults = {"infinite": grid / 0, "negative": -1 - grid.abs(), "shape": grid[:1]}
    forge(path, tensors | ({"bn/grid": faults[fault]} if fault in faults else {}), metadata)
    with pytest.raises(ValueError, match="damaged trueup targets file"):
        trueup.Targets.load(path)


def test_equal_targets_are_equal_bytes(tmp_path):
    for name in ("one", "other"):
        small_targets().save(tmp_path / name)
    trueup.Targets.load(tmp_path / "one").save(tmp_path / "again")
    assert (tmp_path / "one").read_bytes() == (tmp_path / "other").read_bytes() == (tmp_path / "again").read_bytes()


def test_equality_compares_the_contents():
    targets = small_targets()
    assert targets == small_targets()
    assert targets != trueup.calibrate(Small().eval(), [images(5, 8)], resolution=5, decide=False)
    assert targets != "targets"
    relu = targets.activations["relu"]
    for changed in (
        {"total": relu.total + 1e-9},
        {"images": relu.images + 1},
        {"sample": relu.sample.flip(0)},
        {"levels": None},
    ):
        assert targets != replace(targets, activations={"relu": replace(relu, **changed)})
    assert targets != replace(targets, gate={})
    with pytest.raises(TypeError, match="unhashable"):
        hash(targets)


def test_the_file_is_plain_safetensors(saved):
    tensors, metadata = parts(saved)
    assert metadata["format"] == "trueup-targets"
    assert metadata["version"] == "4"
    assert metadata["checksum"] == checksum(tensors, metadata)
    assert tensors["relu/total"].equal(small_targets().activations["relu"].total)
    assert safetensors.torch.load_file(saved).keys() == tensors.keys()


def test_a_flipped_bit_is_refused_or_changes_nothing(saved):
    """Anywhere in the file. Some bits of its header mean nothing, such as a letter of an escape."""
    content, targets, chance, refused = saved.read_bytes(), small_targets(), random.Random(0), 0
    for _ in range(300):
        damaged = bytearray(content)
        damaged[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        saved.write_bytes(damaged)
        try:
            same = trueup.Targets.load(saved) == targets
        except ValueError as error:
            same = saved.name in str(error)
            refused += 1
        assert same
    assert refused > 290


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(saved, share):
    content = saved.read_bytes()
    saved.write_bytes(content[: int(len(content) * share)])
    with pytest.raises(ValueError, match="targets.safetensors is .*damaged or cut short"):
        trueup.Targets.load(saved)


def test_a_foreign_file_is_refused(tmp_path):
    safetensors.torch.save_file({"weight": torch.zeros(3)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="model.safetensors is a safetensors file without trueup targets"):
        trueup.Targets.load(tmp_path / "model.safetensors")
    (tmp_path / "text").write_text("not a tensor at all, but long enough to have a header")
    with pytest.raises(ValueError, match="text is not a trueup targets file"):
        trueup.Targets.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError, match=r"no targets at .*nowhere.*trueup\.calibrate"):
        trueup.Targets.load(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no targets at"):
        trueup.Targets.load(tmp_path)


def test_a_newer_file_is_refused(saved):
    tensors, metadata = parts(saved)
    forge(saved, tensors, metadata | {"version": str(VERSION + 1)})
    with pytest.raises(ValueError, match=f"format version {VERSION + 1}.*reads up to {VERSION}.*upgrade"):
        trueup.Targets.load(saved)


def record(metadata, group, name, **changes):
    """The text with other values in the record of one target; None removes a value."""
    records = json.loads(metadata[group])
    records[name] = {key: value for key, value in (records[name] | changes).items() if value is not None}
    return metadata | {group: json.dumps(records)}


def deep(text):
    """JSON nested deeper than a parser goes."""
    return "[" * 100_000 + text + "]" * 100_000


FAULTS = {
    "float32 sums": lambda t, m: (t | {"relu/total": t["relu/total"].float()}, m),
    "float32 norm": lambda t, m: (t | {"bn/total": t["bn/total"].float()}, m),
    "double samples": lambda t, m: (t | {"relu/sample": t["relu/sample"].double()}, m),
    "integer samples": lambda t, m: (t | {"bn/sample": t["bn/sample"].int()}, m),
    "float names": lambda t, m: (t | {"sampled": t["sampled"].float()}, m),
    "names of names": lambda t, m: (t | {"sampled": t["sampled"][None]}, m),
    "NaN": lambda t, m: (t | {"relu/total": t["relu/total"] * torch.nan}, m),
    "NaN squares": lambda t, m: (t | {"relu/square": t["relu/square"] * torch.nan}, m),
    "infinite norm": lambda t, m: (t | {"bn/total": t["bn/total"] * torch.inf}, m),
    "NaN sample": lambda t, m: (t | {"bn/gate_sample": t["bn/gate_sample"] * torch.nan}, m),
    "permuted sums": lambda t, m: (t | {"relu/total": t["relu/total"].flip(0)}, m),
    "permuted samples": lambda t, m: (t | {"relu/sample": t["relu/sample"].flip(1)}, m),
    "permuted levels": lambda t, m: (t | {"relu/levels": t["relu/levels"].flip(0)}, m),
    "equal levels": lambda t, m: (t | {"relu/levels": t["relu/levels"].round()}, m),
    "half the levels": lambda t, m: (t | {"relu/levels": t["relu/levels"] / 2}, m),
    "fewer sums": lambda t, m: (t | {"relu/total": t["relu/total"][:2]}, m),
    "fewer squares": lambda t, m: (t | {"relu/square": t["relu/square"][:2]}, m),
    "fewer quantiles": lambda t, m: (t | {"relu/sample": t["relu/sample"][:, :9]}, m),
    "fewer channels": lambda t, m: (t | {"bn/sample": t["bn/sample"][..., :1]}, m),
    "three moments": lambda t, m: (t | {"bn/total": t["bn/total"][:3], "bn/sample": t["bn/sample"][:, :3]}, m),
    "negative variances": lambda t, m: (t | {"bn/total": -t["bn/total"].abs()}, m),
    "negative squares": lambda t, m: (t | {"relu/square": -t["relu/square"] - 1}, m),
    "no sample": lambda t, m: (t | {"bn/sample": t["bn/sample"][:0]}, m),
    "more sampled than named": lambda t, m: (t | {"sampled": t["sampled"][:1]}, m),
    "more sampled than seen": lambda t, m: (t, record(m, "norms", "bn", images=3)),
    "other channels than its shape": lambda t, m: (t, record(m, "norms", "bn", shape=[7, 8, 8])),
    "no gate tensor": lambda t, m: ({k: v for k, v in t.items() if k != "bn/gate_total"}, m),
    "no gate sample": lambda t, m: ({k: v for k, v in t.items() if k != "bn/gate_sample"}, m),
    "no sampled": lambda t, m: ({k: v for k, v in t.items() if k != "sampled"}, m),
    "no squares": lambda t, m: ({k: v for k, v in t.items() if k != "relu/square"}, m),
    "negative images": lambda t, m: (t, record(m, "activations", "relu", images=-4)),
    "no images": lambda t, m: (t, record(m, "norms", "bn", images=0)),
    "images as text": lambda t, m: (t, record(m, "norms", "bn", images="4")),
    "half an image": lambda t, m: (t, record(m, "gate", "bn", images=4.5)),
    "images missing": lambda t, m: (t, record(m, "activations", "relu", images=None)),
    "true images": lambda t, m: (t, record(m, "activations", "relu", images=True)),
    "a negative shape": lambda t, m: (t, record(m, "activations", "relu", shape=[2, -8])),
    "a shape of text": lambda t, m: (t, record(m, "norms", "bn", shape="2x8")),
    "a number as shape": lambda t, m: (t, record(m, "norms", "bn", shape=8)),
    "a negative loss": lambda t, m: (t, record(m, "activations", "relu", loss=-1.0)),
    "a loss of text": lambda t, m: (t, record(m, "activations", "relu", loss="0")),
    "a loss of NaN": lambda t, m: (t, record(m, "activations", "relu", loss=float("nan"))),
    "another site": lambda t, m: (t, m | {"activations": json.dumps({"other": json.loads(m["activations"])["relu"]})}),
    "a list of sites": lambda t, m: (t, m | {"norms": "[]"}),
    "a record that is text": lambda t, m: (t, m | {"norms": '{"bn": "x"}'}),
    "no sites": lambda t, m: (t, m | {"norms": "{}", "activations": "{}"}),
    "broken JSON": lambda t, m: (t, m | {"activations": "{"}),
    "deep JSON": lambda t, m: (t, m | {"norms": deep("")}),
    "a deep fingerprint": lambda t, m: (t, m | {"fingerprint": deep("1")}),
    "a list as fingerprint": lambda t, m: (t, m | {"fingerprint": "[]"}),
    "a fingerprint of text": lambda t, m: (t, m | {"fingerprint": '{"conv.weight": [[1], "a", "b"]}'}),
    "no fingerprint": lambda t, m: (t, {k: v for k, v in m.items() if k != "fingerprint"}),
    "a version that is no number": lambda t, m: (t, m | {"version": "abc"}),
    "a version in other digits": lambda t, m: (t, m | {"version": "٤"}),
    "version zero": lambda t, m: (t, m | {"version": "0"}),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_file_that_cannot_be_right_is_refused(saved, fault):
    forge(saved, *fault(*parts(saved)))
    with pytest.raises(ValueError, match=r"targets\.safetensors is a damaged trueup targets file"):
        trueup.Targets.load(saved)


def decided_targets():
    """Targets with a drift and with a decision between two settings."""
    targets = small_targets()
    bn = targets.norms["bn"]
    trials = (
        Trial(LEFT_ALONE, 10, changed=0.0, kept=(6.0, 4.0), gain=0.0, gain_square=0.0),
        Trial(trueup.Evidence(budget=1), 10, changed=0.0, kept=(7.0, 5.0), gain=0.5, gain_square=0.25, moved=0.1),
    )
    weights = torch.linspace(0.5, 2, 3 * bn.shape[0]).view(3, -1) if bn.bands else torch.ones(2, bn.shape[0])
    drifting = replace(bn, drift=torch.ones_like(bn.total[:4]), drifted=20, weights=weights)
    return replace(targets, norms={"bn": drifting}, decision=Decision(trials, max_changed=0.2, refused=3))


def changed(key, *path, value=None):
    """A fault: the JSON text `key` with another value at a path; without a value, the entry is removed."""

    def fault(tensors, metadata):
        content = json.loads(metadata[key])
        inner = content
        for step in path[:-1]:
            inner = inner[step]
        if value is None:
            del inner[path[-1]]
        else:
            inner[path[-1]] = value
        return tensors, metadata | {key: json.dumps(content)}

    return fault


def trial(name, value):
    return changed("decision", "trials", 1, name, value=value)


DECIDED_FAULTS = {
    "weights of zero": lambda t, m: (t | {"bn/weights": 0 * t["bn/weights"]}, m),
    "NaN weights": lambda t, m: (t | {"bn/weights": t["bn/weights"] * torch.nan}, m),
    "float64 weights": lambda t, m: (t | {"bn/weights": t["bn/weights"].double()}, m),
    "weights of one statistic": lambda t, m: (t | {"bn/weights": t["bn/weights"][:1]}, m),
    "weights of another number of statistics": lambda t, m: (
        t | {"bn/weights": torch.ones(5 - len(t["bn/weights"]), 2)},
        m,
    ),
    "weights of other channels": lambda t, m: (t | {"bn/weights": t["bn/weights"][:, :1]}, m),
    "half a refused setting": changed("decision", "refused", value=0.5),
    "less than no refused settings": changed("decision", "refused", value=-1),
    "learned weights lost": lambda t, m: (
        {k: v for k, v in t.items() if k != "bn/weights"},
        changed("decision", "trials", 1, "rule", "tuned", value=True)(t, m)[1],
    ),
    "a setting that is NaN": changed("decision", "trials", 1, "rule", "strength", value=math.nan),
    "a setting of text": changed("decision", "trials", 1, "rule", "base", value="0.1"),
    "an unknown setting": changed("decision", "trials", 1, "rule", "other", value=1),
    "two weights": changed("decision", "trials", 1, "rule", "counts", value=[1, 1]),
    "a gain that is NaN": trial("gain", math.nan),
    "a gain of text": trial("gain", "0.5"),
    "a gain above one per image": trial("gain", 11.0),
    "a loss above one per image": trial("gain", -11.0),
    "a negative square": trial("gain_square", -1.0),
    "a square above one per image": trial("gain_square", 1e9),
    "scores that move by less than nothing": trial("moved", -0.5),
    "scores that move as far as true": trial("moved", True),
    "more kept than tried": trial("kept", [7.0, 1e9]),
    "less than nothing kept": trial("kept", [-1.0, 5.0]),
    "one level": trial("kept", [7.0]),
    "more changed than tried": trial("changed", 11),
    "other images than the first trial": trial("images", 9),
    "no tried images": trial("images", 0),
    "true tried images": trial("images", True),
    "countless tried images": trial("images", 1 << 70),
    "no uncorrected trial": changed("decision", "trials", 0),
    "a budget of zero": changed("decision", "max_changed", value=0),
    "a budget above one": changed("decision", "max_changed", value=1.5),
    "a number as note": changed("decision", "note", value=3),
    "no note": changed("decision", "note"),
    "negative drift": lambda t, m: (t | {"bn/drift": -t["bn/drift"]}, m),
    "NaN drift": lambda t, m: (t | {"bn/drift": t["bn/drift"] * torch.nan}, m),
    "float32 drift": lambda t, m: (t | {"bn/drift": t["bn/drift"].float()}, m),
    "drift of fewer statistics": lambda t, m: (t | {"bn/drift": t["bn/drift"][:1]}, m),
    "drift of no images": changed("norms", "bn", "drifted", value=0),
    "drift of half an image": changed("norms", "bn", "drifted", value=0.5),
    "drift lost": lambda t, m: ({k: v for k, v in t.items() if k != "bn/drift"}, m),
    "countless images": changed("norms", "bn", "images", value=1 << 70),
    "drift of a gate that has none": changed("gate", "bn", "drifted", value=4),
    "a lost norm": lambda t, m: (t, m | {"norms": "{}"}),
    "a lost gate": lambda t, m: (t, m | {"gate": "{}"}),
    "a site twice": lambda t, m: (t, m | {"sites": m["sites"].replace('"relu"', '"bn"', 1)}),
    "a site's dimension is true": changed("sites", "sites", 0, 4, value=True),
    "a site's dimension is far out": changed("sites", "sites", 0, 4, value=1 << 40),
    "a site of another kind": changed("sites", "sites", 0, 1, value="relu"),
    "text for a list of sites": changed("sites", "left", value="bn"),
    "an infinite fingerprint": changed("fingerprint", "conv.weight", 2, value=math.inf),
    "a fingerprint of NaN": changed("fingerprint", "conv.weight", 2, value=math.nan),
    "a fingerprint with a negative norm": changed("fingerprint", "conv.weight", 1, value=-1.0),
    "a fingerprint of true": changed("fingerprint", "conv.weight", 2, value=True),
    "a fingerprint with a negative side": changed("fingerprint", "conv.weight", 0, 0, value=-2),
}  # fmt: skip


@pytest.mark.parametrize("fault", DECIDED_FAULTS.values(), ids=DECIDED_FAULTS.keys())
def test_a_decided_file_that_cannot_be_right_is_refused(saved, fault):
    decided_targets().save(saved)
    assert trueup.Targets.load(saved) == decided_targets()
    forge(saved, *fault(*parts(saved)))
    with pytest.raises(ValueError, match=r"targets\.safetensors is a damaged trueup targets file"):
        trueup.Targets.load(saved)


def test_a_header_of_deep_json_is_refused(saved):
    header = deep("").encode()
    saved.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(ValueError, match=r"targets\.safetensors is not a trueup targets file"):
        trueup.Targets.load(saved)


def test_contents_that_do_not_match_the_checksum_are_refused(saved):
    tensors, metadata = parts(saved)
    for broken in (
        (tensors | {"relu/total": tensors["relu/total"] + 1e-9}, metadata),
        (tensors, metadata | {"fingerprint": metadata["fingerprint"].replace("conv", "cone")}),
        (tensors, {key: value for key, value in metadata.items() if key != "checksum"}),
    ):
        safetensors.torch.save_file(*[broken[0], saved, broken[1]])
        with pytest.raises(ValueError, match="do not match its checksum"):
            trueup.Targets.load(saved)


def as_version(path, version, *, groups=("sites", "channels", "gate"), targets=None):
    """Write targets as an earlier version did: other names of the groups, no checksum, and less of them."""
    names = {"sites": "activations", "channels": "norms", "gate": "gate"}
    targets.save(path)
    tensors, metadata = parts(path)
    text = {old: metadata[names[old]] for old in groups}
    text |= {"format": "trueup-targets", "version": str(version), "fingerprint": metadata["fingerprint"]}
    tensors = {k: v for k, v in tensors.items() if "gate" in groups or "/gate_" not in k}
    safetensors.torch.save_file(tensors, path, text)
    return trueup.Targets.load(path)


def test_a_file_of_the_third_version_is_read_whole(tmp_path):
    model, x = make("mobilenet"), images(4) * 3
    targets = trueup.calibrate(model, [images(8)], decide=False)
    old = as_version(tmp_path / "old", 3, targets=targets)
    assert old == dataclasses.replace(targets, sites=old.sites)
    assert not old.sites
    rule = trueup.Evidence()
    assert trueup.correct(model, old, rule)(x).equal(trueup.correct(model, targets, rule)(x))


def test_a_file_of_the_second_version_is_read_and_says_what_it_lacks(tmp_path):
    model, x = make("mobilenet"), images(4) * 3
    targets = trueup.calibrate(model, [images(8)], decide=False)
    old = as_version(tmp_path / "old", 2, groups=("sites", "channels"), targets=targets)
    assert old.gate == {}
    ungated = trueup.Evidence(budget=1)
    assert trueup.correct(model, old, ungated)(x).equal(trueup.correct(model, targets, ungated)(x))
    assert trueup.correct(model, old, trueup.Evidence(budget=0, least=0))(x).equal(model(x))
    with pytest.raises(
        ValueError, match=r"these targets have no statistics for it.*calibrate again.*Evidence\(budget=1\)"
    ):
        trueup.correct(model, old, trueup.Evidence())
    shift = trueup.measure(model, old, x)
    assert shift.norms == tuple(targets.norms)
    assert shift.image_rank.isnan().all()
    assert (old + targets).gate == (targets + old).gate == {}


def test_a_file_of_the_first_version_is_read_and_says_what_it_lacks(tmp_path):
    model = make("mobilenet")
    targets = trueup.calibrate(model, [images(4)], select=lambda site: site.kind == "activation", decide=False)
    old = as_version(tmp_path / "old", 1, groups=("sites",), targets=targets)
    paper = trueup.Correction()
    assert trueup.correct(model, old, paper)(images(2)).equal(trueup.correct(model, targets, paper)(images(2)))
    with pytest.raises(ValueError, match=r"Evidence needs targets of norm sites.*earlier version.*calibrate again"):
        trueup.correct(model, old, trueup.Evidence())
    shift = trueup.measure(model, old, images(2))
    assert shift.norms == ()
    assert shift.image_rank.isnan().all()
    with pytest.raises(ValueError, match="cannot be added: only one has a target of the site .stem.1."):
        old + trueup.calibrate(model, [images(4)], decide=False)


@pytest.mark.parametrize("fault", ["NaN", "permuted levels", "images as text", "no gate tensor"])
def test_an_old_file_without_a_checksum_is_checked_too(saved, fault):
    tensors, metadata = FAULTS[fault](*parts(saved))
    text = {"sites": metadata["activations"], "channels": metadata["norms"], "gate": metadata["gate"]}
    text |= {"format": "trueup-targets", "version": "3", "fingerprint": metadata["fingerprint"]}
    safetensors.torch.save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, saved, text)
    with pytest.raises(ValueError, match=r"targets\.safetensors is a damaged"):
        trueup.Targets.load(saved)


def test_a_crash_while_saving_leaves_the_old_file(saved, monkeypatch):
    before = saved.read_bytes()
    monkeypatch.setattr("os.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        (small_targets() + small_targets()).save(saved)
    assert saved.read_bytes() == before
    assert [path.name for path in saved.parent.iterdir()] == [saved.name]


def test_site_names_may_hold_slashes_and_start_alike(tmp_path):
    class Chain(nn.Module):
        def __init__(self, parts):
            super().__init__()
            self.parts = parts

        def forward(self, x):
            for part in self.parts.values():
                x = part(x) - 0.1
            return x

    model = Chain(nn.ModuleDict({"a": nn.ReLU(), "a/b": nn.ReLU(), "a/b/levels": nn.ReLU(), "ä": nn.ReLU()}))
    targets = trueup.calibrate(model, [torch.randn(4, 6)], decide=False)
    assert list(targets.activations) == ["parts.a", "parts.a/b", "parts.a/b/levels", "parts.ä"]
    targets.save(tmp_path / "targets")
    assert trueup.Targets.load(tmp_path / "targets") == targets
