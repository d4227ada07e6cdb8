"""Segmentation in the runner: a small network on made pictures, with every method, counted by an independent oracle."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import confusion_matrix, jaccard_score
from torch import nn

from trueup_lab.data.corruptions import corrupt
from trueup_lab.data.images import Images, Normalisation
from trueup_lab.data.sets import SETS, ImageSet
from trueup_lab.evaluation import (
    STREAMS,
    BatchStatistics,
    Benchmark,
    Case,
    Correct,
    Mixed,
    Needs,
    Plan,
    Realign,
    SegmentationRow,
    Subject,
    Tent,
    Uncorrected,
    evaluate,
    mean_iou,
    parse_method,
    read_counts,
    read_subjects,
)
from trueup_lab.evaluation.methods import Default, Intent, Memo, Views
from trueup_lab.evaluation.predict import Segmented
from trueup_lab.experiments.segmentation import paired, summarise
from trueup_lab.tables import read_table

VOID = 3
NORMALISATION = Normalisation((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
COLOURS = torch.tensor([[200, 60, 60], [60, 170, 60], [70, 80, 200]])


def made(split: str, root=None) -> Images:
    """Bands and boxes of three colours, 40 x 56, with a frame of void: 66 for training, 24 for testing."""
    chance = torch.Generator().manual_seed(0 if split == "train" else 1)
    count = 66 if split == "train" else 24
    labels = torch.zeros(count, 40, 56, dtype=torch.uint8)
    for mask in labels:
        top, left = torch.randint(8, 24, (2,), generator=chance).tolist()
        mask[top:], mask[top - 4 : top + 8, left : left + 14] = 1, 2
    light = 0.8 + 0.4 * torch.rand(count, 1, 1, 1, generator=chance)
    images = COLOURS[labels.long()].permute(0, 3, 1, 2) * light + 12 * torch.randn(count, 3, 40, 56, generator=chance)
    labels[:, :2], labels[:, -2:] = VOID, VOID
    return Images(images.clamp(0, 255).to(torch.uint8), labels)


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.PReLU(8),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False),
        nn.BatchNorm2d(8),
        nn.PReLU(8),
        nn.ConvTranspose2d(8, 4, 2, stride=2),  # a fourth output, for void
    )


@pytest.fixture(scope="session")
def trained() -> nn.Module:
    torch.manual_seed(0)
    model, data = network(), made("train")
    optimiser = torch.optim.Adam(model.parameters(), 0.02)
    for step in range(60):
        some = torch.arange(16) + 16 * (step % 4)
        logits = model.train()(NORMALISATION(data.images[some]))
        loss = F.cross_entropy(logits, data.labels[some].long(), ignore_index=VOID)
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    return model.eval()


@pytest.fixture
def subject(trained, monkeypatch):
    monkeypatch.setitem(SETS, "scenes", ImageSet("scenes", made, 3, 3, dense=("red", "green", "blue")))
    return Subject("bands", 0, "scenes", "bn", NORMALISATION, "00000000", trained)


@pytest.fixture
def run(subject, tmp_path):
    def one(plan, out="rows.csv", **options):
        done = evaluate([subject], plan, tmp_path / out, targets=tmp_path / "targets", **options)
        return done, read_table(tmp_path / out, SegmentationRow)

    return one


SMALL = Plan((Uncorrected(), Mixed()), severities=(3,), only=("identity", "fog", "gaussian_noise"), batch=8)


def test_scores_are_those_of_an_independent_count(run, trained, tmp_path):
    """scikit-learn counts the model's answers on images that are corrupted here."""
    _, rows = run(SMALL)
    test = made("test")
    for row in (row for row in rows if row.method == "uncorrected"):
        images = test.images
        if row.corruption != "identity":
            images = corrupt(images, row.corruption, 3, family="imagenet-c", indices=torch.arange(24))
        with torch.inference_mode():
            p = trained(NORMALISATION(images)).softmax(1)
        known = test.labels != VOID
        truth, said = test.labels[known].numpy(), p.argmax(1)[known].numpy()
        each = jaccard_score(truth, said, labels=[0, 1, 2], average=None, zero_division=0)
        assert row.mean_iou == pytest.approx(100 * each.mean(), abs=1e-3)
        assert [float(value) for value in row.iou.split("/")] == pytest.approx(100 * each, abs=0.006)
        assert row.accuracy == pytest.approx(100 * (truth == said).mean(), abs=1e-3)
        confidence = p.amax(1)[known]
        gaps = torch.zeros(15).index_add_(
            0, ((confidence * 15).ceil() - 1).long(), torch.from_numpy(truth == said).float() - confidence
        )
        assert row.calibration_error == pytest.approx(100 * gaps.abs().sum().item() / len(truth), abs=0.01)
    clean, noisy = (
        next(r for r in rows if r.corruption == c and r.method == "uncorrected") for c in ("identity", "fog")
    )
    assert clean.mean_iou > 85
    assert noisy.mean_iou < clean.mean_iou
    assert (clean.images, clean.set_aside, clean.data, noisy.data) == (24, 0, "clean", "generated")


def test_a_prediction_of_no_class_is_wrong_and_void_is_nothing():
    said = torch.tensor([[[0, 1, 2, 0]]])
    counts = Segmented(1, torch.device("cpu"), 2)  # two classes; the third output is no class
    logits = F.one_hot(said, 3).permute(0, 3, 1, 2).float() * 9
    counts.note(torch.tensor([0]), logits, torch.tensor([[[0, 0, 1, 7]]], dtype=torch.uint8))
    assert counts.intersection.tolist() == [[1, 0]]
    assert counts.said.tolist() == [[1, 1]]
    assert counts.truth.tolist() == [[2, 1]]
    columns = counts.columns(slice(None))
    assert columns["mean_iou"] == pytest.approx(25.0)
    assert columns["accuracy"] == pytest.approx(100 / 3, abs=1e-3)


def test_a_class_that_is_nowhere_does_not_count():
    assert mean_iou(torch.tensor([3, 0, 0]), torch.tensor([4, 0, 2])).item() == pytest.approx(0.375)
    with pytest.raises(ValueError, match="no pixel of this test set has a class"):
        Segmented(1, torch.device("cpu"), 2).columns(slice(None))


def test_a_network_of_other_size_is_refused():
    counts = Segmented(1, torch.device("cpu"), 2)
    with pytest.raises(ValueError, match=r"returns \(1, 2, 5, 5\) for labels \(1, 10, 10\)"):
        counts.note(torch.tensor([0]), torch.zeros(1, 2, 5, 5), torch.zeros(1, 10, 10, dtype=torch.uint8))


METHODS = (
    Uncorrected(),
    Default(),
    Realign(),
    Correct(1.0, 0.2),
    Mixed(16),
    BatchStatistics(),
    Tent(),
    Intent(),
    parse_method("iabn"),
    parse_method("quantile"),
    parse_method("pea"),
)


def test_every_method_works_on_dense_outputs_and_the_default_helps(run, monkeypatch):
    monkeypatch.setattr("trueup.decide.contest.PERTURBATIONS_PER_IMAGE", 2)  # half the time
    done, rows = run(Plan((*METHODS, Views(), Memo()), severities=(4,), only=("identity", "contrast"), batch=8))
    assert done
    by = {(row.method, row.corruption): row for row in rows}
    assert {row.method for row in rows} == {method.name for method in METHODS}  # views cannot be laid over each other
    assert all(row.ms > 0 and 0 <= row.mean_iou <= 100 for row in rows)
    assert by["default", "contrast"].mean_iou > by["uncorrected", "contrast"].mean_iou + 3
    assert by["default", "identity"].mean_iou > by["uncorrected", "identity"].mean_iou - 1
    assert by["default", "contrast"].rule.startswith("Evidence(")
    assert by["bn-batch", "contrast"].rule == ""
    assert (by["tent", "contrast"].stream, by["tent", "contrast"].batch) == ("corruption", 8)
    assert (by["default", "contrast"].stream, by["default", "contrast"].calibrated) == ("any", 66)
    assert by["tent", "contrast"].iou != by["bn-batch", "contrast"].iou  # it learns after the first batch


def test_tent_takes_the_mean_entropy_over_pixels(trained):
    """One step by hand: batch statistics, gradients of the scales and shifts only, plain Adam."""
    images = NORMALISATION(made("test").images[:8])
    learner = Tent(rate=0.01).prepare(trained, None)
    learner(images)
    twin = network()
    twin.load_state_dict(trained.state_dict())
    norms = [module for module in twin.modules() if isinstance(module, nn.BatchNorm2d)]
    for module in norms:
        module.track_running_stats, module.running_mean, module.running_var = False, None, None
    mine = [p for norm in norms for p in (norm.weight, norm.bias)]
    p = twin.eval()(images).softmax(1)
    loss = -(p * p.log()).sum(1).mean()
    optimiser = torch.optim.Adam(mine, 0.01)
    optimiser.zero_grad()
    loss.backward()
    optimiser.step()
    torch.testing.assert_close(learner.trained, mine)


def test_intent_averages_each_pixels_probabilities(trained):
    x = NORMALISATION(made("test").images[:2])
    with torch.inference_mode():
        found = Intent().prepare(trained, None)(x).exp()
        parts = [
            Mixed(1 / ratio - 1 if ratio else 1e12).prepare(trained, None)(x).softmax(1) for ratio in np.arange(6) / 5
        ]
        certainty = torch.stack([(1 + (p * p.log()).sum(1)).exp() for p in parts])
        wanted = (torch.stack(parts) * (certainty / certainty.sum(0))[:, :, None]).sum(0)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("after", [0, 3])
def test_a_killed_run_goes_on_to_the_same_rows_and_counts(run, tmp_path, after):
    class KilledError(Exception):
        pass

    def kill(progress):
        if progress.done > after:
            raise KilledError

    with pytest.raises(KilledError):
        run(SMALL, report=kill)
    _, rows = run(SMALL)
    _, whole = run(SMALL, "whole.csv")
    assert sorted((*r.key, r.mean_iou, r.iou) for r in rows) == sorted((*r.key, r.mean_iou, r.iou) for r in whole)
    assert len(rows) == 6
    for row in rows:
        counts = read_counts(tmp_path / "rows.csv", row)
        assert counts["intersection"].shape == (24, 3)
        both = (counts[name].sum(0) for name in ("intersection", "union"))
        assert row.mean_iou == pytest.approx(100 * mean_iou(*both).item(), abs=1e-3)


def test_lost_counts_are_named(run, tmp_path):
    _, rows = run(replace(SMALL, only=("fog",)))
    for path in (tmp_path / "rows.images").iterdir():
        path.unlink()
    with pytest.raises(FileNotFoundError, match="counts per image of uncorrected on fog 3"):
        read_counts(tmp_path / "rows.csv", rows[0])


def test_a_stateless_method_gives_the_same_numbers_in_every_stream(run):
    class Pretending(Correct):
        needs = Needs(targets=True, batch=True)

    found = {}
    for stream in STREAMS:
        plan = replace(SMALL, methods=(Pretending(1.0, 0.2), BatchStatistics()), stream=stream, calibrate=20)
        _, rows = run(plan, f"{stream}.csv")
        found[stream] = {(row.method, row.corruption): row.iou for row in rows}
    for corruption in SMALL.only:
        values = [found[stream]["correct:lambda1=1.0,lambda2=0.2", corruption] for stream in STREAMS]
        numbers = np.array([[float(value) for value in text.split("/")] for text in values])
        assert np.ptp(numbers, axis=0).max() < 0.1  # rounding of another batch size
    assert found["single"]["bn-batch", "fog"] != found["corruption"]["bn-batch", "fog"]


def test_images_set_aside_are_calibrated_on_and_not_tested(subject, run):
    benchmark = Benchmark("scenes", set_aside=3)
    test = made("test").images
    assert benchmark.image_numbers.tolist() == [k for k in range(24) if k % 3]
    assert torch.cat(list(benchmark.calibration(batch=5))).equal(test[::3])
    assert benchmark.open(Case("identity", 0)).take(torch.tensor([0, 1, 2])).equal(test[[1, 2, 4]])
    _, rows = run(replace(SMALL, methods=(Uncorrected(), Realign()), set_aside=3, only=("identity",)))
    assert {(row.images, row.calibrated, row.set_aside) for row in rows} == {(16, 0, 3), (16, 8, 3)}
    _, rows = run(replace(SMALL, methods=(Uncorrected(),), only=("identity",)))
    assert len(rows) == 3  # the same set with all images is another row


def test_the_command_shows_mean_iou(call, tmp_path, monkeypatch):
    monkeypatch.setattr("trueup_lab.data.scenes.TEST", 4)
    arguments = [
        "--corruption",
        "identity",
        "--method",
        "uncorrected",
        "--set-aside",
        "2",
        "--out",
        tmp_path / "rows.csv",
    ]
    shown = call("evaluate", "unet-bn-scenes", *arguments, "--targets", tmp_path)
    assert shown.exit_code == 0, shown.output
    assert "mean IoU in %" in shown.output
    (row,) = read_table(tmp_path / "rows.csv", SegmentationRow)
    assert (row.images, row.set_aside) == (2, 2)
    assert row.mean_iou > 75


@pytest.mark.parametrize(
    ("options", "message"),
    [({"set_aside": 1}, "set_aside=1: expected 0, or"), ({"origin": "published"}, "no corrupted scenes was published")],
)
def test_nonsense_is_refused(run, options, message):
    with pytest.raises(ValueError, match=message):
        run(replace(SMALL, **options))


def test_segmentation_and_classification_do_not_share_a_file(run, subject, tmp_path):
    (classifier,) = read_subjects("resnet20-bn-digits")
    with pytest.raises(ValueError, match="evaluate them apart"):
        evaluate([subject, classifier], SMALL, tmp_path / "both.csv")
    run(replace(SMALL, methods=(Uncorrected(),), only=("identity",)))
    with pytest.raises(ValueError, match="rows.csv does not hold rows of EvaluationRow"):
        evaluate([classifier], Plan((Uncorrected(),), only=("fog",), images=4), tmp_path / "rows.csv")


def test_set_aside_is_for_segmentation():
    with pytest.raises(ValueError, match="set_aside=3"):
        Benchmark("digits", set_aside=3)


def test_paired_errors_are_the_jackknifes(run, tmp_path):
    """By hand: leave each image out of every set, and take the difference of the means anew."""
    chance = torch.Generator().manual_seed(0)
    union = torch.randint(50, 90, (2, 2, 7, 3), generator=chance)
    inter = torch.randint(0, 50, (2, 2, 7, 3), generator=chance)

    def score(which, images):
        each = [
            np.mean([inter[which, s, images, c].sum() / union[which, s, images, c].sum() for c in range(3)])
            for s in range(2)
        ]
        return 100 * np.array(each)

    everything = list(range(7))
    differences = score(0, everything) - score(1, everything)
    left = np.array(
        [(score(0, k) - score(1, k)).mean() for k in ([i for i in everything if i != j] for j in everything)]
    )
    error = np.sqrt(6 / 7 * ((left - left.mean()) ** 2).sum())
    found = paired((inter[0], union[0]), (inter[1], union[1]))
    assert found == pytest.approx((score(0, everything).mean(), differences.mean(), error, differences.min()), abs=1e-4)


def test_the_summary_holds_complete_groups_only_and_every_class(run, tmp_path):
    _, rows = run(Plan((Uncorrected(), Mixed()), only=("identity", "fog", "snow"), images=6))
    found = summarise(tmp_path / "rows.csv", "scenes")
    assert {row.group for row in found} == {"clean", "fog", "snow"}  # not the fifteen
    clean = {row.kind: row for row in found if (row.group, row.method) == ("clean", "bn-mix")}
    assert list(clean) == ["all", "red", "green", "blue"]
    assert clean["all"].mean_iou == pytest.approx(
        np.mean([clean[k].mean_iou for k in ("red", "green", "blue")]), abs=1e-2
    )
    fog = [row for row in rows if (row.method, row.corruption) == ("bn-mix", "fog")]
    mine = next(row for row in found if (row.group, row.method, row.kind) == ("fog", "bn-mix", "all"))
    assert mine.mean_iou == pytest.approx(np.mean([row.mean_iou for row in fog]), abs=1e-2)
    assert (mine.sets, mine.images) == (5, 6)
    assert next(r for r in found if r.method == "uncorrected").gain == 0


def test_the_confusion_of_the_model_is_that_of_scikit_learn(trained):
    data = made("test")
    counts = Segmented(24, torch.device("cpu"), 3)
    order = torch.randperm(24, generator=torch.Generator().manual_seed(1))
    counts.add(trained, data.images[order], data.labels[order], order, normalisation=NORMALISATION, batch=7)
    with torch.inference_mode():
        said = trained(NORMALISATION(data.images)).argmax(1)
    for k in (0, 23):
        known = data.labels[k] != VOID
        table = confusion_matrix(data.labels[k][known], said[k][known], labels=[0, 1, 2, 3])
        assert counts.intersection[k].tolist() == table.diagonal()[:3].tolist()
        assert counts.truth[k].tolist() == table.sum(1)[:3].tolist()
        assert counts.said[k].tolist() == table.sum(0)[:3].tolist()
